"""Iteration spaces of torch operators (`aten_rules.py`): dims, the dims of each tensor, and the work."""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from perfmodel.workload.imported.graph import ImportedKind, Shape

Dims = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One operator call of the exported graph.

    tensors   shape of each tensor argument by its schema name, those of a list as `tensors.0`, `tensors.1`, ...
    values    other arguments, including defaults
    outputs   shapes of the returned tensors
    """

    name: str
    tensors: Mapping[str, Shape]
    values: Mapping[str, Any]
    outputs: tuple[Shape, ...]
    is_pointwise: bool = False

    @property
    def first(self) -> tuple[str, Shape]:
        """Name and shape of the first tensor argument."""
        return next(iter(self.tensors.items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationSpace:
    """Iteration space of a call: dims of each tensor argument, by the names in `Call.tensors`, and of each output."""

    kind: ImportedKind
    dims: Mapping[str, int]
    reads: Mapping[str, Dims]
    writes: tuple[Dims, ...]
    flops: float = 0.0
    reduced: Dims = ()
    unsplit: Dims = ()
    is_view: bool = field(default=False)


Rule = Callable[[Call], IterationSpace | None]
"""Rule from a call to its iteration space; None: the form of the call is unknown."""

_BY_RANK = {0: "", 1: "b", 2: "bd", 3: "bsd", 4: "bchw", 5: "bcuhw"}
_LEADS = "bstuvw"


def names_of(rank: int) -> Dims:
    return tuple(_BY_RANK.get(rank, string.ascii_lowercase[:rank]))


def named(shape: Shape) -> tuple[Dims, dict[str, int]]:
    """Return the names of a tensor's dims, and their sizes by name."""
    names = names_of(len(shape))
    return names, sizes_of(names, shape)


def lead_names(count: int) -> Dims:
    """Return names of leading dims, which no rule uses for other dims."""
    return tuple(_LEADS[:count]) if count <= len(_LEADS) else tuple(f"b{index}" for index in range(count))


def axis_of(value: Any, rank: int) -> int:
    return int(value) % rank if rank else 0


def axes_of(value: object, rank: int) -> tuple[int, ...]:
    """Return the positions that a reduction names; all if it names none."""
    if value is None or value == []:
        return tuple(range(rank))
    return tuple(axis_of(entry, rank) for entry in (value if isinstance(value, (list, tuple)) else [value]))


def sizes_of(names: Dims, shape: Shape) -> dict[str, int]:
    return dict(zip(names, shape, strict=True))


def aligned(shape: Shape, names: Dims, sizes: Mapping[str, int]) -> Dims:
    """Return a broadcast operand's dims: aligned at the last position, "" where it has one entry for several."""
    tail = names[len(names) - len(shape) :] if len(shape) <= len(names) else ("",) * (len(shape) - len(names)) + names
    return tuple(name if name and sizes[name] == size else "" for name, size in zip(tail, shape, strict=True))
