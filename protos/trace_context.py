"""Which trace, of somebody else's making, work belongs to (https://www.w3.org/TR/trace-context/); knows no call."""

import logging
import re
from contextvars import ContextVar

TRACEPARENT = "traceparent"
"""Metadata: version, trace id, the caller's span id and flags, in hexadecimal and joined by dashes."""

current_traceparent: ContextVar[str] = ContextVar("traceparent", default="")
"""Of the call that is being served; empty = it has none."""

_FORM = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")
"""What follows the flags is of versions to come. Version ff and ids of zeros are invalid."""


def trace_id_of(traceparent: str) -> str | None:
    """None where it is no valid traceparent, which then counts as none."""
    match = _FORM.fullmatch(traceparent)
    # The version that is known has nothing behind its flags.
    if match is None or (match[2] and traceparent.startswith("00")):
        return None
    return match[1]


def trace_mark(traceparent: str) -> str:
    """What a line of the log ends with that belongs to a trace: a space and the trace's id, or nothing."""
    trace_id = trace_id_of(traceparent)
    return "" if trace_id is None else f" trace={trace_id}"


class TraceMarks(logging.Filter):
    """Gives every record `trace`, the mark of the call that is being served."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.trace = trace_mark(current_traceparent.get())
        return True
