"""A client that resumes what broke: each token once, for as long as it was told to try."""

import itertools
from collections.abc import Sequence

import grpc
import pytest
from fake_inference import FakeServer

from blockplane.client import attempts
from blockplane.client.client import Client
from blockplane.client.values import Delta
from blockplane.protos.errors import DataLossError, NotFoundError, UnavailableError
from blockplane.v1 import inference_pb2 as pb

GONE = (grpc.StatusCode.UNAVAILABLE, "the engine went away; send the request again.")
UNKNOWN = (grpc.StatusCode.NOT_FOUND, "there is no such request.")
STOP = pb.FINISH_REASON_STOP


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "PAUSE_SECONDS", 0.0)


def part(*token_ids: int, sample: int = 0, reason: pb.FinishReason.ValueType | None = None) -> pb.GenerateResponse:
    text = "".join(f"<{token_id}>" for token_id in token_ids)
    return pb.GenerateResponse(token_ids=token_ids, text=text, sample_index=sample, finish_reason=reason)


def read(deltas: Sequence[Delta]) -> dict[int, list[int]]:
    told: dict[int, list[int]] = {}
    for delta in deltas:
        told.setdefault(delta.sample_index, []).extend(delta.token_ids)
    return told


def test_a_broken_stream_goes_on_behind_the_tokens_that_came(fake_server: FakeServer) -> None:
    fake = fake_server.inference
    fake.parts = [((part(1, 2), part(3)), GONE), ((), GONE), ((part(4),), GONE), ((part(5, reason=STOP),), None)]
    with Client(fake_server.address, caller="ada") as client:
        deltas = list(client.generate("p", reattach_seconds=30))
    assert read(deltas) == {0: [1, 2, 3, 4, 5]}
    assert "".join(delta.text for delta in deltas) == "<1><2><3><4><5>"
    assert [delta.finish_reason for delta in deltas] == [None, None, None, "stop"]
    (request,) = fake.requests
    assert request.request_id
    assert {resumption.request_id for resumption in fake.resumptions} == {request.request_id}
    assert [list(resumption.from_tokens) for resumption in fake.resumptions] == [[3], [3], [4]]
    assert fake.callers == ["ada"] * 4


def test_samples_are_counted_by_themselves_and_each_ends_once(fake_server: FakeServer) -> None:
    fake = fake_server.inference
    ended = part(7, sample=1, reason=STOP)
    fake.parts = [((part(1), ended), GONE), ((part(sample=1, reason=STOP), part(2, reason=STOP)), None)]
    with Client(fake_server.address) as client:
        deltas = list(client.generate("p", num_samples=2, request_id="mine", reattach_seconds=30))
    assert read(deltas) == {0: [1, 2], 1: [7]}
    assert [delta.sample_index for delta in deltas if delta.finish_reason] == [1, 0]
    (resumption,) = fake.resumptions
    assert (resumption.request_id, list(resumption.from_tokens)) == ("mine", [1, 1])


def test_what_never_reached_the_journal_begins_again(fake_server: FakeServer) -> None:
    fake = fake_server.inference
    fake.parts = [((), GONE), ((), UNKNOWN), ((part(1, reason=STOP),), None)]
    with Client(fake_server.address) as client:
        assert read(list(client.generate("p", reattach_seconds=30))) == {0: [1]}
    first, second = fake.requests
    assert first == second


def test_what_was_seen_is_never_begun_again(fake_server: FakeServer) -> None:
    fake = fake_server.inference
    fake.parts = [((part(1),), GONE), ((), UNKNOWN)]
    with Client(fake_server.address) as client, pytest.raises(NotFoundError):
        list(client.generate("p", reattach_seconds=30))
    assert len(fake.requests) == 1


def test_it_gives_up_once_nothing_came_for_so_long(fake_server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = itertools.count(step=4)
    monkeypatch.setattr(attempts.time, "monotonic", lambda: next(seconds))
    fake = fake_server.inference
    fake.parts = [((part(1),), GONE), ((), GONE), ((part(2),), GONE), *[((), GONE)] * 9]
    with Client(fake_server.address) as client:
        deltas = client.generate("p", reattach_seconds=10)
        assert [next(deltas).token_ids, next(deltas).token_ids] == [(1,), (2,)]
        with pytest.raises(UnavailableError, match="engine went away"):
            next(deltas)
    # The clock gains 4 s with each look, and each attempt that breaks takes one.
    assert len(fake.resumptions) == 2 + 3


@pytest.mark.parametrize("status", [grpc.StatusCode.DATA_LOSS, grpc.StatusCode.CANCELLED, grpc.StatusCode.INTERNAL])
def test_any_other_failure_is_the_requests_end(fake_server: FakeServer, status: grpc.StatusCode) -> None:
    fake_server.inference.parts = [((part(1),), (status, "that was it."))]
    with Client(fake_server.address) as client, pytest.raises(Exception, match="that was it"):
        list(client.generate("p", reattach_seconds=30))
    assert not fake_server.inference.resumptions


def test_without_being_told_to_nothing_is_resumed(fake_server: FakeServer) -> None:
    fake_server.inference.parts = [((part(1),), GONE)]
    with Client(fake_server.address) as client, pytest.raises(UnavailableError):
        list(client.generate("p"))
    assert not fake_server.inference.resumptions
    assert fake_server.inference.requests[0].request_id == ""


def test_resume_says_what_has_arrived(fake_server: FakeServer) -> None:
    fake_server.inference.parts = [((part(3, reason=STOP),), None), ((), (grpc.StatusCode.DATA_LOSS, "begin anew."))]
    with Client(fake_server.address, caller="ada") as client:
        assert read(list(client.resume("mine", [2, 0]))) == {0: [3]}
        with pytest.raises(DataLossError):
            list(client.resume("mine"))
    first, second = fake_server.inference.resumptions
    assert (first.request_id, list(first.from_tokens), list(second.from_tokens)) == ("mine", [2, 0], [])
    assert fake_server.inference.callers == ["ada", "ada"]


def test_leaving_a_resumed_stream_cancels_it(fake_server: FakeServer) -> None:
    fake = fake_server.inference
    fake.parts = [((part(1),), GONE)]
    fake.endless = True
    with Client(fake_server.address) as client:
        deltas = client.generate("p", reattach_seconds=30)
        assert [next(deltas).token_ids, next(deltas).token_ids] == [(1,), (7,)]
        deltas.close()  # type: ignore[attr-defined] # it is a generator
        assert fake.cancelled.wait(10)
