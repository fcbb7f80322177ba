"""Segmented prefill attention of NeuronCores against the reference's in float32, in caches full of poison."""

import math
from typing import Any

import pytest
import torch
from prefilled_cache import PrefilledCache
from simulated import Traced, simulated
from torch import Tensor

from blockplane.kernels.nki import segmented
from blockplane.kernels.nki.unsupported import UnsupportedByKernelError
from blockplane.kernels.slots import SKIP_BLOCK_ID

TOLERANCE = 1e-2
"""Absolute, of bfloat16 on data of unit variance."""


def assert_close(cache: PrefilledCache, output: Tensor, **settings: Any) -> None:
    """Within the tolerance of the reference; padding tokens exactly zero."""
    expected = cache.expected(**settings)
    error = (output[: len(expected)] - expected).abs().max()
    assert error <= TOLERANCE, f"greatest error {error}"
    assert not output[len(expected) :].any()


@pytest.mark.parametrize(
    ("block_size", "head_dim", "num_kv_heads", "group", "kv_segment_size", "requests"),
    [
        (16, 64, 1, 1, 512, [(0, 128)]),
        (16, 128, 1, 2, 1024, [(1216, 128)]),
        (32, 64, 2, 3, 512, [(1024, 200)]),
        (32, 128, 1, 8, 512, [(512, 130)]),
        (64, 64, 2, 1, 2048, [(3584, 256)]),
        (64, 256, 1, 1, 1024, [(1216, 140)]),
        (128, 128, 1, 2, 4096, [(3584, 384)]),
        (128, 64, 3, 1, 1024, [(2048, 1)]),
        (64, 32, 1, 2, 512, [(576, 64)]),
    ],
)
def test_prefill_equals_the_reference(
    block_size: int, head_dim: int, num_kv_heads: int, group: int, kv_segment_size: int, requests: list[tuple[int, int]]
) -> None:
    cache = PrefilledCache(requests, block_size, head_dim, num_kv_heads, group, num_padding=3)
    assert_close(cache, cache.output(simulated(), kv_segment_size))


@pytest.mark.slow
@pytest.mark.parametrize("kv_segment_size", [512, 1024, 2048, 4096])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_every_size_equals_the_reference(block_size: int, head_dim: int, kv_segment_size: int) -> None:
    cache = PrefilledCache([(2048 + block_size, 129)], block_size, head_dim)
    assert_close(cache, cache.output(simulated(), kv_segment_size))


@pytest.mark.slow
@pytest.mark.parametrize("kv_segment_size", [512, 1024, 2048, 4096])
def test_long_contexts_of_many_heads_equal_the_reference(kv_segment_size: int) -> None:
    cache = PrefilledCache([(7936, 256), (0, 100), (3584, 17)], head_dim=128, group=8)
    assert_close(cache, cache.output(simulated(), kv_segment_size))


@pytest.mark.parametrize("poison", [math.nan, 1e30])
def test_requests_of_one_call_read_their_own_prior_tokens(poison: float) -> None:
    """Whatever lies in slots that none of them owns."""
    requests = [(3584, 100), (0, 150), (1216, 1), (64, 128)]
    cache = PrefilledCache(requests, poison=poison, num_padding=5)
    assert_close(cache, cache.output(simulated(), 1024))


@pytest.mark.parametrize("num_tokens", [1, 31, 32, 33, 511, 512, 513])
def test_suffixes_of_every_length_equal_the_reference(num_tokens: int) -> None:
    """Case 13: around a block of 32 tokens and a segment of 512."""
    cache = PrefilledCache([(544, num_tokens)], block_size=32)
    assert_close(cache, cache.output(simulated(), 512))


@pytest.mark.parametrize(
    "settings",
    [
        {"sliding_window": 1},
        {"sliding_window": 2},
        {"sliding_window": 100},
        {"sliding_window": 128},
        {"sliding_window": 700},
        {"sliding_window": 5000},
        {"attention_chunk_size": 64},
        {"attention_chunk_size": 256},
        {"attention_chunk_size": 2048},
        {"attention_chunk_size": 256, "sliding_window": 1},
        {"soft_cap": 20.0},
        {"soft_cap": 0.5, "sliding_window": 300},
        {"scale": 3.0},
    ],
    ids=str,
)
def test_layers_of_every_kind_equal_the_reference(settings: dict[str, Any]) -> None:
    cache = PrefilledCache([(1216, 140), (192, 130)], group=2)
    assert_close(cache, cache.output(simulated(), 512, **settings), **settings)


@pytest.mark.parametrize("soft_cap", [None, 5.0])
def test_sinks_take_their_part_of_the_softmax(soft_cap: float | None) -> None:
    """A sink far above every logit, one among them, one far below, and one that is none."""
    cache = PrefilledCache([(576, 140)], num_kv_heads=2, group=2, num_padding=2)
    settings = {"sinks": torch.tensor([30.0, 0.5, -40.0, -math.inf]), "soft_cap": soft_cap}
    output = cache.output(simulated(), **settings)
    assert_close(cache, output, **settings)
    assert output[:140, 0].abs().max() < 1e-6


def test_a_group_past_its_last_segment_reads_nothing_more() -> None:
    """Of 3 segments within the first one's window, and 2 within the other's, which the table ends with."""
    cache = PrefilledCache([(1088, 10), (1664, 10)])
    assert_close(cache, cache.output(simulated(), sliding_window=600), sliding_window=600)


def test_a_query_that_sees_no_prior_segment_keeps_what_it_saw() -> None:
    """A window of 200: the last tiles of queries are beyond the reach of the one segment that is read for the first."""
    cache = PrefilledCache([(512, 640)])
    assert_close(cache, cache.output(simulated(), sliding_window=200), sliding_window=200)


def test_padding_within_a_group_may_hold_nan() -> None:
    cache = PrefilledCache([(576, 140), (0, 5)])
    grouped: list[Tensor] = []

    def run(kernel: Any, query: Tensor, *arguments: Any) -> Tensor:
        query[0, 140:] = query[1, 5:] = math.nan
        grouped.append(simulated()(kernel, query, *arguments))
        return grouped[0]

    assert_close(cache, cache.output(run))
    assert not grouped[0][0, 140:].any()
    assert not grouped[0][1, 5:].any()


def test_the_unsegmented_mode_reads_no_prior_kv() -> None:
    cache = PrefilledCache([(576, 140), (0, 64)], group=2)
    cache.forget_prior()
    output = cache.output(simulated(), 0, sliding_window=100)
    assert_close(cache, output, kv_segment_size=0, sliding_window=100)


@pytest.mark.parametrize("filler", ["null", "skip", "live"])
def test_what_pads_the_table_changes_no_bit(filler: str) -> None:
    """Case 20."""
    cache = PrefilledCache([(576, 70), (0, 30)], poison=1e30)
    plain = cache.output(simulated())
    fill = {"null": 0, "skip": SKIP_BLOCK_ID, "live": int(cache.block_table[0, 3])}[filler]
    cache.block_table[cache.block_table == SKIP_BLOCK_ID] = fill
    cache.block_table = torch.nn.functional.pad(cache.block_table, (0, 5), value=fill)
    assert torch.equal(cache.output(simulated()), plain)


def test_smaller_groups_of_a_request_see_those_before_as_prior_kv() -> None:
    cache = PrefilledCache([(576, 400), (0, 300), (64, 5)], num_padding=4)
    assert_close(cache, cache.output(simulated(), 512, max_group_queries=128, sliding_window=450), sliding_window=450)


@pytest.mark.parametrize(
    ("num_kv_heads", "group", "requests"),
    [(2, 1, [(576, 256)]), (1, 1, [(576, 300)]), (1, 3, [(64, 128)]), (1, 1, [(512, 9)])],
    ids=["heads", "tiles", "odd units", "one unit"],
)
def test_two_cores_compute_what_one_does(num_kv_heads: int, group: int, requests: list[tuple[int, int]]) -> None:
    cache = PrefilledCache(requests, num_kv_heads=num_kv_heads, group=group)
    output = cache.output(simulated(num_cores=2))
    assert_close(cache, output)
    assert torch.equal(output, cache.output(simulated(num_cores=1)))


@pytest.mark.parametrize("target", ["trn2", "trn3"])
def test_fp8_kv_equals_the_reference(target: str) -> None:
    cache = PrefilledCache([(576, 140)], group=2, kv_dtype=torch.float8_e4m3fn)
    assert_close(cache, cache.output(simulated(target=target)))


@pytest.mark.parametrize("target", ["trn2", "trn3"])
def test_both_generations_equal_the_reference(target: str) -> None:
    cache = PrefilledCache([(1216, 140), (0, 100)], head_dim=128)
    assert_close(cache, cache.output(simulated(target=target)))


def test_more_heads_than_fit_at_once_take_several_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = PrefilledCache([(576, 140)], num_kv_heads=3)
    monkeypatch.setattr(segmented, "STATE_BYTES", 5 * 1024)
    assert segmented.max_units(64) == 9
    run = Traced()
    assert_close(cache, cache.output(run))
    assert len({each.loops[0][0] for each in run.trace.instructions if each.loops}) == 1
    monkeypatch.setattr(segmented, "STATE_BYTES", 3 * 1024)
    assert_close(cache, cache.output(run))
    assert len({each.loops[0][0] for each in run.trace.instructions if each.loops}) == 2


@pytest.mark.parametrize("num_cores", [1, 2])
def test_the_bits_do_not_depend_on_what_memory_held(num_cores: int) -> None:
    """Nor on which core goes first."""
    cache = PrefilledCache([(576, 140), (64, 30)])
    settings = {"sliding_window": 500, "soft_cap": 30.0, "sinks": cache.sinks}
    runs = [Traced(poison, num_cores, first_core) for poison in (math.nan, 1e4) for first_core in range(num_cores)]
    first, *others = [cache.output(run, **settings) for run in runs]
    assert all(torch.equal(first, other) for other in others)


def bytes_read(run: Traced, cache: PrefilledCache) -> int:
    """Of KV: by the gathers, which are all that read by an index per row."""
    return sum(each.transfer.num_bytes for each in run.trace.instructions if each.transfer and _is_gather(each, cache))


def _is_gather(instruction: Any, cache: PrefilledCache) -> bool:
    head_dim = cache.k_cache.shape[3]
    return (
        instruction.reads[0].buffer == "hbm"
        and instruction.reads[0].shape[-1] % head_dim == 0
        and (instruction.transfer.dge == "swdge")
    )


def test_kv_is_read_once_and_none_that_nobody_sees() -> None:
    """Two requests of other lengths: the iterations that the shorter one has no segment for cost it nothing."""
    cache = PrefilledCache([(1216, 140), (64, 30)], num_kv_heads=2, group=2)
    run = Traced()
    cache.output(run)
    assert bytes_read(run, cache) == (1216 + 140 + 64 + 30) * 2 * 2 * 64 * 2


def test_a_window_reads_from_the_first_segment_in_reach() -> None:
    """And of that segment the rows from the first position in reach."""
    cache = PrefilledCache([(3584, 128)])
    run = Traced()
    cache.output(run, sliding_window=257)
    assert bytes_read(run, cache) == (256 + 128) * 2 * 64 * 2
    assert {each.loops for each in run.trace.instructions if each.loops} == {((0, 0),)}


def test_own_tiles_above_the_diagonal_or_behind_the_window_are_left_out() -> None:
    def num_matmuls(**settings: Any) -> int:
        run = Traced()
        PrefilledCache([(0, 512)]).output(run, 0, **settings)
        return sum(each.opcode == "nc_matmul" for each in run.trace.instructions)

    # Of each tile of queries one for its logits, and one for each tile of values.
    assert num_matmuls() == 4 + (1 + 2 + 3 + 4)
    assert num_matmuls(sliding_window=129) == 4 + (1 + 2 + 2 + 2)


@pytest.mark.parametrize(
    ("changes", "settings", "sentence"),
    [
        ({"block_size": 48, "requests": [(48, 20)]}, {}, "block_size is 48"),
        ({"requests": [(65, 20)]}, {}, r"Prior tokens \[65\] are not all multiples of block_size, 64"),
        ({}, {"kv_segment_size": 768}, "kv_segment_size is 768"),
        ({}, {"attention_chunk_size": 96}, "attention_chunk_size is 96"),
        ({}, {"scale": -1.0}, "scale is -1.0"),
        ({"head_dim": 192}, {}, "head_dim is 192"),
    ],
    ids=["block size", "alignment", "segment", "chunk", "scale", "head size"],
)
def test_what_the_kernel_cannot_do_is_refused(changes: dict[str, Any], settings: dict[str, Any], sentence: str) -> None:
    cache = PrefilledCache(**{"requests": [(64, 20)]} | changes)
    with pytest.raises(UnsupportedByKernelError, match=sentence):
        cache.output(simulated(), **settings)


def test_a_float32_query_is_refused() -> None:
    cache = PrefilledCache([(64, 20)])
    cache.query = cache.query.float()
    with pytest.raises(UnsupportedByKernelError, match="bfloat16"):
        cache.output(simulated())


def test_an_unsegmented_request_in_several_groups_is_refused() -> None:
    cache = PrefilledCache([(0, 140), (0, 64)])
    with pytest.raises(UnsupportedByKernelError, match="more than the 128 tokens of a group"):
        cache.output(simulated(), 0, max_group_queries=128)
    assert_close(cache, cache.output(simulated(), 512, max_group_queries=128))


def test_a_table_that_lacks_a_seen_block_is_refused_and_one_behind_the_window_not_missed() -> None:
    cache = PrefilledCache([(0, 20), (640, 100)])
    cache.block_table[1, 2] = SKIP_BLOCK_ID
    with pytest.raises(UnsupportedByKernelError, match=r"Requests \[1\] lack a block"):
        cache.output(simulated())
    assert_close(cache, cache.output(simulated(), sliding_window=449), sliding_window=449)
    with pytest.raises(UnsupportedByKernelError, match=r"Requests \[1\] lack a block"):
        cache.output(simulated(), sliding_window=450)


def test_no_queries_yield_none() -> None:
    cache = PrefilledCache([(64, 0)], num_padding=2)
    assert not cache.output(simulated()).any()
