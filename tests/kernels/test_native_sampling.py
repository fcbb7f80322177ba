"""The C++ sampler against its torch twin: the same tokens from the same noise, row by row, on every variant."""

import math

import numpy as np
import pytest
import torch
from native_variants import native  # noqa: F401 - a fixture

from blockplane.data_plane.drawing import Truncation, draw_from_all, draw_from_likeliest
from blockplane.kernels.native import library, sampling

ALMOST_ONE = 1 - 2**-53
# Around a block of 64 ids, and around as many blocks as a top-k may ask for.
VOCAB_SIZES = [1, 2, 40, 63, 64, 65, 700, 5000]


@pytest.fixture
def modules():
    return (sampling,)


def columns(num_rows, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, noise=None):
    noise = np.random.default_rng(0).random(num_rows) if noise is None else noise
    return {
        "temperature": np.full(num_rows, temperature, np.float64),
        "noise": np.broadcast_to(np.float64(noise), num_rows).copy(),
        "top_k": np.full(num_rows, top_k, np.int64),
        "top_p": np.full(num_rows, top_p, np.float64),
        "min_p": np.full(num_rows, min_p, np.float64),
    }


def drawn(logits, *, may_ban=False, **asked):
    return sampling.sample_rows(logits, **columns(len(logits), **asked), may_ban=may_ban).tolist()


def random_columns(rng, num_rows, vocab_size):
    """Every kind of truncation, alone and with others, at temperatures from cold to hot."""
    return {
        "temperature": rng.choice([1e-3, 0.3, 1.0, 1.7, 50.0], num_rows),
        "noise": rng.random(num_rows),
        "top_k": np.where(rng.random(num_rows) < 0.5, 0, rng.integers(0, vocab_size + 1, num_rows)),
        "top_p": np.where(rng.random(num_rows) < 0.5, 1.0, rng.random(num_rows)),
        "min_p": np.where(rng.random(num_rows) < 0.7, 0.0, rng.random(num_rows) ** 4),
    }


def twin(logits, asked):
    tensors = {name: torch.from_numpy(column) for name, column in asked.items()}
    heat = logits, tensors["temperature"], tensors["noise"]
    truncation = Truncation(tensors["top_k"], tensors["top_p"], tensors["min_p"])
    keeps_all = (truncation.top_k == 0) & (truncation.top_p >= 1) & (truncation.min_p <= 0)
    return torch.where(keeps_all, draw_from_all(*heat), draw_from_likeliest(*heat, truncation)).tolist()


@pytest.mark.parametrize("spread", [0.0, 0.5, 4.0, 60.0])
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_every_truncation_draws_the_token_that_its_twin_draws(native, vocab_size, spread):  # noqa: F811
    rng = np.random.default_rng(vocab_size)
    logits = torch.from_numpy((spread * rng.normal(size=(200, vocab_size))).astype(np.float32))
    # Ties: half of the rows have eighths alone.
    logits[::2] = torch.round(8 * logits[::2]) / 8
    asked = random_columns(rng, 200, vocab_size)
    assert sampling.sample_rows(logits, **asked, may_ban=False).tolist() == twin(logits, asked)


def test_weights_on_the_edges_of_rungs_count_once(native):  # noqa: F811
    """At this temperature a logit less by 1/32 weighs a rung less, exactly; half of them stand a hair above an edge."""
    rng = np.random.default_rng(6)
    logits = torch.from_numpy(rng.integers(-200, 1, (200, 700)).astype(np.float32) / 32)
    logits[:, ::2] = torch.nextafter(logits[:, ::2], torch.tensor(torch.inf))
    asked = random_columns(rng, 200, 700) | {"temperature": np.full(200, math.log2(math.e))}
    assert sampling.sample_rows(logits, **asked, may_ban=False).tolist() == twin(logits, asked)


@pytest.mark.parametrize("truncation", [{}, {"top_k": 2}])
def test_draws_turn_over_where_exact_probabilities_say(native, truncation):  # noqa: F811
    leads = np.linspace(0.01, 9, 500, dtype=np.float32)
    logits = torch.from_numpy(np.stack([np.zeros_like(leads), -leads], axis=1))
    turn = 1 / (1 + np.exp(-leads.astype(np.float64)))
    for shift, token_id in (-1e-15, 0), (1e-15, 1):
        found = drawn(logits, temperature=1.0, noise=turn + shift, **truncation)
        assert found == [token_id] * 500


def test_a_whole_vocabulary_draws_the_tokens_that_its_twin_draws(native):  # noqa: F811
    rng = np.random.default_rng(3)
    logits = torch.from_numpy((2.5 * rng.normal(size=(24, 262_144))).astype(np.float32))
    asked = random_columns(rng, 24, 262_144)
    asked["top_k"][::3] = 64
    assert sampling.sample_rows(logits, **asked, may_ban=False).tolist() == twin(logits, asked)


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_zero_temperature_takes_the_largest_logit_and_the_lowest_of_equal_ids(native, vocab_size):  # noqa: F811
    rng = np.random.default_rng(vocab_size)
    logits = torch.from_numpy(rng.choice(np.float32([-3e38, -1.0, -0.0, 0.0, 1e-40]), (50, vocab_size)))
    assert drawn(logits) == np.argmax(logits.numpy(), axis=1).tolist()


@pytest.mark.parametrize("asked", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 3}])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 63, 64, 129, 130])
def test_a_row_that_is_not_finite_fails_alone(native, asked, poison, place):  # noqa: F811
    logits = torch.randn(3, 131, generator=torch.Generator().manual_seed(0))
    expected = drawn(logits, **asked)
    logits[1, place] = poison
    assert drawn(logits, **asked) == [expected[0], -1, expected[2]]
    assert sampling.find_finite_rows(logits).tolist() == [True, False, True]


@pytest.mark.parametrize(
    "asked", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 131}, {"temperature": 1.0, "top_p": 0.9}]
)
@pytest.mark.parametrize("noise", [0.0, 0.5, ALMOST_ONE])
def test_what_is_banned_never_comes_and_a_row_without_the_rest_fails(native, asked, noise):  # noqa: F811
    logits = torch.full((3, 131), -torch.inf)
    logits[0, 130] = -1e30
    logits[2, [5, 70]] = 1.0
    first, none, either = drawn(logits, may_ban=True, noise=noise, **asked)
    assert (first, none) == (130, -1)
    assert either == (70 if asked and noise >= 0.5 else 5)


@pytest.mark.parametrize("truncation", [{}, {"top_k": 3}, {"top_k": 131}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_a_nan_beside_what_is_banned_does_no_harm(native, truncation):  # noqa: F811
    logits = torch.randn(64, 131, generator=torch.Generator().manual_seed(0))
    logits[:, ::3] = -torch.inf
    expected = drawn(logits, may_ban=True, temperature=1.0, **truncation)
    logits[::2, 5:120:4] = torch.nan
    found = drawn(logits, may_ban=True, temperature=1.0, **truncation)
    assert found[1::2] == expected[1::2]
    assert all(-1 <= token_id < 131 for token_id in found)


@pytest.mark.parametrize("top_p", [0.5, 1 - 1e-9, 1 - 2**-53])
@pytest.mark.parametrize("noise", [0.0, 1e-300, ALMOST_ONE])
def test_noise_at_either_end_draws_a_token_all_the_same(native, top_p, noise):  # noqa: F811
    logits = 9 * torch.randn(40, 5000, generator=torch.Generator().manual_seed(4))
    found = drawn(logits, temperature=1.0, top_p=top_p, noise=noise)
    assert min(found) >= 0
    if noise < 0.5:
        assert found == logits.argmax(1).tolist()


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-30])
@pytest.mark.parametrize("truncation", [{}, {"top_k": 20}, {"top_p": 0.99}, {"min_p": 0.5}, {"min_p": 1.0}])
def test_a_temperature_close_to_zero_leaves_the_likeliest(native, temperature, truncation):  # noqa: F811
    logits = torch.randn(20, 300, generator=torch.Generator().manual_seed(1))
    assert drawn(logits, temperature=temperature, noise=ALMOST_ONE, **truncation) == logits.argmax(1).tolist()


def test_a_temperature_without_bounds_makes_all_alike(native):  # noqa: F811
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(1))
    assert drawn(logits, temperature=1e308, noise=0.5) == [150] * 4
    last_of_ten = logits.argsort(1, descending=True)[:, 9].tolist()
    assert drawn(logits, temperature=1e308, noise=ALMOST_ONE, top_k=10) == last_of_ten


def test_rows_may_lie_apart_and_are_not_changed(native):  # noqa: F811
    whole = torch.randn(6, 400, generator=torch.Generator().manual_seed(2))
    before, part = whole.clone(), whole[::2, 7:300]
    assert sampling.takes_logits(part)
    for asked in {}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}:
        assert drawn(part, **asked) == drawn(part.contiguous(), **asked)
    assert torch.equal(whole, before)


def test_neither_batch_mates_nor_threads_change_a_row(native):  # noqa: F811
    rng = np.random.default_rng(5)
    logits = torch.from_numpy(rng.normal(size=(40, 3000)).astype(np.float32))
    asked = random_columns(rng, 40, 3000)
    together = sampling.sample_rows(logits, **asked, may_ban=False).tolist()
    library.set_num_threads(1)
    alone = [
        sampling.sample_rows(
            logits[row : row + 1], **{name: column[row : row + 1] for name, column in asked.items()}, may_ban=False
        ).item()
        for row in range(40)
    ]
    assert together == alone


@pytest.mark.parametrize("vocab_size", [1, 20, 65, 4000])
def test_what_is_told_is_an_exact_log_softmax_in_order(native, vocab_size):  # noqa: F811
    logits = torch.round(4 * torch.randn(6, vocab_size, generator=torch.Generator().manual_seed(9))) / 2
    own = np.arange(6) % vocab_size
    asked = np.minimum(np.array([0, 1, 20, 3, 20, 0], np.int32), vocab_size)
    ids, logprobs = sampling.tell_rows(logits, own, asked)
    exact = torch.log_softmax(logits.double(), 1)
    order = exact.argsort(dim=1, descending=True, stable=True)
    for row, count in enumerate(asked):
        wanted = [own[row], *order[row, :count].tolist()]
        assert ids[row, : 1 + count].tolist() == wanted
        assert logprobs[row, : 1 + count] == pytest.approx(exact[row, wanted].numpy(), abs=1e-6)


def test_of_a_row_that_is_not_finite_nothing_is_known(native):  # noqa: F811
    logits = torch.zeros(2, 100)
    logits[0, 3] = torch.nan
    _, logprobs = sampling.tell_rows(logits, np.zeros(2, np.int64), np.full(2, 4, np.int32))
    assert np.isnan(logprobs[0]).all()
    assert np.isfinite(logprobs[1]).all()


@pytest.mark.parametrize(
    "logits", [torch.zeros(2, 3, dtype=torch.bfloat16), torch.zeros(3, 2).T, torch.zeros(2, 3, device="meta")]
)
def test_other_logits_are_torch_s(native, logits):  # noqa: F811
    assert not sampling.takes_logits(logits)
