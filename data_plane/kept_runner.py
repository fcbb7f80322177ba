"""A loaded model's runner, kept from one attach to the next where both were built alike. Knows no streams."""

from dataclasses import replace

import torch

from blockplane.data_plane.backends.backend import Backend
from blockplane.data_plane.backends.cpu import CPU
from blockplane.data_plane.bucket_counts import BucketLedger
from blockplane.data_plane.grammars import Grammars
from blockplane.data_plane.models.fingerprint import model_fingerprint
from blockplane.data_plane.models.interface import Model
from blockplane.data_plane.ranks.collectives import ALONE, Ranks
from blockplane.data_plane.runner import Runner
from blockplane.protos.errors import ProtocolError
from blockplane.protos.model import ModelInfo
from blockplane.protos.plan import Configure


class KeptRunner:
    """The runner of a model and, if it has one, its draft model.

    Attributes:
        fingerprint: of all that the runner's answers depend on.
        weight_epoch: how many times the model got other weights.
        runner: that of the last attach; None = there was none, or its build failed.
        buckets: what was done in graphs, those of earlier runners too.
    """

    def __init__(
        self,
        model: Model,
        info: ModelInfo,
        num_draft_tokens: int,
        draft_model: Model | None,
        grammars: Grammars | None = None,
        backend: Backend = CPU,
        ranks: Ranks = ALONE,
    ) -> None:
        """`num_draft_tokens`, `draft_model`, `grammars`, `backend`, `ranks`: as `Runner` has them."""
        self.fingerprint = model_fingerprint(model, draft_model)
        self.weight_epoch = 0
        self.runner: Runner | None = None
        self.buckets = BucketLedger()
        self._model, self._info = model, info
        self._num_draft_tokens, self._draft_model = num_draft_tokens, draft_model
        self._grammars, self._backend, self._ranks = grammars, backend, ranks

    def renew_weights(self) -> None:
        """The model has other weights. Graphs and KV stay, but what the KV holds is no use any more."""
        self.fingerprint = model_fingerprint(self._model, self._draft_model)
        self.weight_epoch += 1

    def configured(self, configure: Configure) -> Runner:
        """The runner of the last attach with its KV and graphs, reset, if it was built for the same; else a new one.

        Ranks build together, since their graphs call each other: if one has nothing to keep, none keeps anything.

        Raises:
            ProtocolError: the engine counts on KV that is not there, or on what this worker cannot build.
        """
        # A build that fails leaves nothing to go back to: the KV of the one before may be gone.
        kept, self.runner = self.runner, None
        is_kept = kept is not None and _built(kept.configure) == _built(configure)
        if self._in_all_ranks(is_kept) and kept is not None:
            kept.reset(configure)
            self.runner = kept
        elif configure.keeps_kv:
            own = "none" if kept is None else "another layout of it"
            who = "another rank has none" if is_kept else f"this worker has {own}"
            raise ProtocolError(
                f"the engine counts on KV from an earlier attach, and {who}; let the engine configure it without"
                " keeps_kv."
            )
        else:
            # Nobody may hold graphs any more while others are built in their place.
            self.buckets.begin({})
            self.runner = self._build(configure)
            self.buckets.begin(self.runner.all_graphs)
        # Whoever says that it is ready knows that all are: from then on they compute.
        self._in_all_ranks(True)
        return self.runner

    def _in_all_ranks(self, holds: bool) -> bool:
        """Whether something holds in each of them; waits for all."""
        if self._ranks.world_size == 1:
            return holds
        num_ranks = self._ranks.all_reduce(torch.tensor([int(holds)]))
        return int(num_ranks) == self._ranks.world_size

    def _build(self, configure: Configure) -> Runner:
        return Runner(
            self._model,
            configure,
            self._info.eos_token_ids,
            num_draft_tokens=self._num_draft_tokens,
            draft_model=self._draft_model,
            grammars=self._grammars,
            backend=self._backend,
            ranks=self._ranks,
        )


def _built(configure: Configure) -> Configure:
    """What of a configuration is built, without what differs from attach to attach."""
    return replace(configure, epoch=0, keeps_kv=False, last_step=0, heartbeat_milliseconds=0)
