"""A block KV cache whose every slot that no sequence owns is poison, and the right answers in float64 beside it."""

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from blockplane.kernels import reference
from blockplane.kernels.slots import SKIP_BLOCK_ID, slots_of

HEAD_DIM = 8
SCALE = 0.3


@dataclass(frozen=True)
class Shape:
    block_size: int
    num_kv_heads: int
    group: int
    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.group

    def reaches(self, position: int, key_position: int) -> bool:
        if self.attention_chunk_size is not None:
            return position // self.attention_chunk_size == key_position // self.attention_chunk_size
        return self.sliding_window is None or key_position > position - self.sliding_window

    def first_reached(self, position: int) -> int:
        return next(seen for seen in range(position + 1) if self.reaches(position, seen))


LIMITS = st.sampled_from(
    [
        *({"sliding_window": size} for size in (None, 1, 3, 8, 17, 100)),
        *({"attention_chunk_size": size} for size in (1, 3, 8, 16, 100)),
        {"sliding_window": 3, "attention_chunk_size": 8},
    ]
)
SHAPES = st.builds(
    lambda limits, **fields: Shape(**fields, **limits),
    limits=LIMITS,
    block_size=st.sampled_from([1, 2, 4, 16]),
    num_kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    soft_cap=st.sampled_from([None, 0.5, 20.0]),
    has_sinks=st.booleans(),
)


class Cache:
    """The KV of several sequences in scattered blocks; every slot that no sequence owns holds `poison`.

    `keys` and `values` are of the queries' dtype, in numbers that the caches' has too: `kv_dtype`, None = the same.
    """

    def __init__(
        self,
        kernels: ModuleType,
        shape: Shape,
        seq_lens: list[int],
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        poison: float = float("nan"),
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.shape, self.dtype, self.kv_dtype = shape, dtype, kv_dtype or dtype
        self.poison = reference.to_cache_dtype(torch.tensor(poison), self.kv_dtype)
        widths = [-(-seq_len // shape.block_size) for seq_len in seq_lens]
        total_blocks = 1 + 2 * sum(widths)
        free = iter((1 + torch.randperm(total_blocks - 1, generator=generator)).tolist())
        self.block_table = torch.full((len(seq_lens), max(widths) + 2), SKIP_BLOCK_ID, dtype=torch.int32)
        for row, width in enumerate(widths):
            self.block_table[row, :width] = torch.tensor([next(free) for _ in range(width)])
        self.keys, self.values, self.queries = (
            [torch.randn(seq_len, heads, HEAD_DIM, generator=generator).to(dtype) for seq_len in seq_lens]
            for heads in (shape.num_kv_heads, shape.num_kv_heads, shape.num_heads)
        )
        for kv in (self.keys, self.values):
            kv[:] = [numbers.to(self.kv_dtype).to(dtype) for numbers in kv]
        self.sinks = torch.randn(shape.num_heads, generator=generator).to(dtype) if shape.has_sinks else None
        caches = (total_blocks, shape.block_size, shape.num_kv_heads, HEAD_DIM)
        self.k_cache, self.v_cache = (self.poison.expand(caches).clone() for _ in range(2))
        self.owned = torch.zeros(total_blocks * shape.block_size, dtype=torch.bool)
        for row, seq_len in enumerate(seq_lens):
            slots = self.slots(row, torch.arange(seq_len))
            self.owned[slots] = True
            kernels.write_kv(self.keys[row], self.values[row], self.k_cache, self.v_cache, slots)

    def slots(self, row: int, positions: Tensor) -> Tensor:
        return slots_of(self.block_table, torch.full_like(positions, row), positions, self.shape.block_size)

    def settings(self) -> dict[str, Any]:
        shape = self.shape
        return {
            "scale": SCALE,
            "sliding_window": shape.sliding_window,
            "attention_chunk_size": shape.attention_chunk_size,
            "soft_cap": shape.soft_cap,
            "sinks": self.sinks,
        }

    def dense(self, row: int, first: int, mask_active: Tensor | None = None, least: int = 0) -> Tensor:
        """The right answer in float64 for the queries of a row from position `first` on, one query at a time.

        `mask_active`: [num_heads, n, n] among these queries' tokens, None = causal. No key before `least` is seen.
        """
        positions, num_heads = range(first, len(self.queries[row])), self.shape.num_heads
        outputs = torch.zeros(len(positions), num_heads, HEAD_DIM, dtype=torch.float64)
        for index, position in enumerate(positions):
            for head in range(num_heads):
                seen = [
                    key
                    for key in range(least, len(self.keys[row]))
                    if self.shape.reaches(position, key)
                    and (
                        key <= position
                        if mask_active is None
                        else key < first or bool(mask_active[head, index, key - first])
                    )
                ]
                outputs[index, head] = self._dense_of_one(row, position, head, seen)
        return outputs

    def _dense_of_one(self, row: int, position: int, head: int, seen: list[int]) -> Tensor:
        keys, values = (kv[row][seen, head // self.shape.group].double() for kv in (self.keys, self.values))
        scores = keys @ self.queries[row][position, head].double() * SCALE
        if self.shape.soft_cap is not None:
            scores = self.shape.soft_cap * torch.tanh(scores / self.shape.soft_cap)
        weights = scores.exp()
        sink = 0.0 if self.sinks is None else self.sinks[head].double().exp()
        return weights @ values / (weights.sum() + sink) if seen else torch.zeros(HEAD_DIM, dtype=torch.float64)

    def decode(self, kernels: ModuleType, num_new_tokens: int, num_padding_rows: int = 0, **settings: Any) -> Tensor:
        """The last tokens of every row, then padding rows whose queries are NaN."""
        query = torch.stack([queries[-num_new_tokens:] for queries in self.queries])
        padding = query[:1].expand(num_padding_rows, -1, -1, -1) * float("nan")
        table = self.block_table[:1].expand(num_padding_rows, -1) * 0 + SKIP_BLOCK_ID
        return kernels.decode_attention(
            torch.cat((query, padding)),
            self.k_cache,
            self.v_cache,
            torch.cat((self.block_table, table)),
            torch.tensor([len(queries) for queries in self.queries] + [0] * num_padding_rows, dtype=torch.int32),
            **self.settings() | settings,
        )

    def prefill(self, kernels: ModuleType, priors: list[int], kv_segment_size: int, num_padding: int = 0) -> Tensor:
        """Every row's tokens behind its prior ones, packed, then padding tokens whose queries are NaN."""
        packed = [queries[prior:] for queries, prior in zip(self.queries, priors, strict=True)]
        padding = torch.full((num_padding, self.shape.num_heads, HEAD_DIM), float("nan"), dtype=self.dtype)
        return kernels.segmented_attention(
            torch.cat((*packed, padding)),
            self.k_cache,
            self.v_cache,
            self.block_table,
            torch.tensor([0, *map(len, packed)]).cumsum(0).to(torch.int32),
            torch.tensor(priors, dtype=torch.int32),
            kv_segment_size=kv_segment_size,
            **self.settings(),
        )

    def assert_only_owned_slots_were_written(self) -> None:
        """Bit for bit: NaN is not equal to itself."""
        bits = {4: torch.int32, 2: torch.int16, 1: torch.int8}[self.kv_dtype.itemsize]
        for cache in (self.k_cache, self.v_cache):
            is_poison = (cache.view(bits) == self.poison.view(bits)).flatten(0, 1)
            assert is_poison[~self.owned].all()
            assert not is_poison[self.owned].any()


def assert_close(output: Tensor, expected: Tensor) -> None:
    """Equal within the rounding of the output's dtype; all is reckoned in float32."""
    tolerance = 1e-5 if output.dtype == torch.float32 else 2**-8
    torch.testing.assert_close(output.double(), expected, rtol=tolerance, atol=tolerance)
