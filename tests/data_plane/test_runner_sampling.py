"""A request's tokens on the synthetic model depend on its text, parameters and seed alone, however it is scheduled."""

from dataclasses import replace
from itertools import pairwise

import pytest
from engine_player import MAX_SEGMENT, EnginePlayer

from blockplane.data_plane.models.synthetic import SyntheticModel
from blockplane.data_plane.models.synthetic_arithmetic import EOS_TOKEN_ID
from blockplane.protos.plan import Configure
from blockplane.protos.sampling import SamplingParams

CONFIGURE = Configure(4, 400, 128, num_batched_tokens_buckets=(16, 256), num_seqs_buckets=(1, 4))
PROMPT = [(7 * index) % 250 for index in range(45)]
NUM_TOKENS, SEED = 24, 42

PARAMS = {
    "greedy": SamplingParams(99),
    "random": SamplingParams(99, 9.0),
    "truncated": SamplingParams(99, 6.0, top_k=50, top_p=0.9, min_p=0.01),
    "top_p": SamplingParams(99, 3.0, top_p=0.7),
    "penalties": SamplingParams(99, 6.0, presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.3),
    "greedy_penalties": SamplingParams(99, presence_penalty=2.0, frequency_penalty=2.0, repetition_penalty=2.0),
    "words": SamplingParams(
        99,
        2.0,
        allowed_token_ids=tuple(range(0, 258, 3)),
        bad_words=((3,), (6, 6), (9, 12)),
        logit_bias=((3, 8.0), (6, 10.0), (9, 10.0), (12, 10.0)),
        min_tokens=NUM_TOKENS,
    ),
}


def player(max_segment: int = MAX_SEGMENT) -> EnginePlayer:
    return EnginePlayer(SyntheticModel("float32"), CONFIGURE, max_segment)


def output_of(engine: EnginePlayer, row: int, num_tokens: int = NUM_TOKENS) -> list[int]:
    while len(engine.texts[row]) < len(PROMPT) + num_tokens:
        engine.step()
    return engine.texts[row][len(PROMPT) :]


def alone(params: SamplingParams) -> list[int]:
    engine = player()
    engine.admit(0, PROMPT, params=params, seed=SEED)
    return output_of(engine, 0)


@pytest.mark.parametrize("name", PARAMS)
def test_seed_42_gives_the_same_tokens_alone_with_mates_chunked_and_preempted(name: str) -> None:
    params = PARAMS[name]
    expected = alone(params)
    engine = player(max_segment=4)
    for row, mate in enumerate((PARAMS["random"], PARAMS["truncated"], PARAMS["words"])):
        engine.admit(row, PROMPT[: 5 + row], params=mate, seed=row)
    engine.admit(3, PROMPT, params=params, seed=SEED)
    begun = output_of(engine, 3, 7)
    assert begun == expected[:7]
    # Its row goes to another request, and it goes on in the row of one that ends.
    engine.release(3)
    engine.release(1)
    engine.admit(3, PROMPT[:9], params=PARAMS["penalties"], seed=9)
    engine.admit(1, PROMPT, output=tuple(begun), params=params, seed=SEED)
    assert output_of(engine, 1) == expected


def test_other_seeds_give_other_tokens() -> None:
    engine = player()
    for row in range(4):
        engine.admit(row, PROMPT, params=PARAMS["random"], seed=row)
    outputs = [output_of(engine, row) for row in range(4)]
    assert len({tuple(output) for output in outputs}) == 4


def test_bans_hold_over_a_whole_output_that_would_break_them() -> None:
    output, free = alone(PARAMS["words"]), alone(replace(PARAMS["words"], bad_words=(), allowed_token_ids=None))
    assert {token_id % 3 for token_id in output} == {0}
    assert {token_id % 3 for token_id in free} > {0}
    assert 3 not in output
    assert 3 in free
    assert not {(6, 6), (9, 12)} & {*pairwise(output)}
    assert {(6, 6), (9, 12)} <= {*pairwise(free)}


def test_a_strong_frequency_penalty_keeps_a_greedy_text_from_repeating_itself() -> None:
    biased = SamplingParams(99, logit_bias=((5, 50.0), (6, 49.0)))
    assert set(alone(biased)) == {5}
    penalized = SamplingParams(99, logit_bias=((5, 50.0), (6, 49.0)), frequency_penalty=2.0)
    counts = [alone(penalized).count(token_id) for token_id in (5, 6)]
    assert abs(counts[0] - counts[1]) <= 1
    assert sum(counts) == NUM_TOKENS


def test_the_end_of_the_text_comes_right_after_min_tokens_where_it_is_the_likeliest() -> None:
    """And at once where nothing forbids it; `ignore_eos` lets it pass as any other token."""
    bias = ((EOS_TOKEN_ID, 100.0),)
    assert alone(SamplingParams(99, logit_bias=bias))[0] == EOS_TOKEN_ID
    assert alone(SamplingParams(99, logit_bias=bias, min_tokens=6)).index(EOS_TOKEN_ID) == 6
    assert alone(SamplingParams(99, logit_bias=bias, min_tokens=6, ignore_eos=True))[0] == EOS_TOKEN_ID
