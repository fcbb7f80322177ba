"""Ranks that make a worker group: who has come, who is missing, what all say, and the loss of one. Knows no gRPC.

A group's meeting begins with the first rank of its name that joins. Until all have come a rank may go and come again;
from then on the loss of one is the loss of all, and whoever is left joins the next meeting of that name.
"""

import logging
import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from blockplane.control_plane.engine.group import WorkerGroup
from blockplane.control_plane.engine.hello import Hello, joined_hello
from blockplane.control_plane.engine.rank import Rank
from blockplane.control_plane.engine.signs_of_life import SignsOfLife
from blockplane.protos.config import Config
from blockplane.protos.errors import (
    BlockplaneError,
    ConfigurationError,
    ProtocolError,
    RanksError,
    UnavailableError,
)

logger = logging.getLogger(__name__)

MAX_LOG_BYTES = 1000
"""Of a rank's log, what its peers are told: errors go as metadata, thrice as long at worst, and gRPC takes 8 KiB."""


@dataclass(frozen=True, slots=True)
class Join:
    """A rank's first message.

    Attributes:
        address: host:port where the others find its store, if it is rank 0.
        boot_id: drawn when its process started; 0 = it does not say.
        peer: whence its stream comes, as gRPC names peers.
    """

    protocol_version: int
    group_name: str
    rank: int
    address: str
    boot_id: int
    peer: str = ""


class RankMeeting:
    """One group's ranks, from the first that joins to the loss of any.

    Attributes:
        number: drawn for this meeting.
        name: what the ranks call their group; empty = it is one worker's, which has said hello first.
        size: how many they are to be.
        context_parallel_size: of these, how many share the positions of each block.
        address: of rank 0's store.
        has_met: all have joined.
        is_over: its ranks' streams end, and whoever comes begins another.
        group: what they make; None = not all have said hello yet.
    """

    def __init__(
        self,
        name: str,
        size: int,
        clock: Callable[[], float],
        seconds: float = math.inf,
        context_parallel_size: int = 1,
    ) -> None:
        """`seconds`: how long ranks wait for each other. `clock` counts them as the event loop does."""
        self.number = secrets.randbits(64) or 1
        self.name, self.size, self.context_parallel_size = name, size, context_parallel_size
        self.address = ""
        self.has_met = self.is_over = False
        self.group: WorkerGroup | None = None
        self._seats: dict[int, Rank] = {}
        self._versions: dict[int, int] = {}
        self._hellos: dict[int, Hello] = {}
        self._clock, self._seconds, self._give_up_at = clock, seconds, clock() + seconds

    @property
    def ranks(self) -> tuple[Rank, ...]:
        """Those that are here, in their order."""
        return tuple(self._seats[number] for number in sorted(self._seats))

    def describe(self, rank: Rank) -> str:
        """A rank, for a sentence."""
        return f"{rank.described} of group {self.name}" if self.name else "the worker"

    # -- coming --------------------------------------------------------------------------------------------------------

    def seat(self, rank: Rank, version: int) -> None:
        """Let a rank in that speaks this version of the protocol.

        Raises:
            UnavailableError: another process has its place.
            RanksError: the others speak another version.
        """
        if (other := self._seats.get(rank.number)) is not None:
            raise UnavailableError(
                f"{self.describe(other)} is there already, and this is another process; give each a"
                " rank, or a group, of its own. One that has only just gone is missed soon."
            )
        for number, theirs in self._versions.items():
            if theirs != version:
                raise RanksError(
                    f"rank {rank.number} of group {self.name} speaks protocol {version} and rank {number} {theirs}; run"
                    " the same version of Blockplane in all ranks of a group."
                )
        self._seats[rank.number] = rank
        self._versions[rank.number] = version
        self.has_met = len(self._seats) == self.size
        if self.has_met:
            self._wake()

    def check_time(self) -> float:
        """Returns the seconds after which to look again; ends the meeting where ranks have not come in time."""
        if self.has_met or self.is_over:
            return math.inf
        seconds = self._give_up_at - self._clock()
        if seconds <= 0:
            self.end(RanksError(self._missing()))
        return max(0.0, seconds)

    def _missing(self) -> str:
        missing = [str(number) for number in range(self.size) if number not in self._seats]
        what = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {', '.join(missing[:-1])} and {missing[-1]}"
        there = ", ".join(rank.described for rank in self.ranks)
        return (
            f"{what} of group {self.name} did not come within {self._seconds:g} s (there: {there}), and"
            f" tensor_parallel_size is {self.size}; see to what is missing, or raise rendezvous_seconds."
        )

    # -- making a group ------------------------------------------------------------------------------------------------

    def say(self, rank: Rank, hello: Hello) -> Hello | None:
        """A rank's hello. Returns that of the whole group once all have said theirs.

        Raises:
            ProtocolError: it has said it, or not all are here.
            RanksError: the ranks contradict each other.
        """
        if not self.has_met or rank.number in self._hellos:
            raise ProtocolError("the worker said hello out of turn; run the same version of Blockplane on both.")
        self._hellos[rank.number] = hello
        if len(self._hellos) < self.size:
            return None
        hellos = [self._hellos[number] for number in range(self.size)]
        return joined_hello(self.name, hellos) if self.name else hello

    def agree(self, group: WorkerGroup) -> None:
        """All ranks are to build what this group's configuration says."""
        self.group = group
        self._wake()

    # -- going ---------------------------------------------------------------------------------------------------------

    def gave_up(self, rank: Rank, message: str, log: str) -> None:
        """A rank says why it goes, and how its log ends where it could not build. All others end by that then."""
        if log and (self.group is None or not self.group.is_ready):
            ending = log.encode()[-MAX_LOG_BYTES:].decode(errors="ignore").strip()
            self._end_others(rank, RanksError(f"{self.describe(rank)} gave up: {message} Its log ends:\n{ending}"))

    def leave(self, rank: Rank, error: BlockplaneError | None) -> bool:
        """A rank's stream has ended, by this error or well. Returns whether the meeting is over by it."""
        if self.is_over or not self.has_met:
            if self._seats.get(rank.number) is rank:
                del self._seats[rank.number], self._versions[rank.number]
            self.is_over = self.is_over or not self._seats
            return False
        self.is_over = True
        self._end_others(rank, None if error is None else self._loss(rank, error))
        return True

    def _loss(self, rank: Rank, error: BlockplaneError) -> BlockplaneError:
        """What a rank's end by `error` is to the others."""
        may_pass = isinstance(error, UnavailableError) or (self.group is not None and self.group.is_ready)
        kind = UnavailableError if may_pass else RanksError
        return kind(f"{self.describe(rank)} is lost: {error}")

    def end(self, error: BlockplaneError) -> None:
        """End all ranks' streams by the same error."""
        if self.name:
            logger.error("group %s is over: %s", self.name, error)
        self.is_over = True
        for rank in self.ranks:
            rank.end(error)

    def _end_others(self, rank: Rank, error: BlockplaneError | None) -> None:
        for other in self.ranks:
            if other is not rank:
                other.end(error)

    def _wake(self) -> None:
        for rank in self.ranks:
            rank.work.set()


class RankMeetings:
    """Those that are under way, by their groups' names; each lasts as long as its group."""

    def __init__(self, config: Config, clock: Callable[[], float], lose: Callable[[WorkerGroup], None]) -> None:
        """`lose` takes a group out of service one of whose ranks is lost."""
        self._size, self._context_parallel_size = config.tensor_parallel_size, config.context_parallel_size
        self._clock, self._lose = clock, lose
        self._seconds, self._timeout_seconds = config.rendezvous_seconds, config.worker_timeout_seconds
        self._meetings: dict[str, RankMeeting] = {}

    def __len__(self) -> int:
        return len(self._meetings)

    def join(self, join: Join) -> tuple[RankMeeting, Rank]:
        """Let a rank into its group's meeting.

        Raises:
            ConfigurationError: it is none of such a group.
            ProtocolError: what it says is incomplete.
            UnavailableError, RanksError: as `RankMeeting.seat` has them.
        """
        self._check(join)
        meeting = self._meetings.get(join.group_name)
        if meeting is not None and (before := _seated(meeting, join)) is not None:
            # Its stream broke, and only one side has noticed yet.
            before.end(UnavailableError("the worker has attached anew."))
            self.leave(meeting, before, before.error)
        if meeting is None or meeting.is_over:
            meeting = RankMeeting(join.group_name, self._size, self._clock, self._seconds, self._context_parallel_size)
        rank = Rank(join.rank, join.boot_id, SignsOfLife(self._timeout_seconds, self._clock), join.peer)
        if join.rank == 0:
            meeting.address = join.address
        meeting.seat(rank, join.protocol_version)
        self._meetings[join.group_name] = meeting
        return meeting, rank

    def alone(self, boot_id: int, peer: str) -> tuple[RankMeeting, Rank]:
        """A worker that is a group by itself. Raises ConfigurationError where a group has several."""
        if self._size > 1:
            raise ConfigurationError(
                f"tensor_parallel_size is {self._size} and the worker at {peer or 'an unknown address'} is no rank; set"
                " group, alike in all ranks of a group, and rank, from 0 on, in each."
            )
        meeting = RankMeeting("", 1, self._clock)
        rank = Rank(0, boot_id, SignsOfLife(self._timeout_seconds, self._clock), peer)
        meeting.seat(rank, 0)
        return meeting, rank

    def leave(self, meeting: RankMeeting, rank: Rank, error: BlockplaneError | None) -> bool:
        """A rank's stream has ended, by this error or well. Returns whether its group is over by it."""
        is_over = meeting.leave(rank, error)
        if meeting.is_over and meeting.group is not None:
            self._lose(meeting.group)
        if meeting.is_over and self._meetings.get(meeting.name) is meeting:
            del self._meetings[meeting.name]
        return is_over

    def _check(self, join: Join) -> None:
        who = f"rank {join.rank} of group {join.group_name!r}"
        if not join.group_name:
            raise ProtocolError(f"{who} joins, and a group needs a name; run the same version of Blockplane on both.")
        if self._size == 1:
            raise ConfigurationError(
                f"{who} joins and tensor_parallel_size is 1; set it at the engine to the number of ranks, or leave"
                " group out at the worker."
            )
        if join.rank >= self._size:
            raise ConfigurationError(
                f"{who} joins and tensor_parallel_size is {self._size}, so the last rank is {self._size - 1}; change"
                " either of them."
            )
        if not (join.rank or join.address):
            raise ProtocolError(f"{who} joins without its store's address; run the same version of Blockplane on both.")


def _seated(meeting: RankMeeting, join: Join) -> Rank | None:
    """The rank that the same process has been there until now."""
    return next(
        (each for each in meeting.ranks if each.number == join.rank and each.boot_id and each.boot_id == join.boot_id),
        None,
    )
