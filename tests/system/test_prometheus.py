"""A real Prometheus beside a real system: our configuration, our rules, and every panel's question.

`prometheus` and `promtool` are those of the path, or of the folder that BLOCKPLANE_PROMETHEUS names; without them it is
all skipped. Debian has both: `apt-get install prometheus`.
"""

import json
import os
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from observed_system import DEPLOY, RULES, ObservedSystem, board_queries, observed_system
from processes import free_port, wait_for

from blockplane.protos.errors import InvalidRequestError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

CONFIGURATION = """
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
rule_files: ["{rules}"]
scrape_configs:
  - job_name: blockplane
    static_configs:
"""
TARGET = """
      - {{targets: ["127.0.0.1:{port}"], labels: {{service: {kind}}}}}
"""


def program(name: str) -> str:
    found = shutil.which(name, path=os.environ.get("BLOCKPLANE_PROMETHEUS", os.environ.get("PATH")))
    if found is None:
        pytest.skip(f"there is no {name} here")
    return found


def ask(address: str, path: str, **fields: str) -> Any:
    with urllib.request.urlopen(f"http://{address}/api/v1/{path}?{urllib.parse.urlencode(fields)}") as response:
        return json.load(response)["data"]


def is_ready(address: str) -> bool:
    try:
        return urllib.request.urlopen(f"http://{address}/-/ready").status == 200
    except OSError:
        return False


def work(observed: ObservedSystem, seconds: float) -> None:
    """Requests of several lengths, one of them refused now and then."""

    def one(number: int) -> None:
        with observed.system.client() as client:
            prompt = list(range(1, 40 + number))
            while time.monotonic() < end:
                list(client.generate(prompt, max_tokens=20 + number, ignore_eos=True))
                with pytest.raises(InvalidRequestError):
                    list(client.generate(prompt, max_tokens=0))

    end = time.monotonic() + seconds
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(one, range(3)))


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ObservedSystem]]:
    """Its address, and the system that it has scraped, which has worked all the while."""
    folder, address = tmp_path_factory.mktemp("prometheus"), f"127.0.0.1:{free_port()}"
    binary = program("prometheus")
    with observed_system(folder, "--num-draft-tokens", "2", "--kv-cache-bytes", "50000000") as observed:
        targets = "".join(TARGET.format(port=port, kind=kind) for kind, port in observed.ports.items())
        (folder / "prometheus.yml").write_text(CONFIGURATION.format(rules=RULES) + targets)
        flags = (
            f"--config.file={folder}/prometheus.yml",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address={address}",
        )
        with (folder / "log").open("w") as log:
            process = subprocess.Popen([binary, *flags], stdout=log, stderr=log)
        try:
            wait_for(lambda: is_ready(address), "Prometheus is ready", seconds=60)
            work(observed, seconds=20)
            yield address, observed
        finally:
            process.kill()
            process.wait()


@pytest.mark.parametrize("what", [("config", DEPLOY / "prometheus" / "prometheus.yml"), ("rules", RULES)])
def test_promtool_finds_nothing_wrong(what: tuple[str, Path]) -> None:
    done = subprocess.run([program("promtool"), "check", *what], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "SUCCESS" in done.stdout


def test_every_process_is_scraped_and_every_panel_s_question_has_an_answer(
    prometheus: tuple[str, ObservedSystem],
) -> None:
    address, _ = prometheus
    up = {each["metric"]["service"]: each["value"][1] for each in ask(address, "query", query="up")["result"]}
    assert up == {"engine": "1", "frontend": "1", "worker": "1"}
    unanswered = []
    for panel, expressions in board_queries().items():
        for expression in expressions:
            for variable, value in (("$__rate_interval", "20s"), ("$model_name", ".*"), ("$engine", ".*")):
                expression = expression.replace(variable, value)
            if not ask(address, "query", query=expression)["result"]:
                unanswered.append((panel, expression))
    assert unanswered == []


def test_no_rule_complains_of_a_system_that_works_and_one_does_once_no_worker_is_left(
    prometheus: tuple[str, ObservedSystem],
) -> None:
    address, observed = prometheus

    def rules() -> dict[str, str]:
        (group,) = ask(address, "rules")["groups"]
        assert [rule["lastError"] for rule in group["rules"] if rule["health"] != "ok"] == []
        return {rule["name"]: rule["state"] for rule in group["rules"]}

    assert set(rules().values()) == {"inactive"}
    observed.system.processes("worker")[0].kill()
    wait_for(lambda: rules()["BlockplaneNoWorkerReady"] != "inactive", "the rule sees it")
    assert rules()["BlockplaneProcessDown"] == "pending", "the worker's own port is gone, too"
