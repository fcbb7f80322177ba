"""Which addresses are this machine's own, and what a process shows of itself to whom it dials."""

from pathlib import Path

import pytest

from blockplane.protos.access import Access, access_of, is_local
from blockplane.protos.channel import PEER_OPTIONS
from blockplane.protos.config import Config
from blockplane.protos.errors import ConfigurationError

ELSEWHERE, HERE = "engine:50050", "127.0.0.1:50050"


@pytest.mark.parametrize(
    ("address", "is_ours"),
    [
        ("127.0.0.1:1", True),
        ("127.9.9.9:1", True),
        ("localhost:1", True),
        ("[::1]:1", True),
        ("unix:/run/engine.sock", True),
        ("unix-abstract:engine", True),
        ("0.0.0.0:1", False),
        ("[::]:1", False),
        ("10.0.0.1:1", False),
        ("engine:1", False),
        ("localhost.example.com:1", False),
        ("127.0.0.1.example.com:1", False),
        ("dns:///localhost:1", False),
        ("", False),
    ],
)
def test_only_loopback_and_sockets_are_this_machines_own(address: str, is_ours: bool) -> None:
    assert is_local(address) is is_ours


@pytest.fixture
def token(tmp_path: Path) -> str:
    path = tmp_path / "token"
    path.write_text("  abc \n")
    return str(path)


def test_a_token_is_shown_as_a_bearers_and_read_anew(token: str) -> None:
    access = Access(token=token)
    assert access.metadata(HERE) == (("authorization", "Bearer abc"),)
    Path(token).write_text("def")
    assert access.metadata(HERE) == (("authorization", "Bearer def"),)
    assert Access().metadata(HERE) == ()


def test_a_token_goes_to_no_other_machine_in_plaintext_unless_that_is_said(token: str) -> None:
    with pytest.raises(ConfigurationError, match=f"the token would go to {ELSEWHERE} in plaintext; set tls_ca"):
        Access(token=token).metadata(ELSEWHERE)
    for access in (Access(token=token, plaintext="anywhere"), Access(token=token, tls_ca="system")):
        assert access.metadata(ELSEWHERE) == (("authorization", "Bearer abc"),)


@pytest.mark.parametrize("content", ["", "two words", "alice client abc"])
def test_a_file_that_holds_no_one_token_is_refused_without_a_word_of_it(token: str, content: str) -> None:
    Path(token).write_text(content)
    with pytest.raises(ConfigurationError, match=f"holds {len(content.split())} words; put one token there") as caught:
        Access(token=token).metadata(HERE)
    assert "abc" not in str(caught.value)


@pytest.mark.parametrize("setting", ["tls_ca", "tls_certificate", "tls_key", "token"])
def test_a_file_that_cannot_be_read_is_named_with_its_setting(setting: str) -> None:
    files = {"tls_ca": "system", "tls_certificate": "/dev/null", "tls_key": "/dev/null"}
    access = Access(**files | {setting: "/nowhere"})
    with pytest.raises(ConfigurationError, match=f"{setting} names /nowhere, which cannot be read: No such file"):
        (access.metadata(HERE), access.channel(HERE, PEER_OPTIONS))


def test_a_configuration_says_it_all() -> None:
    config = Config(tls_ca="a", tls_certificate="b", tls_key="c", token="d", plaintext="anywhere")
    assert access_of(config) == Access("a", "b", "c", "d", "anywhere")
