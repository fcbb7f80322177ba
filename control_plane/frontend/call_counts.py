"""How many calls of a frontend stream, and how those ended that failed. Knows no call."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from blockplane.protos.errors import BlockplaneError


class CallCounts:
    """
    Attributes:
        num_open: now.
        num_errors: since the frontend started, by gRPC status; a client that leaves its call counts as CANCELLED.
    """

    def __init__(self) -> None:
        self.num_open = 0
        self.num_errors: Counter[str] = Counter({status.name: 0 for status in grpc.StatusCode if status.value[0]})

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Around a call."""
        self.num_open += 1
        try:
            yield
        except BlockplaneError as error:
            self.num_errors[error.status.name] += 1
            raise
        except (asyncio.CancelledError, grpc.aio.BaseError):
            self.num_errors[grpc.StatusCode.CANCELLED.name] += 1
            raise
        except Exception:
            self.num_errors[grpc.StatusCode.INTERNAL.name] += 1
            raise
        finally:
            self.num_open -= 1
