"""Whether what a client asks its output to be can be held to, asked before the request is taken. Knows no grammar.

Another process tries it out, one at a time; it comes up with the first question, and again after it has ended.
"""

import asyncio
import sys
from collections import OrderedDict

from blockplane.control_plane.frontend.grammar_checker import LENGTH_BYTES, MAX_SECONDS
from blockplane.protos.errors import CapacityError, UnavailableError, invalid_parameter
from blockplane.protos.model import ModelInfo
from blockplane.protos.sampling_wire import structured_to_proto
from blockplane.protos.structured import StructuredOutput
from blockplane.protos.wire import model_info_to_proto

MAX_KEPT = 1024
"""Answers that are known without asking again."""
MAX_WAITING = 64
_CHECKER = "blockplane.control_plane.frontend.grammar_checker"
_START_SECONDS = 120.0
"""Within which the process takes over a model's vocabulary."""
_RETRY_SECONDS = 1.0


class GrammarChecks:
    """The questions of one frontend."""

    def __init__(self) -> None:
        self._model: ModelInfo | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._is_over = False
        self._num_waiting = 0
        self._answers: OrderedDict[StructuredOutput, str] = OrderedDict()

    async def check(self, structured: StructuredOutput, model: ModelInfo) -> None:
        """
        Raises:
            InvalidRequestError: it cannot be held to; the message names its kind.
            CapacityError: too many wait for their answers.
            UnavailableError: there is none, and it is not the question's fault.
        """
        sentence = self._answers.get(structured) if model == self._model else None
        if sentence is None:
            if self._num_waiting >= MAX_WAITING:
                raise CapacityError(
                    f"{MAX_WAITING} structured outputs wait to be tried out; send the request again.", _RETRY_SECONDS
                )
            self._num_waiting += 1
            # Whoever leaves meanwhile leaves an answer to be read.
            question = asyncio.create_task(self._ask_in_turn(structured, model))
            question.add_done_callback(self._answered)
            sentence = await asyncio.shield(question)
        if sentence:
            raise invalid_parameter(structured.kind, sentence)

    async def stop(self) -> None:
        """End the process, and whatever is asked of it: there is no other."""
        self._is_over = True
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
        async with self._turn:
            await self._end_process()

    def _answered(self, question: "asyncio.Task[str]") -> None:
        self._num_waiting -= 1
        if not question.cancelled():
            # Told to whoever asked, unless nobody does any more.
            question.exception()

    async def _ask_in_turn(self, structured: StructuredOutput, model: ModelInfo) -> str:
        """What is known by now, or is found out. Raises as `check` does."""
        async with self._turn:
            if model != self._model:
                await self._end_process()
                self._model = model
                self._answers.clear()
            if (sentence := self._answers.get(structured)) is not None:
                return sentence
            try:
                async with asyncio.timeout(MAX_SECONDS + _START_SECONDS):
                    sentence = await self._ask(structured, model)
            except (OSError, EOFError, TimeoutError) as error:
                await self._end_process()
                raise UnavailableError(
                    "what tries out structured outputs has ended; send the request again.", _RETRY_SECONDS
                ) from error
            self._answers[structured] = sentence
            if len(self._answers) > MAX_KEPT:
                self._answers.popitem(last=False)
            return sentence

    async def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            if process.returncode is None:
                process.kill()
            await process.communicate()

    async def _ask(self, structured: StructuredOutput, model: ModelInfo) -> str:
        """Raises OSError, EOFError (IncompleteReadError) where the process has ended."""
        if self._is_over:
            raise EOFError
        process = self._process
        if process is None or process.returncode is not None:
            process = self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                _CHECKER,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
            await _write(process, model_info_to_proto(model).SerializeToString())
        proto = structured_to_proto(structured)
        assert proto is not None
        await _write(process, proto.SerializeToString())
        assert process.stdout is not None
        length = int.from_bytes(await process.stdout.readexactly(LENGTH_BYTES), "little")
        return (await process.stdout.readexactly(length)).decode()


async def _write(process: asyncio.subprocess.Process, frame: bytes) -> None:
    assert process.stdin is not None
    process.stdin.write(len(frame).to_bytes(LENGTH_BYTES, "little") + frame)
    await process.stdin.drain()
