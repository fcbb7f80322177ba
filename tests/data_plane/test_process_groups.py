"""The collectives of a device, played by gloo in two processes, eagerly and in a compiled graph."""

import subprocess
import sys

import pytest

RANK = """
import sys
import torch
from torch.distributed import TCPStore
from blockplane.data_plane.ranks.process_groups import DeviceGroup

rank, port = int(sys.argv[1]), int(sys.argv[2])
store = TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
if rank == 0:
    print(store.port, flush=True)
group = DeviceGroup("gloo", store, rank, 2, 2)

def compute(x):
    y = group.all_reduce(x + 1)
    return y, group.all_gather(y * rank), group.gather_context(x)

for function in (compute, torch.compile(compute, backend="eager", fullgraph=True)):
    total, gathered, heads = function(torch.full((2, 3), 10.0 * (rank + 1)).T)
    assert total.tolist() == [[32.0] * 2] * 3
    assert gathered.tolist() == [[[0.0] * 2] * 3, [[32.0] * 2] * 3]
    assert heads.tolist() == [[[10.0] * 2] * 3, [[20.0] * 2] * 3]
assert group.broadcast(torch.tensor([7 + rank])).tolist() == [7]
group.leave()
"""


@pytest.mark.slow
def test_a_device_s_ranks_compute_together_in_compiled_graphs_too() -> None:
    command = [sys.executable, "-c", RANK]
    with subprocess.Popen([*command, "0", "0"], stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        port = first.stdout.readline().strip()
        second = subprocess.run([*command, "1", port], check=False, timeout=180)
        assert [first.wait(60), second.returncode] == [0, 0]
