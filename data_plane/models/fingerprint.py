"""Which model this is, by a sample of its tensors: equal where two processes loaded the same. Knows no files."""

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

from blockplane.data_plane.models.interface import Model

NUM_BYTES = 16
SAMPLE_BYTES = 4096
"""Of each tensor, spread over all of it: larger tensors take no longer."""


def fingerprint(parameters: str, named_tensors: Iterable[tuple[str, Tensor]]) -> bytes:
    """NUM_BYTES of BLAKE2b over names, shapes, dtypes and samples of the tensors.

    Args:
        parameters: what else the model's arithmetic depends on.
    """
    digest = hashlib.blake2b(parameters.encode(), digest_size=NUM_BYTES)
    for name, tensor in named_tensors:
        digest.update(f"\n{name} {list(tensor.shape)} {tensor.dtype} ".encode())
        digest.update(_sample(tensor))
    return digest.digest()


def joined(fingerprints: Iterable[bytes]) -> bytes:
    """That of several models that work together, in this order."""
    return hashlib.blake2b(b"".join(fingerprints), digest_size=NUM_BYTES).digest()


def _sample(tensor: Tensor) -> bytes:
    if tensor.is_meta:
        # Where models are only compiled their weights have shapes and no numbers.
        return b""
    elements = tensor.detach().flatten()
    stride = -(-elements.nbytes // SAMPLE_BYTES) or 1
    return elements[::stride].cpu().clone(memory_format=torch.contiguous_format).view(torch.uint8).numpy().tobytes()


def model_fingerprint(model: Model, draft_model: Model | None) -> bytes:
    """Of all that a worker's answers depend on."""
    return joined([model.fingerprint] if draft_model is None else [model.fingerprint, draft_model.fingerprint])
