"""Rule sets: a strategy written once, as a map from the logical names of dims to mesh axes (strategies/rules/*.yaml)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perfmodel.errors import InputError, one_line, shown, suggest
from perfmodel.parallel.sharding import AXIS_PARTS, Sharding, check_sharding
from perfmodel.resources import resource_dir
from perfmodel.values import check_path
from perfmodel.workload.operator import Graph, Operator

#: Logical names of dims that rule sets may speak of (R16). Experts and convolutions bring theirs with their operators.
LOGICAL_NAMES = (
    "batch", "s", "s_res", "s_query", "s_key", "hidden", "kv_heads", "q_per_kv", "kv_copies", "attn_kv_heads", "attn_q_per_kv",
    "head_dim", "ffn", "vocab_in", "vocab_out", "positions",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleSet:
    name: str
    rules: Mapping[str, tuple[str, ...]]
    source: str

    def sharding(self, operator: Operator) -> Sharding:
        """dims of this operator -> fine axes."""
        sharding = {dim.name: self.rules[dim.logical] for dim in operator.dims if self.rules.get(dim.logical)}
        check_sharding(operator, sharding)
        return sharding


def rule_set_from_dict(data: Any, *, where: str = "rule set", known_names: tuple[str, ...] = LOGICAL_NAMES) -> RuleSet:
    if not isinstance(data, Mapping) or not isinstance(data.get("rules"), Mapping):
        raise InputError(f"{where}: must be a mapping with name, source and rules; see strategies/rules for examples")
    for key in data:
        if key not in ("name", "source", "rules"):
            raise InputError(f"{where}: unknown field {shown(key)}; use name, source and rules")
    rules: dict[str, tuple[str, ...]] = {}
    for name, axes in data["rules"].items():
        if name not in known_names:
            others = f"{suggest(one_line(name), known_names)}; use one of {', '.join(known_names)}"
            raise InputError(f"{where}: unknown dim {shown(name)}{others}")
        if not isinstance(axes, list):
            raise InputError(f"{where}: {name}={shown(axes)}: must be a list of axes, outermost cut first; write [tp]")
        fine: list[str] = []
        for axis in axes:
            if not isinstance(axis, str) or axis not in AXIS_PARTS:
                raise InputError(f"{where}: {name}: axis {shown(axis)} is not known; use one of {', '.join(AXIS_PARTS)}")
            fine.extend(AXIS_PARTS[axis])
        if len(set(fine)) != len(fine):
            raise InputError(f"{where}: {name}={shown(axes)}: an axis may occur once; remove the repetition")
        rules[name] = tuple(fine)
    return RuleSet(name=str(data.get("name", "")), rules=rules, source=str(data.get("source", "")))


def list_rule_sets() -> list[str]:
    return sorted(path.stem for path in (resource_dir("strategies") / "rules").glob("*.yaml"))


def load_rule_set(name: str | Path) -> RuleSet:
    from perfmodel.files import read_yaml

    check_path(name, "rule_set")
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        path = resource_dir("strategies") / "rules" / f"{name}.yaml"
    if not os.path.exists(path):  # pathlib raises for a name too long or a folder that may not be entered
        known = list_rule_sets()
        raise InputError(f"rule_set={one_line(name, 200)}: not known{suggest(one_line(name), known)}; use one of {', '.join(known)}")
    return rule_set_from_dict(read_yaml(path), where=str(path))


def apply_rules(graph: Graph, rules: RuleSet) -> dict[str, Sharding]:
    """A sharding for every operator of the graph, by its name."""
    return {operator.name: rules.sharding(operator) for operator in graph.operators}
