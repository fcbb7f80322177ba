"""How a continuation appears on standard output, as text or as JSON lines; knows no gRPC and no flags."""

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict

from blockplane.client.client import Delta
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


def print_json(deltas: Iterable[Delta]) -> None:
    """Print one JSON object per delta and line; only the last has `finish_reason` and `usage`."""
    for delta in deltas:
        present = {name: value for name, value in asdict(delta).items() if value is not None}
        print(json.dumps(present, ensure_ascii=False), flush=True)
