"""The capacity benchmark's reader against a real server, and its processes on sizes that take seconds."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from benchmark_modules import load_benchmark


def test_the_bare_reader_asks_once_counts_every_message_and_sees_the_end() -> None:
    bare = load_benchmark("bare_http2")
    asked, may_end = [], asyncio.Event()

    async def answer(request: bytes, _: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[bytes]:
        asked.append(request)
        for _ in range(300):
            yield bytes(1000)
        await may_end.wait()

    async def scenario() -> None:
        server = grpc.aio.server()
        handler = {"Say": grpc.unary_stream_rpc_method_handler(answer)}
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test.Say", handler)])
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        readers = [bare.Reader("/test.Say/Say", b"please"), bare.Reader("/test.Say/Say", b"please")]
        for reader in readers:
            await asyncio.get_running_loop().create_connection(lambda reader=reader: reader, "127.0.0.1", port)
        async with asyncio.timeout(30):
            while any(reader.num_messages < 300 for reader in readers):
                await asyncio.sleep(0.01)
            assert [reader.end for reader in readers] == [None, None]
            may_end.set()
            while any(reader.end is None for reader in readers):
                await asyncio.sleep(0.01)
        assert [reader.num_messages for reader in readers] == [300, 300]
        assert asked == [b"please"] * 2
        await server.stop(0)

    asyncio.run(scenario())


@pytest.mark.slow
def test_every_load_is_measured_in_real_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    benchmark = load_benchmark("capacity")
    for name in "NUM_GROUPS", "NUM_FRONTEND_GROUPS":
        monkeypatch.setattr(benchmark, name, 2)
    sizes = benchmark.Sizes((8, 16), (4,), settle_seconds=0.5, seconds=1.0)
    figures = benchmark.measure(sizes, list(benchmark.MEASUREMENTS))
    assert [(figure.process, figure.size) for figure in figures] == [("engine", 8), ("engine", 16), ("frontend", 4)]
    for figure in figures:
        assert 0 < figure.steps_per_second <= 51
        assert figure.per_unit > 0
        assert figure.units_per_core > 0
    assert figures[-1].tokens_per_message >= 0.9


def test_a_core_that_does_not_drive_the_goal_is_said() -> None:
    benchmark = load_benchmark("capacity")
    enough = benchmark.Figure("engine", 4096, 50.0, 0.0, 1.0, 0.9, 1100.0, 4.3, 4651.0)
    too_few = benchmark.Figure("engine", 4096, 40.0, 0.5, 1.0, 1.0, 1250.0, 4.9, 4081.0)
    assert benchmark.misses([enough]) == []
    (miss,) = benchmark.misses([enough, too_few])
    assert miss.startswith("4096 rows take 1.00 cores of the engine at 40.0 steps/s of 50; 4081 rows a core")
