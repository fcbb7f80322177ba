"""The C++ norms and heads against their torch twins: the same bfloat16 numbers, but for the order of sums."""

import pytest
import torch
from native_variants import native  # noqa: F401 - a fixture
from torch.testing import assert_close

from blockplane.data_plane.models.config import RopeConfig
from blockplane.data_plane.models.heads import TorchHeads
from blockplane.data_plane.models.norm import RMSNorm
from blockplane.data_plane.models.rope import rotary_table
from blockplane.kernels.native import pointwise

EPS = 1e-6
# One step of bfloat16: a sum in another order may round the other way.
CLOSE = {"rtol": 2**-7, "atol": 1e-6}


@pytest.fixture
def modules():
    return (pointwise,)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def twins(size: int, *, adds_one: bool, seed: int = 1):
    weight = random(size, seed=seed).float()
    kinds = pointwise.NativeRMSNorm, RMSNorm
    return [kind(weight, EPS, torch.bfloat16, adds_one=adds_one) for kind in kinds]


@pytest.mark.parametrize("adds_one", [False, True])
@pytest.mark.parametrize("shape", [(1, 16), (9, 640), (5, 3, 256)])
def test_norms_equal_their_twin(native, shape, adds_one):  # noqa: F811
    own, twin = twins(shape[-1], adds_one=adds_one)
    x = random(*shape)
    assert_close(own(x), twin(x), **CLOSE)


@pytest.mark.parametrize("adds_one", [False, True])
@pytest.mark.parametrize("has_outer", [False, True])
def test_residual_sums_and_their_norms_equal_their_twin(native, adds_one, has_outer):  # noqa: F811
    own, twin = twins(640, adds_one=adds_one)
    outer, outer_twin = twins(640, adds_one=adds_one, seed=2) if has_outer else (None, None)
    hidden, x = random(17, 640, seed=3), random(17, 640, seed=4)
    expected = twin.after(hidden.clone(), x, outer_twin)
    # Sums near zero are as exact as what is added.
    for got, wanted in zip(own.after(hidden.clone(), x, outer), expected, strict=True):
        assert_close(got, wanted, rtol=2**-6, atol=2**-6)


def test_a_refilled_norm_is_another_in_the_same_place(native):  # noqa: F811
    for adds_one in (False, True):
        first, other = twins(64, adds_one=adds_one)[0], twins(64, adds_one=adds_one, seed=5)[0]
        place = first.weight.data_ptr()
        first.refill(random(64, seed=5).float())
        assert first.weight.data_ptr() == place
        assert torch.equal(first(random(2, 64)), other(random(2, 64)))


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(1, 1, 32), (4, 1, 256), (6, 2, 64)])
def test_heads_equal_their_twin(native, has_norm, num_heads, num_kv_heads, head_dim):  # noqa: F811
    weight = random(num_heads + num_kv_heads, head_dim, seed=1).float() if has_norm else None
    qkv = random(11, (num_heads + 2 * num_kv_heads) * head_dim)
    table = rotary_table(RopeConfig(theta=10_000.0), head_dim, 100)
    positions = torch.tensor([0, 99, 5, 4, 3, 2, 1, 0, 50, 51, 52])
    results = []
    for kind in (pointwise.NativeHeads, TorchHeads):
        norm = None if weight is None else (weight, EPS, True)
        heads = kind(num_heads, num_kv_heads, head_dim, norm, torch.bfloat16)
        results.append(heads(qkv, heads.rotation(table, positions)))
    for own, twin in zip(*results, strict=True):
        # A turned pair cancels to what its parts are rounded by.
        assert_close(own, twin, rtol=2**-6, atol=2**-6)
    assert torch.equal(results[0][2], results[1][2])


def test_refilled_heads_have_the_other_norm(native):  # noqa: F811
    first, second = random(3, 32, seed=1).float(), random(3, 32, seed=2).float()
    heads, expected = (pointwise.NativeHeads(2, 1, 32, (w, EPS, False), torch.bfloat16) for w in (first, second))
    heads.refill(second)
    qkv, rotation = random(2, 4 * 32), (rotary_table(RopeConfig(theta=10_000.0), 32, 4), torch.arange(2))
    for own, wanted in zip(heads(qkv, rotation), expected(qkv, rotation), strict=True):
        assert torch.equal(own, wanted)


def test_what_the_kernels_lack_is_not_taken():
    assert not pointwise.takes_norm(torch.ones(24), torch.bfloat16)
    assert not pointwise.takes_norm(torch.ones(32), torch.float32)
    assert not pointwise.takes_heads(48, torch.bfloat16, torch.device("cpu"))
    assert not pointwise.takes_heads(64, torch.float32, torch.device("cpu"))
    assert not pointwise.takes_heads(2048, torch.bfloat16, torch.device("cpu"))
