"""Case 39: an exception that nobody foresaw, in every form of a servicer's method, over real sockets."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from blockplane.protos.listening import listening_server


async def called(request: bytes, context: Any) -> bytes:
    return bytes([request[0] // request[1]])


async def chosen(request: bytes, context: Any) -> bytes:
    return await context.abort(grpc.StatusCode.NOT_FOUND, "there is none.")  # type: ignore[no-any-return]


async def written(request: bytes, context: Any) -> None:
    await context.write(b"one")
    await called(request, context)


async def yielded(request: bytes, context: Any) -> AsyncIterator[bytes]:
    yield b"one"
    yield await called(request, context)


async def conversed(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
    async for request in requests:
        yield await called(request, context)


HANDLERS = {
    "Called": grpc.unary_unary_rpc_method_handler(called, bytes),
    "Chosen": grpc.unary_unary_rpc_method_handler(chosen, bytes),
    "Written": grpc.unary_stream_rpc_method_handler(written, bytes),
    "Yielded": grpc.unary_stream_rpc_method_handler(yielded, bytes),
    "Conversed": grpc.stream_stream_rpc_method_handler(conversed, bytes),
}


def call(folder: Path, method: str, request: bytes) -> list[bytes]:
    """What a server of these methods answers."""

    async def main() -> list[bytes]:
        address = f"unix:{folder}/server.sock"
        server = listening_server(address)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("a.Service", HANDLERS),))
        await server.start()
        try:
            async with grpc.aio.insecure_channel(address) as channel:
                path = f"/a.Service/{method}"
                if method in ("Called", "Chosen"):
                    return [await channel.unary_unary(path)(request)]
                if method == "Conversed":
                    return [answer async for answer in channel.stream_stream(path)(iter([request]))]
                return [answer async for answer in channel.unary_stream(path)(request)]
        finally:
            await server.stop(None)

    return asyncio.run(main())


@pytest.mark.parametrize("method", ["Called", "Written", "Yielded", "Conversed"])
def test_an_unforeseen_exception_is_internal_with_an_id_that_the_log_has(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    with caplog.at_level(logging.ERROR), pytest.raises(grpc.aio.AioRpcError) as caught:
        call(tmp_path, method, bytes([6, 0]))
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    (record,) = caplog.records
    fault_id = record.getMessage().split()[1]
    assert len(fault_id) == 8
    assert fault_id in (caught.value.details() or "")
    assert f"/a.Service/{method}" in record.getMessage()
    assert "ZeroDivisionError" in caplog.text, "with its trace"


@pytest.mark.parametrize(
    ("method", "answers"),
    [("Called", [b"\3"]), ("Written", [b"one"]), ("Yielded", [b"one", b"\3"]), ("Conversed", [b"\3"])],
)
def test_answers_pass_as_they_are(tmp_path: Path, method: str, answers: list[bytes]) -> None:
    assert call(tmp_path, method, bytes([6, 2])) == answers


def test_a_status_that_the_servicer_chose_passes_and_nothing_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=r"there is none\."):
        call(tmp_path, "Chosen", b"")
    assert caplog.records == []
