"""Notes, as a call begins, which trace it belongs to; knows no service."""

from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from blockplane.protos.trace_context import TRACEPARENT, current_traceparent, trace_id_of


class Tracing(grpc.aio.ServerInterceptor):
    """What is logged or submitted within a call finds the call's traceparent in its context."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["grpc.RpcMethodHandler[Any, Any] | None"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        for key, value in handler_call_details.invocation_metadata:
            if key == TRACEPARENT and trace_id_of(str(value)) is not None:
                current_traceparent.set(str(value))
        return await continuation(handler_call_details)
