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
    "RetryableError": grpc.StatusCode.INTERNAL,
    "UnavailableError": grpc.StatusCode.UNAVAILABLE,
    "DuplicateError": grpc.StatusCode.ALREADY_EXISTS,
    "ConfigurationError": grpc.StatusCode.FAILED_PRECONDITION,
    "ModelError": grpc.StatusCode.FAILED_PRECONDITION,
    "ProtocolError": grpc.StatusCode.INTERNAL,
    "ModelOutputError": grpc.StatusCode.INTERNAL,
    "ReplayError": grpc.StatusCode.INTERNAL,
    "AbortedError": grpc.StatusCode.CANCELLED,
    "NotFoundError": grpc.StatusCode.NOT_FOUND,
    "DataLossError": grpc.StatusCode.DATA_LOSS,
    "WorkerKilledError": grpc.StatusCode.INTERNAL,
    "DeadlineError": grpc.StatusCode.DEADLINE_EXCEEDED,
}
CLASSES = dict(inspect.getmembers(errors, inspect.isclass))


def test_each_class_has_the_status_that_clients_were_promised() -> None:
    assert {name: error.status for name, error in CLASSES.items()} == STATUS_OF


@pytest.mark.parametrize("name", STATUS_OF)
def test_each_class_is_in_the_one_tree_and_says_what_it_means(name: str) -> None:
    assert issubclass(CLASSES[name], BlockplaneError)
    assert (CLASSES[name].__doc__ or "").endswith(".")


@pytest.mark.parametrize("name", STATUS_OF)
def test_a_status_comes_back_as_the_class_that_alone_has_it(name: str) -> None:
    status = STATUS_OF[name]
    rebuilt = error_of_status(status, "do this.")
    assert (rebuilt.status, str(rebuilt)) == (status, "do this.")
    if list(STATUS_OF.values()).count(status) == 1:
        assert type(rebuilt) is CLASSES[name]


@pytest.mark.parametrize("status", set(grpc.StatusCode) - set(STATUS_OF.values()))
def test_a_status_that_no_class_has_comes_back_as_the_root(status: grpc.StatusCode) -> None:
    rebuilt = error_of_status(status, "do this.")
    assert type(rebuilt) is BlockplaneError
    assert str(rebuilt) == "do this."
