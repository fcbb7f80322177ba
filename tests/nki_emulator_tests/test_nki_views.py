"""The view primitives against numpy on the same data, and what each of them refuses."""

import math
from contextlib import contextmanager

import nki.language as nl
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from on_core import empty, hbm, on_generation, refuses, tile

from nki_machine.errors import RuleError
from nki_machine.registers import VirtualRegister

on_trn3 = contextmanager(on_generation)


def numbered(shape: tuple[int, ...]) -> np.ndarray:
    """Each element tells where it lies."""
    return np.arange(math.prod(shape), dtype=np.float32).reshape(shape)


def slice_one_dim(draw, view, model, on_chip):
    dim = draw(st.integers(0, model.ndim - 1))
    start = draw(st.integers(0, model.shape[dim] - 1))
    end = draw(st.integers(start + 1, model.shape[dim]))
    step = 1 if dim == 0 and on_chip else draw(st.integers(1, 3))
    return view.slice(dim, start, end, step), model[(slice(None),) * dim + (slice(start, end, step),)]


def index_one_dim(draw, view, model, on_chip):
    dim = draw(st.integers(0, model.ndim - 1))
    at = draw(st.integers(-model.shape[dim], model.shape[dim] - 1))
    kept = (dim == 0 or model.ndim == 2) if on_chip else model.ndim == 1
    taken = np.take(model, [at], axis=dim) if kept else np.take(model, at, axis=dim)
    if at >= 0 and draw(st.booleans()):
        return view.select(dim, at), taken
    return view[(slice(None),) * dim + (at,)], taken


def permute(draw, view, model, on_chip):
    dims = draw(st.permutations(range(on_chip, model.ndim)))
    dims = (*range(on_chip), *dims)
    return view.permute(dims), model.transpose(dims)


def expand(draw, view, model, on_chip):
    dim = draw(st.integers(on_chip, model.ndim))
    return view.expand_dim(dim), np.expand_dims(model, dim)


def broadcast(draw, view, model, on_chip):
    dims = [dim for dim in range(on_chip, model.ndim) if model.shape[dim] == 1]
    if not dims:
        return view, model
    dim, size = draw(st.sampled_from(dims)), draw(st.integers(1, 3))
    return view.broadcast(dim, size), np.repeat(model, size, axis=dim)


def squeeze(draw, view, model, on_chip):
    dims = [dim for dim in range(on_chip, model.ndim) if model.shape[dim] == 1]
    if not dims or model.ndim <= 1 + on_chip:
        return view, model
    dim = draw(st.sampled_from(dims))
    return view.squeeze_dim(dim), model.squeeze(dim)


def split(draw, view, model, on_chip):
    dim = draw(st.integers(on_chip, model.ndim - 1))
    outer = draw(st.sampled_from([size for size in range(1, model.shape[dim] + 1) if model.shape[dim] % size == 0]))
    inner = draw(st.sampled_from([model.shape[dim] // outer, -1]))
    shape = (*model.shape[:dim], outer, model.shape[dim] // outer, *model.shape[dim + 1 :])
    return view.reshape_dim(dim, (outer, inner)), model.reshape(shape)


def merge(draw, view, model, on_chip):
    start = draw(st.integers(on_chip, model.ndim - 1))
    end = draw(st.integers(start, model.ndim - 1))
    try:
        merged = view.flatten_dims(start, end)
    except RuleError:
        assert not mergeable(view.shape[start : end + 1], view.strides[start : end + 1])
        return view, model
    shape = (*model.shape[:start], math.prod(model.shape[start : end + 1]), *model.shape[end + 1 :])
    return merged, model.reshape(shape)


def mergeable(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether numpy would reshape without a copy."""
    rows = np.lib.stride_tricks.as_strided(np.zeros(1), shape, [8 * stride for stride in strides])
    try:
        rows.reshape(-1, copy=False)
    except ValueError:
        return False
    return True


PRIMITIVES = (slice_one_dim, index_one_dim, permute, expand, broadcast, squeeze, split, merge)


@pytest.mark.parametrize("on_chip", [True, False])
@given(data=st.data())
def test_a_chain_of_views_is_numpys_chain(on_chip: bool, data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1 + on_chip, max_size=3)))
    model = numbered(shape)
    with on_trn3(4):
        view = tile(model, buffer=nl.sbuf if on_chip else nl.shared_hbm)
        storage = view.storage
        for primitive in data.draw(st.lists(st.sampled_from(PRIMITIVES), max_size=6)):
            changed, changed_model = primitive(data.draw, view, model, on_chip)
            if changed_model.ndim > 5:
                continue
            view, model = changed, changed_model
            assert view.storage is storage
            assert view.shape == model.shape
            np.testing.assert_array_equal(view.read(), model)


@given(data=st.data())
def test_a_pattern_read_back_by_ap_is_the_view(data: st.DataObject) -> None:
    model = numbered((4, 3, 4, 2))
    with on_trn3(4):
        whole = tile(model)
        view = whole
        for primitive in data.draw(st.lists(st.sampled_from((slice_one_dim, index_one_dim, permute)), max_size=4)):
            view, model = primitive(data.draw, view, model, True)
        again = whole.ap(view.get_pattern(), offset=view.offset)
        np.testing.assert_array_equal(again.read(), model)


@given(data=st.data())
def test_a_write_through_a_view_is_a_write_through_numpys(data: st.DataObject) -> None:
    model = numbered((4, 3, 4, 2))
    with on_trn3(4):
        whole = tile(model)
        view, part = whole, model
        for primitive in data.draw(st.lists(st.sampled_from((slice_one_dim, permute)), max_size=4)):
            view, part = primitive(data.draw, view, part, True)
        view.write(-numbered(part.shape))
        part[...] = -numbered(part.shape)
        np.testing.assert_array_equal(whole.read(), model)


def test_an_index_on_chip_keeps_two_dimensions_and_in_hbm_one(trn3) -> None:
    t, h = empty(64, 64, 64), hbm(4, 128, 32)
    assert t[0, 0, 10].shape == (1, 1)
    assert t[:, 0, 10].shape == (64, 1)
    assert t[:, 0].shape == (64, 64)
    assert t[0, ..., :].shape == (1, 64, 64)
    assert t[0].shape == (1, 64, 64)
    assert h[0].shape == (128, 32)
    assert h[0, 1].shape == (32,)
    assert h[0, 1, 2].shape == (1,)


def test_a_column_index_reads_that_column(trn3) -> None:
    model = numbered((4, 5, 6))
    t = tile(model)
    np.testing.assert_array_equal(t[:, 2, 3].read()[:, 0], model[:, 2, 3])
    np.testing.assert_array_equal(t[3, -1, nl.ds(1, 4)].read(), model[3:4, -1, 1:5])


def test_rearrange_is_einops(trn3) -> None:
    model = numbered((4, 24))
    t = tile(model)
    split = t.rearrange(("b", ("h", "w")), ("b", "w", "h"), {"h": 4})
    np.testing.assert_array_equal(split.read(), model.reshape(4, 4, 6).transpose(0, 2, 1))
    merged = tile(numbered((4, 2, 3, 5))).rearrange(("p", "a", "b", "c"), ("p", "c", ("a", "b")))
    np.testing.assert_array_equal(merged.read(), numbered((4, 2, 3, 5)).reshape(4, 6, 5).transpose(0, 2, 1))


def test_view_reinterprets_bits_at_the_last_dimension(trn3) -> None:
    model = numbered((4, 8))
    t = tile(model)
    assert t.view(nl.uint8).shape == (4, 32)
    np.testing.assert_array_equal(t.ap([[8, 4], [5, 1]]).view(nl.int32).read(), model[:, :1].view(np.int32))
    np.testing.assert_array_equal(t.view(nl.int32).read(), model.view(np.int32))
    np.testing.assert_array_equal(t[:, 2:6].view(nl.uint16).read(), model[:, 2:6].copy().view(np.uint16))
    np.testing.assert_array_equal(t.view(nl.uint8).view(nl.float32).read(), model)


def test_a_new_tensor_is_contiguous_and_a_permuted_one_is_not(trn3) -> None:
    t = empty(128, 4, 8)
    assert t.is_contiguous()
    assert t[0:64].is_contiguous()
    assert not t.permute((0, 2, 1)).is_contiguous()
    assert not t[:, :, 0:4].is_contiguous()
    assert not hbm(4, 8)[:, 0:4].is_contiguous()
    assert not t.is_indirect()


REFUSED = {
    "permute the partitions": ("permute", lambda t: t.permute((1, 0, 2))),
    "permute a dimension twice": ("permutation", lambda t: t.permute((0, 1, 1))),
    "broadcast the partitions": ("broadcast", lambda t: t[0].broadcast(0, 4)),
    "broadcast two elements": ("size 1", lambda t: t.broadcast(1, 8)),
    "squeeze the partitions": ("squeeze_dim", lambda t: t[0].squeeze_dim(0)),
    "squeeze the only free dimension": ("to spare", lambda t: t[:, 0, 0:1].squeeze_dim(1)),
    "expand beyond the end": ("within 0..3", lambda t: t.expand_dim(4)),
    "read six dimensions": ("1 to 5 dimensions", lambda t: t.expand_dim(1).expand_dim(1).expand_dim(1).read()),
    "squeeze four elements": ("size 1", lambda t: t.squeeze_dim(1)),
    "expand before the partitions": ("expand_dim", lambda t: t.expand_dim(0)),
    "split the partitions": ("reshape_dim", lambda t: t.reshape_dim(0, (2, 4))),
    "split unevenly": ("divide", lambda t: t.reshape_dim(2, (4, -1))),
    "split into fewer elements": ("6 elements", lambda t: t.reshape_dim(2, (2, 2))),
    "merge backwards": ("no range", lambda t: t.flatten_dims(2, 1)),
    "merge the partitions": ("flatten_dims", lambda t: t.flatten_dims(0, 1)),
    "merge what is permuted": ("without a copy", lambda t: t.permute((0, 2, 1)).flatten_dims(1, 2)),
    "reshape the partitions": ("dimension 0", lambda t: t.reshape((4, 48))),
    "reshape to other elements": ("24 elements", lambda t: t.reshape((8, 25))),
    "slice every other partition": ("neighbours", lambda t: t[::2]),
    "slice beyond the end": ("0 <= start", lambda t: t[:, 0:5]),
    "slice nothing": ("0 <= start", lambda t: t[:, 2:2]),
    "index beyond the end": ("0 <= start", lambda t: t[:, 4]),
    "index too many dimensions": ("3 dimensions", lambda t: t[0, 0, 0, 0]),
    "index by a register": ("register", lambda t: t[VirtualRegister(0)]),
    "index by a float": ("no index", lambda t: t[1.5]),
    "reinterpret a strided row": ("contiguous", lambda t: t[:, :, ::2].view(nl.int32)),
    "reinterpret half an element": ("between elements", lambda t: t.view(nl.uint8)[:, :, 1:5].view(nl.float32)),
    "assign": ("instruction", lambda t: t.__setitem__(0, 1.0)),
    "name no dimension": ("does not exist", lambda t: t.slice(3, 0, 1)),
}


@pytest.mark.parametrize(("rule", "use"), REFUSED.values(), ids=REFUSED)
def test_a_view_refuses(trn3, rule, use) -> None:
    with refuses(rule):
        use(empty(8, 4, 6))


def test_dimensions_count_from_the_end_too(trn3) -> None:
    model = numbered((4, 5, 6))
    t = tile(model)
    np.testing.assert_array_equal(t.slice(-3, 1, 3).slice(-1, 0, 2).read(), model[1:3, :, 0:2])
    with refuses("does not exist"):
        t.slice(-4, 0, 1)


def test_a_new_dimension_is_as_dense_as_it_can_be(trn3) -> None:
    assert empty(128, 4, 6).expand_dim(1).get_pattern() == [[24, 128], [24, 1], [6, 4], [1, 6]]
    assert empty(128, 4).expand_dim(2).get_pattern() == [[4, 128], [1, 4], [1, 1]]


def test_hbm_reshapes_freely(trn3) -> None:
    model = numbered((4, 6))
    h = tile(model, buffer=nl.shared_hbm)
    np.testing.assert_array_equal(
        h.reshape((2, 2, 6)).permute((2, 0, 1)).read(), model.reshape(2, 2, 6).transpose(2, 0, 1)
    )
    np.testing.assert_array_equal(h.permute((1, 0)).read(), model.T)
    np.testing.assert_array_equal(h.flatten_dims(0, 1).read(), model.reshape(-1))


def test_a_broadcast_view_is_read_but_not_written(trn3) -> None:
    t = tile(numbered((4, 1, 3))).broadcast(1, 5)
    np.testing.assert_array_equal(t.read(), np.repeat(numbered((4, 1, 3)), 5, axis=1))
    with refuses("broadcast: a write"):
        t.write(0.0)
    tile(numbered((4, 1, 3))).broadcast(1, 1).write(0.0)


def test_a_write_takes_one_value_or_as_many_as_the_view_has(trn3) -> None:
    t = empty(4, 2, 3)
    t.write(7.0)
    assert (t.read() == 7).all()
    t.write(numbered((4, 6)))
    np.testing.assert_array_equal(t.read(), numbered((4, 2, 3)))


def test_a_step_over_all_partitions_but_one_takes_one(trn3) -> None:
    assert empty(8, 4).slice(0, 2, 4, 2).get_pattern() == [[8, 1], [1, 4]]


def test_a_partition_dimension_that_stays_whole_may_be_named(trn3) -> None:
    assert empty(8, 4).reshape_dim(0, (8,)).shape == (8, 4)
