"""Ranks over real sockets, each in a thread of its own: what they gather, how they part and meet again."""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import TypeVar

import pytest
import torch

from blockplane.data_plane.ranks import process_ranks as ranks_module
from blockplane.data_plane.ranks.messages import FIRST_BYTES, hear, tell
from blockplane.data_plane.ranks.process_ranks import ProcessRanks
from blockplane.data_plane.ranks.store import own_host
from blockplane.protos.config import Config
from blockplane.protos.errors import ConfigurationError, UnavailableError
from blockplane.v1 import engine_pb2 as pb

T = TypeVar("T")
CPU = torch.device("cpu")
meetings = count(1)


class Group:
    """The ranks of one machine."""

    def __init__(self, size: int, context_parallel_size: int = 1) -> None:
        self.ranks = [ProcessRanks("g", rank, "127.0.0.1", CPU) for rank in range(size)]
        self._context_parallel_size = context_parallel_size
        self._pool = ThreadPoolExecutor(size)
        self.meet()

    def meet(self) -> None:
        told = pb.Rendezvous(
            tensor_parallel_size=len(self.ranks),
            context_parallel_size=self._context_parallel_size,
            address=self.ranks[0].address,
            meeting=next(meetings),
        )
        self.run(lambda ranks: ranks.meet(told))

    def run(self, function: Callable[[ProcessRanks], T]) -> list[T]:
        return [future.result(60) for future in [self._pool.submit(function, each) for each in self.ranks]]


@pytest.fixture(scope="module")
def pair() -> Group:
    return Group(2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_every_rank_has_the_sum_and_all_parts_in_their_order(pair: Group, dtype: torch.dtype) -> None:
    def own(ranks: ProcessRanks) -> torch.Tensor:
        # A view that is not contiguous, as a model's may be.
        return torch.arange(6, dtype=dtype).view(2, 3).T + 10 * ranks.rank

    first, second = own(pair.ranks[0]), own(pair.ranks[1])
    for total in pair.run(lambda ranks: ranks.all_reduce(own(ranks))):
        assert torch.equal(total, first + second)
    for parts in pair.run(lambda ranks: ranks.all_gather(own(ranks))):
        assert torch.equal(parts, torch.stack([first, second]))
    for told in pair.run(lambda ranks: ranks.broadcast(own(ranks))):
        assert torch.equal(told, first)


def test_heads_are_gathered_among_neighbours_alone() -> None:
    group = Group(4, context_parallel_size=2)
    gathered = group.run(lambda ranks: ranks.gather_context(torch.tensor([ranks.rank])).flatten().tolist())
    assert gathered == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [each.context_parallel.rank for each in group.ranks] == [0, 1, 0, 1]


@pytest.mark.parametrize("length", [0, 1, FIRST_BYTES - 9, FIRST_BYTES - 8, FIRST_BYTES - 7, FIRST_BYTES, 100_000])
def test_bytes_of_any_length_are_told(pair: Group, length: int) -> None:
    data = os.urandom(length)
    number_of = {id(each): 0 for each in pair.ranks}

    class Counted:
        """Only what is called of `Ranks`."""

        def __init__(self, ranks: ProcessRanks) -> None:
            self._ranks = ranks

        def broadcast(self, x: torch.Tensor) -> torch.Tensor:
            number_of[id(self._ranks)] += 1
            return self._ranks.broadcast(x)

    def exchange(ranks: ProcessRanks) -> bytes:
        counted: ProcessRanks = Counted(ranks)  # type: ignore[assignment]
        if ranks.rank == 0:
            tell(counted, data)
            return data
        return hear(counted)

    assert pair.run(exchange) == [data, data]
    assert set(number_of.values()) == {1 if length <= FIRST_BYTES - 8 else 2}


def test_a_group_may_be_idle_for_longer_than_its_meeting_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_module, "CONNECT_SECONDS", 1.0)
    group = Group(2)

    def late(ranks: ProcessRanks) -> int:
        time.sleep(2.5 * (ranks.rank == 0))
        return int(ranks.broadcast(torch.tensor([7 - ranks.rank])))

    assert group.run(late) == [7, 7]


def test_who_leaves_is_lost_to_the_others_and_all_may_meet_again() -> None:
    group = Group(2)
    num_files = len(os.listdir("/proc/self/fd"))
    for _ in range(3):

        def part(ranks: ProcessRanks) -> str:
            if ranks.rank == 0:
                ranks.leave()
                return ""
            with pytest.raises(UnavailableError, match="rank 1 of g has lost the other ranks in a broadcast") as lost:
                hear(ranks)
            ranks.leave()
            assert ranks.waits is None
            return str(lost.value)

        group.run(part)
        group.meet()
        assert group.run(lambda ranks: int(ranks.all_reduce(torch.tensor([1])))) == [2, 2]
    assert len(os.listdir("/proc/self/fd")) <= num_files + 4


def test_a_rank_that_waits_says_for_what_and_since_when(pair: Group) -> None:
    began = time.monotonic()

    def look(ranks: ProcessRanks) -> None:
        if ranks.rank == 1:
            hear(ranks)
            return
        while (wait := pair.ranks[1].waits) is None:
            assert time.monotonic() < began + 60
        assert wait.what == "a broadcast"
        assert wait.since >= began
        tell(ranks, b"")

    pair.run(look)


def test_a_rank_that_does_not_come_is_missed_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_module, "CONNECT_SECONDS", 0.5)
    alone = ProcessRanks("g", 0, "127.0.0.1", CPU)
    told = pb.Rendezvous(tensor_parallel_size=2, context_parallel_size=1, address=alone.address, meeting=1)
    with pytest.raises(UnavailableError, match="rank 0 of g has lost the other ranks in meeting them"):
        alone.meet(told)


def test_the_model_is_divided_as_at_the_first_meeting() -> None:
    group = Group(2)
    told = pb.Rendezvous(tensor_parallel_size=4, context_parallel_size=1, address=group.ranks[0].address, meeting=1)
    with pytest.raises(ConfigurationError, match=r"among 4 ranks.* has loaded its part of 2 and 1; restart this wor"):
        group.ranks[0].meet(told)
    stranger = ProcessRanks("g", 2, "127.0.0.1", CPU)
    told = pb.Rendezvous(tensor_parallel_size=2, context_parallel_size=1, address=group.ranks[0].address, meeting=1)
    with pytest.raises(ConfigurationError, match="rank 2 of g cannot be one of 2 ranks"):
        stranger.meet(told)


def test_two_groups_have_stores_of_their_own() -> None:
    assert Group(1).ranks[0].address != Group(1).ranks[0].address
    assert ProcessRanks("g", 1, "127.0.0.1", CPU).address == ""


def test_ranks_of_other_machines_are_met_in_plaintext_only_where_the_settings_say_so() -> None:
    assert own_host(Config(engine_address="unix:/tmp/engine")) == "127.0.0.1"
    assert own_host(Config(engine_address="127.0.0.1:50050")) == "127.0.0.1"
    with pytest.raises(
        ConfigurationError, match=r"group g would .* at 192\.0\.2\.7 in plaintext; set plaintext to any"
    ):
        own_host(Config(group="g", rendezvous_host="192.0.2.7"))
    assert own_host(Config(rendezvous_host="192.0.2.7", plaintext="anywhere")) == "192.0.2.7"


def test_addresses_that_lead_nowhere_are_named() -> None:
    with pytest.raises(ConfigurationError, match=r"cannot listen on 192\.0\.2\.7 for the other ranks"):
        ProcessRanks("g", 0, "192.0.2.7", CPU)
    abroad = ProcessRanks("g", 1, "192.0.2.7", CPU)
    told = pb.Rendezvous(tensor_parallel_size=2, context_parallel_size=1, address="127.0.0.1:9", meeting=1)
    with pytest.raises(
        ConfigurationError, match=r"127\.0\.0\.1:9, which only its own machine reaches.*rendezvous_host"
    ):
        abroad.meet(told)


def test_a_device_without_collectives_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="the device meta has no collectives here"):
        ProcessRanks("g", 1, "127.0.0.1", torch.device("meta"))
