"""Blockplane's own processes as children of this one: started, heard and stopped; knows nothing of what they serve."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import groupby

from blockplane.protos.errors import BlockplaneError

MODULES: Mapping[str, str] = {
    "frontend": "blockplane.control_plane.frontend",
    "worker": "blockplane.data_plane",
    "engine": "blockplane.control_plane.engine",
}
"""In the order in which they stop: requests that are under way may end while those that serve them still live."""

TOOLS: Mapping[str, str] = {"replay": "blockplane.data_plane.replay", "builder": "blockplane.data_plane.builder"}
"""What starts like these, but serves nobody."""

STOP_SECONDS = 5.0
"""How long a child that has nothing to finish may take to end after SIGTERM, before SIGKILL."""


def command_line(name: str, arguments: Sequence[str]) -> list[str]:
    """What starts the process `name`, a key of MODULES or TOOLS, under this very Python."""
    return [sys.executable, "-m", {**MODULES, **TOOLS}[name], *arguments]


def environment() -> dict[str, str]:
    """This process's environment; gRPC's own log lines are off, since our errors say the same in a sentence."""
    return {"GRPC_VERBOSITY": "NONE", **os.environ}


class Child:
    """One running process. Its output goes to our standard error, except the sentence it ends with, which `check` says.

    It runs in a session of its own, so that Ctrl-C reaches only us, and its standard input is a pipe that only we hold:
    with `--stop-with-parent` it ends when we do, however we do.
    """

    def __init__(self, name: str, arguments: Sequence[str], called: str | None = None) -> None:
        """`name`: a key of MODULES or TOOLS. `called`: what errors call it; None = so."""
        self.name, self._called = name, called or name
        self._process = subprocess.Popen(  # noqa: S603 - our own module under our own Python
            command_line(name, [*arguments, "--stop-with-parent"]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
            env=environment(),
        )
        self._sentence: str | None = None
        self._listener = threading.Thread(target=self._listen, daemon=True, name=f"listen-to-{name}")
        self._listener.start()

    def _listen(self) -> None:
        prefix = f"blockplane {self.name}: "
        for line in self._process.stdout or ():
            if line.startswith(prefix):
                self._sentence = line.removeprefix(prefix).strip()
            else:
                # Who closed our standard error wants no lines; the child must not stall for that.
                with suppress(OSError):
                    print(line, end="", file=sys.stderr, flush=True)

    def check(self) -> None:
        """Raise BlockplaneError, naming the child and its reason, if it has ended."""
        status = self._process.poll()
        if status is None:
            return
        self._listener.join(STOP_SECONDS)
        if self._sentence is not None:
            raise BlockplaneError(f"the {self._called} ended: {self._sentence}")
        how = f"signal {-status} ended it" if status < 0 else f"it ended with exit status {status}"
        raise BlockplaneError(f"the {self._called} is gone: {how}; its last lines, if any, are above.")

    def is_done(self) -> bool:
        """Whether it has ended well. Raises as `check` does if it ended otherwise."""
        if self._process.poll() == 0:
            self._listener.join(STOP_SECONDS)
            return True
        self.check()
        return False

    def ask_to_end(self) -> None:
        """By SIGTERM."""
        self._process.terminate()

    def wait(self, drain_seconds: float) -> None:
        """Until it has ended, for so long, and STOP_SECONDS more, at most."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(drain_seconds + STOP_SECONDS)

    def kill(self) -> None:
        """End it if it still runs, with all that it started, and let its last lines pass."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._listener.join(STOP_SECONDS)


def stop(children: Sequence[Child], drain_seconds: float = 0.0) -> None:
    """End them in their order, those of one name together, kindly; whatever happens meanwhile, none is left.

    `drain_seconds`: how long each may take to finish what it does.
    """
    try:
        for _, alike in groupby(children, lambda child: child.name):
            together = list(alike)
            for child in together:
                child.ask_to_end()
            for child in together:
                child.wait(drain_seconds)
    finally:
        for child in children:
            child.kill()
