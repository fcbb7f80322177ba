"""What operators have an engine do: the sub-commands `drain`, `reload` and `reset-cache`. Knows no gRPC."""

import argparse

from blockplane.client.connect import ENGINE_SETTINGS, connect_engine
from blockplane.client.subcommand import Subcommand
from blockplane.protos.config import add_settings


def _add_drain_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("group", type=int, metavar="GROUP", help="the worker group's number, as `status` tells it")
    parser.add_argument("--undo", action="store_true", help="let it have requests again")
    _add_timeout(parser)


def _drain(flags: argparse.Namespace) -> int:
    with connect_engine(vars(flags)) as admin:
        if flags.undo:
            admin.undrain(flags.group)
            print(f"group {flags.group} takes requests")
        else:
            admin.drain(flags.group, flags.timeout)
            print(f"group {flags.group} has no requests and gets none")
    return 0


def _add_reload_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--weights", default="", metavar="MODEL", help="where they lie, named as --model is (default: where they lay)"
    )
    _add_timeout(parser)


def _reload(flags: argparse.Namespace) -> int:
    with connect_engine(vars(flags)) as admin:
        groups = admin.reload_weights(flags.weights, flags.timeout)
    print(f"new weights at {_groups(groups)}")
    return 0


def _groups(numbers: tuple[int, ...]) -> str:
    return f"group{'s' if len(numbers) != 1 else ''} {', '.join(map(str, numbers)) or 'none'}"


def _reset_cache(flags: argparse.Namespace) -> int:
    with connect_engine(vars(flags)) as admin:
        admin.reset_prefix_cache()
    print("nothing that was cached is found any more")
    return 0


def _add_timeout(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="wait no longer (default: until it is done)")
    _add_settings(parser)


def _add_settings(parser: argparse.ArgumentParser) -> None:
    add_settings(parser, names=ENGINE_SETTINGS)


COMMANDS = (
    Subcommand(
        "drain",
        "empty a worker group",
        "Gives a worker group no new requests, and waits until it has none left.",
        _add_drain_flags,
        _drain,
    ),
    Subcommand(
        "reload",
        "have workers read their weights anew",
        "Has every worker read the model's weights anew, one after another, and waits for all of them.",
        _add_reload_flags,
        _reload,
    ),
    Subcommand(
        "reset-cache",
        "forget what is cached of prompts",
        "Lets no block be found that was cached before; running requests keep theirs.",
        _add_settings,
        _reset_cache,
    ),
)
