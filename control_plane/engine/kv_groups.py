"""How the layers of one rank are cut into KV cache groups and laid over tensors; knows neither memory nor settings.

Layers that see alike are of one *kind*: full attention, or one sliding window, or one chunk size. All groups take their
blocks from one pool, so a block must take the same bytes whichever group has it. This is the rule:

- One kind only: one group. Every layer that owns its KV has a tensor of its own, and layers may differ in bytes.
- Several kinds: a block is `width` layers wide. Each kind is cut, in layer order, into groups of `width` layers, the
  last of which may be short; tensor i holds the KV of the i-th layer of every group. `width` is the largest that leaves
  no more than an eighth of any kind's places idle. All layers take equal bytes for a token, or the model is refused.

Gemma 3 270M, 3 full layers and 15 of one window, thus gets 1 full and 5 window groups of 3 layers over 3 tensors.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from blockplane.protos.errors import ConfigurationError
from blockplane.protos.kv_cache import KVCacheGroup
from blockplane.protos.model import LayerKVSpec

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float8_e4m3fn": 1}

Layers = Sequence[LayerKVSpec]
Kind = tuple[int | None, int | None]


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """One tensor, of whatever number of blocks: bytes of K and V together for one token, and the layers in it."""

    bytes_per_token: int
    shared_by: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Groups in the order full attention, sliding windows, chunks, each ascending; and the tensors that they share."""

    groups: tuple[KVCacheGroup, ...]
    tensors: tuple[TensorLayout, ...]

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token's place in a block takes over all tensors."""
        return sum(tensor.bytes_per_token for tensor in self.tensors)


def lay_out(layers: Layers) -> KVLayout:
    """Cut the layers of one rank into groups and tensors.

    A layer that reads another's KV takes no bytes; its name follows those of its owner's group and tensor.
    Where the layers of one kind differ in shape, their group's `num_kv_heads`, `head_dim` and `dtype` are 0 and "".

    Raises:
        ConfigurationError: layers that no one pool can hold, or that are none this engine knows; it names them.
    """
    _check_layers(layers)
    owners = [layer for layer in layers if layer.shares_kv_with is None]
    kinds = _kinds_in_order(owners)
    if len(kinds) == 1:
        return _with_readers([owners], [[layer] for layer in owners], layers)
    _check_equal_bytes(owners)
    width = _choose_width([len(kind) for kind in kinds])
    groups = [kind[start : start + width] for kind in kinds for start in range(0, len(kind), width)]
    for group in groups:
        _check_equal_shapes(group)
    return _with_readers(groups, [[group[i] for group in groups if i < len(group)] for i in range(width)], layers)


def token_bytes(layer: LayerKVSpec) -> int:
    """Bytes of one token's K and V in one layer, were they its own."""
    return 2 * layer.num_kv_heads * layer.head_dim * DTYPE_BYTES[layer.dtype]


def kind_of(layer: LayerKVSpec) -> Kind:
    """Layers of one kind see the same tokens."""
    return layer.sliding_window, layer.attention_chunk_size


def describe_kind(layer: LayerKVSpec) -> str:
    """A kind in words, for a sentence."""
    if layer.attention_chunk_size is not None:
        return f"attention chunks of {layer.attention_chunk_size}"
    return "full attention" if layer.sliding_window is None else f"a sliding window of {layer.sliding_window}"


def _choose_width(kind_sizes: Sequence[int]) -> int:
    """The largest width at which no kind's groups have more than an eighth of their places idle."""

    def fits(width: int) -> bool:
        return all(8 * (-num_layers % width) <= num_layers + -num_layers % width for num_layers in kind_sizes)

    return next(width for width in range(max(kind_sizes), 0, -1) if fits(width))


def _kinds_in_order(owners: Layers) -> list[list[LayerKVSpec]]:
    kinds: dict[Kind, list[LayerKVSpec]] = {}
    for layer in owners:
        kinds.setdefault(kind_of(layer), []).append(layer)
    # Without a chunk before all with one, then without a window before all with one.
    return [kinds[kind] for kind in sorted(kinds, key=lambda kind: (kind[1] or 0, kind[0] or 0))]


def _with_readers(
    owner_groups: list[list[LayerKVSpec]], owner_tensors: list[list[LayerKVSpec]], layers: Layers
) -> KVLayout:
    """Name the layers that read others' KV behind the owners, in layer order."""

    def names(owners: list[LayerKVSpec]) -> tuple[str, ...]:
        own = [layer.name for layer in owners]
        return (*own, *(layer.name for layer in layers if layer.shares_kv_with in own))

    return KVLayout(
        groups=tuple(_make_group(owners, names(owners)) for owners in owner_groups),
        tensors=tuple(TensorLayout(token_bytes(owners[0]), names(owners)) for owners in owner_tensors),
    )


def _make_group(owners: list[LayerKVSpec], layer_names: tuple[str, ...]) -> KVCacheGroup:
    shapes = {_shape(layer) for layer in owners}
    num_kv_heads, head_dim, dtype = shapes.pop() if len(shapes) == 1 else (0, 0, "")
    return KVCacheGroup(layer_names, num_kv_heads, head_dim, dtype, *kind_of(owners[0]))


def _shape(layer: LayerKVSpec) -> tuple[int, int, str]:
    return layer.num_kv_heads, layer.head_dim, layer.dtype


def _describe_shape(layer: LayerKVSpec) -> str:
    shape = f"{layer.num_kv_heads} heads of {layer.head_dim} in {layer.dtype}"
    return f"{layer.name} ({shape}, {token_bytes(layer)} bytes a token)"


def _check_layers(layers: Layers) -> None:
    if not layers:
        raise ConfigurationError("the worker has no layer that keeps KV; there is nothing to plan for such a model.")
    by_name: dict[str, LayerKVSpec] = {}
    for layer in layers:
        if layer.dtype not in DTYPE_BYTES:
            raise ConfigurationError(
                f"{layer.name} keeps KV in {layer.dtype}, and this engine knows {', '.join(DTYPE_BYTES)};"
                " choose one of them or run the worker's version of Blockplane."
            )
        if not token_bytes(layer):
            raise ConfigurationError(f"{_describe_shape(layer)} keeps nothing; leave out layers without KV.")
        if by_name.setdefault(layer.name, layer) is not layer:
            raise ConfigurationError(f"two layers are called {layer.name}; each needs a name of its own.")
    for layer in layers:
        if layer.shares_kv_with is not None:
            _check_reader(layer, by_name.get(layer.shares_kv_with))


def _check_reader(layer: LayerKVSpec, owner: LayerKVSpec | None) -> None:
    """Refuse a layer that cannot read the KV that it says it reads."""
    reads = f"{layer.name} reads the KV of {layer.shares_kv_with}, "
    if owner is None:
        raise ConfigurationError(f"{reads}and there is no such layer; name one that keeps KV.")
    if owner.shares_kv_with is not None:
        raise ConfigurationError(
            f"{reads}which has none but reads that of {owner.shares_kv_with}; name the layer that keeps it."
        )
    if kind_of(layer) != kind_of(owner):
        raise ConfigurationError(
            f"{reads}but has {describe_kind(layer)} where that has {describe_kind(owner)}; layers that share KV must"
            " see alike."
        )
    if _shape(layer) != _shape(owner):
        raise ConfigurationError(
            f"{_describe_shape(layer)} reads the KV of {_describe_shape(owner)}; layers that share KV need one shape."
        )


def _check_equal_bytes(owners: Layers) -> None:
    for layer in owners:
        if token_bytes(layer) != token_bytes(owners[0]):
            raise ConfigurationError(
                f"{_describe_shape(owners[0])} and {_describe_shape(layer)} take unequal bytes, and the model mixes"
                " kinds of attention whose blocks share one pool; this engine cannot serve it."
            )


def _check_equal_shapes(group: Layers) -> None:
    for layer in group:
        if _shape(layer) != _shape(group[0]):
            raise ConfigurationError(
                f"{_describe_shape(group[0])} and {_describe_shape(layer)} would share a KV cache group, which has one"
                " shape; this engine cannot serve such a model."
            )
