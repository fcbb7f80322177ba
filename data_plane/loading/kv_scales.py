"""The scales of a checkpoint's FP8 keys and values, whatever its maker called them; knows no other tensors.

A scale is what a stored number is multiplied by. The names are those of compressed-tensors, older and newer, of Quark,
of ModelOpt, of AutoFP8 and of vLLM. Scales of queries are passed over: here queries are not rounded.
"""

import math
import re
from collections.abc import Sequence

import torch

from blockplane.data_plane.loading.checkpoint import StoredTensor
from blockplane.data_plane.models.weights import LayerWeights
from blockplane.protos.errors import ModelError

_NAME = re.compile(
    r"model\.layers\.(?P<layer>\d+)\.self_attn\."
    r"(?:(?:attn\.)?(?P<of>q|k|v|kv)_scale|(?P<projection>[qkv])_proj\.(?:output|(?P=projection))_scale)"
)


class KVScales:
    """What a checkpoint says of its layers, taken tensor by tensor.

    Attributes:
        num_layers: how many of them have a scale for the keys and one for the values.
    """

    def __init__(self, layers: Sequence[LayerWeights]) -> None:
        self._layers = layers
        self._taken: set[tuple[int, str]] = set()

    @property
    def num_layers(self) -> int:
        return sum((layer, "k") in self._taken and (layer, "v") in self._taken for layer in range(len(self._layers)))

    def take(self, name: str, tensor: StoredTensor) -> bool:
        """Give a scale to its layer; False where `name` is none, or that of a layer that is not there.

        Raises:
            ModelError: it is no positive number, or there is one per head.
        """
        match = _NAME.fullmatch(name)
        if match is None or int(match["layer"]) >= len(self._layers):
            return False
        layer, scale = int(match["layer"]), _number(name, tensor)
        for kind in match["of"] or match["projection"]:
            self._taken.add((layer, kind))
            if kind == "k":
                self._layers[layer].k_scale = scale
            elif kind == "v":
                self._layers[layer].v_scale = scale
        return True


def _number(name: str, tensor: StoredTensor) -> float:
    if (num_scales := math.prod(tensor.shape)) != 1:
        raise ModelError(
            f"Tensor {name} holds {num_scales} scales, and Blockplane has one a layer; choose a checkpoint whose KV"
            " cache is scaled per tensor."
        )
    scale = float(tensor.read().float())
    if not 0 < scale < torch.inf:
        raise ModelError(f"Tensor {name} is {scale}, which is no scale; fetch the checkpoint again.")
    return scale
