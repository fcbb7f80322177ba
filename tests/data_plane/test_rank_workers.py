"""Two workers that make one group, in threads of one process, under an engine that says what a test says."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace

import grpc
import numpy as np
import pytest
import torch
from scripted_attaches import CONFIGURE, PROMPT, column, decode, listening, plan, prefill
from scripted_ranks import RankEngine, RankStream, result_of, tokens_of
from synthetic_oracle import continue_greedily

from blockplane.data_plane.grammars import Grammars
from blockplane.data_plane.models.synthetic import SyntheticModel, synthetic_model_info
from blockplane.data_plane.place import Member
from blockplane.data_plane.ranks.collectives import Ranks
from blockplane.data_plane.ranks.process_ranks import ProcessRanks
from blockplane.data_plane.reloading import WeightSource
from blockplane.data_plane.served_model import ServedModel
from blockplane.data_plane.worker import Worker
from blockplane.protos.config import load_config
from blockplane.protos.errors import ConfigurationError, ModelError
from blockplane.protos.model import joined_fingerprint
from blockplane.protos.plan import StepPlan, StepResult
from blockplane.protos.sampling import SamplingParams
from blockplane.protos.structured import StructuredOutput
from blockplane.v1 import engine_pb2 as pb

EXPECTED, NEW = (continue_greedily(PROMPT, 8, ignore_eos=True, seed=seed) for seed in (0, 7))
INFO = synthetic_model_info(64)


@pytest.fixture(autouse=True)
def _attach_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blockplane.data_plane.worker.RECONNECT_SECONDS", 0.01)


class PickySource(WeightSource):
    """May miss what it is to read."""

    misses = False

    def read(self, name: str) -> Callable[[], None]:
        if self.misses:
            raise ModelError("not on this disk.")
        return super().read(name)


class Pair:
    """Ranks 0 and 1 of a group.

    Attributes:
        num_loads: how often a rank has loaded its part. sources: of their weights, by rank.
    """

    def __init__(
        self, engine: RankEngine, address: str, name: str = "g", num_draft_tokens: int = 0, drafts: bool = False
    ) -> None:
        self.engine, self.num_loads = engine, 0
        self.sources: dict[int, PickySource] = {}
        self._num_draft_tokens, self._drafts = num_draft_tokens, drafts
        members = [Member(ProcessRanks(name, rank, "127.0.0.1", torch.device("cpu")), self._load) for rank in (0, 1)]
        self.workers = [Worker(member) for member in members]
        pool = ThreadPoolExecutor(2)
        self.served: list[Future[None]] = [pool.submit(worker.serve, address) for worker in self.workers]

    def _load(self, ranks: Ranks) -> ServedModel:
        self.num_loads += 1
        model = SyntheticModel("float32", ranks=ranks)
        self.sources[ranks.rank] = PickySource(model, INFO, load_config({"model": "synthetic"}, {}))
        return ServedModel(
            model,
            INFO,
            1 << 20,
            num_draft_tokens=self._num_draft_tokens,
            draft_model=SyntheticModel("float32", ranks=ranks) if self._drafts else None,
            grammars=Grammars(INFO, 1) if ranks.rank == 0 else None,
            weights=self.sources[ranks.rank],
            ranks=ranks,
        )

    def end(self) -> None:
        """Have both end for good."""
        self.engine.dismiss()
        for served in self.served:
            with suppress(ConfigurationError):
                served.result(60)


@contextmanager
def pair(**options: int) -> Iterator[Pair]:
    engine = RankEngine()
    with listening(engine, num_streams=6) as address:
        two = Pair(engine, address, **options)
        try:
            yield two
        finally:
            two.end()


def test_tokens_are_those_of_one_rank_and_each_rank_has_its_own_part_of_the_kv() -> None:
    with pair() as two:
        ranks, hellos = two.engine.ready()
        assert tokens_of(ranks, prefill(1), *map(decode, range(2, 9))) == EXPECTED
        whole = ServedModel(SyntheticModel("float32"), INFO, 1 << 20).hello()
        assert [2 * layer.num_kv_heads for layer in hellos[0].layers] == [each.num_kv_heads for each in whole.layers]
        assert hellos[0].boot_id != hellos[1].boot_id


def test_two_groups_of_one_machine_do_not_meet_each_other() -> None:
    engine = RankEngine()
    with listening(engine, num_streams=6) as address:
        pairs = [Pair(engine, address, name) for name in ("one", "two")]
        groups = [engine.ready(name=name)[0] for name in ("one", "two")]
        assert groups[0][0].join.address != groups[1][0].join.address
        assert [tokens_of(ranks, prefill(1), decode(2)) for ranks in groups] == [EXPECTED[:2]] * 2
        for each in pairs:
            each.end()


def test_an_idle_group_stays_and_goes_on() -> None:
    with pair() as two:
        ranks, _ = two.engine.ready()
        time.sleep(1.2)
        assert tokens_of(ranks, prefill(1)) == EXPECTED[:1]


def test_what_rank_0_alone_knows_changes_nothing_for_the_others() -> None:
    """Log-probabilities, penalties and a grammar; then rows go on together."""
    params = SamplingParams(
        9,
        temperature=1.0,
        presence_penalty=0.5,
        logprobs=2,
        prompt_logprobs=1,
        structured=StructuredOutput("regex", "[a-z]{3}0[a-z]*"),
    )

    def answers(ranks: list[RankStream]) -> list[StepResult]:
        return [result_of(ranks, prefill(1, params=params)), *(result_of(ranks, decode(step)) for step in range(2, 6))]

    with pair() as two:
        ranks, _ = two.engine.ready()
        results = answers(ranks)
    token_ids = bytes(token_id for result in results for token_id in result.token_ids.tolist())
    assert token_ids[3:4] == b"0"
    assert results[0].prompt_logprobs is not None
    assert [int(result.logprobs.num_entries[0]) for result in results if result.logprobs is not None] == [3] * 5


@pytest.mark.parametrize("drafts", [False, True], ids=["ngram", "model"])
def test_drafts_are_accepted_alike_in_every_rank(drafts: bool) -> None:
    configure = replace(CONFIGURE, num_draft_tokens=2)
    prompt = [*PROMPT, *PROMPT]
    with pair(num_draft_tokens=2, drafts=drafts) as two:
        ranks, _ = two.engine.ready(configure)
        steps = [StepPlan(step, decode_rows=column(1), decode_num_tokens=column(3)) for step in (2, 3)]
        token_ids = tokens_of(ranks, prefill(1, prompt), *steps)
    assert token_ids == continue_greedily(prompt, len(token_ids), ignore_eos=True)
    assert not drafts or len(token_ids) == 7


def test_a_lost_stream_is_that_of_all_and_weights_and_kv_outlive_it() -> None:
    with pair() as two:
        ranks, _ = two.engine.ready(replace(CONFIGURE, epoch=11))
        tokens_of(ranks, prefill(1), decode(2))
        for rank in ranks:
            rank.end(grpc.StatusCode.UNAVAILABLE)
        ranks, hellos = two.engine.ready(replace(CONFIGURE, epoch=12, keeps_kv=True, last_step=7))
        assert {(hello.last_epoch, hello.last_step) for hello in hellos} == {(11, 2)}
        known = [*PROMPT, *EXPECTED[:2]]
        assert tokens_of(ranks, prefill(8, known, num_cached=len(known) - 1)) == EXPECTED[2:3]
        assert two.num_loads == 2


def test_rank_0_s_lost_stream_is_heard_of_by_the_other_whose_own_still_stands() -> None:
    with pair() as two:
        ranks, _ = two.engine.ready()
        tokens_of(ranks, prefill(1))
        ranks[0].end(grpc.StatusCode.UNAVAILABLE)
        assert "rank 1 of g has lost the other ranks in a broadcast" in ranks[1].next("fault").fault.message
        ranks[1].end(grpc.StatusCode.UNAVAILABLE)
        ranks, _ = two.engine.ready()
        assert tokens_of(ranks, prefill(1)) == EXPECTED[:1]


def test_a_peer_s_goodbye_reaches_the_engine_within_a_second_or_so() -> None:
    with pair() as two:
        ranks, _ = two.engine.ready()
        tokens_of(ranks, prefill(1))
        assert two.workers[1].leave()
        ranks[1].next("leaving")
        assert tokens_of(ranks, decode(2)) == EXPECTED[1:2], "until the engine lets it go it computes along"
        for rank in ranks:
            rank.end()
        assert two.served[1].result(60) is None


def reload(ranks: list[RankStream], model: str) -> pb.WeightsReloaded:
    ranks[0].send(pb.AttachWorkerResponse(reload=pb.ReloadWeights(model=model)))
    return ranks[0].next("reloaded").reloaded


def test_a_reload_is_all_ranks_or_none_s() -> None:
    with pair() as two:
        ranks, hellos = two.engine.ready()
        old = joined_fingerprint([hello.model_fingerprint for hello in hellos])
        tokens_of(ranks, prefill(1))
        two.sources[1].misses = True
        refused = reload(ranks, "synthetic-7")
        assert "rank 1 of this group cannot read them" in refused.failure
        assert refused.model_fingerprint == old
        assert tokens_of(ranks, decode(2)) == EXPECTED[1:2]
        two.sources[1].misses = False
        reloaded = reload(ranks, "synthetic-7")
        assert (reloaded.failure, reloaded.model_fingerprint == old) == ("", False)
        again = replace(prefill(3), released_rows=column(1), decode_rows=column())
        assert tokens_of(ranks, again, decode(4)) == NEW[:2]
        for rank in ranks:
            rank.end(grpc.StatusCode.UNAVAILABLE)
        ranks, hellos = two.engine.ready()
        assert [hello.weight_epoch for hello in hellos] == [1, 1]
        assert joined_fingerprint([hello.model_fingerprint for hello in hellos]) == reloaded.model_fingerprint


def test_a_bad_plan_is_a_fault_of_every_rank_and_the_group_comes_again() -> None:
    with pair() as two:
        ranks, _ = two.engine.ready()
        tokens_of(ranks, prefill(1))
        ranks[0].send(plan(StepPlan(2, released_rows=np.zeros(1, np.int32))))
        for rank in ranks:
            assert "releases a row that is not occupied" in rank.next("fault").fault.message
            rank.end(grpc.StatusCode.UNAVAILABLE)
        ranks, _ = two.engine.ready()
        assert tokens_of(ranks, prefill(1)) == EXPECTED[:1]
