"""The `blockplane` command: its sub-commands and flags; what they do stands elsewhere."""

import argparse
import os
import sys
from collections.abc import Sequence

from blockplane import __version__
from blockplane.client.client import Client
from blockplane.client.processes import MODULES, command_line, environment
from blockplane.client.terminal import print_json, print_text, read_prompt
from blockplane.client.up import EXIT_INTERRUPTED, up
from blockplane.protos.config import add_settings, load_config
from blockplane.protos.errors import BlockplaneError, CapacityError
from blockplane.protos.process import EXIT_FAILED

EXIT_BROKEN_PIPE = 141
"""What shells report of a command whose reader went away."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one sub-command. Returns the exit status; a failure that we foresee is one sentence on standard error."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] in MODULES:
        _become(arguments[0], arguments[1:])
    parser = _parser()
    flags = parser.parse_args(arguments)
    try:
        if flags.subcommand == "generate":
            return _generate(flags)
        if flags.command:
            # A slip in the command shows now, not once the model is loaded.
            parser.parse_args(flags.command)
        return up(vars(flags), flags.command)
    except BlockplaneError as error:
        print(f"blockplane {flags.subcommand}: {error}{_retry_hint(error)}", file=sys.stderr)
        return EXIT_FAILED


def _retry_hint(error: BlockplaneError) -> str:
    if isinstance(error, CapacityError) and error.retry_after_seconds is not None:
        return f" (Room is likely in {error.retry_after_seconds:g} s.)"
    return ""


def _become(name: str, arguments: Sequence[str]) -> None:
    """Let the process `name` take this one's place, flags untouched."""
    os.execve(sys.executable, command_line(name, arguments), environment())  # noqa: S606 - our own module


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="blockplane", description="Serves large language models from a control plane and data-plane workers."
    )
    parser.add_argument("--version", action="version", version=f"blockplane {__version__}")
    subparsers = parser.add_subparsers(dest="subcommand", required=True, metavar="SUBCOMMAND")
    _add_generate(subparsers.add_parser("generate", help="continue a prompt", description="Continues a prompt."))
    _add_up(
        subparsers.add_parser(
            "up",
            help="run a whole system on this machine",
            description="Runs engine, frontend and worker on this machine until Ctrl-C. Unless --engine-address is"
            " given, the engine listens on a socket of its own that only this user can open.",
            usage="blockplane up [settings] [-- SUBCOMMAND ...]",
        )
    )
    for name in MODULES:
        subparsers.add_parser(name, help=f"run only the {name}", add_help=False)
    return parser


def _add_generate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", help="the text to continue; - = standard input, unchanged")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="stop after this many (default: a full context)")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 = greedy (default: the model's own)")
    parser.add_argument("--seed", type=int, metavar="N", help="same seed, same text (default: drawn)")
    parser.add_argument(
        "--stop",
        action="append",
        metavar="TEXT",
        help="end the output before this text; may be given several times",
    )
    parser.add_argument("--ignore-eos", action="store_true", help="go on past the model's end of text")
    parser.add_argument("--priority", type=int, default=0, metavar="N", help="less comes first (default: 0)")
    parser.add_argument("--skip-prefix-cache", action="store_true", help="neither use cached prefixes nor leave any")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="give up after so long (default: never)")
    parser.add_argument("--json", action="store_true", help="one JSON object a line, with token ids")
    add_settings(parser, names=("address",))


def _add_up(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "command",
        nargs="*",
        metavar="-- SUBCOMMAND ...",
        help="run this against the system once it is ready, then stop; such as: -- generate 'Once upon a time'",
    )
    add_settings(parser)


def _generate(flags: argparse.Namespace) -> int:
    show = print_json if flags.json else print_text
    try:
        with Client(load_config(vars(flags)).address) as client:
            deltas = client.generate(
                read_prompt(flags.prompt),
                max_tokens=flags.max_tokens,
                temperature=flags.temperature,
                seed=flags.seed,
                stop=flags.stop or (),
                ignore_eos=flags.ignore_eos,
                priority=flags.priority,
                skip_prefix_cache=flags.skip_prefix_cache,
                timeout=flags.timeout,
            )
            show(deltas)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Python flushes standard output once more as it ends, and must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    return 0
