"""A model divided among ranks says what it says alone: logits at every position, in every rank."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from block_kv import BlockKVDriver, logits_of
from ranks_in_threads import run_ranks
from torch import Tensor
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from blockplane.data_plane.loading.build import load_model, load_weights
from blockplane.data_plane.loading.checkpoint import open_checkpoint
from blockplane.data_plane.models.linear import TorchLinear, fastest_linear
from blockplane.data_plane.models.shards import vocabulary_of
from blockplane.data_plane.models.vocabulary import embed, whole_logits
from blockplane.data_plane.ranks.collectives import ALONE, Ranks

WINDOW = 8
# A vocabulary that neither 2 nor 4 divide.
SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
TOKEN_IDS = torch.randint(0, SIZES["vocab_size"], (24,), generator=torch.Generator().manual_seed(5)).tolist()


def llama(**settings: Any) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**SIZES | settings))


def qwen3(**settings: Any) -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**SIZES | settings))


def gemma3(**settings: Any) -> PreTrainedModel:
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
    return Gemma3ForCausalLM(Gemma3TextConfig(**SIZES | kinds | {"query_pre_attn_scalar": 24} | settings))


MODELS = {
    "llama": lambda: llama(),
    "llama-tied-bias": lambda: llama(tie_word_embeddings=True, attention_bias=True),
    "qwen3": lambda: qwen3(),
    "qwen3-bias-window": lambda: qwen3(
        attention_bias=True, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "qwen3-tied-one-kv-head": lambda: qwen3(tie_word_embeddings=True, num_key_value_heads=1),
    "gemma3": lambda: gemma3(),
    "gemma3-untied-capped-logits": lambda: gemma3(tie_word_embeddings=False, final_logit_softcapping=3.0),
}


@pytest.fixture(params=MODELS)
def checkpoint_path(request, tmp_path, randomized, save_checkpoint) -> str:
    return str(save_checkpoint(randomized(MODELS[request.param]()), tmp_path))


def assert_all_close(of_ranks: list[Tensor], alone: Tensor) -> None:
    for logits in of_ranks:
        torch.testing.assert_close(logits, alone, rtol=1e-4, atol=1e-4 * alone.abs().max().item())
        assert torch.equal(logits, of_ranks[0])


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_rank_has_the_logits_of_the_model_alone(checkpoint_path, world_size):
    alone = logits_of(checkpoint_path, TOKEN_IDS)
    divided = run_ranks(world_size, lambda ranks: logits_of(checkpoint_path, TOKEN_IDS, ranks))
    assert alone.shape == (len(TOKEN_IDS), SIZES["vocab_size"])
    assert_all_close(divided, alone)


def test_layers_keep_a_ranks_own_heads_and_kv_heads(tmp_path, randomized, save_checkpoint):
    path = str(save_checkpoint(randomized(llama()), tmp_path))

    def heads(ranks: Ranks) -> set[tuple[int, int]]:
        model = load_model(open_checkpoint(path), "float32", ranks=ranks)
        return {(attention.spec.num_heads, attention.spec.num_kv_heads) for attention in model.attentions}

    assert run_ranks(2, heads) == [{(4, 1)}] * 2
    assert run_ranks(4, heads) == [{(2, 1)}] * 4


@pytest.mark.parametrize("make", [llama, gemma3])
def test_refilled_ranks_have_the_logits_of_the_other_model(
    tmp_path, randomized, save_checkpoint, block_kv_driver, make
):
    model = randomized(make(attention_bias=True))
    path = str(save_checkpoint(model, tmp_path / "one"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-0.7)
    other = str(save_checkpoint(model, tmp_path / "other"))

    def refilled(ranks: Ranks) -> tuple[Tensor, bytes, bytes]:
        model = load_model(open_checkpoint(path), "float32", ranks=ranks)
        before = model.fingerprint
        model.refill(load_weights(open_checkpoint(other), "float32", ranks=ranks))
        return BlockKVDriver(model, 4, 20).prefill(TOKEN_IDS[:20]), before, model.fingerprint

    alone, divided = refilled(ALONE), run_ranks(2, refilled)
    assert_all_close([logits for logits, _, _ in divided], alone[0])
    fingerprints = [fingerprint for _, *fingerprints in (alone, *divided) for fingerprint in fingerprints]
    # Each shard has its own, before and after.
    assert len(set(fingerprints)) == 6


@pytest.mark.parametrize("kind", [TorchLinear, fastest_linear])
@pytest.mark.parametrize("vocab_size", [3, 128, 130, 255, 256])
def test_any_vocabulary_is_embedded_and_gathered_whole(kind, vocab_size):
    matrix = torch.randn(vocab_size, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    token_ids = torch.arange(vocab_size).flip(0)

    def looked_up(ranks: Ranks) -> tuple[Tensor, Tensor]:
        part, num_rows = vocabulary_of(vocab_size, ranks)
        # Nothing may come of what lies behind a rank's own rows.
        own = torch.full((-(-num_rows // 64) * 64, 32), torch.nan, dtype=torch.bfloat16)
        own[: len(part)] = matrix[part.own.start : part.own.stop]
        logits = own[:num_rows, 0].expand(2, -1)
        return embed(token_ids, kind(own), part.own, ranks), whole_logits(logits, vocab_size, ranks)

    for embedded, logits in run_ranks(4, looked_up):
        assert torch.equal(embedded, matrix[token_ids])
        assert torch.equal(logits, matrix[:, 0].expand(2, -1))


@pytest.mark.parametrize("num_sharing", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_ranks_in_processes_of_their_own_have_the_logits_of_the_model_alone(
    num_sharing, tmp_path, randomized, save_checkpoint
):
    path = str(save_checkpoint(randomized(gemma3(attention_bias=True, num_key_value_heads=1)), tmp_path))
    script, outputs = Path(__file__).with_name("rank_process.py"), [tmp_path / f"{rank}.npy" for rank in range(2)]
    processes = [
        subprocess.Popen(
            [sys.executable, script, str(rank), "2", str(num_sharing), path, output],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, output in enumerate(outputs)
    ]
    try:
        address, _ = (process.stdout.readline().strip() for process in processes)
        for process in processes:
            process.stdin.write(f"{address}\n{' '.join(map(str, TOKEN_IDS))}\n")
            process.stdin.close()
        assert [process.wait(timeout=100) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    assert_all_close([torch.from_numpy(np.load(output)) for output in outputs], logits_of(path, TOKEN_IDS))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world_size", [2, 4])
def test_gemma_270m_has_the_same_logits_in_every_rank(world_size):
    token_ids = [2, *range(1000, 1018)]
    alone = logits_of("gemma3-270m", token_ids)
    divided = run_ranks(world_size, lambda ranks: logits_of("gemma3-270m", token_ids, ranks))
    assert_all_close(divided, alone)
