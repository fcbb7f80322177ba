"""Checkpoint -> weights -> Transformer: copies a rank's part of every tensor to its place, says how far it is.

Knows no file format.
"""

import logging
import re
import time

import torch

from blockplane.data_plane.loading.checkpoint import Checkpoint, StoredTensor
from blockplane.data_plane.loading.kv_scales import KVScales
from blockplane.data_plane.models.transformer import Transformer
from blockplane.data_plane.models.weights import HOST, DecoderWeights, Parameter
from blockplane.data_plane.ranks.collectives import ALONE, Ranks
from blockplane.protos.errors import ConfigurationError, ModelError

_logger = logging.getLogger(__name__)
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_STORED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_PROGRESS_STEPS = 10


def load_model(
    checkpoint: Checkpoint,
    dtype: str,
    max_model_len: int | None = None,
    kv_cache_dtype: str | None = None,
    device: torch.device = HOST,
    ranks: Ranks = ALONE,
    quantize: str = "none",
) -> Transformer:
    """A decoder of a checkpoint's weights, or one rank's part of it.

    Args:
        checkpoint, dtype, device, ranks: as `load_weights` has them.
        max_model_len: tokens that a sequence may hold; None = all that the model was made for.
        kv_cache_dtype: "float8_e4m3fn", scaled as the checkpoint says, or by 1; None = `dtype`.
        quantize: as the setting has it.

    Raises:
        ModelError, ConfigurationError: as `load_weights` says.
    """
    weights = load_weights(checkpoint, dtype, device, scales_kv=kv_cache_dtype is not None, ranks=ranks)
    return Transformer(checkpoint.config, weights, max_model_len, kv_cache_dtype, ranks, quantize)


def load_weights(
    checkpoint: Checkpoint,
    dtype: str,
    device: torch.device = HOST,
    *,
    scales_kv: bool = False,
    ranks: Ranks = ALONE,
) -> DecoderWeights:
    """A checkpoint's tensors, which this uses up, in their places; progress and a final line go to the log.

    A rank reads its own part of each and no more, as far as the format allows.

    Args:
        dtype: "bfloat16" or "float32", of the weights and of the computation.
        device: where the weights go, tensor by tensor.
        scales_kv: warn of layers for whose KV the checkpoint has no scales; where KV is not scaled they mean nothing.
        ranks: among which the model is divided.

    Raises:
        ModelError: a tensor is missing, unexpected, misshapen or no scale; the message names it. Or the model cannot
            be divided among so many ranks.
        ConfigurationError: the dtype is neither.
    """
    if dtype not in _DTYPES:
        raise ConfigurationError(f"dtype is {dtype}; set it to one of {', '.join(_DTYPES)}.")
    started = time.perf_counter()
    weights = DecoderWeights(checkpoint.config, _DTYPES[dtype], device, ranks)
    awaited = {parameter.name: parameter for parameter in weights.parameters()}
    kv_scales = KVScales(weights.layers)
    progress = _Progress(checkpoint.name, sum(parameter.tensor.nbytes for parameter in awaited.values()))
    for name, tensor in checkpoint.tensors:
        if name in awaited:
            parameter = awaited.pop(name)
            _copy(tensor, parameter)
            progress.add(parameter.tensor.nbytes)
        elif not kv_scales.take(name, tensor) and not _is_redundant(name, checkpoint):
            raise ModelError(
                f"The checkpoint holds the tensor {name}, which its config does not account for; "
                "choose a model of the same architecture."
            )
    if awaited:
        others = f" and {len(awaited) - 1} more" if len(awaited) > 1 else ""
        raise ModelError(f"The checkpoint lacks the tensor {next(iter(awaited))}{others}; fetch its files again.")
    if scales_kv:
        _warn_of_missing_scales(checkpoint.name, len(weights.layers), kv_scales.num_layers)
    seconds = time.perf_counter() - started
    _logger.info("loaded %s: %d bytes as %s in %.1f s", checkpoint.name, progress.total, dtype, seconds)
    return weights


class _Progress:
    """Logs each tenth of the bytes once."""

    def __init__(self, name: str, total: int) -> None:
        self.total = total
        self._name, self._done, self._logged = name, 0, 0

    def add(self, num_bytes: int) -> None:
        self._done += num_bytes
        step = self._done * _PROGRESS_STEPS // self.total
        if step > self._logged:
            self._logged = step
            _logger.info("loading %s: %d %%", self._name, step * 100 // _PROGRESS_STEPS)


def _copy(stored: StoredTensor, parameter: Parameter) -> None:
    name, target = parameter.name, parameter.tensor
    if stored.shape != parameter.whole_shape:
        expected, found = (list(shape) for shape in (parameter.whole_shape, stored.shape))
        raise ModelError(f"Tensor {name} has the shape {found}, but the config makes it {expected}; fetch both again.")
    if not target.numel():
        return
    tensor = stored.read(parameter.index)
    if tensor.dtype not in _STORED_DTYPES:
        raise ModelError(f"Tensor {name} is stored as {tensor.dtype}; choose a checkpoint in bfloat16 or float32.")
    target.copy_(tensor)


def _warn_of_missing_scales(name: str, num_layers: int, num_scaled: int) -> None:
    if num_scaled < num_layers:
        _logger.warning(
            "%s has FP8 scales for the KV of %d of its %d layers; the others are scaled by 1, which rounds coarsely"
            " below 2^-6 and cuts off beyond 448",
            name,
            num_scaled,
            num_layers,
        )


def _is_redundant(name: str, checkpoint: Checkpoint) -> bool:
    """Tensors that some exports hold though the config implies them."""
    tied_output = name == "lm_head.weight" and checkpoint.config.tied_embeddings
    return tied_output or re.search(r"\.rotary_emb\.inv_freq$", name) is not None
