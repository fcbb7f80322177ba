"""A loaded model as an engine's messages find it: configured, stepped, given other weights. Knows no streams."""

import logging
import time
from collections.abc import Callable

import numpy as np
import torch

from blockplane.data_plane.backends.backend import Backend
from blockplane.data_plane.backends.cpu import CPU
from blockplane.data_plane.configure_check import check_configure
from blockplane.data_plane.grammars import Grammars
from blockplane.data_plane.kept_runner import KeptRunner
from blockplane.data_plane.kv_cache import layer_kv_specs, num_kv_bytes
from blockplane.data_plane.models.interface import Model
from blockplane.data_plane.ranks.collectives import ALONE, Ranks
from blockplane.data_plane.record import Record
from blockplane.data_plane.reloading import WeightSource
from blockplane.data_plane.runner import Runner
from blockplane.data_plane.transfers.blocks import MovableBlocks, movable_blocks
from blockplane.protos import wire
from blockplane.protos.errors import BlockplaneError, ProtocolError
from blockplane.protos.model import ModelInfo, joined_fingerprint
from blockplane.protos.step_times import StepTimes
from blockplane.v1 import engine_pb2 as pb

logger = logging.getLogger(__name__)


class ServedModel:
    """A model, or one rank's part of it, with its runner from one attach to the next.

    Of several ranks each has one, and all are given the same messages but for their configurations.

    Attributes:
        info: what the control plane is told of the model.
        kept: its runner, and what outlives that.
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
        weights: WeightSource | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        """
        Args:
            available_memory: bytes that it gives to KV, its draft model's too.
            num_draft_tokens, draft_model, grammars, ranks: as `Runner` has them; the draft model's vocabulary is the
                model's.
            record: where its plans and results go; None = nowhere.
            backend: where the models' weights lie.
            weights: whence the model can get others; None = it keeps those that it has.
        """
        self.info = info
        self._model, self._draft_model, self._ranks = model, draft_model, ranks
        self._available_memory, self._backend, self._weights = available_memory, backend, weights
        self.kept = KeptRunner(model, info, num_draft_tokens, draft_model, grammars, backend, ranks)
        # Rank 0 holds rows to grammars for all; whether it can is its own to say.
        self._enforces_structure = grammars is not None or ranks.rank > 0
        self._record = record

    def hello(self) -> pb.WorkerHello:
        """What is to be said of it; of the process that it is in, others know."""
        runner = self.kept.runner
        return pb.WorkerHello(
            protocol_version=wire.PROTOCOL_VERSION,
            model=wire.model_info_to_proto(self.info),
            layers=[wire.layer_to_proto(spec) for spec in layer_kv_specs(self._model, self._draft_model)],
            available_memory=self._available_memory,
            bucket_rules=wire.bucket_rules_to_proto(self._backend.bucket_rules),
            model_fingerprint=self.kept.fingerprint,
            last_epoch=0 if runner is None else runner.configure.epoch,
            last_step=0 if runner is None else runner.last_step,
            enforces_structure=self._enforces_structure,
            reloads_weights=self._weights is not None,
            weight_epoch=self.kept.weight_epoch,
        )

    def configure(self, told: pb.Configure) -> Runner:
        """Build what the engine tells it to, or find that it stands.

        Raises:
            ProtocolError: it asks for what cannot be done.
        """
        configure = wire.configure_from_proto(told)
        kv_bytes = num_kv_bytes(configure, self._model, self._draft_model)
        check_configure(configure, self.info.max_model_len, kv_bytes, self._available_memory)
        runner = self.kept.configured(configure)
        if self._record is not None:
            self._record.attach(self.kept.fingerprint, told)
        return runner

    def blocks(self) -> MovableBlocks:
        """The KV caches of what is configured."""
        return movable_blocks(self._configured().configure, self._model, self._backend, self._draft_model)

    def answer(self, message: pb.AttachWorkerResponse, received: int) -> pb.AttachWorkerRequest:
        """Do what a configured model is told.

        Args:
            received: when the message came, nanoseconds of `time.monotonic_ns`.

        Raises:
            ProtocolError: it is nothing that can be done.
        """
        if self._weights is not None and message.HasField("reload"):
            return pb.AttachWorkerRequest(reloaded=self._reload(self._weights, message.reload.model))
        expect(message, "plan")
        return pb.AttachWorkerRequest(result=self._step(self._configured(), message.plan, received))

    def _configured(self) -> Runner:
        assert self.kept.runner is not None, "the engine configures it first"
        return self.kept.runner

    def _step(self, runner: Runner, plan: pb.StepPlan, received: int) -> pb.StepResult:
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
        """Read other weights; whatever is wrong with them, in any rank, those that are there stay and serve on."""
        logger.info("reading weights anew%s", model and f", from {model}")
        write, failure = _read(weights, model)
        if self._ranks.world_size > 1:
            failure = _failure_of_any(self._ranks, failure)
        if failure or write is None:
            return pb.WeightsReloaded(model_fingerprint=self._joined_fingerprint(), failure=failure)
        write()
        self.kept.renew_weights()
        if self._record is not None:
            self._record.reload(model, self.kept.fingerprint)
        logger.info("the weights are new, fingerprint %s", self.kept.fingerprint.hex()[:16])
        return pb.WeightsReloaded(model_fingerprint=self._joined_fingerprint())

    def _joined_fingerprint(self) -> bytes:
        """As the engine has it of all ranks."""
        own = self.kept.fingerprint
        if self._ranks.world_size == 1:
            return own
        gathered = self._ranks.all_gather(torch.frombuffer(bytearray(own), dtype=torch.uint8))
        return joined_fingerprint([each.numpy().tobytes() for each in gathered])


def expect(message: pb.AttachWorkerResponse, kind: str) -> None:
    """Raises ProtocolError where a message of the engine is of another kind."""
    if message.WhichOneof("message") != kind:
        raise ProtocolError(
            f"expected a {kind} from the engine, got {message.WhichOneof('message')}; run the same version of"
            " Blockplane on both."
        )


def _read(weights: WeightSource, model: str) -> tuple[Callable[[], None] | None, str]:
    """What writes the weights into the model, or why nothing does."""
    try:
        return weights.read(model), ""
    except Exception as error:
        logger.error("the weights stay as they are: %s", error, exc_info=not isinstance(error, BlockplaneError))
        return None, str(error) if isinstance(error, BlockplaneError) else f"reading them failed: {error!r}."


def _failure_of_any(ranks: Ranks, failure: str) -> str:
    """This rank's, or that others have failed; empty where none has."""
    have_failed = ranks.all_gather(torch.tensor([bool(failure)], dtype=torch.uint8)).numpy()[:, 0]
    if failure or not have_failed.any():
        return failure
    named = ", ".join(map(str, np.flatnonzero(have_failed)))
    return f"rank {named} of this group cannot read them, and its log says why; the other ranks keep theirs too."
