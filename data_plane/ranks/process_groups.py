"""Process groups of torch.distributed, of tensors on the host and on a device; knows neither models nor who meets.

None of them ends by itself, however long nobody asks anything of it.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import BroadcastOptions, ProcessGroupGloo, Store  # type: ignore[attr-defined]

DEVICE_BACKENDS = {"cuda": "nccl", "neuron": "neuron"}
"""By a device's type, what torch.distributed calls its collectives; Neuron's were never run."""
_EVER = timedelta(days=3650)


class HostGroup:
    """Gloo between given addresses; called without what torch.distributed puts before it, for the messages are small.

    The same calls come from the same place in all ranks. What a lost rank leaves behind is a RuntimeError.
    """

    def __init__(self, store: Store, rank: int, world_size: int, host: str, connect_seconds: float) -> None:
        """Meet the other ranks at the store. Raises RuntimeError: some of them did not come within so long."""
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=connect_seconds)
        options._devices = [ProcessGroupGloo.create_device(hostname=host)]
        options._threads = 1
        self._world_size = world_size
        self._group = ProcessGroupGloo(store, rank, world_size, options)
        self._group._set_default_timeout(_EVER)

    def leave(self) -> None:
        """Close the connections, whoever still holds this object: the frames of an error may."""
        del self._group

    def all_reduce(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        self._group.allreduce([x]).wait()  # type: ignore[attr-defined]
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        gathered = x.new_empty(self._world_size, *x.shape)
        self._group._allgather_base(gathered.view(-1), x.contiguous().view(-1)).wait()  # type: ignore[attr-defined]
        return gathered

    def broadcast(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        self._group.broadcast([x], BroadcastOptions()).wait()  # type: ignore[attr-defined]
        return x


class DeviceGroup:
    """The collectives of a device, as torch's compiler knows them: its graphs hold all but the broadcast.

    One at a time exists.
    """

    def __init__(self, backend: str, store: Store, rank: int, world_size: int, context_parallel_size: int) -> None:
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=_EVER)
        self._world_size, self._context_parallel_size = world_size, context_parallel_size
        starts = range(0, world_size, context_parallel_size)
        # Every rank must make every group.
        groups = [dist.new_group([*range(start, start + context_parallel_size)], timeout=_EVER) for start in starts]
        self._context_group = groups[rank // context_parallel_size]

    def leave(self) -> None:
        dist.destroy_process_group()

    def all_reduce(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        dist.all_reduce(x)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return _gathered(x, self._world_size, dist.group.WORLD)

    def gather_context(self, x: Tensor) -> Tensor:
        return _gathered(x, self._context_parallel_size, self._context_group)

    def broadcast(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        dist.broadcast(x, src=0)
        return x


def _gathered(x: Tensor, world_size: int, group: dist.ProcessGroup | None) -> Tensor:
    gathered = torch.empty(world_size * x.numel(), dtype=x.dtype, device=x.device)
    dist.all_gather_into_tensor(gathered, x.contiguous().view(-1), group=group)
    return gathered.view(world_size, *x.shape)
