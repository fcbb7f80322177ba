"""The file of tokens: its form, and that what is written to it counts."""

import logging
from pathlib import Path

import pytest

from blockplane.protos.errors import ConfigurationError
from blockplane.protos.tokens import Identity, Tokens

ALICE, BOB, CAROL = (letter * 32 for letter in "abc")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def write(folder: Path, *lines: str) -> str:
    path = folder / "tokens"
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def test_a_token_is_its_names_with_its_scopes_and_a_name_may_have_several(tmp_path: Path) -> None:
    tokens = Tokens(
        write(tmp_path, "# who may", "", f"alice client {ALICE} # the old one", f"alice client,admin {BOB}")
    )
    assert tokens.identity(ALICE) == Identity("alice", frozenset({"client"}))
    assert tokens.identity(BOB) == Identity("alice", frozenset({"client", "admin"}))
    for other in (CAROL, "", ALICE[:-1], ALICE + "a", "alice", "# who may"):
        assert tokens.identity(other) is None


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (f"bob client {BOB} x", "line 2 of .* has 4 words; write NAME SCOPE,SCOPE TOKEN"),
        (f"bob {BOB}", "line 2 of .* has 2 words"),
        (f"bob client,root {BOB}", "line 2 of .* has the scope 'root'; choose of admin, client, peer"),
        ("bob client 123456789abcdef", "line 2 of .* has a token of 15 characters; draw one of 16 at least"),
        (f"bob client {ALICE}", "line 2 of .* has a token that a line before has"),
    ],
)
def test_a_line_that_is_not_understood_is_refused_by_its_number_and_without_its_token(
    tmp_path: Path, line: str, sentence: str
) -> None:
    with pytest.raises(ConfigurationError, match=sentence) as caught:
        Tokens(write(tmp_path, f"alice client {ALICE}", line))
    assert BOB not in str(caught.value)
    assert ALICE not in str(caught.value)


def test_a_changed_file_counts_within_a_second_and_a_spoilt_one_never(tmp_path: Path) -> None:
    clock = Clock()
    tokens = Tokens(write(tmp_path, f"alice client {ALICE}"), clock)
    write(tmp_path, f"robert client {BOB}")
    clock.now = 1.0
    assert tokens.identity(ALICE) is None, "it was revoked"
    assert tokens.identity(BOB) == Identity("robert", frozenset({"client"}))
    write(tmp_path, "bob client")
    clock.now = 2.0
    assert tokens.identity(BOB) is not None
    (tmp_path / "tokens").unlink()
    clock.now = 3.0
    assert tokens.identity(BOB) is not None
    write(tmp_path, f"carol peer {CAROL}")
    clock.now = 4.0
    assert (tokens.identity(BOB), tokens.identity(CAROL)) == (None, Identity("carol", frozenset({"peer"})))


@pytest.mark.parametrize(("mode", "is_warned_of"), [(0o600, False), (0o640, False), (0o644, True)])
def test_a_file_that_anybody_can_read_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, is_warned_of: bool
) -> None:
    path = write(tmp_path, f"alice client {ALICE}")
    Path(path).chmod(mode)
    with caplog.at_level(logging.WARNING):
        Tokens(path)
    assert ("whoever is on this machine can read" in caplog.text) == is_warned_of
