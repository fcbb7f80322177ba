"""Memory: what new memory holds, what one allocation may be, where an engine may begin, and what fits at once."""

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest
from on_core import empty, psum, refuses

from nki_machine.capacity import live_ranges
from nki_machine.memory import capacity_bytes
from nki_machine.run import run

KIB = 1024


@pytest.mark.parametrize("buffer", [nl.sbuf, nl.psum, nl.private_hbm, nl.shared_hbm])
def test_new_memory_is_poison(trn3, buffer) -> None:
    assert np.isnan(nl.ndarray((4, 4), nl.float32, buffer).read()).all()
    assert (nl.ndarray((4, 4), nl.int32, buffer).read() > 2**30).all()


@nki.jit
def reads_what_it_did_not_write(x):
    tile = nl.ndarray((4, 8), nl.float32)
    nisa.dma_copy(dst=tile[:, 0:4], src=x)
    out = nl.ndarray((4, 8), nl.float32, nl.shared_hbm)
    nisa.dma_copy(dst=out, src=tile)
    return out


def test_a_run_chooses_its_poison() -> None:
    x = np.zeros((4, 4), np.float32)
    assert np.isnan(nki.simulate(reads_what_it_did_not_write)(x)[:, 4:]).all()
    for poison in (1e4, -3e4):
        out, _ = run(reads_what_it_did_not_write, x, poison=poison)
        assert (out[:, 4:] == poison).all()
        assert (out[:, :4] == 0).all()


REFUSED = {
    "129 partitions": ("129 partitions", lambda: empty(129, 4)),
    "a bank and a half times eight": ("16384", lambda: psum(1, 16 * KIB // 4 + 1)),
    "one byte too many": ("SBUF|sbuf", lambda: empty(1, capacity_bytes(nl.sbuf, 4) + 1, dtype=np.int8)),
    "no free dimension": ("free dimension", lambda: empty(4)),
    "nothing": ("at least 1", lambda: empty(4, 0)),
}


@pytest.mark.parametrize(("rule", "use"), REFUSED.values(), ids=REFUSED)
def test_an_allocation_refuses(trn3, rule, use) -> None:
    with refuses(rule):
        use()


def test_hbm_has_no_partitions(trn3) -> None:
    assert nl.ndarray((1000, 7, 3), nl.int8, nl.private_hbm).shape == (1000, 7, 3)
    assert nl.ndarray((5,), nl.int8, nl.shared_hbm).shape == (5,)


@pytest.mark.parametrize(
    ("num", "allowed"), [(128, {0}), (65, {0}), (64, {0, 64}), (33, {0, 64}), (32, {0, 32, 64, 96})]
)
def test_an_engine_begins_at_few_partitions(trn3, num: int, allowed: set[int]) -> None:
    whole = empty(128, 4)
    for start in range(128 - num + 1):
        tile = whole[start : start + num]
        if start in allowed:
            nisa.memset(tile, 0.0)
        else:
            with refuses("begin at partition"):
                nisa.memset(tile, 0.0)


def test_a_dma_begins_at_any_partition(trn3) -> None:
    nisa.dma_copy(dst=empty(128, 4)[5:8], src=nl.ndarray((3, 4), nl.float32, nl.shared_hbm))


def test_sizes_follow_the_generation(trn2) -> None:
    assert nl.tile_size.sbuf_fmax_bytes == capacity_bytes(nl.sbuf, 3) == 224 * KIB - 16 * KIB - 264
    assert capacity_bytes(nl.sbuf, 4) == 256 * KIB - 16 * KIB - 264
    assert nl.tile_size.pmax == 128
    assert nl.tile_size.psum_bank_fmax == 512


def fill(*tiles: object) -> None:
    for tile in tiles:
        nisa.memset(tile, 0.0)


@nki.jit
def keeps(num_tiles, free_bytes, together):
    """Fills tiles of SBUF; `together` reads the first once more at the end."""
    tiles = []
    for _ in range(num_tiles):
        tiles.append(nl.ndarray((128, free_bytes // 4), nl.float32))
        fill(tiles[-1])
    if together:
        for tile in tiles:
            fill(tile)


@pytest.mark.parametrize(("generation", "fitting"), [(3, 3), (4, 3)])
def test_what_lives_together_must_fit_together(generation: int, fitting: int) -> None:
    third = capacity_bytes(nl.sbuf, generation) // fitting // 4 * 4
    run(keeps, fitting, third, True, generation=generation)
    with refuses("4 tensors that live in sbuf"):
        run(keeps, fitting + 1, third, True, generation=generation)


def test_what_python_still_holds_does_not_live() -> None:
    run(keeps, 20, 100 * KIB, False)


@nki.jit
def loops_over_a_tile(outside_bytes, inside_bytes, num_inside, upper):
    """One tile that lives through a loop whose body has `num_inside` of its own, one after the other."""
    outside = nl.ndarray((128, outside_bytes // 4), nl.float32)
    fill(outside)

    def body(i):
        fill(outside)
        for _ in range(num_inside):
            inside = nl.ndarray((128, inside_bytes // 4), nl.float32)
            fill(inside, inside)

    nl.fori_loop(0, upper, body)


def test_a_tile_of_the_body_lives_for_its_iteration() -> None:
    run(loops_over_a_tile, 100 * KIB, 100 * KIB, 1, 5)
    run(loops_over_a_tile, 100 * KIB, 100 * KIB, 3, 5)


def test_a_tile_from_before_a_loop_lives_through_all_of_it() -> None:
    """In the body it is touched first and never again; the next iteration needs it none the less."""
    with refuses("2 tensors that live in sbuf"):
        run(loops_over_a_tile, 140 * KIB, 140 * KIB, 1, 1)


@nki.jit
def carries_between_iterations():
    carried = nl.ndarray((128, 140 * KIB // 4), nl.float32)

    def body(i):
        fill(carried)
        own = nl.ndarray((128, 140 * KIB // 4), nl.float32)
        fill(own)

    nl.fori_loop(0, 2, body)


def test_a_tile_of_two_iterations_lives_through_the_loop() -> None:
    with refuses("2 tensors that live in sbuf"):
        run(carries_between_iterations)


@nki.jit
def fills_psum(sizes):
    tiles = [nl.ndarray((128, size // 4), nl.float32, nl.psum) for size in sizes]
    fill(*tiles)
    fill(*tiles)


@pytest.mark.parametrize(
    ("sizes", "fits"),
    [
        ((2 * KIB,) * 8, True),
        ((2 * KIB,) * 9, False),
        ((16 * KIB,), True),
        ((16 * KIB, 4), False),
        ((512,) * 32, True),
        ((512,) * 33, False),
        # Ten tiles of three quarters of a bank have the bytes of seven and a half banks, but no two share one.
        ((1536,) * 10, False),
        ((3 * KIB,) * 4, True),
        ((3 * KIB,) * 5, False),
    ],
)
def test_psum_is_eight_banks(sizes: tuple[int, ...], fits: bool) -> None:
    if fits:
        run(fills_psum, sizes)
    else:
        with refuses("live in psum"):
            run(fills_psum, sizes)


def test_a_life_reaches_from_first_to_last_access() -> None:
    _, trace = run(loops_over_a_tile, 4, 4, 1, 2)
    outside, first, second = live_ranges(trace.instructions)
    # memset; (iteration, memset, memset, memset) twice
    assert (outside.first, outside.last) == (0, 8)
    assert (first.first, first.last) == (3, 4)
    assert (second.first, second.last) == (7, 8)
