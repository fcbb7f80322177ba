"""The GGUF container: metadata and dequantized tensors by name; knows neither models nor tokenizers.

The `gguf` package's own reader takes 25 s for a vocabulary of 262144 tokens, for it keeps views of every string; this
one takes a fraction of a second. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from blockplane.protos.errors import ModelError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_DEFAULT_ALIGNMENT = 32
# Elements dequantized at once: what fits into a core's cache.
_PIECE = 2**18


@dataclass(frozen=True, slots=True)
class _TensorInfo:
    shape: tuple[int, ...]
    kind: int
    offset: int


class GgufFile:
    """An open GGUF file. `metadata` maps keys to Python values; arrays of numbers and strings are lists."""

    def __init__(self, path: Path) -> None:
        """Read the metadata.

        Raises:
            ModelError: the file is not a little-endian GGUF file of version 2 or 3, or is cut short.
        """
        self.path = path
        with path.open("rb") as file:
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            self._read_header()
        except (struct.error, UnicodeDecodeError, IndexError) as error:
            raise ModelError(f"{path} is cut short or damaged; fetch it again.") from error

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    @property
    def tensor_names(self) -> tuple[str, ...]:
        return tuple(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape, outermost dimension first."""
        return self._tensors[name].shape

    def tensor(self, name: str, rows: range | None = None) -> npt.NDArray[np.float32]:
        """Read and dequantize one tensor, or some of its rows, along its outermost dimension; None = all.

        Raises:
            ModelError: its quantization is unknown, or the file ends before it.
        """
        info = self._tensors[name]
        try:
            kind = gguf.GGMLQuantizationType(info.kind)
        except ValueError:
            raise ModelError(f"Tensor {name} has the unknown GGML type {info.kind}; choose another file.") from None
        block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        num_bytes = int(np.prod(info.shape)) // block_size * block_bytes
        if info.offset + num_bytes > len(self._data):
            raise ModelError(f"{self.path} ends before tensor {name} does; fetch it again.")
        rows = rows if rows is not None else range(info.shape[0])
        # Quantized blocks lie along the innermost dimension, so that a row is a whole number of them.
        num_elements = len(rows) * int(np.prod(info.shape[1:]))
        row_bytes = num_bytes // info.shape[0]
        stored = np.frombuffer(self._data, np.uint8, len(rows) * row_bytes, info.offset + rows.start * row_bytes)
        values = np.empty(num_elements, np.float32)
        for start in range(0, num_elements, _PIECE):
            stop = min(start + _PIECE, num_elements)
            piece = stored[start // block_size * block_bytes : stop // block_size * block_bytes]
            values[start:stop] = _dequantize(name, piece, kind)
        return values.reshape(len(rows), *info.shape[1:])

    def _read_header(self) -> None:
        self._position = 4
        if self._data[:4] != b"GGUF" or (version := self._scalar("I")) not in (2, 3):
            known = "is not a GGUF file" if self._data[:4] != b"GGUF" else f"has the GGUF version {version}"
            raise ModelError(f"{self.path} {known}; Blockplane reads little-endian GGUF of version 2 or 3.")
        num_tensors, num_keys = self._scalar("Q"), self._scalar("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string()
            self.metadata[key] = self._value(self._scalar("I"))
        infos = {self._string(): self._tensor_info() for _ in range(num_tensors)}
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        start = -(-self._position // alignment) * alignment
        self._tensors = {n: _TensorInfo(info.shape, info.kind, start + info.offset) for n, info in infos.items()}

    def _tensor_info(self) -> _TensorInfo:
        dimensions = [self._scalar("Q") for _ in range(self._scalar("I"))]
        return _TensorInfo(shape=tuple(reversed(dimensions)), kind=self._scalar("I"), offset=self._scalar("Q"))

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        return self._scalar(_SCALARS[kind])

    def _array(self) -> list[Any]:
        kind, length = self._scalar("I"), self._scalar("Q")
        if kind in _SCALARS:
            values = struct.unpack_from(f"<{length}{_SCALARS[kind]}", self._data, self._position)
            self._position += struct.calcsize(f"<{length}{_SCALARS[kind]}")
            return list(values)
        return [self._value(kind) for _ in range(length)]

    def _string(self) -> str:
        length = self._scalar("Q")
        start, self._position = self._position, self._position + length
        return self._data[start : self._position].decode()

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self._data, self._position)
        self._position += struct.calcsize(f"<{code}")
        return value


def _dequantize(name: str, stored: npt.NDArray[np.uint8], kind: gguf.GGMLQuantizationType) -> npt.NDArray[np.float32]:
    try:
        # As one row: the package works through 16 rows at a time, which costs more than the arithmetic.
        values: npt.NDArray[np.float32] = gguf.dequantize(stored[None], kind)[0]
    except NotImplementedError:
        raise ModelError(f"Tensor {name} has the type {kind.name}, which cannot be dequantized.") from None
    return values
