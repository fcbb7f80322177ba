"""Layers cut into groups and tensors: the models of the field, worked out by hand, and what must hold for all."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockplane.control_plane.engine.kv_groups import KVLayout, TensorLayout, lay_out
from blockplane.protos.errors import ConfigurationError
from blockplane.protos.kv_cache import KVCacheGroup
from blockplane.protos.model import LayerKVSpec

FULL = LayerKVSpec("", num_kv_heads=1, head_dim=256, dtype="bfloat16")
WINDOW = replace(FULL, sliding_window=512)
CHUNK = replace(FULL, attention_chunk_size=8192)
TOKEN_BYTES = 1024


def named(layers: list[LayerKVSpec]) -> list[LayerKVSpec]:
    return [replace(layer, name=str(index)) for index, layer in enumerate(layers)]


def group_names(layout: KVLayout) -> list[str]:
    return [" ".join(group.layer_names) for group in layout.groups]


def tensor_names(layout: KVLayout) -> list[str]:
    return [" ".join(tensor.shared_by) for tensor in layout.tensors]


# -- one kind ----------------------------------------------------------------------------------------------------------


def test_layers_of_one_kind_are_one_group_with_a_tensor_each() -> None:
    layout = lay_out(named([FULL] * 3))
    assert layout.groups == (KVCacheGroup(("0", "1", "2"), 1, 256, "bfloat16", None, None),)
    assert layout.tensors == tuple(TensorLayout(TOKEN_BYTES, (name,)) for name in "012")
    assert layout.bytes_per_token == 3 * TOKEN_BYTES
    assert lay_out(named([WINDOW] * 3)).groups[0].sliding_window == 512
    assert lay_out(named([CHUNK] * 3)).groups[0].attention_chunk_size == 8192


def test_layers_of_one_kind_may_differ_in_bytes_and_then_the_group_names_no_shape() -> None:
    layout = lay_out(named([FULL, replace(FULL, num_kv_heads=3), replace(FULL, dtype="float32")]))
    assert [tensor.bytes_per_token for tensor in layout.tensors] == [TOKEN_BYTES, 3 * TOKEN_BYTES, 2 * TOKEN_BYTES]
    assert layout.groups == (KVCacheGroup(("0", "1", "2")),)


# -- several kinds -----------------------------------------------------------------------------------------------------


def test_gemma_3_270m_is_one_full_and_five_window_groups_over_three_tensors() -> None:
    layout = lay_out(named([FULL if index % 6 == 5 else WINDOW for index in range(18)]))
    assert group_names(layout) == ["5 11 17", "0 1 2", "3 4 6", "7 8 9", "10 12 13", "14 15 16"]
    assert [group.sliding_window for group in layout.groups] == [None, 512, 512, 512, 512, 512]
    assert {(group.num_kv_heads, group.head_dim, group.dtype) for group in layout.groups} == {(1, 256, "bfloat16")}
    assert tensor_names(layout) == ["5 0 3 7 10 14", "11 1 4 8 12 15", "17 2 6 9 13 16"]
    assert layout.bytes_per_token == 3 * TOKEN_BYTES


@pytest.mark.parametrize(
    ("num_full", "num_window", "groups", "width"),
    [
        (1, 1, 2, 1),
        (12, 12, 2, 12),
        # 22 windowed layers in 6 groups of 4 leave 2 of 24 places idle.
        (4, 22, 7, 4),
        # In groups of 8, exactly an eighth is idle: allowed.
        (7, 8, 2, 8),
        # In groups of 7, a seventh of the first kind would be; in groups of 2, an eighth of the second is.
        (6, 7, 7, 2),
        (1, 20, 21, 1),
    ],
)
def test_groups_are_as_wide_as_an_eighth_of_idle_places_allows(
    num_full: int, num_window: int, groups: int, width: int
) -> None:
    layout = lay_out(named([FULL] * num_full + [WINDOW] * num_window))
    assert (len(layout.groups), len(layout.tensors)) == (groups, width)


def test_groups_stand_in_the_order_full_windows_chunks_each_ascending() -> None:
    layers = [
        CHUNK,
        replace(WINDOW, sliding_window=9000),
        replace(CHUNK, attention_chunk_size=16),
        WINDOW,
        FULL,
    ]
    layout = lay_out(named(layers))
    assert group_names(layout) == ["4", "3", "1", "2", "0"]
    assert tensor_names(layout) == ["4 3 1 2 0"]


def test_unequal_bytes_over_several_kinds_are_refused_naming_two_layers_and_their_bytes() -> None:
    with pytest.raises(
        ConfigurationError, match=r"^1 \(.* 1024 bytes a token\) and 2 \(2 heads of 256 in bfloat16, 2048 bytes .*\.$"
    ):
        lay_out([replace(WINDOW, name="1"), replace(FULL, name="2", num_kv_heads=2)])


def test_fp8_takes_a_byte_a_number() -> None:
    layers = [replace(layer, dtype="float8_e4m3fn") for layer in (FULL, WINDOW, WINDOW)]
    layout = lay_out(named(layers))
    assert [tensor.bytes_per_token for tensor in layout.tensors] == [2 * 1 * 256]
    assert {group.dtype for group in layout.groups} == {"float8_e4m3fn"}


def test_equal_bytes_in_another_shape_are_refused_within_a_group_and_taken_across_groups() -> None:
    other = {"num_kv_heads": 2, "head_dim": 128}
    layout = lay_out(named([FULL, replace(WINDOW, **other)]))
    assert [(group.num_kv_heads, group.head_dim) for group in layout.groups] == [(1, 256), (2, 128)]
    with pytest.raises(ConfigurationError, match=r"^2 \(1 heads of 256 .* 3 \(2 heads of 128 .* one shape; .*\.$"):
        lay_out(named([FULL, FULL, WINDOW, replace(WINDOW, **other)]))


kinds = st.sampled_from(
    [FULL, WINDOW, replace(WINDOW, sliding_window=64), CHUNK, replace(CHUNK, attention_chunk_size=64)]
)


@given(owners=st.lists(kinds, min_size=1, max_size=60), data=st.data())
def test_every_owner_is_in_one_group_and_one_tensor_and_little_is_idle(
    owners: list[LayerKVSpec], data: st.DataObject
) -> None:
    layers = named(owners)
    readers = [
        replace(owner, name=f"reader {index}", shares_kv_with=owner.name)
        for index, owner in enumerate(data.draw(st.lists(st.sampled_from(layers), max_size=5)))
    ]
    layout = lay_out([*layers, *readers])
    by_name = {layer.name: layer for layer in [*layers, *readers]}
    in_groups = [name for group in layout.groups for name in group.layer_names]
    in_tensors = [name for tensor in layout.tensors for name in tensor.shared_by]
    assert Counter(in_groups) == Counter(in_tensors) == Counter(by_name.keys())
    num_places: Counter[tuple[int | None, int | None]] = Counter()
    for group in layout.groups:
        kind = group.sliding_window, group.attention_chunk_size
        members = [by_name[name] for name in group.layer_names]
        assert all((layer.sliding_window, layer.attention_chunk_size) == kind for layer in members)
        own = [layer.name for layer in members if layer.shares_kv_with is None]
        assert list(group.layer_names[: len(own)]) == own, "owners come first"
        assert own == sorted(own, key=int), "in layer order"
        # The i-th owner is in the i-th tensor, so a block of one group has one place for each.
        for name, tensor in zip(own, layout.tensors, strict=False):
            assert name in tensor.shared_by
        num_places[kind] += len(layout.tensors)
    for kind, places in num_places.items():
        num_own = sum((layer.sliding_window, layer.attention_chunk_size) == kind for layer in layers)
        assert 0 <= places - num_own <= places / 8
    for reader in readers:
        (tensor,) = (tensor for tensor in layout.tensors if reader.name in tensor.shared_by)
        assert reader.shares_kv_with in tensor.shared_by
    assert layout.bytes_per_token == len(layout.tensors) * TOKEN_BYTES


# -- layers that read another's KV -------------------------------------------------------------------------------------


def reads(owner: str, name: str, layer: LayerKVSpec) -> LayerKVSpec:
    return replace(layer, name=name, shares_kv_with=owner)


def test_a_reader_takes_no_bytes_and_stands_behind_the_owners() -> None:
    layers = named([FULL, WINDOW, FULL])
    layout = lay_out([layers[0], reads("0", "r0", FULL), layers[1], layers[2], reads("1", "r1", WINDOW)])
    assert group_names(layout) == ["0 r0", "2", "1 r1"]
    assert tensor_names(layout) == ["0 2 1 r0 r1"]
    assert layout.bytes_per_token == TOKEN_BYTES
    alike = lay_out([*named([FULL, FULL]), reads("0", "r0", FULL)])
    assert group_names(alike) == ["0 1 r0"]
    assert tensor_names(alike) == ["0 r0", "1"]


@pytest.mark.parametrize(
    ("reader", "sentence"),
    [
        (reads("9", "r", FULL), r"^r reads the KV of 9, and there is no such layer; .*\.$"),
        (reads("r", "r", FULL), r"^r reads the KV of r, which has none but reads that of r; .*\.$"),
        (reads("reader", "r", FULL), r"^r reads the KV of reader, which has none but reads that of 0; .*\.$"),
        (
            reads("0", "r", WINDOW),
            r"^r reads the KV of 0, but has a sliding window of 512 where that has full attention; .*\.$",
        ),
        (
            reads("1", "r", CHUNK),
            r"^r reads .* 1, but has attention chunks of 8192 where that has a sliding window of 512; .*\.$",
        ),
        (reads("0", "r", replace(FULL, head_dim=128)), r"^r \(1 heads of 128 .* 0 \(1 heads of 256 .* one shape\.$"),
    ],
)
def test_a_reader_of_what_is_not_there_or_not_alike_is_refused(reader: LayerKVSpec, sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        lay_out([*named([FULL, WINDOW]), reads("0", "reader", FULL), reader])


# -- layers that nobody can keep ---------------------------------------------------------------------------------------


def test_a_dtype_that_the_engine_does_not_know_is_refused_naming_it_and_its_layer() -> None:
    with pytest.raises(ConfigurationError, match=r"^1 keeps KV in float8.*\.$"):
        lay_out(named([FULL, replace(FULL, dtype="float8")]))


def test_no_layers_empty_layers_and_two_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"no layer.*\.$"):
        lay_out([])
    with pytest.raises(ConfigurationError, match=r"^0 \(0 heads of 256 .*\.$"):
        lay_out(named([replace(FULL, num_kv_heads=0)]))
    with pytest.raises(ConfigurationError, match=r"^two layers are called a; .*\.$"):
        lay_out([replace(FULL, name="a"), replace(WINDOW, name="a")])
