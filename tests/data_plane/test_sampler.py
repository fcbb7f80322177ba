"""The sampler: every parameter means what its plain definition says, and batch-mates change nothing."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sampling_cases import EOS, VOCAB_SIZE, Case, batch_of, cases, changes, temperatures, truncations
from sampling_reference import changed_logits, left
from sampling_ways import way  # noqa: F401 - a fixture

from blockplane.data_plane.drawing import uniform_noise
from blockplane.data_plane.sampler import NO_LOGPROBS, NOT_FINITE, SamplingBatch, sample
from blockplane.protos.sampling import SamplingParams

GREEDY = st.just(0.0)


def plain_batch(
    temperature: float | Sequence[float],
    seed: Sequence[int],
    positions: Sequence[int],
    params: SamplingParams | None = None,
) -> SamplingBatch:
    """Rows that differ in temperature, seed and position, and cut off alike."""
    num_rows, params = len(seed), params or SamplingParams(1)
    return SamplingBatch(
        seed=np.array(seed, np.uint64),
        positions=np.array(positions, np.int32),
        temperature=np.broadcast_to(np.array(temperature, np.float64), num_rows).copy(),
        top_k=np.full(num_rows, params.top_k, np.int64),
        top_p=np.full(num_rows, params.top_p),
        min_p=np.full(num_rows, params.min_p),
        num_logprobs=np.full(num_rows, NO_LOGPROBS, np.int32),
    )


def draw(logits: torch.Tensor, temperature: float, seed: int = 1, position: int = 0) -> list[int]:
    num_rows = len(logits)
    positions = range(position, position + num_rows)
    return sample(logits, plain_batch(temperature, [seed] * num_rows, positions)).token_ids.tolist()


def drawn(*chosen: Case, places: list[int] | None = None) -> list[int]:
    return sample(*batch_of(list(chosen), places)).token_ids.tolist()


def expected(case: Case) -> int:
    """By the plain definition. Drops a case in which rounding decides."""
    logits = changed_logits(case.logits, case.params, case.prompt, case.output, EOS)
    if logits.max() == -np.inf:
        return NOT_FINITE
    if not case.params.temperature:
        return int(logits.argmax())
    rest = left(logits, case.params)
    position = len(case.prompt) + len(case.output)
    noise = uniform_noise(np.array([case.seed], np.uint64), np.array([position], np.int32))
    token_id, margin = rest.draw(float(noise[0]))
    assume(min(margin, rest.margin) > 1e-9)
    return token_id


# -- every parameter ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", sorted(truncations | changes))
@pytest.mark.parametrize("temperature", [GREEDY, temperatures], ids=["greedy", "random"])
@settings(max_examples=40)
@given(data=st.data())
def test_each_parameter_means_what_its_definition_says(
    temperature: st.SearchStrategy[float], field: str, data: st.DataObject
) -> None:
    given_fields = {field: (truncations | changes)[field]}
    if field in ("ignore_eos", "stop_token_ids"):
        given_fields["min_tokens"] = st.just(6)
    case = data.draw(cases(temperature, **given_fields))
    assert drawn(case) == [expected(case)]


@given(case=cases(GREEDY | temperatures, **truncations, **changes))
def test_all_parameters_together_mean_what_their_definitions_say(case: Case) -> None:
    assert drawn(case) == [expected(case)]


@given(case=cases(temperatures), temperature=st.sampled_from([5e-324, 1e-300, 1e-30]))
def test_a_temperature_close_to_zero_leaves_the_likeliest(case: Case, temperature: float) -> None:
    best = np.flatnonzero(case.logits == case.logits.max()).tolist()
    batch = plain_batch(temperature, [case.seed], [3])
    assert sample(torch.from_numpy(case.logits[None]), batch).token_ids[0] in best


def test_logits_that_a_repetition_penalty_makes_too_large_for_a_float32_are_still_numbers() -> None:
    params = SamplingParams(9, 1.0, repetition_penalty=5e-324)
    logits = np.arange(VOCAB_SIZE, dtype=np.float32)
    assert {drawn(Case(params, seed, [3, 4], [4], logits))[0] for seed in range(20)} == {3, 4}


def test_zero_temperature_takes_the_largest_logit_and_the_lowest_of_equal_ids() -> None:
    logits = torch.randn(5, 100)
    logits[2, [9, 30, 60]] = 50.0
    tokens = draw(logits, 0.0)
    assert tokens == logits.argmax(-1).tolist()
    assert tokens[2] == 9


# -- batches -----------------------------------------------------------------------------------------------------------

ANY_CASE = cases(GREEDY | temperatures, **truncations, **changes) | cases(GREEDY) | cases(temperatures)


@given(chosen=st.lists(ANY_CASE, min_size=1, max_size=8), places=st.permutations(range(8)))
def test_batch_mates_and_the_place_in_the_batch_change_nothing(chosen: list[Case], places: list[int]) -> None:
    together = drawn(*chosen, places=places[: len(chosen)])
    assert together == [drawn(case)[0] for case in chosen]


def test_a_batch_that_asks_for_no_change_leaves_the_logits_as_they_are() -> None:
    logits = torch.randn(3, 50)
    before = logits.clone()
    sample(logits, plain_batch([0.0, 1.0, 2.0], [1, 2, 3], [0, 0, 0], SamplingParams(1, top_k=5, top_p=0.5)))
    assert torch.equal(logits, before)


def test_a_row_that_is_not_finite_fails_alone() -> None:
    for poison in (float("nan"), float("inf"), float("-inf")):
        logits = torch.randn(3, 20)
        best = logits.argmax(-1).tolist()
        logits[1, 7] = poison
        assert draw(logits, 0.0) == [best[0], NOT_FINITE, best[2]]
        for params in (SamplingParams(1), SamplingParams(1, top_k=3), SamplingParams(1, top_p=0.5, min_p=0.01)):
            batch = plain_batch([0.0, 1.0, 1.0], [1, 2, 3], [0, 0, 0], params)
            tokens = sample(logits, batch).token_ids.tolist()
            assert tokens[:2] == [best[0], NOT_FINITE]
            assert 0 <= tokens[2] < 20


def test_a_row_that_is_not_finite_fails_though_its_bad_entries_are_banned() -> None:
    logits = np.zeros(VOCAB_SIZE, np.float32)
    logits[5] = np.nan
    assert drawn(Case(SamplingParams(9, allowed_token_ids=(3, 4)), 1, [1], [], logits)) == [NOT_FINITE]


def test_a_row_to_which_no_token_is_left_fails_alone() -> None:
    logits = np.arange(VOCAB_SIZE, dtype=np.float32)
    for temperature in (0.0, 1.0):
        empty = SamplingParams(9, temperature, allowed_token_ids=(3,), bad_words=((3,),))
        mate = Case(SamplingParams(9), 1, [1], [], logits)
        assert drawn(Case(empty, 1, [1], [], logits), mate) == [NOT_FINITE, VOCAB_SIZE - 1]


# -- distributions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(1, 0.7),
        SamplingParams(1, 1.3, top_k=5),
        SamplingParams(1, 1.0, top_p=0.8),
        SamplingParams(1, 2.0, min_p=0.2),
        SamplingParams(1, 1.5, top_k=20, top_p=0.9, min_p=0.05),
    ],
)
def test_frequencies_follow_the_definition_s_probabilities(params: SamplingParams) -> None:
    """Chi-square over the positions of one seed; its mean is the degrees of freedom, its variance twice that."""
    num_draws = 20_000
    logits = torch.randn(30, generator=torch.Generator().manual_seed(5)) * 1.5
    batch = plain_batch(params.temperature, [42] * num_draws, range(num_draws), params)
    tokens = sample(logits.expand(num_draws, -1), batch).token_ids
    probabilities = left(logits.numpy(), params).probabilities(30)
    counts = np.bincount(tokens, minlength=30)
    assert not counts[probabilities == 0].any()
    common = probabilities * num_draws >= 10
    wanted = probabilities[common] * num_draws
    freedom = common.sum() - 1
    assert freedom >= 2
    assert ((counts[common] - wanted) ** 2 / wanted).sum() < freedom + 4 * np.sqrt(2 * freedom)


def test_a_token_of_no_probability_is_never_drawn() -> None:
    logits = torch.full((2000, 8), -200.0)
    logits[:, 5] = 0.0
    assert set(draw(logits, 1.0)) == {5}


# -- noise -------------------------------------------------------------------------------------------------------------


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
