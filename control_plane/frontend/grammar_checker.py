"""The process that tries out what clients ask outputs to be: a frontend's own, by pipe. Knows no request.

A grammar may be written to exhaust whoever compiles it: in time, in memory, or, as rules that nest a thousand deep, in
stack, which ends the process. So each is compiled in a fork of this one that may end so, and then goes a few tokens of
its own way. What passes takes a worker, which has more stack, no more than it took here.

It reads frames: a `ModelInfo`, then a `StructuredOutput` again and again, and answers each of these with a sentence,
empty = nothing speaks against it. A frame is bytes behind their number, a little-endian uint32. It ends with its input.
"""

import os
import random
import resource
import select
import signal
import sys
import threading
from typing import BinaryIO

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from blockplane.protos.errors import InvalidRequestError, ModelError
from blockplane.protos.grammars import compile_grammar, grammar_tokenizer, refusal
from blockplane.protos.sampling_wire import structured_from_proto
from blockplane.protos.structured import StructuredOutput
from blockplane.protos.wire import model_info_from_proto
from blockplane.v1 import engine_pb2 as pb

LENGTH_BYTES = 4
MAX_CPU_SECONDS = 1
"""A machine that is busy elsewhere does not count, up to MAX_SECONDS of waiting."""
MAX_SECONDS = 10.0
_MAX_MEMORY = 512 << 20
"""Bytes beyond what this process has already."""
_STACK_BYTES = 1 << 20
_NUM_TRIED_TOKENS = 8


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    model = _read(requests)
    if model is None:
        return
    try:
        tokenizer = grammar_tokenizer(model_info_from_proto(pb.ModelInfo.FromString(model)))
    except ModelError:
        # No worker of this model serves it: the engine says so.
        tokenizer = None
    while (frame := _read(requests)) is not None:
        structured = structured_from_proto(pb.StructuredOutput.FromString(frame))
        answer = b"" if tokenizer is None else _tried(tokenizer, structured)
        answers.write(len(answer).to_bytes(LENGTH_BYTES, "little") + answer)
        answers.flush()


def _read(file: BinaryIO) -> bytes | None:
    length = file.read(LENGTH_BYTES)
    return file.read(int.from_bytes(length, "little")) if len(length) == LENGTH_BYTES else None


def _tried(tokenizer: LLTokenizer, structured: StructuredOutput) -> bytes:
    """What a fork says; one that says nothing has exceeded its limits."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        _speak(writer, tokenizer, structured)
    os.close(writer)
    try:
        is_ready, _, _ = select.select([reader], [], [], MAX_SECONDS)
        said = os.read(reader, select.PIPE_BUF) if is_ready else b""
    finally:
        os.close(reader)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return said[1:] if said else str(refusal(structured, "it is too complex to compile")).encode()


def _speak(writer: int, tokenizer: LLTokenizer, structured: StructuredOutput) -> None:
    """The fork's life: a byte, then the sentence."""
    # What it may cry as it dies is no news.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_CPU, MAX_CPU_SECONDS)
    if (memory := _memory()) is not None:
        _limit(resource.RLIMIT_AS, memory + _MAX_MEMORY)

    def speak() -> None:
        sentence = ""
        try:
            _try_out(compile_grammar(tokenizer, structured), tokenizer, structured)
        except InvalidRequestError as error:
            sentence = str(error)
        os.write(writer, b"\0" + sentence.encode(errors="replace"))

    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=speak)
    thread.start()
    thread.join()
    os._exit(0)


def _limit(what: int, most: int) -> None:
    resource.setrlimit(what, (most, most))


def _memory() -> int | None:
    """Bytes of address space that this process has; None where the system does not tell."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except FileNotFoundError:
        return None


def _try_out(matcher: LLMatcher, tokenizer: LLTokenizer, structured: StructuredOutput) -> None:
    """Go a few tokens. Raises InvalidRequestError where that exceeds the compiler's limits, or leads nowhere."""
    draw = random.Random(0)  # noqa: S311 - the same way each time
    for _ in range(_NUM_TRIED_TOKENS):
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        if matcher.is_error():
            raise refusal(structured, matcher.get_error())
        if not mask.any():
            raise refusal(structured, "nothing satisfies it")
        token_id = int(draw.choice(np.flatnonzero(np.unpackbits(mask, bitorder="little"))))
        if token_id in tokenizer.eos_tokens:
            return
        matcher.consume_token(token_id)


if __name__ == "__main__":
    main()
