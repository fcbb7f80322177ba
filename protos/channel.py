"""gRPC settings that both ends of our streams must agree on; knows no service."""

from typing import TypeAlias

MAX_MESSAGE_BYTES = 256 << 20
"""A hello carries a tokenizer (several MiB), an admission up to a whole context of token ids."""

ChannelOptions: TypeAlias = list[tuple[str, int | str]]

PEER_OPTIONS: ChannelOptions = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # A dead peer is a closed stream within half a minute, also where no packet comes back to say so.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Without it a ping may wait for its answer for a minute, whatever keepalive_timeout_ms says.
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # Pings are welcome at any rate: a silent stream is a healthy one.
    ("grpc.http2.max_ping_strikes", 0),
    # Two processes must not share one port in silence: the second is told that it is taken.
    ("grpc.so_reuseport", 0),
    # A proxy that the environment names for the web is not the way to a peer, least of all on loopback.
    ("grpc.enable_http_proxy", 0),
]

MAX_REQUEST_BYTES = 16 << 20
"""Of what clients send: several times the ids of the longest prompt that any model takes."""

CLIENT_OPTIONS: ChannelOptions = [
    *(dict(PEER_OPTIONS) | {"grpc.max_receive_message_length": MAX_REQUEST_BYTES}).items()
]
"""Of the end that serves clients, whom nothing but this keeps from filling its memory."""


def peer_options(timeout_seconds: float) -> ChannelOptions:
    """The same for an end that is to learn within `timeout_seconds` that the other is silent: dead, or stopped.

    gRPC answers pings from threads of its own, whatever the other end computes.
    """
    names = ("grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms")
    return [*(dict(PEER_OPTIONS) | dict.fromkeys(names, round(500 * timeout_seconds))).items()]


RECONNECT_SECONDS = 0.2
"""How long a process waits before it dials the engine again."""

CALLER = "blockplane-caller"
"""Metadata: whom a call is for; without it, anybody."""
