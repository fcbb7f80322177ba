"""The engine with a journal: nothing is told before it is kept, and what is kept goes on whoever comes and goes."""

import asyncio
import shutil
import sqlite3
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_driver import Clock, Frontend, Worker, attached, model, outcomes_of, tokens_of

from blockplane.control_plane.engine.engine import Engine
from blockplane.protos.config import load_config
from blockplane.protos.delivery import Delivery, Resumption
from blockplane.protos.errors import AbortedError, DeadlineError, DuplicateError, NotFoundError, UnavailableError

Scenario = Callable[["Journaled"], Awaitable[None]]


class Journaled:
    """Engines one after the other on one journal; the next one begins with a copy, as after a crash of the last."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._engines = folder, list[Engine]()
        self.clock = Clock()
        self.engine = self._open(folder / "journal0")

    def _open(self, path: Path) -> Engine:
        self.path = path
        engine = Engine(load_config({"journal": str(path)}, {}), self.clock)
        self._engines.append(engine)
        return engine

    def crash(self) -> None:
        """What the files hold now is all that is left."""
        path = self._folder / f"journal{len(self._engines)}"
        for suffix in ("", "-wal"):
            if Path(f"{self.path}{suffix}").exists():
                shutil.copy(f"{self.path}{suffix}", f"{path}{suffix}")
        self.engine = self._open(path)

    def close(self) -> None:
        for engine in self._engines:
            engine.close()


@pytest.fixture
def play(tmp_path: Path) -> Callable[[Scenario], None]:
    def play(scenario: Scenario) -> None:
        async def main() -> None:
            journaled = Journaled(tmp_path)
            try:
                await scenario(journaled)
            finally:
                journaled.close()

        asyncio.run(main())

    return play


async def told(frontend: Frontend, stream_id: int, num_tokens: int) -> list[int]:
    """The stream's next tokens, once there are so many."""
    token_ids = list[int]()
    while len(token_ids) < num_tokens:
        token_ids += tokens_of(await frontend.take()).get(stream_id, [])
    return token_ids


async def resume(frontend: Frontend, stream_id: int, request_id: str, caller: str = "") -> Delivery:
    frontend.send(resumptions=(Resumption(stream_id, request_id, caller),))
    return await frontend.take()


def outputs_of(delivery: Delivery) -> dict[int, list[int]]:
    return {one.stream_id: one.token_ids[one.num_prompt_tokens :].tolist() for one in delivery.resumed}


def test_nothing_is_delivered_that_the_file_does_not_hold(play: Any) -> None:
    async def scenario(journaled: Journaled) -> None:
        worker, frontend = Worker(journaled.engine), await attached(journaled.engine)
        frontend.submit(1, "a", max_tokens=3)
        worker.step()
        assert not tokens_of(frontend.outbox.empty()), "the answer is taken, and not yet committed"
        assert await told(frontend, 1, 1) == [7]
        journaled.crash()
        frontend = await attached(journaled.engine)
        assert outputs_of(await resume(frontend, 5, "a")) == {5: [7]}

    play(scenario)


def test_a_request_outlives_its_engine_and_goes_on_unread_to_its_end(play: Any) -> None:
    async def scenario(journaled: Journaled) -> None:
        worker, frontend = Worker(journaled.engine), await attached(journaled.engine)
        frontend.submit(1, "a", max_tokens=5, caller="ada", frontend_state=b"state")
        worker.step()
        worker.step(8)
        await told(frontend, 1, 2)
        journaled.crash()
        worker = Worker(journaled.engine)
        plan = worker.step(9)
        assert plan is not None
        (admission,) = plan.admissions
        assert (admission.token_ids.tolist(), admission.num_prompt_tokens) == ([1, 2, 3, 7, 8], 3)
        frontend = await attached(journaled.engine)
        delivery = await resume(frontend, 5, "a", "ada")
        (resumed,) = delivery.resumed
        assert (resumed.stream_id, resumed.token_ids.tolist()) == (5, [1, 2, 3, 7, 8, 9])
        assert (resumed.num_prompt_tokens, resumed.num_samples, resumed.frontend_state) == (3, 1, b"state")
        while worker.step(6) is not None:
            pass
        delivery = await frontend.take()
        while not delivery.endings:
            delivery = await frontend.take()
        assert outcomes_of(delivery) == {5: "length"}
        delivery = await resume(frontend, 9, "a", "ada")
        assert (outputs_of(delivery), outcomes_of(delivery)) == ({9: [7, 8, 9, 6, 6]}, {9: "length"})

    play(scenario)


def test_a_drawn_seed_is_the_same_after_a_crash(play: Any) -> None:
    async def scenario(journaled: Journaled) -> None:
        worker, frontend = Worker(journaled.engine), await attached(journaled.engine)
        frontend.submit(1, "a", num_samples=2)
        plan = worker.step()
        assert plan is not None
        seeds = [admission.seed for admission in plan.admissions]
        await told(frontend, 1, 1)
        journaled.crash()
        plan = Worker(journaled.engine).step()
        assert plan is not None
        assert [admission.seed for admission in plan.admissions][: len(seeds)] == seeds

    play(scenario)


def test_each_sample_goes_on_by_itself(play: Any) -> None:
    async def scenario(journaled: Journaled) -> None:
        worker, frontend = Worker(journaled.engine), await attached(journaled.engine)
        frontend.submit(1, "a", num_samples=2, max_tokens=9)
        while worker.num_decodes < 2:
            worker.step()
        frontend.send(aborted_stream_ids=(2,))
        delivery = await frontend.take()
        while not delivery.endings:
            delivery = await frontend.take()
        journaled.crash()
        frontend = await attached(journaled.engine)
        delivery = await resume(frontend, 5, "a")
        assert set(outputs_of(delivery)) == {5, 6}
        assert {stream: type(outcome) for stream, outcome in outcomes_of(delivery).items()} == {6: AbortedError}
        plan = Worker(journaled.engine).plan()
        assert plan is not None
        assert len(plan.admissions) == 1, "the one that has ended does not run"

    play(scenario)


@pytest.mark.parametrize("caller", ["", "eve"])
def test_unknown_and_others_requests_are_told_apart_by_nothing(play: Any, caller: str) -> None:
    async def scenario(journaled: Journaled) -> None:
        Worker(journaled.engine)
        frontend = await attached(journaled.engine)
        frontend.submit(1, "a", caller="ada")
        for stream_id, request_id in (5, "a"), (6, "b"):
            outcome = outcomes_of(await resume(frontend, stream_id, request_id, caller))[stream_id]
            assert isinstance(outcome, NotFoundError)
            assert str(outcome).replace(f"'{request_id}'", "ID") == (
                "there is no request ID of this caller; it may have ended too long ago."
            )

    play(scenario)


def test_a_new_stream_takes_over_and_the_old_one_ends_in_a_way_that_nobody_resumes(play: Any) -> None:
    async def scenario(journaled: Journaled) -> None:
        worker, old = Worker(journaled.engine), await attached(journaled.engine)
        new = await attached(journaled.engine)
        old.submit(1, "a", max_tokens=9)
        worker.step()
        await told(old, 1, 1)
        assert outputs_of(await resume(new, 1, "a")) == {1: [7]}
        outcome = outcomes_of(await old.take())[1]
        assert isinstance(outcome, AbortedError)
        assert "resumed" in str(outcome)
        old.send(aborted_stream_ids=(1,))
        worker.step(8)
        assert await told(new, 1, 1) == [8]
        assert not old.outbox.empty().stream_ids.size
        new.send(aborted_stream_ids=(1,))
        assert isinstance(outcomes_of(await new.take())[1], AbortedError)

    play(scenario)


def test_a_lost_frontend_ends_no_request_and_its_parked_ones_go_on(play: Any) -> None:
    async def scenario(journaled: Journaled) -> None:
        worker, frontend = Worker(journaled.engine), await attached(journaled.engine)
        frontend.submit(1, "a", max_tokens=3)
        worker.step()
        frontend.send(parked_stream_ids=(1,))
        assert worker.plan() is None
        journaled.engine.detach_frontend(frontend.owner)
        while worker.step() is not None:
            pass
        frontend = await attached(journaled.engine)
        delivery = await resume(frontend, 5, "a")
        assert (outputs_of(delivery), outcomes_of(delivery)) == ({5: [7, 7, 7]}, {5: "length"})

    play(scenario)


def test_an_end_that_is_not_committed_yet_reaches_whoever_resumes(play: Any) -> None:
    async def scenario(journaled: Journaled) -> None:
        worker, frontend = Worker(journaled.engine), await attached(journaled.engine)
        frontend.submit(1, "a", max_tokens=2)
        worker.step()
        frontend.send(resumptions=(Resumption(5, "a"),))
        worker.step()
        assert not journaled.engine._requests, "it has ended"
        past, new, outcome = list[int](), list[int](), None
        while outcome is None:
            delivery = await frontend.take()
            past += outputs_of(delivery).get(5, [])
            new += tokens_of(delivery).get(5, [])
            outcome = outcomes_of(delivery).get(5)
        assert (past + new, outcome) == ([7, 7], "length")

    play(scenario)


def test_an_id_that_lives_unread_is_taken(play: Any) -> None:
    async def scenario(journaled: Journaled) -> None:
        Worker(journaled.engine)
        frontend = await attached(journaled.engine)
        frontend.submit(1, "a")
        journaled.engine.detach_frontend(frontend.owner)
        frontend = await attached(journaled.engine)
        frontend.submit(1, "a")
        assert isinstance(outcomes_of(await frontend.take())[1], DuplicateError)

    play(scenario)


def test_a_call_that_is_left_before_its_resumption_is_answered_ends_the_request(play: Any) -> None:
    async def scenario(journaled: Journaled) -> None:
        Worker(journaled.engine)
        first, second = await attached(journaled.engine), await attached(journaled.engine)
        first.submit(1, "a")
        second.send(resumptions=(Resumption(5, "a"),))
        second.send(aborted_stream_ids=(5,))
        assert isinstance(outcomes_of(await first.take())[1], AbortedError)
        assert not second.outbox.empty().resumed

    play(scenario)


def test_a_deadline_goes_on_by_the_clock_on_the_wall(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(journaled: Journaled) -> None:
        Worker(journaled.engine)
        frontend = await attached(journaled.engine)
        frontend.submit(1, "a", timeout_seconds=3600.0)
        frontend.submit(2, "b", timeout_seconds=60.0)
        await resume(frontend, 5, "b")
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now + 61)
        journaled.crash()
        frontend = await attached(journaled.engine)
        await asyncio.sleep(0.05)
        delivery = await resume(frontend, 6, "b")
        assert isinstance(outcomes_of(delivery)[6], DeadlineError)
        assert not outcomes_of(await resume(frontend, 7, "a"))

    play(scenario)


def test_output_that_is_computed_anew_does_not_count_as_a_cached_prompt(play: Any) -> None:
    async def scenario(journaled: Journaled) -> None:
        worker, frontend = Worker(journaled.engine), await attached(journaled.engine)
        frontend.submit(1, "a", num_samples=2, max_tokens=45)
        for _ in range(42):
            worker.step()
        await told(frontend, 2, 40)
        journaled.crash()
        worker, frontend = Worker(journaled.engine), await attached(journaled.engine)
        while worker.step() is not None:
            pass
        delivery = await resume(frontend, 5, "a")
        assert [ending.num_cached_tokens for ending in delivery.endings] == [0, 0]

    play(scenario)


def test_those_that_waited_longest_go_first_after_a_crash_too(play: Any) -> None:
    async def scenario(journaled: Journaled) -> None:
        Worker(journaled.engine)
        frontend = await attached(journaled.engine)
        for stream_id, (request_id, priority) in enumerate([("last", 9), ("first", 0), ("second", 0)]):
            frontend.submit(stream_id, request_id, priority=priority, length=3 + stream_id)
        await resume(frontend, 9, "last")
        journaled.crash()
        worker, frontend = Worker(journaled.engine), await attached(journaled.engine)
        frontend.submit(1, "new", length=9)
        plan = worker.plan()
        assert plan is not None
        assert [len(admission.token_ids) for admission in plan.admissions] == [4, 5, 9, 3]

    play(scenario)


def test_a_request_of_another_model_ends_when_a_worker_comes(play: Any) -> None:
    async def scenario(journaled: Journaled) -> None:
        Worker(journaled.engine)
        frontend = await attached(journaled.engine)
        frontend.submit(1, "a")
        await resume(frontend, 5, "a")
        journaled.crash()
        Worker(journaled.engine, model("other"))
        frontend = await attached(journaled.engine)
        outcome = outcomes_of(await resume(frontend, 5, "a"))[5]
        assert isinstance(outcome, UnavailableError)
        assert "no longer served" in str(outcome)

    play(scenario)


def test_once_the_journal_fails_nothing_more_is_told_or_accepted(play: Any) -> None:
    async def scenario(journaled: Journaled) -> None:
        worker, frontend = Worker(journaled.engine), await attached(journaled.engine)
        frontend.submit(1, "a", max_tokens=9)
        worker.step()
        await told(frontend, 1, 1)
        # The next commit finds the disk full.
        file: sqlite3.Connection = journaled.engine._journaling._journal._file._file  # type: ignore[union-attr]
        file.execute("PRAGMA query_only = ON")
        worker.step(8)
        delivery = await frontend.take()
        assert not delivery.stream_ids.size
        outcome = outcomes_of(delivery)[1]
        assert isinstance(outcome, UnavailableError)
        assert "journal" in str(outcome)
        assert delivery.serving is not None
        assert delivery.serving.model is None, "health tells of it"
        worker.plan()
        frontend.submit(2, "b")
        assert str(outcomes_of(await frontend.take())[2]) == str(outcome)
        assert str(outcomes_of(await resume(frontend, 3, "a"))[3]) == str(outcome)
        journaled.crash()
        frontend = await attached(journaled.engine)
        assert outputs_of(await resume(frontend, 5, "a")) == {5: [7]}

    play(scenario)


def test_without_a_journal_nothing_is_resumed() -> None:
    async def main() -> None:
        engine = Engine(load_config({}, {}))
        Worker(engine)
        frontend = await attached(engine)
        frontend.submit(1, "a")
        outcome = outcomes_of(await resume(frontend, 5, "a"))[5]
        assert isinstance(outcome, NotFoundError)
        assert "keeps no journal" in str(outcome)

    asyncio.run(main())


def test_many_requests_have_each_a_place_of_its_own(play: Any) -> None:
    """More than the slots begin with, some of which are used again."""

    async def scenario(journaled: Journaled) -> None:
        worker, frontend = Worker(journaled.engine, num_blocks=500), await attached(journaled.engine)
        for round_number in range(2):
            for stream_id in range(200):
                frontend.submit(1000 * round_number + stream_id, f"{round_number}-{stream_id}", max_tokens=2)
            streams, ended = dict[int, list[int]](), 0
            while ended < 200:
                worker.step(7 + round_number)
                await asyncio.sleep(0)
                delivery = frontend.outbox.empty()
                ended += len(delivery.endings)
                for stream_id, token_ids in tokens_of(delivery).items():
                    streams.setdefault(stream_id, []).extend(token_ids)
            first = 1000 * round_number
            assert streams == {stream_id: [7 + round_number] * 2 for stream_id in range(first, first + 200)}
        slots = journaled.engine._journaling.slots  # type: ignore[union-attr]
        assert not slots.requests()
        assert len(slots._requests) == 200
        np.testing.assert_array_equal(np.sort(slots._free), np.arange(200))

    play(scenario)
