"""`blockplane compile`: an engine and a builder on this machine, until every graph is compiled. Knows no device."""

import signal
import tempfile
import time
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from blockplane.client.processes import Child, stop
from blockplane.client.subcommand import Subcommand
from blockplane.client.up import EXIT_INTERRUPTED, POLL_SECONDS
from blockplane.protos.config import Config, add_settings, as_flags, load_config


def compile_graphs(flags: Mapping[str, Any]) -> int:
    """Have the graphs compiled that a worker of these settings would have to find.

    Returns:
        The exit status, 0 unless it is interrupted.

    Raises:
        ConfigurationError: the settings contradict themselves.
        BlockplaneError: one of the processes failed; the message names it.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        _compile(flags)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return 0


def _compile(flags: Mapping[str, Any]) -> None:
    children: list[Child] = []
    with tempfile.TemporaryDirectory(prefix="blockplane-") as folder:
        # Only this user can open the folder, hence the engine's socket in it.
        config = load_config(flags, defaults=Config(engine_address=f"unix:{folder}/engine.sock"))
        try:
            children += [Child(name, as_flags(config)) for name in ("builder", "engine")]
            builder, engine = children
            while not builder.is_done():
                engine.check()
                time.sleep(POLL_SECONDS)
        finally:
            stop(children)


def _run(flags: Namespace) -> int:
    return compile_graphs(vars(flags))


COMMAND = Subcommand(
    "compile",
    "compile a device's graphs ahead",
    "Compiles every graph that a worker of these settings needs into the folder compile_cache.",
    add_settings,
    _run,
)
