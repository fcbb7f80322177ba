"""Torch's own product with a weight, and which kind is chosen. The C++ one has tests beside the kernels."""

import pytest
import torch
from torch.nn import functional
from torch.testing import assert_close

from blockplane.data_plane.models.linear import TorchLinear, fastest_linear
from blockplane.kernels.native import library
from blockplane.kernels.native.linear import NativeLinear


def test_logits_are_the_product_in_float32():
    x, linear = torch.randn(3, 24).bfloat16(), TorchLinear(torch.randn(10, 24).bfloat16(), torch.randn(10).bfloat16())
    assert linear(x).dtype == torch.bfloat16
    assert torch.equal(linear.logits(x), linear(x).float())


@pytest.mark.parametrize(("activation", "function"), [("silu", functional.silu), ("gelu_tanh", functional.gelu)])
def test_gated_products_are_those_of_both_halves(activation, function):
    x, weight = torch.randn(3, 24), torch.randn(20, 24)
    expected = function(x @ weight[:10].T, **({"approximate": "tanh"} if activation == "gelu_tanh" else {}))
    assert_close(TorchLinear(weight).gated(x, activation), expected * (x @ weight[10:].T))


def test_embedding_gives_the_weights_own_rows():
    weight, ids = torch.randn(64, 24), torch.tensor([0, 63, 5, 5])
    assert torch.equal(TorchLinear(weight).embed(ids), weight[ids])


def test_a_refilled_weight_is_another_in_the_same_place():
    first, second, biases, x = torch.randn(7, 24), torch.randn(7, 24), torch.randn(2, 7), torch.randn(3, 24)
    linear, expected = TorchLinear(first, biases[0].clone()), TorchLinear(second.clone(), biases[1])
    linear.refill(second, biases[1])
    assert linear._weight.data_ptr() == first.data_ptr()
    assert torch.equal(linear(x), expected(x))


def test_only_what_the_cpp_kernels_lack_is_left_to_torch():
    assert type(fastest_linear(torch.ones(128, 64))) is TorchLinear
    kind = NativeLinear if library.is_there() else TorchLinear
    assert type(fastest_linear(torch.ones(128, 64).bfloat16())) is kind
