"""What either client sends again by itself, and what it never does."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from fake_inference import WAIT_SECONDS, FakeInference, FakeServer

from blockplane.client import attempts
from blockplane.client.async_client import AsyncClient
from blockplane.client.client import Client
from blockplane.protos.error_details import trailing_metadata
from blockplane.protos.errors import BlockplaneError, DuplicateError, UnavailableError
from blockplane.v1 import inference_pb2 as pb
from blockplane.v1.inference_pb2_grpc import add_InferenceServicer_to_server

LATER = (grpc.StatusCode.UNAVAILABLE, "this frontend is stopping; call this one again.")
TAKEN = (grpc.StatusCode.ALREADY_EXISTS, "request id 'mine' is live.")
AT_ONCE = trailing_metadata(UnavailableError(LATER[1], 0.0))
FIRST = pb.GenerateResponse(token_ids=[5])
LAST = pb.GenerateResponse(token_ids=[6], finish_reason=pb.FINISH_REASON_STOP)


def read_waiting(address: str, **arguments) -> list[int]:
    with Client(address) as client:
        return [token_id for delta in client.generate("hi", **arguments) for token_id in delta.token_ids]


def read_in_a_loop(address: str, **arguments) -> list[int]:
    async def run() -> list[int]:
        async with AsyncClient(address) as client:
            return [token_id async for delta in client.generate("hi", **arguments) for token_id in delta.token_ids]

    return asyncio.run(run())


@pytest.fixture(params=[read_waiting, read_in_a_loop])
def read(request: pytest.FixtureRequest) -> Callable[..., list[int]]:
    return request.param


@pytest.fixture(autouse=True)
def _with_short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "PAUSE_SECONDS", 0.01)


@pytest.fixture
def told_later(fake_server: FakeServer) -> FakeServer:
    """A server that cannot now, three times, and says that it can at once."""
    fake_server.inference.trailing_metadata = AT_ONCE
    fake_server.inference.parts = [((), LATER)] * 3 + [((FIRST, LAST), None)]
    return fake_server


def test_a_request_of_which_nothing_came_is_sent_again_when_the_server_says(told_later: FakeServer, read):
    assert read(told_later.address, max_retries=3) == [5, 6]
    first, *others = told_later.inference.requests
    assert others == [first] * 3


def test_it_is_sent_again_so_often_and_not_more(told_later: FakeServer, read):
    with pytest.raises(UnavailableError, match="is stopping"):
        read(told_later.address, max_retries=2)
    assert len(told_later.inference.requests) == 3


def test_a_server_that_does_not_say_when_is_not_asked_again(fake_server: FakeServer, read):
    fake_server.inference.parts = [((), LATER), ((LAST,), None)]
    with pytest.raises(UnavailableError, match="is stopping"):
        read(fake_server.address)
    assert len(fake_server.inference.requests) == 1


def test_behind_its_first_token_nothing_is_sent_again(fake_server: FakeServer, read):
    fake_server.inference.trailing_metadata = AT_ONCE
    fake_server.inference.parts = [((FIRST,), LATER), ((LAST,), None)]
    with pytest.raises(UnavailableError, match="is stopping"):
        read(fake_server.address)
    assert len(fake_server.inference.requests) == 1


@pytest.mark.parametrize(
    "status",
    [status for status in grpc.StatusCode if status not in (grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE)],
)
def test_no_other_status_is_tried_again_whatever_the_server_says(fake_server: FakeServer, status: grpc.StatusCode):
    fake_server.inference.trailing_metadata = (("grpc-retry-pushback-ms", "0"),)
    fake_server.inference.parts = [((), (status, "that was it.")), ((LAST,), None)]
    with pytest.raises(BlockplaneError, match="that was it"):
        read_waiting(fake_server.address)
    assert len(fake_server.inference.requests) == 1


def test_a_pause_beyond_the_deadline_is_not_waited_for(fake_server: FakeServer, read):
    fake_server.inference.trailing_metadata = trailing_metadata(UnavailableError(LATER[1], 5.0))
    fake_server.inference.parts = [((), LATER), ((LAST,), None)]
    with pytest.raises(UnavailableError, match="is stopping"):
        read(fake_server.address, timeout=4)
    assert len(fake_server.inference.requests) == 1


def test_an_id_that_an_earlier_attempt_still_holds_is_waited_for(fake_server: FakeServer, read):
    fake_server.inference.trailing_metadata = AT_ONCE
    fake_server.inference.parts = [((), LATER), ((), TAKEN), ((LAST,), None)]
    assert read(fake_server.address, request_id="mine") == [6]


def test_an_id_that_another_holds_is_not(fake_server: FakeServer, read):
    fake_server.inference.parts = [((), TAKEN), ((LAST,), None)]
    with pytest.raises(DuplicateError):
        read(fake_server.address, request_id="mine")


@pytest.fixture
def late_server(free_address: str):
    """The address of a server that comes up only after a while."""
    server = grpc.server(ThreadPoolExecutor(2))
    add_InferenceServicer_to_server(FakeInference(responses=(LAST,)), server)

    def start() -> None:
        assert server.add_insecure_port(free_address)
        server.start()

    timer = threading.Timer(0.3, start)
    timer.start()
    yield free_address
    timer.join(WAIT_SECONDS)
    server.stop(None).wait()


def test_a_server_that_comes_up_meanwhile_is_found(late_server: str, read, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attempts, "PAUSE_SECONDS", 0.2)
    assert read(late_server, max_retries=100) == [6]


def test_calls_that_only_tell_are_made_again_by_the_channel(fake_server: FakeServer):
    fake_server.inference.model_info_failures = [LATER, LATER]
    with Client(fake_server.address) as client:
        assert client.model_info().name == "fake"
    assert not fake_server.inference.model_info_failures
