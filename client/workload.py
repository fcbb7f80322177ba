"""A JSONL workload: its lines as requests, and when each is due; sends none."""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from blockplane.client.request_flags import REQUEST_ARGUMENTS
from blockplane.client.requests import generation
from blockplane.protos.errors import ConfigurationError, InvalidRequestError
from blockplane.protos.structured import STRUCTURED_KINDS, StructuredKind, StructuredOutput

_ARGUMENTS = {"prompt", *REQUEST_ARGUMENTS} - {"structured"}
_KNOWN = {*_ARGUMENTS, *STRUCTURED_KINDS, "id", "prompt_token_ids", "at_seconds", "arrive_after_tokens"}


@dataclass(frozen=True, slots=True)
class WorkItem:
    """One request of a workload.

    Attributes:
        arguments: what `Client.generate` is called with, the prompt included.
        at_seconds: when it is due, from the beginning on; None = as soon as there is room for it.
        arrive_after_tokens: besides, not before some request has so many output tokens; 0 = no matter.
    """

    name: str
    arguments: Mapping[str, Any]
    at_seconds: float | None = None
    arrive_after_tokens: int = 0


def read_workload(path: str) -> list[WorkItem]:
    """One item of each line: `prompt` or `prompt_token_ids`, any other argument of `Client.generate`, what the output
    must be by its kind (`json_schema`, `regex`, ...), and where wanted `id`, `at_seconds` and `arrive_after_tokens`.

    Raises:
        ConfigurationError: the file cannot be read, or holds no line, or one that is no such request; it is named.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"the workload {path} cannot be read: {error}.") from None
    items = [_item(f"{path}:{number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    if not items:
        raise ConfigurationError(f"the workload {path} holds no request; write one a line.")
    return items


def _item(place: str, line: str) -> WorkItem:
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigurationError(f"{place} is not JSON: {error}.") from None
    if not isinstance(fields, dict) or ("prompt" in fields) == ("prompt_token_ids" in fields):
        raise ConfigurationError(f"{place} is no request; give it a prompt or prompt_token_ids, and not both.")
    if unknown := fields.keys() - _KNOWN:
        raise ConfigurationError(
            f"{place} has {', '.join(sorted(unknown))}, which no request has; remove or rename it."
        )
    try:
        at_seconds = None if (at := fields.get("at_seconds")) is None else float(at)
        item = WorkItem(
            str(fields.get("id", place)), _arguments(fields), at_seconds, int(fields.get("arrive_after_tokens", 0))
        )
        # What cannot be sent shows now, not in the middle of a run.
        generation(**item.arguments)
    except (InvalidRequestError, TypeError, ValueError, AttributeError) as error:
        raise ConfigurationError(f"{place} is no request: {error}") from None
    return item


def _arguments(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    arguments = {name: value for name, value in fields.items() if name in _ARGUMENTS}
    if "prompt_token_ids" in fields:
        arguments["prompt"] = fields["prompt_token_ids"]
    if "logit_bias" in arguments:
        # The keys of JSON are texts.
        arguments["logit_bias"] = {int(token_id): bias for token_id, bias in arguments["logit_bias"].items()}
    for kind in STRUCTURED_KINDS:
        if kind in fields:
            arguments["structured"] = _structured(kind, fields[kind])
    return arguments


def _structured(kind: StructuredKind, value: Any) -> StructuredOutput | None:
    """A schema and choices may be written as they are, or as a text that holds them."""
    if kind == "json_object":
        return StructuredOutput(kind) if value else None
    return StructuredOutput(kind, value if isinstance(value, str) else json.dumps(value))


def repeated(items: Sequence[WorkItem], num_requests: int | None) -> list[WorkItem]:
    """So many items, from the beginning again behind the last; None = each once."""
    return list(items) if num_requests is None else list(islice(cycle(items), num_requests))


def arriving(items: Sequence[WorkItem], rate: float | None, seed: int) -> list[WorkItem]:
    """The items due at `rate` a second, as a Poisson process has it; None = when they say, in that order."""
    if rate is not None:
        return [replace(item, at_seconds=at) for item, at in zip(items, _poisson_times(rate, seed), strict=False)]
    return sorted(items, key=lambda item: item.at_seconds or 0.0)


def _poisson_times(rate: float, seed: int) -> Iterator[float]:
    """Seconds, the first one 0: independent gaps, exponentially distributed, of mean 1 / rate."""
    draws, at = random.Random(seed), 0.0  # noqa: S311 - a load, not a secret
    while True:
        yield at
        at += draws.expovariate(rate)
