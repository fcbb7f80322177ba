"""The `blockplane trace` sub-command: the engine's last steps, written to a file. Knows no file format and no gRPC."""

import argparse
from pathlib import Path

from blockplane.client.connect import ENGINE_SETTINGS, connect_engine
from blockplane.client.subcommand import Subcommand
from blockplane.client.trace_file import trace_of
from blockplane.protos.config import add_settings
from blockplane.protos.errors import ConfigurationError, UnavailableError


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--steps", type=int, default=1000, metavar="N", help="of each group at most; 0 = all kept (default: 1000)"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("blockplane.pftrace"), metavar="FILE", help="(default: blockplane.pftrace)"
    )
    add_settings(parser, names=ENGINE_SETTINGS)


def trace(flags: argparse.Namespace) -> int:
    """
    Raises:
        UnavailableError: the engine has seen no step yet.
        ConfigurationError: the file cannot be written, or what makes it is not installed.
    """
    if flags.steps < 0:
        raise ConfigurationError(f"--steps is {flags.steps}; give how many of the last steps to write, 0 for all.")
    with connect_engine(vars(flags)) as admin:
        groups = [group for group in admin.get_steps(flags.steps) if len(group.steps)]
    if not groups:
        raise UnavailableError("no worker has computed a step yet; send a request first.")
    try:
        num_bytes = flags.output.write_bytes(trace_of(groups))
    except OSError as error:
        raise ConfigurationError(f"cannot write {flags.output}: {error.strerror}; name another file.") from error
    num_steps, num_groups = sum(len(group.steps) for group in groups), len(groups)
    what = f"{num_steps} steps of {num_groups} worker group{'s' if num_groups > 1 else ''}"
    print(f"{what} in {flags.output}, {num_bytes:,} bytes; open it at https://ui.perfetto.dev")
    return 0


COMMAND = Subcommand(
    "trace",
    "write the last steps as a Perfetto trace",
    "Writes when each of the engine's last steps was planned, computed and delivered, for https://ui.perfetto.dev.",
    add_flags,
    trace,
)
