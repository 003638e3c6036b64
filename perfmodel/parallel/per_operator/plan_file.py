"""Plans of networks as YAML: complete, readable, versioned, and read back exactly."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perfmodel.foundation.errors import InputError, bad_field, one_line, shown, suggest
from perfmodel.foundation.files import read_yaml
from perfmodel.foundation.resources import write_atomically
from perfmodel.foundation.values import check_path
from perfmodel.parallel.algebra.sharding import Held
from perfmodel.parallel.per_operator.plan import MeshAxis, NetworkPlan

KIND = "network"
SCHEMA_VERSION = 1

_SETTINGS = ("optimizer", "precision", "profile", "calibration")
_KEYS = {
    "schema_version", "kind", "network", "sizes", "inputs", "batch", "cluster", "axes", "shardings", "held", "stages", "num_microbatches",
    "zero", *_SETTINGS,
}  # fmt: skip


def network_plan_to_dict(plan: NetworkPlan) -> dict[str, Any]:
    """What the file holds; an operator that nothing cuts has an empty map."""
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": KIND,
        "network": plan.network,
        "sizes": {name: list(size) if isinstance(size, tuple) else size for name, size in plan.sizes.items()},
        "inputs": list(plan.inputs),
        "batch": plan.batch,
        "num_microbatches": plan.num_microbatches,
        "stages": list(plan.stages),
        "cluster": plan.cluster,
        "zero": plan.zero,
        **{name: str(getattr(plan, name)) for name in _SETTINGS},
        "axes": [{"name": axis.name, "size": axis.size, "tier": axis.tier} for axis in plan.axes],
        "shardings": {name: {dim: list(axes) for dim, axes in sharding.items() if axes} for name, sharding in plan.shardings.items()},
        "held": {name: {"cuts": [list(cut) for cut in held.cuts], "partial": sorted(held.partial)} for name, held in plan.held.items()},
    }


def network_plan_from_dict(data: Any, *, where: str = "plan") -> NetworkPlan:
    """The plan of a file's contents. Raises InputError naming the field."""
    if not isinstance(data, Mapping) or data.get("kind") != KIND:
        raise InputError(f"{where}: kind: must be {KIND}; write it with `perfmodel shard ... --save`")
    if data.get("schema_version") != SCHEMA_VERSION:
        version = data.get("schema_version")
        raise InputError(f"{where}: schema_version={shown(version)}: this perfmodel reads version {SCHEMA_VERSION}; search again and save")
    for key in data:
        if key not in _KEYS:
            raise InputError(f"{where}: unknown field {shown(key)}{suggest(one_line(key), sorted(_KEYS))}; remove it or correct it")
    axes = _list(data, "axes", where)
    settings = {name: _of(data, name, str, where) for name in _SETTINGS if name in data}
    return NetworkPlan(
        network=_of(data, "network", str, where),
        stages=_names(data.get("stages", []), f"{where}: stages"),
        num_microbatches=_of(data, "num_microbatches", int, where),
        sizes={str(name): tuple(size) if isinstance(size, list) else size for name, size in _map(data, "sizes", where).items()},
        inputs=_names(data.get("inputs", []), f"{where}: inputs"),
        batch=_of(data, "batch", int, where),
        zero=_of(data, "zero", int, where) if "zero" in data else 0,
        **settings,
        cluster=_of(data, "cluster", str, where),
        axes=tuple(
            MeshAxis(
                name=_of(axis, "name", str, f"{where}: axes"),
                size=_of(axis, "size", int, f"{where}: axes"),
                tier=_of(axis, "tier", int, f"{where}: axes"),
            )
            for axis in axes
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
            for name, held in _map(data, "held", where).items()
        },
    )


def _map(data: Any, key: str, where: str) -> Mapping[Any, Any]:
    value = data.get(key) if key and isinstance(data, Mapping) else data
    if not isinstance(value, Mapping):
        raise InputError(f"{where}: {key or 'entry'}={shown(value)}: must be a mapping; write it with `perfmodel shard ... --save`")
    return value


def _list(data: Any, key: str, where: str) -> list[Any]:
    value = data.get(key) if isinstance(data, Mapping) else None
    if not isinstance(value, list):
        raise InputError(f"{where}: {key}={shown(value)}: must be a list; write it with `perfmodel shard ... --save`")
    return value


def _of(data: Any, key: str, kind: type, where: str) -> Any:
    value = data.get(key) if isinstance(data, Mapping) else None
    if not isinstance(value, kind) or isinstance(value, bool):
        raise InputError(f"{where}: {key}={shown(value)}: must be a {'whole number' if kind is int else 'text'}; correct it")
    return value


def _names(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise InputError(f"{where}={shown(value)}: must be a list of names; write it as [a, b]")
    return tuple(value)


def read_network_plan(path: str | Path) -> NetworkPlan:
    """The plan in a file."""
    check_path(path, "plan")
    path = Path(path)
    if not os.path.isfile(path):  # pathlib raises for a name too long or a folder that may not be entered
        raise InputError(f"plan={one_line(path, 200)}: no such file; write one with `perfmodel shard ... --save plan.yaml`")
    return network_plan_from_dict(read_yaml(path), where=str(path))


def is_network_plan(path: str | Path) -> bool:
    """Whether a file says that it holds a plan of a network."""
    path = Path(path)
    try:
        if not path.is_file():
            return False
        data = read_yaml(path)
    except (InputError, OSError, ValueError):
        return False
    return isinstance(data, Mapping) and data.get("kind") == KIND


def write_network_plan(plan: NetworkPlan, path: str | Path) -> None:
    """Write a plan: to a temporary name, then renamed."""
    if not isinstance(plan, NetworkPlan):
        raise bad_field("plan", shown(plan), "must be a NetworkPlan", "read one, search one or make one")
    import yaml

    text = yaml.dump(network_plan_to_dict(plan), sort_keys=False, default_flow_style=None, width=120)
    write_atomically(Path(path), text)
