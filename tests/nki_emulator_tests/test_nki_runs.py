"""A run: arrays in and out, two cores that take turns, and what only the whole run shows."""

import ml_dtypes
import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest
import torch
from on_core import refuses
from tile_io import loaded, stored

from nki_machine import cores
from nki_machine.run import run


@nki.jit
def copy_of(x):
    return stored(loaded(x))


@nki.jit
def doubled_in_place(x):
    tile = loaded(x)
    nisa.tensor_scalar(tile, tile, nl.multiply, 2.0)
    nisa.dma_copy(dst=x, src=tile)
    return x


NUMPY_DTYPES = [np.float32, np.float16, np.int32, np.uint8, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3]
TORCH_DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int32]


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_numpy_goes_in_and_comes_out(dtype) -> None:
    x = np.arange(12).reshape(3, 4).astype(dtype)
    out = nki.simulate(copy_of)(x)
    assert out.dtype == x.dtype
    assert not np.shares_memory(out, x)
    np.testing.assert_array_equal(out, x)


@pytest.mark.parametrize("generation", [3, 4])
@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_torch_goes_in_and_comes_out(dtype, generation: int) -> None:
    x = torch.arange(12).reshape(3, 4).to(dtype)
    out, _ = run(copy_of, x, generation=generation)
    assert out.dtype == dtype
    assert torch.equal(out.view(torch.uint8), x.view(torch.uint8))


@pytest.mark.parametrize("array", [np.full((3, 4), 1.5, np.float32), torch.full((3, 4), 1.5, dtype=torch.bfloat16)])
def test_a_written_argument_is_the_callers_own_array(array) -> None:
    out = nki.simulate(doubled_in_place)(array)
    assert out is array
    assert (array == 3).all()


def test_a_written_argument_need_not_be_contiguous() -> None:
    whole = torch.ones(4, 6, dtype=torch.bfloat16)
    columns = whole[:, ::2]
    assert nki.simulate(doubled_in_place)(columns) is columns
    assert whole[:, ::2].eq(2).all()
    assert whole[:, 1::2].eq(1).all()
    transposed = np.ones((4, 6), np.float32)
    nki.simulate(doubled_in_place)(transposed.T)
    assert (transposed == 2).all()


def test_trn2_takes_torchs_float8_as_its_own() -> None:
    dtypes = []

    @nki.jit
    def look(x):
        dtypes.append(x.dtype)
        return x

    x = torch.ones(2, 2).to(torch.float8_e4m3fn)
    run(look, x, generation=3)
    run(look, x, generation=4)
    assert dtypes == [nl.float8_e4m3, nl.float8_e4m3fn]


def test_one_array_passed_twice_is_one_tensor() -> None:
    @nki.jit
    def writes_and_reads(a, b):
        tile = loaded(a)
        nisa.memset(tile, 5.0)
        nisa.dma_copy(dst=a, src=tile)
        return stored(loaded(b))

    x = np.zeros((2, 2), np.float32)
    assert (nki.simulate(writes_and_reads)(x, x) == 5).all()


def test_tuples_and_objects_carry_tensors() -> None:
    class Pair(nl.NKIObject):
        pass

    @nki.jit
    def first_of(pair, more):
        return stored(loaded(pair.left)), stored(loaded(more[1][0]))

    left, right = np.full((2, 2), 3.0, np.float32), np.full((2, 2), 4.0, np.float32)
    pair = Pair(left=left, size=2)
    outs = nki.simulate(first_of)(pair, (1, (right,)))
    assert [out[0, 0] for out in outs] == [3, 4]
    assert pair.left is left


@pytest.mark.parametrize(
    ("rule", "value"),
    [
        ("int64", np.zeros((2, 2), np.int64)),
        ("float64", torch.zeros(2, 2, dtype=torch.float64)),
        ("without dimensions", torch.tensor(1.0)),
        ("tuple", [1, 2]),
    ],
)
def test_an_argument_is_refused(rule: str, value: object) -> None:
    with refuses(rule):
        nki.simulate(lambda argument: argument)(value)


RESULTS = {
    "private HBM": ("shared_hbm", lambda x: nl.ndarray((2, 2), nl.float32, nl.private_hbm)),
    "SBUF": ("shared_hbm", loaded),
    "a part": ("part of its storage", lambda x: nl.ndarray((2, 2), nl.float32, nl.shared_hbm)[0:1]),
    "a view of an argument": ("argument itself", lambda x: x.reshape((4,))),
    "a number": ("returns tensors", lambda x: 3),
}


@pytest.mark.parametrize(("rule", "kernel"), RESULTS.values(), ids=RESULTS)
def test_a_result_is_refused(rule: str, kernel) -> None:
    with refuses(rule):
        nki.simulate(kernel)(np.zeros((2, 2), np.float32))


def test_a_kernel_is_called_simulated_or_run_alike() -> None:
    x = np.ones((2, 2), np.float32)
    assert copy_of.func.__name__ == copy_of.__name__ == "copy_of"
    outs = [copy_of(x), copy_of[1](x), nki.simulate(copy_of)(x), nki.simulate(copy_of.func)(x), run(copy_of, x)[0]]
    assert all((out == 1).all() for out in outs)


def test_a_kernel_inside_a_kernel_is_a_part_of_it() -> None:
    @nki.jit
    def outer(x):
        return doubled_in_place(x)

    x = np.ones((2, 2), np.float32)
    _, trace = run(outer, x)
    assert (x == 2).all()
    assert [instruction.opcode for instruction in trace.instructions] == ["dma_copy", "tensor_scalar", "dma_copy"]


def test_outside_of_a_kernel_there_is_no_core() -> None:
    with refuses("No kernel is running"):
        nl.ndarray((2, 2), nl.float32)


@pytest.mark.parametrize(("target", "generation"), [("trn2", 3), ("gen3", 3), ("trn3", 4), ("gen4", 4), (None, 4)])
def test_the_environment_names_the_target(monkeypatch, target: str | None, generation: int) -> None:
    monkeypatch.delenv("NEURON_PLATFORM_TARGET_OVERRIDE", raising=False)
    if target:
        monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", target)
    assert cores.target_generation() == generation


def test_another_target_is_refused(monkeypatch) -> None:
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn1")
    with refuses("trn1"):
        cores.target_generation()


@nki.jit
def halves(x):
    """Each core copies its half of the rows."""
    me, rows = nl.program_id(0), x.shape[0] // nl.num_programs(0)
    out = nl.ndarray(x.shape, x.dtype, nl.shared_hbm)
    mine = slice(me * rows, (me + 1) * rows)
    nisa.dma_copy(dst=out[mine], src=loaded(x[mine]))
    return out


@pytest.mark.parametrize("lnc", [1, 2])
def test_cores_share_their_result(lnc: int) -> None:
    x = np.arange(8, dtype=np.float32).reshape(4, 2)
    out, trace = run(halves, x, lnc=lnc)
    np.testing.assert_array_equal(out, x)
    assert {instruction.core for instruction in trace.instructions} == set(range(lnc))
    assert len(trace.of_core(lnc - 1)) == 2
    np.testing.assert_array_equal(nki.simulate(halves[lnc])(x), x)


def test_brackets_say_how_many_cores() -> None:
    assert {i.core for i in run(halves[2], np.zeros((4, 2), np.float32))[1].instructions} == {0, 1}
    with refuses("1 or 2 cores"):
        run(halves[3], np.zeros((6, 2), np.float32))


@nki.jit
def swapped(x):
    me, other = nl.program_id(0), 1 - nl.program_id(0)
    mine = loaded(x[me : me + 1])
    theirs = nl.ndarray(mine.shape, mine.dtype)
    nisa.sendrecv(src=mine, dst=theirs, send_to_rank=other, recv_from_rank=other, pipe_id=0)
    out = nl.ndarray(x.shape, x.dtype, nl.shared_hbm)
    nisa.dma_copy(dst=out[me : me + 1], src=theirs)
    return out


def test_cores_swap_tiles() -> None:
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.testing.assert_array_equal(nki.simulate(swapped[2])(x), x[::-1])


def reads_the_other(x, waits):
    """Each core writes its row and reads the other's, after a barrier or not."""
    me = nl.program_id(0)
    shared = nl.ndarray(x.shape, x.dtype, nl.shared_hbm)
    out = nl.ndarray(x.shape, x.dtype, nl.shared_hbm)
    nisa.dma_copy(dst=shared[me : me + 1], src=loaded(x[me : me + 1]))
    if waits:
        nisa.core_barrier(shared, (0, 1))
    nisa.dma_copy(dst=out[me : me + 1], src=loaded(shared[1 - me : 2 - me]))
    return out


@pytest.mark.parametrize("first_core", [0, 1])
def test_after_a_barrier_cores_see_each_others_memory(first_core: int) -> None:
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    out, _ = run(reads_the_other, x, True, lnc=2, first_core=first_core)
    np.testing.assert_array_equal(out, x[::-1])


def test_a_missing_barrier_shows_in_whose_turn_comes_first() -> None:
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    for first_core in (0, 1):
        out, _ = run(reads_the_other, x, False, lnc=2, first_core=first_core)
        assert np.isnan(out[first_core]).all()
        np.testing.assert_array_equal(out[1 - first_core], x[first_core])


def unequal_barriers(x, first, second):
    for _ in range(second if nl.program_id(0) else first):
        nisa.core_barrier(x, (0, 1))


@pytest.mark.parametrize(("first", "second"), [(1, 0), (0, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("first_core", [0, 1])
def test_a_core_that_waits_for_one_that_ended_is_told(first: int, second: int, first_core: int) -> None:
    with refuses("has ended: a deadlock"):
        run(unequal_barriers, np.zeros((2, 2), np.float32), first, second, lnc=2, first_core=first_core)


def test_cores_that_wait_for_different_things_are_told() -> None:
    def crossed(x):
        me, tile = nl.program_id(0), loaded(x)
        received = nl.ndarray(tile.shape, tile.dtype)
        nisa.sendrecv(src=tile, dst=received, send_to_rank=1 - me, recv_from_rank=1 - me, pipe_id=me)

    with refuses("something else: a deadlock"):
        run(crossed, np.zeros((2, 2), np.float32), lnc=2)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_core_that_fails_ends_the_other(failing: int) -> None:
    def kernel(x):
        if nl.program_id(0) == failing:
            raise ValueError("of its own")
        nisa.core_barrier(x, (0, 1))

    with pytest.raises(ValueError, match="of its own"):
        run(kernel, np.zeros((2, 2), np.float32), lnc=2)


def test_one_core_has_no_one_to_wait_for() -> None:
    with refuses("one core only"):
        run(unequal_barriers, np.zeros((2, 2), np.float32), 1, 1, lnc=1)


def test_both_cores_run_the_same_loops() -> None:
    def kernel(x):
        nl.fori_loop(0, 1 + nl.program_id(0), lambda i: None)
        return x

    with refuses("different runtime loops"):
        run(kernel, np.zeros((2, 2), np.float32), lnc=2)


def test_both_cores_allocate_shared_memory_alike() -> None:
    def kernel(x):
        return nl.ndarray((2, 2 + nl.program_id(0)), nl.float32, nl.shared_hbm)

    with refuses("allocate alike"):
        run(kernel, np.zeros((2, 2), np.float32), lnc=2)


def test_both_cores_return_the_same() -> None:
    def kernel(x, y):
        return y if nl.program_id(0) else x

    with refuses("same shared HBM"):
        run(kernel, np.zeros((2, 2), np.float32), np.zeros((2, 2), np.float32), lnc=2)


def test_private_hbm_is_each_cores_own() -> None:
    def kernel(x):
        private = nl.ndarray(x.shape, x.dtype, nl.private_hbm)
        nisa.dma_copy(dst=private, src=loaded(x))
        nisa.core_barrier(x, (0, 1))
        return x

    _, trace = run(kernel, np.zeros((2, 2), np.float32), lnc=2)
    stores = [i.writes[0].storage for i in trace.instructions if i.opcode == "dma_copy" and i.writes[0].buffer == "hbm"]
    assert len(set(stores)) == 2
