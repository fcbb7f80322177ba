"""Every message of the frontend survives the wire unchanged; what no peer of ours sends is a protocol error."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import grpc
import numpy as np
import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st
from wire_values import (
    CUT,
    columns,
    comparable,
    id_tuples,
    int32,
    logprobs,
    logprobs_for,
    models,
    sampling_params,
    sent,
    uint32,
)

from blockplane.protos import delivery_wire
from blockplane.protos.delivery import Delivery, Ending, FrontendBatch, PromptLogprobs, ServingState, Submission
from blockplane.protos.errors import (
    AbortedError,
    BlockplaneError,
    CapacityError,
    ConfigurationError,
    DeadlineError,
    DuplicateError,
    InvalidRequestError,
    ModelOutputError,
    NotFoundError,
    ProtocolError,
    UnavailableError,
)
from blockplane.protos.finish import FinishReason
from blockplane.protos.sampling import MAX_SAMPLES, SamplingParams
from blockplane.protos.wire import PROTOCOL_VERSION
from blockplane.v1 import engine_pb2 as pb

submissions = st.builds(
    Submission,
    stream_id=uint32,
    request_id=st.text(),
    prompt_token_ids=columns,
    params=sampling_params,
    num_samples=st.integers(1, MAX_SAMPLES),
    priority=int32,
    timeout_seconds=st.none() | st.floats(0, allow_infinity=False),
    cache_salt=st.text(),
    skip_prefix_cache=st.booleans(),
    caller=st.text(),
    traceparent=st.text(),
)
batches = st.builds(
    FrontendBatch,
    submissions=st.lists(submissions, max_size=3).map(tuple),
    aborted_stream_ids=id_tuples,
    aborted_request_ids=st.lists(st.text(), max_size=3).map(tuple),
    aborting_callers=st.lists(st.text(), max_size=3).map(tuple),
)
servings = st.builds(ServingState, model=st.none() | models)


def deliveries_of(tokens: dict[int, list[int]]) -> st.SearchStrategy[Delivery]:
    """Deliveries of these token ids by stream id, whose columns belong together."""
    return st.builds(
        Delivery,
        stream_ids=st.just(np.array(list(tokens), np.int32)),
        num_tokens=st.just(np.array([len(ids) for ids in tokens.values()], np.int32)),
        token_ids=st.just(np.array([token_id for ids in tokens.values() for token_id in ids], np.int32)),
        endings=st.lists(endings, max_size=3).map(tuple),
        serving=st.none() | servings,
        logprobs=logprobs_for(sum(map(len, tokens.values()))),
        prompt_logprobs=st.lists(st.builds(PromptLogprobs, uint32, logprobs), max_size=2).map(tuple),
    )


endings = st.builds(Ending, stream_id=uint32, outcome=st.sampled_from(get_args(FinishReason)), num_cached_tokens=uint32)
deliveries = st.dictionaries(int32, st.lists(int32, max_size=4), max_size=4).flatmap(deliveries_of)

MESSAGES = [
    pytest.param(
        batches,
        delivery_wire.frontend_batch_to_proto,
        delivery_wire.frontend_batch_from_proto,
        id="frontend_batch",
    ),
    pytest.param(servings, delivery_wire.serving_to_proto, delivery_wire.serving_from_proto, id="serving"),
    pytest.param(deliveries, delivery_wire.delivery_to_proto, delivery_wire.delivery_from_proto, id="delivery"),
]


@pytest.mark.parametrize(("values", "to_proto", "from_proto"), MESSAGES)
@given(data=st.data())
def test_message_comes_back_as_it_was(
    values: st.SearchStrategy[Any],
    to_proto: Callable[[Any], Message],
    from_proto: Callable[[Any], Any],
    data: st.DataObject,
) -> None:
    value = data.draw(values)
    assert comparable(from_proto(sent(to_proto(value)))) == comparable(value)


def batch_sent(batch: FrontendBatch) -> FrontendBatch:
    return delivery_wire.frontend_batch_from_proto(sent(delivery_wire.frontend_batch_to_proto(batch)))


def delivery_sent(delivery: Delivery) -> Delivery:
    return delivery_wire.delivery_from_proto(sent(delivery_wire.delivery_to_proto(delivery)))


def test_messages_of_defaults_come_back_as_they_were() -> None:
    assert batch_sent(FrontendBatch()) == FrontendBatch()
    assert comparable(delivery_sent(Delivery())) == comparable(Delivery())
    submission = Submission(1, "r", np.array([1], np.int32), SamplingParams(max_tokens=1))
    assert comparable(batch_sent(FrontendBatch((submission,)))) == comparable(FrontendBatch((submission,)))


def test_a_timeout_of_zero_and_no_timeout_are_two_things() -> None:
    submission = Submission(1, "r", np.array([1], np.int32), SamplingParams(max_tokens=1))
    for timeout_seconds in (None, 0.0, 0.25):
        (read,) = batch_sent(FrontendBatch((replace(submission, timeout_seconds=timeout_seconds),))).submissions
        assert read.timeout_seconds == timeout_seconds


def test_a_submission_that_names_no_number_of_samples_asks_for_one() -> None:
    batch = delivery_wire.frontend_batch_from_proto(pb.AttachFrontendRequest(submissions=[pb.Submission()]))
    assert batch.submissions[0].num_samples == 1


def test_a_submission_of_more_samples_than_a_frontend_sends_is_refused() -> None:
    """Each would be a stream to end; nobody is to make the engine end billions."""
    batch = pb.AttachFrontendRequest(submissions=[pb.Submission(num_samples=MAX_SAMPLES + 1)])
    with pytest.raises(ProtocolError, match=f"asks for {MAX_SAMPLES + 1} samples"):
        delivery_wire.frontend_batch_from_proto(batch)


@pytest.mark.parametrize("retry_after_seconds", [None, 0.0, 1.5])
def test_a_capacity_error_says_when_to_try_again(retry_after_seconds: float | None) -> None:
    (ending,) = delivery_sent(Delivery(endings=(Ending(7, CapacityError("full.", retry_after_seconds)),))).endings
    assert isinstance(ending.outcome, CapacityError)
    assert (str(ending.outcome), ending.outcome.retry_after_seconds) == ("full.", retry_after_seconds)


def test_a_seed_of_zero_and_no_seed_are_two_things() -> None:
    for seed in (None, 0, 2**64 - 1):
        submission = Submission(1, "r", np.array([1], np.int32), SamplingParams(max_tokens=1, seed=seed))
        assert batch_sent(FrontendBatch((submission,))).submissions[0].params.seed == seed


@pytest.mark.parametrize("request_id", ["", "ü/你好/😀", "a\0b", "x" * 5000])
def test_any_text_is_a_request_id(request_id: str) -> None:
    batch = FrontendBatch(aborted_request_ids=(request_id,))
    assert batch_sent(batch).aborted_request_ids == (request_id,)


def test_a_frontend_s_batch_says_which_protocol_it_speaks() -> None:
    assert delivery_wire.frontend_batch_to_proto(FrontendBatch()).protocol_version == PROTOCOL_VERSION


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequestError("a"),
        CapacityError("b"),
        UnavailableError("c"),
        DeadlineError("t"),
        DuplicateError("d"),
        ConfigurationError("e"),
        AbortedError("ü"),
    ],
)
def test_an_error_ends_a_stream_as_the_same_error(error: BlockplaneError) -> None:
    delivery = Delivery(endings=(Ending(7, error), Ending(8, "stop")))
    failed, finished = delivery_sent(delivery).endings
    assert (failed.stream_id, type(failed.outcome), str(failed.outcome)) == (7, type(error), str(error))
    assert finished == Ending(8, "stop")


def test_an_internal_error_keeps_its_status_and_its_sentence() -> None:
    outcome = delivery_sent(Delivery(endings=(Ending(7, ModelOutputError("not finite.")),))).endings[0].outcome
    assert isinstance(outcome, BlockplaneError)
    assert (outcome.status, str(outcome)) == (grpc.StatusCode.INTERNAL, "not finite.")
    assert type(outcome) is ModelOutputError, "by its reason"


def test_an_ending_without_a_reason_is_what_its_status_is_for() -> None:
    (ending,) = delivery_wire.delivery_from_proto(
        pb.AttachFrontendResponse(endings=[pb.Ending(stream_id=1, status="NOT_FOUND", message="gone.")])
    ).endings
    assert type(ending.outcome) is NotFoundError


@pytest.mark.parametrize("field", [None, "sampling_params.top_p"])
def test_an_invalid_request_keeps_the_field_that_it_blames(field: str | None) -> None:
    outcome = delivery_sent(Delivery(endings=(Ending(7, InvalidRequestError("no.", field)),))).endings[0].outcome
    assert isinstance(outcome, InvalidRequestError)
    assert outcome.field == field


@pytest.mark.parametrize(
    "columns",
    [
        {"stream_ids": [1, 2], "num_tokens": [1], "token_ids": [5]},
        {"stream_ids": [1], "num_tokens": [2], "token_ids": [5]},
        {"token_ids": [5]},
        {"stream_ids": [1], "token_ids": [5, 6]},
    ],
)
def test_a_delivery_whose_columns_do_not_belong_together_is_refused(columns: dict[str, list[int]]) -> None:
    delivery = Delivery(**{name: np.array(values, np.int32) for name, values in columns.items()})
    with pytest.raises(ProtocolError, match="columns"):
        delivery_wire.delivery_from_proto(delivery_wire.delivery_to_proto(delivery))


# -- refusals ----------------------------------------------------------------------------------------------------------

READERS: list[tuple[Callable[[Any], Any], Message, str]] = [
    (delivery_wire.frontend_batch_from_proto, pb.AttachFrontendRequest(), "aborted_stream_ids"),
    (delivery_wire.delivery_from_proto, pb.AttachFrontendResponse(), "stream_ids"),
    (delivery_wire.delivery_from_proto, pb.AttachFrontendResponse(), "num_tokens"),
    (delivery_wire.delivery_from_proto, pb.AttachFrontendResponse(), "token_ids"),
]


@pytest.mark.parametrize(("read", "empty", "column"), READERS)
def test_a_truncated_column_is_a_protocol_error(read: Callable[[Any], Any], empty: Message, column: str) -> None:
    read(empty)
    with pytest.raises(ProtocolError, match=r"7 bytes.*\.$"):
        read(type(empty)(**{column: CUT}))


@pytest.mark.parametrize(
    "submission",
    [pb.Submission(token_ids=CUT), pb.Submission(sampling=pb.SamplingSettings(stop_token_ids=CUT))],
)
def test_a_truncated_column_of_a_submission_is_a_protocol_error(submission: pb.Submission) -> None:
    batch = pb.AttachFrontendRequest(submissions=[submission])
    with pytest.raises(ProtocolError, match="7 bytes"):
        delivery_wire.frontend_batch_from_proto(batch)


def test_an_unknown_finish_reason_is_a_protocol_error_that_names_it() -> None:
    proto = pb.AttachFrontendResponse(endings=[pb.Ending(stream_id=1, finish_reason="bored")])
    with pytest.raises(ProtocolError, match="'bored'"):
        delivery_wire.delivery_from_proto(proto)


@pytest.mark.parametrize("status", ["", "TIRED", "internal"])
def test_an_ending_without_reason_or_known_status_is_a_protocol_error(status: str) -> None:
    proto = pb.AttachFrontendResponse(endings=[pb.Ending(stream_id=1, status=status, message="m")])
    with pytest.raises(ProtocolError, match=f"'{status}'"):
        delivery_wire.delivery_from_proto(proto)
