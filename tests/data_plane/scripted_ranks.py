"""An engine that a test drives by hand through what it says to the ranks of a group. Knows no scheduler."""

from collections.abc import Iterator, Sequence
from queue import Queue
from threading import Condition, Thread

import grpc
from scripted_attaches import CONFIGURE, plan

from blockplane.protos import wire
from blockplane.protos.plan import Configure, StepPlan, StepResult
from blockplane.v1 import engine_pb2 as pb
from blockplane.v1.engine_pb2_grpc import EngineServicer

THAT_WAS_ALL = grpc.StatusCode.FAILED_PRECONDITION, "that was all."
SECONDS = 120.0
"""How long anything may take on a busy machine."""


class RankStream:
    """One rank's stream; heartbeats are left out.

    Attributes:
        join: its first message. has_ended: whether the worker has left it.
    """

    def __init__(self, join: pb.JoinRanks, requests: Iterator[pb.AttachWorkerRequest]) -> None:
        self.join = join
        self.outgoing: Queue[pb.AttachWorkerResponse | tuple[grpc.StatusCode, str] | None] = Queue()
        self._came: Queue[pb.AttachWorkerRequest | None] = Queue()
        Thread(target=self._read, args=(requests,), daemon=True).start()

    def _read(self, requests: Iterator[pb.AttachWorkerRequest]) -> None:
        try:
            for message in requests:
                if message.WhichOneof("message") != "heartbeat":
                    self._came.put(message)
        except grpc.RpcError:
            pass
        self._came.put(None)

    def next(self, kind: str) -> pb.AttachWorkerRequest:
        message = self._came.get(timeout=SECONDS)
        assert message is not None, f"the stream ended before a {kind}"
        assert message.WhichOneof("message") == kind, message
        return message

    def wait_for_end(self) -> None:
        """The worker's side has gone."""
        assert self._came.get(timeout=SECONDS) is None

    def send(self, message: pb.AttachWorkerResponse) -> None:
        self.outgoing.put(message)

    def end(self, status: grpc.StatusCode | None = None, message: str = "lost.") -> None:
        """End it, well or with an error."""
        self.outgoing.put(None if status is None else (status, message))


class RankEngine(EngineServicer):
    """Takes whoever joins; the rest is the test's.

    Attributes:
        joined: streams that no test has taken, in their order.
    """

    def __init__(self) -> None:
        self.joined: list[RankStream] = []
        self._all: list[RankStream] = []
        self._is_over = False
        self._changed = Condition()
        self._num_meetings = 0

    def AttachWorker(  # noqa: N802
        self, requests: Iterator[pb.AttachWorkerRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.AttachWorkerResponse]:
        stream = RankStream(next(requests).join, requests)
        with self._changed:
            self.joined.append(stream)
            self._all.append(stream)
            if self._is_over:
                stream.end(*THAT_WAS_ALL)
            self._changed.notify_all()
        while (message := stream.outgoing.get()) is not None:
            if isinstance(message, tuple):
                context.abort(*message)
            else:
                yield message

    def dismiss(self) -> None:
        """Refuse for good whoever is there and whoever comes."""
        with self._changed:
            self._is_over = True
            for stream in self._all:
                stream.end(*THAT_WAS_ALL)

    def ranks(self, name: str = "g", size: int = 2) -> list[RankStream]:
        """The streams of a group, once all of them have joined, in the order of ranks."""

        def of_group() -> list[RankStream]:
            return sorted((each for each in self.joined if each.join.group_name == name), key=lambda s: s.join.rank)

        with self._changed:
            assert self._changed.wait_for(lambda: len(of_group()) == size, SECONDS), "not all ranks came"
            taken = of_group()
            self.joined = [each for each in self.joined if each not in taken]
        assert [each.join.rank for each in taken] == list(range(size))
        return taken

    def meet(self, ranks: Sequence[RankStream], context_parallel_size: int = 1) -> list[pb.WorkerHello]:
        """Tell them where, and hear their hellos."""
        self._num_meetings += 1
        told = pb.Rendezvous(
            tensor_parallel_size=len(ranks),
            context_parallel_size=context_parallel_size,
            address=ranks[0].join.address,
            meeting=self._num_meetings,
        )
        for rank in ranks:
            rank.send(pb.AttachWorkerResponse(rendezvous=told))
        return [rank.next("hello").hello for rank in ranks]

    def ready(
        self, configure: Configure = CONFIGURE, name: str = "g", size: int = 2
    ) -> tuple[list[RankStream], list[pb.WorkerHello]]:
        """Bring the ranks of a group to where they can be given plans."""
        ranks = self.ranks(name, size)
        hellos = self.meet(ranks, configure.context_parallel_size)
        for rank in ranks:
            rank.send(pb.AttachWorkerResponse(configure=wire.configure_to_proto(configure)))
        for rank in ranks:
            rank.next("ready")
        return ranks, hellos


def result_of(ranks: Sequence[RankStream], step: StepPlan) -> StepResult:
    """What rank 0 answers to a plan."""
    ranks[0].send(plan(step))
    return wire.result_from_proto(ranks[0].next("result").result)


def tokens_of(ranks: Sequence[RankStream], *steps: StepPlan) -> list[int]:
    return [token_id for step in steps for token_id in result_of(ranks, step).token_ids.tolist()]
