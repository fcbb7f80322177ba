"""The `blockplane generate` sub-command: its flags, the request they make, and how it may end. Knows no gRPC."""

import argparse
import inspect
import os
import sys
from typing import Any

from blockplane.client.client import Client
from blockplane.client.terminal import print_json, print_samples, print_text, read_prompt
from blockplane.client.up import EXIT_INTERRUPTED
from blockplane.protos.config import add_settings, load_config

EXIT_BROKEN_PIPE = 141
"""What shells report of a command whose reader went away."""

_ARGUMENTS = tuple(inspect.signature(Client.generate).parameters)[2:]
"""What `Client.generate` takes beside the prompt; a flag of the same name is such an argument."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", help="the text to continue; - = standard input, unchanged")
    parser.add_argument("--json", action="store_true", help="one JSON object a line, with token ids")
    parser.add_argument("--num-samples", type=int, metavar="N", help="continuations of the prompt (default: 1)")
    parser.add_argument("--priority", type=int, metavar="N", help="less comes first (default: 0)")
    parser.add_argument("--skip-prefix-cache", action="store_true", help="neither use cached prefixes nor leave any")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="give up after so long (default: never)")
    parser.add_argument("--request-id", metavar="ID", help="unique among live requests (default: drawn)")
    parser.add_argument(
        "--reattach-seconds", type=float, metavar="SECONDS", help="resume a broken stream for so long (default: 0)"
    )
    _add_ends(parser)
    _add_draws(parser)
    _add_limits(parser)
    told = parser.add_argument_group("what --json tells besides")
    told.add_argument("--logprobs", type=int, metavar="N", help="of each output token, and of the N likeliest there")
    told.add_argument("--prompt-logprobs", type=int, metavar="N", help="the same of the prompt's tokens")
    add_settings(parser, names=("address",))


def _add_ends(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("where it ends")
    group.add_argument("--max-tokens", type=int, metavar="N", help="stop after this many (default: a full context)")
    group.add_argument("--min-tokens", type=int, metavar="N", help="no end of text before this many (default: 0)")
    group.add_argument("--stop", action="append", metavar="TEXT", help="end the output before this text (repeatable)")
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


def generate(flags: argparse.Namespace) -> int:
    """Print the continuations. Returns the exit status.

    Raises:
        BlockplaneError: the request failed.
    """
    arguments = _arguments(flags)
    show = print_json if flags.json else print_samples if arguments.get("num_samples", 1) > 1 else print_text
    try:
        with Client(_address(flags)) as client:
            show(client.generate(read_prompt(flags.prompt), **arguments))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Python flushes standard output once more as it ends, and must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    return 0


def _address(flags: argparse.Namespace) -> str:
    # A flag that is an argument of the request may have a setting's name.
    return load_config({name: value for name, value in vars(flags).items() if name in ("address", "config")}).address


def _arguments(flags: argparse.Namespace) -> dict[str, Any]:
    """What `Client.generate` is called with: of its arguments those that a flag gives."""
    given = {name: value for name, value in vars(flags).items() if name in _ARGUMENTS and value is not None}
    if "logit_bias" in given:
        given["logit_bias"] = dict(given["logit_bias"])
    return given


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
