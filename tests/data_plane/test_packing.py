"""Prefill segments in their bucket: each from a tile on, padding between them, and never more than fits."""

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from bound_shapes import bound
from driving import scheduler_of
from hypothesis import given, settings
from hypothesis import strategies as st
from planes_in_process import Planes
from synthetic_oracle import continue_greedily

from blockplane.control_plane.engine.request import Request
from blockplane.data_plane.attention import Attention, AttentionBatches, AttentionSpec
from blockplane.data_plane.backends.cpu import CPU
from blockplane.data_plane.graphs import Shape, shapes_of
from blockplane.data_plane.models.synthetic import SyntheticModel
from blockplane.data_plane.packing import max_requests, max_segments, pack
from blockplane.data_plane.rows import Rows
from blockplane.data_plane.runner import Runner
from blockplane.protos.buckets import BucketRules
from blockplane.protos.errors import ProtocolError
from blockplane.protos.kv_cache import KVCacheGroup
from blockplane.protos.plan import Admission, Configure, StepPlan
from blockplane.protos.sampling import SamplingParams

TILED = Configure(4, 100, 64, (16, 48), (1, 4), kv_segment_size=16, prefill_multiple_of=8)


def column(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def test_each_segment_begins_at_a_tile_and_a_gap_fills_the_tile_before_it() -> None:
    packing = pack(TILED, column(5, 8, 1), column(4, 0, 12))
    assert packing.starts.tolist() == [0, 8, 16]
    assert packing.token_indices.tolist() == [0, 1, 2, 3, 4, *range(8, 16), 16]
    assert packing.offsets.tolist() == [0, 1, 2, 3, 4, *range(8), 0]
    assert packing.query_start_loc.tolist() == [0, 5, 8, 16, 16, 17, 17]
    assert packing.prior_tokens.tolist() == [4, 0, 0, 0, 12, 0]


def test_without_tiles_segments_stand_end_to_end() -> None:
    packing = pack(replace(TILED, prefill_multiple_of=1), column(5, 8, 1), column(4, 0, 12))
    assert packing.token_indices.tolist() == list(range(14))
    assert packing.query_start_loc.tolist() == [0, 5, 13, 14]
    assert packing.prior_tokens.tolist() == [4, 0, 12]


def test_a_gap_has_no_block_and_nor_has_an_empty_segment_behind_the_last() -> None:
    packing = pack(TILED, column(5, 8), column(0, 0), num_segments=6)
    spread = packing.spread(np.array([[[1, 2], [3, 4]]], np.int32), TILED)
    assert spread.tolist() == [[[1, 2], [-1, -1], [3, 4], [-1, -1], [-1, -1], [-1, -1]]]
    assert packing.query_start_loc.tolist() == [0, 5, 8, 16, 16, 16, 16]


def test_a_request_alone_in_a_bucket_of_tiles_has_a_shape_of_its_own() -> None:
    prefills = [shape for shape in shapes_of(TILED) if not shape.num_seqs]
    assert prefills == [Shape(48), Shape(48, is_lone=True), Shape(16), Shape(16, is_lone=True)]
    assert [str(shape) for shape in prefills[2:]] == ["prefill of 16 tokens", "prefill of 16 tokens of one request"]
    for without in replace(TILED, prefill_multiple_of=1), replace(TILED, num_seqs_buckets=(1,)):
        assert not any(shape.is_lone for shape in shapes_of(without))


def test_what_one_tile_holds_is_always_one_request() -> None:
    lone = [shape for shape in shapes_of(replace(TILED, num_batched_tokens_buckets=(8, 16))) if shape.is_lone]
    assert lone == [Shape(16, is_lone=True)]


def test_a_bucket_has_as_many_segments_as_tiles_or_rows_and_their_gaps() -> None:
    assert (max_requests(16, TILED), max_segments(16, TILED)) == (2, 4)
    assert (max_requests(48, TILED), max_segments(48, TILED)) == (4, 8)
    assert max_segments(48, replace(TILED, prefill_multiple_of=1)) == 4


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.sampled_from([1, 2, 8, 16]))
def test_no_token_stands_in_another_s_place_and_all_lie_within_what_is_counted(
    lengths: list[int], multiple: int
) -> None:
    configure = replace(TILED, prefill_multiple_of=multiple)
    packing = pack(configure, column(*lengths), column(*(0 for _ in lengths)))
    places = packing.token_indices.tolist()
    assert places == sorted(set(places))
    assert places[-1] < configure.num_bucket_tokens(column(*lengths)).sum()
    assert all(start % multiple == 0 for start in packing.starts.tolist())
    bounds = packing.query_start_loc.tolist()
    assert bounds == sorted(bounds)


class TinyModel:
    """One layer of attention in each of two groups and no weights: fast, with texts that mean nothing."""

    vocab_size, dtype, kv_cache_dtype = 258, "float32", "float32"

    def __init__(self) -> None:
        self.attentions = tuple(
            Attention(AttentionSpec(num_heads=1, num_kv_heads=1, head_dim=2, scale=1.0, sliding_window=window))
            for window in (None, 6)
        )

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, batches: AttentionBatches) -> torch.Tensor:
        states = torch.stack((input_ids, positions), dim=1).float()[:, None]
        return sum(attention(states, states, states, batches) for attention in self.attentions).flatten(1)

    def greedy_tokens(self, hidden: torch.Tensor) -> torch.Tensor | None:
        return None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.sin(hidden[:, :1] + torch.arange(self.vocab_size))

    def idle_hidden(self, num_tokens: int) -> torch.Tensor:
        return torch.zeros(num_tokens, 2)


def group(layer: int, window: int | None) -> KVCacheGroup:
    return KVCacheGroup((f"layers.{layer}.self_attn",), 1, 2, "float32", sliding_window=window)


@pytest.mark.parametrize(
    ("contexts", "multiple", "fuses_sampling"),
    [((), 1, False), ((), 8, True), ((32, 64), 1, True), ((32, 64), 8, False)],
)
def test_what_the_engine_plans_always_fits_the_shapes_that_were_built(
    contexts: tuple[int, ...], multiple: int, fuses_sampling: bool
) -> None:
    """Random requests, over one scheduler and one runner: buckets of prefill, rows and contexts, and their tables."""
    configure = replace(
        TILED,
        prefill_multiple_of=multiple,
        decode_context_length_buckets=contexts,
        kv_cache_groups=(group(0, None), group(1, 6)),
        num_draft_tokens=2 if contexts else 0,
    )
    draw, numbers = random.Random(8), itertools.count()
    backend = replace(CPU, is_compiled=True, fuses_sampling=fuses_sampling, build=bound)
    runner = Runner(TinyModel(), configure, num_draft_tokens=2, backend=backend)
    scheduler = scheduler_of(configure, vocab_size=258)
    for _ in range(200):
        plan = None
        while plan is None:
            # Bursts, and the lulls after them in which few rows are left.
            num_new = draw.choice((1, 5)) if draw.random() < 0.03 or not scheduler.rows.num_running else 0
            scheduler.add([random_request(draw, next(numbers)) for _ in range(num_new)])
            plan = scheduler.schedule()
        scheduler.update(runner.step(plan))
    used = [shape for shape, num_runs in runner.graphs.num_runs.items() if num_runs]
    assert len(used) == len(runner.graphs.num_runs), "every bucket was used"


def random_request(draw: random.Random, number: int) -> Request:
    length = draw.choice((draw.randint(1, 8), draw.randint(1, 60)))
    prompt = np.array(draw.choices(range(256), k=length), np.int32)
    params = SamplingParams(
        draw.randint(1, 64 - length),
        temperature=draw.choice((0.0, 1.0)),
        top_k=draw.choice((0, 0, 5)),
        logprobs=draw.choice((None, None, 1)),
        ignore_eos=True,
    )
    return Request(str(number), prompt, length, params, seed=number)


@settings(max_examples=4, deadline=None)
@given(st.lists(st.integers(1, 100), min_size=1, max_size=6))
def test_texts_are_the_same_from_packed_tiles(lengths: list[int]) -> None:
    """Six prompts at once, in blocks of 4 and tiles of 8, over a cache of NaN."""
    model = SyntheticModel("float32")
    backend = replace(CPU, bucket_rules=BucketRules(prefill_multiple_of=8), is_compiled=True, build=bound)
    sizes = {"block_size": 4, "num_blocks": 300, "max_model_len": 128}
    lists = {"num_batched_tokens_buckets": (16, 64), "num_seqs_buckets": (1, 8), "kv_segment_size_buckets": (16,)}
    planes = Planes(model, sizes | lists, backend=backend)
    for attention in model.attentions:
        for tensor in attention.caches or ():
            tensor.fill_(float("nan"))
    prompts = [[(7 * length + index) % 250 for index in range(length)] for length in lengths]
    for prompt in prompts:
        planes.submit(prompt, SamplingParams(4, ignore_eos=True))
    planes.run()
    assert list(planes.texts.values()) == [continue_greedily(prompt, 4, ignore_eos=True) for prompt in prompts]


@pytest.mark.parametrize("fuses_sampling", [False, True])
def test_what_is_told_of_prompts_that_share_a_bucket_is_each_one_s_own(fuses_sampling: bool) -> None:
    settings = {"block_size": 4, "num_blocks": 100, "max_model_len": 64, "num_batched_tokens_buckets": (48,)}
    settings |= {"num_seqs_buckets": (4,), "kv_segment_size_buckets": (16,)}
    tiles = replace(CPU, bucket_rules=BucketRules(prefill_multiple_of=8), is_compiled=True, build=bound)
    told = []
    for backend in CPU, replace(tiles, fuses_sampling=fuses_sampling):
        planes = Planes(TinyModel(), settings, backend=backend)
        for first, length in ((3, 5), (90, 12), (40, 9)):
            prompt = list(range(first, first + length))
            planes.submit(prompt, SamplingParams(1, prompt_logprobs=1, ignore_eos=True))
        planes.run()
        (columns,) = [result.prompt_logprobs for result in planes.results if result.prompt_logprobs is not None]
        told.append(columns)
    assert told[0].token_ids.tolist() == told[1].token_ids.tolist()
    np.testing.assert_allclose(told[0].logprobs, told[1].logprobs, atol=1e-5)


def test_a_plan_whose_padding_exceeds_the_last_bucket_is_refused() -> None:
    """Four times 9 tokens are fewer than 48, and take four times 16."""
    rows, lengths = Rows(TILED), column(9, 9, 9, 9)
    plan = StepPlan(
        1,
        admissions=tuple(Admission(row, column(*range(9)), 9, 0, SamplingParams(1), 0) for row in range(4)),
        block_rows=np.repeat(column(0, 1, 2, 3), 3),
        block_ids=np.arange(1, 13, dtype=np.int32),
        prefill_rows=column(0, 1, 2, 3),
        prefill_num_tokens=lengths,
    )
    with pytest.raises(ProtocolError, match="its prefill takes 64 tokens, more than the last bucket holds"):
        rows.apply(plan)
    Rows(replace(TILED, prefill_multiple_of=1)).apply(plan)
