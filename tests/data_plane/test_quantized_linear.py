"""Torch's product with a quantized weight, its twin in C++, and which kind is chosen for which weight."""

import pytest
import torch
from torch.testing import assert_close

from blockplane.data_plane.models.linear import TorchLinear
from blockplane.data_plane.models.quantized import WIDTHS, TorchQuantizedLinear, Widths, linear_in
from blockplane.kernels.native import library
from blockplane.kernels.native.quantized import NativeQuantizedLinear
from blockplane.kernels.quantization import quantize

needs_kernels = pytest.mark.skipif(not library.is_there(), reason="no C++ kernels were built for this CPU")


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("out_features", [1, 70, 5000])
def test_products_are_those_with_the_numbers_of_the_codes(bits, dtype, out_features):
    weight, bias, x = (
        tensor.to(dtype) for tensor in (random(out_features, 96), random(out_features), random(3, 96, seed=1))
    )
    linear, exact = TorchQuantizedLinear(weight, bias, bits), x.double() @ quantize(weight, bits).numbers().double().T
    logits = linear.logits(x)
    assert logits.dtype == torch.float32
    assert_close(logits.double(), exact + bias.double(), rtol=1e-5, atol=1e-4)
    assert torch.equal(linear(x), logits.to(dtype))
    assert linear.largest(x) is None


@pytest.mark.parametrize("bits", [8, 4])
def test_embedding_gives_the_numbers_of_the_codes_in_the_weight_s_dtype(bits):
    ids = torch.tensor([0, 69, 5, 5])
    for weight in (random(70, 64), random(70, 64).bfloat16()):
        expected = quantize(weight, bits).numbers()[ids].to(weight.dtype)
        assert torch.equal(TorchQuantizedLinear(weight, None, bits).embed(ids), expected)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_refilled_weight_is_another_in_the_same_place(bits):
    first, second, biases, x = random(70, 64), random(70, 64, seed=1), random(2, 70, seed=2), random(3, 64, seed=3)
    linear = TorchQuantizedLinear(first, biases[0].clone(), bits)
    place = linear._codes.codes.data_ptr()
    linear.refill(second, biases[1])
    assert linear._codes.codes.data_ptr() == place
    assert torch.equal(linear(x), TorchQuantizedLinear(second, biases[1], bits)(x))


@needs_kernels
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("num_rows", [1, 3, 40])
def test_the_twins_differ_by_no_more_than_rounding(bits, num_rows):
    weight, bias, x = (tensor.bfloat16() for tensor in (random(256, 640), random(256), random(num_rows, 640, seed=1)))
    native, twin = NativeQuantizedLinear(weight, bias, bits), TorchQuantizedLinear(weight, bias, bits)
    scale = twin.logits(x).std().item()
    assert_close(native.logits(x), twin.logits(x), rtol=0.0, atol=2**-7 * scale)
    assert_close(native(x), twin(x), rtol=2**-7, atol=2**-6 * scale)
    gated = [NativeQuantizedLinear(weight, None, bits), TorchQuantizedLinear(weight, None, bits)]
    for activation in ("silu", "gelu_tanh"):
        first, second = (linear.gated(x, activation) for linear in gated)
        assert_close(first, second, rtol=2**-5, atol=2**-6 * second.float().std().item())
    ids = torch.tensor([3, 255])
    assert_close(native.embed(ids), twin.embed(ids), rtol=2**-7, atol=0.0)


@pytest.mark.parametrize("bits", [8, 4])
def test_bfloat16_on_a_cpu_takes_the_kernels_and_all_else_torch(bits):
    kind = NativeQuantizedLinear if library.is_there() else TorchQuantizedLinear
    assert type(linear_in(bits, torch.ones(128, 64).bfloat16())) is kind
    assert type(linear_in(bits, torch.ones(128, 64).bfloat16(), is_gated=True)) is kind
    assert type(linear_in(bits, torch.ones(192, 64).bfloat16(), is_gated=True)) is TorchQuantizedLinear
    assert type(linear_in(bits, torch.ones(128, 64))) is TorchQuantizedLinear


def test_weights_of_broken_groups_or_of_no_width_stay_as_they_are():
    assert type(linear_in(8, torch.ones(128, 40))) is TorchLinear
    assert type(linear_in(None, torch.ones(128, 64))) is TorchLinear
    assert {"none": Widths(None, None), "int8": Widths(8, 8), "int4": Widths(8, 4)} == WIDTHS
