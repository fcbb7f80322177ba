"""Every sub-command against a running system on the synthetic model."""

import asyncio
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from processes import System, free_port, running_system
from synthetic_oracle import continue_greedily

from blockplane.client import cli
from blockplane.client.async_client import AsyncClient

BLOCK_SIZE = 16
BOS = 256
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}[assistant]"
)

Command = Callable[..., str]


@pytest.fixture(scope="module")
def system() -> Iterator[System]:
    with running_system(f"--block-size={BLOCK_SIZE}", "--num-blocks=1001", "--max-model-len=2048") as system:
        yield system


@pytest.fixture
def command(
    system: System, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Command:
    """Runs a sub-command on a folder of its own, which must end with `status`, and returns its output."""
    monkeypatch.setenv("BLOCKPLANE_ADDRESS", system.address)
    monkeypatch.setenv("BLOCKPLANE_ENGINE_ADDRESS", system.engine_address)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, stdin: str = "", status: int = 0) -> str:
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        ended = cli.main(arguments)
        out, err = capsys.readouterr()
        assert ended == status, err
        return out + err

    return run


def test_many_requests_of_one_loop_are_answered_as_the_oracle_says(system: System) -> None:
    prompts = [[ord(letter) for letter in f"{number} blocks"] for number in range(40)]

    async def run() -> list[list[int]]:
        async with AsyncClient(system.address) as client:
            await client.wait_until_serving(timeout=60)

            async def answer(prompt: list[int]) -> list[int]:
                deltas = client.generate(prompt, max_tokens=20, temperature=0, ignore_eos=True)
                return [token_id async for delta in deltas for token_id in delta.token_ids]

            return await asyncio.gather(*map(answer, prompts))

    assert asyncio.run(run()) == [continue_greedily(prompt, 20, ignore_eos=True) for prompt in prompts]


def test_status_tells_that_it_serves(command: Command, system: System) -> None:
    told = json.loads(command("status", "--json"))
    assert (told["serving"], told["model"]["name"], told["address"]) == (True, "synthetic", system.address)
    (worker,) = told["workers"]
    assert (worker["state"], worker["num_blocks"], worker["block_size"]) == ("ready", 1001, BLOCK_SIZE)


def test_a_chats_turns_are_found_in_the_prefix_cache(command: Command) -> None:
    Path("chat.jinja").write_text(TEMPLATE)
    flags = ("--template", "chat.jinja", "--temperature", "0", "--max-tokens", "20", "--ignore-eos", "--usage")
    shown = command("chat", *flags, stdin="first line of a chat\nsecond\n").splitlines()
    prompt = [BOS, *b"[user]first line of a chat[assistant]"]
    expected = bytes(continue_greedily(prompt, 20, ignore_eos=True)).decode(errors="replace")
    assert shown[0] == expected, "the template's BOS token is the only one"
    assert shown[-2] == f"({len(prompt)} prompt tokens, 0 of them cached; 20 output tokens)"
    num_cached = int(shown[-1].split(", ")[1].split()[0])
    assert num_cached >= len(prompt) // BLOCK_SIZE * BLOCK_SIZE > 0


def test_bench_measures_what_the_server_did(command: Command) -> None:
    lines = [{"prompt": f"{number}" * 40, "max_tokens": 10 + number, "ignore_eos": True} for number in range(12)]
    Path("load.jsonl").write_text("\n".join(map(json.dumps, lines)))
    shown = command("bench", "load.jsonl", "--rate", "100", "--json", "out.json", "--png", "out.png")
    assert "time to first token" in shown
    told = json.loads(Path("out.json").read_text())
    assert (told["num_succeeded"], told["failures"]) == (12, {})
    assert told["num_output_tokens"] == sum(line["max_tokens"] for line in lines)
    assert told["num_prompt_tokens"] == sum(1 + len(line["prompt"]) for line in lines), "each behind a BOS token"
    assert 0 < told["time_to_first_token"]["p50"] < told["end_to_end"]["p50"] < told["seconds"]
    assert Path("out.png").stat().st_size > 10_000


def test_top_draws_the_workers_at_work(command: Command, system: System) -> None:
    with system.client() as client:
        deltas = client.generate("top", max_tokens=2000, temperature=0, ignore_eos=True)
        next(deltas)
        shown = command("top", "--once", "--interval", "0.5", "--svg", "top.svg")
        deltas.close()
    (row,) = (line.split() for line in shown.splitlines() if " ready " in line)
    assert (row[0], row[2]) == ("0", "1")
    assert float(row[-1].replace(",", "")) > 0
    assert "ms" in row, "a step has a length"
    assert Path("top.svg").read_text().startswith("<svg")


def test_a_drained_group_takes_nothing_until_that_is_undone(command: Command) -> None:
    assert command("drain", "0", "--timeout", "30") == "group 0 has no requests and gets none\n"
    told = json.loads(command("status", "--json", status=1))
    assert (told["workers"][0]["state"], told["serving"]) == ("draining", False), "there is no other group"
    assert command("drain", "0", "--undo") == "group 0 takes requests\n"
    assert json.loads(command("status", "--json"))["workers"][0]["state"] == "ready"


def test_a_reset_cache_finds_nothing(command: Command, system: System) -> None:
    def num_cached_tokens() -> int:
        with system.client() as client:
            *_, last = client.generate([7] * 5 * BLOCK_SIZE, max_tokens=1)
        assert last.usage is not None
        return last.usage.num_cached_tokens

    num_cached_tokens()
    assert num_cached_tokens() > 0
    command("reset-cache")
    assert num_cached_tokens() == 0


def test_reloaded_weights_are_told_by_their_epoch(command: Command) -> None:
    assert command("reload", "--timeout", "60") == "new weights at group 0\n"
    assert json.loads(command("status", "--json"))["workers"][0]["weight_epoch"] == 1


def test_a_command_of_up_finds_its_engine(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    settings = ["--model", "synthetic", "--address", address, "--kv-cache-bytes", "50000000"]
    ran = subprocess.run(
        [sys.executable, "-m", "blockplane.client", "up", *settings, "--", "status"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"},
    )
    assert ran.returncode == 0, ran.stderr
    frontend, engine, *_ = ran.stdout.splitlines()
    assert frontend.split() == ["frontend", address, "serving"]
    assert engine.split()[2] == "serving"
