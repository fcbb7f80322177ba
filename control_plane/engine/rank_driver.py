"""Drives one rank's stream, from its first message to its end. Decides nothing, and sends no plan."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from blockplane.control_plane.engine.engine import Engine
from blockplane.control_plane.engine.group import WorkerGroup
from blockplane.control_plane.engine.hello import Hello
from blockplane.control_plane.engine.hello_wire import hello_from_proto
from blockplane.control_plane.engine.rank import Rank
from blockplane.control_plane.engine.rank_meeting import RankMeeting
from blockplane.protos import wire
from blockplane.protos.errors import BlockplaneError, ProtocolError, UnavailableError
from blockplane.protos.plan import Configure
from blockplane.v1 import engine_pb2 as pb

logger = logging.getLogger(__name__)

_MAX_MESSAGE_BYTES = 500
"""Of what a worker says of its end, in errors: they go as metadata, and the log has all of it."""


class RankDriver:
    """A rank's stream: it meets the others, is told what to build, and computes along as long as all of them live.

    Three tasks share it: one reads, one sends, one looks whether the worker lives.
    """

    def __init__(
        self,
        engine: Engine,
        meeting: RankMeeting,
        rank: Rank,
        messages: AsyncIterator[pb.AttachWorkerRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        self._engine, self._meeting, self._rank = engine, meeting, rank
        self._messages, self._context = messages, context

    async def run(self) -> None:
        """Until the group has left and nothing is left for it.

        Raises:
            ProtocolError: the worker broke the protocol.
            UnavailableError: it is gone, or another rank of its group is.
            BlockplaneError: whatever else the group has ended by.
        """
        # Before anything may end the stream: where that happens amid the first message, gRPC would begin it twice.
        await self._context.send_initial_metadata(())
        tasks = [asyncio.create_task(task) for task in (self._read(), self._send(), self._watch())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()

    @property
    def group(self) -> WorkerGroup:
        """Asked for once there is one."""
        group = self._meeting.group
        assert group is not None
        return group

    # -- reading -------------------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        async for message in self._messages:
            self._rank.signs.heard()
            kind = message.WhichOneof("message")
            if kind != "heartbeat":
                self._take(message, kind)
        raise UnavailableError("the worker closed its side of the stream.")

    def _take(self, message: pb.AttachWorkerRequest, kind: str | None) -> None:
        """What comes rarely."""
        rank = self._rank
        if kind == "fault":
            self._take_fault(message.fault)
        elif kind == "hello" and rank.configure is None:
            self.say(hello_from_proto(message.hello))
        elif kind == "leaving" and rank.configure is not None:
            self._engine.worker_leaves(self.group)
        elif kind == "ready" and rank.configure is not None and not rank.is_ready:
            _check_ready(rank.configure, message.ready)
            rank.is_ready = True
            if all(each.is_ready for each in self._meeting.ranks):
                self._engine.worker_ready(self.group)
        elif kind == "fetched" and rank.is_ready:
            fetched = message.fetched
            self._engine.blocks_fetched(self.group, rank.number, fetched.transfer_id, fetched.failure)
        else:
            raise ProtocolError(f"expected a {self._expected} from the worker, got {kind}.")

    @property
    def _expected(self) -> str:
        if self._rank.configure is None:
            return "hello"
        return "heartbeat" if self._rank.is_ready else "ready"

    def say(self, hello: Hello) -> None:
        """Take the worker's hello; where it is the last of its group's, have the group attach.

        Raises:
            BlockplaneError: it is refused, with all its group.
        """
        try:
            if (whole := self._meeting.say(self._rank, hello)) is not None:
                ranks, name = self._meeting.ranks, self._meeting.name
                self._meeting.agree(self._engine.attach_worker(whole, ranks, name))
        except BlockplaneError as error:
            self._meeting.end(error)
            raise

    def _take_fault(self, fault: pb.Fault) -> None:
        ending = f"\nThe last lines of its log:\n{fault.log}" if fault.log else ""
        logger.error("%s gave up: %s%s", self._meeting.describe(self._rank), fault.message, ending)
        message = fault.message.encode()[:_MAX_MESSAGE_BYTES].decode(errors="ignore")
        self._meeting.gave_up(self._rank, message, fault.log)
        raise UnavailableError(f"the worker gave up: {message}")

    # -- sending -------------------------------------------------------------------------------------------------------

    async def _send(self) -> None:
        meeting, rank = self._meeting, self._rank
        if meeting.name and await self._until(lambda: meeting.has_met):
            await self._context.write(pb.AttachWorkerResponse(rendezvous=self._rendezvous()))
        if await self._until(lambda: rank.configure is not None):
            assert rank.configure is not None
            await self._context.write(pb.AttachWorkerResponse(configure=wire.configure_to_proto(rank.configure)))
            await self._serve()

    async def _serve(self) -> None:
        """Say what is to be said to a worker that has its configuration, until its end."""
        fetches = self._rank.fetches
        while await self._until(lambda: bool(fetches)):
            await self._context.write(self._next_fetch())

    def _next_fetch(self) -> pb.AttachWorkerResponse:
        """What its worker is to read next; asked for where there is something."""
        rank = self._rank
        return pb.AttachWorkerResponse(fetch=wire.fetch_to_proto(rank.fetches.popleft(), rank.number))

    async def _until(self, condition: Callable[[], bool]) -> bool:
        """Wait for `condition`; False = the stream is to end well. Raises what it is to end by."""
        rank = self._rank
        while not (rank.is_ended or condition()):
            await rank.work.wait()
            rank.work.clear()
        if rank.error is not None:
            raise rank.error
        return not rank.is_ended

    def _rendezvous(self) -> pb.Rendezvous:
        return pb.Rendezvous(
            tensor_parallel_size=self._meeting.size,
            context_parallel_size=self._meeting.context_parallel_size,
            address=self._meeting.address,
            meeting=self._meeting.number,
        )

    # -- signs of life -------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(min(self._check_alive(), self._meeting.check_time()))

    def _check_alive(self) -> float:
        """As `WorkerGroup.check_alive` has it."""
        seconds, _ = self._rank.signs.check("it")
        return seconds


def _check_ready(configure: Configure, ready: pb.WorkerReady) -> None:
    """Refuse a worker that built something else than it was told; the message names both sides' values."""
    differences = []
    for name in _MANIFEST:
        told, built = getattr(configure, name), getattr(ready, name)
        if isinstance(told, tuple):
            told, built = list(told), list(built)
        if told != built:
            differences.append(f"{name} {told}, and it built {built}")
    if differences:
        raise ProtocolError(
            f"told the worker to build {'; '.join(differences)}; run the same version of Blockplane on both."
        )


_MANIFEST = (
    "num_blocks",
    "num_batched_tokens_buckets",
    "num_seqs_buckets",
    "decode_context_length_buckets",
    "kv_segment_size",
    "num_draft_tokens",
)
"""What a worker built, in the names of both messages."""
