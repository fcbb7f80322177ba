"""What the worker remembers for sampling follows from its rows' tokens alone, and bad admissions are refused."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sampling_cases import CONFIGURE, EOS, VOCAB_SIZE, text_ids, words

from blockplane.data_plane.history import BadWords
from blockplane.data_plane.logit_changes import LogitChanges
from blockplane.data_plane.rows import Rows
from blockplane.data_plane.sampling_rows import SamplingRows
from blockplane.protos.errors import ProtocolError
from blockplane.protos.plan import Admission, Int32Array, StepPlan
from blockplane.protos.sampling import SamplingParams

PENALTIES = SamplingParams(9, presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=1.5)


def column(*values: int) -> Int32Array:
    return np.array(values, np.int32)


def admit(row: int, prompt: list[int], params: SamplingParams, output: tuple[int, ...] = ()) -> Admission:
    return Admission(row, column(*prompt, *output), len(prompt), 0, params, 5)


class Worker:
    """Rows and their sampling side, in step."""

    def __init__(self, *admissions: Admission) -> None:
        self.rows, self.sampling = Rows(CONFIGURE), SamplingRows(CONFIGURE.max_num_seqs, VOCAB_SIZE, EOS)
        self.step = 0
        self.apply(admissions=admissions)

    def apply(self, released: tuple[int, ...] = (), admissions: tuple[Admission, ...] = ()) -> None:
        self.step += 1
        plan = StepPlan(self.step, released_rows=column(*released), admissions=admissions)
        self.rows.apply(plan)
        self.sampling.apply(plan)

    def changes(self, *rows: int, positions: tuple[int, ...] | None = None) -> LogitChanges | None:
        return self.sampling.batch(
            self.rows, column(*rows), None if positions is None else column(*positions)
        ).logit_changes


def comparable(changes: LogitChanges | None) -> object:
    """Each kind of change as a set: their order within a kind means nothing."""
    assert changes is not None
    places = [
        set() if entries is None else {*zip(entries.batch_indices.tolist(), entries.token_ids.tolist(), strict=True)}
        for entries in (changes.allowed, changes.banned, changes.biased)
    ]
    if changes.penalized is None:
        return places
    numbers = np.column_stack([changes.output_counts, changes.penalties]).tolist()
    return places, dict(zip(changes.penalized.token_ids.tolist(), numbers, strict=True))


@given(
    prompt=st.lists(text_ids, min_size=1, max_size=6),
    output=st.lists(text_ids, max_size=12),
    bad_words=st.lists(words, max_size=4).map(tuple),
    min_tokens=st.integers(0, 9),
    looks=st.sets(st.integers(0, 11)),
)
def test_a_row_that_grew_and_one_that_was_admitted_with_all_its_tokens_are_the_same(
    prompt: list[int], output: list[int], bad_words: tuple[tuple[int, ...], ...], min_tokens: int, looks: set[int]
) -> None:
    params = replace(PENALTIES, bad_words=bad_words, min_tokens=min_tokens, stop_token_ids=(3,))
    grown = Worker(admit(2, prompt, params))
    for index, token_id in enumerate(output):
        if index in looks:
            grown.changes(2)
        grown.rows.append(column(2), column(token_id))
    resumed = Worker(admit(5, prompt, params, tuple(output)))
    assert comparable(grown.changes(2)) == comparable(resumed.changes(5))


@given(
    prompt=st.lists(text_ids, min_size=1, max_size=6),
    output=st.lists(text_ids, max_size=6),
    drafts=st.lists(text_ids | st.integers(20, 25), max_size=5),
)
def test_behind_drafts_a_row_is_sampled_as_if_they_were_its_tokens_and_they_are_not(
    prompt: list[int], output: list[int], drafts: list[int]
) -> None:
    params = replace(PENALTIES, bad_words=((1, 2), (20, 3), (4,)), min_tokens=3)
    worker = Worker(admit(2, prompt, params, tuple(output)))
    known = len(prompt) + len(output)
    worker.rows.token_ids[2, known : known + len(drafts)] = drafts
    with_drafts = Worker(admit(2, prompt, params, (*output, *drafts)))
    assert comparable(worker.changes(2, positions=(known + len(drafts),))) == comparable(with_drafts.changes(2))
    without = Worker(admit(2, prompt, params, tuple(output)))
    assert comparable(worker.changes(2)) == comparable(without.changes(2))


@pytest.mark.parametrize(
    ("text", "banned"),
    [([5], [8]), ([4], [8, 1]), ([4, 1], [8, 2]), ([9, 4, 1], [8, 2]), ([4, 1, 1], [8]), ([1, 4], [8, 1])],
)
def test_an_id_is_banned_where_it_would_complete_a_word(text: list[int], banned: list[int]) -> None:
    assert BadWords(((8,), (4, 1, 2), (4, 1))).banned_after(column(*text)) == banned


def test_ends_may_not_come_before_min_tokens_and_may_from_then_on() -> None:
    params = SamplingParams(9, min_tokens=2, stop_token_ids=(3,))
    worker = Worker(admit(0, [1], params), admit(1, [1], replace(params, ignore_eos=True)))
    for _ in range(2):
        changes = worker.changes(0, 1)
        assert changes is not None
        assert changes.banned is not None
        assert changes.banned.token_ids.tolist() == [3, *EOS, 3]
        worker.rows.append(column(0, 1), column(4, 4))
    changes = worker.changes(0, 1)
    assert changes is not None
    assert changes.banned is None


def test_an_end_of_text_that_the_logits_do_not_reach_is_not_banned() -> None:
    sampling, rows = SamplingRows(CONFIGURE.max_num_seqs, VOCAB_SIZE, (2, VOCAB_SIZE)), Rows(CONFIGURE)
    plan = StepPlan(1, admissions=(admit(0, [1], SamplingParams(9, min_tokens=1)),))
    rows.apply(plan)
    sampling.apply(plan)
    changes = sampling.batch(rows, column(0)).logit_changes
    assert changes is not None
    assert changes.banned is not None
    assert changes.banned.token_ids.tolist() == [2]


def test_rows_that_ask_for_nothing_cost_no_changes() -> None:
    worker = Worker(admit(0, [1], SamplingParams(9, 0.5, top_k=3)), admit(1, [1], PENALTIES))
    assert worker.changes(0) is None
    assert worker.changes(0, 1) is not None


def test_a_row_s_next_request_inherits_nothing() -> None:
    worker = Worker(admit(0, [1, 2], replace(PENALTIES, temperature=0.5, top_k=3, top_p=0.5, min_p=0.1)))
    worker.apply(released=(0,), admissions=(admit(0, [4], SamplingParams(9)),))
    batch = worker.sampling.batch(worker.rows, column(0))
    assert batch.logit_changes is None
    assert [batch.temperature[0], batch.top_k[0], batch.top_p[0], batch.min_p[0]] == [0, 0, 1, 0]


def test_a_batch_holds_each_row_s_seed_position_and_parameters() -> None:
    params = SamplingParams(9, 0.5, top_k=2**31 - 1, top_p=0.25, min_p=0.125)
    worker = Worker(replace(admit(6, [1, 2, 3], params), seed=2**64 - 1), admit(1, [1], SamplingParams(9)))
    batch = worker.sampling.batch(worker.rows, column(6, 1))
    assert [int(seed) for seed in batch.seed] == [2**64 - 1, 5]
    assert batch.positions.tolist() == [3, 1]
    assert batch.temperature.tolist() == [0.5, 0]
    assert batch.top_k.tolist() == [VOCAB_SIZE, 0]
    assert (batch.top_p[0], batch.min_p[0]) == (0.25, 0.125)


@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_token_ids": (VOCAB_SIZE,)},
        {"logit_bias": ((-1, 1.0),)},
        {"bad_words": ((VOCAB_SIZE, 1),)},
        {"stop_token_ids": (VOCAB_SIZE,)},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"logprobs": 21},
    ],
)
def test_an_admission_that_asks_for_what_cannot_be_is_a_bad_plan_that_names_the_field(
    fields: dict[str, object],
) -> None:
    (field,) = fields
    with pytest.raises(ProtocolError, match=field):
        Worker(admit(0, [1], SamplingParams(9, **fields)))  # type: ignore[arg-type]
