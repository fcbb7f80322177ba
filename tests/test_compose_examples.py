"""The compose files of deploy/compose: that they say what our processes do. Runs none of them; a Docker Engine does."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from blockplane.client.health import PROCESSES
from blockplane.protos.config import Config, load_config

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "deploy" / "compose"
SHELL = {"ENGINE_HOST": "first.example", "GROUP": "east"}
"""What two-hosts.yml asks of the shell."""


def services(path: Path) -> dict[str, dict[str, Any]]:
    """As compose reads the file in a shell that has nothing but SHELL."""

    def of_shell(variable: re.Match[str]) -> str:
        name, default = variable[1], variable[3]
        return SHELL[name] if variable[2] == ":?" else SHELL.get(name, default)

    text = re.sub(r"\$\{(\w+)(:?[-?])([^}]*)\}", of_shell, path.read_text())
    found: dict[str, dict[str, Any]] = yaml.safe_load(text)["services"]
    return found


EXAMPLES = {path.stem: services(path) for path in sorted(FOLDER.glob("*.yml"))}


def environment(service: dict[str, Any]) -> dict[str, str]:
    """Without what the shell may set and does not."""
    return {name: str(value) for name, value in service["environment"].items() if value is not None}


def config_of(service: dict[str, Any]) -> Config:
    return load_config({}, environment(service))


def configs(example: str, process: str) -> dict[str, Config]:
    return {name: config_of(service) for name, service in EXAMPLES[example].items() if service["command"] == [process]}


def test_there_are_the_examples_that_are_told_of() -> None:
    assert {*EXAMPLES} == {"tensor-parallel", "two-hosts", "prefill-decode"}


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_setting_exists_and_every_process_is_there(example: str) -> None:
    names = {f"BLOCKPLANE_{name.upper()}" for name in Config.__slots__} | {"HOME"}
    for service in EXAMPLES[example].values():
        assert service["environment"].keys() <= names
    assert {service["command"][0] for service in EXAMPLES[example].values()} == {*PROCESSES}


@pytest.mark.parametrize("example", EXAMPLES)
def test_containers_are_confined_and_restarted_as_those_of_the_compose_file_at_the_root(example: str) -> None:
    like = services(ROOT / "docker-compose.yml")["engine"]
    for service in EXAMPLES[example].values():
        for key in ("restart", "init", "stop_grace_period", "read_only", "tmpfs", "cap_drop", "security_opt"):
            assert service[key] == like[key]
        assert service["build"]["args"].keys() == like["build"]["args"].keys()
        assert (FOLDER / service["build"]["context"]).resolve() == ROOT
        assert (ROOT / service["build"]["dockerfile"]).is_file()


@pytest.mark.parametrize("example", EXAMPLES)
def test_all_dial_where_the_engine_listens(example: str) -> None:
    (engine,) = configs(example, "engine").values()
    host, port = ("first.example" if example == "two-hosts" else "engine"), engine.engine_address.rpartition(":")[2]
    for process in ("frontend", "worker"):
        for config in configs(example, process).values():
            assert config.engine_address == f"{host}:{port}"


@pytest.mark.parametrize("example", ["tensor-parallel", "two-hosts"])
def test_a_group_has_every_rank_once_and_what_it_sends_in_plaintext_is_allowed(example: str) -> None:
    (engine,) = configs(example, "engine").values()
    workers = configs(example, "worker").values()
    groups = {config.group for config in workers}
    assert len(groups) == (1 if example == "two-hosts" else 2)
    ranks = sorted((config.group, config.rank) for config in workers)
    assert ranks == [(group, rank) for group in sorted(groups) for rank in range(engine.tensor_parallel_size)]
    assert engine.tensor_parallel_size == 2
    assert {config.plaintext for config in workers} == {"anywhere"}


def test_processes_that_share_a_machine_s_network_share_no_port() -> None:
    assert {service["network_mode"] for service in EXAMPLES["two-hosts"].values()} == {"host"}
    every = [config_of(service) for service in EXAMPLES["two-hosts"].values()]
    ports = [config.metrics_address.rpartition(":")[2] for config in every] + ["50050", "50051"]
    assert len({*ports}) == len(ports)


def test_two_go_on_with_what_one_computes_and_lets_them_read() -> None:
    workers = configs("prefill-decode", "worker")
    assert {name: config.role for name, config in workers.items()} == {"prefill": "prefill", "decode": "decode"}
    assert EXAMPLES["prefill-decode"]["decode"]["scale"] == 2
    assert workers["prefill"].transfer_address
