"""Segmented prefill attention on a NeuronCore: groups of queries against prior KV, a segment at a time, and themselves.

Its twin is `reference.segmented_attention`. All KV is read from head-major caches, also that of the step itself, which
is written before. Each group first attends to its own tokens, causally and with what lies above the diagonal left out
at compile time; then one runtime loop goes over segments of prior KV, for all groups at once, since an iteration costs
a barrier of all engines (~9 us on Trn2, by AWS's design notes). A group with fewer segments reads nothing in the
iterations that are left, and all of it is masked.

Work is shared by a logical core's two cores by pairs of group and KV head, where their number is even; else each core
takes every second unit (128 queries of one head) of every pair, and both read the KV.

Written against the public NKI 0.6.0 documentation (SDK 2.32) and run on this repository's emulator alone: never
compiled by neuronx-cc, never run under AWS's simulator or on a device.
"""

from dataclasses import dataclass

import nki
import nki.isa as nisa
import nki.language as nl

from blockplane.kernels.nki import fp8, kv_spans, online_softmax, prefill_reach

NUM_PARTITIONS = 128
SEGMENT_SIZES = (512, 1024, 2048, 4096)
STATE_BYTES = 96 * 1024
"""Of a partition's SBUF, what is carried from segment to segment: queries and softmax. The rest is for one segment."""


@dataclass
class Prefill(nl.NKIObject):
    """What the kernel was given; 0 is "none" of the last three."""

    query: nl.NkiTensor
    output: nl.NkiTensor
    cache: kv_spans.Cache
    kv_segment_size: int
    scale: float
    sliding_window: int
    attention_chunk_size: int
    soft_cap: float


@nki.jit
def segmented_attention(
    query: nl.NkiTensor,
    k_cache: nl.NkiTensor,
    v_cache: nl.NkiTensor,
    block_table: nl.NkiTensor,
    prior_tokens: nl.NkiTensor,
    num_tokens: nl.NkiTensor,
    sinks: nl.NkiTensor,
    kv_segment_size: int,
    scale: float,
    sliding_window: int = 0,
    attention_chunk_size: int = 0,
    soft_cap: float = 0.0,
) -> nl.NkiTensor:
    """Attend from groups of one request's tokens to its prior tokens and to each other.

    Args:
        query: [num_groups, num_queries, num_heads, head_dim] of 2 bytes, num_queries a multiple of 128.
        k_cache, v_cache: [num_blocks, num_kv_heads, block_size, head_dim], block_size a power of two up to 128; FP8 as
            bytes (uint8).
        block_table: int32 [num_groups, width], -1 = no block; width a multiple of a segment's blocks, and no less than
            prior_tokens + num_queries need. Every block between a group's first key in reach and its last token must be
            there.
        prior_tokens: int32 [num_groups, 1], the position of the group's first query, a multiple of block_size.
        num_tokens: int32 [num_groups, 1], the group's valid queries; the others' output is zero.
        sinks: float32 [1, num_heads], `reference`'s; -1e30 for none.
        kv_segment_size: 512, 1024, 2048 or 4096 prior tokens at a time; 0 = no prior KV is read.
        scale: positive. sliding_window, attention_chunk_size, soft_cap: `reference`'s, 0 = none; a chunk is a power of
            two.

    Returns:
        As `query`.
    """
    num_groups, num_queries, num_heads, head_dim = query.shape
    num_kv_heads, block_size = k_cache.shape[1], k_cache.shape[2]
    assert num_queries % NUM_PARTITIONS == 0, "num_queries must be a multiple of 128"
    assert kv_segment_size == 0 or kv_segment_size in SEGMENT_SIZES, "kv_segment_size must be 0 or one of SEGMENT_SIZES"
    output = nl.ndarray(query.shape, dtype=query.dtype, buffer=nl.shared_hbm)
    cache = kv_spans.Cache(fp8.as_numbers(k_cache), fp8.as_numbers(v_cache), block_table)
    prefill = Prefill(query, output, cache, kv_segment_size, scale, sliding_window, attention_chunk_size, soft_cap)
    all_sinks = nl.ndarray((NUM_PARTITIONS, num_heads), dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=all_sinks, src=sinks.ap(pattern=[[0, NUM_PARTITIONS], [1, num_heads]]))
    pairs, units = _share(num_groups, num_kv_heads, num_heads // num_kv_heads, num_queries // NUM_PARTITIONS)
    num_pairs = max_units(head_dim) // len(units)
    assert num_pairs > 0, "a group of so many queries and heads does not fit: pass smaller groups"
    for start in range(0, len(pairs), num_pairs):
        # A loop over segments moves the bounds on, so each has its own.
        reach = prefill_reach.reach_of(
            prior_tokens,
            num_tokens,
            num_queries,
            block_size,
            kv_segment_size,
            sliding_window,
            attention_chunk_size,
        )
        _attend(prefill, reach, all_sinks, pairs[start : start + num_pairs], units)
    return output


def max_units(head_dim: int) -> int:
    """How many units of 128 queries of one head a core can carry at once."""
    num_heights = (head_dim + NUM_PARTITIONS - 1) // NUM_PARTITIONS
    return STATE_BYTES // (4 * head_dim + 2 * num_heights * NUM_PARTITIONS + 8)


def _share(
    num_groups: int, num_kv_heads: int, heads_per_kv_head: int, num_tiles: int
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """This core's pairs (group, KV head), and the units of each that it computes (head of the KV head, query tile)."""
    num_cores, core = nl.num_programs(0), nl.program_id(0)
    num_pairs, num_units = num_groups * num_kv_heads, heads_per_kv_head * num_tiles
    first_pair, pair_step, first_unit, unit_step = core, num_cores, 0, 1
    if num_pairs % num_cores != 0:
        # Of a single unit both cores compute and write the same: neither may lack the loop over segments.
        first_pair, pair_step, first_unit, unit_step = 0, 1, min(core, num_units - 1), num_cores
    pairs = []
    for pair in range(first_pair, num_pairs, pair_step):
        pairs.append((pair // num_kv_heads, pair % num_kv_heads))
    units = []
    for unit in range(first_unit, num_units, unit_step):
        units.append((unit // num_tiles, unit % num_tiles))
    return pairs, units


def _attend(
    prefill: Prefill,
    reach: prefill_reach.Reach,
    sinks: nl.NkiTensor,
    pairs: list[tuple[int, int]],
    units: list[tuple[int, int]],
) -> None:
    """All of some pairs: their own tokens, the loop over segments of prior KV, the output."""
    heads_per_kv_head = prefill.query.shape[2] // prefill.cache.keys.shape[1]
    queries = []
    softmaxes = []
    for group, kv_head in pairs:
        first_head = kv_head * heads_per_kv_head
        loaded = _load_queries(prefill.query, group, first_head, units)
        softmax = online_softmax.new_softmax(len(units), prefill.query.shape[3])
        for unit in range(len(units)):
            head = first_head + units[unit][0]
            online_softmax.begin(softmax, unit, sinks[:, head : head + 1])
        _fold_own(prefill, reach, group, kv_head, units, loaded, softmax)
        queries.append(loaded)
        softmaxes.append(softmax)
    if prefill.kv_segment_size:
        _fold_prior(prefill, reach, pairs, units, queries, softmaxes)
    for pair in range(len(pairs)):
        group, kv_head = pairs[pair]
        _store(prefill.output, reach, group, kv_head * heads_per_kv_head, units, softmaxes[pair])


def _fold_own(
    prefill: Prefill,
    reach: prefill_reach.Reach,
    group: int,
    kv_head: int,
    units: list[tuple[int, int]],
    queries: nl.NkiTensor,
    softmax: online_softmax.OnlineSoftmax,
) -> None:
    """Each tile of queries sees the tiles of keys up to its own, and none before its window's first."""
    own = kv_spans.own_span(prefill.cache, reach, group, kv_head, prefill.query.shape[1], prefill.query.dtype)
    for unit in range(len(units)):
        tile = units[unit][1]
        first = 0
        if prefill.sliding_window and not prefill.attention_chunk_size:
            first = max(0, (tile * NUM_PARTITIONS - prefill.sliding_window + 1) // NUM_PARTITIONS)
        online_softmax.fold(
            softmax,
            unit,
            queries[:, :, unit, :],
            own,
            first * NUM_PARTITIONS,
            (tile + 1) * NUM_PARTITIONS,
            (reach.own_before[:, group, tile : tile + 1], reach.own_end[:, tile : tile + 1]),
            prefill.scale,
            prefill.soft_cap,
        )


def _fold_prior(
    prefill: Prefill,
    reach: prefill_reach.Reach,
    pairs: list[tuple[int, int]],
    units: list[tuple[int, int]],
    queries: list[nl.NkiTensor],
    softmaxes: list[online_softmax.OnlineSoftmax],
) -> None:
    block_size, segment_size = prefill.cache.keys.shape[2], prefill.kv_segment_size

    def fold_segment(_iteration: nisa.VirtualRegister) -> None:
        for pair in range(len(pairs)):
            group, kv_head = pairs[pair]
            segment = kv_spans.prior_span(prefill.cache, reach, group, kv_head, segment_size, prefill.query.dtype)
            for unit in range(len(units)):
                before = 2 + units[unit][1]
                online_softmax.fold(
                    softmaxes[pair],
                    unit,
                    queries[pair][:, :, unit, :],
                    segment,
                    0,
                    segment_size,
                    (reach.prior[:, group, before : before + 1], reach.prior[:, group, 0:1]),
                    prefill.scale,
                    prefill.soft_cap,
                )
        prefill_reach.next_segment(reach, block_size, segment_size)

    num_segments = nisa.register_alloc()
    nisa.register_load(num_segments, reach.num_segments)
    nl.fori_loop(0, num_segments, fold_segment)


def _load_queries(query: nl.NkiTensor, group: int, first_head: int, units: list[tuple[int, int]]) -> nl.NkiTensor:
    """[min(128, head_dim), head_dim / 128 rounded up, num_units, 128], each unit's queries transposed."""
    head_dim = query.shape[3]
    height = min(NUM_PARTITIONS, head_dim)
    turned = nl.ndarray((height, head_dim // height, len(units), NUM_PARTITIONS), dtype=query.dtype, buffer=nl.sbuf)
    for unit in range(len(units)):
        head, tile = units[unit]
        loaded = nl.ndarray((NUM_PARTITIONS, head_dim), dtype=query.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=loaded, src=_queries_of(query, group, tile, first_head + head))
        bank = nl.ndarray((height, head_dim // height, NUM_PARTITIONS), dtype=query.dtype, buffer=nl.psum)
        for dims in range(head_dim // height):
            nisa.nc_transpose(
                bank[:, dims, :], loaded[:, dims * height : (dims + 1) * height], engine=nisa.engine.tensor
            )
        nisa.tensor_copy(turned[:, :, unit, :], bank, engine=nisa.engine.scalar)
    return turned


def _store(
    output: nl.NkiTensor,
    reach: prefill_reach.Reach,
    group: int,
    first_head: int,
    units: list[tuple[int, int]],
    softmax: online_softmax.OnlineSoftmax,
) -> None:
    shares = online_softmax.shares_of(softmax)
    for unit in range(len(units)):
        head, tile = units[unit]
        mean = nl.ndarray((NUM_PARTITIONS, output.shape[3]), dtype=output.dtype, buffer=nl.sbuf)
        online_softmax.mean(mean, softmax, unit, shares, reach.is_token[:, group, tile : tile + 1])
        nisa.dma_copy(dst=_queries_of(output, group, tile, first_head + head), src=mean)


def _queries_of(tensor: nl.NkiTensor, group: int, tile: int, head: int) -> nl.NkiTensor:
    """The view [128, head_dim] of one tile of one head."""
    return tensor[group, tile * NUM_PARTITIONS : (tile + 1) * NUM_PARTITIONS, head, :]
