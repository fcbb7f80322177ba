"""Decoders whose ranks share the positions of their KV: in every rank, the logits of the model alone."""

import pytest
from block_kv import logits_of
from ranks_in_threads import run_ranks
from test_tensor_parallel import TOKEN_IDS, assert_all_close, gemma3, llama, qwen3


@pytest.mark.parametrize(
    ("make", "world_size", "num_sharing", "num_kv_heads"),
    [(llama, 4, 4, 1), (llama, 4, 2, 2), (qwen3, 4, 2, 2), (gemma3, 2, 2, 1)],
)
def test_logits_of_ranks_that_share_positions_are_those_of_the_model_alone(
    make, world_size, num_sharing, num_kv_heads, tmp_path, randomized, save_checkpoint
):
    path = str(save_checkpoint(randomized(make(num_key_value_heads=num_kv_heads)), tmp_path))
    shared = run_ranks(world_size, lambda ranks: logits_of(path, TOKEN_IDS, ranks), num_sharing)
    assert_all_close(shared, logits_of(path, TOKEN_IDS))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_gemma_270m_has_the_same_logits_in_two_ranks_that_share_all_positions():
    token_ids = [2, *range(1000, 1030)]
    shared = run_ranks(2, lambda ranks: logits_of("gemma3-270m", token_ids, ranks), context_parallel_size=2)
    assert_all_close(shared, logits_of("gemma3-270m", token_ids))
