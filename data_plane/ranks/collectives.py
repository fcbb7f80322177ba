"""What the ranks of a worker group ask of each other; knows neither models nor plans nor how they are joined."""

from typing import Protocol

from torch import Tensor

from blockplane.kernels.slots import ALONE as WHOLE_CONTEXT
from blockplane.kernels.slots import ContextParallel


class Ranks(Protocol):
    """One rank's view of its group. Every rank must make the same calls in the same order, with the same shapes.

    Attributes:
        rank: from 0 on. world_size: ranks of the group, among which heads, MLP and vocabulary are divided.
        context_parallel: which positions of its heads' KV this rank keeps. Neighbouring ranks that keep the same heads
            share the positions among them: `context_parallel.world_size` of them, rank // that size their number.
    """

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def context_parallel(self) -> ContextParallel: ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' `x`, in every rank; `x` itself may be overwritten."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """[...] -> [world_size, ...], every rank's `x` in the order of ranks."""
        ...

    def gather_context(self, x: Tensor) -> Tensor:
        """[...] -> [context_parallel.world_size, ...]: the same among the ranks that share this rank's heads."""
        ...

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's `x`, in every rank; that of the others gives shape and dtype, and may be overwritten."""
        ...


class Alone:
    """A group of one."""

    rank, world_size = 0, 1
    context_parallel = WHOLE_CONTEXT

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x[None]

    def gather_context(self, x: Tensor) -> Tensor:
        return x[None]

    def broadcast(self, x: Tensor) -> Tensor:
        return x


ALONE: Ranks = Alone()
