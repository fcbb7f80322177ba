"""How an error of ours ends a call: the one place where it becomes a gRPC status. Knows no service."""

from typing import Any, NoReturn

import grpc

from blockplane.protos.error_details import trailing_metadata
from blockplane.protos.errors import BlockplaneError


async def end_with(error: BlockplaneError, context: "grpc.aio.ServicerContext[Any, Any]") -> NoReturn:
    """End the call with the error's status and sentence, and with what programs may read of it."""
    await context.abort(error.status, str(error), trailing_metadata(error))
