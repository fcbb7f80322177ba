"""A peer in a process of its own, asked over pipes, as a client that `Load` can drive; knows not which peer.

A line of JSON each. To the peer: a request {id, prompt (token ids), max_tokens, temperature, top_k, top_p}, or
{reset: true} to forget cached prefixes. From it: {ready: NAME AND VERSION} once, {id, token_ids} as they come,
{id, num_cached_tokens} at a request's end, {reset: true}. It ends with its input.
"""

import asyncio
import itertools
import json
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from blockplane.client.values import Delta, Usage
from blockplane.protos.errors import UnavailableError

LONGEST_LINE = 1 << 24


class PeerClient:
    """One peer; `generate` is as `AsyncClient` has it, for token ids, and draws seeds of its own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        """`process`: with pipes, which read lines of LONGEST_LINE bytes."""
        assert process.stdin is not None
        assert process.stdout is not None
        self._requests, self._answers = process.stdin, process.stdout
        self._names = map("request-{}".format, itertools.count())
        self._queues: dict[str, asyncio.Queue[dict[str, Any]]] = {}
        self._has_reset = asyncio.Event()
        self._reader: asyncio.Task[None] | None = None

    async def ready(self) -> str:
        """Wait until it is. Returns its name and version. Raises UnavailableError if it ends before."""
        line = await self._answers.readline()
        if not line:
            raise UnavailableError("the peer ended before it was ready; its last lines are above.")
        self._reader = asyncio.create_task(self._read())
        return str(json.loads(line)["ready"])

    async def _read(self) -> None:
        while line := await self._answers.readline():
            answer = json.loads(line)
            if "reset" in answer:
                self._has_reset.set()
            else:
                self._queues[answer["id"]].put_nowait(answer)
        for queue in self._queues.values():
            queue.put_nowait({})

    async def reset_prefix_cache(self) -> None:
        """Let nothing be found that was cached before."""
        self._has_reset.clear()
        self._send({"reset": True})
        await self._has_reset.wait()

    def _send(self, line: dict[str, Any]) -> None:
        self._requests.write(json.dumps(line).encode() + b"\n")

    async def generate(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        **_: Any,
    ) -> AsyncGenerator[Delta, None]:
        """Continue a prompt, past every end of text.

        Raises:
            UnavailableError: the peer is gone.
        """
        name = next(self._names)
        queue = self._queues[name] = asyncio.Queue()
        params = {"max_tokens": max_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p}
        self._send({"id": name, "prompt": list(prompt), **params})
        num_tokens = 0
        while "num_cached_tokens" not in (answer := await queue.get()):
            if not answer:
                raise UnavailableError("the peer ended amid a request; its last lines are above.")
            num_tokens += len(answer["token_ids"])
            yield Delta(tuple(answer["token_ids"]), "", None, None)
        del self._queues[name]
        yield Delta((), "", "length", Usage(len(prompt), num_tokens, answer["num_cached_tokens"]))
