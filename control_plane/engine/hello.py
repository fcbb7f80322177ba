"""What a worker says of itself when it attaches, and when two of them serve one model. Knows no gRPC."""

from collections.abc import Sequence
from dataclasses import dataclass

from blockplane.protos.buckets import BucketRules
from blockplane.protos.errors import ConfigurationError
from blockplane.protos.model import LayerKVSpec, ModelInfo

_FIRST_WITH_EPOCHS = 4


@dataclass(frozen=True, slots=True)
class Hello:
    """A worker's first message.

    Attributes:
        protocol_version: what it speaks; an older one names no epochs and sends no heartbeats.
        layers: in layer order.
        available_memory: bytes that it can give to KV.
        rules: what its backend asks of buckets.
        model_fingerprint: of the model's tensors; empty = it does not say.
        boot_id: drawn when its process started; 0 = it does not say.
        last_epoch: of its last attach; 0 = there was none.
        enforces_structure: whether it knows structured output.
        reloads_weights: whether it can read its weights anew.
        weight_epoch: how many times it has since its process started.
    """

    protocol_version: int
    model: ModelInfo
    layers: tuple[LayerKVSpec, ...]
    available_memory: int
    rules: BucketRules
    model_fingerprint: bytes = b""
    boot_id: int = 0
    last_epoch: int = 0
    enforces_structure: bool = False
    reloads_weights: bool = False
    weight_epoch: int = 0

    @property
    def has_epochs(self) -> bool:
        """Whether it names its epoch in every result, and shows that it lives while it computes."""
        return self.protocol_version >= _FIRST_WITH_EPOCHS

    def has_weights_of(self, other: "Hello") -> bool:
        """Whether the two compute the same, as far as both say."""
        return len({self.model_fingerprint, other.model_fingerprint} - {b""}) < 2

    def check_same_model(self, others: Sequence["Hello"], *, may_differ: bool = False) -> None:
        """Raise ConfigurationError, with both sides' models, unless this worker computes the same as those attached.

        Those may differ in their weights, where a reload is under way or has failed half way: then it must have those
        of one of them. `may_differ`: or any.
        """
        stranger = next((other for other in others if other.model != self.model), None)
        if stranger is None and others and not may_differ and not any(map(self.has_weights_of, others)):
            stranger = others[0]
        if stranger is not None:
            raise ConfigurationError(
                f"the worker has {self._describe_model()} and those that are attached have"
                f" {stranger._describe_model()}; give all workers of an engine the same model."
            )

    def _describe_model(self) -> str:
        model, fingerprint = self.model, self.model_fingerprint.hex()[:16]
        size = f"{model.name}, {model.vocab_size} token ids, up to {model.max_model_len} tokens"
        return f"{size}, fingerprint {fingerprint}" if fingerprint else size
