"""Which answered tokens are looked at one by one: those that may end somebody's text, and those that are none."""

import numpy as np
import pytest

from blockplane.control_plane.engine.stops import Stops
from blockplane.protos.errors import ProtocolError


def seen(stops: Stops, *token_ids: int) -> list[bool]:
    flags: list[bool] = stops.are_to_see(np.array(token_ids, np.int32)).tolist()
    return flags


def test_ends_of_text_and_failures_are_always_seen_and_nothing_else() -> None:
    stops = Stops(10, (0, 9))
    assert seen(stops, -1, *range(10)) == [True, True, *[False] * 8, True]


def test_a_stop_id_is_seen_as_long_as_anybody_has_it() -> None:
    stops = Stops(10, ())
    stops.expect((3, 4))
    stops.expect((4,))
    assert seen(stops, 2, 3, 4, 5) == [False, True, True, False]
    stops.forget((3, 4))
    assert seen(stops, 3, 4) == [False, True]
    stops.forget((4,))
    assert seen(stops, 3, 4) == [False, False]


def test_an_end_of_text_that_is_a_stop_id_too_stays_one() -> None:
    stops = Stops(10, (7,))
    stops.expect((7,))
    stops.forget((7,))
    assert seen(stops, 7) == [True]


@pytest.mark.parametrize("token_id", [-2, -9, 10, 11, 20])
def test_an_id_that_the_model_does_not_have_is_seen_and_refused(token_id: int) -> None:
    stops = Stops(10, ())
    assert seen(stops, token_id) == [True]
    with pytest.raises(ProtocolError, match="does not have"):
        stops.check(np.array([1, token_id], np.int32))


@pytest.mark.parametrize("token_id", [-(2**31), 2**31 - 1])
def test_an_id_that_is_far_off_is_refused_at_once(token_id: int) -> None:
    with pytest.raises(ProtocolError, match="does not have"):
        seen(Stops(10, ()), token_id)


def test_the_model_s_own_ids_and_failures_pass() -> None:
    Stops(10, ()).check(np.array([-1, 0, 9], np.int32))
