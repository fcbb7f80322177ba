"""How decode attention is cut up for a NeuronCore: rows of the cache, gathers, pieces; knows sizes alone and no tensor.

Everything here is known when the kernel is compiled. Terms of all `decode_*` files:

    item      one request and one KV head; its `num_queries` = num_new_tokens * group queries are multiplied together
    row       `positions_per_row` neighbouring positions of one block and KV head, contiguous in HBM: what a DMA reads
    gather    128 rows, one on each partition, by one DMA; row r of a context stands on partition r % 128
    tile      the 128 positions at one offset of a gather's rows
    piece     what is in SBUF at once: some gathers of one item, or all gathers of several items
    tail      a request's new tokens, then what is left of its cache beyond the last whole row; read token by token
    column    one query of one item
"""

from dataclasses import dataclass

import nki.language as nl

NUM_PARTITIONS = 128
ROW_BYTES = 2048
"""AWS's guidance for a DMA's contiguous run (nki-dma-bandwidth-guide.rst)."""
PIECE_BYTES = 16 * 1024
"""Of a partition's SBUF, what a piece's keys take, and what its values take; two pieces are there at once."""
BANK_COLUMNS = 512
"""Float32 numbers of one PSUM bank."""
MAX_SCORE_BANKS = 4
"""Of eight: two for keys that are being transposed, two for the outputs and what is small."""


@dataclass
class Share(nl.NKIObject):
    """What of the batch one core computes.

    Attributes:
        first_item, num_items: these items, of first_request, ...: num_requests requests.
        shard, num_shards: of each item the gathers shard, shard + num_shards, ...; the first shard has the tails.
    """

    first_item: int
    num_items: int
    first_request: int
    num_requests: int
    shard: int
    num_shards: int


@dataclass
class Piece(nl.NKIObject):
    """Items first_item, ... of a core's share, and of each the gathers first_gather, ... of its shard."""

    first_item: int
    num_items: int
    first_gather: int
    num_gathers: int

    def is_first(self) -> bool:
        """Whether no other piece of these items comes before."""
        return self.first_gather == 0


@dataclass
class DecodePlan(nl.NKIObject):
    """Sizes of one core's work.

    Attributes:
        head_dim: a multiple of 32 up to 128, or of 128.
        table_width: blocks per row of the block table. span_width: of these, those that hold one request's rows; fewer
            where a window or chunk is so small that the reading starts at a block of each request's own.
        positions_per_row, rows_per_block: powers of two. tail_size: positions of a tail, one on each partition.
        num_gathers: of each item, for all shards: a multiple of their number.
        is_limited: whether a window or chunk hides any key of such a context.
        tiles_per_bank: of each item, in a bank of scores.
    """

    share: Share
    num_kv_heads: int
    num_new_tokens: int
    group: int
    head_dim: int
    block_size: int
    table_width: int
    span_width: int
    positions_per_row: int
    rows_per_block: int
    tail_size: int
    num_gathers: int
    sliding_window: int
    attention_chunk_size: int
    is_limited: bool
    tiles_per_bank: int
    gathers_per_piece: int
    items_per_piece: int

    def num_queries(self) -> int:
        return self.num_new_tokens * self.group

    def starts_late(self) -> bool:
        """Whether each request's rows start at a block of its own."""
        return self.span_width < self.table_width

    def request_of(self, item: int) -> int:
        """Counted from the share's first, as items are."""
        return (self.share.first_item + item) // self.num_kv_heads - self.share.first_request

    def kv_head_of(self, item: int) -> int:
        return (self.share.first_item + item) % self.num_kv_heads

    def columns_of(self, piece: Piece) -> slice:
        """A piece's columns among those of the share's items."""
        first = piece.first_item * self.num_queries()
        return slice(first, first + piece.num_items * self.num_queries())

    def request_columns_of(self, first_item: int, num_items: int) -> slice:
        """The columns of items among those of all items of the share's requests."""
        first = self.share.first_item - self.share.first_request * self.num_kv_heads + first_item
        return slice(first * self.num_queries(), (first + num_items) * self.num_queries())

    def has_tails(self, piece: Piece) -> bool:
        """Whether the tails of a piece's items are read with it."""
        return piece.is_first() and self.share.shard == 0

    def num_parts(self) -> int:
        """Of 128 dimensions each, those of a head."""
        return _ceil(self.head_dim, NUM_PARTITIONS)

    def part_size(self) -> int:
        return min(self.head_dim, NUM_PARTITIONS)

    def items_per_store(self) -> int:
        """As many as are written to HBM at once: whole pieces, of at most 128 queries."""
        return NUM_PARTITIONS // (self.items_per_piece * self.num_queries()) * self.items_per_piece


def decode_plan(
    query_shape: tuple[int, int, int],
    cache_shape: tuple[int, int, int, int],
    table_width: int,
    num_new_tokens: int,
    kv_bytes: int,
    sliding_window: int,
    attention_chunk_size: int,
    num_cores: int,
    core: int,
) -> DecodePlan:
    """The plan for arguments as `decode.decode_attention` takes them; a cached number has `kv_bytes`."""
    num_items, num_queries, head_dim = query_shape
    _, num_kv_heads, block_size, _ = cache_shape
    share = _share(num_items, num_kv_heads, num_cores, core)
    reach = _reach(table_width * block_size, sliding_window, attention_chunk_size)
    per_row = _positions_per_row(reach, block_size, head_dim * kv_bytes)
    span_width = _span_width(reach, table_width, block_size, NUM_PARTITIONS * per_row // block_size)
    # Of each shard.
    num_gathers = _ceil(_ceil(span_width * block_size // per_row, NUM_PARTITIONS), share.num_shards)
    per_piece = _gathers_per_piece(per_row, num_queries, head_dim)
    return DecodePlan(
        share=share,
        num_kv_heads=num_kv_heads,
        num_new_tokens=num_new_tokens,
        group=num_queries // num_new_tokens,
        head_dim=head_dim,
        block_size=block_size,
        table_width=table_width,
        span_width=span_width,
        positions_per_row=per_row,
        rows_per_block=block_size // per_row,
        tail_size=num_new_tokens + per_row - 1,
        num_gathers=num_gathers * share.num_shards,
        sliding_window=sliding_window,
        attention_chunk_size=attention_chunk_size,
        is_limited=reach < table_width * block_size,
        tiles_per_bank=min(_power_of_two_within(BANK_COLUMNS // num_queries), num_gathers * per_row),
        gathers_per_piece=min(num_gathers, per_piece),
        items_per_piece=_items_per_piece(num_gathers, per_piece, per_row, num_queries),
    )


def pieces_of(plan: DecodePlan) -> list[Piece]:
    """All of a core's, those of one item one after another."""
    pieces = []
    num_gathers = plan.num_gathers // plan.share.num_shards
    for first_item in range(0, plan.share.num_items, plan.items_per_piece):
        num_items = min(plan.items_per_piece, plan.share.num_items - first_item)
        for first_gather in range(0, num_gathers, plan.gathers_per_piece):
            count = min(plan.gathers_per_piece, num_gathers - first_gather)
            pieces.append(Piece(first_item, num_items, first_gather, count))
    return pieces


def log2(power: int) -> int:
    exponent = 0
    while 1 << exponent < power:
        exponent += 1
    return exponent


def _share(num_items: int, num_kv_heads: int, num_cores: int, core: int) -> Share:
    """An equal number of items for each core, or of each item's gathers where that cannot be."""
    if num_items % num_cores:
        return Share(0, num_items, 0, num_items // num_kv_heads, core, num_cores)
    own = num_items // num_cores
    first_request = core * own // num_kv_heads
    num_requests = (core * own + own - 1) // num_kv_heads + 1 - first_request
    return Share(core * own, own, first_request, num_requests, 0, 1)


def _reach(context_len: int, sliding_window: int, attention_chunk_size: int) -> int:
    """How many cached positions a request's queries see at most."""
    if attention_chunk_size:
        return min(context_len, attention_chunk_size)
    return min(context_len, sliding_window) if sliding_window else context_len


def _positions_per_row(reach: int, block_size: int, position_bytes: int) -> int:
    """As many as make a run long enough, but for a short context so few that its rows fill the partitions."""
    longest = min(block_size, max(1, ROW_BYTES // position_bytes), max(1, reach // NUM_PARTITIONS))
    return _power_of_two_within(longest)


def _span_width(reach: int, table_width: int, block_size: int, blocks_per_gather: int) -> int:
    """Blocks that hold `reach` positions wherever these start, in whole gathers if fewer than the table's."""
    span_width = _rounded_up((reach + block_size - 2) // block_size + 1, blocks_per_gather)
    return min(span_width, table_width)


def _gathers_per_piece(positions_per_row: int, num_queries: int, head_dim: int) -> int:
    """As many as SBUF's share and PSUM's score banks hold."""
    in_sbuf = PIECE_BYTES // (2 * positions_per_row * head_dim)
    in_psum = MAX_SCORE_BANKS * _power_of_two_within(BANK_COLUMNS // num_queries) // positions_per_row
    return max(1, min(in_sbuf, in_psum))


def _items_per_piece(num_gathers: int, per_piece: int, positions_per_row: int, num_queries: int) -> int:
    """More than one where all their scores fit one bank."""
    in_psum = BANK_COLUMNS // (num_gathers * positions_per_row * num_queries)
    return max(1, min(per_piece // num_gathers, in_psum, NUM_PARTITIONS // num_queries))


def _power_of_two_within(number: int) -> int:
    power = 1
    while 2 * power <= number:
        power *= 2
    return power


def _ceil(number: int, divisor: int) -> int:
    return (number + divisor - 1) // divisor


def _rounded_up(number: int, multiple: int) -> int:
    return _ceil(number, multiple) * multiple
