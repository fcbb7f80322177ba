"""A model's weights read anew, and written into the model as it stands. Knows neither streams nor file formats."""

from collections.abc import Callable
from dataclasses import fields, replace

from blockplane.data_plane.kv_cache import KV_CACHE_DTYPES
from blockplane.data_plane.loading.build import load_weights
from blockplane.data_plane.loading.checkpoint import Checkpoint, open_checkpoint
from blockplane.data_plane.loading.named import info_of, synthetic_seed
from blockplane.data_plane.models.interface import Model
from blockplane.data_plane.models.synthetic import SyntheticModel
from blockplane.data_plane.models.transformer import Transformer
from blockplane.protos.config import Config
from blockplane.protos.errors import ModelError
from blockplane.protos.model import ModelInfo


class WeightSource:
    """Where a worker's model has its weights from. Graphs and KV caches outlive other weights; what is cached does not.

    Weights are read whole before any is written: as long as both are there, the host has room for them twice.
    """

    def __init__(self, model: Model, info: ModelInfo, config: Config, *, is_compiled: bool = False) -> None:
        """`info`: what the control plane was told. `is_compiled`: graphs know the model's numbers, but not its tensors.

        `config.model` is where the model came from.
        """
        self._model, self._info, self._config, self._is_compiled = model, info, config, is_compiled
        self._name = config.model

    def read(self, name: str) -> Callable[[], None]:
        """Read the weights of a model as the setting `model` names it; empty = of the one that they are from now.

        Returns:
            What writes them into the model; until then nothing has changed.

        Raises:
            ModelError: there is no such model, or another is built; the message says what differs.
            ConfigurationError: as the settings say.
        """
        name = name or self._name
        refill = self._read(self._model, name)

        def write() -> None:
            refill()
            self._name = name

        return write

    def _read(self, model: Model, name: str) -> Callable[[], None]:
        if isinstance(model, SyntheticModel):
            if (seed := synthetic_seed(name)) is None:
                raise ModelError(f"{name} has no weights for the synthetic model; name synthetic or synthetic-N.")
            return lambda: model.refill(seed)
        assert isinstance(model, Transformer), "there are no others"
        if synthetic_seed(name) is not None:
            raise ModelError(f"{name} has no weights for {self._info.name}; name a checkpoint.")
        checkpoint = open_checkpoint(name)
        self._check_alike(name, checkpoint, model)
        scales_kv = KV_CACHE_DTYPES[self._config.kv_cache_dtype] is not None
        weights = load_weights(checkpoint, self._config.dtype, scales_kv=scales_kv, ranks=model.ranks)
        scales = [(attention.spec.k_scale, attention.spec.v_scale) for attention in model.attentions]
        if self._is_compiled and scales_kv and weights.kv_scales != scales:
            raise ModelError(
                f"{name} has other FP8 scales than the graphs were compiled for; restart the worker with it."
            )
        return lambda: model.refill(weights)

    def _check_alike(self, name: str, checkpoint: Checkpoint, model: Transformer) -> None:
        """Raise ModelError unless a checkpoint differs from the model in its name and its tensors' numbers alone."""
        info = replace(info_of(checkpoint, self._config), name=self._info.name)
        differences = [
            f"{field.name} {_shortened(getattr(theirs, field.name))} for {_shortened(getattr(ours, field.name))}"
            for theirs, ours in ((checkpoint.config, model.config), (info, self._info))
            for field in fields(theirs)
            if getattr(theirs, field.name) != getattr(ours, field.name)
        ]
        if differences:
            raise ModelError(
                f"{name} has {', '.join(differences)}, and only weights can be read anew; restart the workers with it."
            )


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
