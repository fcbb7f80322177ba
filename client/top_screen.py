"""Looks at an engine again and again and draws what it sees, on the terminal or once. Knows no gRPC and no flags."""

import time
from collections import deque
from io import StringIO
from pathlib import Path
from typing import NoReturn

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from blockplane.client.admin import Admin
from blockplane.client.rates import Look, total_rates
from blockplane.client.top_view import frame
from blockplane.protos.errors import ConfigurationError, UnavailableError

_WINDOW_LOOKS = 6
"""Rates are those of the time since the oldest of so many looks: steady enough to read."""
_HISTORY_LOOKS = 60
_FRAME_COLUMNS = 100
"""How wide a frame is that goes to no terminal."""


def draw_live(admin: Admin, address: str, interval: float) -> NoReturn:
    """Draw over the whole terminal, until KeyboardInterrupt.

    Raises:
        UnavailableError: no engine answers at first; later it is waited for.
        BlockplaneError: the engine refuses to tell.
    """
    watch = Watch(admin, address)
    watch.look()
    with Live(watch.frame(), auto_refresh=False, screen=True) as live:
        while True:
            time.sleep(interval)
            live.update(_next_frame(watch), refresh=True)


def draw_once(admin: Admin, address: str, interval: float, svg: str | None) -> None:
    """Print one frame, of one interval, and save it as a picture if a file is named.

    Raises:
        ConfigurationError: the picture cannot be written.
        BlockplaneError: the engine does not tell.
    """
    watch = Watch(admin, address)
    watch.look()
    time.sleep(interval)
    watch.look()
    console = Console()
    if not console.is_terminal:
        console.width = _FRAME_COLUMNS
    console.print(watch.frame())
    if svg is not None:
        _save(watch.frame(), svg)


class Watch:
    """The last looks at an engine."""

    def __init__(self, admin: Admin, address: str) -> None:
        self._admin, self._title = admin, f"blockplane {address}"
        self._looks = deque[Look](maxlen=_WINDOW_LOOKS)
        self._history = deque[float](maxlen=_HISTORY_LOOKS)

    def look(self) -> None:
        """Ask the engine anew. Raises BlockplaneError where it does not tell."""
        seen = Look(time.monotonic(), self._admin.statistics(), self._admin.list_workers())
        if self._looks:
            self._history.append(total_rates(self._looks[-1], seen).tokens_per_second or 0.0)
        self._looks.append(seen)

    def frame(self) -> RenderableType:
        """A picture of what was seen, once there was a look."""
        return frame(self._title, self._looks[0], self._looks[-1], tuple(self._history))


def _next_frame(watch: Watch) -> RenderableType:
    try:
        watch.look()
    except UnavailableError as error:
        return Group(watch.frame(), Text(f"\nAs it was before: {error}", style="red"))
    return watch.frame()


def _save(picture: RenderableType, svg: str) -> None:
    canvas = Console(record=True, width=_FRAME_COLUMNS, file=StringIO(), force_terminal=True)
    canvas.print(picture)
    try:
        Path(svg).write_text(canvas.export_svg(title="blockplane top"), encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"--svg names {svg}, which cannot be written: {error.strerror}.") from None
