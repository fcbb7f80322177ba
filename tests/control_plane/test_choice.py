"""The rule by which one of several groups gets a request, by itself."""

from hypothesis import example, given
from hypothesis import strategies as st

from blockplane.control_plane.engine.choice import Candidate, in_order_of_choice

NUM_TOKENS = 2048

candidates = st.lists(
    st.builds(
        Candidate,
        num_shared=st.sampled_from((0, 16, 1024, 2032)),
        load=st.integers(0, 20_000),
        num_coming=st.integers(0, 2032),
        last_turn=st.integers(0, 9),
    ),
    min_size=1,
    max_size=9,
)
percents = st.integers(0, 100)


def best(*groups: tuple[int, ...], percent: int = 20) -> int:
    return in_order_of_choice([Candidate(*group) for group in groups], NUM_TOKENS, percent)[0]


def is_over(group: Candidate, groups: list[Candidate], percent: int) -> bool:
    """Above the mean by more than the percentage and an eighth of what it shares, or of the request."""
    mean = sum(group.load for group in groups) / len(groups)
    return group.load - group.num_coming > mean * (1 + percent / 100) + (group.num_shared or NUM_TOKENS) // 8


@given(candidates, percents)
def test_everybody_has_a_place_and_the_first_shares_most_of_all_within_the_bound(
    groups: list[Candidate], percent: int
) -> None:
    order = in_order_of_choice(groups, NUM_TOKENS, percent)
    assert sorted(order) == list(range(len(groups)))
    first = groups[order[0]]
    assert not is_over(first, groups, percent)
    assert first.num_shared == max(group.num_shared for group in groups if not is_over(group, groups, percent))


@given(candidates, percents)
@example([Candidate(1024, 5000), Candidate(0, 0), Candidate(0, 9000)], 20)
def test_who_is_over_the_bound_comes_last_and_the_least_loaded_of_those_first(
    groups: list[Candidate], percent: int
) -> None:
    over = [index for index, group in enumerate(groups) if is_over(group, groups, percent)]
    last = in_order_of_choice(groups, NUM_TOKENS, percent)[len(groups) - len(over) :]
    assert last == sorted(over, key=lambda index: groups[index].load)


def test_a_long_prefix_is_worth_a_load_within_the_bound_and_no_more() -> None:
    """The mean is 5,000: 6,000 and an eighth of what the prefix saves are allowed."""
    assert best((800, 6100), (0, 3900)) == 0
    assert best((800, 6101), (0, 3899)) == 1
    assert best((800, 5100), (0, 4900), percent=0) == 0
    assert best((800, 5102), (0, 4898), percent=0) == 1


def test_a_request_is_no_imbalance_where_there_are_no_others() -> None:
    assert best((1024, 96), (0, 0), (0, 0), (0, 0)) == 0
    assert best((16, 96), (0, 0), (0, 0), (0, 0)) == 1, "one block is sooner computed anew than waited for"


def test_what_others_compute_of_its_own_tokens_sends_nobody_away() -> None:
    assert best((1024, 1120, 1024), (0, 0), (0, 0), (0, 0)) == 0
    assert best((1024, 1120), (0, 0), (0, 0), (0, 0)) == 1


def test_two_that_share_equally_much_share_the_load_and_the_first_is_enough_for_little() -> None:
    assert best((1024, 9000), (1024, 10_000)) == 0
    assert best((1024, 10_000), (1024, 9000)) == 1
    assert best((1024, 128), (1024, 0)) == 0
    assert best((1024, 129), (1024, 0)) == 1


def test_who_shares_nothing_goes_to_the_least_load_and_takes_turns_among_equals() -> None:
    assert best((0, 300, 0, 1), (0, 0, 0, 9)) == 1
    assert best((0, 7, 0, 3), (0, 7, 0, 1), (0, 7, 0, 2)) == 1
    assert best((0, 0, 0, 3), (0, 256, 0, 1), (0, 257, 0, 0)) == 1, "an eighth of the request is no difference"
