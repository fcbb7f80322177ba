"""`blockplane worker`: loads the model and starts the worker process on this machine's CPU."""

import os
import signal
import sys
import zlib

# Read once, as torch loads. Threads that wait for each other by spinning take the cores from engine and frontend, and
# stall for whole time slices where any other process runs.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from blockplane.data_plane.loading.build import load_model
from blockplane.data_plane.loading.checkpoint import open_checkpoint
from blockplane.data_plane.models.interface import Model
from blockplane.data_plane.models.synthetic import MAX_MODEL_LEN, SyntheticModel, synthetic_model_info
from blockplane.data_plane.threads import num_usable_cores
from blockplane.data_plane.worker import Worker
from blockplane.protos.config import Config
from blockplane.protos.model import ModelInfo
from blockplane.protos.process import run_process


def serve(config: Config) -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    torch.set_num_threads(config.num_threads or num_usable_cores())
    model, info = _load(config)
    Worker(model, info, available_memory=config.kv_cache_bytes).serve(config.engine_address)


def _load(config: Config) -> tuple[Model, ModelInfo]:
    """The model that the settings name, and what the control plane is told of it."""
    if config.model == "synthetic":
        max_model_len = config.max_model_len or MAX_MODEL_LEN
        return SyntheticModel(config.dtype), synthetic_model_info(max_model_len)
    checkpoint = open_checkpoint(config.model)
    max_model_len = min(config.max_model_len or sys.maxsize, checkpoint.config.max_position_embeddings)
    model = load_model(checkpoint, config.dtype, max_model_len)
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
