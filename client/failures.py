"""gRPC's failures as our errors, for the client; knows no calls."""

from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from blockplane.protos.error_details import error_of_call
from blockplane.protos.errors import BlockplaneError, DeadlineError, UnavailableError


class UnreachableError(UnavailableError):
    """No server had the call, or the connection to it broke: nobody refused."""


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
            return UnreachableError(f"no server answers on {address} ({cause}); start it, or name another.")
    return error_of_call(failure)
