"""What `blockplane top` shows of two looks at an engine, as text for `rich`; knows neither terminal nor engine."""

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from blockplane.client.engine_values import WorkerStatus
from blockplane.client.rates import Look, Rates, group_rates, total_rates
from blockplane.protos.statistics import Statistics

_BAR_CELLS = 8
_LEVELS = " ▁▂▃▄▅▆▇█"
_STATE_STYLES = {"ready": "green", "building": "yellow", "draining": "yellow", "reloading": "yellow", "leaving": "red"}
_HEADS = (
    *("group", "state", "run", "wait", "park", "KV", "blocks"),
    *("hits", "pad", "step", "plan", "idle", "tok/s"),
)


def frame(title: str, before: Look, after: Look, history: Sequence[float] = ()) -> RenderableType:
    """One picture. `history`: tokens a second of the looks so far, oldest first."""
    return Group(Text(title, style="bold"), _engine_line(before, after, history), _workers(before, after))


def _engine_line(before: Look, after: Look, history: Sequence[float]) -> Text:
    engine, total, now = after.statistics, after.statistics.total, total_rates(before, after)
    told = {
        "running": total.num_running,
        "waiting": total.num_waiting,
        "parked": total.num_parked,
        "held": engine.num_held,
        "preempted": total.num_preemptions,
        "lost workers": engine.num_lost_workers,
    }
    if engine.num_suspects:
        told["suspects"] = engine.num_suspects
    line = Text("   ".join(f"{name} {number}" for name, number in told.items()))
    line.append(f"\ntokens/s {_number(now.tokens_per_second)}   requests/s {_number(now.admitted_per_second, 1)}")
    if now.acceptance is not None:
        line.append(f"   drafts {_share(now.acceptance)} right")
    line.append(f"   {sparkline(history)}", style="cyan")
    return line


def _workers(before: Look, after: Look) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for head in _HEADS:
        table.add_column(head, justify="left" if head in ("state", "KV") else "right", no_wrap=True)
    all_rates = group_rates(before, after)
    for worker in after.workers:
        statistics = after.statistics.groups.get(worker.group, worker.statistics)
        table.add_row(*_cells(worker, statistics, all_rates.get(worker.group, Rates())))
    if not after.workers:
        table.add_row("-", Text("no worker is attached", style="red"))
    return table


def _cells(worker: WorkerStatus, statistics: Statistics | None, now: Rates) -> Iterator[Text]:
    yield Text(str(worker.group))
    yield Text(worker.state, style=_STATE_STYLES.get(worker.state, ""))
    if statistics is None:
        yield from (Text("-") for _ in _HEADS[2:])
        return
    for count in (statistics.num_running, statistics.num_waiting, statistics.num_parked):
        yield Text(str(count))
    usable = max(0, worker.num_blocks - 1)
    yield bar(statistics.kv_cache_usage)
    yield Text(f"{_count(round(statistics.kv_cache_usage * usable))}/{_count(usable)}")
    yield from map(Text, (_share(now.hit_rate), _share(now.padding)))
    yield Text("-" if now.step_seconds is None else f"{1000 * now.step_seconds:.1f} ms")
    yield Text("-" if now.plan_bytes is None else f"{now.plan_bytes:.0f} B")
    yield from map(Text, (_share(now.idle_share), _number(now.tokens_per_second)))


def bar(share: float) -> Text:
    """A share of 1 as so many of eight cells, and in percent; red where little is left."""
    style = "red" if share > 0.95 else "yellow" if share > 0.8 else "green"
    filled = round(min(1.0, max(0.0, share)) * _BAR_CELLS)
    text = Text("█" * filled, style=style)
    text.append("░" * (_BAR_CELLS - filled), style="dim")
    return text.append(f" {share:4.0%}", style="default")


def sparkline(values: Sequence[float]) -> str:
    """A cell for each value, as high as its share of the largest."""
    most = max(values, default=0.0)
    return "".join(_LEVELS[round(value / most * (len(_LEVELS) - 1))] if most else _LEVELS[0] for value in values)


def _count(number: int) -> str:
    return str(number) if number < 10_000 else f"{number / 1000:.0f}k"


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _number(number: float | None, digits: int = 0) -> str:
    return "-" if number is None else f"{number:,.{digits}f}"
