"""An assignment: which mesh axes cut which dim of each operator, where no rule set says it for all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from perfmodel.foundation.errors import InputError, one_line, shown, suggest
from perfmodel.parallel.algebra.sharding import Held, Sharding
from perfmodel.parallel.per_operator.plan import MeshAxis
from perfmodel.workload.config import MAX_SIZE


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """axes: of one stage's chips, outermost first; shardings: operator -> dim -> axes, outermost first; held: tensors with several readers.

    stages   of a pipeline: the first operator of each stage; empty for one stage
    """

    axes: tuple[MeshAxis, ...]
    shardings: Mapping[str, Sharding]
    held: Mapping[str, Held] = field(default_factory=dict)
    stages: tuple[str, ...] = ()

    def __hash__(self) -> int:
        shardings = frozenset((name, frozenset(cuts.items())) for name, cuts in self.shardings.items())
        return hash((self.axes, shardings, frozenset(self.held.items()), self.stages))

    @property
    def num_stages(self) -> int:
        return max(1, len(self.stages))

    @property
    def num_chips(self) -> int:
        """Of one stage."""
        return prod(axis.size for axis in self.axes)

    def size(self, names: frozenset[str] | tuple[str, ...]) -> int:
        """Ranks of the group over these axes."""
        return prod(axis.size for axis in self.axes if axis.name in names)

    def to_dict(self) -> dict[str, Any]:
        """What a plan's file holds; an operator that nothing cuts has an empty map."""
        return {
            "axes": [{"name": axis.name, "size": axis.size, "tier": axis.tier} for axis in self.axes],
            "stages": list(self.stages),
            "shardings": {name: {dim: list(axes) for dim, axes in cuts.items() if axes} for name, cuts in self.shardings.items()},
            "held": {name: {"cuts": [list(cut) for cut in held.cuts], "partial": sorted(held.partial)} for name, held in self.held.items()},
        }


def assignment_from_dict(data: Any, *, where: str = "assignment") -> Assignment:
    """The assignment of a file's contents. Raises InputError naming the field."""
    if not isinstance(data, Mapping):
        raise InputError(f"{where}: must be a mapping; {_REMEDY}")
    for key in data:
        if key not in _KEYS:
            raise InputError(f"{where}: unknown field {shown(key)}{suggest(one_line(key), _KEYS)}; remove it or correct it")
    within = f"{where}: axes"
    return Assignment(
        axes=tuple(
            MeshAxis(
                name=_of(axis, "name", str, within),
                size=_count(axis, "size", within, least=1),
                tier=_count(axis, "tier", within, least=0),
            )
            for axis in _list(data, "axes", where)
        ),
        shardings={
            str(name): {str(dim): _names(cut, f"{where}: shardings.{name}.{dim}") for dim, cut in _map(cuts, "", where).items()}
            for name, cuts in _map(data, "shardings", where).items()
        },
        held={
            str(name): Held(
                cuts=tuple(_names(cut, f"{where}: held.{name}.cuts") for cut in _list(held, "cuts", f"{where}: held.{name}")),
                partial=frozenset(_names(held.get("partial", []), f"{where}: held.{name}.partial")),
            )
            for name, held in _map(data.get("held", {}), "", where).items()
        },
        stages=_names(data.get("stages", []), f"{where}: stages"),
    )


_KEYS = ("axes", "shardings", "held", "stages")
_REMEDY = "write it with `perfmodel shard ... --save`"


def _map(data: Any, key: str, where: str) -> Mapping[Any, Any]:
    value = data.get(key) if key and isinstance(data, Mapping) else data
    if not isinstance(value, Mapping):
        raise InputError(f"{where}: {key or 'entry'}={shown(value)}: must be a mapping; {_REMEDY}")
    return value


def _list(data: Any, key: str, where: str) -> list[Any]:
    value = data.get(key) if isinstance(data, Mapping) else None
    if not isinstance(value, list):
        raise InputError(f"{where}: {key}={shown(value)}: must be a list; {_REMEDY}")
    return value


def _of(data: Any, key: str, kind: type, where: str) -> Any:
    value = data.get(key) if isinstance(data, Mapping) else None
    if not isinstance(value, kind) or isinstance(value, bool):
        raise InputError(f"{where}: {key}={shown(value)}: must be a {'whole number' if kind is int else 'text'}; correct it")
    return value


def _count(data: Any, key: str, where: str, *, least: int) -> int:
    value: int = _of(data, key, int, where)
    if not least <= value <= MAX_SIZE:
        raise InputError(f"{where}: {key}={shown(value)}: must be {least} to {MAX_SIZE}; correct it")
    return value


def _names(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise InputError(f"{where}={shown(value)}: must be a list of names; write it as [a, b]")
    return tuple(value)
