"""The instructions of `nki.isa` (NKI 0.6.0) that Blockplane's kernels may use, each with the rules that are public.

Every instruction checks, adds itself to the trace of the running core, computes in float32 (or exact integers, or
bits) and rounds once, at its write. A broken rule is `nki_machine.errors.RuleError`; what the documentation allows
and this emulator does not compute is NotImplementedError.
"""

from nki.isa.activation import activation, activation_reduce, exponential
from nki.isa.dma import dma_copy
from nki.isa.dma_transpose import dma_transpose
from nki.isa.elementwise import (
    memset,
    reciprocal,
    scalar_tensor_tensor,
    tensor_copy,
    tensor_scalar,
    tensor_tensor,
)
from nki.isa.enums import dge_mode, dma_engine, engine, matmul_perf_mode, nc_version, oob_mode, reduce_cmd
from nki.isa.exchange import core_barrier, sendrecv
from nki.isa.matmul import nc_matmul, nc_transpose
from nki.isa.patterns import affine_select, iota
from nki.isa.reduction import tensor_partition_reduce, tensor_reduce, tensor_scalar_reduce
from nki.isa.registers import register_alloc, register_load, register_move, register_store
from nki.isa.selection import range_select, select_reduce, tensor_copy_predicated
from nki.isa.shuffle import nc_stream_shuffle
from nki_machine import cores
from nki_machine.registers import VirtualRegister


def get_nc_version() -> nc_version:
    """The NeuronCore that runs the kernel; outside of one, NEURON_PLATFORM_TARGET_OVERRIDE's."""
    return nc_version(cores.current().generation if cores.is_running() else cores.target_generation())


__all__ = [
    "VirtualRegister",
    "activation",
    "activation_reduce",
    "affine_select",
    "core_barrier",
    "dge_mode",
    "dma_copy",
    "dma_engine",
    "dma_transpose",
    "engine",
    "exponential",
    "get_nc_version",
    "iota",
    "matmul_perf_mode",
    "memset",
    "nc_matmul",
    "nc_stream_shuffle",
    "nc_transpose",
    "nc_version",
    "oob_mode",
    "range_select",
    "reciprocal",
    "reduce_cmd",
    "register_alloc",
    "register_load",
    "register_move",
    "register_store",
    "scalar_tensor_tensor",
    "select_reduce",
    "sendrecv",
    "tensor_copy",
    "tensor_copy_predicated",
    "tensor_partition_reduce",
    "tensor_reduce",
    "tensor_scalar",
    "tensor_scalar_reduce",
    "tensor_tensor",
]
