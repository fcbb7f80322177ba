"""Shapes: all are built before a worker is ready, and steps use these and no other."""

import itertools
import logging
import random
import re
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from driving import scheduler_of
from synthetic_oracle import continue_greedily
from torch import Tensor

from blockplane.control_plane.engine.request import Request
from blockplane.data_plane.attention import Attention, AttentionBatches, AttentionSpec
from blockplane.data_plane.backends.backend import Compute
from blockplane.data_plane.backends.cpu import CPU
from blockplane.data_plane.graphs import Graphs, Shape, idle_tensors, shapes_of
from blockplane.data_plane.kv_cache import bind_kv_caches
from blockplane.data_plane.models.interface import Model
from blockplane.data_plane.models.synthetic import SyntheticModel
from blockplane.data_plane.runner import Runner
from blockplane.protos.errors import ConfigurationError, ProtocolError
from blockplane.protos.plan import Admission, Configure, StepPlan
from blockplane.protos.sampling import SamplingParams

CONFIGURE = Configure(
    4, 200, max_model_len=64, num_batched_tokens_buckets=(8, 16, 48), num_seqs_buckets=(1, 2, 4, 8), kv_segment_size=16
)


def graphs_of(model: Model, *, is_compiled: bool) -> Graphs:
    idle = partial(idle_tensors, configure=CONFIGURE, is_compiled=is_compiled)
    return Graphs(model.forward, idle, CONFIGURE, replace(CPU, is_compiled=is_compiled, build=run_once))


def run_once(compute: Compute, inputs: tuple[Any, ...]) -> Compute:
    compute(*inputs)
    return compute


def test_there_is_a_shape_for_every_bucket_of_every_list() -> None:
    assert list(shapes_of(CONFIGURE)) == [*map(Shape, (48, 16, 8)), *(Shape(num, num) for num in (8, 4, 2, 1))]
    by_context = replace(CONFIGURE, num_seqs_buckets=(2, 5), decode_context_length_buckets=(32, 64), num_draft_tokens=3)
    assert list(shapes_of(by_context))[3:] == [Shape(20, 5, 64), Shape(20, 5, 32), Shape(8, 2, 64), Shape(8, 2, 32)]


def test_each_build_is_told_with_its_number_and_its_seconds(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        Runner(SyntheticModel("float32"), CONFIGURE)
    lines = [record.getMessage() for record in caplog.records if "built" in record.getMessage()]
    assert len(lines) == 7
    assert re.fullmatch(r"built 1 of 7, prefill of 48 tokens, in \d+\.\d\d s", lines[0])
    assert re.fullmatch(r"built 4 of 7, decode of 8 rows by 1 tokens, in \d+\.\d\d s", lines[3])


@pytest.mark.parametrize("is_compiled", [True, False])
def test_every_shape_is_run_where_shapes_are_compiled_and_else_the_least_of_each_kind(
    is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, lengths = TinyModel(), list[int]()
    bind_kv_caches(model, CONFIGURE, CPU)
    monkeypatch.setattr(model, "forward", lambda input_ids, positions, batches: lengths.append(len(input_ids)))
    graphs = graphs_of(model, is_compiled=is_compiled)
    graphs.build()
    assert lengths == ([48, 16, 8, 8, 4, 2, 1] if is_compiled else [8, 1])
    assert set(graphs.num_runs) == set(shapes_of(CONFIGURE))
    assert graphs.num_builds == 7


@pytest.mark.parametrize("fill", [float("nan"), 1e30])
def test_a_build_writes_no_slot(fill: float) -> None:
    model = SyntheticModel("float32")
    bind_kv_caches(model, CONFIGURE, CPU)
    caches = [cache.fill_(fill) for attention in model.attentions for cache in attention.caches or ()]
    graphs = graphs_of(model, is_compiled=True)
    graphs.build()
    assert graphs.num_builds == 7
    assert all(torch.equal(cache.nan_to_num(7.0), torch.full_like(cache, fill).nan_to_num(7.0)) for cache in caches)


def test_a_shape_that_was_not_built_is_refused_and_not_built() -> None:
    runner = Runner(SyntheticModel("float32"), CONFIGURE)
    for shape in Shape(9), Shape(3, 3), Shape(16, 4), Shape(8, 8, 64):
        with pytest.raises(ProtocolError, match=f"needs a {shape}, which is none of the 7 graphs"):
            runner.graphs.run(shape, *idle_tensors(shape, CONFIGURE))
    assert runner.graphs.num_builds == 7
    assert not any(runner.graphs.num_runs.values())


class TinyModel:
    """One layer of attention and no weights: fast, with texts that mean nothing."""

    vocab_size, dtype, kv_cache_dtype = 258, "float32", "float32"

    def __init__(self) -> None:
        self.attentions = (Attention(AttentionSpec(num_heads=1, num_kv_heads=1, head_dim=2, scale=1.0)),)

    def forward(self, input_ids: Tensor, positions: Tensor, batches: AttentionBatches) -> Tensor:
        states = torch.stack((input_ids, positions), dim=1).float()[:, None]
        return self.attentions[0](states, states, states, batches).flatten(1)

    def greedy_tokens(self, hidden: Tensor) -> Tensor | None:
        return None

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.sin(hidden[:, :1] + torch.arange(self.vocab_size))


def random_request(draw: random.Random, number: int) -> Request:
    length = draw.choice((draw.randint(1, 8), draw.randint(1, 50)))
    prompt = np.array(draw.choices(range(256), k=length), np.int32)
    return Request(
        str(number), prompt, length, SamplingParams(draw.randint(1, 64 - length), ignore_eos=True), seed=number
    )


def test_two_thousand_random_steps_reach_every_bucket_and_build_nothing() -> None:
    draw, numbers = random.Random(4), itertools.count()
    runner = Runner(TinyModel(), CONFIGURE)
    scheduler = scheduler_of(CONFIGURE, vocab_size=258)
    for _ in range(2000):
        plan = None
        while plan is None:
            # Bursts, and the lulls after them in which few rows are left.
            num_new = draw.choice((1, 2, 9)) if draw.random() < 0.03 or not scheduler.rows.num_running else 0
            scheduler.add([random_request(draw, next(numbers)) for _ in range(num_new)])
            plan = scheduler.schedule()
        scheduler.update(runner.step(plan))
    assert runner.graphs.num_builds == 7
    assert set(runner.graphs.num_runs) == set(shapes_of(CONFIGURE))
    assert min(runner.graphs.num_runs.values()) > 10
    assert sum(runner.graphs.num_runs.values()) >= 2000


# -- blocks of the kernel's own size -----------------------------------------------------------------------------------


def text(kernel_block_size: int | None, prompt: list[int], num_tokens: int) -> list[int]:
    """What a row with scattered blocks says, among NaN."""
    model = SyntheticModel("float32")
    runner = Runner(model, replace(CONFIGURE, block_size=8), kernel_block_size=kernel_block_size)
    for attention in model.attentions:
        for cache in attention.caches or ():
            assert cache.shape[1] == (kernel_block_size or 8)
            cache.fill_(float("nan"))
    block_ids = np.array([9, 3, 77, 4, 50, 2, 8], np.int32)
    admission = Admission(5, np.array(prompt, np.int32), len(prompt), 0, SamplingParams(9), 0)
    segments = [16, len(prompt) - 16]
    answer = list[int]()
    for step, num_segment_tokens in enumerate(segments, start=1):
        plan = StepPlan(
            step, prefill_rows=np.array([5], np.int32), prefill_num_tokens=np.array([num_segment_tokens], np.int32)
        )
        if step == 1:
            plan = replace(plan, admissions=(admission,), block_rows=np.full(7, 5, np.int32), block_ids=block_ids)
        answer += runner.step(plan).token_ids.tolist()
    for step in range(3, 2 + num_tokens):
        answer += runner.step(
            StepPlan(step, decode_rows=np.array([5], np.int32) if step == 3 else None)
        ).token_ids.tolist()
    return answer


@pytest.mark.parametrize("kernel_block_size", [None, 1, 2, 4, 8])
def test_a_text_is_the_same_whatever_part_of_our_blocks_the_kernel_s_are(kernel_block_size: int | None) -> None:
    prompt = list(range(30, 51))
    assert text(kernel_block_size, prompt, 20) == continue_greedily(prompt, 20, ignore_eos=True)


def test_kernel_blocks_that_do_not_divide_ours_are_refused_before_anything_is_built() -> None:
    model = SyntheticModel("float32")
    with pytest.raises(ConfigurationError, match=r"block_size is 4.*blocks of 3 tokens"):
        Runner(model, CONFIGURE, kernel_block_size=3)
    assert all(attention.caches is None for attention in model.attentions)
