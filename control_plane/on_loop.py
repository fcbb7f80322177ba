"""Has an event loop say what it owns, for another thread. Knows nothing of what is said."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from functools import wraps
from typing import TypeVar

Said = TypeVar("Said")

SECONDS = 2.0
"""How long a loop may be busy with something else before it is not waited for any longer."""


def on_loop(say: Callable[[], Said]) -> Callable[[], Said]:
    """The same function for other threads: it is called in the running loop, between two of its turns.

    So it finds nothing half changed, and what the loop owns needs no locks. The new function raises what it raises,
    TimeoutError where the loop does not come to it in time, and RuntimeError once the loop is closed.
    """
    loop = asyncio.get_running_loop()

    def answer(future: Future[Said]) -> None:
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(say())
            except BaseException as error:
                future.set_exception(error)

    @wraps(say)
    def ask() -> Said:
        future: Future[Said] = Future()
        loop.call_soon_threadsafe(answer, future)
        try:
            return future.result(SECONDS)
        finally:
            future.cancel()

    return ask
