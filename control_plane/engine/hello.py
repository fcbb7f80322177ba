"""What a worker says of itself when it attaches, and when two of them serve one model. Knows no gRPC."""

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
    """

    protocol_version: int
    model: ModelInfo
    layers: tuple[LayerKVSpec, ...]
    available_memory: int
    rules: BucketRules
    model_fingerprint: bytes = b""
    boot_id: int = 0
    last_epoch: int = 0

    @property
    def has_epochs(self) -> bool:
        """Whether it names its epoch in every result, and shows that it lives while it computes."""
        return self.protocol_version >= _FIRST_WITH_EPOCHS

    def check_same_model(self, other: "Hello") -> None:
        """Raise ConfigurationError, with both sides' models, unless what the two compute is the same."""
        fingerprints = {self.model_fingerprint, other.model_fingerprint} - {b""}
        if self.model != other.model or len(fingerprints) > 1:
            raise ConfigurationError(
                f"the worker has {self._describe_model()} and those that are attached have {other._describe_model()};"
                " give all workers of an engine the same model."
            )

    def _describe_model(self) -> str:
        model, fingerprint = self.model, self.model_fingerprint.hex()[:16]
        size = f"{model.name}, {model.vocab_size} token ids, up to {model.max_model_len} tokens"
        return f"{size}, fingerprint {fingerprint}" if fingerprint else size
