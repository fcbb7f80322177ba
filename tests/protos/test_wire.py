"""Every hot message survives the wire unchanged; what no peer of ours sends is refused as a protocol error."""

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, get_args

import grpc
import numpy as np
import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from blockplane.protos import wire
from blockplane.protos.delivery import Delivery, Ending, FrontendBatch, ServingState, Submission
from blockplane.protos.errors import (
    AbortedError,
    BlockplaneError,
    CapacityError,
    ConfigurationError,
    DuplicateError,
    InvalidRequestError,
    ModelOutputError,
    ProtocolError,
    UnavailableError,
)
from blockplane.protos.finish import FinishReason
from blockplane.protos.model import GenerationDefaults, LayerKVSpec, ModelInfo
from blockplane.protos.plan import Admission, Configure, Int32Array, StepPlan, StepResult
from blockplane.protos.sampling import SamplingParams
from blockplane.v1 import engine_pb2 as pb

uint32 = st.sampled_from([0, 2**32 - 1]) | st.integers(0, 2**32 - 1)
int32 = st.integers(-(2**31), 2**31 - 1)
seeds = st.sampled_from([0, 1, 2**63 - 1, 2**63, 2**64 - 1]) | st.integers(0, 2**64 - 1)
temperatures = st.floats(0, 100, width=32)
columns = st.lists(int32, max_size=20).map(lambda numbers: np.array(numbers, np.int32))
id_tuples = st.lists(st.integers(0, 2**31 - 1), max_size=5).map(tuple)

admissions = st.builds(
    Admission,
    row=uint32,
    token_ids=columns,
    num_prompt_tokens=uint32,
    num_computed_tokens=uint32,
    temperature=temperatures,
    seed=seeds,
)
plans = st.builds(
    StepPlan,
    step=st.integers(0, 2**64 - 1),
    released_rows=columns,
    admissions=st.lists(admissions, max_size=3).map(tuple),
    block_rows=columns,
    block_ids=columns,
    prefill_rows=columns,
    prefill_num_tokens=columns,
    decode_rows=st.none() | columns,
)
results = st.builds(StepResult, step=st.integers(0, 2**64 - 1), token_ids=columns)
configures = st.builds(
    Configure,
    block_size=uint32,
    num_blocks=uint32,
    max_model_len=uint32,
    num_batched_tokens_buckets=st.lists(uint32, max_size=5).map(tuple),
    num_seqs_buckets=st.lists(uint32, max_size=5).map(tuple),
)
models = st.builds(
    ModelInfo,
    name=st.text(),
    vocab_size=uint32,
    max_model_len=uint32,
    eos_token_ids=st.lists(uint32, max_size=4).map(tuple),
    bos_token_id=st.none() | uint32,
    tokenizer_json_zlib=st.binary(),
    defaults=st.builds(GenerationDefaults, temperature=temperatures),
)
layers = st.builds(
    LayerKVSpec,
    name=st.text(),
    num_kv_heads=uint32,
    head_dim=uint32,
    dtype=st.text(),
    sliding_window=st.none() | uint32,
)
params = st.builds(
    SamplingParams,
    max_tokens=uint32,
    temperature=temperatures,
    seed=st.none() | seeds,
    stop_token_ids=id_tuples,
    ignore_eos=st.booleans(),
)
submissions = st.builds(Submission, stream_id=uint32, request_id=st.text(), prompt_token_ids=columns, params=params)
batches = st.builds(
    FrontendBatch,
    submissions=st.lists(submissions, max_size=3).map(tuple),
    aborted_stream_ids=id_tuples,
    aborted_request_ids=st.lists(st.text(), max_size=3).map(tuple),
)
servings = st.builds(ServingState, model=st.none() | models)


def delivery_of(tokens: dict[int, list[int]], endings: tuple[Ending, ...], serving: ServingState | None) -> Delivery:
    """A delivery of these token ids by stream id, whose columns belong together."""
    return Delivery(
        stream_ids=np.array(list(tokens), np.int32),
        num_tokens=np.array([len(ids) for ids in tokens.values()], np.int32),
        token_ids=np.array([token_id for ids in tokens.values() for token_id in ids], np.int32),
        endings=endings,
        serving=serving,
    )


int32 = st.integers(-(2**31), 2**31 - 1)
deliveries = st.builds(
    delivery_of,
    st.dictionaries(int32, st.lists(int32, max_size=4), max_size=4),
    endings=st.lists(
        st.builds(Ending, stream_id=uint32, outcome=st.sampled_from(get_args(FinishReason))), max_size=3
    ).map(tuple),
    serving=st.none() | servings,
)

MESSAGES = [
    pytest.param(plans, wire.plan_to_proto, wire.plan_from_proto, id="plan"),
    pytest.param(results, wire.result_to_proto, wire.result_from_proto, id="result"),
    pytest.param(configures, wire.configure_to_proto, wire.configure_from_proto, id="configure"),
    pytest.param(models, wire.model_info_to_proto, wire.model_info_from_proto, id="model_info"),
    pytest.param(layers, wire.layer_to_proto, wire.layer_from_proto, id="layer"),
    pytest.param(batches, wire.frontend_batch_to_proto, wire.frontend_batch_from_proto, id="frontend_batch"),
    pytest.param(servings, wire.serving_to_proto, wire.serving_from_proto, id="serving"),
    pytest.param(deliveries, wire.delivery_to_proto, wire.delivery_from_proto, id="delivery"),
]


def comparable(value: Any) -> Any:
    """`value` with columns and dataclasses as plain tuples, their types included, so that == tells every difference."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tolist()
    if is_dataclass(value):
        return type(value), {field.name: comparable(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple):
        return tuple(map(comparable, value))
    return type(value), value


M = TypeVar("M", bound=Message)


def sent(message: M) -> M:
    """`message` as the other side reads it."""
    return type(message).FromString(message.SerializeToString())


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


def test_message_of_defaults_comes_back_as_it_was() -> None:
    plan, batch, delivery = StepPlan(step=1), FrontendBatch(), Delivery()
    assert comparable(wire.plan_from_proto(sent(wire.plan_to_proto(plan)))) == comparable(plan)
    assert comparable(wire.frontend_batch_from_proto(sent(wire.frontend_batch_to_proto(batch)))) == comparable(batch)
    assert comparable(wire.delivery_from_proto(sent(wire.delivery_to_proto(delivery)))) == comparable(delivery)


def test_no_decode_rows_and_unchanged_decode_rows_are_two_things() -> None:
    for decode_rows in (None, np.empty(0, np.int32)):
        plan = wire.plan_from_proto(sent(wire.plan_to_proto(StepPlan(step=1, decode_rows=decode_rows))))
        assert (plan.decode_rows is None) == (decode_rows is None)
    assert plan.decode_rows is not None
    assert len(plan.decode_rows) == 0


def test_a_seed_of_zero_and_no_seed_are_two_things() -> None:
    for seed in (None, 0, 2**64 - 1):
        submission = Submission(1, "r", np.array([1], np.int32), SamplingParams(max_tokens=1, seed=seed))
        batch = wire.frontend_batch_from_proto(sent(wire.frontend_batch_to_proto(FrontendBatch((submission,)))))
        assert batch.submissions[0].params.seed == seed


@pytest.mark.parametrize("request_id", ["", "ü/你好/😀", "a\0b", "x" * 5000])
def test_any_text_is_a_request_id(request_id: str) -> None:
    batch = FrontendBatch(aborted_request_ids=(request_id,))
    assert wire.frontend_batch_from_proto(sent(wire.frontend_batch_to_proto(batch))).aborted_request_ids == (
        request_id,
    )


def test_a_frontend_s_batch_says_which_protocol_it_speaks() -> None:
    assert wire.frontend_batch_to_proto(FrontendBatch()).protocol_version == wire.PROTOCOL_VERSION


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequestError("a"),
        CapacityError("b"),
        UnavailableError("c"),
        DuplicateError("d"),
        ConfigurationError("e"),
        AbortedError("ü"),
    ],
)
def test_an_error_ends_a_stream_as_the_same_error(error: BlockplaneError) -> None:
    delivery = Delivery(endings=(Ending(7, error), Ending(8, "stop")))
    failed, finished = wire.delivery_from_proto(sent(wire.delivery_to_proto(delivery))).endings
    assert (failed.stream_id, type(failed.outcome), str(failed.outcome)) == (7, type(error), str(error))
    assert finished == Ending(8, "stop")


def test_an_internal_error_keeps_its_status_and_its_sentence() -> None:
    proto = wire.delivery_to_proto(Delivery(endings=(Ending(7, ModelOutputError("not finite.")),)))
    outcome = wire.delivery_from_proto(sent(proto)).endings[0].outcome
    assert isinstance(outcome, BlockplaneError)
    assert (outcome.status, str(outcome)) == (grpc.StatusCode.INTERNAL, "not finite.")


@pytest.mark.parametrize(
    "columns",
    [
        {"stream_ids": [1, 2], "num_tokens": [1], "token_ids": [5]},
        {"stream_ids": [1], "num_tokens": [2], "token_ids": [5]},
        {"token_ids": [5]},
    ],
)
def test_a_delivery_whose_columns_do_not_belong_together_is_refused(columns: dict[str, list[int]]) -> None:
    delivery = Delivery(**{name: np.array(values, np.int32) for name, values in columns.items()})
    with pytest.raises(ProtocolError, match="columns"):
        wire.delivery_from_proto(wire.delivery_to_proto(delivery))


# -- refusals ----------------------------------------------------------------------------------------------------------

CUT = b"\1\0\0\0\2\0\0"

READERS: list[tuple[Callable[[Any], Any], Message, str]] = [
    *((wire.plan_from_proto, pb.StepPlan(), name) for name in ("released_rows", "block_rows", "block_ids")),
    *((wire.plan_from_proto, pb.StepPlan(), name) for name in ("prefill_rows", "prefill_num_tokens", "decode_rows")),
    (wire.result_from_proto, pb.StepResult(), "token_ids"),
    (wire.frontend_batch_from_proto, pb.AttachFrontendRequest(), "aborted_stream_ids"),
    *((wire.delivery_from_proto, pb.AttachFrontendResponse(), name) for name in ("stream_ids", "num_tokens")),
    (wire.delivery_from_proto, pb.AttachFrontendResponse(), "token_ids"),
]


@pytest.mark.parametrize(("read", "empty", "column"), READERS)
def test_a_truncated_column_is_a_protocol_error(read: Callable[[Any], Any], empty: Message, column: str) -> None:
    read(empty)
    with pytest.raises(ProtocolError, match=r"7 bytes.*\.$"):
        read(type(empty)(**{column: CUT}))


def test_a_truncated_column_of_a_nested_message_is_a_protocol_error() -> None:
    for column in ("token_ids", "stop_token_ids"):
        batch = pb.AttachFrontendRequest(submissions=[pb.Submission(**{column: CUT})])
        with pytest.raises(ProtocolError, match="7 bytes"):
            wire.frontend_batch_from_proto(batch)
    with pytest.raises(ProtocolError, match="7 bytes"):
        wire.plan_from_proto(pb.StepPlan(admissions=[pb.Admission(token_ids=CUT)]))


@given(data=st.binary(max_size=40))
def test_a_column_is_read_if_and_only_if_it_holds_whole_numbers(data: bytes) -> None:
    if len(data) % 4 == 0:
        column = wire.column_from_bytes(data)
        assert wire.column_to_bytes(column) == data
        assert len(column) == len(data) // 4
    else:
        with pytest.raises(ProtocolError):
            wire.column_from_bytes(data)


def test_an_unknown_finish_reason_is_a_protocol_error_that_names_it() -> None:
    proto = pb.AttachFrontendResponse(endings=[pb.Ending(stream_id=1, finish_reason="bored")])
    with pytest.raises(ProtocolError, match="'bored'"):
        wire.delivery_from_proto(proto)


@pytest.mark.parametrize("status", ["", "TIRED", "internal"])
def test_an_ending_without_reason_or_known_status_is_a_protocol_error(status: str) -> None:
    proto = pb.AttachFrontendResponse(endings=[pb.Ending(stream_id=1, status=status, message="m")])
    with pytest.raises(ProtocolError, match=f"'{status}'"):
        wire.delivery_from_proto(proto)


# -- columns and sizes -------------------------------------------------------------------------------------------------


def test_a_column_is_little_endian_int32_whatever_the_array_s_layout() -> None:
    numbers = [1, -1, 2**31 - 1, -(2**31)]
    expected = b"\1\0\0\0\xff\xff\xff\xff\xff\xff\xff\x7f\0\0\0\x80"
    strided: Int32Array = np.repeat(np.array(numbers, np.int32), 2)[::2]
    for column in (np.array(numbers, np.int32), np.array(numbers, ">i4"), strided):
        assert wire.column_to_bytes(column) == expected
    assert wire.column_from_bytes(expected).tolist() == numbers


def test_a_column_that_was_read_is_int32_and_cannot_be_written() -> None:
    for data in (b"", b"\1\0\0\0"):
        column = wire.column_from_bytes(data)
        assert column.dtype == np.int32
        assert not column.flags.writeable


def test_a_plan_of_steady_decode_takes_less_than_32_bytes() -> None:
    rows = np.arange(256, dtype=np.int32)
    first = pb.AttachWorkerResponse(plan=wire.plan_to_proto(StepPlan(step=1, decode_rows=rows)))
    assert first.ByteSize() > 4 * 256
    steady = pb.AttachWorkerResponse(plan=wire.plan_to_proto(StepPlan(step=2**63)))
    assert steady.ByteSize() < 32


def test_a_plan_of_decode_with_sixteen_new_blocks_takes_tens_of_bytes() -> None:
    sixteen = np.arange(16, dtype=np.int32)
    plan = StepPlan(step=2**40, block_rows=sixteen, block_ids=sixteen)
    assert wire.plan_to_proto(plan).ByteSize() < 2 * 4 * 16 + 20
