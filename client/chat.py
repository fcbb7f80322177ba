"""The `blockplane chat` sub-command: turns of a chat on the terminal, each a request with all turns before it."""

import argparse
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockplane.client.client import Client
from blockplane.client.connect import SETTINGS, connect
from blockplane.client.request_flags import add_request_flags, request_arguments
from blockplane.client.subcommand import Subcommand
from blockplane.client.values import ServedModel, Usage
from blockplane.protos.config import add_settings
from blockplane.protos.errors import BlockplaneError, ConfigurationError, ModelError

if TYPE_CHECKING:
    from blockplane.client.chat_template import ChatTemplate


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="what the model is told before the chat")
    parser.add_argument("--template", metavar="FILE", help="a Jinja chat template (default: the model's own)")
    parser.add_argument("--usage", action="store_true", help="tell each answer's tokens on standard error")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="give an answer up after so long")
    add_request_flags(parser)
    add_settings(parser, names=SETTINGS)


def chat(flags: argparse.Namespace) -> int:
    """Answer each line of standard input until its end. Returns the exit status.

    Raises:
        ModelError: there is no template, or it does not take this chat.
        BlockplaneError: an answer failed, and nobody sits there to ask again.
    """
    is_interactive = sys.stdin.isatty() and sys.stdout.isatty()
    with connect(vars(flags)) as client:
        model = client.model_info()
        talk = Talk(client, _template(flags.template, model), flags.system, request_arguments(flags))
        if is_interactive:
            print(f"{model.name}. Ctrl-C stops an answer, Ctrl-D ends the chat.", file=sys.stderr)
        for text in _lines(is_interactive):
            try:
                usage = talk.answer(text)
            except BlockplaneError as error:
                if not is_interactive:
                    raise
                print(f"blockplane chat: {error}", file=sys.stderr)
            except KeyboardInterrupt:
                if not is_interactive:
                    raise
            else:
                if flags.usage and usage is not None:
                    print(_told(usage), file=sys.stderr)
    return 0


class Talk:
    """A chat so far. What failed is not part of it; of an answer that was stopped, what had come is."""

    def __init__(
        self, client: Client, template: "ChatTemplate", system: str | None, arguments: Mapping[str, Any]
    ) -> None:
        self._client, self._template, self._arguments = client, template, arguments
        self._messages = [] if system is None else [{"role": "system", "content": system}]

    def answer(self, text: str) -> Usage | None:
        """Print the answer to the user's `text` as it comes, and one line end after it. Returns None if it has no end.

        KeyboardInterrupt stops the answer, and goes on to whoever called.
        """
        asked = [*self._messages, {"role": "user", "content": text}]
        # The template spells the BOS token where the model wants one.
        arguments = {**self._arguments, "add_special_tokens": False}
        pieces: list[str] = []
        usage = None
        try:
            with closing(self._client.generate(self._template.render(asked), **arguments)) as deltas:
                for delta in deltas:
                    pieces.append(delta.text)
                    print(delta.text, end="", flush=True)
                    usage = delta.usage
        except KeyboardInterrupt:
            self._messages = [*asked, {"role": "assistant", "content": "".join(pieces)}]
            raise
        finally:
            print(flush=True)
        self._messages = [*asked, {"role": "assistant", "content": "".join(pieces)}]
        return usage


def _template(path: str | None, model: ServedModel) -> "ChatTemplate":
    # Other sub-commands start without Jinja.
    from blockplane.client.chat_template import ChatTemplate

    source = model.chat_template
    if path is not None:
        try:
            source = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"--template names {path}, which cannot be read: {error}.") from None
    if source is None:
        raise ModelError(
            f"{model.name} has no chat template, as models that only continue text have none; give one by --template"
            " FILE, or use `blockplane generate`."
        )
    return ChatTemplate(source, model.bos_token, model.eos_token)


def _lines(is_interactive: bool) -> Iterator[str]:
    """What the user says, a line each; empty ones say nothing."""
    if is_interactive:
        with suppress(ImportError):
            # Gives `input` its editing and its history.
            import readline  # noqa: F401
    while True:
        try:
            line = input("> " if is_interactive else "")
        except EOFError:
            if is_interactive:
                print()
            return
        except KeyboardInterrupt:
            if not is_interactive:
                raise
            print()
            continue
        if line.strip():
            yield line


def _told(usage: Usage) -> str:
    return (
        f"({usage.num_prompt_tokens} prompt tokens, {usage.num_cached_tokens} of them cached;"
        f" {usage.num_output_tokens} output tokens)"
    )


COMMAND = Subcommand(
    "chat", "chat with a model", "Answers each line of standard input, knowing those before.", add_flags, chat
)
