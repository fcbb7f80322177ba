"""The `blockplane status` sub-command: whether a system serves, with what, and on which workers. Knows no gRPC."""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from blockplane import __version__
from blockplane.client.alignment import aligned
from blockplane.client.connect import ENGINE_SETTINGS, SETTINGS, connect, connect_engine, settings_of
from blockplane.client.engine_values import RankStatus, WorkerStatus
from blockplane.client.subcommand import Subcommand
from blockplane.client.values import ServedModel
from blockplane.protos.config import add_settings
from blockplane.protos.errors import BlockplaneError
from blockplane.protos.process import EXIT_FAILED

WAIT_SECONDS = 2.0
"""How long the frontend may take to say that it serves."""


_HEADS = (
    *("group", "state", "requests", "KV", "blocks", "weights", "protocol", "attached", "model"),
    *("name", "rank", "role", "peer"),
)


@dataclass(frozen=True, slots=True)
class Status:
    """What was found.

    Attributes:
        failures: by `frontend` and `engine`, why it does not serve, in a sentence; none = both do.
        model: None where no frontend tells.
    """

    address: str
    engine_address: str
    failures: Mapping[str, str]
    model: ServedModel | None
    workers: Sequence[WorkerStatus]


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object")
    add_settings(parser, names={*SETTINGS, *ENGINE_SETTINGS})


def status(flags: argparse.Namespace) -> int:
    """Print how it stands. Returns the exit status: 1 if the frontend or the engine does not serve."""
    found = look(vars(flags))
    print(json.dumps(_document(found)) if flags.json else "\n".join(lines(found)))
    return EXIT_FAILED if found.failures else 0


def look(flags: Mapping[str, Any]) -> Status:
    """Ask the frontend and the engine; that one of them does not answer is something to tell.

    Raises:
        ConfigurationError: the settings contradict themselves.
    """
    config = settings_of(flags)
    failures: dict[str, str] = {}
    model: ServedModel | None = None
    workers: Sequence[WorkerStatus] = ()
    with connect(flags) as client, connect_engine(flags) as admin:
        try:
            client.wait_until_serving(WAIT_SECONDS)
            model = client.model_info()
        except BlockplaneError as error:
            failures["frontend"] = str(error)
        try:
            workers = admin.list_workers()
        except BlockplaneError as error:
            failures["engine"] = str(error)
    return Status(config.address, config.engine_address, failures, model, workers)


def lines(found: Status) -> list[str]:
    """What is printed."""
    addresses = {"frontend": found.address, "engine": found.engine_address}
    told = [f"{name:8}  {address}  {found.failures.get(name, 'serving')}" for name, address in addresses.items()]
    if (model := found.model) is not None:
        told.append(f"model     {model.name}, {model.max_model_len} tokens, {model.vocab_size} ids")
    table = _table(found.workers) if found.workers else ["no worker"]
    return [*told, f"client    {__version__}", "", *table]


def _table(workers: Sequence[WorkerStatus]) -> list[str]:
    """A row of each worker, and one of each further rank. Names and roles are told where they tell workers apart."""
    hidden = set() if any(worker.ranks for worker in workers) else {"name", "rank"}
    hidden |= set() if any(worker.role in ("prefill", "decode") for worker in workers) else {"role"}
    rows = [_HEADS, *(row for worker in workers for row in _rows(worker))]
    shown = [column for column in zip(*rows, strict=True) if column[0] not in hidden]
    return aligned(list(zip(*shown, strict=True)))


def _rows(worker: WorkerStatus) -> Iterator[tuple[str, ...]]:
    first, *others = worker.ranks or (RankStatus(0, worker.peer, worker.boot_id),)
    yield (*_cells(worker), worker.name, str(first.rank), worker.role, first.peer)
    for rank in others:
        yield (*([""] * len(_cells(worker))), worker.name, str(rank.rank), "", rank.peer)


def _cells(worker: WorkerStatus) -> tuple[str, ...]:
    statistics = worker.statistics
    return (
        str(worker.group),
        worker.state,
        "-" if statistics is None else str(statistics.num_running + statistics.num_waiting + statistics.num_parked),
        "-" if statistics is None else f"{statistics.kv_cache_usage:.0%}",
        f"{worker.num_blocks} x {worker.block_size}",
        f"{worker.model_fingerprint.hex()[:8]} #{worker.weight_epoch}",
        str(worker.protocol_version),
        f"{worker.attached_seconds:.0f} s",
        worker.model,
    )


def _document(found: Status) -> dict[str, Any]:
    workers = [asdict(worker) | {"model_fingerprint": worker.model_fingerprint.hex()} for worker in found.workers]
    return asdict(found) | {"serving": not found.failures, "version": __version__, "workers": workers}


COMMAND = Subcommand(
    "status",
    "tell whether a system serves",
    "Tells how frontend, engine and workers are; the exit status is 1 where they do not serve.",
    add_flags,
    status,
)
