"""Where two results of one step differ first, bit for bit. Knows neither files nor what computed them."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockplane.data_plane.rows import Rows
from blockplane.protos.logprobs import Logprobs
from blockplane.protos.plan import IntArray, StepPlan, StepResult

_Column = NDArray[Any] | None
_NONE = np.zeros(0, np.int32)


def first_difference(rows: Rows, plan: StepPlan, recorded: StepResult, again: StepResult) -> str | None:
    """What differs and how, with its row; None = nothing does.

    Args:
        rows: as they are between the plan's `apply` and the result's `fold`.
    """
    return next(_differences(rows, plan, recorded, again), None)


def _differences(rows: Rows, plan: StepPlan, recorded: StepResult, again: StepResult) -> Iterator[str]:
    yield from _compare("num_tokens", rows.decode_rows, recorded.num_tokens, again.num_tokens)
    num_tokens: IntArray | int = 1 if again.num_tokens is None else again.num_tokens
    token_rows = np.concatenate((np.repeat(rows.decode_rows, num_tokens), rows.finished_prefills(plan)))
    yield from _compare("token_ids", token_rows, recorded.token_ids, again.token_ids)
    yield from _compare_logprobs("logprobs", token_rows, recorded.logprobs, again.logprobs)
    yield from _compare_logprobs("prompt_logprobs", None, recorded.prompt_logprobs, again.prompt_logprobs)
    for name in ("num_draft_tokens", "step", "epoch"):
        if (before := getattr(recorded, name)) != (now := getattr(again, name)):
            yield f"{name} {before} on record, {now} now"


def _compare_logprobs(
    name: str, token_rows: IntArray | None, recorded: Logprobs | None, again: Logprobs | None
) -> Iterator[str]:
    """`token_rows`: per token its row; None = not known, since only some of the prefill's rows are told of."""
    for field in ("num_entries", "token_ids", "logprobs"):
        before, now = (None if told is None else getattr(told, field) for told in (recorded, again))
        rows = token_rows
        if again is not None and token_rows is not None and field != "num_entries":
            rows = np.repeat(token_rows, again.num_entries)
        yield from _compare(name if field == "logprobs" else f"{name}' {field}", rows, before, now)


def _compare(name: str, rows: IntArray | None, recorded: _Column, again: _Column) -> Iterator[str]:
    before, now = (_NONE if column is None else column for column in (recorded, again))
    if (recorded is None) != (again is None) or len(before) != len(now):
        yield f"{name}: {_length(recorded)} on record, {_length(again)} now"
        return
    places = np.flatnonzero(before.view(np.int32) != now.view(np.int32))
    if places.size:
        place = int(places[0])
        where = f"row {rows[place]}" if rows is not None else f"entry {place}"
        yield f"{where}: {name} {before[place].item()} on record, {now[place].item()} now"


def _length(column: _Column) -> str:
    return "absent" if column is None else f"{len(column)} entries"
