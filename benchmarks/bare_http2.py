"""A gRPC client that sends one request and counts what comes: so little of HTTP/2 that reading costs next to nothing.

For measuring a server on a machine that has no room for as many real clients. Knows no service; RFC 9113 and 7541.
"""

import asyncio
import struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 4, 6, 7, 8
END_STREAM, ACK, END_HEADERS = 1, 1, 4
INITIAL_WINDOW_SIZE, MAX_WINDOW, FIRST_WINDOW = 4, (1 << 31) - 1, 65_535
FRAME_HEADER = struct.Struct(">HBBBI")
"""Of the length its upper 16 bits and its lower 8."""


class Reader(asyncio.Protocol):
    """One call on one connection. Gives the server all the window that there is, and no more afterwards.

    Attributes:
        num_messages: DATA frames that came; a server's small messages are one each.
        end: why nothing more comes; None = it goes on.
    """

    def __init__(self, path: str, message: bytes) -> None:
        self._path, self._message = path, message
        self._rest = b""
        self.num_messages = 0
        self.end: str | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        settings = struct.pack(">HI", INITIAL_WINDOW_SIZE, MAX_WINDOW)
        body = b"\0" + struct.pack(">I", len(self._message)) + self._message
        transport.write(
            PREFACE
            + frame(SETTINGS, 0, 0, settings)
            + frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", MAX_WINDOW - FIRST_WINDOW))
            + frame(HEADERS, END_HEADERS, 1, header_block(self._path))
            + frame(DATA, END_STREAM, 1, body)
        )

    def data_received(self, data: bytes) -> None:
        data, at = self._rest + data, 0
        while len(data) - at >= FRAME_HEADER.size:
            high, low, kind, flags, _ = FRAME_HEADER.unpack_from(data, at)
            stop = at + FRAME_HEADER.size + (high << 8 | low)
            if stop > len(data):
                break
            if kind == DATA:
                self.num_messages += 1
            elif kind != WINDOW_UPDATE:
                self._take(kind, flags, data[at + FRAME_HEADER.size : stop])
            at = stop
        self._rest = data[at:]

    def _take(self, kind: int, flags: int, payload: bytes) -> None:
        if kind in (SETTINGS, PING) and not flags & ACK:
            self._transport.write(frame(kind, ACK, 0, payload if kind == PING else b""))
        elif kind == GOAWAY or (kind == HEADERS and flags & END_STREAM):
            self.end = payload.decode(errors="replace")

    def connection_lost(self, error: Exception | None) -> None:
        self.end = self.end or str(error or "the server closed the connection")


def frame(kind: int, flags: int, stream_id: int, payload: bytes) -> bytes:
    return FRAME_HEADER.pack(len(payload) >> 8, len(payload) & 0xFF, kind, flags, stream_id) + payload


def header_block(path: str) -> bytes:
    """What gRPC asks of a request; names from the static table where it has them, no compression."""
    post, http, path_name, authority, content_type, literal = b"\x83", b"\x86", b"\x04", b"\x01", b"\x0f\x10", b"\x00"
    return (
        post
        + http
        + path_name
        + text(path)
        + authority
        + text("localhost")
        + content_type
        + text("application/grpc")
        + literal
        + text("te")
        + text("trailers")
    )


def text(value: str) -> bytes:
    assert len(value) < 127, "longer ones have longer lengths"
    return bytes([len(value)]) + value.encode()
