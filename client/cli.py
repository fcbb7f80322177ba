"""The `blockplane` command: its sub-commands and flags; what they do stands elsewhere."""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence

from blockplane import __version__
from blockplane.client import bench, chat, generate, operate, status, top, trace
from blockplane.client import compile as compile_command
from blockplane.client.processes import MODULES, TOOLS, command_line, environment
from blockplane.client.subcommand import Subcommand
from blockplane.client.up import EXIT_INTERRUPTED, up
from blockplane.protos.config import add_settings
from blockplane.protos.errors import BlockplaneError, CapacityError
from blockplane.protos.process import EXIT_FAILED

EXIT_BROKEN_PIPE = 141
"""What shells report of a command whose reader went away."""

SUBCOMMANDS: Mapping[str, Subcommand] = {
    command.name: command
    for command in (
        generate.COMMAND,
        chat.COMMAND,
        bench.COMMAND,
        status.COMMAND,
        top.COMMAND,
        *operate.COMMANDS,
        trace.COMMAND,
        compile_command.COMMAND,
    )
}
"""Beside `up`, which runs one of them, and the processes."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one sub-command. Returns the exit status; a failure that we foresee is one sentence on standard error."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] in {**MODULES, **TOOLS}:
        _become(arguments[0], arguments[1:])
    parser = _parser()
    flags = parser.parse_args(arguments)
    try:
        if flags.subcommand in SUBCOMMANDS:
            return SUBCOMMANDS[flags.subcommand].run(flags)
        if flags.command:
            # A slip in the command shows now, not once the model is loaded.
            parser.parse_args(flags.command)
        return up(vars(flags), flags.command)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Python flushes standard output once more as it ends, and must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
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
    _add_up(
        subparsers.add_parser(
            "up",
            help="run a whole system on this machine",
            description="Runs engine, frontend and worker on this machine until Ctrl-C. Unless --engine-address is"
            " given, the engine listens on a socket of its own that only this user can open.",
            usage="blockplane up [settings] [-- SUBCOMMAND ...]",
        )
    )
    for command in SUBCOMMANDS.values():
        command.add_flags(subparsers.add_parser(command.name, help=command.help, description=command.description))
    for name in MODULES:
        subparsers.add_parser(name, help=f"run only the {name}", add_help=False)
    subparsers.add_parser("replay", help="run a worker's record again and compare", add_help=False)
    subparsers.add_parser("builder", help="compile what an engine elsewhere configures", add_help=False)
    return parser


def _add_up(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "command",
        nargs="*",
        metavar="-- SUBCOMMAND ...",
        help="run this against the system once it is ready, then stop; such as: -- generate 'Once upon a time'",
    )
    add_settings(parser)
