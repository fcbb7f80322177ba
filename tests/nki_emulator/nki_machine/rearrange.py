"""Names of dimensions, split, reordered and merged; knows the primitives alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nki_machine.errors import RuleError

if TYPE_CHECKING:
    from nki_machine.tensor import NkiTensor

Group = str | tuple[str, ...]


def rearranged(
    tensor: NkiTensor, src_pattern: tuple[Group, ...], dst_pattern: tuple[Group, ...], sizes: dict[str, int]
) -> NkiTensor:
    """`tensor.rearrange`: a group in `src_pattern` splits a dimension (one of its sizes may be left out), a group in
    `dst_pattern` merges several.

    Raises:
        RuleError: patterns that do not name every dimension once, or a primitive that refuses.
    """
    sources, targets = [_names(group) for group in src_pattern], [_names(group) for group in dst_pattern]
    names = [name for group in sources for name in group]
    wanted = [name for group in targets for name in group]
    if len(sources) != tensor.ndim or sorted(wanted) != sorted(names) or len(set(names)) != len(names):
        raise RuleError(f"rearrange: {src_pattern} and {dst_pattern} must each name every dimension of {tensor} once.")
    view, dim = tensor, 0
    for group in sources:
        if len(group) > 1:
            view = view.reshape_dim(dim, tuple(sizes.get(name, -1) for name in group))
        dim += len(group)
    view = view.permute(tuple(names.index(name) for name in wanted))
    for dim, group in enumerate(targets):
        if len(group) > 1:
            view = view.flatten_dims(dim, dim + len(group) - 1)
    return view


def _names(group: Group) -> tuple[str, ...]:
    return (group,) if isinstance(group, str) else group
