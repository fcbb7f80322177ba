"""The offset between two clocks, from what goes to and fro: within the wire's time, and never against causality."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from blockplane.control_plane.engine.clock_offset import DRIFT, clock_offsets

MILLISECOND = 1_000_000
nanoseconds = st.integers(0, 50 * MILLISECOND)


@st.composite
def trips(draw: st.DrawFn) -> tuple[np.ndarray, ...]:
    """The true offsets, and the four times of each trip, on the clock that took them."""
    num_trips = draw(st.integers(1, 40))
    out, stay, back, pause = np.array(
        draw(st.lists(st.tuples(*[nanoseconds] * 4), min_size=num_trips, max_size=num_trips)), np.int64
    ).T
    begins = np.cumsum(out + stay + back + pause) - (out + stay + back)
    offset = draw(st.integers(-(10**18), 10**18))
    received = begins + out + offset
    return np.full(num_trips, offset), begins, received, received + stay, received - offset + stay + back


@given(trips())
def test_nothing_arrives_before_it_was_sent(case: tuple[np.ndarray, ...]) -> None:
    _, sent, received, replied, answered = case
    offsets = clock_offsets(sent, received, replied, answered)
    assert (sent <= received - offsets).all()
    assert (replied - offsets <= answered).all()


@given(trips())
def test_the_error_is_at_most_half_of_what_the_fastest_trip_was_on_the_wire(case: tuple[np.ndarray, ...]) -> None:
    true, sent, received, replied, answered = case
    offsets = clock_offsets(sent, received, replied, answered)
    on_the_wire = (answered - sent) - (replied - received)
    distances = np.abs(answered[:, None] - answered[None, :])
    # A trip counts less the longer ago it was, by what clocks may have drifted apart since.
    bounds = (on_the_wire / 2 + DRIFT * distances).min(axis=1)
    assert (np.abs(offsets - true) <= bounds + 2).all()


@given(trips())
def test_the_trip_whose_word_counts_most_is_the_one_of_the_least_error_by_then(case: tuple[np.ndarray, ...]) -> None:
    """The same by looking at all pairs."""
    _, sent, received, replied, answered = case
    least, most = replied - answered, received - sent
    expected = []
    for at in range(len(sent)):
        errors = (most - least) / 2 + DRIFT * np.abs(answered - answered[at])
        candidates = np.flatnonzero(errors <= errors.min() + 1)
        expected.append([np.clip(least[j] + (most[j] - least[j]) // 2, least[at], most[at]) for j in candidates])
    offsets = clock_offsets(sent, received, replied, answered)
    assert all(offset in allowed for offset, allowed in zip(offsets, expected, strict=True))


def test_clocks_that_drift_apart_are_followed() -> None:
    """An hour of steps, one clock 100 ppm fast: at its end they are 0.36 s apart."""
    sent = np.arange(0, 3600, 2, dtype=np.int64) * 1000 * MILLISECOND
    out, back = MILLISECOND // 5, MILLISECOND // 5
    received = ((sent + out) * (1 + 1e-4)).astype(np.int64) + 5
    replied = ((sent + out + 20 * MILLISECOND) * (1 + 1e-4)).astype(np.int64) + 5
    answered = sent + out + 20 * MILLISECOND + back
    offsets = clock_offsets(sent, received, replied, answered)
    assert abs(offsets[0] - 5) < MILLISECOND
    assert abs(offsets[-1] - 1e-4 * answered[-1]) < MILLISECOND


def test_no_trips_have_no_offsets() -> None:
    none = np.zeros(0, np.int64)
    assert clock_offsets(none, none, none, none).size == 0
