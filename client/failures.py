"""gRPC's failures as our errors, for the client; knows no calls."""

from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from blockplane.protos.channel import RETRY_PUSHBACK
from blockplane.protos.errors import BlockplaneError, DeadlineError, RetryableError, UnavailableError, error_of_status


@contextmanager
def typed_errors(address: str) -> Iterator[None]:
    """Raise what fails inside as BlockplaneError; `address` is whom it was to be had from."""
    try:
        yield
    except grpc.RpcError as failure:
        raise _error(failure, address) from None


def _error(failure: grpc.RpcError, address: str) -> BlockplaneError:
    status, details = failure.code(), failure.details() or ""
    # Our servers speak in sentences; other words are gRPC's own account of a connection.
    if not details.endswith("."):
        if status is grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineError(f"{address} did not answer in time; retry, or allow more time.")
        if status is grpc.StatusCode.UNAVAILABLE:
            cause = details.rpartition(": ")[2]
            return UnavailableError(f"no server answers on {address} ({cause}); start it, or name another.")
    error = error_of_status(status, details)
    if isinstance(error, RetryableError):
        error.retry_after_seconds = _retry_after_seconds(failure)
    return error


def _retry_after_seconds(failure: grpc.RpcError) -> float | None:
    """When the server would be called again; None where it does not say, or says never, which is a negative number."""
    for item in failure.trailing_metadata() or ():
        if item.key == RETRY_PUSHBACK and isinstance(item.value, str) and item.value.isdecimal():
            return int(item.value) / 1000
    return None
