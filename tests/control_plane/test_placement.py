"""Where an engine puts requests that share a prefix: several workers, driven by hand."""

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from engine_driver import Frontend, Worker, assert_nothing_is_left, attached, in_loop, model

from blockplane.control_plane.engine.engine import Engine
from blockplane.control_plane.engine.request import EXPECTED_OUTPUT_TOKENS, Request
from blockplane.protos.config import load_config
from blockplane.protos.delivery import Submission
from blockplane.protos.plan import Int32Array
from blockplane.protos.sampling import SamplingParams

BLOCK = 16
INFO = model(max_model_len=1024)


def prompt(first: int, num_blocks: int, own: int) -> Int32Array:
    """Blocks that all prompts of the same `first` begin with, and a block of its own."""
    shared = (first * 7 + np.arange(num_blocks * BLOCK)) % 97
    return np.concatenate((shared, [own % 97, own // 97], np.zeros(BLOCK - 2))).astype(np.int32)


class Several:
    """Workers at one engine, and a frontend that asks of them."""

    def __init__(self, engine: Engine, num_workers: int, **fields: Any) -> None:
        self.engine = engine
        self.workers = [Worker(engine, INFO, num_blocks=500, **fields) for _ in range(num_workers)]
        self.frontend = Frontend(engine)
        self.num_asked = 0

    def ask(self, first: int, num_blocks: int = 8, max_tokens: int = 4, **fields: Any) -> int:
        """Returns the number of the group that gets it."""
        self.num_asked += 1
        number = self.num_asked
        params = SamplingParams(max_tokens, ignore_eos=True)
        prompt_ids = fields.pop("prompt", prompt(first, num_blocks, number))
        self.frontend.send(submissions=(Submission(4 * number, str(number), prompt_ids, params, **fields),))
        (group,) = {request.group for request in self.engine._requests[str(number)]}
        assert group is not None
        return group

    def run(self) -> None:
        """Until all have ended."""
        while [worker for worker in self.workers if worker.step() is not None]:
            pass


@pytest.mark.parametrize("is_computed", [True, False])
def test_a_prompt_goes_where_its_prefix_is_cached_or_about_to_be(is_computed: bool) -> None:
    @in_loop
    async def scenario(engine: Engine) -> None:
        several = Several(engine, 3)
        homes = []
        for first in range(3):
            homes.append(several.ask(first))
            if is_computed:
                several.run()
        assert sorted(homes) == [0, 1, 2]
        for first in (2, 0, 1):
            assert several.ask(first) == homes[first]
        several.run()
        total = engine.statistics().total
        assert total.num_cached_tokens == 3 * 8 * BLOCK, "each prefix was computed once"

    scenario()


@in_loop
async def test_the_longest_run_wins_and_only_leading_blocks_count(engine: Engine) -> None:
    several = Several(engine, 2)
    short, long = several.ask(0, num_blocks=2), several.ask(1, num_blocks=8)
    several.run()
    assert short != long
    of_both = np.concatenate((prompt(0, 2, 1)[: 2 * BLOCK], prompt(1, 8, 2)))
    assert several.ask(0, prompt=of_both) == short, "the other group has more of its blocks, but not in front"


@in_loop
async def test_salts_and_requests_that_share_nothing_keep_apart(engine: Engine) -> None:
    several = Several(engine, 2)
    home = several.ask(0)
    several.run()
    assert several.ask(0) == home
    assert several.ask(0, cache_salt="a") != home
    assert several.ask(0, skip_prefix_cache=True) != several.ask(0, skip_prefix_cache=True), "they take turns"


@in_loop
async def test_a_hot_prefix_spreads_to_a_second_group_and_comes_back_to_one(engine: Engine) -> None:
    several = Several(engine, 3)
    home = several.ask(0)
    burst = Counter(several.ask(0, max_tokens=100) for _ in range(30))
    assert len(burst) == 3, "one group cannot serve it alone"
    loads = [worker.group.scheduler.num_to_compute for worker in several.workers]
    assert max(loads) <= 1.2 * sum(loads) / 3 + 2 * 9 * BLOCK + 100
    several.run()
    assert len({several.ask(0)}) == 1
    several.run()
    homes = {several.ask(0) for _ in range(2) if several.run() is None}
    assert homes == {0}, "all have it, and one is enough"
    assert home in burst


@in_loop
async def test_cached_tokens_are_no_load(engine: Engine) -> None:
    several = Several(engine, 2)
    home = several.ask(0, num_blocks=40)
    several.run()
    for _ in range(3):
        assert several.ask(0, num_blocks=40) == home
    assert several.workers[home].group.scheduler.num_to_compute == 3 * (BLOCK + 4)


@in_loop
async def test_no_more_output_is_reckoned_with_than_is_likely_and_less_towards_the_end(engine: Engine) -> None:
    several = Several(engine, 1)
    several.ask(0, num_blocks=1, max_tokens=300)
    (worker,) = several.workers
    scheduler, prompt_length = worker.group.scheduler, 2 * BLOCK
    assert scheduler.num_to_compute == prompt_length + EXPECTED_OUTPUT_TOKENS
    left = []
    for _ in range(299):
        worker.step()
        left.append(scheduler.num_to_compute)
    # The last token is nobody's input, and one step is granted before its token is known.
    assert left[:40] == [EXPECTED_OUTPUT_TOKENS + 1] * 40
    assert left[-40:] == list(range(left[-40], left[-40] - 40, -1))
    assert left[-1] <= 2


@in_loop
async def test_samples_share_their_prompt_and_are_reckoned_so(engine: Engine) -> None:
    several = Several(engine, 2)
    home = several.ask(0, num_samples=4)
    assert several.workers[home].group.scheduler.num_to_compute == 9 * BLOCK + 4 + 3 * (BLOCK + 4)
    several.run()
    assert engine.statistics().total.num_cached_tokens == 3 * 8 * BLOCK


@in_loop
async def test_what_was_held_goes_on_where_its_prefix_is(engine: Engine) -> None:
    several = Several(engine, 4)
    several.ask(0)
    several.run()
    homes = {several.ask(0, max_tokens=100) for _ in range(6)}
    assert 1 < len(homes) < 4
    several.run()
    first = several.ask(0)
    several.workers[first].lose()
    (request,) = engine._streams.values()
    assert request.group in homes - {first}
    assert request.num_expected_tokens == 8 * BLOCK


@in_loop
async def test_a_group_that_comes_to_one_alone_leaves_prefixes_where_they_wait(engine: Engine) -> None:
    several = Several(engine, 1)
    several.ask(0)
    several.ask(1, num_blocks=1)
    several.workers.append(Worker(engine, INFO, num_blocks=500))
    assert several.ask(0) == next(each.group for each in engine._streams.values() if each.request_id == "1")


def test_keys_mean_the_same_in_all_groups_of_the_same_weights() -> None:
    @in_loop
    async def scenario(engine: Engine) -> None:
        one, two = (Worker(engine, INFO, 500, model_fingerprint=b"a").group.scheduler.blocks for _ in range(2))
        request = Request("r", prompt(0, 3, 0), 4 * BLOCK, SamplingParams(1), seed=0)
        one.enter(request)
        assert two.keys_of(request) == request.keys
        one.renew_weights(b"a")
        assert one.keys_of(request) == request.keys == two.keys_of(request), "the same weights, read anew"
        old = request.keys
        one.renew_weights(b"b")
        assert not set(one.keys_of(request)) & set(old)
        two.renew_weights(b"b")
        two.renew_weights(b"b")
        assert two.keys_of(request) == one.keys_of(request)
        other = Worker(Engine(load_config({}, {})), INFO, 500, model_fingerprint=b"b").group.scheduler.blocks
        assert not set(other.keys_of(request)) & set(one.keys_of(request)), "each engine has a secret of its own"

    scenario()


@pytest.mark.parametrize("seed", range(8))
def test_whatever_comes_moves_and_goes_the_live_index_is_that_of_the_live(seed: int) -> None:
    """Requests are asked for, stepped, aborted, parked; groups are lost and come."""

    @in_loop
    async def scenario(_: Engine) -> None:
        engine = Engine(load_config({"max_num_seqs": "3"}, {}))
        rng, several = random.Random(seed), Several(engine, 2)
        frontend = await attached(engine)
        for _ in range(150):
            do_something(rng, several)
            for group in engine.groups():
                live = {one for one in engine._streams.values() if one.group == group.number}
                known = group.live_keys._keys
                assert known.keys() <= live
                assert group.live_keys._num_requests == Counter(key for keys in known.values() for key in keys)
                if len(engine.groups()) > 1:
                    assert {one for one in group.scheduler.waiting if len(one.keys) > 1} <= known.keys()
                waiting = group.scheduler.waiting
                assert waiting.num_to_compute == sum(one.num_to_compute for one in waiting)
        while len(several.workers) < 1:
            several.workers.append(Worker(engine, INFO, num_blocks=500))
        several.frontend.send(unparked_stream_ids=tuple(range(4 * several.num_asked + 4)))
        several.run()
        assert frontend.owner != several.frontend.owner
        assert_nothing_is_left(engine)
        assert [len(group.live_keys) for group in engine.groups()] == [0] * len(engine.groups())
        assert [group.scheduler.num_to_compute for group in engine.groups()] == [0] * len(engine.groups())

    scenario()


def do_something(rng: random.Random, several: Several) -> None:
    kind, workers = rng.random(), several.workers
    if kind < 0.35 and workers:
        several.ask(rng.randrange(3), rng.randrange(4), rng.randrange(1, 30), num_samples=rng.choice((1, 1, 4)))
    elif kind < 0.85:
        for worker in workers:
            worker.step()
    elif kind < 0.9:
        several.frontend.send(aborted_request_ids=(str(rng.randint(1, 1 + several.num_asked)),))
    elif kind < 0.94:
        several.frontend.send(parked_stream_ids=(rng.randint(4, 4 + 4 * several.num_asked),))
    elif kind < 0.97 and workers:
        workers.pop(rng.randrange(len(workers))).lose()
    elif len(workers) < 4:
        workers.append(Worker(several.engine, INFO, num_blocks=500))
