"""What was done in each bucket, whichever graphs had it one after the other. Counts nothing itself."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from blockplane.data_plane.graphs import Graphs, Shape


class Bucket(NamedTuple):
    """
    Attributes:
        phase: prefill or decode; of a draft model draft_prefill or draft_decode.
        size: of a prefill its tokens, of a decode its rows; where a graph is for one request alone, or for contexts of
            some length, that too.
    """

    phase: str
    size: str


class BucketCounts(NamedTuple):
    """
    Attributes:
        num_runs: steps that were computed in it.
        num_padding_tokens: of those steps, tokens that no request had.
        num_builds, build_seconds: its graphs.
    """

    num_runs: int
    num_padding_tokens: int
    num_builds: int
    build_seconds: float

    def plus(self, other: "BucketCounts") -> "BucketCounts":
        return BucketCounts(
            self.num_runs + other.num_runs,
            self.num_padding_tokens + other.num_padding_tokens,
            self.num_builds + other.num_builds,
            self.build_seconds + other.build_seconds,
        )


class BucketLedger:
    """Counts that never go down, though graphs are given up and built anew. One thread writes, any may read."""

    def __init__(self) -> None:
        self._state: tuple[Mapping[Bucket, BucketCounts], Mapping[str, Graphs]] = ({}, {})
        """What is past, and the graphs that there are now: one value, so that a reader has both of the same moment."""

    def begin(self, graphs: Mapping[str, Graphs]) -> None:
        """These count from now on, in place of those before. By what their phases' names begin with."""
        self._state = self.counts(), graphs

    def counts(self) -> Mapping[Bucket, BucketCounts]:
        past, graphs = self._state
        counts = dict(past)
        for prefix, each in graphs.items():
            for shape, own in _of(each):
                bucket = _bucket(prefix, shape)
                before = counts.get(bucket)
                counts[bucket] = own if before is None else before.plus(own)
        return counts


def _of(graphs: Graphs) -> Iterator[tuple[Shape, BucketCounts]]:
    for shape, seconds in graphs.build_seconds.copy().items():
        yield shape, BucketCounts(graphs.num_runs[shape], graphs.num_padding_tokens[shape], 1, seconds)


def _bucket(prefix: str, shape: Shape) -> Bucket:
    if not shape.num_seqs:
        return Bucket(f"{prefix}prefill", f"{shape.num_tokens}{' alone' if shape.is_lone else ''}")
    context = f" over {shape.context_len}" if shape.context_len else ""
    return Bucket(f"{prefix}decode", f"{shape.num_seqs}{context}")
