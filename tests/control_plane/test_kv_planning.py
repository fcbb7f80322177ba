"""How many blocks a worker gets: numbers worked out by hand, and refusals that carry them."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockplane.control_plane.engine.kv_planning import bytes_per_block, plan_kv_cache
from blockplane.protos.config import Config
from blockplane.protos.errors import ConfigurationError
from blockplane.protos.model import LayerKVSpec

BF16 = LayerKVSpec("layers.0", num_kv_heads=4, head_dim=256, dtype="bfloat16")
FLOAT32 = LayerKVSpec("layers.1", num_kv_heads=1, head_dim=8, dtype="float32", sliding_window=64)
LAYERS = [BF16, FLOAT32]
# K and V x 16 tokens x (4 heads x 256 numbers x 2 bytes + 1 head x 8 numbers x 4 bytes).
BLOCK_BYTES = 66_560
CONFIG = Config(block_size=16, num_batched_tokens_buckets=(128, 256), num_seqs_buckets=(1, 4))


def test_a_block_takes_k_and_v_of_every_layer_in_its_own_dtype() -> None:
    assert bytes_per_block([BF16], 16) == 65_536
    assert bytes_per_block([FLOAT32], 16) == 1_024
    assert bytes_per_block(LAYERS, 16) == BLOCK_BYTES
    assert bytes_per_block(LAYERS, 1) == BLOCK_BYTES // 16


def test_the_memory_gives_as_many_whole_blocks_as_it_holds() -> None:
    for spare in (0, 1, BLOCK_BYTES - 1):
        configure = plan_kv_cache(CONFIG, LAYERS, 100 * BLOCK_BYTES + spare, model_max_len=99 * 16)
        assert configure.num_blocks == 100


def test_the_worker_is_told_the_settings_as_they_are() -> None:
    configure = plan_kv_cache(CONFIG, LAYERS, 100 * BLOCK_BYTES, model_max_len=1000)
    assert (configure.block_size, configure.max_model_len) == (16, 1000)
    assert (configure.num_batched_tokens_buckets, configure.num_seqs_buckets) == ((128, 256), (1, 4))


def test_max_model_len_is_the_setting_up_to_the_model_s_own() -> None:
    for setting, expected in ((0, 1000), (999, 999), (1000, 1000)):
        config = replace(CONFIG, max_model_len=setting)
        assert plan_kv_cache(config, LAYERS, 100 * BLOCK_BYTES, model_max_len=1000).max_model_len == expected
    with pytest.raises(
        ConfigurationError, match=r"^max_model_len is 1001 and the model was made for 1000 tokens; .*\.$"
    ):
        plan_kv_cache(replace(CONFIG, max_model_len=1001), LAYERS, 100 * BLOCK_BYTES, model_max_len=1000)


def test_memory_must_hold_one_longest_request_beside_the_null_block() -> None:
    # 33 tokens take 3 blocks of 16, and block 0 is never used.
    assert plan_kv_cache(CONFIG, LAYERS, 4 * BLOCK_BYTES, model_max_len=33).num_blocks == 4
    with pytest.raises(ConfigurationError) as refusal:
        plan_kv_cache(CONFIG, LAYERS, 4 * BLOCK_BYTES - 1, model_max_len=33)
    for number in ("max_model_len 33", "needs 4 blocks", f"{4 * BLOCK_BYTES} bytes", str(4 * BLOCK_BYTES - 1)):
        assert number in str(refusal.value)
    # One token less fits two blocks.
    assert plan_kv_cache(CONFIG, LAYERS, 3 * BLOCK_BYTES, model_max_len=32).num_blocks == 3


def test_num_blocks_by_hand_is_taken_even_if_less_than_one_longest_request() -> None:
    configure = plan_kv_cache(replace(CONFIG, num_blocks=2), LAYERS, 100 * BLOCK_BYTES, model_max_len=1000)
    assert (configure.num_blocks, configure.max_model_len) == (2, 1000)


def test_num_blocks_by_hand_must_fit_the_memory() -> None:
    config = replace(CONFIG, num_blocks=10)
    assert plan_kv_cache(config, LAYERS, 10 * BLOCK_BYTES, model_max_len=1000).num_blocks == 10
    with pytest.raises(ConfigurationError, match=r"^num_blocks is 10, .* 665600 bytes, .* 665599; .*kv_cache_bytes\.$"):
        plan_kv_cache(config, LAYERS, 10 * BLOCK_BYTES - 1, model_max_len=1000)


def test_a_cache_of_the_null_block_alone_is_refused() -> None:
    for memory, num_blocks in ((0, 0), (BLOCK_BYTES - 1, 0), (2 * BLOCK_BYTES - 1, 1)):
        with pytest.raises(
            ConfigurationError,
            match=rf"^{memory} bytes hold {num_blocks} blocks of 66560 bytes.*raise kv_cache_bytes\.$",
        ):
            plan_kv_cache(CONFIG, LAYERS, memory, model_max_len=1)
    assert plan_kv_cache(CONFIG, LAYERS, 2 * BLOCK_BYTES, model_max_len=16).num_blocks == 2


def test_a_dtype_that_the_engine_does_not_know_is_refused_naming_it_and_its_layer() -> None:
    with pytest.raises(ConfigurationError, match=r"layers\.1.*float8.*\.$"):
        plan_kv_cache(CONFIG, [BF16, replace(FLOAT32, dtype="float8")], 100 * BLOCK_BYTES, model_max_len=16)


def test_a_worker_without_layers_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"no layer.*\.$"):
        plan_kv_cache(CONFIG, [], 100 * BLOCK_BYTES, model_max_len=16)


@given(
    block_size=st.integers(1, 64), memory=st.integers(0, 1 << 24), max_len=st.integers(1, 5000), by_hand=st.booleans()
)
def test_whatever_is_planned_fits_the_memory_and_serves_the_longest_request(
    block_size: int, memory: int, max_len: int, by_hand: bool
) -> None:
    config = replace(CONFIG, block_size=block_size, num_blocks=40 if by_hand else 0)
    block_bytes = bytes_per_block(LAYERS, block_size)
    try:
        num_blocks = plan_kv_cache(config, LAYERS, memory, max_len).num_blocks
    except ConfigurationError:
        num_needed = 40 if by_hand else 1 + -(-max_len // block_size)
        assert memory < num_needed * block_bytes
        return
    assert num_blocks * block_bytes <= memory
    assert num_blocks == 40 if by_hand else (num_blocks + 1) * block_bytes > memory
    assert by_hand or (num_blocks - 1) * block_size >= max_len
