"""What a thread gets that asks an event loop."""

import asyncio
import threading
import time

import pytest

from blockplane.control_plane import on_loop as module
from blockplane.control_plane.on_loop import on_loop


def test_a_function_is_called_in_its_loop_and_its_caller_gets_what_it_says_or_raises() -> None:
    def fail() -> None:
        raise ValueError("so it is")

    async def main() -> None:
        ask = on_loop(lambda: (threading.current_thread(), asyncio.get_running_loop()))
        assert await asyncio.to_thread(ask) == (threading.current_thread(), asyncio.get_running_loop())
        with pytest.raises(ValueError, match="so it is"):
            await asyncio.to_thread(on_loop(fail))

    asyncio.run(main())


def test_a_loop_that_is_busy_is_not_waited_for_and_not_asked_once_it_has_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SECONDS", 0.05)
    asked: list[int] = []

    async def main() -> None:
        ask, raised = on_loop(lambda: asked.append(1)), []

        def ask_in_vain() -> None:
            try:
                ask()
            except TimeoutError as error:
                raised.append(error)

        thread = threading.Thread(target=ask_in_vain)
        thread.start()
        time.sleep(1)
        thread.join()
        assert raised
        await asyncio.sleep(0)

    asyncio.run(main())
    assert asked == []


def test_a_loop_that_is_closed_is_an_error() -> None:
    async def main() -> object:
        return on_loop(lambda: 1)

    ask = asyncio.run(main())
    with pytest.raises(RuntimeError, match="closed"):
        ask()
