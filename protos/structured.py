"""What the text of an output must be as a whole, and the limits of saying so; knows no grammar's inside."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from blockplane.protos.errors import InvalidRequestError, invalid_parameter

StructuredKind = Literal["json_schema", "json_object", "regex", "grammar", "choice"]
STRUCTURED_KINDS: tuple[StructuredKind, ...] = get_args(StructuredKind)

MAX_STRUCTURED_BYTES = 65_536
"""UTF-8 of one schema, regex, grammar or list of choices."""
MAX_CHOICES = 1024


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """A language that the output's text belongs to when it ends by itself; one that is cut off only begins so.

    Attributes:
        kind: how `text` is read, and the name of the client's field.
        text: a JSON schema; nothing for any JSON object; a regex that the whole output matches, in the syntax of Rust's
            `regex` without look-around; a Lark grammar, in the dialect of `llguidance`, whose first rule is `start`; a
            JSON list of the texts from which one is chosen.
    """

    kind: StructuredKind
    text: str = ""

    @classmethod
    def choice(cls, texts: Sequence[str]) -> "StructuredOutput":
        """One of these texts."""
        return cls("choice", json.dumps(list(texts), ensure_ascii=False))


def check_structured_output(structured: StructuredOutput) -> None:
    """Raise InvalidRequestError naming the kind at fault; what only a compiler can know is left to it."""
    kind, text = structured.kind, structured.text
    if kind not in STRUCTURED_KINDS:
        raise InvalidRequestError(f"structured output is of kind {kind!r}; choose {', '.join(STRUCTURED_KINDS)}.")
    num_bytes = len(text.encode(errors="replace"))
    if num_bytes > MAX_STRUCTURED_BYTES:
        raise invalid_parameter(kind, f"{kind} has {num_bytes} bytes; send at most {MAX_STRUCTURED_BYTES}.")
    if kind == "json_object":
        if text:
            raise invalid_parameter("json_object", "json_object takes no text; send a schema as json_schema.")
    elif not text:
        raise invalid_parameter(kind, f"{kind} is empty; say what the output must be, or leave it out.")
    if kind == "choice":
        _check_choices(text)


def _check_choices(text: str) -> None:
    try:
        choices = json.loads(text)
    except (ValueError, RecursionError):
        choices = None
    if not isinstance(choices, list) or not all(isinstance(choice, str) for choice in choices):
        raise invalid_parameter("choice", "choice is no list of texts; send the texts of which one is to be chosen.")
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise invalid_parameter("choice", f"choice has {len(choices)} texts; send 1 to {MAX_CHOICES}.")
    if not all(choices):
        raise invalid_parameter("choice", "choice holds an empty text; leave it out.")
