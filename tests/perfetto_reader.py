"""Reads a Perfetto file as Perfetto does, as far as steps' traces go; knows no steps."""

from collections import defaultdict
from typing import Any

from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as perfetto


class ReadTrace:
    """Packets in order of time; an end closes what was opened last on its track.

    Attributes:
        tracks: descriptors by uuid.
        slices, counters: by the names of the tracks on the way from the outermost: name, begin, end; and the values.
        arguments: of each slice. flows: by id, how many slices an arrow goes through.
    """

    def __init__(self, data: bytes) -> None:
        self.tracks: dict[int, Any] = {}
        self.slices: dict[str, list[tuple[str, int, int]]] = defaultdict(list)
        self.counters: dict[str, list[int]] = defaultdict(list)
        self.arguments: list[dict[str, int]] = []
        self.flows: dict[int, int] = defaultdict(int)
        packets = list(perfetto.Trace.FromString(data).packet)
        assert len({packet.trusted_packet_sequence_id for packet in packets}) == 1
        self._open: dict[int, list[tuple[str, int]]] = defaultdict(list)
        for packet in packets:
            if packet.HasField("track_descriptor"):
                self.tracks[packet.track_descriptor.uuid] = packet.track_descriptor
        for packet in sorted((each for each in packets if each.HasField("track_event")), key=lambda p: p.timestamp):
            self._take(packet.timestamp, packet.track_event)
        assert not any(self._open.values()), "every slice ends"

    def path(self, uuid: int) -> str:
        track = self.tracks[uuid]
        return f"{self.path(track.parent_uuid)}/{track.name}" if track.parent_uuid else track.name

    def _take(self, time: int, event: Any) -> None:
        path, opened = self.path(event.track_uuid), self._open[event.track_uuid]
        if event.type == event.TYPE_SLICE_BEGIN:
            assert not opened, "one slice at a time"
            opened.append((event.name, time))
            self.arguments.append({each.name: each.int_value for each in event.debug_annotations})
            for flow in event.flow_ids:
                self.flows[flow] += 1
        elif event.type == event.TYPE_SLICE_END:
            name, begin = opened.pop()
            self.slices[path].append((name, begin, time))
        else:
            assert event.type == event.TYPE_COUNTER
            self.counters[path].append(event.counter_value)
