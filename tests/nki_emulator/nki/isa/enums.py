"""The enumerations of `nki.isa`, with the names and values of NKI 0.6.0; knows no rule about them."""

from __future__ import annotations

from enum import Enum
from functools import total_ordering


class engine(Enum):  # noqa: N801
    unknown = 0
    tensor = 1
    scalar = 2
    gpsimd = 3
    dma = 4
    vector = 5
    sync = 6


class reduce_cmd(Enum):  # noqa: N801
    """What an instruction does to its engine's accumulator registers."""

    idle = 0
    reset = 1
    reduce = 2
    reset_reduce = 3
    load_reduce = 4


class dge_mode(Enum):  # noqa: N801
    """Who generates a DMA's descriptors: unknown leaves it to the compiler."""

    unknown = 0
    swdge = 1
    hwdge = 2
    none = 3


class oob_mode(Enum):  # noqa: N801
    """What a DMA does with an index that lies outside the tensor."""

    error = 0
    skip = 1


class matmul_perf_mode(Enum):  # noqa: N801
    none = "none"
    double_row = "double_row"


@total_ordering
class nc_version(Enum):  # noqa: N801
    """The NeuronCore's generation: Trn1, Trn2, Trn3. Ordered, as AWS's kernels compare versions."""

    gen2 = 2
    gen3 = 3
    gen4 = 4

    def __lt__(self, other: nc_version) -> bool:
        return self.value < other.value


class dma_engine(Enum):  # noqa: N801
    """Which DMA a `sendrecv` uses."""

    dma = 1
    gpsimd_dma = 2
