"""The last lines of this process's own log, to be shown to others. Knows not to whom."""

import logging
from collections import deque

MAX_LINES = 40
MAX_BYTES = 8192


class LogTail(logging.Handler):
    """Keeps what the root logger's other handlers write, as they write it, up to MAX_LINES."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: deque[str] = deque(maxlen=MAX_LINES)

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.extend(self.format(record).splitlines())

    def text(self) -> str:
        """At most MAX_BYTES of UTF-8, the newest ones."""
        self.acquire()
        try:
            data = "\n".join(self._lines).encode()
        finally:
            self.release()
        return data[-MAX_BYTES:].decode(errors="ignore")


def keep_log_tail() -> LogTail:
    """Keep what is logged from now on."""
    tail, root = LogTail(), logging.getLogger()
    for handler in root.handlers[:1]:
        tail.setFormatter(handler.formatter)
        for each in handler.filters:
            tail.addFilter(each)
    root.addHandler(tail)
    return tail
