"""The waiting queue by itself: who may wait, in which order, and what is said to those who may not."""

from collections.abc import Iterable

import pytest
from driving import make_request, make_scheduler, run_step
from hypothesis import given
from hypothesis import strategies as st

from blockplane.control_plane.engine.request import Request
from blockplane.control_plane.engine.waiting import MAX_RETRY_SECONDS, MIN_RETRY_SECONDS, WaitingQueue
from blockplane.protos.errors import CapacityError, QueueFullError


def queue_of(max_requests: int = 100, max_tokens: int = 10_000, priority_seconds: float = 10.0) -> WaitingQueue:
    return WaitingQueue(max_requests, max_tokens, priority_seconds)


def put(queue: WaitingQueue, name: str, priority: int = 0, now: float = 0.0, num_tokens: int = 3) -> Request:
    request = make_request(name, num_tokens, priority=priority)
    request.rank = queue.rank(priority, now)
    queue.put(request)
    return request


def order(queue: WaitingQueue) -> str:
    return "".join(request.request_id for request in queue)


def hint(queue: WaitingQueue, num_requests: int, num_tokens: int) -> float:
    with pytest.raises(CapacityError) as error:
        queue.check_room(num_requests, num_tokens)
    seconds: float | None = error.value.retry_after_seconds
    assert seconds is not None
    assert f"retry in {seconds:.1f} s" in str(error.value)
    return seconds


# -- how many may wait -------------------------------------------------------------------------------------------------


def test_as_many_requests_as_may_wait_and_no_more() -> None:
    queue = queue_of(max_requests=3)
    queue.check_room(3, 1)
    with pytest.raises(CapacityError, match="0 requests wait and 3 may"):
        queue.check_room(4, 1)
    put(queue, "a")
    queue.check_room(2, 1)
    with pytest.raises(CapacityError, match="1 requests wait and 3 may"):
        queue.check_room(3, 1)


def test_as_many_tokens_as_may_wait_and_no_more() -> None:
    queue = queue_of(max_tokens=10)
    put(queue, "a", num_tokens=4)
    queue.check_room(1, 6)
    with pytest.raises(CapacityError, match="4 tokens wait and 10 may"):
        queue.check_room(1, 7)


def test_one_longer_than_the_bound_waits_alone_rather_than_never() -> None:
    queue = queue_of(max_tokens=10)
    queue.check_room(1, 11)
    put(queue, "a", num_tokens=11)
    with pytest.raises(CapacityError):
        queue.check_room(1, 1)


def test_that_none_may_wait_is_told_apart_from_that_not_so_many_may() -> None:
    queue = queue_of(max_requests=2, max_tokens=10)
    put(queue, "a", num_tokens=4)
    for refused in ((2, 2), (1, 7)):
        with pytest.raises(CapacityError) as caught:
            queue.check_room(*refused)
        assert type(caught.value) is CapacityError
    put(queue, "b", num_tokens=4)
    with pytest.raises(QueueFullError):
        queue.check_room(1, 1)


def test_whoever_leaves_makes_room() -> None:
    queue = queue_of(max_requests=2, max_tokens=10)
    first, second = put(queue, "a", num_tokens=4), put(queue, "b", num_tokens=6)
    assert queue.num_tokens == 10
    queue.remove(first)
    assert (order(queue), queue.num_tokens) == ("b", 6)
    queue.serve(second, now=0.0)
    assert (order(queue), queue.num_tokens, len(queue)) == ("", 0, 0)
    queue.check_room(2, 10)


def test_a_late_token_counts_as_waiting_too() -> None:
    queue = queue_of()
    request = put(queue, "a", num_tokens=4)
    queue.append_token(request, 9)
    assert queue.num_to_compute == request.num_to_compute
    assert (request.token_ids.tolist(), queue.num_tokens) == ([1, 2, 3, 4, 9], 5)
    queue.remove(request)
    assert queue.num_tokens == 0


# -- when to come again ------------------------------------------------------------------------------------------------


def serve(queue: WaitingQueue, times: Iterable[float]) -> None:
    """Serve a request at each of these times, while another waits."""
    other = put(queue, "x", num_tokens=1)
    for time in times:
        request, other = other, put(queue, "x", num_tokens=1)
        queue.serve(request, now=time)
    queue.remove(other)


def served_every(seconds: float, *, times: int = 60, num_waiting: int = 10, **bounds: int) -> WaitingQueue:
    """A full queue that has been served so often, and was never empty meanwhile."""
    queue = queue_of(**bounds)
    serve(queue, (100.0 + index * seconds for index in range(times)))
    for _ in range(num_waiting):
        put(queue, "a", num_tokens=10)
    return queue


def test_the_hint_is_the_shortest_while_nothing_is_known() -> None:
    queue = queue_of(max_requests=1)
    put(queue, "a")
    assert hint(queue, 1, 1) == MIN_RETRY_SECONDS
    queue.serve(next(iter(queue)), now=1e9)
    put(queue, "b")
    assert hint(queue, 1, 1) == MIN_RETRY_SECONDS, "one alone tells no pace"


def test_the_hint_is_the_pace_times_those_that_must_go_first() -> None:
    queue = served_every(2.0, max_requests=10)
    assert hint(queue, 1, 1) == pytest.approx(2.0, rel=0.01)
    assert hint(queue, 4, 1) == pytest.approx(8.0, rel=0.01)


def test_of_tokens_as_many_requests_must_go_as_hold_what_is_too_many() -> None:
    """Ten wait with ten tokens each; 95 may. Fifteen more are 20 too many, which two hold; 21 three."""
    queue = served_every(2.0, max_tokens=95)
    assert hint(queue, 1, 15) == pytest.approx(4.0, rel=0.01)
    assert hint(queue, 1, 16) == pytest.approx(6.0, rel=0.01)


def test_the_slower_the_queue_is_served_the_longer_the_hint_and_within_limits() -> None:
    hints = [hint(served_every(seconds, max_requests=10), 3, 1) for seconds in (0.001, 0.1, 1.0, 5.0, 100.0)]
    assert hints == sorted(hints)
    assert len(set(hints)) == 5
    assert (hints[0], hints[-1]) == (MIN_RETRY_SECONDS, MAX_RETRY_SECONDS)


def test_the_hint_follows_the_pace_of_the_last_few() -> None:
    queue = served_every(10.0, max_requests=10, num_waiting=0)
    serve(queue, (1000.0 + index for index in range(30)))
    for _ in range(10):
        put(queue, "a")
    assert hint(queue, 1, 1) < 3


# -- in which order ----------------------------------------------------------------------------------------------------


def test_first_come_first_served() -> None:
    queue = queue_of()
    for name, now in (("a", 0.0), ("b", 0.0), ("c", 1.0), ("d", 1.0)):
        put(queue, name, now=now)
    assert order(queue) == "abcd"


def test_less_priority_comes_first_and_equals_in_the_order_of_asking() -> None:
    queue = queue_of()
    for name, priority in (("a", 0), ("b", 1), ("c", -1), ("d", 0), ("e", -1)):
        put(queue, name, priority)
    assert order(queue) == "ceadb"


def test_each_step_of_priority_is_worth_its_seconds() -> None:
    queue = queue_of(priority_seconds=10.0)
    for name, priority, now in (("a", 2, 0.0), ("b", 1, 9.9), ("c", 0, 19.8), ("d", 1, 10.1), ("e", 0, 20.2)):
        put(queue, name, priority, now)
    assert order(queue) == "cbade"


def test_a_request_goes_back_to_its_place() -> None:
    queue = queue_of()
    requests = {name: put(queue, name) for name in "abcde"}
    for name in "caebd":
        queue.remove(requests[name])
    for name in "ebdca":
        queue.put(requests[name])
    assert order(queue) == "abcde"


def test_of_requests_of_one_rank_the_right_one_is_removed() -> None:
    queue = queue_of()
    requests = [make_request(name, 3, rank=(1.0, 0)) for name in "abc"]
    for request in requests:
        queue.put(request)
    queue.remove(requests[1])
    assert order(queue) == "ac"


def test_the_queue_may_be_changed_while_one_goes_through_it() -> None:
    queue = queue_of()
    for name in "abcd":
        put(queue, name)
    seen = []
    for request in queue.first(3):
        seen.append(request.request_id)
        queue.remove(request)
    assert ("".join(seen), len(queue)) == ("abc", 1)


@given(
    arrivals=st.lists(st.tuples(st.floats(0, 100), st.integers(-3, 3)), min_size=2, max_size=20),
    priority_seconds=st.floats(0, 20),
)
def test_nobody_is_overtaken_by_one_that_comes_later_than_its_priority_is_worth(
    arrivals: list[tuple[float, int]], priority_seconds: float
) -> None:
    queue = queue_of(priority_seconds=priority_seconds)
    arrivals = sorted(arrivals, key=lambda arrival: arrival[0])
    requests = [put(queue, "x", priority, now) for now, priority in arrivals]
    place = {id(request): index for index, request in enumerate(queue)}
    for first, (came, priority) in enumerate(arrivals):
        for later in range(first + 1, len(arrivals)):
            then, other = arrivals[later]
            is_first = place[id(requests[first])] < place[id(requests[later])]
            if other >= priority or then > came + (priority - other) * priority_seconds + 1e-6:
                assert is_first
            if then < came + (priority - other) * priority_seconds - 1e-6:
                assert not is_first


def test_nothing_waits_for_ever_behind_an_endless_stream_of_more_urgent_requests() -> None:
    """One row, a step a second, a new urgent request each second: one two steps less urgent runs after 20 seconds."""
    scheduler = make_scheduler(seqs=(1,), priority_seconds=10.0)
    patient = make_request("patient", 3, priority=2)
    for second in range(100):
        urgent = make_request(str(second), 3, max_tokens=1, first=100)
        scheduler.add([urgent], now=float(second))
        if second == 5:
            scheduler.add([patient], now=float(second))
        run_step(scheduler)
        if patient.row is not None:
            break
    assert second == 25, "those that came before second 25 were before it"


def test_an_idle_hour_is_not_taken_for_slowness() -> None:
    queue = WaitingQueue(1, 1000, 0.0)
    for number in range(20):
        request = make_request(str(number), 3)
        request.rank = queue.rank(0, now=number * 0.01)
        queue.put(request)
        queue.serve(request, now=number * 0.01)
    late = make_request("late", 3)
    late.rank = queue.rank(0, now=3600.0)
    queue.put(late)
    queue.serve(late, now=3600.0)
    queue.put(late)
    with pytest.raises(CapacityError) as refusal:
        queue.check_room(1, 3)
    assert refusal.value.retry_after_seconds == MIN_RETRY_SECONDS
