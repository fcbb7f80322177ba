"""A worker as the settings describe it, its models on its device. Knows neither engine nor signals."""

from blockplane.data_plane.backends.backend import Backend
from blockplane.data_plane.grammars import load_grammars
from blockplane.data_plane.loading.named import load_draft_model, load_named
from blockplane.data_plane.record import Record
from blockplane.data_plane.reloading import WeightSource
from blockplane.data_plane.worker import Worker
from blockplane.protos.config import Config
from blockplane.protos.errors import ConfigurationError


def loaded_worker(config: Config, backend: Backend, record: Record | None = None, *, serves: bool = True) -> Worker:
    """Load the models and measure what is left for KV.

    Args:
        record, serves: as `Worker` has them.

    Raises:
        ModelError, ConfigurationError: there is no such model, or no telling how much memory there is.
    """
    model, info = load_named(config.model, config, backend.device)
    draft_model = load_draft_model(config, info, backend.device)
    available_memory = config.kv_cache_bytes or backend.available_memory()
    if available_memory is None:
        raise ConfigurationError(
            f"kv_cache_bytes is 0, and the device {backend.name} does not tell what it can spare; give a number."
        )
    return Worker(
        model,
        info,
        available_memory=available_memory,
        num_draft_tokens=config.num_draft_tokens,
        draft_model=draft_model,
        record=record,
        grammars=load_grammars(config, info) if serves else None,
        backend=backend,
        serves=serves,
        weights=WeightSource(model, info, config, is_compiled=backend.is_compiled),
    )
