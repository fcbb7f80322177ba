"""What a worker says of itself when it attaches, and when two of them serve one model. Knows no gRPC."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from blockplane.protos.buckets import BucketRules
from blockplane.protos.errors import ConfigurationError, RanksError
from blockplane.protos.model import LayerKVSpec, ModelInfo, joined_fingerprint

_FIRST_WITH_EPOCHS = 4


@dataclass(frozen=True, slots=True)
class Hello:
    """A worker's first message; of several ranks, what they say together, as `joined_hello` has it.

    Attributes:
        protocol_version: what it speaks; an older one names no epochs and sends no heartbeats.
        layers: in layer order; rank 0's.
        available_memory: bytes that it can give to KV.
        rules: what its backend asks of buckets.
        model_fingerprint: of the model's tensors; empty = it does not say.
        boot_id: drawn when its process started; 0 = it does not say.
        last_epoch: of its last attach; 0 = there was none.
        enforces_structure: whether it knows structured output.
        reloads_weights: whether it can read its weights anew.
        weight_epoch: how many times it has since its process started.
        role: both, prefill or decode: which requests come to it, where there are workers for either.
        transfer_addresses: of its ranks, host:port where their counterparts read their KV blocks; none = nowhere.
        transports: by what means it can read others' blocks, the best first.
        ranks: what each rank said, in their order; none = it is alone.
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
    role: str = "both"
    transfer_addresses: tuple[str, ...] = ()
    transports: tuple[str, ...] = ()
    ranks: tuple["Hello", ...] = ()

    @property
    def of_each_rank(self) -> tuple["Hello", ...]:
        """What each rank says, also where there is one."""
        return self.ranks or (self,)

    @property
    def has_epochs(self) -> bool:
        """Whether it names its epoch in every result, and shows that it lives while it computes."""
        return self.protocol_version >= _FIRST_WITH_EPOCHS

    @property
    def takes_prompts(self) -> bool:
        """Whether prompts are computed there, where there is a choice."""
        return self.role != "decode"

    @property
    def takes_decodes(self) -> bool:
        """Whether requests of others go on there, once their prompts are computed."""
        return self.role != "prefill"

    def transport_from(self, other: "Hello") -> str | None:
        """By what means this worker reads blocks of another, which lie there as here; None = by none."""
        if self.layers != other.layers or not other.transfer_addresses:
            return None
        return next((name for name in self.transports if name == "grpc" or name in other.transports), None)

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


def joined_hello(group_name: str, ranks: Sequence[Hello]) -> Hello:
    """What the ranks of a group say together, from what each says, in their order.

    Its boot id is that of just these processes, and its last epoch that of an attach which all of them were in: so a
    group keeps its KV where every rank has its own.

    Raises:
        RanksError: they are no ranks of one group; the message says which differ in what.
    """
    first = ranks[0]
    for number, rank in enumerate(ranks):
        for what in _ALIKE:
            if getattr(rank, what) != getattr(first, what):
                raise RanksError(
                    f"rank {number} of group {group_name} has another {what} than rank 0"
                    f" ({_shown(getattr(rank, what))} and {_shown(getattr(first, what))}); give all ranks of a group"
                    " the same settings and the same version of Blockplane."
                )
    addresses = [address for rank in ranks for address in rank.transfer_addresses]
    last_epochs = {rank.last_epoch for rank in ranks}
    return replace(
        first,
        available_memory=min(rank.available_memory for rank in ranks),
        model_fingerprint=joined_fingerprint([rank.model_fingerprint for rank in ranks]),
        boot_id=_joined_boot_id([rank.boot_id for rank in ranks]),
        last_epoch=last_epochs.pop() if len(last_epochs) == 1 else 0,
        enforces_structure=all(rank.enforces_structure for rank in ranks),
        reloads_weights=all(rank.reloads_weights for rank in ranks),
        transfer_addresses=tuple(addresses) if len(addresses) == len(ranks) else (),
        transports=tuple(name for name in first.transports if all(name in rank.transports for rank in ranks)),
        ranks=tuple(ranks),
    )


_ALIKE = ("protocol_version", "model", "rules", "role")
"""What ranks must say alike; their layers are compared where they are laid out."""


def _shown(value: object) -> str:
    return f"{value.name}, {value.max_model_len} tokens" if isinstance(value, ModelInfo) else str(value)


def _joined_boot_id(boot_ids: Sequence[int]) -> int:
    """64 bits of BLAKE2b over all; 0 if one is unknown."""
    if not all(boot_ids):
        return 0
    data = b"".join(boot_id.to_bytes(8, "little") for boot_id in boot_ids)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
