"""Runtime loops and registers: what the device decides, Python must not."""

import operator

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest
from on_core import empty, refuses

from nki_machine.registers import VirtualRegister
from nki_machine.run import run

PYTHON = {
    "if": bool,
    "int": int,
    "float": float,
    "range": range,
    "index": lambda register: [1, 2, 3][register],
    "hash": hash,
    "equal": lambda register: register == 1,
    "less": lambda register: register < 1,
    "at least": lambda register: register >= 1,
    "add": lambda register: register + 1,
    "add to": lambda register: 1 + register,
    "multiply": lambda register: register * 2,
    "modulo": lambda register: register % 2,
    "negate": operator.neg,
}


@pytest.mark.parametrize("use", PYTHON.values(), ids=PYTHON)
def test_a_register_has_no_value_in_python(use) -> None:
    with pytest.raises(TypeError, match="not known while the kernel is traced"):
        use(VirtualRegister(1))


def test_a_register_is_read_after_it_was_written() -> None:
    register = VirtualRegister()
    with refuses("before anything was moved"):
        register.read()
    register.write(3)
    assert register.read() == 3


def test_a_loops_variable_is_read_only(trn3) -> None:
    def body(i):
        nisa.register_move(i, 7)

    with refuses("read-only"):
        nl.fori_loop(0, 1, body)


@pytest.mark.parametrize(("lower", "upper", "step"), [(0, 0, 1), (0, 3, 1), (2, 9, 3), (5, 2, 1)])
def test_a_loop_visits_what_pythons_range_does(trn3, lower: int, upper: int, step: int) -> None:
    seen = []
    nl.fori_loop(VirtualRegister(lower), VirtualRegister(upper), lambda i: seen.append(i.read()), step)
    assert seen == list(range(lower, upper, step))


@pytest.mark.parametrize("step", [0, -1, 1.5, VirtualRegister(1)])
def test_a_step_is_a_positive_integer_known_before(trn3, step) -> None:
    with refuses("step"):
        nl.fori_loop(0, 3, lambda i: None, step)


def test_a_body_returns_nothing(trn3) -> None:
    with refuses("must return None"):
        nl.fori_loop(0, 1, lambda i: i)


def test_a_loop_does_not_stand_in_no_reorder(trn3) -> None:
    with nl.no_reorder(), refuses("no_reorder"):
        nl.fori_loop(0, 1, lambda i: None)
    nl.fori_loop(0, 1, lambda i: None)


def test_a_tensor_of_a_body_ends_with_its_iteration(trn3) -> None:
    kept = []

    def body(i):
        kept.append(empty(4, 4))
        nisa.memset(kept[-1], 0.0)

    nl.fori_loop(0, 2, body)
    with refuses("exists in that iteration only"):
        nisa.memset(kept[-1], 0.0)


def test_a_tensor_of_an_iteration_is_not_the_next_ones(trn3) -> None:
    kept = []

    def body(i):
        kept.append(empty(4, 4))
        nisa.memset(kept[0], 0.0)

    with refuses("exists in that iteration only"):
        nl.fori_loop(0, 2, body)


def test_rows_of_a_bodys_tensor_end_with_it(trn3) -> None:
    kept, index = [], empty(1, 1, dtype=np.int32)

    def body(i):
        kept.append(nl.ndarray((4, 4), nl.float32, nl.private_hbm).vector_select(0, index))

    nl.fori_loop(0, 1, body)
    with refuses("exists in that iteration only"):
        kept[0].indirect.rows()


def test_an_inner_loop_uses_the_outer_bodys_tensors(trn3) -> None:
    def outer(i):
        tile = empty(4, 4)
        nl.fori_loop(0, 2, lambda j: nisa.memset(tile, 0.0))

    nl.fori_loop(0, 2, outer)
    memsets = [instruction.loops for instruction in trn3.instructions if instruction.opcode == "memset"]
    assert memsets == [((0, 0), (1, 0)), ((0, 0), (1, 1)), ((0, 1), (2, 0)), ((0, 1), (2, 1))]


def test_every_iteration_is_in_the_trace(trn3) -> None:
    nl.fori_loop(0, 3, lambda i: None)
    assert [(instruction.opcode, instruction.engine) for instruction in trn3.instructions] == [
        ("fori_loop", "sync")
    ] * 3
    assert trn3.trips == [(0, 3)]
    assert trn3.loops == ()


def test_a_body_that_alternates_in_python_is_not_one_body(trn3) -> None:
    buffers, turn = (empty(4, 4), empty(4, 4)), iter((0, 1))
    with refuses("same instructions in every iteration: instruction 1 is"):
        nl.fori_loop(0, 2, lambda i: nisa.memset(buffers[next(turn)], 0.0))


def test_a_body_that_moves_along_in_python_is_not_one_body(trn3) -> None:
    tile, column = empty(4, 4), iter(range(4))
    with refuses("same instructions in every iteration"):
        nl.fori_loop(0, 2, lambda i: nisa.memset(tile[:, next(column)], 0.0))


def test_a_body_that_does_less_the_second_time_is_not_one_body(trn3) -> None:
    tile, times = empty(4, 4), iter((2, 1))
    with refuses("2 in the first and 1 in|3 in the first and 2 in"):
        nl.fori_loop(0, 2, lambda i: [nisa.memset(tile, 0.0) for _ in range(next(times))] and None)


def test_a_body_with_tensors_of_its_own_is_one_body(trn3) -> None:
    def body(i):
        left, right = empty(4, 4), empty(4, 4)
        nisa.memset(left, 0.0)
        nisa.tensor_copy(right, left)

    nl.fori_loop(0, 3, body)


def test_an_inner_loop_may_run_as_often_as_it_likes(trn3) -> None:
    tile, register = empty(4, 4), VirtualRegister(0)

    def outer(i):
        nl.fori_loop(0, i, lambda j: nisa.memset(tile, 0.0))

    nl.fori_loop(0, register, outer)
    nl.fori_loop(0, 3, outer)


@nki.jit
def counts_down(start):
    count = nl.ndarray((1, 1), nl.int32)
    nisa.dma_copy(dst=count, src=start)
    steps = nl.ndarray((1, 1), nl.float32)
    nisa.memset(steps, 0.0)
    register = nisa.register_alloc()
    nisa.register_load(register, count)

    def body(r):
        nisa.tensor_scalar(steps, steps, nl.add, 1.0)
        nisa.tensor_scalar(count, count, nl.subtract, 2)
        nisa.register_load(r, count)
        return r

    nl.while_loop(register, body)
    out = nl.ndarray((1, 1), nl.float32, nl.shared_hbm)
    nisa.dma_copy(dst=out, src=steps)
    return out


@pytest.mark.parametrize(("start", "steps"), [(0, 0), (2, 1), (6, 3)])
def test_a_while_loop_asks_before_each_iteration(start: int, steps: int) -> None:
    out, _ = run(counts_down, np.array([[start]], np.int32))
    assert out[0, 0] == steps


def test_a_while_loop_goes_on_with_what_the_body_returns(trn3) -> None:
    with refuses("must be a register"):
        nl.while_loop(VirtualRegister(1), lambda r: None)
    nl.while_loop(VirtualRegister(1), lambda r: VirtualRegister(0))
