"""Ranks that share the positions of their heads' KV: each gives its own heads' attention over all of them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from ranks_in_threads import RanksInThreads, run_ranks
from test_attention import NUM_TOKENS, SPECS, dense
from torch import Tensor

from blockplane.data_plane.attention import Attention, AttentionBatch, AttentionSpec, DecodeBatch, PrefillBatch
from blockplane.data_plane.backends.cpu import CPU
from blockplane.data_plane.inputs import StepInputs, decode_inputs, prefill_inputs
from blockplane.data_plane.kv_cache import bind_kv_caches, num_kv_bytes
from blockplane.data_plane.models.synthetic import SyntheticModel
from blockplane.data_plane.ranks.collectives import ALONE
from blockplane.data_plane.ranks.context_kernels import kernels_of
from blockplane.data_plane.rows import Rows
from blockplane.kernels.slots import PAD_SLOT_ID, ContextParallel, slots_of
from blockplane.protos.errors import ConfigurationError, ProtocolError
from blockplane.protos.plan import Admission, Configure, StepPlan
from blockplane.protos.sampling import SamplingParams

NUM_HEADS = 4
PLACES = 2
"""Of a block in each rank's caches."""
SHARED_BY_TWO = Configure(2 * PLACES, 8, 64, (16,), (1, 4), context_parallel_size=2)


def rank_spec(spec: AttentionSpec, ranks: RanksInThreads) -> AttentionSpec:
    """The rank's query heads and the KV head that they use."""
    own = own_heads(ranks)
    return replace(spec, num_heads=len(own), num_kv_heads=1, sinks=None if spec.sinks is None else spec.sinks[[*own]])


def own_heads(ranks: RanksInThreads) -> range:
    num_own = NUM_HEADS // ranks.world_size
    return range(ranks.rank * num_own, (ranks.rank + 1) * num_own)


@pytest.mark.parametrize(("num_ranks", "num_kv_heads"), [(2, 1), (4, 1), (4, 2)])
@pytest.mark.parametrize("num_new_tokens", [1, 3])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_two_segments_and_decodes_are_what_the_spec_says(
    spec: AttentionSpec, num_new_tokens: int, num_ranks: int, num_kv_heads: int
) -> None:
    spec, num_sharing = replace(spec, num_kv_heads=num_kv_heads), num_ranks // num_kv_heads
    generator = torch.Generator().manual_seed(1)
    query, key, value = (
        torch.randn(NUM_TOKENS, heads, 8, generator=generator) for heads in (NUM_HEADS, num_kv_heads, num_kv_heads)
    )
    configure = replace(SHARED_BY_TWO, block_size=PLACES * num_sharing, context_parallel_size=num_sharing)
    table = torch.tensor([[5, 1, 4, 2, 6, 3]], dtype=torch.int32)

    def rank_output(ranks: RanksInThreads) -> Tensor:
        attention = Attention(rank_spec(spec, ranks))
        caches = [torch.full((7, PLACES, 1, 8), float("nan")) for _ in range(2)]
        attention.bind_kv_cache(*caches, kernels_of(CPU, configure, ranks))
        zeros, own_kv_head = torch.zeros(NUM_TOKENS, dtype=torch.int64), ranks.rank // num_sharing
        slots = slots_of(table, zeros, torch.arange(NUM_TOKENS), PLACES, ranks.context_parallel)

        def attend(start: int, stop: int, batch: AttentionBatch) -> Tensor:
            own = query[start:stop, [*own_heads(ranks)]], *(kv[start:stop, [own_kv_head]] for kv in (key, value))
            return attention(*own, (batch,))

        outputs = []
        for start, end in ((0, 4), (4, 8)):
            bounds, prior = torch.tensor([0, end - start]).int(), torch.tensor([start]).int()
            outputs.append(attend(start, end, PrefillBatch(slots[start:end], table, bounds, prior, kv_segment_size=2)))
        for start in range(8, NUM_TOKENS - num_new_tokens + 1, num_new_tokens):
            end = start + num_new_tokens
            outputs.append(attend(start, end, DecodeBatch(slots[start:end], table, torch.tensor([end]).int())))
        num_written = int(caches[0].flatten(0, 1)[:, 0, 0].isfinite().sum())
        assert num_written == ranks.context_parallel.num_kept(sum(map(len, outputs))), "its own positions alone"
        return torch.cat(outputs)

    output = torch.cat(run_ranks(num_ranks, rank_output, num_sharing), dim=1)
    assert len(output) > NUM_TOKENS - num_new_tokens
    expected = dense(spec, query, key, value)[: len(output)]
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)


def test_two_calls_move_a_layer_s_attention() -> None:
    """What `context_kernels` states: the queries, and the parts of all heads that share the context."""

    def count(ranks: RanksInThreads) -> int:
        attention = Attention(rank_spec(SPECS["plain"], ranks))
        attention.bind_kv_cache(*torch.zeros(2, 7, PLACES, 1, 8), kernels_of(CPU, SHARED_BY_TWO, ranks))
        one, queries = torch.ones(1, 1, 8), torch.ones(1, 2, 8)
        batch = DecodeBatch(torch.tensor([2]), torch.ones(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32))
        attention(queries, one, one, (batch,))
        return ranks.num_calls

    assert run_ranks(2, count, 2) == [2, 2]


def test_a_rank_alone_has_the_backend_s_kernels_as_they_are() -> None:
    assert kernels_of(CPU, replace(SHARED_BY_TWO, context_parallel_size=1), ALONE) is CPU.kernels


def refusal(configure: Configure, interleave_size: int = 1) -> str:
    def ask(ranks: RanksInThreads) -> str:
        ranks.context_parallel = replace(ranks.context_parallel, interleave_size=interleave_size)
        with pytest.raises(ProtocolError) as refused:
            kernels_of(CPU, configure, ranks)
        return str(refused.value)

    (message, _) = run_ranks(2, ask, context_parallel_size=2)
    return message


def test_what_ranks_cannot_share_is_refused() -> None:
    assert "blocks that 1 ranks share, and 2 share them here" in refusal(
        replace(SHARED_BY_TWO, context_parallel_size=1)
    )
    assert "blocks of 6 tokens, which 2 ranks cannot share in runs of 2" in refusal(
        replace(SHARED_BY_TWO, block_size=6), 2
    )
    with pytest.raises(ProtocolError, match="blocks that 2 ranks share, and 1 share them here"):
        kernels_of(CPU, SHARED_BY_TWO, ALONE)


def test_a_backend_without_attention_to_a_part_of_the_positions_is_refused() -> None:
    backend = replace(CPU, name="trn9", kernels=replace(CPU.kernels, partial=None))

    def ask(ranks: RanksInThreads) -> None:
        with pytest.raises(ConfigurationError, match="context_parallel_size is 2, and device trn9 has no attention"):
            kernels_of(backend, SHARED_BY_TWO, ranks)

    run_ranks(2, ask, context_parallel_size=2)


def test_each_of_two_ranks_keeps_half_of_every_block() -> None:
    model = SyntheticModel("float32")
    alone = replace(SHARED_BY_TWO, context_parallel_size=1)
    assert 2 * num_kv_bytes(SHARED_BY_TWO, model) == num_kv_bytes(alone, model)

    def allocated(ranks: RanksInThreads) -> list[tuple[int, ...]]:
        model = SyntheticModel("float32")
        bind_kv_caches(model, SHARED_BY_TWO, CPU, ranks=ranks)
        return [tuple(cache.shape[:2]) for attention in model.attentions for cache in attention.caches or ()]

    for shapes in run_ranks(2, allocated, context_parallel_size=2):
        assert {*shapes} == {(8, PLACES)}


def rows_of(context_parallel: ContextParallel, kernel_block_size: int | None = None) -> Rows:
    """A row of 9 known tokens in the blocks 7, 3 and 5, of which none is computed."""
    rows = Rows(SHARED_BY_TWO, kernel_block_size, context_parallel)
    admission = Admission(2, np.arange(9, dtype=np.int32), 9, 0, SamplingParams(1), 0)
    block_rows, block_ids = np.full(3, 2, np.int32), np.array([7, 3, 5], np.int32)
    rows.apply(StepPlan(1, admissions=(admission,), block_rows=block_rows, block_ids=block_ids))
    return rows


def prefilled(context_parallel: ContextParallel) -> StepInputs:
    return prefill_inputs(rows_of(context_parallel), np.array([2], np.int32), np.array([9], np.int32))


def test_each_rank_writes_its_own_positions_into_blocks_that_all_number_alike() -> None:
    parts = [prefilled(ContextParallel(2, rank)) for rank in range(2)]
    slots = np.array([part.batches[0].slot_mapping.tolist() for part in parts])
    skip = PAD_SLOT_ID
    assert slots[0][:9].tolist() == [14, skip, 15, skip, 6, skip, 7, skip, 10]
    assert slots[1][:9].tolist() == [skip, 14, skip, 15, skip, 6, skip, 7, skip]
    assert (slots[:, 9:] == PAD_SLOT_ID).all()
    for part in parts:
        (batch,) = part.batches
        assert isinstance(batch, PrefillBatch)
        assert batch.block_table.tolist() == [[7, 3, 5]]
        assert part.positions[:9].tolist() == [*range(9)]


def test_a_kernel_s_smaller_blocks_divide_what_a_rank_keeps() -> None:
    for rank in range(2):
        rows = rows_of(ContextParallel(2, rank), kernel_block_size=1)
        rows.num_computed_tokens[2] = 8
        (batch,) = decode_inputs(rows, np.array([2])).batches
        assert isinstance(batch, DecodeBatch)
        assert batch.block_table.tolist() == [[14, 15, 6, 7, 10, 11]]
        assert batch.slot_mapping.tolist() == [10 if rank == 0 else PAD_SLOT_ID]
    with pytest.raises(ConfigurationError, match="block_size is 2, and the kernel's blocks of 4 tokens"):
        rows_of(ContextParallel(2), kernel_block_size=4)
