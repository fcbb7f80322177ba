"""A worker as the settings describe it, its models on its device. Knows neither engine nor signals."""

from collections.abc import Callable

from blockplane.data_plane.backends.backend import Backend
from blockplane.data_plane.grammars import load_grammars
from blockplane.data_plane.loading.named import load_draft_model, load_named
from blockplane.data_plane.log_tail import keep_log_tail
from blockplane.data_plane.place import Member, Place, Single
from blockplane.data_plane.ranks.collectives import ALONE, Ranks
from blockplane.data_plane.ranks.process_ranks import ProcessRanks
from blockplane.data_plane.ranks.store import own_host
from blockplane.data_plane.record import Record
from blockplane.data_plane.reloading import WeightSource
from blockplane.data_plane.served_model import ServedModel
from blockplane.data_plane.transfers.transfers import Transfers
from blockplane.data_plane.worker import Worker
from blockplane.protos.config import Config
from blockplane.protos.errors import ConfigurationError


def loaded_worker(config: Config, backend: Backend, record: Record | None = None, *, serves: bool = True) -> Worker:
    """Load the models and measure what is left for KV; a rank of a group does so once it has met the others.

    Args:
        record, serves: as `ServedModel` and `Worker` have them.

    Raises:
        ModelError, ConfigurationError: there is no such model, or no telling how much memory there is. Or a rank cannot
            be what the settings say.
    """
    log_tail = keep_log_tail()

    def load(ranks: Ranks) -> ServedModel:
        return _loaded_model(config, backend, record, ranks, serves=serves)

    transfers = Transfers(config) if serves else None
    return Worker(_place(config, backend, load), transfers, serves=serves, log_tail=log_tail.text)


def _place(config: Config, backend: Backend, load: Callable[[Ranks], ServedModel]) -> Place:
    if not config.group:
        return Single(load(ALONE))
    if config.record:
        raise ConfigurationError(
            "record and group are both set, and nobody could replay what one rank of several was told; leave record"
            " out."
        )
    return Member(ProcessRanks(config.group, config.rank, own_host(config), backend.device), load)


def _loaded_model(
    config: Config, backend: Backend, record: Record | None, ranks: Ranks, *, serves: bool
) -> ServedModel:
    model, info = load_named(config.model, config, backend.device, ranks)
    draft_model = load_draft_model(config, info, backend.device, ranks)
    available_memory = config.kv_cache_bytes or backend.available_memory()
    if available_memory is None:
        raise ConfigurationError(
            f"kv_cache_bytes is 0, and the device {backend.name} does not tell what it can spare; give a number."
        )
    return ServedModel(
        model,
        info,
        available_memory=available_memory,
        num_draft_tokens=config.num_draft_tokens,
        draft_model=draft_model,
        record=record,
        grammars=load_grammars(config, info) if serves and ranks.rank == 0 else None,
        backend=backend,
        weights=WeightSource(model, info, config, is_compiled=backend.is_compiled),
        ranks=ranks,
    )
