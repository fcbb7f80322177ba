"""The worker: attaches to the engine, again and again, and answers its plans. Knows not what a step does."""

import logging
import time
from collections.abc import Callable

import grpc

from blockplane.data_plane.engine_stream import LEAVING, EngineStream
from blockplane.data_plane.metrics import worker_metrics
from blockplane.data_plane.pace import Pace
from blockplane.data_plane.place import Place
from blockplane.data_plane.runner import Runner
from blockplane.data_plane.served_model import ServedModel, expect
from blockplane.data_plane.transfers.fetches import Fetches
from blockplane.data_plane.transfers.transfers import Transfers
from blockplane.protos.access import Access
from blockplane.protos.channel import PEER_OPTIONS, RECONNECT_SECONDS
from blockplane.protos.error_details import error_of_call
from blockplane.protos.errors import ProtocolError, RanksError, UnavailableError
from blockplane.protos.metric_families import MetricFamilies
from blockplane.v1 import engine_pb2 as pb

logger = logging.getLogger(__name__)

_PASSING = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.UNKNOWN)
"""Statuses of a stream that say nothing against this worker: the engine is away, restarting, or stumbled."""
_PLAIN = Access()
_FAULT_SECONDS = 5.0
"""How long the engine gets to hear why a worker gives up a stream."""
_CLOSED = "the engine closed the stream"


def _nothing() -> str:
    return ""


class Worker:
    """Serves whichever engine it is attached to, alone or as one rank of a group.

    Attributes:
        boot_id: its process's, as `Place` has it.
        pace: how long its steps took.
    """

    def __init__(
        self,
        place: Place,
        transfers: Transfers | None = None,
        *,
        serves: bool = True,
        log_tail: Callable[[], str] = _nothing,
    ) -> None:
        """
        Args:
            place: what it serves, and with whom.
            transfers: its part in moving KV blocks; None = it reads others' by gRPC, and lets nobody read its own.
            serves: False = it leaves once it has built what the engine configures.
            log_tail: the last lines of this process's log, for the engine to show if it cannot load or build.
        """
        self.boot_id = place.boot_id
        self.pace = Pace()
        self._place, self._transfers = place, transfers or Transfers()
        self._serves, self._log_tail = serves, log_tail
        self._attached: EngineStream | None = None
        self._is_leaving = self._has_served = False

    def serve(self, engine_address: str, access: Access = _PLAIN) -> None:
        """Attach, compute until the stream ends, attach again, until told to leave.

        Raises:
            ConfigurationError: what `access` names cannot be read.
            BlockplaneError: the engine refuses this worker for good; the message is the engine's. Or it only builds,
                and cannot build what the engine asks for. Or it is a rank, and its part of the model cannot be loaded.
        """
        last_reason = None
        while True:
            reason = self._attach(engine_address, access)
            if self._is_leaving:
                logger.info("left %s: %s", engine_address, reason)
                return
            if reason != last_reason:
                logger.warning("not attached to %s: %s; trying again", engine_address, reason)
            last_reason = reason
            time.sleep(RECONNECT_SECONDS)

    def leave(self) -> bool:
        """Tell the engine goodbye, for a signal handler: `serve` returns once the engine has ended the stream.

        Returns:
            Whether there is anything to wait for: False where this worker serves no engine.
        """
        if self._attached is None:
            return False
        self._is_leaving = True
        self._attached.send(LEAVING)
        return True

    def told_to_end(self) -> None:
        """A signal has come, though its handler may not run: a main thread that waits for other ranks runs none."""
        self._place.told_to_end()

    @property
    def is_attached(self) -> bool:
        """Whether it computes what an engine plans; any thread may ask."""
        return self._attached is not None

    def metrics(self) -> MetricFamilies:
        """What Prometheus is told; any thread may ask."""
        model = self._place.model
        if model is None:
            return MetricFamilies()
        name, buckets = model.info.name, model.kept.buckets.counts()
        families = worker_metrics(name, self.pace, buckets, is_attached=self.is_attached)
        self._transfers.counts.tell(families, {"model_name": name})
        return families

    def _attach(self, engine_address: str, access: Access) -> str:
        """One attach, from its first message to the stream's end, the reason of which it returns."""
        num_steps, fetches = self.pace.num_steps, self._transfers.attach()
        with access.channel(engine_address, PEER_OPTIONS) as channel:
            first = self._place.first_message(self._hello)
            stream = EngineStream(channel, first, access.metadata(engine_address), fetches.take)
            try:
                self._serve_attached(stream, fetches)
                return _CLOSED
            except grpc.RpcError as error:
                return self._told(error, num_steps)
            except UnavailableError as error:
                # Where another rank is at fault the engine knows more of it.
                told = stream.end_with(_fault(str(error)), _FAULT_SECONDS)
                return str(error) if told is None else self._told(told, num_steps)
            except ProtocolError as error:
                stream.end_with(_fault(str(error), self._log_of_build()), _FAULT_SECONDS)
                if not self._serves or (self._place.has_peers and not self._has_served):
                    raise
                return str(error)
            except Exception as error:
                if self._attached is None:
                    stream.end_with(_fault(str(error) or repr(error), self._log_of_build()), _FAULT_SECONDS)
                raise
            finally:
                self._attached = None
                self._transfers.end(fetches)
                self._place.leave()
                stream.close()

    def _told(self, error: grpc.RpcError, num_steps: int) -> str:
        """What the engine ended a stream with, that had begun after so many steps, if it may be tried again.

        Raises:
            BlockplaneError: it may not.
        """
        # Whoever has computed for this engine is no stranger to it: what went wrong is this stream's.
        is_passing = error.code() in _PASSING or (
            error.code() is grpc.StatusCode.INTERNAL and self.pace.num_steps > num_steps
        )
        if not is_passing and not self._is_leaving:
            failure = error_of_call(error)
            if not (self._has_served and isinstance(failure, RanksError)):
                raise failure from None
        return error.details() or error.code().name

    def _serve_attached(self, stream: EngineStream, fetches: Fetches) -> None:
        """Ready to the configuration, an answer to each message, in order, however many are there already.

        Raises:
            ProtocolError: the engine asks for what cannot be done.
            UnavailableError: other ranks of the group are gone.
        """
        model = self._place.enter(stream, self._hello)
        received = None if model is None else next(iter(stream), None)
        if model is None or received is None:
            return
        expect(received[0], "configure")
        stream.set_heartbeat(received[0].configure.heartbeat_milliseconds)
        runner = model.configure(received[0].configure)
        if not self._serves:
            self._is_leaving = True
            return
        self._transfers.begin(fetches, model.blocks())
        stream.send(pb.AttachWorkerRequest(ready=_ready(runner)))
        self._attached, self._has_served = stream, True
        logger.info("attached, with %d KV blocks", runner.configure.num_blocks)
        self._answer(model, stream)

    def _answer(self, model: ServedModel, stream: EngineStream) -> None:
        self.pace.begin_attach()
        answers = self._place.answers
        for message, at, _ in self._place.messages(stream):
            if message.HasField("plan"):
                with self.pace.step():
                    answer = model.answer(message, at)
            else:
                answer = model.answer(message, at)
            if answers:
                stream.send(answer)

    def _log_of_build(self) -> str:
        """The end of the log, where what went wrong is this process's own: what it could not load or build."""
        return (self._log_tail() or "it has logged nothing") if self._attached is None else ""

    def _hello(self, model: ServedModel) -> pb.WorkerHello:
        hello = model.hello()
        hello.boot_id = self.boot_id
        hello.role, hello.transfer_address = self._transfers.role, self._transfers.address
        hello.transports.extend(self._transfers.transports)
        return hello


def _fault(message: str, log: str = "") -> pb.AttachWorkerRequest:
    return pb.AttachWorkerRequest(fault=pb.Fault(message=message, log=log))


def _ready(runner: Runner) -> pb.WorkerReady:
    """The manifest of what was built, for the engine to compare with what it asked for."""
    configure, shapes = runner.configure, runner.graphs.num_runs.keys()
    return pb.WorkerReady(
        num_blocks=configure.num_blocks,
        num_batched_tokens_buckets=sorted(shape.num_tokens for shape in shapes if not shape.num_seqs),
        num_seqs_buckets=sorted({shape.num_seqs for shape in shapes} - {0}),
        decode_context_length_buckets=sorted({shape.context_len for shape in shapes} - {0}),
        kv_segment_size=configure.kv_segment_size,
        num_draft_tokens=configure.num_draft_tokens,
    )
