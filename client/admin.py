"""The operator's client of an engine, `blockplane.v1.Admin` and what `Engine` tells; knows no terminal."""

from contextlib import AbstractContextManager
from types import TracebackType
from typing import Self

from blockplane.client.dialling import CHANNEL_OPTIONS, PLAIN, call_metadata
from blockplane.client.engine_values import (
    GroupSteps,
    WorkerStatus,
    engine_statistics_from_proto,
    steps_from_proto,
    worker_from_proto,
)
from blockplane.client.failures import typed_errors
from blockplane.protos.access import Access
from blockplane.protos.statistics import EngineStatistics
from blockplane.v1 import admin_pb2 as pb
from blockplane.v1 import engine_pb2
from blockplane.v1.admin_pb2_grpc import AdminStub
from blockplane.v1.engine_pb2_grpc import EngineStub

ANSWER_SECONDS = 10.0
"""How long a call may take that only tells, or acts at once."""


class Admin:
    """One connection to an engine; made when first used, and made again when lost.

    Its calls raise the errors of `blockplane.protos.errors` and no other: UnavailableError where no engine answers,
    AuthenticationError or PermissionDeniedError where the engine asks for a token of scope `admin`. Any thread may call
    it.
    """

    def __init__(self, address: str, access: Access = PLAIN) -> None:
        """Say where the engine listens: host:port or unix:PATH; and by what the caller is shown."""
        self._address = address
        self._metadata = call_metadata(access, address, caller="")
        self._channel = access.channel(address, CHANNEL_OPTIONS)
        self._admin = AdminStub(self._channel)
        self._engine = EngineStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the connection, and with it every open call."""
        self._channel.close()

    def list_workers(self) -> tuple[WorkerStatus, ...]:
        """Every worker group that is attached, in the order of their numbers."""
        with self._typed_errors():
            response = self._admin.ListWorkers(pb.ListWorkersRequest(), timeout=ANSWER_SECONDS, metadata=self._metadata)
        return tuple(sorted(map(worker_from_proto, response.workers), key=lambda worker: worker.group))

    def drain(self, group: int, timeout: float | None = None) -> None:
        """Give the worker group no new requests, and return once it has none left.

        Args:
            timeout: seconds to wait for that; None = as long as it takes.

        Raises:
            NotFoundError: there is no such group.
            DeadlineError: it has requests after `timeout`; it goes on draining.
        """
        with self._typed_errors():
            self._admin.DrainWorker(pb.DrainWorkerRequest(group=group), timeout=timeout, metadata=self._metadata)

    def undrain(self, group: int) -> None:
        """Let the worker group have requests again.

        Raises:
            NotFoundError: there is no such group.
        """
        request = pb.UndrainWorkerRequest(group=group)
        with self._typed_errors():
            self._admin.UndrainWorker(request, timeout=ANSWER_SECONDS, metadata=self._metadata)

    def reload_weights(self, model: str = "", timeout: float | None = None) -> tuple[int, ...]:
        """Have every worker read the model's weights anew, one group after another.

        Args:
            model: where they find them, as the setting `model` names it; empty = where they found them before.
            timeout: seconds to wait for all of it; None = as long as it takes.

        Returns:
            The groups that have the new weights.

        Raises:
            BlockplaneError: a group could not; the message says which and why.
        """
        request = pb.ReloadWeightsRequest(model=model)
        with self._typed_errors():
            return tuple(self._admin.ReloadWeights(request, timeout=timeout, metadata=self._metadata).groups)

    def get_steps(self, num_steps: int = 0) -> tuple[GroupSteps, ...]:
        """The last steps of every group, `num_steps` of each at most; 0 = all that the engine keeps."""
        request = pb.GetStepsRequest(num_steps=num_steps)
        with self._typed_errors():
            responses = self._admin.GetSteps(request, timeout=ANSWER_SECONDS, metadata=self._metadata)
            return tuple(map(steps_from_proto, responses))

    def statistics(self) -> EngineStatistics:
        """How it stands now, and what was counted since the engine started."""
        request = engine_pb2.GetStatisticsRequest()
        with self._typed_errors():
            response = self._engine.GetStatistics(request, timeout=ANSWER_SECONDS, metadata=self._metadata)
        return engine_statistics_from_proto(response)

    def reset_prefix_cache(self) -> None:
        """Let no block be found that was cached before; running requests keep theirs.

        Raises:
            UnavailableError: no worker is attached.
        """
        request = engine_pb2.ResetPrefixCacheRequest()
        with self._typed_errors():
            self._engine.ResetPrefixCache(request, timeout=ANSWER_SECONDS, metadata=self._metadata)

    def _typed_errors(self) -> AbstractContextManager[None]:
        return typed_errors(self._address)
