"""The error tree: one status each, and what a status becomes on the other side."""

import inspect

import grpc
import pytest

from blockplane.protos import errors
from blockplane.protos.errors import BlockplaneError, error_of_status

STATUS_OF = {
    "BlockplaneError": grpc.StatusCode.INTERNAL,
    "InvalidRequestError": grpc.StatusCode.INVALID_ARGUMENT,
    "CapacityError": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "QueueFullError": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "RetryableError": grpc.StatusCode.INTERNAL,
    "UnavailableError": grpc.StatusCode.UNAVAILABLE,
    "DuplicateError": grpc.StatusCode.ALREADY_EXISTS,
    "ConfigurationError": grpc.StatusCode.FAILED_PRECONDITION,
    "BlocksGoneError": grpc.StatusCode.FAILED_PRECONDITION,
    "ModelError": grpc.StatusCode.FAILED_PRECONDITION,
    "RanksError": grpc.StatusCode.FAILED_PRECONDITION,
    "ProtocolError": grpc.StatusCode.INTERNAL,
    "ModelOutputError": grpc.StatusCode.INTERNAL,
    "ReplayError": grpc.StatusCode.INTERNAL,
    "AbortedError": grpc.StatusCode.CANCELLED,
    "NotFoundError": grpc.StatusCode.NOT_FOUND,
    "UnsupportedError": grpc.StatusCode.UNIMPLEMENTED,
    "CursorError": grpc.StatusCode.OUT_OF_RANGE,
    "DataLossError": grpc.StatusCode.DATA_LOSS,
    "WorkerKilledError": grpc.StatusCode.INTERNAL,
    "DeadlineError": grpc.StatusCode.DEADLINE_EXCEEDED,
    "AuthenticationError": grpc.StatusCode.UNAUTHENTICATED,
    "PermissionDeniedError": grpc.StatusCode.PERMISSION_DENIED,
}
REASON_OF = {
    "BlockplaneError": "INTERNAL",
    "InvalidRequestError": "INVALID_REQUEST",
    "RetryableError": "RETRYABLE",
    "CapacityError": "CAPACITY",
    "QueueFullError": "QUEUE_FULL",
    "UnavailableError": "UNAVAILABLE",
    "DeadlineError": "DEADLINE",
    "NotFoundError": "NOT_FOUND",
    "UnsupportedError": "UNSUPPORTED",
    "CursorError": "CURSOR",
    "DataLossError": "DATA_LOSS",
    "DuplicateError": "DUPLICATE",
    "ConfigurationError": "CONFIGURATION",
    "BlocksGoneError": "BLOCKS_GONE",
    "ModelError": "MODEL",
    "RanksError": "RANKS",
    "ProtocolError": "PROTOCOL",
    "WorkerKilledError": "WORKER_KILLED",
    "ModelOutputError": "MODEL_OUTPUT",
    "ReplayError": "REPLAY",
    "AbortedError": "ABORTED",
    "AuthenticationError": "AUTHENTICATION",
    "PermissionDeniedError": "PERMISSION_DENIED",
}
CLASSES = {
    name: each for name, each in inspect.getmembers(errors, inspect.isclass) if each.__module__ == errors.__name__
}


def test_each_class_has_the_status_that_clients_were_promised() -> None:
    assert {name: error.status for name, error in CLASSES.items()} == STATUS_OF


def test_each_class_has_the_reason_that_programs_were_promised() -> None:
    assert {name: error.reason for name, error in CLASSES.items()} == REASON_OF
    assert len(set(REASON_OF.values())) == len(REASON_OF)


@pytest.mark.parametrize("name", STATUS_OF)
def test_each_class_is_in_the_one_tree_and_says_what_it_means(name: str) -> None:
    assert issubclass(CLASSES[name], BlockplaneError)
    assert (inspect.getdoc(CLASSES[name]) or "").endswith(".")


@pytest.mark.parametrize("name", STATUS_OF)
def test_a_status_comes_back_as_the_class_that_alone_has_it(name: str) -> None:
    status = STATUS_OF[name]
    rebuilt = error_of_status(status, "do this.")
    assert (rebuilt.status, str(rebuilt)) == (status, "do this.")
    if list(STATUS_OF.values()).count(status) == 1:
        assert type(rebuilt) is CLASSES[name]


@pytest.mark.parametrize("status", [status for status in grpc.StatusCode if status not in STATUS_OF.values()])
def test_a_status_that_no_class_has_comes_back_as_the_root(status: grpc.StatusCode) -> None:
    rebuilt = error_of_status(status, "do this.")
    assert type(rebuilt) is BlockplaneError
    assert str(rebuilt) == "do this."


@pytest.mark.parametrize("name", STATUS_OF)
def test_a_reason_brings_back_the_very_class(name: str) -> None:
    rebuilt = error_of_status(STATUS_OF[name], "do this.", REASON_OF[name])
    assert (type(rebuilt), str(rebuilt)) == (CLASSES[name], "do this.")


@pytest.mark.parametrize("reason", ["", "unheard of", "CAPACITY"])
def test_a_reason_that_is_none_of_the_status_s_changes_nothing(reason: str) -> None:
    assert type(error_of_status(grpc.StatusCode.NOT_FOUND, "do this.", reason)) is errors.NotFoundError
