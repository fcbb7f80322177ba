"""How what a servicer raises, and bytes that are no message, end a call by a gRPC status. Knows no service.

Here alone our errors become statuses. A fault ends a call INTERNAL with an id, which the log has with its trace.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, NoReturn

import grpc

from blockplane.protos.decoding import decoded
from blockplane.protos.error_details import trailing_metadata
from blockplane.protos.errors import BlockplaneError

logger = logging.getLogger(__name__)


class FaultReports(grpc.aio.ServerInterceptor):
    """Goes before every method of a server; errors that the servicer itself turns into a status pass."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        if handler is not None:
            for kind, handler_of in _HANDLERS.items():
                if (behavior := getattr(handler, kind)) is not None:
                    method = handler_call_details.method
                    reporting = _reporting(behavior, _decoder(handler, method), method)
                    return handler_of(reporting, None, handler.response_serializer)
        return handler


_HANDLERS: Mapping[str, Callable[..., grpc.RpcMethodHandler[Any, Any]]] = {
    "unary_unary": grpc.unary_unary_rpc_method_handler,
    "unary_stream": grpc.unary_stream_rpc_method_handler,
    "stream_unary": grpc.stream_unary_rpc_method_handler,
    "stream_stream": grpc.stream_stream_rpc_method_handler,
}


def _decoder(handler: grpc.RpcMethodHandler[Any, Any], method: str) -> Callable[[Any], Any]:
    """From a request's bytes to the request, or from a stream of the ones to a stream of the others.

    gRPC's own would end a call UNKNOWN for bytes that do not decode.
    """
    deserialize, is_stream = handler.request_deserializer or bytes, handler.request_streaming

    def decode(data: bytes) -> Any:
        return decoded(deserialize, data, method)

    async def decode_all(stream: AsyncIterator[bytes]) -> AsyncIterator[Any]:
        async for data in stream:
            yield decode(data)

    return decode_all if is_stream else decode


def _reporting(behavior: Callable[..., Any], decode: Callable[[Any], Any], method: str) -> Callable[..., Any]:
    """The same servicer method, of the same form: one that is called, or one that is gone through."""

    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await behavior(decode(request), context)
        except Exception as fault:
            await _report(fault, method, context)

    async def go_through(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        try:
            async with contextlib.aclosing(behavior(decode(request), context)) as responses:
                async for response in responses:
                    yield response
        except Exception as fault:
            await _report(fault, method, context)

    return go_through if inspect.isasyncgenfunction(behavior) else call


async def _report(fault: Exception, method: str, context: grpc.aio.ServicerContext[Any, Any]) -> NoReturn:
    if isinstance(fault, BlockplaneError):
        await _end_with(fault, context)
    if isinstance(fault, grpc.aio.BaseError):
        # An end that the servicer chose, or a client that is gone.
        raise fault
    fault_id = secrets.token_hex(4)
    logger.error("fault %s in %s", fault_id, method, exc_info=fault)
    sentence = f"this is a fault of the server's, {fault_id} in its log; report it with that line."
    await _end_with(BlockplaneError(sentence), context)


async def _end_with(error: BlockplaneError, context: grpc.aio.ServicerContext[Any, Any]) -> NoReturn:
    """With the error's status and sentence, and with what programs may read of it."""
    await context.abort(error.status, str(error), trailing_metadata(error))
