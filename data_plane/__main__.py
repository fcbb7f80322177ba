"""`blockplane worker`: loads the model and starts the worker process on this machine's CPU."""

import os
import signal
import sys
import zlib

# Read once, as torch loads. Threads that wait for each other by spinning take the cores from engine and frontend, and
# stall for whole time slices where any other process runs.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from blockplane.data_plane.kv_cache import KV_CACHE_DTYPES
from blockplane.data_plane.loading.build import load_model
from blockplane.data_plane.loading.checkpoint import open_checkpoint
from blockplane.data_plane.models.interface import Model
from blockplane.data_plane.models.synthetic import MAX_MODEL_LEN, SyntheticModel, synthetic_model_info
from blockplane.data_plane.threads import num_usable_cores
from blockplane.data_plane.worker import Worker
from blockplane.protos.config import Config
from blockplane.protos.errors import ConfigurationError
from blockplane.protos.model import ModelInfo
from blockplane.protos.process import run_process


def serve(config: Config) -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    torch.set_num_threads(config.num_threads or num_usable_cores())
    model, info = _load(config.model, config)
    worker = Worker(
        model,
        info,
        available_memory=config.kv_cache_bytes,
        num_draft_tokens=config.num_draft_tokens,
        draft_model=_load_draft_model(config, info),
    )
    worker.serve(config.engine_address)


def _load_draft_model(config: Config, target: ModelInfo) -> Model | None:
    """Raises ConfigurationError if the draft model cannot guess all that the target may say."""
    if not config.num_draft_tokens or config.draft_source != "model":
        return None
    model, info = _load(config.draft_model, config)
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


def _load(name: str, config: Config) -> tuple[Model, ModelInfo]:
    """A model by its name in the settings, and what the control plane is told of it."""
    kv_cache_dtype = KV_CACHE_DTYPES[config.kv_cache_dtype]
    if name == "synthetic":
        max_model_len = config.max_model_len or MAX_MODEL_LEN
        return SyntheticModel(config.dtype, kv_cache_dtype=kv_cache_dtype), synthetic_model_info(max_model_len)
    checkpoint = open_checkpoint(name)
    max_model_len = min(config.max_model_len or sys.maxsize, checkpoint.config.max_position_embeddings)
    model = load_model(checkpoint, config.dtype, max_model_len, kv_cache_dtype)
    return model, ModelInfo(
        name=checkpoint.name,
        vocab_size=checkpoint.config.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=checkpoint.eos_token_ids,
        bos_token_id=checkpoint.bos_token_id,
        tokenizer_json_zlib=zlib.compress(checkpoint.tokenizer_json, level=1),
        defaults=checkpoint.defaults,
    )


if __name__ == "__main__":
    sys.exit(run_process("worker", "Loads the model and computes what the engine plans.", serve))
