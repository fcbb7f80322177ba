"""A Llama of two layers and random weights, small enough for an emulator; knows no test."""

import torch

from blockplane.data_plane.models.config import LayerConfig, ModelConfig, RopeConfig
from blockplane.data_plane.models.transformer import Transformer
from blockplane.data_plane.models.weights import HOST, DecoderWeights

_ROPE = RopeConfig(10000.0)
LLAMA = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=96,
    hidden_size=96,
    intermediate_size=160,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    layers=(LayerConfig(None, _ROPE), LayerConfig(20, _ROPE)),
    activation="silu",
    norm_eps=1e-5,
    norm_adds_one=False,
    sandwich_norms=False,
    qk_norm=False,
    attention_bias=False,
    tied_embeddings=False,
    embedding_scale=None,
    query_scale=32**-0.5,
    attention_soft_cap=None,
    logit_soft_cap=None,
    max_position_embeddings=256,
    bos_token_id=1,
    eos_token_ids=(2,),
    dtype="bfloat16",
)


def tiny_llama(device: torch.device = HOST) -> Transformer:
    """Two layers, the second with a window; random weights, bfloat16."""
    weights, generator = DecoderWeights(LLAMA, torch.bfloat16, device), torch.Generator().manual_seed(3)
    for name, tensor in weights.named_tensors():
        noise = torch.randn(tensor.shape, generator=generator)
        tensor.copy_(1 + 0.1 * noise if "norm" in name else 0.3 * noise)
    return Transformer(LLAMA, weights)
