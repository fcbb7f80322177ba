"""Which heads, MLP columns and vocabulary rows of a model one rank of a group has; knows no tensors."""

from dataclasses import dataclass

from blockplane.data_plane.models.config import ModelConfig
from blockplane.data_plane.ranks.collectives import ALONE, Ranks
from blockplane.protos.errors import ModelError


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank has of something that counts `size` in the whole model: those of the range `own`."""

    own: range
    size: int

    def __len__(self) -> int:
        return len(self.own)

    def wide(self, width: int) -> "Part":
        """The same in units of which each of these has `width`, such as the rows of heads."""
        return Part(range(self.own.start * width, self.own.stop * width), self.size * width)


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of a decoder.

    Attributes:
        heads, kv_heads: query heads, and the KV heads that these use. Where there are fewer KV heads than ranks,
            neighbouring ranks have the same one.
        intermediate: columns of the MLP.
        vocabulary: rows of embeddings and output projection; the last ranks may have fewer than the others, or none.
        num_vocabulary_rows: how many of these every rank keeps, its own and then padding.
        output_bias: of what is added to a sum over ranks, all in rank 0 and nothing elsewhere.
    """

    heads: Part
    kv_heads: Part
    intermediate: Part
    vocabulary: Part
    num_vocabulary_rows: int
    output_bias: Part


def shard_of(config: ModelConfig, ranks: Ranks = ALONE) -> Shard:
    """This rank's part of a decoder.

    Raises:
        ModelError: the group's size does not suit the model's; the message names both and what to set.
    """
    heads, kv_heads = heads_of(config.num_heads, config.num_kv_heads, ranks)
    vocabulary, num_vocabulary_rows = vocabulary_of(config.vocab_size, ranks)
    return Shard(
        heads=heads,
        kv_heads=kv_heads,
        intermediate=_even("MLP columns", config.intermediate_size, ranks),
        vocabulary=vocabulary,
        num_vocabulary_rows=num_vocabulary_rows,
        output_bias=Part(range(0 if ranks.rank else config.hidden_size), config.hidden_size),
    )


def heads_of(num_heads: int, num_kv_heads: int, ranks: Ranks) -> tuple[Part, Part]:
    """This rank's query heads and KV heads; query head h uses KV head h // (num_heads / num_kv_heads).

    Raises:
        ModelError: as `shard_of` says.
    """
    world_size, num_sharing = ranks.world_size, ranks.context_parallel.world_size
    heads = _even("attention heads", num_heads, ranks)
    if num_kv_heads % world_size and world_size % num_kv_heads:
        raise ModelError(
            f"The model's {num_kv_heads} KV heads can neither be divided among {world_size} ranks nor each be kept by"
            f" as many of them; set tensor_parallel_size to a divisor or a multiple of {num_kv_heads}."
        )
    num_alike = max(world_size // num_kv_heads, 1)
    if num_alike % num_sharing:
        raise ModelError(
            f"Of {world_size} ranks {num_alike} keep the same of the model's {num_kv_heads} KV heads, so that no"
            f" {num_sharing} can share their positions; set context_parallel_size to a divisor of {num_alike}, or"
            " raise tensor_parallel_size."
        )
    first, count = ranks.rank * num_kv_heads // world_size, max(num_kv_heads // world_size, 1)
    return heads, Part(range(first, first + count), num_kv_heads)


def vocabulary_of(vocab_size: int, ranks: Ranks) -> tuple[Part, int]:
    """This rank's tokens, and how many every rank has until there are no more."""
    num_rows = -(-vocab_size // ranks.world_size)
    start, stop = (min(rank * num_rows, vocab_size) for rank in (ranks.rank, ranks.rank + 1))
    return Part(range(start, stop), vocab_size), num_rows


def _even(what: str, size: int, ranks: Ranks) -> Part:
    count, rest = divmod(size, ranks.world_size)
    if rest:
        raise ModelError(
            f"The model's {size} {what} cannot be divided among {ranks.world_size} ranks; set tensor_parallel_size to a"
            f" divisor of {size}."
        )
    return Part(range(ranks.rank * count, (ranks.rank + 1) * count), size)
