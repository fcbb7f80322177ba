"""Bytes that a peer sent to the message that they should be; knows no message."""

from collections.abc import Callable
from typing import Any

from google.protobuf.message import DecodeError

from blockplane.protos.errors import InvalidRequestError


def decoded(deserialize: Callable[[bytes], Any], data: bytes, method: str) -> Any:
    """Raises InvalidRequestError, naming the method that they were sent to, if they are no such message."""
    try:
        return deserialize(data)
    except DecodeError:
        raise InvalidRequestError(f"what was sent to {method} is no message of its; check the version.") from None
