"""`blockplane replay FILE`: runs a worker's record again and compares every result. Knows no streams."""

import logging
import sys

import torch

from blockplane.data_plane.backends.backend import Backend
from blockplane.data_plane.backends.choice import chosen_backend
from blockplane.data_plane.backends.cpu import CPU
from blockplane.data_plane.differences import first_difference
from blockplane.data_plane.grammars import Grammars, load_grammars
from blockplane.data_plane.kept_runner import KeptRunner
from blockplane.data_plane.loading.named import load_draft_model, load_named
from blockplane.data_plane.models.interface import Model
from blockplane.data_plane.record import read_record
from blockplane.data_plane.reloading import WeightSource
from blockplane.data_plane.rows import Rows
from blockplane.protos import wire
from blockplane.protos.config import Config
from blockplane.protos.errors import ConfigurationError, ModelError, ProtocolError, ReplayError
from blockplane.protos.model import ModelInfo
from blockplane.protos.plan import StepPlan, StepResult
from blockplane.protos.process import run_process
from blockplane.protos.threads import num_usable_cores
from blockplane.v1 import engine_pb2 as pb

logger = logging.getLogger(__name__)


class Replay:
    """A worker without an engine: it takes a record's entries in their order.

    Attributes:
        num_attaches, num_results: that came so far.
    """

    def __init__(
        self,
        model: Model,
        info: ModelInfo,
        num_draft_tokens: int = 0,
        draft_model: Model | None = None,
        grammars: Grammars | None = None,
        backend: Backend = CPU,
        weights: WeightSource | None = None,
    ) -> None:
        """What the recorded worker had. `weights`: where reloads read; None = a record that has any is refused."""
        self.num_attaches = self.num_results = 0
        self._info, self._weights = info, weights
        self._kept = KeptRunner(model, info, num_draft_tokens, draft_model, grammars, backend)
        self._rows: Rows | None = None
        """What the record says of the rows, without the model."""
        self._plan: StepPlan | None = None
        self._again: StepResult | ProtocolError | None = None
        """What came of the plan now."""

    def take(self, entry: pb.RecordEntry) -> None:
        """Carry out an entry.

        Raises:
            ReplayError: a result is not the recorded one.
            ConfigurationError: the record is another model's, or has no such order.
        """
        kind = entry.WhichOneof("entry")
        if kind == "attach":
            self._attach(entry.attach)
        elif kind == "plan":
            self._step(wire.plan_from_proto(entry.plan))
        elif kind == "result":
            self._compare(wire.result_from_proto(entry.result))
        elif kind == "reload":
            self._reload(entry.reload)

    def end(self) -> None:
        """Say what the record lacks."""
        if self._plan is not None:
            what = f"refused now too: {self._again}" if isinstance(self._again, ProtocolError) else "computed now"
            logger.warning("step %d has no result on record; it is %s", self._plan.step, what)
        self._plan = self._again = None

    def _attach(self, attach: pb.RecordedAttach) -> None:
        self.end()
        if attach.model_fingerprint != self._kept.fingerprint:
            raise ConfigurationError(
                f"the record is not of {self._info.name} as these settings load it; give those of the worker that made"
                " it (model, dtype, quantize, kv_cache_dtype, draft_source, draft_model)."
            )
        configure = wire.configure_from_proto(attach.configure)
        self._kept.configured(configure)
        self._rows = Rows(configure)
        self.num_attaches += 1

    def _reload(self, reload: pb.RecordedReload) -> None:
        self.end()
        model = reload.model or "where they were read before"
        try:
            if self._weights is None:
                raise ModelError("this replay reads none.")
            self._weights.read(reload.model)()
        except ModelError as error:
            raise ConfigurationError(
                f"after {self.num_results} equal results the worker read new weights ({model}), which are not there any"
                f" more: {error}"
            ) from error
        self._kept.renew_weights()
        if reload.model_fingerprint != self._kept.fingerprint:
            raise ConfigurationError(
                f"after {self.num_results} equal results the worker read new weights ({model}), and others are there"
                " now; put those of then in their place."
            )

    def _step(self, plan: StepPlan) -> None:
        self.end()
        if self._kept.runner is None or self._rows is None:
            raise ConfigurationError("the record has a plan before any attach; name a record from its beginning.")
        self._plan = plan
        try:
            self._rows.apply(plan)
            self._again = self._kept.runner.step(plan)
        except ProtocolError as error:
            self._again = error

    def _compare(self, recorded: StepResult) -> None:
        plan, again, rows = self._plan, self._again, self._rows
        if plan is None or again is None or rows is None:
            raise ConfigurationError("the record has a result without its plan; name a record from its beginning.")
        if isinstance(again, ProtocolError):
            raise ReplayError(f"step {plan.step} has a result on record, and is refused now: {again}")
        difference = first_difference(rows, plan, recorded, again)
        if difference is not None:
            raise ReplayError(f"after {self.num_results} equal results, step {plan.step} differs in {difference}.")
        rows.fold(plan, recorded)
        self.num_results += 1
        self._plan = self._again = None


def serve(config: Config) -> None:
    """Replay `config.record`. Raises as `Replay.take` does."""
    torch.set_num_threads(config.num_threads or num_usable_cores())
    backend = chosen_backend(config)
    model, info = load_named(config.model, config, backend.device)
    draft_model = load_draft_model(config, info, backend.device)
    weights = WeightSource(model, info, config, is_compiled=backend.is_compiled)
    replay = Replay(model, info, config.num_draft_tokens, draft_model, load_grammars(config, info), backend, weights)
    for entry in read_record(config.record):
        replay.take(entry)
    replay.end()
    print(f"{replay.num_results} results of {replay.num_attaches} attaches are the same, bit for bit.")


if __name__ == "__main__":
    description = "Runs a worker's record again and compares every result, bit for bit; 1 = one differs."
    sys.exit(run_process("replay", description, serve, operand="record"))
