"""Both ways to multiply with a weight give the product, for few rows and many, whole tiles and remainders."""

import pytest
import torch
from torch.testing import assert_close

from blockplane.data_plane.models.linear import Linear, TiledLinear, fastest_linear

# Tiles: one; some, with a remainder beside eights; more than are summed at once.
OUT_FEATURES = [64, 64 * 11, 64 * 260]


@pytest.mark.parametrize("num_rows", [1, 2, 8, 9, 40])
@pytest.mark.parametrize("out_features", OUT_FEATURES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_tiled_product_equals_the_exact_one_rounded(num_rows, out_features, has_bias):
    x, weight = torch.randn(num_rows, 24).bfloat16(), torch.randn(out_features, 24).bfloat16()
    bias = torch.randn(out_features).bfloat16() if has_bias else None
    exact = x.double() @ weight.double().T + (0.0 if bias is None else bias.double())
    output = TiledLinear(weight, bias)(x)
    assert output.dtype == torch.bfloat16
    # One rounding to bfloat16 of the product, one of the sum with the bias.
    assert_close(output.double(), exact, rtol=2**-7, atol=2**-5 if has_bias else 2**-12)


@pytest.mark.parametrize("kind", [Linear, TiledLinear])
def test_embedding_gives_the_weights_own_rows(kind):
    weight = torch.randn(64 * 3, 24).bfloat16()
    ids = torch.tensor([0, 63, 64, 191, 5, 5])
    assert torch.equal(kind(weight).embed(ids), weight[ids])


def test_only_whole_bfloat16_tiles_are_tiled():
    assert type(fastest_linear(torch.ones(128, 8))) is Linear
    assert type(fastest_linear(torch.ones(100, 8).bfloat16())) is Linear


@pytest.mark.parametrize("kind", [Linear, TiledLinear])
def test_a_refilled_weight_is_another_in_the_same_place(kind):
    first, second = (torch.randn(64 * 300, 24).bfloat16() for _ in range(2))
    biases = torch.randn(2, 64 * 300).bfloat16()
    linear, expected = kind(first, biases[0].clone()), kind(second.clone(), biases[1])
    place = linear._weight.data_ptr()
    linear.refill(second, biases[1])
    assert linear._weight.data_ptr() == place
    for num_rows in (2, 40):
        x = torch.randn(num_rows, 24).bfloat16()
        assert torch.equal(linear(x), expected(x))
