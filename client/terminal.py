"""How continuations appear on standard output, as text or as JSON lines; knows no gRPC and no flags."""

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict

from blockplane.client.values import Delta
from blockplane.protos.errors import InvalidRequestError


def read_prompt(argument: str) -> str:
    """The prompt itself, or all of standard input, unchanged, where `argument` is `-`."""
    if argument != "-":
        return argument
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"standard input is not text: {error}; send UTF-8.") from None


def print_text(deltas: Iterable[Delta]) -> None:
    """Print the text as it comes, and one line end after the last."""
    for delta in deltas:
        print(delta.text, end="", flush=True)
    print(flush=True)


def print_samples(deltas: Iterable[Delta]) -> None:
    """Print each sample's text as soon as it is whole, under a line that says which it is and why it ended."""
    texts: dict[int, str] = {}
    for delta in deltas:
        index = delta.sample_index
        texts[index] = texts.get(index, "") + delta.text
        if delta.finish_reason is not None:
            print(f"--- sample {index}, {delta.finish_reason}\n{texts.pop(index)}", flush=True)


def print_json(deltas: Iterable[Delta]) -> None:
    """Print one JSON object per delta and line, without what is None."""
    for delta in deltas:
        present = {name: value for name, value in asdict(delta).items() if value is not None}
        print(json.dumps(present, ensure_ascii=False), flush=True)
