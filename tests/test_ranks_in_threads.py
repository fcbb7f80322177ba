"""Ranks over threads keep what `Ranks` promises, and end where one of them errs."""

import threading

import pytest
import torch
from ranks_in_threads import RanksInThreads, run_ranks

from blockplane.data_plane.ranks.collectives import ALONE, Ranks
from blockplane.kernels.slots import ContextParallel


def own(ranks: Ranks) -> torch.Tensor:
    return torch.tensor([ranks.rank, 10 * ranks.rank])


def test_every_rank_gets_the_sum_of_all() -> None:
    assert [sums.tolist() for sums in run_ranks(4, lambda ranks: ranks.all_reduce(own(ranks)))] == [[6, 60]] * 4


def test_sums_of_int64_wrap_around() -> None:
    (first, second) = run_ranks(2, lambda ranks: ranks.all_reduce(torch.tensor([2**63 - 1])))
    assert first.tolist() == second.tolist() == [-2]


def test_every_rank_gathers_all_in_the_order_of_ranks() -> None:
    gathered = run_ranks(3, lambda ranks: ranks.all_gather(own(ranks)))
    assert [part.tolist() for part in gathered] == [[[0, 0], [1, 10], [2, 20]]] * 3


def test_neighbours_share_a_context() -> None:
    gathered = run_ranks(4, lambda ranks: ranks.gather_context(own(ranks)[0]).tolist(), context_parallel_size=2)
    assert gathered == [[0, 1], [0, 1], [2, 3], [2, 3]]
    shares = run_ranks(4, lambda ranks: ranks.context_parallel, context_parallel_size=2)
    assert shares == [ContextParallel(2, 0), ContextParallel(2, 1)] * 2


def test_every_rank_gets_rank_0s() -> None:
    assert [got.tolist() for got in run_ranks(3, lambda ranks: ranks.broadcast(own(ranks) + 7))] == [[7, 7]] * 3


def test_a_group_of_one_gets_what_a_rank_alone_gets() -> None:
    def all_calls(ranks: Ranks) -> list[torch.Tensor]:
        x = torch.arange(3.0)
        return [ranks.all_reduce(x), ranks.all_gather(x), ranks.gather_context(x), ranks.broadcast(x)]

    (ours,) = run_ranks(1, all_calls)
    assert all(map(torch.equal, ours, all_calls(ALONE)))


def test_what_a_rank_does_to_its_tensor_afterwards_reaches_nobody() -> None:
    def overwrite(ranks: RanksInThreads) -> list[int]:
        x = own(ranks)
        gathered = [ranks.all_gather(x), ranks.broadcast(x)]
        for tensor in (x, *gathered):
            tensor += 100
        return ranks.all_gather(x)[:, 0].tolist()

    assert run_ranks(3, overwrite) == [[100, 101, 102]] * 3


def test_a_rank_that_raises_ends_the_others_and_its_error_is_told() -> None:
    def fail(ranks: RanksInThreads) -> None:
        if ranks.rank == 1:
            raise ValueError("rank 1 cannot")
        ranks.all_reduce(torch.ones(1))

    with pytest.raises(ValueError, match="rank 1 cannot"):
        run_ranks(3, fail)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rank ")]


@pytest.mark.parametrize(
    "differ",
    [
        lambda ranks: ranks.all_reduce(torch.ones(1 + ranks.rank)),
        lambda ranks: ranks.all_reduce(torch.ones(1, dtype=(torch.int64, torch.int32)[ranks.rank])),
        lambda ranks: (ranks.all_reduce, ranks.all_gather)[ranks.rank](torch.ones(1)),
        lambda ranks: ranks.rank or ranks.all_reduce(torch.ones(1)),
    ],
    ids=["shapes", "dtypes", "calls", "numbers of calls"],
)
def test_ranks_that_differ_are_told(differ) -> None:
    with pytest.raises(AssertionError, match="different calls"):
        run_ranks(2, differ)
