"""What a sub-command is to the `blockplane` command line; knows none of them."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Subcommand:
    """Its line of help, what it does in a sentence, the flags it takes, and what runs it.

    `run` returns the exit status, and raises BlockplaneError where it fails, whose sentence is then printed.
    KeyboardInterrupt and BrokenPipeError may leave it.
    """

    name: str
    help: str
    description: str
    add_flags: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
