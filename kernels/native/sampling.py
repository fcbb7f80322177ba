"""Draws and log-probabilities by the C++ kernels, of float32 logits on a CPU.

Twins of `data_plane.drawing`, of `data_plane.likeliest` and of the softmax in `data_plane.logprobs`. Both ways weigh
tokens in float64 and go through them in one order, so that the same noise picks the same token, but for what rounding
decides: sums are grouped otherwise here, and an exponential may differ in its last bit. Of draws from a vocabulary of
262,144 that is one in some ten billion.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blockplane.kernels.native.library import BOOL, INT, POINTER, function, is_there

if is_there():
    _rows = (POINTER, INT, INT, INT)
    _find_finite_rows = function("find_finite_rows", *_rows, POINTER)
    _sample_rows = function("sample_rows", *_rows, *[POINTER] * 5, BOOL, POINTER)
    _tell_rows = function("tell_rows", *_rows, POINTER, INT, POINTER, POINTER)


def takes_logits(logits: Tensor) -> bool:
    """Whether the kernels are there for [num_rows, vocab_size]."""
    return is_there() and logits.device.type == "cpu" and logits.dtype == torch.float32 and logits.stride(1) == 1


def find_finite_rows(logits: Tensor) -> NDArray[np.bool_]:
    """bool [num_rows]: whether all of a row's logits are finite."""
    is_finite = np.empty(len(logits), np.bool_)
    _find_finite_rows(*_place(logits), is_finite.ctypes.data)
    return is_finite


def sample_rows(
    logits: Tensor,
    temperature: NDArray[np.float64],
    noise: NDArray[np.float64],
    top_k: NDArray[np.int64],
    top_p: NDArray[np.float64],
    min_p: NDArray[np.float64],
    *,
    may_ban: bool,
) -> NDArray[np.int32]:
    """One token per row by inverse transform, or the likeliest where the temperature is 0.

    Args:
        logits: float32 [num_rows, vocab_size]; not changed.
        temperature, noise, top_k, top_p, min_p: [num_rows], contiguous; noise in [0, 1), of no account where greedy;
            top_k 0 .. vocab_size, 0 = all.
        may_ban: whether logits of -inf stand for what may not come.

    Returns:
        int32 [num_rows]; -1 where a logit is not finite, or, with `may_ban`, where none is above -inf.
    """
    token_ids = np.empty(len(logits), np.int32)
    columns = (column.ctypes.data for column in (temperature, noise, top_k, top_p, min_p))
    _sample_rows(*_place(logits), *columns, may_ban, token_ids.ctypes.data)
    return token_ids


def tell_rows(
    logits: Tensor, token_ids: NDArray[np.integer], num_likeliest: NDArray[np.int32]
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Log-probabilities of one token in each row and of the likeliest, in order.

    Args:
        logits: float32 [num_rows, vocab_size].
        token_ids: [num_rows], ids of the vocabulary.
        num_likeliest: int32 [num_rows], 0 .. vocab_size.

    Returns:
        int32 ids and float32 natural logarithms, both [num_rows, 1 + the largest num_likeliest], of which each row has
        its first 1 + num_likeliest; NaN where a logit is not finite.
    """
    width = 1 + int(num_likeliest.max())
    told_ids, logprobs = np.zeros((len(logits), width), np.int32), np.empty((len(logits), width), np.float32)
    told_ids[:, 0] = token_ids
    asked = np.ascontiguousarray(num_likeliest)
    _tell_rows(*_place(logits), asked.ctypes.data, width, told_ids.ctypes.data, logprobs.ctypes.data)
    return told_ids, logprobs


def _place(logits: Tensor) -> tuple[int, int, int, int]:
    """Where logits lie, as the kernels want it: address, rows, columns, and how many numbers rows are apart."""
    return logits.data_ptr(), *logits.shape, logits.stride(0)
