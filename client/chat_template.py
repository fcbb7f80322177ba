"""A model's chat template: messages to the text of a prompt, as Hugging Face defines it. Knows no server.

Form: https://huggingface.co/docs/transformers/chat_templating_writing. A template comes from whoever made the model, so
that it runs in Jinja's sandbox.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn, TypeAlias

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from blockplane.protos.errors import ModelError

Message: TypeAlias = Mapping[str, str]
"""`role` (system, user or assistant) and `content`."""


class ChatTemplate:
    """A template with how its model spells the ends of a text; None = it has no such token."""

    def __init__(self, source: str, bos_token: str | None = None, eos_token: str | None = None) -> None:
        """Raises ModelError if it is no template."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _raise, "strftime_now": _now}
        tokens = {"bos_token": bos_token, "eos_token": eos_token}
        environment.globals |= {name: token for name, token in tokens.items() if token is not None}
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ModelError(f"the chat template cannot be read: {error}; give another by --template.") from None

    def render(self, messages: Sequence[Message]) -> str:
        """The prompt to which the answer is the assistant's next message, special tokens spelled out.

        Raises:
            ModelError: the template does not take these messages, and why.
        """
        try:
            return self._template.render(messages=list(messages), add_generation_prompt=True)
        except Exception as error:
            # A program that others wrote: it may fail in any way that programs do.
            raise ModelError(f"the chat template does not take this chat: {error}") from None


class _Generation(Extension):
    """`{% generation %}`, which marks the assistant's words for whoever trains on them: here it is what it holds."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own class variable

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """In place of Jinja's own, which escapes what HTML would misread."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)
