"""Ranks over threads of one process, for tests of what ranks compute together; knows neither models nor plans."""

from collections.abc import Callable
from threading import Barrier, BrokenBarrierError, Lock, Thread
from typing import Generic, TypeVar

import torch
from torch import Tensor

from blockplane.kernels.slots import ContextParallel

Result = TypeVar("Result")
TIMEOUT = 600.0
"""Seconds that a rank waits for its peers in one call."""


class RanksInThreads:
    """One thread's view of its group; see `Ranks`. It checks that all ranks make the same calls with the same shapes.

    Attributes:
        num_calls: how many calls this rank has made.
    """

    def __init__(self, meeting: "_Meeting", rank: int, context_parallel_size: int) -> None:
        self.rank, self.world_size = rank, meeting.world_size
        self.context_parallel = ContextParallel(context_parallel_size, rank % context_parallel_size)
        self.num_calls = 0
        self._meeting = meeting

    def all_reduce(self, x: Tensor) -> Tensor:
        return torch.stack(self._exchange("all_reduce", x)).sum(0)

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.stack(self._exchange("all_gather", x))

    def gather_context(self, x: Tensor) -> Tensor:
        first = self.rank - self.context_parallel.rank
        return torch.stack(self._exchange("gather_context", x)[first : first + self.context_parallel.world_size])

    def broadcast(self, x: Tensor) -> Tensor:
        return self._exchange("broadcast", x)[0].clone()

    def _exchange(self, name: str, x: Tensor) -> list[Tensor]:
        self.num_calls += 1
        return self._meeting.exchange(self.rank, f"{name} of {x.dtype} {list(x.shape)}", x)


class _Meeting:
    """Where the threads of a group wait for each other.

    One of them computes at a time: threads that contend for the interpreter at every small operation are slower by far.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.turn = Lock()
        self._barrier = Barrier(world_size, timeout=TIMEOUT)
        self._given: list[tuple[str, Tensor]] = [("", torch.empty(0))] * world_size

    def exchange(self, rank: int, call: str, x: Tensor) -> list[Tensor]:
        """Every rank's tensor, as it was when it came."""
        self._given[rank] = call, x.clone()
        self.turn.release()
        try:
            self._barrier.wait()
            given = list(self._given)
            # So that no rank gives its next before all have taken these.
            self._barrier.wait()
        finally:
            self.turn.acquire()
        calls = [call for call, _ in given]
        if len(set(calls)) > 1:
            raise AssertionError(f"the ranks made different calls: {calls}")
        return [tensor for _, tensor in given]

    def leave(self, rank: int) -> None:
        """A rank is through: so must all others be."""
        self.exchange(rank, "the end", torch.empty(0))

    def end(self) -> None:
        """Let no rank wait any more."""
        self._barrier.abort()


class _Run(Generic[Result]):
    """What one rank's thread runs, and what came of it."""

    def __init__(self, function: Callable[[RanksInThreads], Result], ranks: RanksInThreads, meeting: _Meeting) -> None:
        self._function, self._ranks, self._meeting = function, ranks, meeting
        self.results: list[Result] = []
        self.error: BaseException | None = None

    def __call__(self) -> None:
        with self._meeting.turn:
            try:
                result = self._function(self._ranks)
                self._meeting.leave(self._ranks.rank)
                self.results.append(result)
            except BaseException as error:
                self.error = error
                self._meeting.end()


class RanksAtOnce:
    """A group whose ranks are called all at once, in a thread each, as often as there is something to do.

    Attributes:
        ranks: every rank's view, the same in all calls.
    """

    def __init__(self, world_size: int, context_parallel_size: int = 1) -> None:
        self._meeting = _Meeting(world_size)
        self.ranks = [RanksInThreads(self._meeting, rank, context_parallel_size) for rank in range(world_size)]

    def run(self, function: Callable[[RanksInThreads], Result]) -> list[Result]:
        """Call the function with each rank's view.

        Returns:
            What it returned, in the order of ranks.

        Raises:
            What it raised in a rank: then the others, which wait in vain, are ended, and the group is of no more use.
        """
        runs = [_Run(function, ranks, self._meeting) for ranks in self.ranks]
        threads = [Thread(target=run, name=f"rank {rank}", daemon=True) for rank, run in enumerate(runs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        errors = [run.error for run in runs if run.error is not None]
        # A broken barrier is what another rank's error left behind.
        for error in sorted(errors, key=lambda error: isinstance(error, BrokenBarrierError)):
            raise error
        return [run.results[0] for run in runs]


def run_ranks(
    world_size: int, function: Callable[[RanksInThreads], Result], context_parallel_size: int = 1
) -> list[Result]:
    """Call the function once in every rank of a new group; see `RanksAtOnce.run`."""
    return RanksAtOnce(world_size, context_parallel_size).run(function)
