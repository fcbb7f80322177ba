"""Who calls: lets a call in by its bearer token, once and before its first message. Knows no service."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from typing import Any, NoReturn

import grpc

from blockplane.protos.access import AUTHORIZATION
from blockplane.protos.channel import CALLER
from blockplane.protos.errors import AuthenticationError, BlockplaneError, PermissionDeniedError
from blockplane.protos.scopes import scopes_of
from blockplane.protos.tokens import Identity, Tokens

logger = logging.getLogger(__name__)

authenticated: ContextVar[str | None] = ContextVar("authenticated", default=None)
"""Within a call, whose token it came with; None where no token was asked for."""


class Authentication(grpc.aio.ServerInterceptor):
    """Refuses calls without a token that is for them. The refusal is raised where `FaultReports` finds it."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        try:
            identity = self._admit(handler_call_details)
        except BlockplaneError as error:
            logger.info("refused a call of %r: %s", handler_call_details.method, error)
            return _refusing(error)
        if identity is not None:
            authenticated.set(identity.name)
        return await continuation(handler_call_details)

    def _admit(self, details: grpc.HandlerCallDetails) -> Identity | None:
        scopes = scopes_of(details.method)
        if not scopes:
            return None
        identity = self._tokens.identity(_bearer(details))
        if identity is None:
            raise AuthenticationError("the token is not one of this server's; ask whoever runs it for one.")
        if not scopes & identity.scopes:
            raise PermissionDeniedError(
                f"{details.method} is for tokens of the scope {' or '.join(sorted(scopes))}, and that of"
                f" {identity.name} is for {', '.join(sorted(identity.scopes))}; call with another."
            )
        return identity


def caller_of(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """Whom a call's requests belong to: its token's name, else its certificate's, else whom it names; empty = anybody.

    Only the last may be anything that the caller likes.
    """
    if (name := authenticated.get()) is not None:
        return name
    for name_in_certificate in context.auth_context().get("x509_common_name", ()):
        return name_in_certificate.decode(errors="replace")
    return next((str(value) for key, value in context.invocation_metadata() or () if key == CALLER), "")


def _bearer(details: grpc.HandlerCallDetails) -> str:
    """The token that a call shows. Raises AuthenticationError where it shows none."""
    values = [str(value) for key, value in details.invocation_metadata if key == AUTHORIZATION]
    scheme, _, token = values[0].partition(" ") if len(values) == 1 else ("", "", "")
    if scheme.lower() != "bearer" or not token:
        raise AuthenticationError(f"this server asks for a token; send `{AUTHORIZATION}: Bearer TOKEN` as metadata.")
    return token.strip()


def _refusing(error: BlockplaneError) -> grpc.RpcMethodHandler[Any, Any]:
    """Serves a method of whatever form, by an end: no message is read before."""

    async def refuse(_requests: AsyncIterator[bytes], _context: grpc.aio.ServicerContext[Any, Any]) -> NoReturn:
        raise error

    return grpc.stream_stream_rpc_method_handler(refuse)
