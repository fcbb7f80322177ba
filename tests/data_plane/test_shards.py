"""Shards: together all ranks have all of a model, each rank what its query heads use, and misfits are refused."""

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_llama import LLAMA

from blockplane.data_plane.models.config import ModelConfig
from blockplane.data_plane.models.shards import Shard, shard_of
from blockplane.data_plane.ranks.collectives import ALONE
from blockplane.kernels.slots import ALONE as WHOLE_CONTEXT
from blockplane.kernels.slots import ContextParallel
from blockplane.protos.errors import ModelError


@dataclass(frozen=True)
class Place:
    """Where a rank stands in its group: all that a shard depends on."""

    rank: int
    world_size: int
    context_parallel: ContextParallel = WHOLE_CONTEXT


def shards_of(config: ModelConfig, world_size: int, num_sharing: int = 1) -> list[Shard]:
    places = (Place(rank, world_size, ContextParallel(num_sharing, rank % num_sharing)) for rank in range(world_size))
    return [shard_of(config, place) for place in places]


@st.composite
def divisible(draw: st.DrawFn) -> tuple[ModelConfig, int]:
    """A model, and a number of ranks that suits it."""
    factor, fewer = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    world_size, num_kv_heads = draw(st.permutations([fewer, fewer * factor]))
    config = replace(
        LLAMA,
        num_heads=max(world_size, num_kv_heads) * draw(st.integers(1, 6)),
        num_kv_heads=num_kv_heads,
        intermediate_size=world_size * draw(st.integers(1, 20)),
        vocab_size=draw(st.integers(1, 200)),
    )
    return config, world_size


@given(divisible())
def test_all_ranks_have_everything_once_and_kv_heads_at_least_once(case: tuple[ModelConfig, int]) -> None:
    config, world_size = case
    shards = shards_of(config, world_size)
    assert [head for shard in shards for head in shard.heads.own] == list(range(config.num_heads))
    assert [column for shard in shards for column in shard.intermediate.own] == list(range(config.intermediate_size))
    assert [token for shard in shards for token in shard.vocabulary.own] == list(range(config.vocab_size))
    assert [row for shard in shards for row in shard.output_bias.own] == list(range(config.hidden_size))
    kv_heads = [kv_head for shard in shards for kv_head in shard.kv_heads.own]
    num_alike = max(world_size // config.num_kv_heads, 1)
    assert kv_heads == [kv_head for kv_head in range(config.num_kv_heads) for _ in range(num_alike)]


@given(divisible())
def test_a_rank_has_the_kv_heads_that_its_query_heads_use_in_their_order(case: tuple[ModelConfig, int]) -> None:
    config, world_size = case
    for shard in shards_of(config, world_size):
        group_size = config.num_heads // config.num_kv_heads
        # As kernels map them: query head h of a rank uses its KV head h // (heads / KV heads).
        per_kv_head = len(shard.heads) // len(shard.kv_heads)
        used = [shard.kv_heads.own[index // per_kv_head] for index in range(len(shard.heads))]
        assert used == [head // group_size for head in shard.heads.own]


@given(st.integers(1, 300), st.integers(1, 12))
def test_every_rank_keeps_as_many_vocabulary_rows_and_its_own_among_them(vocab_size: int, world_size: int) -> None:
    config = replace(LLAMA, vocab_size=vocab_size, num_heads=world_size, num_kv_heads=1, intermediate_size=world_size)
    shards = shards_of(config, world_size)
    (num_rows,) = {shard.num_vocabulary_rows for shard in shards}
    assert vocab_size <= num_rows * world_size < vocab_size + world_size
    for rank, shard in enumerate(shards):
        assert len(shard.vocabulary) <= num_rows
        # So that the ranks' rows, side by side, are the vocabulary and then padding.
        assert shard.vocabulary.own.start == min(rank * num_rows, vocab_size)


@given(divisible(), st.data())
def test_ranks_that_share_positions_have_the_same_kv_heads_or_are_refused(
    case: tuple[ModelConfig, int], data: st.DataObject
) -> None:
    config, world_size = case
    num_sharing = data.draw(st.sampled_from([size for size in range(2, 37) if world_size % size == 0] or [1]))
    kv_heads = [shard.kv_heads for shard in shards_of(config, world_size)]
    groups = [kv_heads[start : start + num_sharing] for start in range(0, world_size, num_sharing)]
    if all(len(set(group)) == 1 for group in groups):
        assert [shard.kv_heads for shard in shards_of(config, world_size, num_sharing)] == kv_heads
    else:
        with pytest.raises(ModelError, match="set context_parallel_size to a divisor"):
            shards_of(config, world_size, num_sharing)


def test_a_rank_alone_has_the_whole_model() -> None:
    shard = shard_of(LLAMA, ALONE)
    parts = (shard.heads, shard.kv_heads, shard.intermediate, shard.vocabulary, shard.output_bias)
    assert all(part.own == range(part.size) for part in parts)
    assert shard.num_vocabulary_rows == LLAMA.vocab_size


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 6}, "6 attention heads cannot be divided among 4 ranks; set tensor_parallel_size to a divisor"),
        ({"num_kv_heads": 3, "num_heads": 12}, "3 KV heads can neither be divided among 4 ranks"),
        ({"intermediate_size": 90}, "90 MLP columns cannot be divided among 4 ranks; set tensor_parallel_size"),
    ],
)
def test_sizes_that_do_not_divide_are_named_with_what_to_set(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        shard_of(replace(LLAMA, **changes), Place(0, 4))


def test_too_few_ranks_for_a_shared_context_are_named_with_what_to_set() -> None:
    with pytest.raises(ModelError, match="Of 4 ranks 2 keep the same of the model's 2 KV heads, so that no 4 can"):
        shard_of(LLAMA, Place(0, 4, ContextParallel(4, 0)))
