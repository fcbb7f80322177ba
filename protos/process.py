"""How every process of ours starts, logs and ends; knows nothing of what it does meanwhile."""

import argparse
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence

from blockplane.protos.config import Config, add_settings, load_config
from blockplane.protos.errors import BlockplaneError
from blockplane.protos.trace_context import TraceMarks

EXIT_FAILED = 1


def run_process(
    name: str,
    description: str,
    serve: Callable[[Config], None],
    argv: Sequence[str] | None = None,
    operand: str | None = None,
) -> int:
    """Parse the settings, serve until told to stop, and turn a failure that we foresee into one sentence.

    Args:
        operand: the setting, a file, that is given by its value alone; None = none is.

    Returns:
        The exit status: 0 after SIGINT or SIGTERM, 1 after a failure, whose sentence is on stderr.
    """
    parser = argparse.ArgumentParser(prog=f"blockplane {name}", description=description)
    if operand is not None:
        parser.add_argument(operand, metavar="FILE")
    add_settings(parser)
    parser.add_argument("--stop-with-parent", action="store_true", help="end when standard input closes")
    flags = parser.parse_args(argv)
    try:
        config = load_config(vars(flags))
        start_logging(name, config.log_level)
        if flags.stop_with_parent:
            _stop_with_parent()
        serve(config)
    except BlockplaneError as error:
        print(f"blockplane {name}: {error}", file=sys.stderr, flush=True)
        return EXIT_FAILED
    except KeyboardInterrupt:
        pass
    return 0


def start_logging(name: str, level: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(TraceMarks())
    logging.basicConfig(
        level=level.upper(),
        format=f"%(asctime)s {name} %(levelname)s %(message)s%(trace)s",
        datefmt="%H:%M:%S",
        handlers=[handler],
    )


def _stop_with_parent() -> None:
    """End by SIGTERM once standard input closes: it is a pipe that only the parent holds, so its death closes it."""

    def wait() -> None:
        # Not sys.stdin: a thread that waits inside it would break the interpreter's shutdown.
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True, name="stop-with-parent").start()
