"""The one error tree. Each error names its gRPC status and says what to do; only the gRPC edges translate it."""

from collections.abc import Iterator

import grpc


class BlockplaneError(Exception):
    """Root of every failure that Blockplane foresees. The message is a sentence that says what to do.

    Attributes:
        status: the gRPC status that it ends a call with.
        reason: the name by which programs tell it from others of that status; it never changes.
    """

    status = grpc.StatusCode.INTERNAL
    reason = "INTERNAL"


class InvalidRequestError(BlockplaneError):
    """A client sent something that no server of ours would take: change the request."""

    status = grpc.StatusCode.INVALID_ARGUMENT
    reason = "INVALID_REQUEST"

    def __init__(self, message: str, field: str | None = None) -> None:
        """`field`: the path of the field at fault, such as `sampling_params.top_p`; None = it is no single one."""
        super().__init__(message)
        self.field = field


def invalid_parameter(name: str, message: str) -> InvalidRequestError:
    """The error of one of a request's sampling parameters, whose path is the same in either client protocol."""
    return InvalidRequestError(message, f"sampling_params.{name}")


class RetryableError(BlockplaneError):
    """The same request may succeed later."""

    reason = "RETRYABLE"

    def __init__(self, message: str, retry_after_seconds: float | None = None) -> None:
        """`retry_after_seconds`: when it may; None = nobody knows, or not before something is changed."""
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class CapacityError(RetryableError):
    """The request is sound but does not fit, now or ever; the message says which."""

    status = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "CAPACITY"


class QueueFullError(CapacityError):
    """No request may wait any more, however small: come again when some have been served."""

    reason = "QUEUE_FULL"


class UnavailableError(RetryableError):
    """A part of the system is not attached or is going away: retry."""

    status = grpc.StatusCode.UNAVAILABLE
    reason = "UNAVAILABLE"


class DeadlineError(BlockplaneError):
    """The caller's time ran out before the answer came: allow more, or ask for less."""

    status = grpc.StatusCode.DEADLINE_EXCEEDED
    reason = "DEADLINE"


class NotFoundError(BlockplaneError):
    """The caller has no request of that id: send it again, or call as the one who sent it."""

    status = grpc.StatusCode.NOT_FOUND
    reason = "NOT_FOUND"


class UnsupportedError(BlockplaneError):
    """A protocol that others have written asks for something that we do not do: leave it out."""

    status = grpc.StatusCode.UNIMPLEMENTED
    reason = "UNSUPPORTED"


class CursorError(BlockplaneError):
    """What the caller wants to go on from is not kept: begin with what there is now."""

    status = grpc.StatusCode.OUT_OF_RANGE
    reason = "CURSOR"


class DataLossError(BlockplaneError):
    """What the caller has seen is more than the server knows of: start anew."""

    status = grpc.StatusCode.DATA_LOSS
    reason = "DATA_LOSS"


class AuthenticationError(BlockplaneError):
    """The caller does not show who it is: send a token that the server knows."""

    status = grpc.StatusCode.UNAUTHENTICATED
    reason = "AUTHENTICATION"


class PermissionDeniedError(BlockplaneError):
    """The caller is known and may not do this: call as one who may."""

    status = grpc.StatusCode.PERMISSION_DENIED
    reason = "PERMISSION_DENIED"


class DuplicateError(BlockplaneError):
    """An id that must be unique is in use: choose another or wait for its end."""

    status = grpc.StatusCode.ALREADY_EXISTS
    reason = "DUPLICATE"


class ConfigurationError(BlockplaneError):
    """The configuration contradicts itself, the model or the memory: change the named setting."""

    status = grpc.StatusCode.FAILED_PRECONDITION
    reason = "CONFIGURATION"


class BlocksGoneError(BlockplaneError):
    """A worker has not, or has no more, the KV blocks that another asks for: compute what they held anew."""

    status = grpc.StatusCode.FAILED_PRECONDITION
    reason = "BLOCKS_GONE"


class ModelError(BlockplaneError):
    """The checkpoint cannot be served: it lacks something, or holds something that we do not know."""

    status = grpc.StatusCode.FAILED_PRECONDITION
    reason = "MODEL"


class RanksError(BlockplaneError):
    """A worker group lacks some of its ranks, or they do not belong together: see to those that the message names.

    It says nothing against a rank that has served before: that one tries again.
    """

    status = grpc.StatusCode.FAILED_PRECONDITION
    reason = "RANKS"


class ProtocolError(BlockplaneError):
    """A peer broke the plan protocol: a fault in one of the processes, or a mix of versions."""

    status = grpc.StatusCode.INTERNAL
    reason = "PROTOCOL"


class WorkerKilledError(BlockplaneError):
    """A request was alone in the step again and again when its worker died: it is taken to be the cause, and ends."""

    status = grpc.StatusCode.INTERNAL
    reason = "WORKER_KILLED"


class ModelOutputError(BlockplaneError):
    """The model's logits for one row were not finite; only that request ends."""

    status = grpc.StatusCode.INTERNAL
    reason = "MODEL_OUTPUT"


class ReplayError(BlockplaneError):
    """A recorded step gave another result when it ran again: another machine, other settings, or a fault."""

    status = grpc.StatusCode.INTERNAL
    reason = "REPLAY"


class AbortedError(BlockplaneError):
    """Somebody asked for the request's end by its id."""

    status = grpc.StatusCode.CANCELLED
    reason = "ABORTED"


def error_of_status(status: grpc.StatusCode, message: str, reason: str = "") -> BlockplaneError:
    """Rebuild the error that a peer of ours sent as a status, a message and, where it says, a reason."""
    error = _CLASS_OF_REASON.get(reason)
    if error is None or error.status is not status:
        error = _CLASS_OF_STATUS.get(status, BlockplaneError)
    return error(message)


def _classes(root: type[BlockplaneError]) -> Iterator[type[BlockplaneError]]:
    yield root
    for error in root.__subclasses__():
        yield from _classes(error)


_CLASS_OF_REASON: dict[str, type[BlockplaneError]] = {error.reason: error for error in _classes(BlockplaneError)}
_CLASS_OF_STATUS: dict[grpc.StatusCode, type[BlockplaneError]] = {
    error.status: error
    for error in (
        InvalidRequestError,
        CapacityError,
        UnavailableError,
        DeadlineError,
        NotFoundError,
        UnsupportedError,
        CursorError,
        DataLossError,
        AuthenticationError,
        PermissionDeniedError,
        DuplicateError,
        ConfigurationError,
        AbortedError,
    )
}
