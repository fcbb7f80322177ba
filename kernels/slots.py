"""The slot formula, once; knows neither requests nor devices: it works on numpy arrays and torch tensors alike."""

from dataclasses import dataclass
from typing import Any

PAD_SLOT_ID = -1
NULL_BLOCK_ID = 0
SKIP_BLOCK_ID = -1


@dataclass(frozen=True, slots=True)
class ContextParallel:
    """One rank's share of every sequence's KV (seed 004, "DCP / PCP interleaving"); alone by default.

    Runs of `interleave_size` tokens go round the ranks, so a block spans `block_size * world_size` positions, and a
    rank keeps those it owns side by side. Where prefill and decode have context-parallel groups of their own, these are
    the ranks of both together, `context_parallel_of`; the mapping is the same.

    `interleave_size` divides block_size: a run lies in one block.
    """

    world_size: int = 1
    rank: int = 0
    interleave_size: int = 1

    def owns(self, positions: Any) -> Any:
        """bool, in the shape of `positions`."""
        return positions // self.interleave_size % self.world_size == self.rank

    def local(self, positions: Any) -> Any:
        """How many tokens before each position, or before its run, this rank keeps: where it keeps the token itself."""
        run = self.interleave_size
        return positions // (run * self.world_size) * run + positions % run

    def positions(self, places: Any) -> Any:
        """The positions of the tokens that this rank keeps at these places: `local` the other way round."""
        run = self.interleave_size
        return (places // run * self.world_size + self.rank) * run + places % run

    def num_kept(self, num_tokens: int) -> int:
        """How many of a sequence's first `num_tokens` this rank keeps."""
        run = self.interleave_size
        rounds, rest = divmod(num_tokens, run * self.world_size)
        return rounds * run + min(max(rest - self.rank * run, 0), run)


ALONE = ContextParallel()


def context_parallel_of(
    prefill: tuple[int, int] | None = None, decode: tuple[int, int] | None = None, interleave_size: int = 1
) -> ContextParallel:
    """The share of a rank from its (world size, rank) in each context-parallel group; None = there is no such group."""
    prefill_size, prefill_rank = prefill or (1, 0)
    decode_size, decode_rank = decode or (1, 0)
    return ContextParallel(prefill_size * decode_size, prefill_rank * decode_size + decode_rank, interleave_size)


def slots_of(
    block_table: Any, rows: Any, positions: Any, block_size: int, context_parallel: ContextParallel = ALONE
) -> Any:
    """Map token positions to cache slots (seed 000, "The Core Formula").

    Args:
        block_table: integer [..., num_rows, max_blocks_per_row], physical block ids, of one or several groups.
        rows: integer [num_tokens], the row of `block_table` that each token belongs to.
        positions: int64 [num_tokens], each token's position in its sequence.
        block_size: tokens per block.
        context_parallel: whose slots; a token that another rank owns has PAD_SLOT_ID.

    Returns:
        int64 [..., num_tokens]: `block_id * block_size + position % block_size`.
    """
    places = positions if context_parallel.world_size == 1 else context_parallel.local(positions)
    logical_blocks = places // block_size
    # Written as a shift of the position so that the arithmetic runs in its int64: a product with the int32 table
    # would overflow past 2^31 slots.
    slots = places + (block_table[..., rows, logical_blocks] - logical_blocks) * block_size
    return slots if context_parallel.world_size == 1 else keep_slots(slots, context_parallel.owns(positions))


def keep_slots(slots: Any, kept: Any) -> Any:
    """Mark what is not to be written, such as the padding after each request's own tokens (seed 000, "Slot Mapping for
    Padded Tokens").

    Args:
        slots: int64 [..., num_tokens]. kept: bool [num_tokens].

    Returns:
        int64 [..., num_tokens], PAD_SLOT_ID where not kept.
    """
    # A selection in arithmetic, which numpy and torch spell alike.
    return (slots - PAD_SLOT_ID) * kept + PAD_SLOT_ID
