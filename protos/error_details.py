"""What an error tells programs beside its status and sentence, as google.rpc.Status in a call's trailing metadata.

Form: https://github.com/googleapis/googleapis, google/rpc/error_details.proto, and https://google.aip.dev/193. Knows no
service.
"""

import math
from collections.abc import Iterable
from typing import Any, TypeAlias, cast

import grpc
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from blockplane.protos.errors import BlockplaneError, InvalidRequestError, RetryableError, error_of_status

DOMAIN = "blockplane"
"""In whose vocabulary the reasons are."""
STATUS_DETAILS = "grpc-status-details-bin"
"""Trailing metadata, gRPC's own: a serialized google.rpc.Status."""
RETRY_PUSHBACK = "grpc-retry-pushback-ms"
"""Trailing metadata, gRPC's own: milliseconds until a call may be made again (https://github.com/grpc/proposal, A6)."""
_MAX_BYTES = 4096
"""Of a status: gRPC takes 8 KiB of metadata, and whoever sent us a name as long may at least read our sentence."""

Metadata: TypeAlias = tuple[tuple[str, str | bytes], ...]


def trailing_metadata(error: BlockplaneError) -> Metadata:
    """Its reason, the field that it blames, and when to call again, as far as they are known."""
    status = Status(code=error.status.value[0], message=str(error))
    for detail in _details(error):
        status.details.add().Pack(detail)
    data = status.SerializeToString()
    metadata: Metadata = ((STATUS_DETAILS, data),) if len(data) <= _MAX_BYTES else ()
    if isinstance(error, RetryableError) and error.retry_after_seconds is not None:
        metadata = (*metadata, (RETRY_PUSHBACK, str(math.ceil(1000 * error.retry_after_seconds))))
    return metadata


def _details(error: BlockplaneError) -> Iterable[Any]:
    yield ErrorInfo(reason=error.reason, domain=DOMAIN)
    if isinstance(error, InvalidRequestError) and error.field is not None:
        yield BadRequest(field_violations=[BadRequest.FieldViolation(field=error.field, description=str(error))])
    if isinstance(error, RetryableError) and error.retry_after_seconds is not None:
        retry = RetryInfo()
        retry.retry_delay.FromNanoseconds(math.ceil(1e9 * error.retry_after_seconds))
        yield retry


def error_of_call(failure: grpc.RpcError) -> BlockplaneError:
    """Rebuild the error that ended a call; what its server does not tell is left out."""
    # Pairs, though the stubs know them only by their attributes.
    metadata: dict[str, str | bytes] = dict(cast(Metadata, failure.trailing_metadata() or ()))
    info, bad_request, retry = _unpacked(metadata.get(STATUS_DETAILS))
    error = error_of_status(failure.code(), failure.details() or "", info.reason if info.domain == DOMAIN else "")
    if isinstance(error, InvalidRequestError) and bad_request.field_violations:
        error.field = bad_request.field_violations[0].field
    if isinstance(error, RetryableError):
        error.retry_after_seconds = _pushback(metadata.get(RETRY_PUSHBACK))
        if retry.HasField("retry_delay"):
            error.retry_after_seconds = retry.retry_delay.ToNanoseconds() / 1e9
    return error


def _unpacked(data: str | bytes | None) -> tuple[Any, Any, Any]:
    """The details of each kind, empty where there are none; whoever sent bytes that are no message told nothing."""
    details = ErrorInfo(), BadRequest(), RetryInfo()
    try:
        for packed in Status.FromString(data).details if isinstance(data, bytes) else ():
            for detail in details:
                packed.Unpack(detail)
    except DecodeError:
        return ErrorInfo(), BadRequest(), RetryInfo()
    return details


def _pushback(value: str | bytes | None) -> float | None:
    """Seconds; None where the server does not say, or says never, which is a negative number."""
    return int(value) / 1000 if isinstance(value, str) and value.isdecimal() else None
