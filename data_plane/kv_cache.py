"""A model's KV caches: what each layer needs, and the tensors and groups that the engine laid out. Knows no plans.

A layer's name is given here and nowhere else. A draft model's layers are planned and laid out with those of the model
that it drafts for, under names of their own.
"""

from collections import Counter
from collections.abc import Iterable

import torch

from blockplane.data_plane.attention import Attention
from blockplane.data_plane.backends.backend import Backend
from blockplane.data_plane.models.interface import Model
from blockplane.data_plane.ranks.collectives import ALONE, Ranks
from blockplane.data_plane.ranks.context_kernels import kernels_of
from blockplane.protos.errors import ProtocolError
from blockplane.protos.kv_cache import KVCacheGroup, KVCacheTensor
from blockplane.protos.model import LayerKVSpec
from blockplane.protos.plan import Configure

DRAFT_PREFIX = "draft."
"""Stands before the names of a draft model's layers."""
KV_CACHE_DTYPES = {"auto": None, "fp8_e4m3": "float8_e4m3fn"}
"""Each choice of the setting `kv_cache_dtype` as torch calls it; None = the model's own."""


def layer_kv_specs(model: Model, draft_model: Model | None = None) -> tuple[LayerKVSpec, ...]:
    """What each layer needs, in layer order; a draft model's layers last."""
    own = _specs_of(model, "")
    return own if draft_model is None else own + _specs_of(draft_model, DRAFT_PREFIX)


def _specs_of(model: Model, prefix: str) -> tuple[LayerKVSpec, ...]:
    return tuple(
        LayerKVSpec(
            name=f"{prefix}layers.{index}.self_attn",
            num_kv_heads=attention.spec.num_kv_heads,
            head_dim=attention.spec.head_dim,
            dtype=model.kv_cache_dtype,
            sliding_window=attention.spec.sliding_window,
            attention_chunk_size=attention.spec.attention_chunk_size,
        )
        for index, attention in enumerate(model.attentions)
    )


def bind_kv_caches(
    model: Model, configure: Configure, backend: Backend, draft_model: Model | None = None, ranks: Ranks = ALONE
) -> None:
    """Allocate each KV cache tensor once, as the backend lays it out, and bind it, with its group and the kernels, to
    every layer that shares it. Where ranks share positions, a block has the places of this rank's alone.

    Raises:
        ProtocolError: the layout contradicts the models' layers or the ranks, or asks for attention that this worker
            does not have.
        ConfigurationError: as `kernels_of` says.
    """
    kernels = kernels_of(backend, configure, ranks)
    specs = {spec.name: spec for spec in layer_kv_specs(model, draft_model)}
    attentions = dict(zip(specs, attentions_of(model, draft_model), strict=True))
    group_of = _group_of_layers(configure.kv_cache_groups, specs)
    tensors = configure.kv_cache_tensors or tuple(
        KVCacheTensor(_num_bytes(spec, configure), (name,)) for name, spec in specs.items()
    )
    _require_each_layer_once("tensors", (name for tensor in tensors for name in tensor.shared_by), specs)
    spec_of = [_spec_of_tensor(tensor, specs, group_of, configure) for tensor in tensors]
    # What an earlier attach left goes first: there need not be room for both.
    for attention in attentions.values():
        attention.caches = None
    num_blocks, block_size = configure.num_blocks, configure.rank_block_size
    for tensor, spec in zip(tensors, spec_of, strict=True):
        shape = backend.kv_cache_shape(num_blocks, block_size, spec.num_kv_heads, spec.head_dim)
        dtype = getattr(torch, spec.dtype)
        k_cache, v_cache = (torch.zeros(shape, dtype=dtype, device=backend.device) for _ in range(2))
        for name in tensor.shared_by:
            attentions[name].bind_kv_cache(k_cache, v_cache, kernels, group_of[name])


def num_kv_bytes(configure: Configure, model: Model, draft_model: Model | None = None) -> int:
    """What `bind_kv_caches` allocates."""
    if configure.kv_cache_tensors:
        return sum(tensor.size for tensor in configure.kv_cache_tensors)
    return sum(_num_bytes(spec, configure) for spec in layer_kv_specs(model, draft_model))


def attentions_of(model: Model, draft_model: Model | None = None) -> tuple[Attention, ...]:
    """Every layer's, in the order of `layer_kv_specs`."""
    return model.attentions if draft_model is None else model.attentions + draft_model.attentions


def _group_of_layers(groups: tuple[KVCacheGroup, ...], specs: dict[str, LayerKVSpec]) -> dict[str, int]:
    """Each layer's index into the groups."""
    members = [(index, name) for index, group in enumerate(groups) for name in group.layer_names or specs]
    _require_each_layer_once("groups", (name for _, name in members), specs)
    for index, name in members:
        _check_member(groups[index], index, specs[name])
    return {name: index for index, name in members}


def _check_member(group: KVCacheGroup, index: int, spec: LayerKVSpec) -> None:
    """The group keeps all that the layer sees, in the layer's shape."""
    kept, seen = ((kv.sliding_window, kv.attention_chunk_size) for kv in (group, spec))
    if kept not in ((None, None), seen):
        raise ProtocolError(
            f"KV cache group {index} keeps {_limits(group)}, but its layer {spec.name} sees {_limits(spec)}; "
            "run the same version of Blockplane on both."
        )
    told, own = ((kv.num_kv_heads, kv.head_dim, kv.dtype) for kv in (group, spec))
    if group.dtype and told != own:
        raise ProtocolError(
            f"KV cache group {index} has (num_kv_heads, head_dim, dtype) {told}, but its layer {spec.name} has {own}; "
            "run the same version of Blockplane on both."
        )


def _limits(kv: KVCacheGroup | LayerKVSpec) -> str:
    if kv.attention_chunk_size is not None:
        return f"chunks of {kv.attention_chunk_size} tokens"
    return "all tokens" if kv.sliding_window is None else f"a window of {kv.sliding_window} tokens"


def _spec_of_tensor(
    tensor: KVCacheTensor, specs: dict[str, LayerKVSpec], group_of: dict[str, int], configure: Configure
) -> LayerKVSpec:
    """One of the layers that share the tensor: in what shapes the memory, they are alike."""
    names = ", ".join(tensor.shared_by) or "no layer"
    shapes = {(specs[name].num_kv_heads, specs[name].head_dim) for name in tensor.shared_by}
    if len(shapes) != 1:
        raise ProtocolError(
            f"a KV cache tensor is shared by {names}, whose (num_kv_heads, head_dim) are {sorted(shapes)}; the engine "
            "must share a tensor among layers of one shape only."
        )
    owners = [group_of[name] for name in tensor.shared_by if specs[name].shares_kv_with is None]
    if len(set(owners)) < len(owners):
        raise ProtocolError(
            f"a KV cache tensor is shared by {names}, of which some are of one group and would overwrite each other's "
            "KV; the engine must share a tensor among layers of different groups only."
        )
    spec = specs[tensor.shared_by[0]]
    num_bytes = _num_bytes(spec, configure)
    if tensor.size != num_bytes:
        raise ProtocolError(
            f"the KV cache tensor of {names} is said to take {tensor.size} bytes, but {configure.num_blocks} blocks of "
            f"{spec.name} take {num_bytes}; run the same version of Blockplane on both."
        )
    return spec


def _num_bytes(spec: LayerKVSpec, configure: Configure) -> int:
    """Bytes of all blocks' keys and values (seed 002, "KV cache workflow")."""
    num_elements = configure.num_blocks * configure.rank_block_size * spec.num_kv_heads * spec.head_dim
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return 2 * num_elements * dtype.itemsize


def _require_each_layer_once(what: str, names: Iterable[str], specs: dict[str, LayerKVSpec]) -> None:
    named, own = Counter(names), Counter(specs.keys())
    wrong = (named - own) + (own - named)
    if wrong:
        raise ProtocolError(
            f"the engine's KV cache {what} must name each of the model's {len(specs)} layers once, but omit, repeat or "
            f"invent {', '.join(sorted(wrong))}; run the same version of Blockplane on both."
        )
