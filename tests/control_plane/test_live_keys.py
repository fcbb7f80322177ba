"""What a group's live requests compute, counted by key: it grows and shrinks with them, and nothing stays behind."""

from collections import Counter

from driving import make_request
from hypothesis import given
from hypothesis import strategies as st

from blockplane.control_plane.engine.live_keys import LiveKeys
from blockplane.control_plane.engine.request import Request

chains = st.lists(st.integers(0, 2), max_size=5)
moves = st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=40)


def keyed(number: int, chain: list[int]) -> Request:
    """Keys that chain: equal as long as all before are."""
    keys = [bytes(chain[:length]) for length in range(len(chain) + 1)]
    return make_request(str(number), 1, keys=keys)


@given(st.lists(chains, min_size=6, max_size=6), moves)
def test_the_index_is_that_of_those_that_are_here_whatever_comes_and_goes_twice(
    chains: list[list[int]], moves: list[tuple[bool, int]]
) -> None:
    live, requests, here = LiveKeys(), [keyed(number, chain) for number, chain in enumerate(chains)], set[Request]()
    for comes, number in moves:
        request = requests[number]
        if comes:
            live.come(request)
            here.add(request)
        else:
            live.go(request)
            here.discard(request)
        assert live._num_requests == Counter(key for each in here for key in each.keys[1:])
        assert live._keys.keys() == {each for each in here if len(each.keys) > 1}
        assert len(live) <= sum(len(each.keys) - 1 for each in here)
    for request in requests:
        live.go(request)
    assert (live._num_requests, live._keys) == ({}, {})


def test_keys_that_a_request_gets_meanwhile_are_not_taken_away_with_it() -> None:
    live, request, other = LiveKeys(), keyed(0, [1]), keyed(1, [1, 2])
    live.come(request)
    live.come(other)
    request.keys.append(bytes([1, 2]))
    live.go(request)
    assert bytes([1, 2]) in live
    assert b"" not in live, "a root is no block"
