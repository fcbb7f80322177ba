"""Both planes in one process, joined by the bytes that would cross the wire; knows no test."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from ranks_in_threads import RanksAtOnce

from blockplane.control_plane.engine.kv_planning import RankKV, plan_kv_cache
from blockplane.control_plane.engine.request import Request
from blockplane.control_plane.engine.scheduler import MAX_IN_FLIGHT, Scheduler
from blockplane.control_plane.engine.waiting import WaitingQueue
from blockplane.data_plane.backends.backend import Backend
from blockplane.data_plane.backends.cpu import CPU
from blockplane.data_plane.grammars import Grammars
from blockplane.data_plane.kv_cache import layer_kv_specs
from blockplane.data_plane.models.interface import Model
from blockplane.data_plane.ranks.collectives import Ranks
from blockplane.data_plane.runner import Runner
from blockplane.protos import wire
from blockplane.protos.config import Config, load_config
from blockplane.protos.plan import Configure, StepPlan, StepResult
from blockplane.protos.sampling import SamplingParams
from blockplane.v1 import engine_pb2 as pb

LoadedModels = tuple[Model, Model | None]
"""A model and its draft model; None = it has none."""


class Planes:
    """A scheduler that drives a runner as the engine drives its worker, up to two plans ahead."""

    def __init__(
        self,
        model: Model,
        settings: Mapping[str, Any],
        *,
        eos_token_ids: Sequence[int] = (),
        draft_model: Model | None = None,
        kernel_block_size: int | None = None,
        num_draft_tokens: int | None = None,
        grammars: Grammars | None = None,
        backend: Backend = CPU,
    ) -> None:
        """`settings` are the configuration's, as from a command line.

        `num_draft_tokens`: what the worker proposes; None = as many as the engine counts on. `grammars`: the worker's.
        """
        config = load_config(settings, {})
        (configure,) = _configures(config, [(model, draft_model)], backend)
        self._begin(config, configure, model.vocab_size, eos_token_ids)
        self.runner = Runner(
            model,
            configure,
            eos_token_ids,
            kernel_block_size,
            num_draft_tokens=config.num_draft_tokens if num_draft_tokens is None else num_draft_tokens,
            draft_model=draft_model,
            grammars=grammars,
            backend=backend,
        )

    def _begin(self, config: Config, configure: Configure, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.scheduler = Scheduler(
            configure,
            WaitingQueue(1 << 20, 1 << 40, priority_seconds=10.0),
            vocab_size=vocab_size,
            eos_token_ids=eos_token_ids,
            prefix_caching=config.prefix_caching == "on",
        )
        self.texts: dict[int, list[int]] = {}
        """Outputs by the order of submission, failures included as they came."""
        self.outcomes: dict[int, Any] = {}
        self.num_in_step: list[int] = []
        """Tokens that came with each step."""
        self.results: list[StepResult] = []
        self._plans: deque[bytes] = deque()

    def submit(self, prompt: Sequence[int], params: SamplingParams, seed: int = 0) -> int:
        number = len(self.texts)
        self.texts[number] = []
        request = Request(f"request-{number}", np.array(prompt, np.int32), len(prompt), params, seed, stream_id=number)
        self.scheduler.add([request])
        return number

    def step(self, num_ahead: int = MAX_IN_FLIGHT) -> bool:
        """Plan until `num_ahead` plans are unanswered, and answer the first; False = nothing is left to do."""
        plans = self._plans
        while len(plans) < num_ahead and (plan := self.scheduler.schedule()) is not None:
            plans.append(wire.plan_to_proto(plan).SerializeToString())
        if not plans:
            return False
        result = self._compute(plans.popleft())
        answer = pb.StepResult.FromString(wire.result_to_proto(result).SerializeToString())
        self.results.append(wire.result_from_proto(answer))
        outputs = self.scheduler.update(self.results[-1])
        self.num_in_step.append(len(outputs.token_ids))
        for number, token_id in zip(outputs.stream_ids.tolist(), outputs.token_ids.tolist(), strict=True):
            self.texts[number].append(token_id)
        for end in outputs.finished:
            self.outcomes[end.request.stream_id] = end.outcome
        return True

    def run(self, num_ahead: int = MAX_IN_FLIGHT) -> None:
        """Step until nothing is left to do."""
        while self.step(num_ahead):
            pass

    def _compute(self, plan: bytes) -> StepResult:
        return self.runner.step(_plan_of(plan))


class PlanesOfRanks(Planes):
    """The same with as many ranks as the settings say, a runner in a thread each: all compute every plan."""

    def __init__(
        self,
        load: Callable[[Ranks], LoadedModels],
        settings: Mapping[str, Any],
        *,
        eos_token_ids: Sequence[int] = (),
        kernel_block_size: int | None = None,
        backend: Backend = CPU,
    ) -> None:
        """`load`: a rank's part of the model, and of its draft model if there is one."""
        config = load_config(settings, {})
        self._group = RanksAtOnce(config.tensor_parallel_size, config.context_parallel_size)
        self.models = self._group.run(load)
        configures = _configures(config, self.models, backend)
        self._begin(config, configures[0], self.models[0][0].vocab_size, eos_token_ids)

        def build(ranks: Ranks) -> Runner:
            model, draft_model = self.models[ranks.rank]
            return Runner(
                model,
                configures[ranks.rank],
                eos_token_ids,
                kernel_block_size,
                num_draft_tokens=config.num_draft_tokens,
                draft_model=draft_model,
                backend=backend,
                ranks=ranks,
            )

        self.runners = self._group.run(build)

    def _compute(self, plan: bytes) -> StepResult:
        """The first rank's result, whose tokens all others have too."""
        results = self._group.run(lambda ranks: self.runners[ranks.rank].step(_plan_of(plan)))
        tokens = [(result.token_ids.tolist(), np.array(result.num_tokens).tolist()) for result in results]
        assert tokens == tokens[:1] * len(tokens)
        return results[0]


def _configures(config: Config, models: Sequence[LoadedModels], backend: Backend) -> list[Configure]:
    """What the engine sends to each rank, over the wire."""
    ranks = [RankKV(layer_kv_specs(*loaded), config.kv_cache_bytes) for loaded in models]
    configures = plan_kv_cache(config, ranks, backend.bucket_rules, config.max_model_len)
    return [wire.configure_from_proto(wire.configure_to_proto(configure)) for configure in configures]


def _plan_of(plan: bytes) -> StepPlan:
    return wire.plan_from_proto(pb.StepPlan.FromString(plan))
