"""Registers, and what the two cores of a logical core do together."""

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest
from on_core import empty, hbm, psum, refuses, tile

from nki_machine.run import run


def test_a_register_is_moved_loaded_and_stored(trn2) -> None:
    first, second, dst = nisa.register_alloc(), nisa.register_alloc(7), empty(1, 1, dtype=np.int32)
    nisa.register_move(first, second)
    nisa.register_store(dst, first)
    assert dst.read().item() == 7
    nisa.register_move(first, 3)
    nisa.register_store(dst, first)
    assert dst.read().item() == 3
    nisa.register_load(first, tile([[-5]], np.int32))
    nisa.register_store(dst, first)
    assert dst.read().item() == -5


REGISTER_REFUSALS = [
    ("before anything was moved", lambda: nisa.register_move(nisa.register_alloc(), nisa.register_alloc())),
    ("x must be a compile-time integer", lambda: nisa.register_alloc(1.5)),
    ("dst must be a register", lambda: nisa.register_move(empty(1, 1), 1)),
    ("src must be a register or", lambda: nisa.register_move(nisa.register_alloc(), 1.5)),
    ("src must be a tensor of one element", lambda: nisa.register_load(nisa.register_alloc(), empty(1, 2))),
    ("src must hold an integer", lambda: nisa.register_load(nisa.register_alloc(), empty(1, 1))),
    ("src must hold an integer", lambda: nisa.register_load(nisa.register_alloc(), psum(1, 1, dtype=np.int32))),
    ("src must be a register", lambda: nisa.register_store(empty(1, 1, dtype=np.int32), 3)),
]


@pytest.mark.parametrize(
    ("rule", "instruction"), REGISTER_REFUSALS, ids=[f"{at}: {rule}" for at, (rule, _) in enumerate(REGISTER_REFUSALS)]
)
def test_a_register_instruction_refuses(trn2, rule, instruction) -> None:
    with refuses(rule):
        instruction()


def swapping(**options):
    """Both cores swap a tile of their own number; options override sendrecv's."""

    @nki.jit
    def kernel():
        me = nl.program_id(0)
        mine, other = empty(2, 3), empty(2, 3)
        nisa.memset(mine, float(me + 1))
        peer = {"send_to_rank": 1 - me, "recv_from_rank": 1 - me, "pipe_id": 0}
        nisa.sendrecv(**{"src": mine, "dst": other, **peer, **{name: make() for name, make in options.items()}})
        result = hbm(2, 2, 3)
        nisa.dma_copy(result[me], other)
        return result

    return kernel[2]


def test_two_cores_swap_tiles() -> None:
    result, trace = run(swapping())
    assert result.tolist() == [[[2.0] * 3] * 2, [[1.0] * 3] * 2]
    (transfer,) = [i.transfer for i in trace.of_core(0) if i.opcode == "sendrecv"]
    assert (transfer.num_bytes, transfer.hbm_bytes, transfer.num_partitions) == (24, 0, 2)


@pytest.mark.parametrize(
    ("rule", "options"),
    [
        ("both must be the other core", {"send_to_rank": lambda: 2}),
        ("src must be in SBUF", {"src": lambda: psum(2, 3)}),
        ("dst must be in SBUF", {"dst": lambda: hbm(2, 3)}),
        ("one shape and one dtype", {"dst": lambda: empty(2, 4)}),
        ("dma_engine must be one of", {"dma_engine": lambda: 1}),
        (
            "gpsimd_dma takes 1024 bytes",
            {
                "src": lambda: empty(2, 257),
                "dst": lambda: empty(2, 257),
                "dma_engine": lambda: nisa.dma_engine.gpsimd_dma,
            },
        ),
        (
            "both cores must swap alike",
            {
                "src": lambda: empty(2, 3 + nl.program_id(0)),
                "dst": lambda: empty(2, 3 + nl.program_id(0)),
            },
        ),
    ],
)
def test_sendrecv_refuses(rule, options) -> None:
    with refuses(rule):
        run(swapping(**options))


def test_one_core_has_nobody_to_swap_with(trn2) -> None:
    with refuses("core 0 of 1"):
        nisa.sendrecv(empty(2, 3), empty(2, 3), 1, 1, 0)


def test_a_barrier_lets_each_core_read_what_the_other_wrote() -> None:
    @nki.jit
    def kernel():
        me = nl.program_id(0)
        shared, result, mine = hbm(2, 3), hbm(2, 3), empty(1, 3)
        nisa.memset(mine, float(me + 1))
        nisa.dma_copy(shared[me : me + 1], mine)
        nisa.core_barrier(shared, (0, 1))
        nisa.dma_copy(mine, shared[1 - me : 2 - me])
        nisa.dma_copy(result[me : me + 1], mine)
        return result

    for first_core in (0, 1):
        result, _ = run(kernel[2], first_core=first_core)
        assert result.tolist() == [[2.0] * 3, [1.0] * 3]


@pytest.mark.parametrize(
    ("rule", "arguments"),
    [
        ("cores must be", lambda: (hbm(2, 3), (0, 1, 2))),
        ("data must be in shared HBM", lambda: (empty(2, 3), (0, 1))),
        ("engine must be one of", lambda: (hbm(2, 3), (0, 1), nisa.engine.dma)),
    ],
)
def test_core_barrier_refuses(trn2, rule, arguments) -> None:
    with refuses(rule):
        nisa.core_barrier(*arguments())


def test_versions_are_ordered(trn2) -> None:
    assert nisa.get_nc_version() is nisa.nc_version.gen3
    assert nisa.nc_version.gen2 < nisa.get_nc_version() < nisa.nc_version.gen4
    assert nisa.get_nc_version() >= nisa.nc_version.gen3
