"""The benchmarks of moving blocks on sizes that take no time, so that they cannot rot; their numbers prove nothing."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmark_modules import load_benchmark


@pytest.fixture(scope="module")
def split() -> Any:
    return load_benchmark("split")


@pytest.fixture(scope="module")
def transfer() -> Any:
    return load_benchmark("transfer")


def runs(split: Any, sizes: Any) -> list[Any]:
    """What the clients of two runs would have seen: right texts, and gaps that a split makes ten times shorter."""
    texts = {
        number: split.continue_greedily(split.prompt_of(number, num_tokens), 3, ignore_eos=True)
        for number, num_tokens in ((0, sizes.prompt_tokens), (split.FIRST_LONG, sizes.long_tokens))
    }
    return [split.Run([gap, 2 * gap], [1.0], {each: list(text) for each, text in texts.items()}) for gap in (0.5, 0.05)]


def test_a_text_is_wrong_by_its_last_token_or_by_its_absence(split: Any) -> None:
    sizes = split.Sizes(long_tokens=50)
    unified, other = runs(split, sizes)
    assert split.num_wrong([unified, other], sizes) == 0
    other.texts[0][-1] += 1
    assert split.num_wrong([unified, other], sizes) == 1
    unified.texts[split.FIRST_LONG].clear()
    assert split.num_wrong([unified, other], sizes) == 2


def test_prompts_share_no_block(split: Any) -> None:
    numbers = [*range(16), *range(split.FIRST_LONG, split.FIRST_LONG + 6)]
    assert len({tuple(split.prompt_of(number, 16)) for number in numbers}) == len(numbers)


@pytest.mark.parametrize(
    ("slowdown", "error", "expected"), [(1, 0, 0), (20, 0, 1), (1, 1, 1)], ids=["sound", "slow", "wrong"]
)
def test_a_miss_or_a_wrong_text_fails_a_check_and_nothing_else(
    split: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    slowdown: int,
    error: int,
    expected: int,
) -> None:
    monkeypatch.setattr(split, "QUICK", split.Sizes(long_tokens=50))
    unified, other = runs(split, split.QUICK)
    other.gaps = [slowdown * gap for gap in other.gaps]
    other.texts[0][0] += error
    monkeypatch.setattr(split, "measure", lambda way, sizes: {"unified": unified, "split": other}[way])
    for flags in [], ["--check"]:
        monkeypatch.setattr(sys, "argv", ["split.py", "--quick", *flags, "--json", str(tmp_path / "figures")])
        assert split.main() == (expected if flags else 0)
        assert ("MISSED" in capsys.readouterr().out) == (slowdown > 1)
    told = json.loads((tmp_path / "figures").read_text())
    assert [figure["is_missed"] for figure in told["figures"]] == [False, slowdown > 1, False]
    assert told["num_wrong"] == error


def test_blocks_move_from_another_process_beside_a_copy_of_as_many_bytes(transfer: Any) -> None:
    figure = transfer.measure(transfer.SHAPES[1], "plaintext", transfer.Config(), 8 << 20, 1)
    assert (figure.block_bytes, figure.num_bytes) == (4 << 20, 8 << 20)
    assert figure.transfer > 0
    assert figure.ratio > 0
