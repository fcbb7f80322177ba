"""What the ranks are told to build: numbers worked out by hand, and refusals that carry them."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockplane.control_plane.engine.kv_planning import RankKV, plan_kv_cache
from blockplane.protos.buckets import SEED_RULES, BucketRules
from blockplane.protos.config import Config
from blockplane.protos.errors import ConfigurationError
from blockplane.protos.model import LayerKVSpec
from blockplane.protos.plan import Configure

BF16 = LayerKVSpec("layers.0", num_kv_heads=4, head_dim=256, dtype="bfloat16")
FLOAT32 = LayerKVSpec("layers.1", num_kv_heads=1, head_dim=8, dtype="float32")
LAYERS = (BF16, FLOAT32)
# K and V x 16 tokens x (4 heads x 256 numbers x 2 bytes + 1 head x 8 numbers x 4 bytes).
BLOCK_BYTES = 66_560
CONFIG = Config(
    block_size=16,
    num_batched_tokens_buckets=(128, 256),
    num_seqs_buckets=(1, 4),
    kv_segment_size_buckets=(1024,),
)


def plan(
    config: Config,
    memory: int,
    model_max_len: int,
    layers: tuple[LayerKVSpec, ...] = LAYERS,
    rules: BucketRules | None = None,
) -> Configure:
    """The plan of a lone rank."""
    (configure,) = plan_kv_cache(config, [RankKV(layers, memory)], rules or BucketRules(), model_max_len)
    return configure


# -- blocks from memory ------------------------------------------------------------------------------------------------


def test_the_memory_gives_as_many_whole_blocks_as_it_holds() -> None:
    for spare in (0, 1, BLOCK_BYTES - 1):
        configure = plan(CONFIG, 100 * BLOCK_BYTES + spare, model_max_len=99 * 16)
        assert configure.num_blocks == 100
        assert sum(tensor.size for tensor in configure.kv_cache_tensors) == 100 * BLOCK_BYTES


def test_max_model_len_is_the_setting_up_to_the_model_s_own() -> None:
    for setting, expected in ((0, 1000), (999, 999), (1000, 1000)):
        config = replace(CONFIG, max_model_len=setting)
        assert plan(config, 100 * BLOCK_BYTES, model_max_len=1000).max_model_len == expected
    with pytest.raises(
        ConfigurationError, match=r"^max_model_len is 1001 and the model was made for 1000 tokens; .*\.$"
    ):
        plan(replace(CONFIG, max_model_len=1001), 100 * BLOCK_BYTES, model_max_len=1000)


def test_memory_must_hold_one_longest_request_beside_the_null_block() -> None:
    # 33 tokens take 3 blocks of 16, and block 0 is never used.
    assert plan(CONFIG, 4 * BLOCK_BYTES, model_max_len=33).num_blocks == 4
    with pytest.raises(ConfigurationError) as refusal:
        plan(CONFIG, 4 * BLOCK_BYTES - 1, model_max_len=33)
    for number in ("max_model_len 33", "needs 4 blocks", f"{4 * BLOCK_BYTES} bytes", str(4 * BLOCK_BYTES - 1)):
        assert number in str(refusal.value)
    # One token less fits two blocks.
    assert plan(CONFIG, 3 * BLOCK_BYTES, model_max_len=32).num_blocks == 3


def test_the_longest_request_counts_the_blocks_of_all_groups() -> None:
    layers = (
        BF16,
        replace(BF16, name="layers.1", sliding_window=50),
        replace(BF16, name="layers.2", attention_chunk_size=32),
    )
    block_bytes = 65_536
    # 160 tokens: 10 blocks of full attention, ceil(49 / 16) + 2 of the window, ceil(31 / 16) + 2 of the chunks, null.
    assert plan(CONFIG, 21 * block_bytes, 160, layers).num_blocks == 21
    with pytest.raises(ConfigurationError, match=r"max_model_len 160 needs 21 blocks, 1376256 bytes, .* 1376255;"):
        plan(CONFIG, 21 * block_bytes - 1, 160, layers)


def test_a_window_needs_more_blocks_where_segments_must_be_longer() -> None:
    layers = (replace(BF16, sliding_window=50),)
    # Segments of 16: ceil((49 + 16) / 16) + 1. Of 128: ceil((49 + 128) / 16) + 1. At most 256: all 16.
    for config, rules, num_needed in (
        (CONFIG, BucketRules(), 6),
        (CONFIG, BucketRules(prefill_multiple_of=128), 13),
        (replace(CONFIG, segmented_prefill="off"), BucketRules(), 16),
    ):
        assert plan(config, (1 + num_needed) * 65_536, 1000, layers, rules).num_blocks == 1 + num_needed
        with pytest.raises(ConfigurationError, match=rf"needs {1 + num_needed} blocks"):
            plan(config, num_needed * 65_536, 1000, layers, rules)


def test_num_blocks_by_hand_is_taken_even_if_less_than_one_longest_request() -> None:
    configure = plan(replace(CONFIG, num_blocks=2), 100 * BLOCK_BYTES, model_max_len=1000)
    assert (configure.num_blocks, configure.max_model_len) == (2, 1000)


def test_num_blocks_by_hand_must_fit_the_memory() -> None:
    config = replace(CONFIG, num_blocks=10)
    assert plan(config, 10 * BLOCK_BYTES, model_max_len=1000).num_blocks == 10
    with pytest.raises(ConfigurationError, match=r"^num_blocks is 10, .* 665600 bytes, .* 665599; .*kv_cache_bytes\.$"):
        plan(config, 10 * BLOCK_BYTES - 1, model_max_len=1000)


def test_a_cache_of_the_null_block_alone_is_refused() -> None:
    for memory, num_blocks in ((0, 0), (BLOCK_BYTES - 1, 0), (2 * BLOCK_BYTES - 1, 1)):
        with pytest.raises(
            ConfigurationError,
            match=rf"^rank 0 gives {memory} bytes, which hold {num_blocks} blocks of 66560 bytes.*kv_cache_bytes\.$",
        ):
            plan(CONFIG, memory, model_max_len=1)
    assert plan(CONFIG, 2 * BLOCK_BYTES, model_max_len=16).num_blocks == 2


@given(
    block_size=st.integers(1, 64), memory=st.integers(0, 1 << 24), max_len=st.integers(1, 5000), by_hand=st.booleans()
)
def test_whatever_is_planned_fits_the_memory_and_serves_the_longest_request(
    block_size: int, memory: int, max_len: int, by_hand: bool
) -> None:
    config = replace(CONFIG, block_size=block_size, num_blocks=40 if by_hand else 0)
    block_bytes = BLOCK_BYTES // 16 * block_size
    try:
        num_blocks = plan(config, memory, max_len).num_blocks
    except ConfigurationError:
        num_needed = 40 if by_hand else 1 + -(-max_len // block_size)
        assert memory < num_needed * block_bytes
        return
    assert num_blocks * block_bytes <= memory
    assert num_blocks == 40 if by_hand else (num_blocks + 1) * block_bytes > memory
    assert by_hand or (num_blocks - 1) * block_size >= max_len


# -- buckets -----------------------------------------------------------------------------------------------------------


def test_the_worker_is_told_the_settings_as_they_are() -> None:
    configure = plan(CONFIG, 100 * BLOCK_BYTES, model_max_len=1000)
    assert (configure.block_size, configure.max_model_len) == (16, 1000)
    assert (configure.num_batched_tokens_buckets, configure.num_seqs_buckets) == ((128, 256), (1, 4))
    assert (configure.kv_segment_size, configure.prefill_multiple_of, configure.num_draft_tokens) == (1024, 1, 0)
    assert plan(replace(CONFIG, num_draft_tokens=3), 100 * BLOCK_BYTES, model_max_len=1000).num_draft_tokens == 3


def test_without_segmented_prefill_the_segment_size_is_0_and_no_rule_for_it_applies() -> None:
    config = replace(CONFIG, kv_segment_size_buckets=(1000,))
    with pytest.raises(ConfigurationError, match=r"kv_segment_size_buckets is \[1000\]"):
        plan(config, 100 * BLOCK_BYTES, 1000, rules=SEED_RULES)
    configure = plan(replace(config, segmented_prefill="off"), 100 * BLOCK_BYTES, 1000, rules=SEED_RULES)
    assert configure.kv_segment_size == 0


def test_without_segmented_prefill_no_request_may_outgrow_the_last_prefill_bucket() -> None:
    """One that loses its blocks is computed anew at once, its output included."""
    config = replace(CONFIG, segmented_prefill="off")
    assert plan(config, 100 * BLOCK_BYTES, 1000).max_model_len == 256
    assert plan(config, 100 * BLOCK_BYTES, 200).max_model_len == 200
    assert plan(replace(config, max_model_len=256), 100 * BLOCK_BYTES, 1000).max_model_len == 256
    with pytest.raises(ConfigurationError, match=r"^max_model_len is 257, segmented_prefill is off, .* is 256: "):
        plan(replace(config, max_model_len=257), 100 * BLOCK_BYTES, 1000)


def test_decode_contexts_have_buckets_where_they_are_given_or_where_the_backend_compiles_them() -> None:
    given = replace(CONFIG, decode_context_length_buckets=(256, 1008))
    shapes = BucketRules(context_is_a_shape=True)
    for config, rules, expected in (
        (CONFIG, BucketRules(), ()),
        (CONFIG, shapes, (512, 1008)),
        (given, BucketRules(), (256, 1008)),
        (given, shapes, (256, 1008)),
    ):
        assert plan(config, 100 * BLOCK_BYTES, 1000, rules=rules).decode_context_length_buckets == expected
    with pytest.raises(ConfigurationError, match=r"decode_context_length_buckets is 1008, less than max_model_len, 10"):
        plan(given, 100 * BLOCK_BYTES, 1009, rules=shapes)


def test_the_backend_s_prefill_multiple_is_asked_of_the_buckets_and_told_to_the_scheduler() -> None:
    rules = BucketRules(prefill_multiple_of=128)
    configure = plan(CONFIG, 100 * BLOCK_BYTES, 1000, rules=rules)
    assert (configure.prefill_multiple_of, configure.segment_multiple) == (128, 128)
    with pytest.raises(ConfigurationError, match=r"^num_batched_tokens_buckets has 200, .* 128; make it 256\.$"):
        plan(replace(CONFIG, num_batched_tokens_buckets=(128, 200)), 100 * BLOCK_BYTES, 1000, rules=rules)


# -- ranks -------------------------------------------------------------------------------------------------------------


def test_the_rank_with_the_least_room_sets_the_blocks_of_all() -> None:
    # Rank 1 has the least memory but half the heads, so rank 2 has the least room.
    half = replace(BF16, num_kv_heads=2)
    ranks = [RankKV((BF16,), 100 * 65_536), RankKV((half,), 50 * 65_536), RankKV((BF16,), 70 * 65_536 + 5)]
    configures = plan_kv_cache(CONFIG, ranks, BucketRules(), 1000)
    assert [configure.num_blocks for configure in configures] == [70, 70, 70]
    sizes = [[tensor.size for tensor in configure.kv_cache_tensors] for configure in configures]
    assert sizes == [[70 * 65_536], [35 * 65_536], [70 * 65_536]]
    assert [configure.kv_cache_groups[0].num_kv_heads for configure in configures] == [4, 2, 4]


def test_ranks_that_share_positions_keep_a_part_of_each_block_and_the_engine_reckons_with_all_of_it() -> None:
    config = replace(CONFIG, tensor_parallel_size=2, context_parallel_size=2)
    ranks = [RankKV((BF16,), 100 * 65_536)] * 2
    rules = BucketRules(prefill_multiple_of=24, context_is_a_shape=True)
    config = replace(config, num_batched_tokens_buckets=(96, 192))
    for configure in plan_kv_cache(config, ranks, rules, 1000):
        assert (configure.block_size, configure.rank_block_size) == (32, 16)
        assert (configure.num_blocks, configure.kv_cache_tensors[0].size) == (100, 100 * 65_536)
        assert configure.segment_multiple == 96
        assert configure.decode_context_length_buckets == (512, 1024)
    # 1000 tokens are 32 blocks of 32, and block 0 is never used.
    assert plan_kv_cache(config, [RankKV((BF16,), 33 * 65_536)] * 2, rules, 1000)[0].num_blocks == 33
    with pytest.raises(ConfigurationError, match=r"needs 33 blocks, 2162688 bytes, and rank 0 gives 2162687;"):
        plan_kv_cache(config, [RankKV((BF16,), 33 * 65_536 - 1)] * 2, rules, 1000)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"num_batched_tokens_buckets": (16,)},
            r"is 16, and a prompt is cut at multiples of 32, which block_size, 32,",
        ),
        ({"decode_context_length_buckets": (1008,)}, r"has 1008, which is no multiple of block_size, 32;"),
    ],
)
def test_what_holds_no_whole_block_of_ranks_that_share_positions_is_refused(
    settings: dict[str, tuple[int, ...]], sentence: str
) -> None:
    config = replace(CONFIG, tensor_parallel_size=2, context_parallel_size=2, **settings)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=sentence):
        plan_kv_cache(config, [RankKV((BF16,), 100 * 65_536)] * 2, BucketRules(), 1000)


def test_a_refusal_for_memory_names_the_rank() -> None:
    ranks = [RankKV((BF16,), 100 * 65_536), RankKV((BF16,), 8 * 65_536)]
    with pytest.raises(ConfigurationError, match=r"max_model_len 160 needs 11 blocks, .* rank 1 gives 524288;"):
        plan_kv_cache(CONFIG, ranks, BucketRules(), 160)


@pytest.mark.parametrize(
    ("layers", "sentence"),
    [
        ((BF16,), r"^rank 1 has 1 layers that keep KV and rank 0 has 2; .*\.$"),
        ((BF16, replace(FLOAT32, name="x")), r"^rank 1 has x with .* where rank 0 has layers\.1 with .*\.$"),
        (
            (replace(BF16, sliding_window=8), FLOAT32),
            r"^rank 1 has layers\.0 with a sliding window of 8 where rank 0 has layers\.0 with full attention; .*\.$",
        ),
        (
            (BF16, replace(FLOAT32, attention_chunk_size=8)),
            r"^rank 1 has layers\.1 with attention chunks of 8 where rank 0 has layers\.1 with full attention; .*\.$",
        ),
        (
            (BF16, replace(FLOAT32, shares_kv_with="layers.0")),
            r"^rank 1 has layers\.1 with full attention, which reads the KV of layers\.0 where .*\.$",
        ),
    ],
)
def test_ranks_that_disagree_are_refused_naming_rank_and_layer(layers: tuple[LayerKVSpec, ...], sentence: str) -> None:
    ranks = [RankKV(LAYERS, 100 * BLOCK_BYTES), RankKV(layers, 100 * BLOCK_BYTES)]
    with pytest.raises(ConfigurationError, match=sentence):
        plan_kv_cache(CONFIG, ranks, BucketRules(), 1000)
