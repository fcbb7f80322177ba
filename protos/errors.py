"""The one error tree. Each error names its gRPC status and says what to do; only the gRPC edges translate it."""

import grpc


class BlockplaneError(Exception):
    """Root of every failure that Blockplane foresees. The message is a sentence that says what to do."""

    status = grpc.StatusCode.INTERNAL


class InvalidRequestError(BlockplaneError):
    """A client sent something that no server of ours would take: change the request."""

    status = grpc.StatusCode.INVALID_ARGUMENT


class RetryableError(BlockplaneError):
    """The same request may succeed later."""

    def __init__(self, message: str, retry_after_seconds: float | None = None) -> None:
        """`retry_after_seconds`: when it may; None = nobody knows, or not before something is changed."""
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class CapacityError(RetryableError):
    """The request is sound but does not fit, now or ever; the message says which."""

    status = grpc.StatusCode.RESOURCE_EXHAUSTED


class UnavailableError(RetryableError):
    """A part of the system is not attached or is going away: retry."""

    status = grpc.StatusCode.UNAVAILABLE


class DeadlineError(BlockplaneError):
    """The caller's time ran out before the answer came: allow more, or ask for less."""

    status = grpc.StatusCode.DEADLINE_EXCEEDED


class NotFoundError(BlockplaneError):
    """The caller has no request of that id: send it again, or call as the one who sent it."""

    status = grpc.StatusCode.NOT_FOUND


class DataLossError(BlockplaneError):
    """What the caller has seen is more than the server knows of: start anew."""

    status = grpc.StatusCode.DATA_LOSS


class DuplicateError(BlockplaneError):
    """An id that must be unique is in use: choose another or wait for its end."""

    status = grpc.StatusCode.ALREADY_EXISTS


class ConfigurationError(BlockplaneError):
    """The configuration contradicts itself, the model or the memory: change the named setting."""

    status = grpc.StatusCode.FAILED_PRECONDITION


class ModelError(BlockplaneError):
    """The checkpoint cannot be served: it lacks something, or holds something that we do not know."""

    status = grpc.StatusCode.FAILED_PRECONDITION


class ProtocolError(BlockplaneError):
    """A peer broke the plan protocol: a fault in one of the processes, or a mix of versions."""

    status = grpc.StatusCode.INTERNAL


class WorkerKilledError(BlockplaneError):
    """A request was alone in the step again and again when its worker died: it is taken to be the cause, and ends."""

    status = grpc.StatusCode.INTERNAL


class ModelOutputError(BlockplaneError):
    """The model's logits for one row were not finite; only that request ends."""

    status = grpc.StatusCode.INTERNAL


class ReplayError(BlockplaneError):
    """A recorded step gave another result when it ran again: another machine, other settings, or a fault."""

    status = grpc.StatusCode.INTERNAL


class AbortedError(BlockplaneError):
    """Somebody asked for the request's end by its id."""

    status = grpc.StatusCode.CANCELLED


def error_of_status(status: grpc.StatusCode, message: str) -> BlockplaneError:
    """Rebuild the error that a peer of ours sent as a status and a message."""
    return _CLASS_OF_STATUS.get(status, BlockplaneError)(message)


_CLASS_OF_STATUS: dict[grpc.StatusCode, type[BlockplaneError]] = {
    error.status: error
    for error in (
        InvalidRequestError,
        CapacityError,
        UnavailableError,
        DeadlineError,
        NotFoundError,
        DataLossError,
        DuplicateError,
        ConfigurationError,
        AbortedError,
    )
}
