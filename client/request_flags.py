"""Flags that say how a request is to be answered, and the arguments of `Client.generate` that they make; no gRPC."""

import argparse
import inspect
from pathlib import Path
from typing import Any

from blockplane.client.requests import generation
from blockplane.protos.structured import STRUCTURED_KINDS, StructuredOutput

REQUEST_ARGUMENTS = tuple(inspect.signature(generation).parameters)[1:]
"""What `Client.generate` takes beside the prompt; a flag of the same name is such an argument."""


def add_request_flags(parser: argparse.ArgumentParser) -> None:
    """Where the output ends, how its tokens are drawn, and which may come."""
    _add_ends(parser)
    _add_draws(parser)
    _add_limits(parser)
    _add_structures(parser)


def _add_ends(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("where it ends")
    group.add_argument("--max-tokens", type=int, metavar="N", help="stop after this many (default: a full context)")
    group.add_argument("--min-tokens", type=int, metavar="N", help="no end of text before this many (default: 0)")
    group.add_argument("--stop", action="append", metavar="TEXT", help="end the output before this text (repeatable)")
    group.add_argument(
        "--include-stop", action="store_true", dest="include_stop_str_in_output", help="print that text, too"
    )
    group.add_argument("--stop-token-ids", type=_token_ids, metavar="ID,ID", help="end with one of these")
    group.add_argument("--ignore-eos", action="store_true", help="go on past the model's end of text")


def _add_draws(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("how tokens are drawn (defaults: the model's own)")
    group.add_argument("--temperature", type=float, metavar="T", help="0 = greedy")
    group.add_argument("--top-k", type=int, metavar="K", help="from the K likeliest; 0 = from all")
    group.add_argument("--top-p", type=float, metavar="P", help="from the likeliest of this probability; 1 = from all")
    group.add_argument("--min-p", type=float, metavar="P", help="from those of this share of the likeliest's; 0 = all")
    group.add_argument("--seed", type=int, metavar="N", help="same seed, same text (default: drawn)")


def _add_limits(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("which tokens may come")
    group.add_argument("--presence-penalty", type=float, metavar="X", help="off the logit of what has come; -2 to 2")
    group.add_argument("--frequency-penalty", type=float, metavar="X", help="the same once for each time; -2 to 2")
    group.add_argument("--repetition-penalty", type=float, metavar="X", help="divides the logit of what has come")
    group.add_argument(
        "--logit-bias", action="append", type=_bias, metavar="ID=X", help="on an id's logit (repeatable)"
    )
    group.add_argument("--allowed-token-ids", type=_token_ids, metavar="ID,ID", help="only these (default: all)")
    group.add_argument(
        "--bad-word", action="append", metavar="TEXT", dest="bad_words", help="never this text (repeatable)"
    )


def _add_structures(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what the output must be (default: any text)").add_mutually_exclusive_group()
    group.add_argument("--json-schema", type=_text_or_file, metavar="TEXT", help="JSON of this schema, or of @FILE's")
    group.add_argument("--json-object", action="store_true", help="any JSON object")
    group.add_argument("--regex", metavar="TEXT", help="what this matches as a whole")
    group.add_argument("--grammar", type=_text_or_file, metavar="TEXT", help="of this Lark grammar, or of @FILE's")
    group.add_argument("--choice", action="append", metavar="TEXT", help="this text, or another one (repeatable)")


def request_arguments(flags: argparse.Namespace) -> dict[str, Any]:
    """What `Client.generate` is called with: of its arguments those that a flag gives."""
    given = {name: value for name, value in vars(flags).items() if name in REQUEST_ARGUMENTS and value is not None}
    if "logit_bias" in given:
        given["logit_bias"] = dict(given["logit_bias"])
    return given | {"structured": _structured(flags)}


def _structured(flags: argparse.Namespace) -> StructuredOutput | None:
    """What the output must be; at most one flag says so."""
    if flags.json_object:
        return StructuredOutput("json_object")
    if flags.choice:
        return StructuredOutput.choice(flags.choice)
    texts = {"json_schema": flags.json_schema, "regex": flags.regex, "grammar": flags.grammar}
    given = (StructuredOutput(kind, texts[kind]) for kind in STRUCTURED_KINDS if texts.get(kind) is not None)
    return next(given, None)


def _text_or_file(argument: str) -> str:
    if not argument.startswith("@"):
        return argument
    try:
        return Path(argument[1:]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"cannot read {argument[1:]}: {error}") from None


def _token_ids(argument: str) -> list[int]:
    try:
        return [int(token_id) for token_id in argument.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{argument!r} is no list of ids such as 5,17") from None


def _bias(argument: str) -> tuple[int, float]:
    token_id, _, bias = argument.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{argument!r} is no id and number such as 5=-1.5") from None
