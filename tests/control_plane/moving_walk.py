"""A walk over an engine whose prompts are computed at one group and decoded at another; draws nothing by itself.

Plans are executed, and blocks are read and written, as late as a worker may, and in any order that a worker may choose.
"""

import random
from collections import Counter, deque
from dataclasses import replace

import numpy as np
from engine_driver import Frontend, hello, model, outcomes_of, tokens_of
from naive_worker import Digest, NaiveWorker

from blockplane.control_plane.engine.engine import Engine
from blockplane.control_plane.engine.group import WorkerGroup
from blockplane.control_plane.engine.request import Request
from blockplane.protos.config import load_config
from blockplane.protos.delivery import Submission
from blockplane.protos.errors import AbortedError, UnavailableError, WorkerKilledError
from blockplane.protos.model import LayerKVSpec, ModelInfo
from blockplane.protos.plan import StepPlan, StepResult
from blockplane.protos.sampling import SamplingParams
from blockplane.protos.transfer import Fetch

EOS, NUM_TOKEN_IDS, MAX_MODEL_LEN = 0, 32, 40
LAYOUTS = ((None,), (None, 6, 6), (8,), (None, 1), (None, 3, 7))
"""Sliding windows of a model's layers; None = full attention."""


def next_token(token_ids: list[int]) -> int:
    return sum((index + 1) * token for index, token in enumerate(token_ids)) * 2654435761 % 2**32 >> 27


class Member:
    """One worker's process: what it was told and has not done yet, and its KV."""

    def __init__(self, walk: "MovingWalk", role: str) -> None:
        self.walk, self.role, self.boot_id = walk, role, walk.rng.getrandbits(60) or 1
        self.worlds: dict[int, object] = {}
        self.plans: deque[tuple[StepPlan, dict[int, object]]] = deque()
        self.read: dict[int, dict[int, Digest]] = {}
        """By fetch, what was read from the source so far; it stands in no block of one's own yet."""
        self.asked: dict[int, Fetch] = {}
        self.group = self._attach(0)
        self.worker = NaiveWorker(
            self.group.configure,
            next_token,
            num_accepted=lambda granted: walk.rng.randint(1, granted),
            fails=lambda: False,
            world_of=lambda row: self.worlds[row],
        )

    def _attach(self, last_epoch: int) -> WorkerGroup:
        said = replace(
            hello(walk_model(), 0),
            layers=self.walk.layers,
            available_memory=1 << 20,
            boot_id=self.boot_id,
            last_epoch=last_epoch,
            role=self.role,
            transfer_addresses=("there:1",),
            transports=("grpc",),
        )
        group = self.walk.engine.attach_worker(said)
        self.walk.engine.worker_ready(group)
        return group

    # -- steps ---------------------------------------------------------------------------------------------------------

    def plan(self) -> None:
        plan = self.walk.engine.next_plan(self.group)
        if plan is not None:
            rows = self.group.scheduler.rows
            worlds = {each.row: world_of(rows.request(each.row)) for each in plan.admissions}
            self.plans.append((plan, worlds))
        self.take_fetches()

    def answer(self) -> None:
        if self.plans:
            result = replace(self._execute(), epoch=self.group.configure.epoch)
            self.walk.engine.take_result(self.group, result)
            self.walk.engine.flush()
        self.take_fetches()

    def _execute(self) -> StepResult:
        plan, worlds = self.plans.popleft()
        self.worlds |= worlds
        return self.worker.execute(plan, all_answered=False)

    # -- fetches -------------------------------------------------------------------------------------------------------

    def take_fetches(self) -> None:
        fetches = self.group.ranks[0].fetches
        while fetches:
            fetch = fetches.popleft()
            assert not self.plans or self.group.scheduler.num_answered >= self.plans[0][0].step - 1
            self.asked[fetch.transfer_id] = fetch

    def read_some(self) -> None:
        """Read a fetch's blocks at the source, if it is still the attach that is meant."""
        unread = [fetch for number, fetch in self.asked.items() if number not in self.read]
        if not unread:
            return
        fetch = self.walk.rng.choice(unread)
        source = next((each for each in self.walk.members if each.group.configure.epoch == fetch.source_epoch), None)
        if source is None:
            self.end_fetch(fetch, "the worker there has attached anew.")
            return
        size, slots = self.group.configure.block_size, source.worker.slots
        self.read[fetch.transfer_id] = {
            int(target) * size + place: slots[int(block) * size + place]
            for block, target in zip(fetch.source_block_ids, fetch.block_ids, strict=True)
            for place in range(size)
            if int(block) * size + place in slots
        }

    def write_some(self) -> None:
        """Write what a fetch has read and say so, or fail."""
        if not self.read:
            return
        number = self.walk.rng.choice(sorted(self.read))
        if self.walk.rng.random() < 0.15:
            self.end_fetch(self.asked[number], "the link broke.")
            return
        self.worker.slots.update(self.read[number])
        self.end_fetch(self.asked[number], "")

    def end_fetch(self, fetch: Fetch, failure: str) -> None:
        del self.asked[fetch.transfer_id]
        self.read.pop(fetch.transfer_id, None)
        self.walk.engine.blocks_fetched(self.group, 0, fetch.transfer_id, failure)
        self.walk.engine.flush()
        self.take_fetches()

    # -- loss ----------------------------------------------------------------------------------------------------------

    def lose(self, *, keeps_kv: bool) -> None:
        """Its stream breaks after some of what it was told; it comes back, or another does in its place."""
        for _ in range(self.walk.rng.randint(0, len(self.plans))):
            self._execute()
        for slots in self.read.values():
            if self.walk.rng.random() < 0.5:
                self.worker.slots.update(slots)
        last_epoch = self.group.configure.epoch
        self.walk.engine.detach_worker(self.group)
        self.plans.clear()
        self.read.clear()
        self.asked.clear()
        if not keeps_kv:
            self.boot_id, last_epoch, self.worker.slots = self.walk.rng.getrandbits(60) or 1, 0, {}
        self.group = self._attach(last_epoch)
        if not self.group.configure.keeps_kv:
            self.worker.slots = {}
        self.worker.lose_rows(self.group.configure.last_step)


class MovingWalk:
    """An engine, its frontend, and workers of all roles."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        block_size = rng.choice((1, 2, 4))
        self.layers = tuple(
            LayerKVSpec(f"layers.{index}.self_attn", 1, 8, "float32", sliding_window=window)
            for index, window in enumerate(rng.choice(LAYOUTS))
        )
        num_groups = len(self.layers)
        settings = {
            "block_size": str(block_size),
            "num_blocks": str(1 + num_groups * rng.randint(24, 72) // block_size),
            "num_seqs_buckets": str(rng.randint(1, 4)),
            "num_batched_tokens_buckets": str(rng.choice((8, 16, 24))),
            "num_draft_tokens": str(rng.choice((0, 0, 2))),
            "prefix_caching": rng.choice(("on",) * 9 + ("off",)),
        }
        self.engine = Engine(load_config(settings, {}))
        self.frontend = Frontend(self.engine)
        self.transfers = self.engine._placement.transfers
        roles = rng.choice((("prefill", "decode"), ("prefill", "prefill", "decode"), ("prefill", "decode", "decode")))
        self.members: list[Member] = []
        for role in (*roles, *(("both",) if rng.random() < 0.2 else ())):
            self.members.append(Member(self, role))
        self.prompts: dict[int, list[int]] = {}
        self.texts: dict[int, list[int]] = {}
        self.params: dict[int, SamplingParams] = {}
        self.ends: Counter[int] = Counter()
        self.most_leased = 0

    # -- what may be done ----------------------------------------------------------------------------------------------

    def submit(self) -> None:
        rng, stream_id = self.rng, 4 * len(self.prompts)
        length, split, start = rng.randint(1, 24), rng.randint(0, 30), rng.randint(0, 2)
        prompt = [(start * 11 + index + (length if index >= split else 0)) % NUM_TOKEN_IDS for index in range(length)]
        params = SamplingParams(rng.choice((1, rng.randint(1, 8), 20)), ignore_eos=rng.random() < 0.3)
        num_samples = rng.choice((1, 1, 1, 3))
        for stream in range(stream_id, stream_id + num_samples):
            self.prompts[stream], self.texts[stream], self.params[stream] = prompt, [], params
        submission = Submission(
            stream_id,
            str(stream_id),
            np.array(prompt, np.int32),
            params,
            num_samples=num_samples,
            priority=rng.choice((0, 0, -1, 2)),
            cache_salt=rng.choice(("", "", "", "a")),
            skip_prefix_cache=rng.random() < 0.1,
        )
        self.frontend.send(submissions=(submission,))
        self.hear()

    def plan(self) -> None:
        self.rng.choice(self.members).plan()

    def answer(self) -> None:
        self.rng.choice(self.members).answer()
        self.hear()

    def read(self) -> None:
        self.rng.choice(self.members).read_some()
        self.hear()

    def write(self) -> None:
        self.rng.choice(self.members).write_some()
        self.hear()

    def abort(self) -> None:
        self._tell("aborted_stream_ids")

    def park(self) -> None:
        self._tell("parked_stream_ids")

    def unpark(self) -> None:
        self._tell("unparked_stream_ids")

    def _tell(self, what: str) -> None:
        live = sorted(self.prompts.keys() - self.ends.keys())
        if live:
            self.frontend.send(**{what: (self.rng.choice(live),)})
        self.hear()

    def run_out_of_time(self) -> None:
        """The alarm of some transfer, or of some row that stands, goes off."""
        due = [transfer.alarm for transfer in self.transfers._moving.values()]
        due += self.transfers._standing.values()
        if due:
            alarm = self.rng.choice(due)
            callback, args = alarm._callback, alarm._args
            alarm.cancel()
            callback(*args)
        self.hear()

    def lose(self) -> None:
        self.rng.choice(self.members).lose(keeps_kv=self.rng.random() < 0.5)
        self.hear()

    def drain(self) -> None:
        """A group serves no more, or again."""
        group = self.rng.choice(self.members).group
        if group.emptied_for:
            self.engine.drains.undrain(group.number)
        else:
            group.emptied_for.add("draining")
            self.engine._placement.empty(group)
        self.hear()

    def reset_the_cache(self) -> None:
        self.engine.reset_prefix_cache()

    def settle(self) -> None:
        """Left alone, everything that lives ends, and nothing is held."""
        for member in self.members:
            if member.group.emptied_for:
                self.engine.drains.undrain(member.group.number)
        self.frontend.send(unparked_stream_ids=tuple(self.prompts))
        for _ in range(1500):
            if self.prompts.keys() == self.ends.keys() and not any(each.plans or each.asked for each in self.members):
                break
            for member in self.members:
                member.plan()
                member.answer()
                member.read_some()
                member.write_some()
            self.hear()
        else:
            raise AssertionError("stuck: something lives, and nothing comes of it")
        assert all(count == 1 for count in self.ends.values()), "every request ends exactly once"
        assert (self.transfers._moving, self.transfers._transfers, self.transfers._num_unsent) == ({}, {}, 0)
        for member in self.members:
            pool, group = member.group.scheduler.blocks.pool, member.group
            assert (pool.num_free, group.num_transfers, group.is_empty) == (pool.num_usable, 0, True)
        assert (self.engine._requests, self.engine.statistics().num_held) == ({}, 0)

    # -- what must hold ------------------------------------------------------------------------------------------------

    def hear(self) -> None:
        """Take what the frontend is told, and look at it."""
        outbox = self.frontend.outbox
        self.engine.flush()
        if outbox._filled.is_set():
            outbox._filled.clear()
            delivery = outbox.empty()
            for stream_id, tokens in tokens_of(delivery).items():
                assert stream_id not in self.ends, "nothing is said of a request that has ended"
                for token_id in tokens:
                    text = self.prompts[stream_id] + self.texts[stream_id]
                    assert token_id == next_token(text), "texts are those of an undisturbed run"
                    self.texts[stream_id].append(token_id)
            for stream_id, outcome in outcomes_of(delivery).items():
                self.ends[stream_id] += 1
                if isinstance(outcome, str):
                    self._check_end(stream_id, outcome)
                elif isinstance(outcome, UnavailableError):
                    assert not self.texts[stream_id], "none served when it came"
                else:
                    assert isinstance(outcome, AbortedError | WorkerKilledError), outcome
        self._check_blocks()

    def _check_end(self, stream_id: int, reason: str) -> None:
        text, params = self.texts[stream_id], self.params[stream_id]
        num_tokens = len(self.prompts[stream_id]) + len(text)
        if reason == "stop":
            assert text[-1] == EOS
        elif reason == "length":
            assert len(text) == params.max_tokens or num_tokens == MAX_MODEL_LEN
        else:
            assert num_tokens > self.members[0].group.scheduler.blocks.capacity

    def _check_blocks(self) -> None:
        """Whoever holds a block is a row, a lease or room; what is room is in no row's table before it is published."""
        transfers = self.transfers._transfers.values()
        assert set(self.transfers._moving.values()) == {each for each in transfers if each.is_awaited}
        for member in self.members:
            group, blocks = member.group, member.group.scheduler.blocks
            rows = Counter(blocks.tables[blocks.tables > 0].tolist())
            leases: Counter[int] = Counter()
            for transfer in transfers:
                if transfer.source is group:
                    leases.update(transfer.lease.block_ids.tolist())
                if transfer.target is group:
                    leases.update(transfer.room.lease.block_ids.tolist())
                    assert not rows.keys() & set(transfer.room.block_ids.tolist()), "nobody else has what is written"
            holders = rows + leases
            assert all(blocks.pool.num_holders(block_id) == count for block_id, count in holders.items())
            assert blocks.pool.num_free + len(holders) == blocks.pool.num_usable
            self.most_leased = max(self.most_leased, leases.total())


def walk_model() -> ModelInfo:
    return replace(model(), vocab_size=NUM_TOKEN_IDS, max_model_len=MAX_MODEL_LEN, eos_token_ids=(EOS,))


def world_of(request: Request) -> object:
    """What, beside its tokens, a request's KV depends on."""
    return request.cache_salt, (request.request_id, request.stream_id) if request.skip_prefix_cache else None


OPERATIONS = (
    *("submit",) * 4,
    *("plan",) * 14,
    *("answer",) * 14,
    *("read",) * 6,
    *("write",) * 6,
    "abort",
    "park",
    "unpark",
)
RARE_OPERATIONS = ("lose", "lose", "drain", "reset_the_cache", "run_out_of_time", "run_out_of_time")


def random_operation(rng: random.Random) -> str:
    return rng.choice(RARE_OPERATIONS) if rng.random() < 0.03 else rng.choice(OPERATIONS)
