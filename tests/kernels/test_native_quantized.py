"""The C++ products with quantized weights against exact ones with the numbers that the codes stand for."""

import pytest
import torch
from native_variants import native  # noqa: F401 - a fixture
from torch.nn import functional
from torch.testing import assert_close

from blockplane.kernels.native import linear, quantized
from blockplane.kernels.quantization import quantize

DEPTHS = [32, 96, 640, 2048]
ROUNDING = 2**-8
# The largest row that each variant multiplies in integers.
LARGEST_INTEGER = {"_avx2": 8127, "_avx512": 32639, "_amx": 32639}
TILE_ROWS = 13


@pytest.fixture
def modules():
    return (linear, quantized)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def exact(x: torch.Tensor, weight: torch.Tensor, bits: int, bias: torch.Tensor | None = None) -> torch.Tensor:
    numbers = quantize(weight, bits).numbers().double()
    return x.double() @ numbers.T + (0.0 if bias is None else bias.double())


def bound(variant: str, x: torch.Tensor, weight: torch.Tensor, bits: int) -> torch.Tensor:
    """By how much a product may be off, [num_rows, out_features]: of the activations' rounding or of the weight's."""
    numbers = quantize(weight, bits).numbers().double()
    sizes = x.double().abs() @ numbers.abs().T
    if variant == "_amx" and len(x) >= TILE_ROWS:
        return (2**-8 + 1e-5) * sizes
    half = 0.5 / LARGEST_INTEGER[variant]
    return half * x.double().abs().amax(1, keepdim=True) * numbers.abs().sum(1) + 1e-5 * sizes


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 12, 13, 16, 33, 130, 520])
@pytest.mark.parametrize("out_features", [1, 63, 64, 65, 200])
def test_products_are_those_with_the_numbers_of_the_codes(native, bits, num_rows, out_features):  # noqa: F811
    for depth in DEPTHS:
        x, weight = random(num_rows, depth), random(out_features, depth, seed=1)
        bias = random(out_features, seed=2) if depth == 96 else None
        product, expected = quantized.NativeQuantizedLinear(weight, bias, bits), exact(x, weight, bits, bias)
        logits = product.logits(x)
        assert ((logits.double() - expected).abs() <= bound(native, x, weight, bits) + 1e-6).all()
        assert torch.equal(product(x), logits.bfloat16())


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("size", [1.0, 1e30])
def test_the_largest_sums_of_a_group_do_not_overflow(native, bits, size):  # noqa: F811
    """Every activation is as large as its row's largest, and every code the least or the largest."""
    signs = torch.tensor([1.0, -1.0, 1.0])
    x = (size * signs[:, None]).expand(3, 2048).bfloat16()
    weight = signs[:, None].expand(3, 2048).bfloat16().clone()
    weight[2, ::2] = 0.5
    expected = exact(x, weight, bits)
    assert_close(quantized.NativeQuantizedLinear(weight, None, bits).logits(x).double(), expected, rtol=1e-3, atol=0.0)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_small_number_counts_beside_a_large_one(native, bits):  # noqa: F811
    """It has what is left of 16 bits, or 14, below the row's largest."""
    x, weight = torch.zeros(1, 64).bfloat16(), torch.zeros(1, 64).bfloat16()
    x[0, 0], x[0, 40], weight[0, 40] = 1000.0, 1.0, 1.0
    result = quantized.NativeQuantizedLinear(weight, None, bits).logits(x)
    assert_close(result, torch.ones(1, 1), rtol=0.0, atol=0.5 * 1000 / LARGEST_INTEGER[native] + ROUNDING)


@pytest.mark.parametrize("num_rows", [1, 2, 5, 40])
def test_rows_of_zeros_and_of_tiny_numbers_give_as_much(native, num_rows):  # noqa: F811
    weight = random(65, 96)
    product = quantized.NativeQuantizedLinear(weight, None, 8)
    assert torch.equal(product.logits(torch.zeros(num_rows, 96).bfloat16()), torch.zeros(num_rows, 65))
    tiny = 1e-20 * random(num_rows, 96, seed=1)
    assert_close(product.logits(tiny).double(), exact(tiny, weight, 8), rtol=ROUNDING, atol=1e-21)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("num_rows", [3, 20])
def test_what_is_not_finite_spoils_its_own_row_alone(native, bits, num_rows):  # noqa: F811
    weight, x = random(65, 64), random(num_rows, 64, seed=1)
    whole = quantized.NativeQuantizedLinear(weight, None, bits).logits(x)
    x[1, 5], x[2, 40] = torch.nan, torch.inf
    product = quantized.NativeQuantizedLinear(weight, None, bits)
    output = product.logits(x)
    assert not output[1:3].isfinite().any()
    others = [row for row in range(num_rows) if row not in (1, 2)]
    assert torch.equal(output[others], whole[others])
    assert product.largest(x)[:3].tolist() == [whole[0].argmax(), -1, -1]


@pytest.mark.parametrize("bits", [8, 4])
def test_a_row_s_product_is_the_same_beside_any_others(native, bits):  # noqa: F811
    product, x = quantized.NativeQuantizedLinear(random(130, 128), None, bits), random(12, 128, seed=1)
    together = product.logits(x)
    for count in (1, 2, 3, 7):
        assert torch.equal(product.logits(x[12 - count :]), together[12 - count :])


def test_a_row_of_a_row_view_is_multiplied_as_if_it_were_alone(native):  # noqa: F811
    wide, product = random(9, 128), quantized.NativeQuantizedLinear(random(70, 64, seed=1), None, 8)
    x = wide[:, 32:96]
    assert torch.equal(product(x), product(x.contiguous()))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("num_rows", [1, 9, 40, 520])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_products_are_those_of_both_halves(native, bits, num_rows, activation):  # noqa: F811
    x, weight = random(num_rows, 96), random(256, 96, seed=1)
    product = quantized.NativeQuantizedLinear(weight, None, bits)
    gate, up = product.logits(x).double().chunk(2, dim=-1)
    act = functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")
    assert_close(product.gated(x, activation).double(), act * up, rtol=ROUNDING, atol=1e-5)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("num_rows", [1, 5, 40])
def test_the_largest_output_is_the_first_of_the_largest_logits(native, bits, num_rows):  # noqa: F811
    # Of 2,500 columns each has an equal further on.
    weight, x = random(1250, 64).repeat(2, 1), random(num_rows, 64, seed=1)
    product = quantized.NativeQuantizedLinear(weight, None, bits)
    assert torch.equal(product.largest(x), product.logits(x).argmax(1))
    assert product.largest(x).max() < 1250


@pytest.mark.parametrize("bits", [8, 4])
def test_embedding_gives_the_numbers_of_the_codes_rounded(native, bits):  # noqa: F811
    weight, ids = random(130, 96), torch.tensor([0, 63, 64, 129, 5, 5])
    embedded = quantized.NativeQuantizedLinear(weight, None, bits).embed(ids)
    # The last bit of a product and sum may fall otherwise than a fused one's.
    assert_close(embedded, quantize(weight, bits).numbers()[ids].bfloat16(), rtol=ROUNDING, atol=0.0)
    assert (embedded != quantize(weight, bits).numbers()[ids].bfloat16()).float().mean() < 0.01


@pytest.mark.parametrize("bits", [8, 4])
def test_a_refilled_weight_is_another_in_the_same_place(native, bits):  # noqa: F811
    first, second, biases, x = random(65, 32), random(65, 32, seed=1), random(2, 65, seed=2), random(3, 32, seed=3)
    product = quantized.NativeQuantizedLinear(first, biases[0].clone(), bits)
    place = product._packed.data_ptr()
    product.refill(second, biases[1])
    assert product._packed.data_ptr() == place
    assert torch.equal(product(x), quantized.NativeQuantizedLinear(second, biases[1], bits)(x))


@pytest.mark.parametrize("bits", [8, 4])
def test_a_weight_that_is_packed_in_pieces_is_the_same(native, bits, monkeypatch):  # noqa: F811
    weight, x = random(1000, 64), random(3, 64, seed=1)
    whole = quantized.NativeQuantizedLinear(weight, None, bits).logits(x)
    monkeypatch.setattr(quantized, "_PIECE", 3 * 64 * 64)
    assert torch.equal(quantized.NativeQuantizedLinear(weight, None, bits).logits(x), whole)


@pytest.mark.parametrize(("bits", "bytes_a_number"), [(8, 1 + 2 / 32), (4, 0.5 + 4 / 32)])
def test_a_packed_weight_takes_its_codes_and_scales_and_no_more(native, bits, bytes_a_number):  # noqa: F811
    assert quantized.NativeQuantizedLinear(random(128, 64), None, bits).nbytes == 128 * 64 * bytes_a_number
