"""Models by their names in the settings, and what the control plane is told of them. Knows no formats."""

import re
import sys
import zlib

import torch

from blockplane.data_plane.kv_cache import KV_CACHE_DTYPES
from blockplane.data_plane.loading.build import load_model
from blockplane.data_plane.loading.checkpoint import Checkpoint, open_checkpoint
from blockplane.data_plane.models.interface import Model
from blockplane.data_plane.models.synthetic import MAX_MODEL_LEN, SyntheticModel, synthetic_model_info
from blockplane.data_plane.models.weights import HOST
from blockplane.data_plane.ranks.collectives import ALONE, Ranks
from blockplane.protos.config import Config
from blockplane.protos.errors import ConfigurationError
from blockplane.protos.model import ModelInfo


def load_named(name: str, config: Config, device: torch.device = HOST, ranks: Ranks = ALONE) -> tuple[Model, ModelInfo]:
    """A rank's part of a model on a device, and that of the worker's hello. Raises ModelError or ConfigurationError."""
    kv_cache_dtype = KV_CACHE_DTYPES[config.kv_cache_dtype]
    if (seed := synthetic_seed(name)) is not None:
        max_model_len = config.max_model_len or MAX_MODEL_LEN
        synthetic = SyntheticModel(config.dtype, str(device), kv_cache_dtype=kv_cache_dtype, seed=seed, ranks=ranks)
        return synthetic, synthetic_model_info(max_model_len)
    checkpoint = open_checkpoint(name)
    info = info_of(checkpoint, config)
    model = load_model(checkpoint, config.dtype, info.max_model_len, kv_cache_dtype, device, ranks, config.quantize)
    return model, info


def synthetic_seed(name: str) -> int | None:
    """Of the synthetic model's weights: 0 for `synthetic`, N for `synthetic-N`; None = it is another model."""
    match = re.fullmatch(r"synthetic(?:-(\d{1,9}))?", name)
    return None if match is None else int(match[1] or 0)


def info_of(checkpoint: Checkpoint, config: Config) -> ModelInfo:
    """What the control plane is told of a checkpoint."""
    max_model_len = min(config.max_model_len or sys.maxsize, checkpoint.config.max_position_embeddings)
    return ModelInfo(
        name=checkpoint.name,
        vocab_size=checkpoint.config.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=checkpoint.eos_token_ids,
        bos_token_id=checkpoint.bos_token_id,
        tokenizer_json_zlib=zlib.compress(checkpoint.tokenizer_json, level=1),
        defaults=checkpoint.defaults,
        chat_template=checkpoint.chat_template,
    )


def load_draft_model(
    config: Config, target: ModelInfo, device: torch.device = HOST, ranks: Ranks = ALONE
) -> Model | None:
    """Divided as the target is. Raises ConfigurationError if it cannot guess all that the target may say."""
    if not config.num_draft_tokens or config.draft_source != "model":
        return None
    model, info = load_named(config.draft_model, config, device, ranks)
    if info.vocab_size != target.vocab_size:
        raise ConfigurationError(
            f"draft_model {info.name} has a vocabulary of {info.vocab_size} tokens and {target.name} one of"
            f" {target.vocab_size}; choose a draft model of the same vocabulary."
        )
    if info.max_model_len < target.max_model_len:
        raise ConfigurationError(
            f"draft_model {info.name} was made for {info.max_model_len} tokens and max_model_len is"
            f" {target.max_model_len}; lower max_model_len or choose another draft model."
        )
    return model
