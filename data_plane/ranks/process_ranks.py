"""The ranks of this worker's group in other processes: meets them, again and again, and calls them. Knows no plans."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from blockplane.data_plane.ranks.process_groups import DEVICE_BACKENDS, DeviceGroup, HostGroup
from blockplane.data_plane.ranks.store import OwnStore, other_store
from blockplane.kernels.slots import ALONE, ContextParallel
from blockplane.protos.errors import ConfigurationError, UnavailableError
from blockplane.v1 import engine_pb2 as pb

CONNECT_SECONDS = 10.0
"""How long ranks that have all been told where to meet may take to be there."""


class Wait(NamedTuple):
    """A call of the other ranks that has not returned: what it is, and since when, on the monotonic clock."""

    what: str
    since: float


class ProcessRanks:
    """See `Ranks`. One for the life of a process, whose models keep it from one meeting to the next.

    Attributes:
        group: its name.
        waits: for the other ranks, now; None = it does not. Any thread may look.
    """

    def __init__(self, group: str, rank: int, host: str, device: torch.device) -> None:
        """
        Args:
            host: by which the other ranks reach this one.
            device: where the tensors lie that are not on the host.

        Raises:
            ConfigurationError: rank 0 cannot listen on `host`, or nobody knows the device's collectives.
        """
        if device.type != "cpu" and device.type not in DEVICE_BACKENDS:
            raise ConfigurationError(f"the device {device.type} has no collectives here; choose device cpu.")
        self.rank, self.world_size, self.context_parallel = rank, 1, ALONE
        self.waits: Wait | None = None
        self.group, self._host, self._device = group, host, device
        self._own_store = OwnStore(host) if rank == 0 else None
        self._has_met = False
        self._host_group: HostGroup | None = None
        self._context_group: HostGroup | None = None
        self._device_group: DeviceGroup | None = None

    @property
    def address(self) -> str:
        """host:port where the others find rank 0's store; of the others, empty."""
        return "" if self._own_store is None else self._own_store.address

    def meet(self, told: pb.Rendezvous) -> None:
        """Come together with all ranks of the group, who are told the same.

        Raises:
            ConfigurationError: they divide the model otherwise than at their first meeting, or cannot reach rank 0.
            UnavailableError: some did not come.
        """
        self._take_sizes(told.tensor_parallel_size, told.context_parallel_size)
        with self._waiting("meeting them"):
            if self._own_store is not None:
                store = self._own_store.store
            else:
                store = other_store(told.address, self._host, CONNECT_SECONDS)
            store = PrefixStore(f"{told.meeting:016x}", store)
            self._host_group = self._gloo("all", store, self.rank, self.world_size)
            share = self.context_parallel
            if share.world_size > 1:
                name = f"context {self.rank // share.world_size}"
                self._context_group = self._gloo(name, store, share.rank, share.world_size)
            if self._device.type != "cpu":
                backend = DEVICE_BACKENDS[self._device.type]
                sizes = self.rank, self.world_size, share.world_size
                self._device_group = DeviceGroup(backend, PrefixStore("device", store), *sizes)
        self._has_met = True

    def _take_sizes(self, world_size: int, context_parallel_size: int) -> None:
        if not 0 <= self.rank < world_size or not context_parallel_size or world_size % context_parallel_size:
            raise ConfigurationError(
                f"rank {self.rank} of {self.group} cannot be one of {world_size} ranks, {context_parallel_size} of"
                " which share positions; set rank, and the engine's tensor_parallel_size, to what belongs together."
            )
        before = self.world_size, self.context_parallel.world_size
        if self._has_met and before != (world_size, context_parallel_size):
            raise ConfigurationError(
                f"the engine divides the model among {world_size} ranks, {context_parallel_size} of which share"
                f" positions, and rank {self.rank} of {self.group} has loaded its part of {before[0]} and {before[1]};"
                " restart this worker."
            )
        self.world_size = world_size
        self.context_parallel = ContextParallel(context_parallel_size, self.rank % context_parallel_size)

    def _gloo(self, name: str, store: PrefixStore, rank: int, world_size: int) -> HostGroup:
        return HostGroup(PrefixStore(name, store), rank, world_size, self._host, CONNECT_SECONDS)

    def leave(self) -> None:
        """Let go of the others, for whom this is as if the process had died; they and this one may meet again."""
        for group in (self._device_group, self._context_group, self._host_group):
            if group is not None:
                group.leave()
        self._host_group = self._context_group = self._device_group = None

    def all_reduce(self, x: Tensor) -> Tensor:
        if x.device.type != "cpu":
            return self._on_device().all_reduce(x)
        with self._waiting("an all_reduce"):
            return self._on_host().all_reduce(x)

    def all_gather(self, x: Tensor) -> Tensor:
        if x.device.type != "cpu":
            return self._on_device().all_gather(x)
        with self._waiting("an all_gather"):
            return self._on_host().all_gather(x)

    def gather_context(self, x: Tensor) -> Tensor:
        if self.context_parallel.world_size == 1:
            return x[None]
        if x.device.type != "cpu":
            return self._on_device().gather_context(x)
        with self._waiting("a gather of heads"):
            return self._connected(self._context_group).all_gather(x)

    def broadcast(self, x: Tensor) -> Tensor:
        if x.device.type != "cpu":
            return self._on_device().broadcast(x)
        with self._waiting("a broadcast"):
            return self._on_host().broadcast(x)

    def _on_host(self) -> HostGroup:
        return self._connected(self._host_group)

    def _on_device(self) -> DeviceGroup:
        assert self._device_group is not None, "they have met"
        return self._device_group

    def _connected(self, group: HostGroup | None) -> HostGroup:
        assert group is not None, "they have met"
        return group

    @contextmanager
    def _waiting(self, what: str) -> Iterator[None]:
        """Raises UnavailableError where the others are gone or do not answer."""
        self.waits = Wait(what, time.monotonic())
        try:
            yield
        except RuntimeError as error:
            raise UnavailableError(
                f"rank {self.rank} of {self.group} has lost the other ranks in {what}: {_sentence(error)}."
            ) from error
        finally:
            self.waits = None


def _sentence(error: RuntimeError) -> str:
    """What happened, without the place in torch's sources and without its advice."""
    first, *_ = str(error).splitlines() or [repr(error)]
    return first.partition("] ")[2].partition(". ")[0] if first.startswith("[") else first.rstrip(".")
