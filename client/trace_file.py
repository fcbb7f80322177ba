"""A timeline of steps as a trace that Perfetto reads (https://ui.perfetto.dev). Knows no connection.

In Perfetto's own protobuf format (https://perfetto.dev/docs/reference/synthetic-track-event), not in the JSON that it
reads too: times stay whole nanoseconds, which JSON's floating microseconds since the epoch do not, tracks have an order
and counters a place in it, and arrows follow a step from track to track. The messages are those of the `perfetto`
package: 350 kB, which needs protobuf alone; it is asked for only here.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from blockplane.client.engine_values import GroupSteps
from blockplane.client.timeline import TRACKS, Lanes, arguments_of, counters_of, slices_of
from blockplane.protos.errors import ConfigurationError

_SEQUENCE = 1
"""All packets are of one writer, whose order holds where times are equal."""
_GROUP_BITS = 32
"""Ids of a group's tracks lie below its own."""


def trace_of(groups: Iterable[GroupSteps]) -> bytes:
    """The whole file. Raises ConfigurationError where the package is not installed."""
    try:
        from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as messages
    except ImportError as error:
        raise ConfigurationError(
            "the messages of Perfetto are not installed; run pip install 'blockplane[trace]'."
        ) from error
    trace = messages.Trace()
    for steps in groups:
        _GroupTrace(messages, trace, steps).write()
    return bytes(trace.SerializeToString())


class _GroupTrace:
    """One group's packets."""

    def __init__(self, messages: Any, trace: Any, steps: GroupSteps) -> None:
        self._messages, self._trace, self._steps = messages, trace, steps
        self._group_id = (steps.group + 1) << _GROUP_BITS
        self._num_tracks = 0

    def write(self) -> None:
        descriptor = self._messages.TrackDescriptor
        group = self._packet(0).track_descriptor
        group.uuid, group.name = self._group_id, f"worker group {self._steps.group}"
        group.child_ordering = descriptor.EXPLICIT
        self._write_slices()
        self._write_counters()

    def _write_slices(self) -> None:
        lanes: dict[str, Lanes] = defaultdict(Lanes)
        tracks: dict[tuple[str, int], int] = {}
        begins, ends = self._messages.TrackEvent.TYPE_SLICE_BEGIN, self._messages.TrackEvent.TYPE_SLICE_END
        for name, begin, end, place in slices_of(self._steps):
            lane = name, lanes[name].lane(begin, end)
            if lane not in tracks:
                tracks[lane] = self._new_track(name, TRACKS.index(name)).uuid
            event = self._event(begin, begins, tracks[lane])
            event.name = f"step {self._steps.steps[place]}"
            event.flow_ids.append(self._group_id + int(self._steps.steps[place]))
            for argument, value in arguments_of(self._steps, place).items():
                annotation = event.debug_annotations.add()
                annotation.name, annotation.int_value = argument, value
            self._event(end, ends, tracks[lane])

    def _write_counters(self) -> None:
        kind = self._messages.TrackEvent.TYPE_COUNTER
        for rank, counter in enumerate(counters_of(self._steps), start=len(TRACKS)):
            track = self._new_track(counter.name, rank)
            track.counter.unit_name = counter.unit
            for time, value in zip(counter.times.tolist(), counter.values.tolist(), strict=True):
                self._event(time, kind, track.uuid).counter_value = value

    def _new_track(self, name: str, rank: int) -> Any:
        """Tracks of one name and parent are shown as one."""
        self._num_tracks += 1
        track = self._packet(0).track_descriptor
        track.uuid, track.parent_uuid = self._group_id + self._num_tracks, self._group_id
        track.name, track.sibling_order_rank = name, rank
        return track

    def _event(self, time: int, kind: int, track: int) -> Any:
        event = self._packet(time).track_event
        event.type, event.track_uuid = kind, track
        return event

    def _packet(self, time: int) -> Any:
        packet = self._trace.packet.add()
        packet.trusted_packet_sequence_id = _SEQUENCE
        if time:
            packet.timestamp = time
        return packet
