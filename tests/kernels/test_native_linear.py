"""The C++ products against exact ones, in every variant: few rows and many, whole panels and parts of one."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_variants import native  # noqa: F401 - a fixture
from torch.nn import functional
from torch.testing import assert_close

from blockplane.kernels.native import linear

DEPTHS = [32, 96, 640]
ROUNDING = 2**-8


@pytest.fixture
def modules():
    return (linear,)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def exact(x, weight, bias=None):
    return x.double() @ weight.double().T + (0.0 if bias is None else bias.double())


@pytest.mark.parametrize("num_rows", [1, 2, 5, 6, 7, 15, 16, 17, 31, 32, 33, 130])
@pytest.mark.parametrize("out_features", [1, 63, 64, 65, 200])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_are_the_exact_ones_rounded(native, num_rows, out_features, has_bias):  # noqa: F811
    for depth in DEPTHS:
        x, weight = random(num_rows, depth), random(out_features, depth, seed=1)
        bias = random(out_features, seed=2) if has_bias else None
        product, expected = linear.NativeLinear(weight, bias), exact(x, weight, bias)
        assert_close(product(x).double(), expected, rtol=ROUNDING, atol=1e-3 * depth**0.5)
        assert_close(product.logits(x).double(), expected, rtol=1e-5, atol=1e-5 * depth)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 40), st.integers(0, 39))
def test_a_row_of_a_row_view_is_multiplied_as_if_it_were_alone(num_rows, row):
    if not linear.is_there():
        pytest.skip("no C++ kernels were built for this CPU")
    row %= num_rows
    wide, product = random(num_rows, 128), linear.NativeLinear(random(70, 64, seed=1))
    x = wide[:, 32:96]
    together = product(x)
    assert torch.equal(together[row : row + 1], product(x[row : row + 1].contiguous()))


def test_rows_beside_the_product_are_left_alone(native):  # noqa: F811
    weight, x = random(65, 32), random(3, 32, seed=1)
    x[1] = torch.nan
    output = linear.NativeLinear(weight)(x)
    assert output[1].isnan().all()
    assert output[[0, 2]].isfinite().all()


@pytest.mark.parametrize("num_rows", [1, 9, 40])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_products_are_those_of_both_halves(native, num_rows, activation):  # noqa: F811
    x, weight = random(num_rows, 96), random(256, 96, seed=1)
    gate, up = exact(x, weight).chunk(2, dim=-1)
    act = functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")
    assert_close(linear.NativeLinear(weight).gated(x, activation).double(), act * up, rtol=ROUNDING, atol=1e-3)


def test_activations_of_large_numbers_stay_finite(native):  # noqa: F811
    weight = torch.zeros(128, 32).bfloat16()
    weight[:64, 0], weight[64:, 1] = 1.0, 1.0
    x = torch.zeros(4, 32).bfloat16()
    x[:, 0], x[:, 1] = torch.tensor([1e4, -1e4, 90.0, -90.0]), 1.0
    for activation in ("silu", "gelu_tanh"):
        output = linear.NativeLinear(weight).gated(x, activation)[:, 0].float()
        assert_close(output, torch.tensor([1e4, 0.0, 90.0, 0.0]).bfloat16().float())


def test_embedding_gives_the_weights_own_rows(native):  # noqa: F811
    weight, ids = random(130, 64), torch.tensor([0, 63, 64, 129, 5, 5])
    assert torch.equal(linear.NativeLinear(weight).embed(ids), weight[ids])


def test_a_refilled_weight_is_another_in_the_same_place(native):  # noqa: F811
    first, second, biases, x = random(65, 32), random(65, 32, seed=1), random(2, 65, seed=2), random(3, 32, seed=3)
    product, expected = linear.NativeLinear(first, biases[0].clone()), linear.NativeLinear(second, biases[1])
    place = product._packed.data_ptr()
    product.refill(second, biases[1])
    assert product._packed.data_ptr() == place
    assert torch.equal(product(x), expected(x))


@pytest.mark.parametrize(
    ("weight", "is_gated"),
    [
        (torch.ones(64, 32), False),
        (torch.ones(64, 40).bfloat16(), False),
        (torch.ones(192, 32).bfloat16(), True),
        (torch.ones(64, 32, device="meta").bfloat16(), False),
    ],
)
def test_what_the_kernels_lack_is_not_taken(weight, is_gated):
    assert not linear.takes(weight, is_gated=is_gated)


@pytest.mark.skipif(not linear.is_there(), reason="no C++ kernels were built for this CPU")
def test_a_weight_of_the_right_kind_is_taken():
    assert linear.takes(torch.ones(65, 32).bfloat16())
    assert linear.takes(torch.ones(128, 32).bfloat16(), is_gated=True)


@pytest.mark.parametrize("num_rows", [1, 3, 130])
@pytest.mark.parametrize("out_features", [5, 64, 1100, 2100])
def test_the_largest_output_is_that_of_the_logits(native, num_rows, out_features):  # noqa: F811
    x, product = random(num_rows, 32), linear.NativeLinear(random(out_features, 32, seed=1))
    assert torch.equal(product.largest(x), product.logits(x).argmax(1))


@pytest.mark.parametrize("places", [(0, 1), (3, 70), (63, 64), (1023, 1024), (1098, 1099)])
def test_of_equal_outputs_the_first_is_the_largest(native, places):  # noqa: F811
    weight = torch.zeros(1100, 32).bfloat16()
    weight[list(places)] = 1.0
    assert linear.NativeLinear(weight).largest(torch.ones(2, 32).bfloat16()).tolist() == [places[0]] * 2
    # Nor does it matter that all are below zero.
    assert linear.NativeLinear(weight - 2).largest(torch.ones(2, 32).bfloat16()).tolist() == [places[0]] * 2


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [0, 63, 64, 1099])
def test_a_row_with_an_output_that_is_not_finite_has_no_largest(native, value, place):  # noqa: F811
    weight, x = random(1100, 32), torch.zeros(3, 32).bfloat16()
    weight[place] = 0.0
    weight[place, 0] = value
    x[:, 1] = 1.0
    # Where the weight is infinite 0 times it is NaN: in every row.
    assert linear.NativeLinear(weight).largest(x).tolist() == [-1, -1, -1]
    weight[place, 0] = 3e38
    x[1, 0] = 100.0
    ids = linear.NativeLinear(weight).largest(x).tolist()
    assert ids[1] == -1
    assert ids[0] == ids[2] == int(weight[:, 1].argmax())
