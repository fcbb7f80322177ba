"""Bugs that a kernel could have, each seeded into its source: every one shows, by a broken rule or a wrong result.

That is what the other tests of these kernels are worth: a bug that passed here would pass there.
"""

import pytest
from bug_cases import CASES
from kernel_bugs import BUGS
from seeded_bugs import Bug, seeded

errors = pytest.importorskip("nki_machine.errors", reason="bugs are seeded for the emulator, and here is AWS's nki")

QUICK = (
    "padding is an error",
    "values are not cleared",
    "the mask is off by one",
    "the length is off by the new tokens",
)
"""Of all kernels, and of both ways to show, for the quick gate."""


def shows(bug: Bug) -> bool:
    """Whether it breaks a rule or changes the result."""
    with seeded(bug):
        try:
            return not CASES[bug.case]()
        except errors.RuleError:
            return True


@pytest.mark.parametrize("bug", [bug for bug in BUGS if bug.name in QUICK], ids=lambda bug: bug.name)
def test_a_bug_shows(bug: Bug) -> None:
    assert shows(bug)


@pytest.mark.slow
@pytest.mark.parametrize("bug", [bug for bug in BUGS if bug.name not in QUICK], ids=lambda bug: bug.name)
def test_any_bug_shows(bug: Bug) -> None:
    assert shows(bug)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_without_a_bug_every_case_is_right(case: str) -> None:
    assert CASES[case]()


def test_bugs_are_many_and_of_every_kernel() -> None:
    assert len({bug.name for bug in BUGS}) == len(BUGS) >= 25
    assert {bug.case for bug in BUGS} == {*CASES}
