"""How clients reach a frontend and an engine, waiting for them or in an event loop; knows no request."""

import json

from blockplane.protos.access import Access
from blockplane.protos.channel import CALLER, PEER_OPTIONS, ChannelOptions
from blockplane.v1 import admin_pb2, engine_pb2, inference_pb2

SERVICE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
ADMIN = admin_pb2.DESCRIPTOR.services_by_name["Admin"].full_name
ENGINE = engine_pb2.DESCRIPTOR.services_by_name["Engine"].full_name

PLAIN = Access()
"""In plaintext, and nobody in particular."""

_TELLING = {
    SERVICE: ("Abort", "GetModelInfo"),
    ADMIN: ("ListWorkers", "UndrainWorker"),
    ENGINE: ("GetStatistics", "ResetPrefixCache"),
    "grpc.health.v1.Health": ("Check",),
}
"""Calls that change nothing, or nothing more the second time."""

_RETRIES = {
    "methodConfig": [
        {
            "name": [{"service": service, "method": method} for service in _TELLING for method in _TELLING[service]],
            "retryPolicy": {
                "maxAttempts": 3,
                "initialBackoff": "0.1s",
                "maxBackoff": "1s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ]
}
"""gRPC's own retries (https://github.com/grpc/proposal, A6), of those calls alone."""

CHANNEL_OPTIONS: ChannelOptions = [
    *PEER_OPTIONS,
    # A server that has just come up is found within a second, not after gRPC's growing pauses.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.service_config", json.dumps(_RETRIES)),
]


def call_metadata(access: Access, address: str, caller: str) -> tuple[tuple[str, str], ...]:
    """What every call shows. Raises ConfigurationError as `Access.metadata` does."""
    return (*access.metadata(address), *(((CALLER, caller),) if caller else ()))
