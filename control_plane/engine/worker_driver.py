"""Drives one attached worker over its stream: plans out, answers in, signs of life. Decides nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from blockplane.control_plane.engine.engine import Engine
from blockplane.control_plane.engine.group import WorkerGroup
from blockplane.protos import wire
from blockplane.protos.errors import ProtocolError, UnavailableError
from blockplane.protos.plan import Configure
from blockplane.v1 import engine_pb2 as pb


class WorkerDriver:
    """One worker's stream from its configuration to its end.

    Three tasks share it: one reads, one sends what is to be planned meanwhile, one looks whether the worker lives.
    After an answer the reader sends the next plan itself, so that nothing stands between the two.
    """

    def __init__(
        self,
        engine: Engine,
        group: WorkerGroup,
        messages: AsyncIterator[pb.AttachWorkerRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        self._engine, self._group, self._messages, self._context = engine, group, messages, context
        self._is_sending = False

    async def run(self) -> None:
        """Until the worker has left and nothing is left for it.

        Raises:
            ProtocolError: the worker broke the protocol.
            UnavailableError: it is gone.
        """
        configure = pb.AttachWorkerResponse(configure=wire.configure_to_proto(self._group.configure))
        await self._context.write(configure)
        tasks = [asyncio.create_task(task) for task in (self._read(), self._send_whenever_asked(), self._watch())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()

    async def _read(self) -> None:
        group, engine = self._group, self._engine
        async for message in self._messages:
            group.heard()
            kind = message.WhichOneof("message")
            if kind == "result" and group.is_ready:
                engine.take_result(group, wire.result_from_proto(message.result))
                await self._send()
            elif kind != "heartbeat":
                self._take(message, kind)
        raise UnavailableError("the worker closed its side of the stream.")

    def _take(self, message: pb.AttachWorkerRequest, kind: str | None) -> None:
        """What comes rarely."""
        if kind == "leaving":
            self._engine.worker_leaves(self._group)
        elif kind == "reloaded":
            self._engine.reloads.answered(self._group, message.reloaded.model_fingerprint, message.reloaded.failure)
        elif kind == "fault":
            raise UnavailableError(f"the worker gave up: {message.fault.message}")
        elif kind == "ready" and not self._group.is_ready:
            _check_ready(self._group.configure, message.ready)
            self._engine.worker_ready(self._group)
        else:
            expected = "result" if self._group.is_ready else "ready"
            raise ProtocolError(f"expected a {expected} from the worker, got {kind}.")

    async def _send_whenever_asked(self) -> None:
        group = self._group
        while not group.is_lost and not self._engine.may_go(group):
            await group.work.wait()
            group.work.clear()
            await self._send()
            if (model := group.take_reload()) is not None:
                # The group is empty: nobody else sends.
                await self._context.write(pb.AttachWorkerResponse(reload=pb.ReloadWeights(model=model)))
        if group.is_lost:
            raise UnavailableError("the worker has attached anew.")

    async def _send(self) -> None:
        """Send all that is to be computed, and only then let deliveries go."""
        group, engine = self._group, self._engine
        if self._is_sending:
            # Whoever sends looks for a next plan before it ends.
            return
        self._is_sending = True
        try:
            while group.is_ready and not group.is_lost and (plan := engine.next_plan(group)) is not None:
                message = pb.AttachWorkerResponse(plan=wire.plan_to_proto(plan))
                group.steps.sent(message.ByteSize())
                await self._context.write(message)
        finally:
            self._is_sending = False
        engine.flush(group.steps)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._group.check_alive())


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
