"""What was counted of KV blocks that moved from and to a worker. Threads of both sides add; knows no transport."""

from dataclasses import dataclass, field
from threading import Lock

from blockplane.protos.metric_families import Labels, MetricFamilies

_COUNTERS = (
    ("blocks", "KV blocks whose contents moved."),
    ("bytes", "Bytes of those contents."),
    ("seconds", "What that took, from each reading's beginning to its end."),
    ("failures", "Readings that did not come to their end."),
)


@dataclass
class Moved:
    """Of one direction. Seconds are those of each reading, which may go on beside others."""

    blocks: int = 0
    bytes: int = 0
    seconds: float = 0.0
    failures: int = 0
    _lock: Lock = field(default_factory=Lock, repr=False, compare=False)

    def add(self, *, blocks: int = 0, num_bytes: int = 0, seconds: float = 0.0, failures: int = 0) -> None:
        with self._lock:
            self.blocks += blocks
            self.bytes += num_bytes
            self.seconds += seconds
            self.failures += failures


@dataclass(frozen=True)
class TransferCounts:
    """fetched: from other workers into this one's blocks; served: to others."""

    fetched: Moved = field(default_factory=Moved)
    served: Moved = field(default_factory=Moved)

    def tell(self, families: MetricFamilies, labels: Labels) -> None:
        for direction, moved in (("fetched", self.fetched), ("served", self.served)):
            for name, help_text in _COUNTERS:
                of_direction = {**labels, "direction": direction}
                families.counter(f"worker_transfer_{name}", help_text, getattr(moved, name), of_direction)
