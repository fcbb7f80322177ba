"""What an engine tells operators, as frozen values, and how they are read off the wire; knows no connection."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from blockplane.protos.columns import column_from_bytes, int64_column_from_bytes
from blockplane.protos.statistics import EngineStatistics, Statistics
from blockplane.v1 import admin_pb2 as pb
from blockplane.v1 import engine_pb2

Nanoseconds = npt.NDArray[np.int64]
Counts = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class RankStatus:
    """One process of a worker group that has several; fields as `WorkerStatus` has them."""

    rank: int
    peer: str
    boot_id: int


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One worker group as the engine sees it.

    Attributes:
        state: building, ready, draining (an operator wants it empty), reloading, or leaving (it was told to stop).
        peer: whence its stream comes, as gRPC names peers.
        boot_id: drawn when the process started.
        weight_epoch: how many times its weights were read anew since.
        attached_seconds: since it attached.
        num_blocks: the null block included.
        statistics: None until it is ready.
        name: what its ranks call it; empty = it has one, which has no name.
        ranks: in their order; none = there is one, of which `peer` and `boot_id` speak.
        role: both, prefill or decode: which requests come to it; empty = the engine does not say.
    """

    group: int
    state: str
    peer: str
    boot_id: int
    protocol_version: int
    model: str
    model_fingerprint: bytes
    weight_epoch: int
    attached_seconds: float
    num_blocks: int
    block_size: int
    statistics: Statistics | None
    name: str = ""
    ranks: tuple[RankStatus, ...] = ()
    role: str = ""


@dataclass(frozen=True, slots=True)
class GroupSteps:
    """A group's last steps, oldest first; each column has an entry for each.

    Attributes:
        steps: their numbers, int64.
        scheduled, planned, received, began, prepared, computed, sampled, sent, answered, settled, delivered: when the
            engine began to plan, the plan was handed to gRPC, the worker had it, began, had the inputs ready, had
            computed the forward, had sampled, sent its answer; when the engine had it, had settled it, had delivered
            it. int64, nanoseconds since the epoch of Unix on the engine's clock.
        num_prefill_tokens, num_decode_tokens, num_bucket_tokens, num_plan_bytes: int32.
    """

    group: int
    steps: Nanoseconds
    scheduled: Nanoseconds
    planned: Nanoseconds
    received: Nanoseconds
    began: Nanoseconds
    prepared: Nanoseconds
    computed: Nanoseconds
    sampled: Nanoseconds
    sent: Nanoseconds
    answered: Nanoseconds
    settled: Nanoseconds
    delivered: Nanoseconds
    num_prefill_tokens: Counts
    num_decode_tokens: Counts
    num_bucket_tokens: Counts
    num_plan_bytes: Counts


def worker_from_proto(proto: pb.Worker) -> WorkerStatus:
    values: dict[str, Any] = {field.name: getattr(proto, field.name) for field in fields(WorkerStatus)}
    statistics = _statistics_from_proto(proto.statistics) if proto.HasField("statistics") else None
    ranks = tuple(RankStatus(rank.rank, rank.peer, rank.boot_id) for rank in proto.ranks)
    return WorkerStatus(**(values | {"statistics": statistics, "ranks": ranks}))


def steps_from_proto(proto: pb.GetStepsResponse) -> GroupSteps:
    """Raises ProtocolError if a column ends inside a number."""
    columns: dict[str, Any] = {}
    for field in fields(GroupSteps):
        if field.name != "group":
            read = column_from_bytes if field.name.startswith("num_") else int64_column_from_bytes
            columns[field.name] = read(getattr(proto, field.name))
    return GroupSteps(group=proto.group, **columns)


def engine_statistics_from_proto(proto: engine_pb2.GetStatisticsResponse) -> EngineStatistics:
    groups: Mapping[int, Statistics] = {group.group: _statistics_from_proto(group) for group in proto.groups}
    return EngineStatistics(
        total=_statistics_from_proto(proto),
        groups=groups,
        num_lost_workers=proto.num_lost_workers,
        num_dropped_results=proto.num_dropped_results,
        num_held=proto.num_held,
        num_suspects=proto.num_suspects,
        num_transfers=proto.num_transfers,
        num_failed_transfers=proto.num_failed_transfers,
        num_transferred_blocks=proto.num_transferred_blocks,
    )


def _statistics_from_proto(proto: engine_pb2.GetStatisticsResponse | engine_pb2.GroupStatistics) -> Statistics:
    """What is told of steps is told of groups alone; of all together it stays as if nothing were."""
    told = proto.DESCRIPTOR.fields_by_name
    values: dict[str, Any] = {
        field.name: getattr(proto, field.name) for field in fields(Statistics) if field.name in told
    }
    return Statistics(**(values | {"num_common_prefix_blocks": tuple(proto.num_common_prefix_blocks)}))
