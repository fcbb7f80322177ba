"""How codes are chosen: what they stand for is near the weight, and near as few bits can be."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from blockplane.kernels.quantization import GROUP, quantize

SCALES = [1e-6, 0.02, 300.0]


def weights(seed: int, scale: float, offset: float = 0.0, *shape: int) -> torch.Tensor:
    return offset + scale * torch.randn(shape or (7, 3 * GROUP), generator=torch.Generator().manual_seed(seed))


def errors(weight: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Of each group the sum of squares, float64 [out_features, in_features / GROUP]."""
    return (weight.double() - numbers.double()).square().view(len(weight), -1, GROUP).sum(-1)


@pytest.mark.parametrize("bits", [8, 4])
def test_shapes_and_dtypes_are_as_promised(bits):
    codes = quantize(weights(0, 1.0).bfloat16(), bits)
    assert (codes.codes.shape, codes.codes.dtype) == ((7, 96), torch.uint8)
    assert (codes.scales.shape, codes.scales.dtype) == ((7, 3), torch.bfloat16)
    assert (codes.minimums is None) == (bits == 8)
    assert codes.codes.max().item() < 2**bits
    assert codes.numbers().dtype == torch.float32


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(SCALES), st.sampled_from([0.0, 1e-3, 5.0]))
def test_in_eight_bits_no_number_is_off_by_more_than_half_a_scale(seed, scale, offset):
    weight = weights(seed, scale, offset)
    codes = quantize(weight, 8)
    most = weight.view(7, 3, GROUP).abs().amax(-1)
    assert_close(codes.scales.float(), most / 127, rtol=2**-8, atol=0.0)
    half = 0.5 * codes.scales.float().repeat_interleave(GROUP, 1)
    # Each step from code to code is rounded in float32.
    assert ((codes.numbers() - weight).abs() <= half * (1 + 1e-4)).all()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(SCALES))
def test_in_four_bits_errors_are_less_than_those_of_even_steps_from_least_to_largest(seed, scale):
    weight = weights(seed, scale)
    low, high = weight.view(7, 3, GROUP).aminmax(dim=-1, keepdim=True)
    step = (high - low) / 15
    even = (low + step * ((weight.view(7, 3, GROUP) - low) / step).round()).flatten(1)
    ratios = errors(weight, quantize(weight, 4).numbers()) / errors(weight, even)
    assert ratios.mean() < 0.95
    # Scale and minimum are rounded, too.
    assert ratios.max() < 1.05


def test_in_four_bits_numbers_on_sixteen_even_steps_are_kept():
    steps = torch.arange(16).repeat(2)[None].float()
    for weight in (steps, 0.5 * steps - 3, 2 - steps):
        assert torch.equal(quantize(weight, 4).numbers(), weight)


@pytest.mark.parametrize("bits", [8, 4])
def test_groups_of_one_number_keep_it_as_bfloat16_does(bits):
    weight = torch.tensor([0.0, 0.3, -7.1, 1e-20]).repeat_interleave(GROUP)[None]
    assert_close(quantize(weight, bits).numbers(), weight, rtol=2**-8, atol=0.0)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_row_s_codes_depend_on_no_other_row(bits):
    weight = weights(3, 0.1, 0.0, 5000, 2 * GROUP)
    codes, rows = quantize(weight, bits), torch.tensor([4999, 0, 4096, 4095])
    alone, picked = quantize(weight[rows], bits), codes[rows]
    for mine, theirs in ((alone.codes, picked.codes), (alone.scales, picked.scales)):
        assert torch.equal(mine, theirs)
    assert torch.equal(alone.numbers(), codes.numbers()[rows])


@pytest.mark.parametrize("bits", [8, 4])
def test_copied_codes_stand_for_the_other_weight_in_the_same_tensors(bits):
    first, second = quantize(weights(0, 1.0), bits), quantize(weights(1, 1.0), bits)
    place = first.codes.data_ptr()
    first.copy_(second)
    assert torch.equal(first.numbers(), second.numbers())
    assert first.codes.data_ptr() == place
