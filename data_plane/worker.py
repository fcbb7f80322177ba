"""The worker: attaches to the engine, again and again, and answers its plans. Knows not what a step does."""

import logging
import secrets
import time

import grpc

from blockplane.data_plane.backends.backend import Backend
from blockplane.data_plane.backends.cpu import CPU
from blockplane.data_plane.configure_check import check_configure
from blockplane.data_plane.engine_stream import LEAVING, EngineStream
from blockplane.data_plane.grammars import Grammars
from blockplane.data_plane.kept_runner import KeptRunner
from blockplane.data_plane.kv_cache import layer_kv_specs, num_kv_bytes
from blockplane.data_plane.metrics import worker_metrics
from blockplane.data_plane.models.interface import Model
from blockplane.data_plane.pace import Pace
from blockplane.data_plane.record import Record
from blockplane.data_plane.reloading import WeightSource
from blockplane.data_plane.runner import Runner
from blockplane.protos import wire
from blockplane.protos.access import Access
from blockplane.protos.channel import PEER_OPTIONS, RECONNECT_SECONDS
from blockplane.protos.error_details import error_of_call
from blockplane.protos.errors import BlockplaneError, ProtocolError
from blockplane.protos.metric_families import MetricFamilies
from blockplane.protos.model import ModelInfo
from blockplane.protos.step_times import StepTimes
from blockplane.v1 import engine_pb2 as pb

logger = logging.getLogger(__name__)

_PASSING = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.UNKNOWN)
"""Statuses of a stream that say nothing against this worker: the engine is away, restarting, or stumbled."""
_PLAIN = Access()
_FAULT_SECONDS = 5.0
"""How long the engine gets to hear why a worker gives up a stream."""


class Worker:
    """A loaded model that serves whichever engine it is attached to.

    Attributes:
        boot_id: 64 random bits, of this process: as long as they are the same its KV may still be there.
        pace: how long its steps took.
    """

    def __init__(
        self,
        model: Model,
        info: ModelInfo,
        available_memory: int,
        num_draft_tokens: int = 0,
        draft_model: Model | None = None,
        record: Record | None = None,
        grammars: Grammars | None = None,
        backend: Backend = CPU,
        serves: bool = True,
        weights: WeightSource | None = None,
    ) -> None:
        """
        Args:
            available_memory: bytes that it gives to KV, its draft model's too.
            num_draft_tokens, draft_model, grammars: as `Runner` has them; the draft model's vocabulary is the model's.
            record: where its plans and results go; None = nowhere.
            backend: where the models' weights lie.
            serves: False = it leaves once it has built what the engine configures.
            weights: whence the model can get others; None = it keeps those that it has.
        """
        self.boot_id = secrets.randbits(64)
        self.pace = Pace()
        self._model, self._draft_model = model, draft_model
        self._info = info
        self._available_memory = available_memory
        self._backend, self._serves, self._weights = backend, serves, weights
        self._kept = KeptRunner(model, info, num_draft_tokens, draft_model, grammars, backend)
        self._enforces_structure = grammars is not None
        self._record = record
        self._attached: EngineStream | None = None
        self._is_leaving = False

    def serve(self, engine_address: str, access: Access = _PLAIN) -> None:
        """Attach, compute until the stream ends, attach again, until told to leave.

        Raises:
            ConfigurationError: what `access` names cannot be read.
            BlockplaneError: the engine refuses this worker for good; the message is the engine's. Or it only builds,
                and cannot build what the engine asks for.
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

    @property
    def is_attached(self) -> bool:
        """Whether it computes what an engine plans; any thread may ask."""
        return self._attached is not None

    def metrics(self) -> MetricFamilies:
        """What Prometheus is told; any thread may ask."""
        return worker_metrics(self._info.name, self.pace, self._kept.buckets.counts(), is_attached=self.is_attached)

    def _attach(self, engine_address: str, access: Access) -> str:
        """One attach, from hello to the stream's end, the reason of which it returns."""
        num_steps = self.pace.num_steps
        with access.channel(engine_address, PEER_OPTIONS) as channel:
            stream = EngineStream(channel, self._hello(), access.metadata(engine_address))
            try:
                self._serve_attached(stream)
            except grpc.RpcError as error:
                # Whoever has computed for this engine is no stranger to it: what went wrong is this stream's.
                is_passing = error.code() in _PASSING or (
                    error.code() is grpc.StatusCode.INTERNAL and self.pace.num_steps > num_steps
                )
                if not is_passing and not self._is_leaving:
                    raise error_of_call(error) from None
                return error.details() or error.code().name
            except ProtocolError as error:
                stream.end_with(pb.AttachWorkerRequest(fault=pb.Fault(message=str(error))), _FAULT_SECONDS)
                if not self._serves:
                    raise
                return str(error)
            finally:
                self._attached = None
                stream.close()
        return "the engine closed the stream"

    def _serve_attached(self, stream: EngineStream) -> None:
        """Ready to the configuration, a result to each plan, in order, however many plans are there already.

        Raises:
            ProtocolError: the engine asks for what cannot be done.
        """
        messages = iter(stream)
        first, _ = next(messages, (None, 0))
        if first is None:
            return
        _expect(first, "configure")
        stream.set_heartbeat(first.configure.heartbeat_milliseconds)
        runner = self._configure(first.configure)
        if not self._serves:
            self._is_leaving = True
            return
        stream.send(pb.AttachWorkerRequest(ready=_ready(runner)))
        self._attached = stream
        logger.info("attached, with %d KV blocks", runner.configure.num_blocks)
        self.pace.begin_attach()
        for message, received in messages:
            if self._weights is not None and message.HasField("reload"):
                stream.send(pb.AttachWorkerRequest(reloaded=self._reload(self._weights, message.reload.model)))
                continue
            with self.pace.step():
                _expect(message, "plan")
                stream.send(pb.AttachWorkerRequest(result=self._step(runner, message.plan, received)))

    def _step(self, runner: Runner, plan: pb.StepPlan, received: int) -> pb.StepResult:
        """`received`: when the plan came, nanoseconds of `time.monotonic_ns`."""
        began = time.monotonic_ns()
        if self._record is not None:
            self._record.plan(plan)
        result = wire.result_to_proto(runner.step(wire.plan_from_proto(plan)))
        if self._record is not None:
            # Without times: two records of the same work are the same.
            self._record.result(result)
        times = StepTimes.of(received, began, *runner.marks, time.monotonic_ns())
        if times is not None:
            result.times = times.to_bytes()
        return result

    def _reload(self, weights: WeightSource, model: str) -> pb.WeightsReloaded:
        """Read other weights; whatever is wrong with them, those that are there stay and serve on."""
        logger.info("reading weights anew%s", model and f", from {model}")
        try:
            write = weights.read(model)
        except Exception as error:
            logger.error("the weights stay as they are: %s", error, exc_info=not isinstance(error, BlockplaneError))
            sentence = str(error) if isinstance(error, BlockplaneError) else f"reading them failed: {error!r}."
            return pb.WeightsReloaded(model_fingerprint=self._kept.fingerprint, failure=sentence)
        write()
        self._kept.renew_weights()
        if self._record is not None:
            self._record.reload(model, self._kept.fingerprint)
        logger.info("the weights are new, fingerprint %s", self._kept.fingerprint.hex()[:16])
        return pb.WeightsReloaded(model_fingerprint=self._kept.fingerprint)

    def _configure(self, told: pb.Configure) -> Runner:
        configure = wire.configure_from_proto(told)
        kv_bytes = num_kv_bytes(configure, self._model, self._draft_model)
        check_configure(configure, self._info.max_model_len, kv_bytes, self._available_memory)
        runner = self._kept.configured(configure)
        if self._record is not None:
            self._record.attach(self._kept.fingerprint, told)
        return runner

    def _hello(self) -> pb.WorkerHello:
        runner = self._kept.runner
        return pb.WorkerHello(
            protocol_version=wire.PROTOCOL_VERSION,
            model=wire.model_info_to_proto(self._info),
            layers=[wire.layer_to_proto(spec) for spec in layer_kv_specs(self._model, self._draft_model)],
            available_memory=self._available_memory,
            bucket_rules=wire.bucket_rules_to_proto(self._backend.bucket_rules),
            model_fingerprint=self._kept.fingerprint,
            boot_id=self.boot_id,
            last_epoch=0 if runner is None else runner.configure.epoch,
            last_step=0 if runner is None else runner.last_step,
            enforces_structure=self._enforces_structure,
            reloads_weights=self._weights is not None,
            weight_epoch=self._kept.weight_epoch,
        )


def _expect(message: pb.AttachWorkerResponse, kind: str) -> None:
    if message.WhichOneof("message") != kind:
        raise ProtocolError(
            f"expected a {kind} from the engine, got {message.WhichOneof('message')}; run the same version of"
            " Blockplane on both."
        )


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
