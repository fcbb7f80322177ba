"""How ranks find each other, without sockets: in any order of comings, goings and waiting."""

from dataclasses import dataclass, replace

import pytest
from engine_driver import Clock, hello, model
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from blockplane.control_plane.engine.group import WorkerGroup
from blockplane.control_plane.engine.hello import joined_hello
from blockplane.control_plane.engine.rank import Rank
from blockplane.control_plane.engine.rank_meeting import Join, RankMeeting, RankMeetings
from blockplane.protos.buckets import BucketRules
from blockplane.protos.config import load_config
from blockplane.protos.errors import (
    BlockplaneError,
    ConfigurationError,
    ProtocolError,
    RanksError,
    UnavailableError,
)
from blockplane.protos.model import joined_fingerprint

HELLO = hello(model())


def forget(group: WorkerGroup) -> None:
    raise AssertionError("no group was made")


def meetings(clock: Clock, size: int = 3) -> RankMeetings:
    return RankMeetings(load_config({"tensor_parallel_size": str(size), "rendezvous_seconds": "7"}, {}), clock, forget)


def joining(rank: int, boot_id: int = 0, name: str = "a", version: int = 4) -> Join:
    return Join(version, name, rank, "host:1" if rank == 0 else "", boot_id, f"peer-{rank}")


# -- who is let in -----------------------------------------------------------------------------------------------------


def test_all_have_met_once_the_last_has_joined_and_rank_0_says_where() -> None:
    entrance = meetings(Clock())
    meeting, first = entrance.join(joining(2))
    entrance.join(joining(0))
    assert not meeting.has_met
    assert not first.work.is_set()
    assert entrance.join(joining(1))[0] is meeting
    assert meeting.has_met
    assert first.work.is_set()
    assert meeting.address == "host:1"
    assert [rank.number for rank in meeting.ranks] == [0, 1, 2]


def test_groups_of_other_names_do_not_meet() -> None:
    entrance = meetings(Clock(), size=2)
    first, _ = entrance.join(joining(0, name="a"))
    second, _ = entrance.join(joining(1, name="b"))
    assert first is not second
    assert first.number != second.number
    assert len(entrance) == 2


@pytest.mark.parametrize(
    ("size", "join", "error", "sentence"),
    [
        (1, joining(0), ConfigurationError, r"^rank 0 of group 'a' joins and tensor_parallel_size is 1; set it .*\.$"),
        (2, joining(2), ConfigurationError, r"^rank 2 of group 'a' .* is 2, so the last rank is 1; .*\.$"),
        (2, joining(1, name=""), ProtocolError, r"a group needs a name; "),
        (2, Join(4, "a", 0, "", 0), ProtocolError, r"without its store's address; "),
    ],
)
def test_who_can_be_no_rank_is_refused_and_leaves_nothing(
    size: int, join: Join, error: type[BlockplaneError], sentence: str
) -> None:
    entrance = meetings(Clock(), size)
    with pytest.raises(error, match=sentence):
        entrance.join(join)
    assert len(entrance) == 0


def test_a_worker_without_a_rank_is_refused_where_groups_have_several_naming_what_to_set() -> None:
    with pytest.raises(ConfigurationError, match=r"^tensor_parallel_size is 2 and .* peer-x is no rank; set group,"):
        meetings(Clock(), 2).alone(5, "peer-x")


def test_a_rank_s_place_is_not_another_process_s_and_the_one_that_has_it_is_named() -> None:
    entrance = meetings(Clock())
    meeting, _ = entrance.join(joining(1, boot_id=5))
    with pytest.raises(UnavailableError, match=r"^rank 1 at peer-1 of group a is there already"):
        entrance.join(joining(1, boot_id=6))
    assert [rank.boot_id for rank in meeting.ranks] == [5]


def test_a_process_that_comes_again_takes_its_own_place_and_its_old_stream_ends() -> None:
    entrance = meetings(Clock())
    meeting, old = entrance.join(joining(1, boot_id=5))
    entrance.join(joining(2, boot_id=6))
    again, new = entrance.join(joining(1, boot_id=5))
    assert again is meeting
    assert isinstance(old.error, UnavailableError)
    assert not entrance.leave(meeting, old, old.error)
    assert [rank for rank in meeting.ranks if rank.number == 1] == [new]


def test_ranks_of_two_versions_do_not_meet_and_both_are_named() -> None:
    entrance = meetings(Clock())
    entrance.join(joining(0, version=4))
    with pytest.raises(RanksError, match=r"^rank 1 of group a speaks protocol 3 and rank 0 4; "):
        entrance.join(joining(1, version=3))


# -- who is missing ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("there", "missing"), [((0, 2, 3), "rank 1 of"), ((2,), "ranks 0, 1 and 3 of"), ((0, 1), "ranks 2 and 3 of")]
)
def test_who_is_missing_after_the_stated_time_is_named_to_all_who_wait(there: tuple[int, ...], missing: str) -> None:
    clock = Clock()
    entrance = meetings(clock, size=4)
    ranks = [entrance.join(joining(number)) for number in there]
    meeting = ranks[0][0]
    clock.now = 6.9
    assert meeting.check_time() == pytest.approx(0.1)
    clock.now = 7.0
    meeting.check_time()
    for _, rank in ranks:
        assert isinstance(rank.error, RanksError)
        assert str(rank.error).startswith(f"{missing} group a did not come within 7 s (there: rank {there[0]} at peer-")
    for _, rank in ranks:
        entrance.leave(meeting, rank, rank.error)
    assert len(entrance) == 0


def test_who_goes_before_all_have_met_ends_nobody_and_may_come_again_while_the_time_runs_on() -> None:
    clock = Clock()
    entrance = meetings(clock)
    meeting, waiting = entrance.join(joining(0))
    _, flighty = entrance.join(joining(1, boot_id=5))
    clock.now = 3.0
    assert not entrance.leave(meeting, flighty, UnavailableError("gone."))
    assert not waiting.is_ended
    assert entrance.join(joining(1, boot_id=6))[0] is meeting
    assert meeting.check_time() == 4
    assert entrance.join(joining(2))[0].has_met


def test_a_hello_before_all_have_met_or_a_second_one_is_out_of_turn() -> None:
    entrance = meetings(Clock(), size=2)
    meeting, first = entrance.join(joining(0))
    with pytest.raises(ProtocolError, match="out of turn"):
        meeting.say(first, HELLO)
    entrance.join(joining(1))
    assert meeting.say(first, HELLO) is None
    with pytest.raises(ProtocolError, match="out of turn"):
        meeting.say(first, HELLO)


# -- what all of them say ----------------------------------------------------------------------------------------------


def test_a_group_says_what_all_its_ranks_can_do_and_is_the_same_only_with_the_same_processes() -> None:
    one = hello(model(), 50, boot_id=1, last_epoch=9, model_fingerprint=b"x", transports=("nixl", "grpc"))
    two = hello(model(), 30, boot_id=2, last_epoch=9, model_fingerprint=b"y", transports=("grpc",))
    whole = joined_hello("a", [one, two])
    assert whole.available_memory == two.available_memory
    assert whole.model_fingerprint == joined_fingerprint([b"x", b"y"]) != joined_fingerprint([b"y", b"x"])
    assert (whole.last_epoch, whole.transports, whole.ranks) == (9, ("grpc",), (one, two))
    assert whole.boot_id not in (0, 1, 2)
    assert whole.boot_id == joined_hello("a", [one, two]).boot_id
    restarted = hello(model(), 30, boot_id=3, model_fingerprint=b"y")
    other = joined_hello("a", [one, restarted])
    assert other.boot_id != whole.boot_id
    assert other.last_epoch == 0
    assert joined_hello("a", [one, hello(model())]).boot_id == 0


def test_blocks_are_read_from_a_group_only_where_every_rank_lets_others() -> None:
    giving = [hello(model(), transfer_addresses=(f"host-{rank}:1",)) for rank in range(2)]
    assert joined_hello("a", giving).transfer_addresses == ("host-0:1", "host-1:1")
    assert joined_hello("a", [giving[0], hello(model())]).transfer_addresses == ()


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"info": model("other")},
            r"^rank 1 of group a has another model than rank 0 \(other, 64 .* and m, 64 tokens\);",
        ),
        ({"role": "decode"}, r"another role than rank 0 \(decode and both\);"),
        ({"rules": BucketRules(prefill_multiple_of=8)}, r"another rules than rank 0 "),
    ],
)
def test_ranks_that_contradict_each_other_are_refused_and_what_differs_is_named(
    fields: dict[str, object], sentence: str
) -> None:
    said = hello(fields.pop("info", model()))  # type: ignore[arg-type]
    with pytest.raises(RanksError, match=sentence):
        joined_hello("a", [HELLO, replace(said, **fields)])  # type: ignore[arg-type]


# -- the loss of one ---------------------------------------------------------------------------------------------------


def met(size: int = 2) -> tuple[RankMeetings, RankMeeting]:
    entrance = meetings(Clock(), size)
    for number in range(size):
        meeting, _ = entrance.join(joining(number))
    assert meeting.has_met
    return entrance, meeting


def test_a_rank_that_is_lost_while_all_load_ends_the_others_who_may_try_again() -> None:
    entrance, meeting = met(3)
    lost = meeting.ranks[1]
    assert entrance.leave(meeting, lost, UnavailableError("it is gone."))
    for rank in (meeting.ranks[0], meeting.ranks[2]):
        assert isinstance(rank.error, UnavailableError)
        assert str(rank.error) == "rank 1 at peer-1 of group a is lost: it is gone."
    assert len(entrance) == 0
    assert not entrance.leave(meeting, meeting.ranks[0], meeting.ranks[0].error)
    assert not entrance.join(joining(0))[0].has_met


def test_a_rank_that_could_not_build_is_named_to_the_others_with_its_words_and_the_end_of_its_log() -> None:
    entrance, meeting = met()
    log = "\n".join(f"line {number}" for number in range(1000))
    meeting.gave_up(meeting.ranks[1], "no room for 7 blocks.", log)
    entrance.leave(meeting, meeting.ranks[1], UnavailableError("the worker gave up."))
    error = meeting.ranks[0].error
    assert isinstance(error, RanksError)
    told = str(error)
    assert told.startswith("rank 1 at peer-1 of group a gave up: no room for 7 blocks. Its log ends:\n")
    assert told.endswith("line 998\nline 999")
    assert len(told) < 1200


def test_a_rank_that_breaks_the_protocol_before_it_serves_ends_the_others_for_good() -> None:
    entrance, meeting = met()
    entrance.leave(meeting, meeting.ranks[1], ProtocolError("it built something else."))
    assert isinstance(meeting.ranks[0].error, RanksError)
    assert "rank 1 at peer-1 of group a is lost: it built something else." in str(meeting.ranks[0].error)


# -- any order ---------------------------------------------------------------------------------------------------------


@dataclass
class Stream:
    """What a rank's driver knows."""

    meeting: RankMeeting
    rank: Rank
    has_left: bool = False


class AnyOrder(RuleBasedStateMachine):
    """Ranks of two groups come, go, say hello and wait, as they like."""

    SIZE = 3

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.entrance = meetings(self.clock, self.SIZE)
        self.streams: list[Stream] = []

    @rule(name=st.sampled_from("ab"), rank=st.integers(0, SIZE), boot_id=st.integers(0, 4))
    def join(self, name: str, rank: int, boot_id: int) -> None:
        taken = [s for s in self.open(name) if s.rank.number == rank and not s.rank.is_ended]
        try:
            meeting, seat = self.entrance.join(joining(rank, boot_id, name))
        except ConfigurationError:
            assert rank == self.SIZE
        except UnavailableError:
            assert any(not boot_id or each.rank.boot_id != boot_id for each in taken)
        else:
            self.streams.append(Stream(meeting, seat))

    @rule(data=st.data())
    def say(self, data: st.DataObject) -> None:
        candidates = [s for s in self.open() if s.meeting.has_met and not s.meeting.is_over]
        if candidates:
            stream = data.draw(st.sampled_from(candidates))
            try:
                whole = stream.meeting.say(stream.rank, HELLO)
            except ProtocolError as error:
                self.leave_stream(stream, error)
                return
            assert whole is None or len(whole.ranks) == self.SIZE

    @rule(data=st.data(), reason=st.sampled_from([UnavailableError("gone."), ProtocolError("wrong."), None]))
    def leave(self, data: st.DataObject, reason: BlockplaneError | None) -> None:
        if candidates := self.open():
            self.leave_stream(data.draw(st.sampled_from(candidates)), reason)

    @rule(seconds=st.integers(1, 8))
    def wait(self, seconds: int) -> None:
        self.clock.now += seconds
        for stream in self.open():
            stream.meeting.check_time()

    @rule()
    def those_that_are_told_to_end_do(self) -> None:
        for stream in self.open():
            if stream.rank.is_ended:
                self.leave_stream(stream, stream.rank.error)

    def open(self, name: str | None = None) -> list[Stream]:
        return [s for s in self.streams if not s.has_left and name in (None, s.meeting.name)]

    def leave_stream(self, stream: Stream, error: BlockplaneError | None) -> None:
        stream.has_left = True
        self.entrance.leave(stream.meeting, stream.rank, error)

    @invariant()
    def a_rendezvous_has_all_ranks_or_their_group_is_over(self) -> None:
        for stream in self.open():
            meeting = stream.meeting
            if meeting.has_met and not meeting.is_over:
                here = [each for each in self.open(meeting.name) if each.meeting is meeting]
                living = {each.rank.number for each in here if not each.rank.is_ended}
                assert living == set(range(self.SIZE))

    @invariant()
    def of_a_group_that_is_over_every_stream_ends(self) -> None:
        assert all(stream.rank.is_ended for stream in self.open() if stream.meeting.is_over)

    @invariant()
    def nothing_is_kept_of_whom_nobody_waits_for(self) -> None:
        assert len(self.entrance) <= len({stream.meeting.name for stream in self.open()})

    @invariant()
    def nobody_waits_longer_than_the_stated_time(self) -> None:
        for stream in self.open():
            meeting = stream.meeting
            assert meeting.has_met or meeting.is_over or meeting.check_time() <= 7


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
