"""From settings to a client: whom it calls, and that every call shows its token."""

from pathlib import Path

import grpc
import pytest
from fake_inference import FakeServer

from blockplane.client.client import Client
from blockplane.client.connect import connect
from blockplane.protos.access import Access
from blockplane.protos.error_details import trailing_metadata
from blockplane.protos.errors import ConfigurationError, InvalidRequestError, ModelOutputError


@pytest.fixture
def token(tmp_path: Path) -> str:
    path = tmp_path / "token"
    path.write_text("abc\n")
    return str(path)


def test_flags_make_a_client_and_those_of_a_request_do_not_count(fake_server: FakeServer, token: str):
    with connect({"address": fake_server.address, "token": token, "seed": 5, "dtype": "none of this"}) as client:
        list(client.generate("hi"))
    assert fake_server.inference.tokens == ["Bearer abc"]


def test_every_call_shows_the_token(fake_server: FakeServer, token: str):
    with Client(fake_server.address, "alice", Access(token=token)) as client:
        list(client.generate("hi"))
        list(client.resume("r"))
        client.abort(["r"])
        client.model_info()
    assert fake_server.inference.tokens == ["Bearer abc"] * 4
    assert fake_server.inference.callers == ["alice"] * 4


def test_a_token_that_others_could_read_is_not_sent(token: str):
    with pytest.raises(ConfigurationError, match=r"the token would go to 192\.0\.2\.1:1 in plaintext"):
        connect({"address": "192.0.2.1:1", "token": token})


def test_a_certificate_that_cannot_be_read_is_told_before_any_call():
    with pytest.raises(ConfigurationError, match="tls_ca names /nowhere"):
        Client("localhost:1", access=Access(tls_ca="/nowhere"))


def test_a_servers_details_make_the_very_error_and_its_field(fake_server: FakeServer):
    fake_server.inference.failure = (grpc.StatusCode.INTERNAL, "not finite.")
    fake_server.inference.trailing_metadata = trailing_metadata(ModelOutputError("not finite."))
    with Client(fake_server.address) as client, pytest.raises(ModelOutputError, match=r"^not finite\.$"):
        list(client.generate("hi"))
    fake_server.inference.failure = (grpc.StatusCode.INVALID_ARGUMENT, "no.")
    fake_server.inference.trailing_metadata = trailing_metadata(InvalidRequestError("no.", "priority"))
    with Client(fake_server.address) as client, pytest.raises(InvalidRequestError) as caught:
        list(client.generate("hi"))
    assert caught.value.field == "priority"
