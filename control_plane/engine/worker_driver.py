"""Drives a worker group over the stream of its rank 0: plans out, answers in. Decides nothing."""

from __future__ import annotations

from blockplane.control_plane.engine.rank_driver import RankDriver
from blockplane.protos import wire
from blockplane.protos.errors import UnavailableError
from blockplane.v1 import engine_pb2 as pb


class WorkerDriver(RankDriver):
    """The stream of a worker that is alone, or of the rank that tells the others of its group.

    After an answer the reader sends the next plan itself, so that nothing stands between the two.
    """

    _is_sending = False

    async def _read(self) -> None:
        signs, engine = self._rank.signs, self._engine
        async for message in self._messages:
            signs.heard()
            kind = message.WhichOneof("message")
            if kind == "result" and (group := self._meeting.group) is not None and group.is_ready:
                engine.take_result(group, wire.result_from_proto(message.result))
                await self._send_plans()
            elif kind != "heartbeat":
                self._take(message, kind)
        raise UnavailableError("the worker closed its side of the stream.")

    def _take(self, message: pb.AttachWorkerRequest, kind: str | None) -> None:
        if kind == "reloaded" and self._meeting.group is not None:
            self._engine.reloads.answered(self.group, message.reloaded.model_fingerprint, message.reloaded.failure)
        else:
            super()._take(message, kind)

    @property
    def _expected(self) -> str:
        return "result" if self._rank.is_ready else super()._expected

    async def _serve(self) -> None:
        group, rank = self.group, self._rank
        while not (rank.is_ended or self._engine.may_go(group)):
            await rank.work.wait()
            rank.work.clear()
            await self._send_plans()
            if (model := group.take_reload()) is not None:
                # The group is empty: nobody else sends.
                await self._context.write(pb.AttachWorkerResponse(reload=pb.ReloadWeights(model=model)))
        if rank.error is not None:
            raise rank.error

    async def _send_plans(self) -> None:
        """Send all that is to be computed, then what is to be read, and only then let deliveries go."""
        group, engine, fetches = self.group, self._engine, self._rank.fetches
        if self._is_sending:
            # Whoever sends looks for a next plan before it ends.
            return
        self._is_sending = True
        try:
            while group.is_ready and not group.is_lost:
                if (plan := engine.next_plan(group)) is not None:
                    message = pb.AttachWorkerResponse(plan=wire.plan_to_proto(plan))
                    group.steps.sent(message.ByteSize())
                elif fetches:
                    message = self._next_fetch()
                else:
                    break
                await self._context.write(message)
        finally:
            self._is_sending = False
        engine.flush(group.steps)

    def _check_alive(self) -> float:
        group = self._meeting.group
        return super()._check_alive() if group is None else group.check_alive()
