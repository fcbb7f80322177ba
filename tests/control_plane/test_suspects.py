"""Who killed the worker: one among many is found within a few losses, and the others are let go."""

import random
from collections.abc import Callable
from math import ceil, log2

import pytest
from driving import make_request
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from blockplane.control_plane.engine.request import Request
from blockplane.control_plane.engine.suspects import MAX_LOSSES_ALONE, Suspects


def make(number: int) -> list[Request]:
    return [make_request(str(index), 3) for index in range(number)]


def try_all(suspects: Suspects, kills: Callable[[list[Request]], bool], limit: int = 1000) -> tuple[int, list[Request]]:
    """Run cohort after cohort until nobody is suspected. Returns how many losses that took, and who was convicted."""
    num_losses, guilty = 0, list[Request]()
    for _ in range(limit):
        if not suspects:
            return num_losses, guilty
        cohort = list(suspects.cohort)
        assert cohort, "as long as anybody is suspected somebody may run"
        if kills(cohort):
            num_losses += 1
            guilty += suspects.lost(cohort)
        else:
            suspects.clear(cohort)
    raise AssertionError("it never ends")


@given(st.integers(1, 300), st.data())
def test_one_killer_among_many_is_convicted_soon_and_alone(number: int, data: st.DataObject) -> None:
    requests = make(number)
    killer = requests[data.draw(st.integers(0, number - 1))]
    suspects = Suspects()
    assert suspects.lost(requests) == []
    num_losses, guilty = try_all(suspects, lambda cohort: killer in cohort)
    assert guilty == [killer]
    assert 1 + num_losses <= ceil(log2(number)) + MAX_LOSSES_ALONE, "the first loss included"


@given(st.sets(st.integers(0, 99)), st.integers(1, 100))
def test_several_killers_are_all_convicted_and_nobody_else(numbers: set[int], number: int) -> None:
    requests = make(number)
    killers = {request for index, request in enumerate(requests) if index in numbers}
    suspects = Suspects()
    suspects.lost(requests)
    _, guilty = try_all(suspects, lambda cohort: not killers.isdisjoint(cohort))
    assert set(guilty) == killers
    assert len(guilty) == len(killers)


@given(st.integers(1, 60), st.integers(0, 2**32))
def test_workers_that_die_by_chance_convict_nobody(number: int, seed: int) -> None:
    """Whoever is alone gets through before the last loss that it may have."""
    rng, requests, suspects = random.Random(seed), make(number), Suspects()
    num_alone: dict[Request, int] = {}

    def dies(cohort: list[Request]) -> bool:
        if len(cohort) > 1:
            return rng.random() < 0.5
        num_alone[cohort[0]] = num_alone.get(cohort[0], 0) + 1
        # The first loss of a lone request counts too.
        return rng.random() < 0.5 and num_alone[cohort[0]] < MAX_LOSSES_ALONE - (number == 1)

    suspects.lost(requests)
    assert try_all(suspects, dies)[1] == []


def test_half_of_the_lost_run_first_and_the_rest_once_they_are_cleared() -> None:
    suspects, requests = Suspects(), make(5)
    suspects.lost(requests)
    assert list(suspects.cohort) == requests[:3]
    assert not suspects.clear(requests[:2]), "the third still runs"
    assert suspects.clear(requests[2:3])
    assert list(suspects.cohort) == requests[3:]
    assert len(suspects) == 2


def test_who_of_the_cohort_was_in_no_step_is_tried_after_those_that_were() -> None:
    suspects, requests = Suspects(), make(8)
    suspects.lost(requests)
    suspects.lost(requests[1:3])
    cohorts = []
    while suspects:
        cohorts.append(list(suspects.cohort))
        suspects.clear(cohorts[-1])
    first, second, third, fourth, *others = requests
    assert cohorts == [[second], [third], [first, fourth], others]


def test_innocents_beside_a_cohort_are_tried_after_all_that_were_suspected_before() -> None:
    suspects, requests, beside = Suspects(), make(4), make(2)
    suspects.lost(requests)
    suspects.lost([*requests[:2], *beside])
    order = []
    while suspects:
        order += suspects.cohort
        suspects.clear(list(suspects.cohort))
    assert order == [*requests, *beside]


def test_a_loss_elsewhere_says_nothing_of_the_cohort() -> None:
    suspects, requests = Suspects(), make(2)
    suspects.lost(requests)
    for _ in range(MAX_LOSSES_ALONE + 1):
        assert suspects.lost(make(1)) == []
        assert list(suspects.cohort) == requests[:1]
    for _ in range(MAX_LOSSES_ALONE - 1):
        assert suspects.lost(requests[:1]) == []
    assert suspects.lost(requests[:1]) == requests[:1]


def test_a_token_in_between_begins_the_count_anew() -> None:
    suspects, (request,) = Suspects(), make(1)
    for _ in range(2 * MAX_LOSSES_ALONE):
        for _ in range(MAX_LOSSES_ALONE - 1):
            assert suspects.lost([request]) == []
        assert suspects.clear([request])
    for _ in range(MAX_LOSSES_ALONE - 1):
        assert suspects.lost([request]) == []
    assert suspects.lost([request]) == [request]
    assert not suspects


class SuspectsWalk(RuleBasedStateMachine):
    """Losses, tokens and ends in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.suspects, self.alive, self.suspected = Suspects(), list[Request](), set[Request]()

    @rule(number=st.integers(1, 9))
    def come(self, number: int) -> None:
        self.alive += make(number)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        """Of those that may run, some were in the step."""
        may_run = [one for one in self.alive if one not in self.suspected or one in self.suspects.cohort]
        lost = data.draw(st.lists(st.sampled_from(may_run), unique=True)) if may_run else []
        guilty = self.suspects.lost(lost)
        self.suspected |= set(lost)
        self.forget(guilty)

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), ends=st.booleans())
    def clear(self, data: st.DataObject, ends: bool) -> None:
        cleared = data.draw(st.lists(st.sampled_from(self.alive), unique=True))
        before = list(self.suspects.cohort)
        changed = self.suspects.clear(cleared)
        self.suspected -= set(cleared)
        assert changed == bool(before and set(before) <= set(cleared)), (
            "the next runs once all of the first are cleared"
        )
        if ends:
            self.forget(cleared)

    def forget(self, requests: list[Request]) -> None:
        self.alive = [one for one in self.alive if one not in requests]
        self.suspected -= set(requests)

    @invariant()
    def each_suspect_is_in_one_cohort(self) -> None:
        members = [one for cohort in self.suspects._cohorts for one in cohort]
        assert len(members) == len(self.suspects)
        assert set(members) == self.suspected
        assert all(self.suspects._cohorts)
        assert all((one in self.suspects) == (one in self.suspected) for one in self.alive)


TestSuspectsWalk = SuspectsWalk.TestCase
TestSuspectsWalk.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("number", [1, 2])
def test_without_suspects_nobody_runs_for_their_sake(number: int) -> None:
    suspects = Suspects()
    assert (len(suspects), list(suspects.cohort), suspects.clear(make(number))) == (0, [], False)
