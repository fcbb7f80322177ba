"""The sampler: exact where it is greedy, distributed as it should be where it is not, and deaf to batch-mates."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from blockplane.data_plane.sampler import NOT_FINITE, sample, uniform_noise


def draw(logits: torch.Tensor, temperature: float, seed: int = 1, position: int = 0) -> list[int]:
    num_rows = len(logits)
    return sample(
        logits,
        np.full(num_rows, temperature, np.float32),
        np.full(num_rows, seed, np.uint64),
        np.arange(position, position + num_rows, dtype=np.int32),
    ).tolist()


def test_zero_temperature_takes_the_largest_logit() -> None:
    logits = torch.randn(5, 100)
    assert draw(logits, 0.0) == logits.argmax(-1).tolist()


def test_rows_of_one_batch_mix_greedy_and_random() -> None:
    logits = torch.zeros(2, 1000)
    logits[:, 3] = 0.5
    greedy, random = sample(
        logits, np.array([0, 5], np.float32), np.array([9, 9], np.uint64), np.array([0, 0], np.int32)
    )
    assert greedy == 3
    assert random != 3


def test_frequencies_follow_the_softmax_at_the_temperature() -> None:
    temperature, num_rows = 0.7, 40_000
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0, -5.0])
    drawn = draw(logits.expand(num_rows, -1), temperature)
    expected = torch.softmax(logits / temperature, -1)
    observed = torch.bincount(torch.tensor(drawn), minlength=5) / num_rows
    tolerance = 4 * torch.sqrt(expected * (1 - expected) / num_rows)
    assert (torch.abs(observed - expected) <= tolerance + 1e-4).all()


def test_a_token_of_no_probability_is_never_drawn() -> None:
    logits = torch.full((2000, 8), -200.0)
    logits[:, 5] = 0.0
    assert set(draw(logits, 1.0)) == {5}


@given(st.integers(0, 2**64 - 1), st.integers(0, 30_000), st.integers(0, 6))
def test_batch_mates_and_the_place_in_the_batch_change_nothing(seed: int, position: int, place: int) -> None:
    generator = torch.Generator().manual_seed(seed % 2**32)
    logits = torch.randn(1, 50, generator=generator)
    alone = draw(logits, 1.0, seed, position)
    mates = torch.randn(7, 50, generator=generator)
    mates[place] = logits[0]
    seeds = np.arange(7, dtype=np.uint64)
    positions = np.full(7, 3, np.int32)
    seeds[place], positions[place] = seed, position
    assert sample(mates, np.full(7, 1.0, np.float32), seeds, positions)[place] == alone[0]


def test_seeds_and_positions_give_other_noise() -> None:
    seeds = np.arange(1000, dtype=np.uint64)
    noise = uniform_noise(np.repeat(seeds, 50), np.tile(np.arange(50, dtype=np.int32), 1000))
    assert len(np.unique(noise)) == len(noise)
    assert ((noise >= 0) & (noise < 1)).all()


def test_noise_is_uniform_and_unrelated_from_position_to_position() -> None:
    noise = uniform_noise(np.full(20_000, 42, np.uint64), np.arange(20_000, dtype=np.int32))
    assert abs(noise.mean() - 0.5) < 0.01
    counts = np.histogram(noise, bins=20, range=(0, 1))[0]
    assert (abs(counts - 1000) < 160).all()
    assert abs(np.corrcoef(noise[:-1], noise[1:])[0, 1]) < 0.03


def test_noise_is_splitmix64_of_the_seed() -> None:
    """The first outputs of SplitMix64 seeded with 1234567, as its authors' reference code gives them."""
    reference = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    noise = uniform_noise(np.full(3, 1234567, np.uint64), np.arange(3, dtype=np.int32))
    assert noise.tolist() == [(value >> 11) * 2.0**-53 for value in reference]


def test_a_row_that_is_not_finite_fails_alone() -> None:
    for poison in (float("nan"), float("inf"), float("-inf")):
        logits = torch.randn(3, 20)
        expected = logits.argmax(-1).tolist()
        logits[1, 7] = poison
        assert draw(logits, 0.0) == [expected[0], NOT_FINITE, expected[2]]
        assert draw(logits, 1.0)[1] == NOT_FINITE
