"""The decoder against transformers, through real block KV: logits at every position, and greedy ids on Gemma 3 270M."""

import pytest
import torch
from tokenizers import Tokenizer
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

from blockplane.data_plane.loading.build import load_model
from blockplane.data_plane.loading.checkpoint import open_checkpoint
from blockplane.data_plane.models.transformer import Transformer

VOCAB_SIZE = 96
WINDOW = 8
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def llama(**settings: object) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, rope_parameters=LLAMA3_ROPE, **SIZES, **settings))


def qwen3(**settings: object) -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(num_hidden_layers=2, **SIZES, **settings))


def gemma3(**settings: object) -> PreTrainedModel:
    # Seven layers: five sliding ones, a full one, and a sliding one again.
    defaults = {"num_hidden_layers": 7, "sliding_window": WINDOW, "query_pre_attn_scalar": 24}
    return Gemma3ForCausalLM(Gemma3TextConfig(**(SIZES | defaults | settings)))


MODELS = {
    "llama": lambda: llama(),
    "llama-tied-bias": lambda: llama(tie_word_embeddings=True, attention_bias=True),
    "llama-linear-rope": lambda: LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=2, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}, **SIZES
        )
    ),
    "qwen3": lambda: qwen3(),
    "qwen3-tied-bias": lambda: qwen3(tie_word_embeddings=True, attention_bias=True),
    "qwen3-sliding": lambda: qwen3(use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    "gemma3": lambda: gemma3(),
    "gemma3-untied": lambda: gemma3(tie_word_embeddings=False),
    "gemma3-capped-logits": lambda: gemma3(final_logit_softcapping=3.0),
    "gemma3-linear-rope": lambda: gemma3(
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }
    ),
}


@pytest.fixture(params=MODELS)
def pair(request, tmp_path, randomized, save_checkpoint) -> tuple[Transformer, PreTrainedModel]:
    """Our decoder, loaded from what transformers saved, and transformers' own."""
    theirs = randomized(MODELS[request.param]())
    return load_model(open_checkpoint(str(save_checkpoint(theirs, tmp_path))), "float32"), theirs


def expected_logits(model: PreTrainedModel, token_ids: list[int]) -> Tensor:
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0].float()


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3 * theirs.abs().max().item())


@pytest.mark.parametrize(("block_size", "chunk"), [(4, 4), (4, 12), (16, 32)])
def test_logits_agree_at_every_position_around_block_chunk_and_window_boundaries(
    pair, block_kv_driver, block_size, chunk
):
    ours, theirs = pair
    boundaries = {block_size, chunk, WINDOW}
    for num_prompt_tokens in sorted({1} | {b + offset for b in boundaries for offset in (-1, 0, 1)}):
        token_ids = torch.randint(0, VOCAB_SIZE, (num_prompt_tokens + WINDOW + 2,)).tolist()
        driver = block_kv_driver(ours, block_size, len(token_ids))
        parts = [
            driver.prefill(token_ids[start : min(start + chunk, num_prompt_tokens)], num_padding=3)
            for start in range(0, num_prompt_tokens, chunk)
        ]
        parts += [driver.decode(token_id) for token_id in token_ids[num_prompt_tokens:]]
        assert_close(torch.cat(parts), expected_logits(theirs, token_ids))


def test_sharded_checkpoints_load_like_single_files(tmp_path, randomized, save_checkpoint, block_kv_driver):
    theirs = randomized(llama())
    save_checkpoint(theirs, tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    ours = load_model(open_checkpoint(str(tmp_path)), "float32")
    token_ids = list(range(20))
    assert_close(block_kv_driver(ours, 4, 20).prefill(token_ids), expected_logits(theirs, token_ids))


@pytest.mark.parametrize("width", [48, 64], ids=["no whole tiles", "whole tiles"])
def test_bfloat16_stays_near_float32(tmp_path, randomized, save_checkpoint, block_kv_driver, width):
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_attention_heads": 4, "vocab_size": 2 * width}
    theirs = randomized(gemma3(**sizes))
    ours = load_model(open_checkpoint(str(save_checkpoint(theirs, tmp_path))), "bfloat16")
    token_ids = list(range(20))
    expected = expected_logits(theirs, token_ids)
    driver = block_kv_driver(ours, 4, 20)
    logits = torch.cat((driver.prefill(token_ids[:-1]), driver.decode(token_ids[-1])))
    assert logits.dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(logits, expected).min() > 0.99


PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village by the sea,",
    "Die Hauptstadt von Deutschland ist",
    "1, 1, 2, 3, 5, 8,",
    "Water boils at",
    "The three primary colours are",
    "In 1969,",
    "人工智能的未来",
    "Dear Sir or Madam,\n\nI am writing to",
]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_gemma_270m_continues_prompts_greedily_as_transformers_does(block_kv_driver):
    num_new_tokens = 64
    checkpoint = open_checkpoint("gemma3-270m")
    theirs = gemma_270m_of_transformers()
    ours = load_model(checkpoint, "float32", max_model_len=512)
    tokenizer = Tokenizer.from_str(checkpoint.tokenizer_json.decode())
    for prompt in PROMPTS:
        prompt_ids = [checkpoint.bos_token_id, *tokenizer.encode(prompt).ids]
        driver = block_kv_driver(ours, 16, len(prompt_ids) + num_new_tokens)
        generated = [int(driver.prefill(prompt_ids)[-1].argmax())]
        while len(generated) < num_new_tokens:
            generated.append(int(driver.decode(generated[-1]).argmax()))
        # Their choice after every prefix of our text is our next token: by induction, their greedy text is ours.
        choices = expected_logits(theirs, prompt_ids + generated[:-1]).argmax(dim=-1)
        assert choices[len(prompt_ids) - 1 :].tolist() == generated, prompt


def gemma_270m_of_transformers() -> PreTrainedModel:
    """Built from the same dequantized weights, in float32."""
    checkpoint = open_checkpoint("gemma3-270m")
    config = Gemma3TextConfig(
        vocab_size=262144,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        query_pre_attn_scalar=256,
        sliding_window=512,
        max_position_embeddings=32768,
    )
    model = Gemma3ForCausalLM(config)
    weights = {name: stored.read() for name, stored in checkpoint.tensors}
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, strict=True)
    return model.eval()
