"""Every vector of seed_vectors.json is a test here."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from driving import answer, run, scheduler_of

from blockplane.control_plane.engine.kv_planning import RankKV, plan_kv_cache
from blockplane.control_plane.engine.request import Request
from blockplane.control_plane.engine.scheduler import Scheduler
from blockplane.data_plane import block_table
from blockplane.data_plane.attention import DecodeBatch, PrefillBatch
from blockplane.data_plane.block_table import BlockTable, null_to_skip, num_kernel_blocks
from blockplane.data_plane.inputs import decode_inputs, prefill_inputs
from blockplane.data_plane.models.config_json import parse_config
from blockplane.data_plane.models.synthetic import SyntheticModel
from blockplane.data_plane.rows import Rows
from blockplane.data_plane.runner import Runner
from blockplane.kernels import masks, reference
from blockplane.kernels.slots import PAD_SLOT_ID, ContextParallel, context_parallel_of, keep_slots, slots_of
from blockplane.protos.buckets import (
    SEED_RULES,
    BucketRules,
    choose_bucket,
    num_kv_segments,
    num_partial_segment_tokens,
)
from blockplane.protos.config import load_config
from blockplane.protos.errors import ConfigurationError, ModelError
from blockplane.protos.kv_cache import KVCacheGroup, KVCacheTensor
from blockplane.protos.model import LayerKVSpec
from blockplane.protos.plan import Admission, Configure, StepPlan
from blockplane.protos.sampling import SamplingParams

CASES = {case["name"]: case for case in json.loads((Path(__file__).parent / "seed_vectors.json").read_text())["cases"]}

Check = Callable[[dict[str, Any], dict[str, Any]], None]
CHECKS: dict[str, Check] = {}


def vector(check: Check) -> Check:
    """Register a check under its vector's name, which is its own."""
    CHECKS[check.__name__] = check
    return check


def test_every_vector_is_a_test() -> None:
    assert CHECKS.keys() == CASES.keys()


# -- seed 000: blocks, slots, padding ----------------------------------------------------------------------------------


def make_rows(block_tables: list[list[int]], num_tokens: list[int], computed: list[int], **configure: Any) -> Rows:
    """Rows that hold requests of `num_tokens` tokens, of which `computed` are in the cache."""
    settings = {
        "block_size": 64,
        "num_blocks": 100,
        "max_model_len": 512,
        "num_batched_tokens_buckets": (128, 256, 512),
        "num_seqs_buckets": (8,),
    }
    rows = Rows(Configure(**{**settings, **configure}))
    rows.apply(
        StepPlan(
            step=1,
            admissions=tuple(
                Admission(row, np.arange(1, tokens + 1, dtype=np.int32), tokens, done, SamplingParams(1), 0)
                for row, (tokens, done) in enumerate(zip(num_tokens, computed, strict=True))
            ),
            block_rows=np.array([row for row, blocks in enumerate(block_tables) for _ in blocks], np.int32),
            block_ids=np.array([block for blocks in block_tables for block in blocks], np.int32),
        )
    )
    return rows


def slots(block_tables: list[list[int]], req_indices: list[int], positions: list[int], block_size: int) -> list[int]:
    """The formula on numpy and on torch, which must agree."""
    table = np.array(block_tables, np.int32)
    on_numpy = slots_of(table, np.array(req_indices), np.array(positions, np.int64), block_size)
    on_torch = slots_of(
        torch.from_numpy(table), torch.tensor(req_indices), torch.tensor(positions, dtype=torch.int64), block_size
    )
    assert on_numpy.dtype == np.int64
    assert on_torch.dtype == torch.int64
    assert on_numpy.tolist() == on_torch.tolist()
    return [int(slot) for slot in on_numpy]


@vector
def cache_shape(given: dict[str, Any], expect: dict[str, Any]) -> None:
    configure = Configure(given["block_size"], given["total_blocks"], 64, (128,), (1,))
    model = SyntheticModel("float32")
    runner = Runner(model, configure)
    spec = model.attentions[0].spec
    shape = [runner.configure.num_blocks, configure.block_size, spec.num_kv_heads, spec.head_dim]
    assert [list(cache.shape) for cache in model.attentions[0].caches] == [shape, shape]
    assert shape[:2] == expect["shape"][:2]
    assert scheduler_of(configure).blocks.pool.num_usable == expect["usable_blocks"]


@vector
def slot_single(given: dict[str, Any], expect: dict[str, Any]) -> None:
    position, block_size = given["position"], given["block_size"]
    assert position // block_size == expect["block_index"]
    assert given["block_table"][expect["block_index"]] == expect["block_number"]
    assert position % block_size == expect["block_offset"]
    assert slots([given["block_table"]], [0], [position], block_size) == [expect["slot"]]


@vector
def slot_cross_boundary(given: dict[str, Any], expect: dict[str, Any]) -> None:
    positions = given["positions"]
    assert slots([given["block_table"]], [0] * len(positions), positions, given["block_size"]) == expect["slots"]


@vector
def two_requests_one_batch(given: dict[str, Any], expect: dict[str, Any]) -> None:
    tables, rows, positions = given["block_tables"], given["req_indices"], given["positions"]
    assert slots(tables, rows, positions, given["block_size"]) == expect["slots"]


@vector
def spec_decode_4x4_slots(given: dict[str, Any], expect: dict[str, Any]) -> None:
    for table, positions, wanted in zip(given["block_tables"], given["positions"], expect["slots"], strict=True):
        assert slots([table], [0] * 4, positions, given["block_size"]) == wanted


@vector
def spec_decode_4x4(given: dict[str, Any], expect: dict[str, Any]) -> None:
    num_rows, num_tokens = 4, expect["consecutive_per_request"]
    tables = [[3 * row + 1, 3 * row + 2, 3 * row + 3] for row in range(num_rows)]
    starts = given["positions"][::num_tokens]
    rows = make_rows(tables, [200] * num_rows, starts, num_draft_tokens=num_tokens - 1, num_seqs_buckets=(num_rows,))
    inputs = decode_inputs(rows, np.arange(num_rows, dtype=np.int32), np.full(num_rows, num_tokens, np.int32))
    assert np.repeat(inputs.rows, inputs.num_scheduled_tokens).tolist() == given["req_indices"]
    assert inputs.positions.tolist() == given["positions"]
    assert len(inputs.input_ids) == expect["total_tokens"]
    mapping = inputs.batches[0].slot_mapping
    assert len(set(mapping[mapping >= 0].tolist())) == expect["num_slots"]


@vector
def mask_cache_rule(given: dict[str, Any], expect: dict[str, Any]) -> None:
    cache_lens, sizes = torch.tensor([[0], [3], [7]]), {"B": 3, "num_heads": 2, "S_decode": 4, "S_ctx": 7}
    assert given["cache_len_shape"] == ["B", 1]
    mask = masks.cache_mask(cache_lens, sizes["num_heads"], sizes["S_decode"], sizes["S_ctx"])
    assert list(mask.shape) == [sizes[axis] for axis in given["shape"]]
    assert expect["value"] == "1 where position < cache_len, else 0"
    for row, (cache_len,) in enumerate(cache_lens.tolist()):
        assert mask[row].sum(-1).tolist() == [[cache_len] * 4] * 2
        assert mask[row, ..., :cache_len].all()


@vector
def mask_cache_example(given: dict[str, Any], expect: dict[str, Any]) -> None:
    mask = masks.cache_mask(torch.tensor([[given["cache_len"]]]), 1, 1, given["S_ctx"])
    assert mask[0, 0, 0].int().tolist() == expect["row"]


@vector
def mask_active_shape(given: dict[str, Any], expect: dict[str, Any]) -> None:
    """The mask is an input: all ones let a token see the drafts after it, the triangle does not."""
    torch.manual_seed(0)
    num_seqs, num_tokens, num_heads = given["B"], given["S_decode"], 2
    sizes = {"B": num_seqs, "num_heads": num_heads, "S_decode": num_tokens}
    triangle = masks.causal_active_mask(num_seqs, num_heads, num_tokens, torch.device("cpu"))
    assert list(triangle.shape) == [sizes.get(axis, axis) for axis in expect["shape"]]
    k_cache, v_cache = torch.randn(2, 9, 4, 1, 8)
    block_table = torch.arange(1, 9).view(num_seqs, 2)
    seq_lens = torch.tensor([4, 5, 7, 8], dtype=torch.int32)
    query = torch.randn(num_seqs, num_tokens, num_heads, 8)
    chain, verified, default = (
        reference.decode_attention(query, k_cache, v_cache, block_table, seq_lens, scale=0.3, mask_active=mask)
        for mask in (triangle, torch.ones_like(triangle), None)
    )
    assert torch.equal(chain, default)
    assert torch.equal(chain[:, -1], verified[:, -1]), "the last token has none after it"
    assert not torch.isclose(chain[:, :-1], verified[:, :-1]).all(dim=-1).any()


@vector
def decode_batch_positions(given: dict[str, Any], expect: dict[str, Any]) -> None:
    positions = given["positions"]
    tables = [[10 * row + 1, 10 * row + 2] for row in given["req_indices"]]
    rows = make_rows(tables, [position + 1 for position in positions], positions)
    inputs = decode_inputs(rows, np.array(given["req_indices"], np.int32))
    written = inputs.batches[0].slot_mapping[inputs.batches[0].slot_mapping >= 0]
    assert inputs.positions[: len(positions)].tolist() == positions
    assert len(set(written.tolist())) == expect["num_slots"]


@vector
def prefill_bucket_choice(given: dict[str, Any], expect: dict[str, Any]) -> None:
    bucket = choose_bucket(given["num_tokens"], tuple(given["buckets"]))
    assert bucket == expect["bucket"]
    assert bucket - given["num_tokens"] == expect["padding"]


@vector
def prefill_100_padded_128(given: dict[str, Any], expect: dict[str, Any]) -> None:
    num_tokens, bucket = given["num_tokens"], given["bucket"]
    blocks = [block for block in given["block_table"] if block]
    assert len(blocks) == expect["blocks_needed"]
    rows = make_rows([blocks], [num_tokens], [0], block_size=given["block_size"])
    inputs = prefill_inputs(rows, np.array([0], np.int32), np.array([num_tokens], np.int32))
    mapping = inputs.batches[0].slot_mapping
    assert inputs.input_ids.shape == inputs.positions.shape == mapping.shape == (bucket,)
    assert mapping[[0, 1, 63, 64, 99]].tolist() == expect["slots_0_1_63_64_99"]
    assert mapping[num_tokens:].tolist() == [expect["pad_value"]] * expect["pad_slots"]
    assert int((mapping != PAD_SLOT_ID).sum()) == expect["writes"]


@vector
def padding_allocates_nothing(given: dict[str, Any], expect: dict[str, Any]) -> None:
    scheduler = scheduler_of(Configure(given["block_size"], 100, 512, (given["bucket"],), (8,)))
    scheduler.add([make_request(given["num_tokens"])])
    plan = scheduler.schedule()
    assert plan is not None
    assert len(plan.block_ids) == expect["blocks_needed"]


@vector
def per_request_padding_inside_a_batch(given: dict[str, Any], expect: dict[str, Any]) -> None:
    """Padding after each request's own tokens is what a mask over the padded positions gives."""
    padded = given["padded"]
    req_indices = np.repeat(np.arange(len(padded)), padded)
    positions = np.concatenate([np.arange(num, dtype=np.int64) for num in padded])
    is_actual = positions < np.repeat(given["actual"], padded)
    mapping = slots_of(np.array(given["block_tables"], np.int32), req_indices, positions, given["block_size"])
    assert keep_slots(mapping, is_actual).tolist() == expect["slots"]


@vector
def null_block_remap(given: dict[str, Any], expect: dict[str, Any]) -> None:
    assert null_to_skip(np.array(given["block_table"], np.int32)).tolist() == expect["block_table"]


@vector
def num_seqs_buckets(given: dict[str, Any], expect: dict[str, Any]) -> None:
    buckets = tuple(given["num_seqs_buckets"])
    for active, (bucket, padding) in expect["active_to_bucket_padding"].items():
        assert choose_bucket(int(active), buckets) == bucket
        assert bucket - int(active) == padding


@vector
def num_seqs_single_bucket(given: dict[str, Any], expect: dict[str, Any]) -> None:
    num_seqs_buckets(given, expect)


@vector
def num_seqs_beyond_last_bucket(given: dict[str, Any], expect: dict[str, Any]) -> None:
    """The last bucket is max_num_seqs, so at most 8 of 9 are scheduled; no other limit can be set."""
    buckets = tuple(given["num_seqs_buckets"])
    assert choose_bucket(given["active"], buckets) is None
    scheduler = scheduler_of(Configure(16, 100, 512, (512,), buckets))
    scheduler.add([make_request(3) for _ in range(given["active"])])
    plan = scheduler.schedule()
    assert plan is not None
    assert len(plan.admissions) == 8
    assert expect["scheduled"].startswith("at most 8")


@vector
def decode_pad_2_of_8(given: dict[str, Any], expect: dict[str, Any]) -> None:
    rows = make_rows([[10], [8]], [21, 31], [20, 30], num_seqs_buckets=tuple(given["num_seqs_buckets"]))
    inputs = decode_inputs(rows, np.array([0, 1], np.int32))
    batch = inputs.batches[0]
    assert isinstance(batch, DecodeBatch)
    assert list(inputs.input_ids.shape) == expect["input_ids_shape"]
    assert set(inputs.input_ids[2:].tolist()) == {expect["input_ids_pad"]}
    assert list(inputs.positions.shape) == expect["positions_shape"]
    assert set(inputs.positions[2:].tolist()) == {expect["positions_pad"]}
    assert list(batch.slot_mapping.shape) == expect["slot_mapping_shape"]
    assert set(batch.slot_mapping[2:].tolist()) == {expect["slot_mapping_pad"]}
    assert batch.block_table.shape[0] == expect["block_table_shape"][0]
    assert inputs.logits_indices.tolist() == expect["sampling_positions"]
    assert int((batch.slot_mapping >= 0).sum()) == expect["kv_writes"]
    assert rows.block_table.num_blocks.sum() == 2 + expect["new_blocks_for_padding"]


@vector
def padding_rows_table(given: dict[str, Any], expect: dict[str, Any]) -> None:
    """Padding rows that point at existing rows and padding rows of skipped blocks: the same output for real rows."""
    torch.manual_seed(0)
    k_cache, v_cache = torch.randn(2, 6, 4, 1, 8)
    query = torch.randn(4, 1, 2, 8)
    seq_lens = torch.tensor([7, 3, 0, 0], dtype=torch.int32)
    real = [[1, 2], [3, -1]]
    outputs = [
        reference.decode_attention(query, k_cache, v_cache, torch.tensor(real + padding), seq_lens, scale=0.3)
        for padding in ([real[0], real[1]], [[-1, -1], [-1, -1]])
    ]
    assert torch.equal(outputs[0][:2], outputs[1][:2])
    assert outputs[0][:2].abs().sum() > 0


# -- seed 001: prefill in segments -------------------------------------------------------------------------------------


def make_request(num_prompt_tokens: int, **params: Any) -> Request:
    token_ids = np.arange(1, num_prompt_tokens + 1, dtype=np.int32)
    return Request("r", token_ids, num_prompt_tokens, SamplingParams(params.pop("max_tokens", 4), **params), seed=0)


def run_prefill(scheduler: Scheduler) -> list[StepPlan]:
    """The steps until the only request's first token."""
    plans = []
    while (plan := scheduler.schedule()) is not None and plan.prefill_rows.size:
        plans.append(plan)
        scheduler.update(answer(scheduler, plan))
    return plans


@vector
def segmentation_10000(given: dict[str, Any], expect: dict[str, Any]) -> None:
    scheduler = scheduler_of(Configure(128, 200, 16384, (given["max_num_batched_tokens"],), (8,)))
    scheduler.add([make_request(given["num_prompt_tokens"])])
    segments = [int(plan.prefill_num_tokens[0]) for plan in run_prefill(scheduler)]
    assert np.cumsum(segments).tolist() == expect["num_computed_after_each_step"]
    assert segments[-1] == expect["last_step_tokens"]
    assert 2048 - segments[-1] == expect["last_step_bucket_2048_padding"]


@vector
def prior_tokens_block_aligned(given: dict[str, Any], expect: dict[str, Any]) -> None:
    block_size = given["block_size"]
    scheduler = scheduler_of(Configure(block_size, 200, 8192, (given["budget"],), (8,)))
    scheduler.add([make_request(5, max_tokens=50) for _ in range(given["decode_rows"])])
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.update(answer(scheduler, plan))
    scheduler.add([make_request(5000)])
    plan = scheduler.schedule()
    assert plan is not None
    assert plan.decode_rows is not None
    assert len(plan.decode_rows) == given["decode_rows"]
    assert plan.prefill_num_tokens.tolist() == [given["budget"]]
    assert given["budget"] % block_size == 0
    assert expect["prefill_segment"].startswith("a multiple of 128")


def cache_prefix(scheduler: Scheduler, num_tokens: int) -> None:
    """Leave the blocks of a request behind whose prompt begins as `make_request`'s do."""
    run(scheduler, make_request(num_tokens, max_tokens=1))


@vector
def incremental_allocation(given: dict[str, Any], expect: dict[str, Any]) -> None:
    block_size, prompt = given["block_size"], given["num_prompt_tokens"]
    # One token more than the prompt, which leaves room for what it is asked for.
    configure = Configure(block_size, 200, given["max_model_len"] + 1, (given["max_num_batched_tokens"],), (8,))
    assert Configure(block_size, 200, given["max_model_len"], (128,), (8,)).max_blocks_per_row == expect["row_width"]
    scheduler, rows = scheduler_of(configure), Rows(configure)
    cache_prefix(scheduler, given["prefix_cached"])
    scheduler.add([make_request(prompt)])
    num_blocks, new_per_step, computed = [], [], []
    for step in range(1, 4):
        plan = scheduler.schedule()
        assert plan is not None
        rows.apply(replace(plan, step=step, released_rows=plan.released_rows[:0]))
        rows.advance(plan.prefill_rows, plan.prefill_num_tokens)
        (row,) = plan.prefill_rows.tolist()
        num_blocks.append(int(rows.block_table.num_blocks[row]))
        new_per_step.append(len(plan.block_ids) - (given["prefix_cached"] // block_size if step == 1 else 0))
        computed.append(int(rows.num_computed_tokens[row]))
        if step == 1:
            width = expect["row_width"]
            assert rows.block_table.block_ids[0, row, :width].tolist() == [*range(1, 49)] + [0] * (width - 48)
        scheduler.update(answer(scheduler, plan))
    assert computed == expect["tokens_needing_slots"]
    assert num_blocks == expect["blocks_after_step"]
    assert new_per_step == expect["new_per_step"]


@vector
def prefix_10_of_15(given: dict[str, Any], expect: dict[str, Any]) -> None:
    scheduler = scheduler_of(Configure(given["block_size"], 100, 64, (64,), (8,)))
    cache_prefix(scheduler, given["shared"])
    scheduler.add([make_request(given["prompt_2_tokens"])])
    plan = scheduler.schedule()
    assert plan is not None
    assert plan.admissions[0].num_computed_tokens == expect["reused"]
    assert plan.prefill_num_tokens.tolist() == [expect["computed"]]


@vector
def prefix_10_of_15_block16(given: dict[str, Any], expect: dict[str, Any]) -> None:
    prefix_10_of_15(given, expect)


@vector
def pad_active_only(given: dict[str, Any], expect: dict[str, Any]) -> None:
    blocks = list(range(1, 49))
    rows = make_rows(
        [blocks],
        [given["num_prompt_tokens"]],
        [given["cached"]],
        block_size=128,
        max_model_len=10240,
        num_batched_tokens_buckets=(given["bucket"],),
    )
    inputs = prefill_inputs(rows, np.array([0], np.int32), np.array([given["active"]], np.int32))
    assert isinstance(inputs.batches[0], PrefillBatch)
    assert len(inputs.input_ids) == expect["tensor_tokens"]
    assert int((inputs.batches[0].slot_mapping == PAD_SLOT_ID).sum()) == expect["padding"]
    assert inputs.batches[0].prior_tokens.tolist() == [given["cached"]]


@vector
def padded_vs_actual_fields(given: dict[str, Any], expect: dict[str, Any]) -> None:
    assert expect["num_computed_advances_by"] == "num_scheduled_tokens"
    check_advance(given["num_scheduled_tokens"], given["num_scheduled_tokens_padded"])


@vector
def padded_vs_actual_5000(given: dict[str, Any], expect: dict[str, Any]) -> None:
    assert check_advance(given["num_scheduled_tokens"], given["bucket"]) == expect["num_computed_advances_by"]


def check_advance(num_scheduled: int, bucket: int) -> int:
    """Run one padded prefill on the worker's rows; returns by how much its computed tokens advance."""
    blocks = list(range(1, 1 + -(-num_scheduled // 128)))
    rows = make_rows(
        [blocks],
        [num_scheduled],
        [0],
        block_size=128,
        max_model_len=8192,
        num_batched_tokens_buckets=(bucket,),
    )
    inputs = prefill_inputs(rows, np.array([0], np.int32), np.array([num_scheduled], np.int32))
    assert len(inputs.input_ids) == bucket
    rows.advance(inputs.rows, inputs.num_scheduled_tokens)
    assert rows.num_computed_tokens[0] == num_scheduled
    return int(rows.num_computed_tokens[0])


@vector
def kv_segments_iterated(given: dict[str, Any], expect: dict[str, Any]) -> None:
    iterated = [num_kv_segments(prior, given["kv_segment_size"]) for prior in given["cached_seq_len"]]
    assert iterated == expect["segments"]


@vector
def partial_segment(given: dict[str, Any], expect: dict[str, Any]) -> None:
    prior_tokens, size, block_size = given["cached_seq_len"], given["kv_segment_size"], given["block_size"]
    valid = num_partial_segment_tokens(prior_tokens, size)
    assert valid == expect["partial_valid_tokens"]
    assert num_kv_segments(prior_tokens, size) == expect["segments_iterated"]
    assert num_kv_segments(prior_tokens - valid, size) == expect["full_segments"]
    assert size - valid == expect["masked_in_last"]
    assert (prior_tokens // block_size, valid // block_size) == (expect["blocks"], expect["partial_valid_blocks"])


def plan_buckets(rules: BucketRules, **settings: str) -> Configure:
    """What a worker of such a backend is told; raises ConfigurationError where the settings are none for it."""
    rank = RankKV((LayerKVSpec("0", 1, 8, "bfloat16"),), 1 << 30)
    (configure,) = plan_kv_cache(load_config(settings, {}), [rank], rules, 16384)
    return configure


@vector
def kv_segment_size_allowed(given: dict[str, Any], expect: dict[str, Any]) -> None:
    def plan_with(size: int, **settings: str) -> Configure:
        same = {"num_batched_tokens_buckets": str(max(size, 128)), "kv_segment_size_buckets": str(size)}
        return plan_buckets(SEED_RULES, **same, **settings)

    for size in given["bucket_values"]:
        assert plan_with(size).kv_segment_size == size
    for size in expect["reject_in_bucket_list"]:
        with pytest.raises(ConfigurationError, match=rf"^kv_segment_size_buckets is \[{size}\]"):
            plan_with(size)
    assert expect["zero_as_setting"].startswith("segmented prefill off")
    assert plan_with(1000, segmented_prefill="off").kv_segment_size == 0


@vector
def kv_segment_not_divisible(given: dict[str, Any], expect: dict[str, Any]) -> None:
    size, block_size = given["kv_segment_size"], given["block_size"]
    assert expect["error"] == "typed, names both"
    settings = {"num_batched_tokens_buckets": str(size), "kv_segment_size_buckets": str(size)}
    with pytest.raises(
        ConfigurationError, match=rf"^kv_segment_size_buckets is \[{size}\], .* block_size, {block_size};"
    ):
        plan_buckets(SEED_RULES, **settings, block_size=str(block_size))


@vector
def buckets_must_match(given: dict[str, Any], expect: dict[str, Any]) -> None:
    assert "a backend states whether it keeps it or lifts it" in expect["note"]
    for case in given["cases"]:
        names = ("num_batched_tokens_buckets", "kv_segment_size_buckets")
        settings = {name: ",".join(map(str, case[name])) for name in names}
        assert plan_buckets(BucketRules(), **settings).kv_segment_size == case["kv_segment_size_buckets"][0]
        if case["valid"]:
            assert plan_buckets(SEED_RULES, **settings).kv_segment_size == case["kv_segment_size_buckets"][0]
            continue
        with pytest.raises(
            ConfigurationError,
            match=r"^num_batched_tokens_buckets is \[1024, 2048\] and kv_segment_size_buckets is \[2048\]",
        ):
            plan_buckets(SEED_RULES, **settings)


@vector
def prefix_plus_segments(given: dict[str, Any], expect: dict[str, Any]) -> None:
    size = given["kv_segment_size"]
    buckets = (given["max_num_batched_tokens"],)
    scheduler = scheduler_of(Configure(given["block_size"], 200, 16384, buckets, (8,), kv_segment_size=size))
    cache_prefix(scheduler, given["prefix_cached"])
    scheduler.add([make_request(given["num_prompt_tokens"])])
    plans = run_prefill(scheduler)
    active = [int(plan.prefill_num_tokens[0]) for plan in plans]
    computed = plans[0].admissions[0].num_computed_tokens + np.cumsum(active)
    assert computed.tolist() == expect["num_computed_after"]
    assert sum(active) == given["to_compute"]
    cached = (computed - active).tolist()
    steps = [
        {"active": tokens, "cached": prior, "segments": num_kv_segments(prior, size)}
        for tokens, prior in zip(active, cached, strict=True)
    ]
    assert steps == expect["steps"]


@vector
def decode_threshold(given: dict[str, Any], expect: dict[str, Any]) -> None:
    configure = Configure(16, 100, 512, (128,), (8,), num_draft_tokens=given["max_num_draft_tokens"])
    assert configure.decode_token_threshold == expect["decode_token_threshold"]


# -- seed 002: planning and the first plan -----------------------------------------------------------------------------


@vector
def new_request_data(given: dict[str, Any], expect: dict[str, Any]) -> None:
    prompt = given["prompt_token_ids"]
    scheduler = scheduler_of(Configure(16, 16384, 4096, (2048,), (8,)), vocab_size=128256, eos_token_ids=(128001,))
    scheduler.add([Request("0", np.array(prompt, np.int32), len(prompt), SamplingParams(2), seed=0)])
    plan = scheduler.schedule()
    assert plan is not None
    (admission,) = plan.admissions
    assert admission.token_ids.tolist() == prompt
    assert [plan.block_ids.tolist()] == expect["block_ids"]
    assert admission.num_computed_tokens == expect["num_computed_tokens"]
    assert plan.prefill_num_tokens.tolist() == [expect["num_scheduled_tokens"]]
    assert plan.prefill_num_tokens.sum() == expect["total_num_scheduled_tokens"]
    common = scheduler.blocks.num_common_prefix_blocks(plan.prefill_rows)
    assert common == expect["num_common_prefix_blocks"], "a lone request has all in common with itself"


@vector
def kv_cache_spec_tp2(given: dict[str, Any], expect: dict[str, Any]) -> None:
    """Every field of what both ranks are told."""
    layers = tuple(
        LayerKVSpec(name, given["num_kv_heads_model"] // given["tp"], given["head_size"], given["dtype"])
        for name in given["layers"]
    )
    assert {layer.num_kv_heads for layer in layers} == {expect["num_kv_heads_per_rank"]}
    rank = RankKV(layers, expect["tensors"] * expect["bytes_per_tensor"])
    settings = {"block_size": str(given["block_size"]), "profile": "development"}
    configures = plan_kv_cache(load_config(settings, {}), [rank] * given["tp"], SEED_RULES, 4096)
    expected = Configure(
        block_size=16,
        num_blocks=16384,
        max_model_len=4096,
        num_batched_tokens_buckets=(512,),
        num_seqs_buckets=(8,),
        kv_cache_groups=(
            KVCacheGroup(
                layer_names=("layers.0.self_attn", "layers.1.self_attn"),
                num_kv_heads=4,
                head_dim=128,
                dtype="bfloat16",
                sliding_window=None,
                attention_chunk_size=None,
            ),
        ),
        kv_cache_tensors=(
            KVCacheTensor(size=536870912, shared_by=("layers.0.self_attn",)),
            KVCacheTensor(size=536870912, shared_by=("layers.1.self_attn",)),
        ),
        kv_segment_size=512,
        decode_context_length_buckets=(512, 1024, 2048, 4096),
        prefill_multiple_of=1,
        num_draft_tokens=0,
    )
    assert configures == (expected, expected)
    assert (len(expected.kv_cache_groups), len(expected.kv_cache_tensors)) == (expect["groups"], expect["tensors"])


@vector
def min_memory_over_ranks(given: dict[str, Any], expect: dict[str, Any]) -> None:
    """The memory is in blocks here: K and V of 16 tokens of one head of 8 bfloat16 numbers."""
    memory = given["available_memory"]
    assert expect["num_blocks"] == "from the least"
    for order in (memory, memory[::-1]):
        ranks = [RankKV((LayerKVSpec("0", 1, 8, "bfloat16"),), num_blocks * 512) for num_blocks in order]
        configures = plan_kv_cache(load_config({}, {}), ranks, BucketRules(), 64)
        assert [configure.num_blocks for configure in configures] == [min(memory)] * len(memory)


# -- seed 004: the block table -----------------------------------------------------------------------------------------


@vector
def table_shape_dtype(given: dict[str, Any], expect: dict[str, Any]) -> None:
    rows = make_rows([[10]], [3], [0])
    assert rows.block_table.block_ids.dtype == np.int32
    assert rows.block_table.block_ids.shape == (1, 8, 8)
    inputs = prefill_inputs(rows, np.array([0], np.int32), np.array([3], np.int32))
    assert isinstance(inputs.batches[0], PrefillBatch)
    assert inputs.batches[0].query_start_loc.dtype == torch.int32
    assert inputs.batches[0].query_start_loc.shape == (2,)
    assert f"torch.{expect['positions']}" == str(inputs.positions.dtype)
    assert inputs.batches[0].slot_mapping.dtype == torch.int64


@vector
def append_empty(given: dict[str, Any], expect: dict[str, Any]) -> None:
    table = BlockTable(1, 1, 4)
    table.append_row(0, np.array([[5]], np.int32))
    table.append_row(0, np.array([given["append_row"]], np.int32))
    assert table.num_blocks.tolist() == [1]
    assert expect["num_blocks_per_row"] == "unchanged"


@vector
def add_row_shorter_leaves_no_stale_ids(given: dict[str, Any], expect: dict[str, Any]) -> None:
    table = BlockTable(1, 1, 3)
    table.add_row(0, np.array([given["row_before"]], np.int32))
    table.add_row(0, np.array([given["add_row"]], np.int32))
    assert table.block_ids[0, 0].tolist() == expect["row"]
    assert table.num_blocks[0] == expect["num_blocks"]


@vector
def clear_row(given: dict[str, Any], expect: dict[str, Any]) -> None:
    table = BlockTable(1, 1, 3)
    table.add_row(0, np.array([given["row"]], np.int32))
    table.clear_row(0)
    assert table.block_ids[0, 0].tolist() == expect["row"]
    assert table.num_blocks[0] == expect["num_blocks"]


@vector
def move_and_swap(given: dict[str, Any], expect: dict[str, Any]) -> None:
    """And a row that moves: its blocks are in one row, not in two."""
    table = BlockTable(1, 2, 2)
    for row, block_ids in enumerate(given["rows"]):
        table.add_row(row, np.array([block_ids], np.int32))
    assert given["ops"] == ["swap 0 1"]
    table.swap_row(0, 1)
    assert table.block_ids[0].tolist() == expect["rows"]
    assert table.num_blocks.tolist() == expect["num_blocks"]
    table.move_row(1, 0)
    assert table.block_ids[0].tolist() == [[1, 2], [0, 0]]
    assert table.num_blocks.tolist() == [2, 0]


@vector
def kernel_block_must_divide(given: dict[str, Any], expect: dict[str, Any]) -> None:
    sizes = given["manager_block_size"], given["kernel_block_size"]
    with pytest.raises(ConfigurationError) as error:
        BlockTable(1, 1, 1, *sizes)
    assert all(str(size) in str(error.value) for size in sizes)
    assert expect["error"] == "typed, names both numbers"


@vector
def map_to_kernel_blocks(given: dict[str, Any], expect: dict[str, Any]) -> None:
    num_parts = num_kernel_blocks(given["manager_block_size"], given["kernel_block_size"])
    assert num_parts == expect["blocks_per_kv_block"]
    block_ids = np.array([*given["block_ids"], -1], np.int32)
    assert block_table.map_to_kernel_blocks(block_ids, num_parts).tolist() == [*expect["kernel_block_ids"], -1, -1]


@vector
def kernel_split_same_slot(given: dict[str, Any], expect: dict[str, Any]) -> None:
    sizes = given["manager_block_size"], given["kernel_block_size"]
    table = BlockTable(1, 1, 2, *sizes)
    table.add_row(0, np.array([given["block_table"]], np.int32))
    through_kernel_blocks = table.gather(np.array([0]), 1, 2)[0]
    position = [given["position"]]
    assert slots([given["block_table"]], [0], position, sizes[0]) == [expect["slot_through_manager_blocks"]]
    assert slots(through_kernel_blocks.tolist(), [0], position, sizes[1]) == [expect["slot_through_kernel_blocks"]]


@vector
def cp_interleave(given: dict[str, Any], expect: dict[str, Any]) -> None:
    """And over more positions than one block holds: each is owned by one rank, and a rank's slots are compact."""
    world_size, block_size = given["total_cp_world_size"], given["block_size"]
    ranks = [ContextParallel(world_size, rank, given["cp_kv_cache_interleave_size"]) for rank in range(world_size)]
    table, span = np.array([[*given["block_table"], 3]], np.int32), block_size * world_size
    for positions, expected in (given["positions"], [expect["rank0"], expect["rank1"]]), (list(range(2 * span)), None):
        rows = np.zeros(len(positions), np.int64)
        mappings = [slots_of(table, rows, np.array(positions), block_size, rank) for rank in ranks]
        on_torch = [
            slots_of(torch.from_numpy(table), torch.from_numpy(rows), torch.tensor(positions), block_size, rank)
            for rank in ranks
        ]
        assert [mapping.tolist() for mapping in mappings] == [mapping.tolist() for mapping in on_torch]
        assert ((np.array(mappings) != PAD_SLOT_ID).sum(axis=0) == 1).all()
        if expected is not None:
            assert [mapping.tolist() for mapping in mappings] == expected
        else:
            whole_blocks = [*range(10 * block_size, 11 * block_size), *range(3 * block_size, 4 * block_size)]
            assert all(mapping[mapping != PAD_SLOT_ID].tolist() == whole_blocks for mapping in mappings)


@vector
def cp_absent(given: dict[str, Any], expect: dict[str, Any]) -> None:
    group = given["context_parallel_group"]
    alone = context_parallel_of(prefill=group, decode=group)
    assert (alone.world_size, alone.rank) == (expect["world_size"], expect["rank"])


@vector
def pad_tail_from_stale_buffer(given: dict[str, Any], expect: dict[str, Any]) -> None:
    """Each step's slot mapping is a new array, so nothing stale is left to clear: the tail is -1 all the same."""
    num_tokens, length = given["num_tokens"], given["max_num_tokens"]
    rows = make_rows([[1]], [num_tokens], [0], num_batched_tokens_buckets=(length,))
    inputs = prefill_inputs(rows, np.array([0], np.int32), np.array([num_tokens], np.int32))
    assert inputs.batches[0].slot_mapping[num_tokens:].tolist() == expect["slot_mapping_5_8"]


@vector
def padding_rows_null(given: dict[str, Any], expect: dict[str, Any]) -> None:
    table = BlockTable(1, given["num_reqs"], 3)
    table.add_row(0, np.array([[4, 5]], np.int32))
    table.add_row(1, np.array([[6]], np.int32))
    gathered = table.gather(np.array([0, 1]), given["num_reqs_padded"], 3)
    assert gathered.tolist() == [[[4, 5, -1], [6, -1, -1], [-1, -1, -1], [-1, -1, -1]]]
    assert expect["rows_2_3"].endswith("-1 at the attention boundary")


@vector
def encoder_only_and_state_layers(given: dict[str, Any], expect: dict[str, Any]) -> None:
    assert expect["ours"].endswith("refused at load by a typed error naming the layer")
    with pytest.raises(ModelError, match=r"^Layer 0 is a layer of the encoder BertModel"):
        parse_config({"architectures": ["BertModel"]})
    with pytest.raises(ModelError, match=r"^Layer 1 is of kind mamba, which holds a state"):
        parse_config({"architectures": ["JambaForCausalLM"], "layer_types": ["attention", "mamba"]})


@vector
def max_num_blocks_alignment(given: dict[str, Any], expect: dict[str, Any]) -> None:
    for block_size, multiple in zip(given["block_sizes"], expect["row_width_multiple_of"], strict=True):
        for max_model_len in range(1, 5 * block_size, 7):
            width = Configure(block_size, 100, max_model_len, (512,), (8,)).max_blocks_per_row
            assert width % multiple == 0
            assert width * block_size >= max_model_len
            assert (width - multiple) * block_size < max_model_len, "no wider than it must be"


@pytest.mark.parametrize("name", sorted(CHECKS))
def test_seed_vector(name: str) -> None:
    CHECKS[name](CASES[name]["given"], CASES[name]["expect"])
