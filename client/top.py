"""The `blockplane top` sub-command: its flags; what it draws stands elsewhere."""

import argparse
from contextlib import suppress

from blockplane.client.connect import ENGINE_SETTINGS, connect_engine, settings_of
from blockplane.client.subcommand import Subcommand
from blockplane.protos.config import add_settings
from blockplane.protos.errors import ConfigurationError

_LEAST_SECONDS = 0.1
"""What is asked more often costs the engine steps."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="between looks (default: 1)")
    parser.add_argument("--once", action="store_true", help="print one frame, of one interval, and end")
    parser.add_argument("--svg", metavar="FILE", help="the same, and save the frame as a picture")
    add_settings(parser, names=ENGINE_SETTINGS)


def top(flags: argparse.Namespace) -> int:
    """Draw until Ctrl-C, or one frame. Returns the exit status.

    Raises:
        ConfigurationError: the interval is too short, or the picture cannot be written.
        BlockplaneError: no engine answers at first, or it refuses to tell.
    """
    # Other sub-commands start without `rich`.
    from blockplane.client.top_screen import draw_live, draw_once

    if flags.interval < _LEAST_SECONDS:
        raise ConfigurationError(f"--interval is {flags.interval:g}; give {_LEAST_SECONDS} seconds or more.")
    address = settings_of(vars(flags)).engine_address
    with connect_engine(vars(flags)) as admin:
        if flags.once or flags.svg is not None:
            draw_once(admin, address, flags.interval, flags.svg)
        else:
            with suppress(KeyboardInterrupt):
                draw_live(admin, address, flags.interval)
    return 0


COMMAND = Subcommand(
    "top", "watch an engine and its workers", "Shows how an engine and its workers do, until Ctrl-C.", add_flags, top
)
