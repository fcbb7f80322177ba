"""The `blockplane bench` sub-command: a workload on a running server, and its latencies as a table, JSON and a plot."""

import argparse
import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from blockplane.client.alignment import aligned
from blockplane.client.bench_plot import require_matplotlib, save_plot
from blockplane.client.connect import SETTINGS, connect_in_loop
from blockplane.client.load import Load, Outcome
from blockplane.client.measures import PERCENTILES, Distribution, Summary, summarize
from blockplane.client.subcommand import Subcommand
from blockplane.client.workload import WorkItem, arriving, read_workload, repeated
from blockplane.protos.config import add_settings
from blockplane.protos.errors import ConfigurationError
from blockplane.protos.process import EXIT_FAILED


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "workload",
        metavar="WORKLOAD.jsonl",
        help="a request a line: prompt or prompt_token_ids, arguments of Client.generate, at_seconds",
    )
    parser.add_argument(
        "--rate",
        type=_positive,
        metavar="R",
        help="R requests a second, at random moments (default: when the lines say; else as fast as they are taken)",
    )
    parser.add_argument("--concurrency", type=_at_least_1, metavar="N", help="N open at once at most (default: any)")
    parser.add_argument("--num-requests", type=_at_least_1, metavar="N", help="so many, the lines over and over")
    parser.add_argument("--warm-up", type=int, default=1, metavar="N", help="so many before that do not count")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the moments of --rate (default: 0)")
    parser.add_argument("--json", metavar="FILE", help="write the numbers there, and those of each request")
    parser.add_argument("--png", metavar="FILE", help="write a plot there; needs matplotlib, the extra `bench`")
    add_settings(parser, names=SETTINGS)


def bench(flags: argparse.Namespace) -> int:
    """Run the workload and print a table. Returns the exit status: 1 if no request succeeded.

    Raises:
        ConfigurationError: the workload cannot be read, or a file cannot be written.
        UnavailableError: no server answers.
    """
    if flags.png is not None:
        # Not after the run.
        require_matplotlib()
    lines = read_workload(flags.workload)
    items = arriving(repeated(lines, flags.num_requests), flags.rate, flags.seed)
    model, outcomes = asyncio.run(_run(vars(flags), items))
    summary = summarize(outcomes)
    title = f"{model}, {Path(flags.workload).name}: {len(outcomes)} requests in {summary.seconds:.2f} s"
    print("\n".join(table(title, summary)))
    if flags.json is not None:
        _write_json(flags.json, document(summary, outcomes) | {"model": model, "settings": _settings(flags)})
    if flags.png is not None:
        save_plot(flags.png, title, outcomes)
    return 0 if summary.num_succeeded else EXIT_FAILED


async def _run(flags: Mapping[str, Any], items: Sequence[WorkItem]) -> tuple[str, list[Outcome]]:
    async with connect_in_loop(flags) as client:
        model = (await client.model_info()).name
        await Load(client, flags["concurrency"]).run([_warming(item) for item in items[: flags["warm_up"]]])
        return model, await Load(client, flags["concurrency"]).run(items)


def _warming(item: WorkItem) -> WorkItem:
    """The same request, due at once, that leaves nothing for the measured one to find."""
    arguments = {**item.arguments, "skip_prefix_cache": True}
    return replace(item, arguments=arguments, at_seconds=None, arrive_after_tokens=0)


def table(title: str, summary: Summary) -> list[str]:
    """The lines that are printed."""
    heads = ("ms", "mean", *(f"p{percent}" for percent in PERCENTILES), "max")
    latencies = {
        "time to first token": summary.time_to_first_token,
        "between tokens": summary.inter_token,
        "end to end": summary.end_to_end,
        "sent late": summary.lateness,
    }
    rows = [heads, *((name, *_milliseconds(distribution)) for name, distribution in latencies.items())]
    told = [f"{status}: {summary.sentences[status]}" for status in sorted(summary.sentences)]
    return [title, "", *aligned(rows), "", *aligned(list(_totals(summary))), *told]


def _totals(summary: Summary) -> Iterator[tuple[str, str]]:
    yield "requests/s", f"{summary.requests_per_second:.2f}"
    yield "output tokens/s", f"{summary.output_tokens_per_second:.1f}"
    yield "output tokens", str(summary.num_output_tokens)
    yield "prompt tokens", str(summary.num_prompt_tokens)
    yield "of them cached", str(summary.num_cached_tokens)
    for status, number in sorted(summary.failures.items()):
        yield f"failed {status}", str(number)


def _milliseconds(distribution: Distribution | None) -> list[str]:
    if distribution is None:
        return ["-"] * (len(PERCENTILES) + 2)
    return [f"{1000 * seconds:.1f}" for seconds in (distribution.mean, *distribution.percentiles, distribution.largest)]


def document(summary: Summary, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """What --json writes: seconds, by percentile where there are several, and each request's own."""
    latencies = {
        name: None
        if (of := getattr(summary, name)) is None
        else {
            "mean": of.mean,
            **{f"p{percent}": seconds for percent, seconds in zip(PERCENTILES, of.percentiles, strict=True)},
            "max": of.largest,
        }
        for name in ("time_to_first_token", "inter_token", "end_to_end", "lateness")
    }
    rates = {
        "requests_per_second": summary.requests_per_second,
        "output_tokens_per_second": summary.output_tokens_per_second,
    }
    return {**asdict(summary), **rates, **latencies, "requests": [_request(outcome) for outcome in outcomes]}


def _request(outcome: Outcome) -> dict[str, Any]:
    return {
        "id": outcome.name,
        "due": outcome.due,
        "sent": outcome.sent,
        "first_token": outcome.arrivals[0].seconds if outcome.arrivals else None,
        "ended": outcome.ended,
        "usage": None if outcome.usage is None else asdict(outcome.usage),
        "failure": None if outcome.failure is None else {"status": outcome.failure[0], "message": outcome.failure[1]},
    }


def _settings(flags: argparse.Namespace) -> dict[str, Any]:
    names = ("workload", "rate", "concurrency", "num_requests", "warm_up", "seed")
    return {name: getattr(flags, name) for name in names}


def _write_json(path: str, content: Mapping[str, Any]) -> None:
    try:
        Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"--json names {path}, which cannot be written: {error.strerror}.") from None


def _positive(argument: str) -> float:
    if not (value := float(argument)) > 0:
        raise argparse.ArgumentTypeError(f"{argument} is not above 0")
    return value


def _at_least_1(argument: str) -> int:
    if (value := int(argument)) < 1:
        raise argparse.ArgumentTypeError(f"{argument} is not at least 1")
    return value


COMMAND = Subcommand(
    "bench",
    "measure a server by a workload",
    "Puts a workload on a running server and tells its latencies.",
    add_flags,
    bench,
)
