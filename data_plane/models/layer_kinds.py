"""Layers of a `config.json` that keep no KV in blocks, refused by name; knows nothing of those that do."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from blockplane.protos.errors import ModelError

_STATE_KINDS = {"conv", "hybrid", "hybrid_sliding", "linear_attention", "mamba", "mamba2", "recurrent"}
"""Kinds that hold a state of fixed size, alone or beside KV."""

_STATE_ARCHITECTURES = re.compile(r"Mamba|Rwkv|xLSTM", re.IGNORECASE)
"""All of these models' layers hold a state, which their configs need not say layer by layer."""

_ENCODERS = re.compile(r"EncoderModel$|Bert|Electra|MPNet", re.IGNORECASE)


def refuse_layers_without_kv(config: Mapping[str, Any]) -> None:
    """Refuse state-space and encoder-only layers (seed 004: their block tables are no block tables).

    Raises:
        ModelError: the message names the first such layer.
    """
    architecture = str((config.get("architectures") or [""])[0])
    for layer, kind in enumerate(_stated_kinds(config)):
        if kind in _STATE_KINDS:
            raise _holds_a_state(layer, kind)
    if _STATE_ARCHITECTURES.search(architecture):
        raise _holds_a_state(0, architecture)
    if _ENCODERS.search(architecture):
        raise ModelError(
            f"Layer 0 is a layer of the encoder {architecture}, which sees all tokens at once and keeps no KV; "
            "Blockplane serves decoders: choose one."
        )


def _stated_kinds(config: Mapping[str, Any]) -> Sequence[str]:
    """One kind per layer as the config states them, under its older names as well; nothing where it does not."""
    if config.get("block_types"):
        pattern = config["block_types"]
        return [pattern[layer % len(pattern)] for layer in range(config.get("num_hidden_layers", len(pattern)))]
    return config.get("layer_types") or config.get("layers_block_type") or ()


def _holds_a_state(layer: int, kind: str) -> ModelError:
    return ModelError(
        f"Layer {layer} is of kind {kind}, which holds a state instead of KV in blocks; Blockplane has attention "
        "layers only: choose a model without others."
    )
