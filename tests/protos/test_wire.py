"""Every message of the worker survives the wire unchanged; what no peer of ours sends is a protocol error."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st
from wire_values import (
    CUT,
    columns,
    comparable,
    logprobs,
    logprobs_for,
    models,
    sampling_params,
    seeds,
    sent,
    uint32,
)

from blockplane.protos import wire
from blockplane.protos.buckets import BucketRules
from blockplane.protos.errors import ProtocolError
from blockplane.protos.kv_cache import KVCacheGroup, KVCacheTensor
from blockplane.protos.model import LayerKVSpec
from blockplane.protos.plan import Admission, Configure, StepPlan, StepResult
from blockplane.v1 import engine_pb2 as pb

uint64 = st.integers(0, 2**64 - 1)
bucket_tuples = st.lists(uint32, max_size=5).map(tuple)
name_tuples = st.lists(st.text(), max_size=3).map(tuple)

admissions = st.builds(
    Admission,
    row=uint32,
    token_ids=columns,
    num_prompt_tokens=uint32,
    num_computed_tokens=uint32,
    params=sampling_params,
    seed=seeds,
)
plans = st.builds(
    StepPlan,
    step=uint64,
    released_rows=columns,
    admissions=st.lists(admissions, max_size=3).map(tuple),
    block_rows=columns,
    block_ids=columns,
    prefill_rows=columns,
    prefill_num_tokens=columns,
    decode_rows=st.none() | columns,
    decode_num_tokens=st.none() | columns,
)
results = columns.flatmap(
    lambda token_ids: st.builds(
        StepResult,
        step=uint64,
        token_ids=st.just(token_ids),
        num_tokens=st.none() | columns,
        logprobs=logprobs_for(len(token_ids)),
        prompt_logprobs=st.none() | logprobs,
        num_draft_tokens=uint32,
    )
)
groups = st.builds(
    KVCacheGroup,
    layer_names=name_tuples,
    num_kv_heads=uint32,
    head_dim=uint32,
    dtype=st.text(),
    sliding_window=st.none() | uint32,
    attention_chunk_size=st.none() | uint32,
)
configures = st.builds(
    Configure,
    block_size=uint32,
    num_blocks=uint32,
    max_model_len=uint32,
    num_batched_tokens_buckets=bucket_tuples,
    num_seqs_buckets=bucket_tuples,
    kv_cache_groups=st.lists(groups, max_size=3).map(tuple),
    kv_cache_tensors=st.lists(st.builds(KVCacheTensor, size=uint64, shared_by=name_tuples), max_size=3).map(tuple),
    kv_segment_size=uint32,
    decode_context_length_buckets=bucket_tuples,
    prefill_multiple_of=uint32,
    num_draft_tokens=uint32,
)
bucket_rules = st.builds(
    BucketRules,
    kv_segment_sizes=bucket_tuples,
    kv_segment_holds_whole_blocks=st.booleans(),
    prefill_equals_kv_segment=st.booleans(),
    prefill_multiple_of=st.integers(1, 2**32 - 1),
    context_is_a_shape=st.booleans(),
)
layers = st.builds(
    LayerKVSpec,
    name=st.text(),
    num_kv_heads=uint32,
    head_dim=uint32,
    dtype=st.text(),
    sliding_window=st.none() | uint32,
    attention_chunk_size=st.none() | uint32,
    shares_kv_with=st.none() | st.text(),
)

MESSAGES = [
    pytest.param(plans, wire.plan_to_proto, wire.plan_from_proto, id="plan"),
    pytest.param(results, wire.result_to_proto, wire.result_from_proto, id="result"),
    pytest.param(configures, wire.configure_to_proto, wire.configure_from_proto, id="configure"),
    pytest.param(bucket_rules, wire.bucket_rules_to_proto, wire.bucket_rules_from_proto, id="bucket_rules"),
    pytest.param(models, wire.model_info_to_proto, wire.model_info_from_proto, id="model_info"),
    pytest.param(layers, wire.layer_to_proto, wire.layer_from_proto, id="layer"),
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


def test_messages_of_defaults_come_back_as_they_were() -> None:
    plan, result = StepPlan(step=1), StepResult(step=1, token_ids=np.array([5], np.int32))
    configure = Configure(16, 100, 512, (128,), (8,))
    assert comparable(wire.plan_from_proto(sent(wire.plan_to_proto(plan)))) == comparable(plan)
    assert comparable(wire.result_from_proto(sent(wire.result_to_proto(result)))) == comparable(result)
    assert wire.configure_from_proto(sent(wire.configure_to_proto(configure))) == configure
    assert wire.bucket_rules_from_proto(sent(wire.bucket_rules_to_proto(BucketRules()))) == BucketRules()


def test_an_empty_column_and_an_absent_one_are_two_things() -> None:
    for column in (None, np.empty(0, np.int32)):
        sent_plan = StepPlan(step=1, decode_rows=column, decode_num_tokens=column)
        plan = wire.plan_from_proto(sent(wire.plan_to_proto(sent_plan)))
        result = wire.result_from_proto(sent(wire.result_to_proto(StepResult(1, np.empty(0, np.int32), column))))
        for read in (plan.decode_rows, plan.decode_num_tokens, result.num_tokens):
            assert (read is None) == (column is None)
            assert read is None or len(read) == 0


def test_no_window_and_a_window_of_zero_are_two_things() -> None:
    for size in (None, 0):
        group = KVCacheGroup(("a",), 1, 8, "float32", sliding_window=size, attention_chunk_size=size)
        configure = Configure(16, 100, 512, (128,), (8,), (group,))
        assert wire.configure_from_proto(sent(wire.configure_to_proto(configure))).kv_cache_groups == (group,)


def test_bucket_rules_that_name_no_multiple_allow_any_length() -> None:
    assert wire.bucket_rules_from_proto(pb.BucketRules()) == BucketRules()


# -- refusals ----------------------------------------------------------------------------------------------------------

READERS: list[tuple[Callable[[Any], Any], Message, str]] = [
    *((wire.plan_from_proto, pb.StepPlan(), name) for name in ("released_rows", "block_rows", "block_ids")),
    *((wire.plan_from_proto, pb.StepPlan(), name) for name in ("prefill_rows", "prefill_num_tokens")),
    *((wire.plan_from_proto, pb.StepPlan(), name) for name in ("decode_rows", "decode_num_tokens")),
    *((wire.result_from_proto, pb.StepResult(), name) for name in ("token_ids", "num_tokens")),
]


@pytest.mark.parametrize(("read", "empty", "column"), READERS)
def test_a_truncated_column_is_a_protocol_error(read: Callable[[Any], Any], empty: Message, column: str) -> None:
    read(empty)
    with pytest.raises(ProtocolError, match=r"7 bytes.*\.$"):
        read(type(empty)(**{column: CUT}))


def test_a_truncated_column_of_an_admission_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError, match="7 bytes"):
        wire.plan_from_proto(pb.StepPlan(admissions=[pb.Admission(token_ids=CUT)]))


# -- sizes -------------------------------------------------------------------------------------------------------------


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
