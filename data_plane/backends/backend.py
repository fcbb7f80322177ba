"""What a device brings to the worker: kernels, memory, and what binds a computation to its shapes. Knows no device."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blockplane.protos.buckets import BucketRules

Compute = Callable[..., Any]
"""What a graph computes, of tensors and of tuples of attention batches."""


@dataclass(frozen=True, slots=True)
class PartialKernels:
    """A device's twins of `kernels.context_parallel`, whose names and signatures they have."""

    decode_attention: Callable[..., tuple[Tensor, Tensor]]
    segmented_attention: Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Kernels:
    """A device's twins of `kernels.reference`, whose names and signatures they have.

    `write_kv` gives the caches to read from then on. Where it writes in place they are the very tensors; a compiler
    must see that what attends comes after it.

    `partial` attends to the positions that one of several ranks keeps; None = the device has no such kernels.
    """

    write_kv: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    decode_attention: Callable[..., Tensor]
    segmented_attention: Callable[..., Tensor]
    partial: PartialKernels | None = None


def token_major(num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
    """The shape of a K or V cache whose blocks hold token after token, as those that move between workers do."""
    return num_blocks, block_size, num_kv_heads, head_dim


def run_as_it_is(compute: Compute, _inputs: tuple[Any, ...]) -> Compute:
    return compute


def unmeasured() -> None:
    return None


@dataclass(frozen=True, slots=True)
class Backend:
    """A device.

    Attributes:
        name: as the setting `device` has it.
        device: where the model's weights and KV lie. Inputs come from the host.
        bucket_rules: what it asks of the bucket lists.
        is_compiled: whether a computation is bound to the shapes of its inputs: then each is built, and every input has
            one shape for a bucket. Contexts may be data all the same: tables then have room for max_model_len.
        fuses_sampling: whether a graph goes on to logits and draws greedy rows and those with a temperature alone.
        kv_cache_shape: of a K or V cache, from (num_blocks, block_size, num_kv_heads, head_dim).
        available_memory: bytes for KV, once the weights are there; None = it does not tell.
        build: takes a computation and inputs of padding alone; gives the computation, bound to their shapes, which it
            has run in once.
        finish_builds: what is left to do once all is built, where a machine only builds; None = nothing.
    """

    name: str
    device: torch.device
    kernels: Kernels
    bucket_rules: BucketRules
    is_compiled: bool = False
    fuses_sampling: bool = False
    kv_cache_shape: Callable[[int, int, int, int], tuple[int, ...]] = token_major
    available_memory: Callable[[], int | None] = unmeasured
    build: Callable[[Compute, tuple[Any, ...]], Compute] = run_as_it_is
    finish_builds: Callable[[], None] | None = None
