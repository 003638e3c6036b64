"""Nodes of an exported program that only view their first input: reshapes, permutations and expansions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from perfmodel.workload.imported.graph import Shape
from perfmodel.workload.imported.views import Position, expanded, permuted, reshaped

_RESHAPES = frozenset({
    "view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "contiguous", "clone", "detach", "detach_", "alias", "ravel",
    "_unsafe_view", "view_as", "reshape_as", "lift", "lift_fresh",
})  # fmt: skip
PERMUTATIONS = frozenset({"transpose", "t", "permute", "movedim", "moveaxis", "swapaxes", "swapdims", "numpy_T", "mT"})
EXPANSIONS = frozenset({"expand", "expand_as", "broadcast_to"})
_CASTS = frozenset({"to", "_to_copy", "type_as"})


def node_view(
    name: str, view: Sequence[Position], arguments: Mapping[str, Any], shape: Shape, *, keeps_dtype: bool
) -> tuple[Position, ...] | None:
    """Return the view of a tensor with `view` under the operator `name`, which gives it this shape; None for an operator that computes."""
    if name in PERMUTATIONS:
        return permuted(view, _order(name, arguments, len(shape)))
    if name in EXPANSIONS:
        return expanded(view, shape)
    if name in _RESHAPES or (name in _CASTS and keeps_dtype):
        return reshaped(view, shape)
    return None


def _order(name: str, arguments: Mapping[str, Any], rank: int) -> list[int]:
    """Return the source position of each position of a permuted tensor."""
    order = list(range(rank))
    rest = list(arguments.values())[1:]
    if name == "permute":
        return [dim % rank for dim in rest[0]]
    if name in ("movedim", "moveaxis"):
        sources, targets = ([dim % rank for dim in ([argument] if isinstance(argument, int) else argument)] for argument in rest[:2])
        others = [dim for dim in order if dim not in sources]
        placed = dict(zip(targets, sources, strict=True))
        return [placed[dim] if dim in placed else others.pop(0) for dim in range(rank)]
    if name == "numpy_T":
        return order[::-1]
    first, second = (rank - 2, rank - 1) if name in ("t", "mT") else (rest[0] % max(rank, 1), rest[1] % max(rank, 1))
    if rank > 1:
        order[first], order[second] = order[second], order[first]
    return order
