"""Rule sets: sharding strategies as maps from logical names of dims to mesh axes (docs/rules.md, strategies/rules/*.yaml)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

from perfmodel.foundation.errors import InputError, bad_field, one_line, shown, suggest
from perfmodel.foundation.resources import resource_dir
from perfmodel.foundation.session import session_cache
from perfmodel.foundation.values import check_path
from perfmodel.parallel.algebra.folding import REFINED
from perfmodel.parallel.algebra.sharding import AXIS_PARTS, TENSOR_AXES, Sharding
from perfmodel.workload.graph import Graph, Operator

#: The dim that shards experts over ranks; a graph that has it uses finer axes (`folding.py`).
EXPERTS = "experts"
#: Rule sets to which old plan files and the sequence-parallel switch refer.
MEGATRON, MEGATRON_SP = "megatron", "megatron-sp"

#: The first operator of a layer, where a pipeline may be split.
_BOUNDARY = "block_input"


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleSet:
    """Sharding rules by the logical name of a dim.

    rules       logical name of a dim -> fine axes that shard it, outermost first; other dims are not sharded
    operators   name of an operator -> rules for its dims that override `rules`
    cuts        every (dim, axes) of the rules, for all operators and for single ones
    axes, key   fine axes that the rules use; hash, the key of cached programs and conditions
    scatters_residual   the residual stream, and with it a pipeline send, is sharded over tp: sequence parallelism
    """

    name: str
    rules: Mapping[str, tuple[str, ...]]
    source: str = field(compare=False)
    operators: Mapping[str, Mapping[str, tuple[str, ...]]] = field(default_factory=dict)
    cuts: tuple[tuple[str, tuple[str, ...]], ...] = field(init=False, compare=False, repr=False)
    axes: frozenset[str] = field(init=False, compare=False, repr=False)
    key: int = field(init=False, compare=False, repr=False)
    scatters_residual: bool = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "cuts", (*self.rules.items(), *chain.from_iterable(of.items() for of in self.operators.values())))
        object.__setattr__(self, "axes", frozenset(axis for _, axes in self.cuts for axis in axes))
        operators = frozenset((name, frozenset(cuts.items())) for name, cuts in self.operators.items())
        object.__setattr__(self, "key", hash((self.name, frozenset(self.rules.items()), operators)))
        residual = {*self.cut(_BOUNDARY, "s_res"), *self.cut(_BOUNDARY, "hidden")}
        object.__setattr__(self, "scatters_residual", not TENSOR_AXES.isdisjoint(residual))

    def __hash__(self) -> int:
        return self.key

    def sharding(self, operator: Operator) -> dict[str, tuple[str, ...]]:
        """Return dims of this operator -> fine axes; `derive` checks them."""
        rules, logical = self.rules_of(operator.name_in_layer) if self.operators else self.rules, operator.roles.logical
        return {dim: axes for dim in operator.dims if (axes := rules.get(logical.get(dim, dim)))}

    def rules_of(self, operator: str) -> Mapping[str, tuple[str, ...]]:
        """Return the rules for this operator."""
        overrides = self.operators.get(operator)
        return self.rules if overrides is None else {**self.rules, **overrides}

    def cut(self, operator: str, logical: str) -> tuple[str, ...]:
        """Return the axes that shard this dim of this operator."""
        return self.rules_of(operator).get(logical, ())

    def _anywhere(self, logical: str) -> frozenset[str]:
        return frozenset(axis for name, axes in self.cuts if name == logical for axis in axes)

    @property
    def cuts_queries(self) -> bool:
        """Whether attention shards the queries of a sequence over cp; else each rank has all queries, of some heads or of all."""
        return "cp" in self._anywhere("s_query")

    @property
    def exchanges_heads(self) -> bool:
        """Whether attention is sharded by heads over cp (Ulysses)."""
        return "cp" in self._anywhere("attn_kv_heads")

    def among(self, axes: frozenset[str]) -> Mapping[str, tuple[str, ...]]:
        """Return the rules over these fine axes, the only ones with several ranks. Rule sets with the same result give the same plan."""
        return _among(self, axes)

    def to_dict(self) -> dict[str, Any]:
        """Return the contents of its file; adjacent parts of an axis are written as that axis."""

        def written(cuts: Mapping[str, tuple[str, ...]]) -> dict[str, list[str]]:
            return {name: _whole_axes(axes) for name, axes in cuts.items()}

        operators = {"operators": {name: written(cuts) for name, cuts in self.operators.items()}} if self.operators else {}
        return {"name": self.name, "source": self.source, "rules": written(self.rules), **operators}


@session_cache(maxsize=1024)
def _among(rules: RuleSet, axes: frozenset[str]) -> Mapping[str, tuple[str, ...]]:
    kept = {name: tuple(axis for axis in cut if axis in axes) for name, cut in rules.rules.items()}
    result = {name: cut for name, cut in kept.items() if cut}
    for operator, overrides in rules.operators.items():
        for name, cut in overrides.items():
            left = tuple(axis for axis in cut if axis in axes)
            if left != kept.get(name, ()):
                result[f"{operator}.{name}"] = left
    return result


def _whole_axes(axes: tuple[str, ...]) -> list[str]:
    parts = AXIS_PARTS["tp"]
    for i in range(len(axes) - 1):
        if axes[i : i + 2] == parts:
            return [*axes[:i], "tp", *_whole_axes(axes[i + 2 :])]
    return list(axes)


def rule_set_from_dict(data: Any, *, where: str = "rule set", default_name: str = "", is_shipped: bool = False) -> RuleSet:
    """Return the rule set of a file's contents. Raises InputError with all its faults."""
    if not is_shipped:
        from perfmodel.foundation.schema import check
        from perfmodel.parallel.schemas import RuleSetFile

        check(RuleSetFile, data, where=where)
    operators = {operator: _fine_cuts(cuts, f"{where}: operators.{operator}") for operator, cuts in data.get("operators", {}).items()}
    rules = _fine_cuts(data["rules"], f"{where}: rules")
    return RuleSet(name=data.get("name", default_name), rules=rules, source=data.get("source", ""), operators=operators)


def _fine_cuts(cuts: Mapping[str, list[str]], where: str) -> dict[str, tuple[str, ...]]:
    fine_cuts = {dim: tuple(part for axis in axes for part in AXIS_PARTS[axis]) for dim, axes in cuts.items()}
    for dim, fine in fine_cuts.items():
        if len(set(fine)) != len(fine):
            raise InputError(f"{where}.{dim}={shown(cuts[dim])}: an axis may occur once; remove the repetition")
    return fine_cuts


def list_rule_sets() -> list[str]:
    """Return the names of the shipped rule sets."""
    return list(_names())


@lru_cache(maxsize=1)
def _names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in (resource_dir("strategies") / "rules").glob("*.yaml")))


@lru_cache(maxsize=64)
def _shipped(name: str) -> RuleSet:
    from perfmodel.foundation.files import read_yaml

    path = resource_dir("strategies") / "rules" / f"{name}.yaml"
    return rule_set_from_dict(read_yaml(path), where=str(path), is_shipped=True)


def load_rule_set(name: str | Path) -> RuleSet:
    """Return a shipped rule set by name, or a user's from its file, checked on models of every architecture (`rule_faults.py`)."""
    from perfmodel.foundation.files import read_yaml

    check_path(name, "rules")
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        known = list_rule_sets()
        if str(name) not in known:
            remedy = suggest(one_line(name), known)
            # without a name that is alike it would list all, as the message does
            near = remedy.rstrip("?") + "?" if "did you mean" in remedy else ""
            raise InputError(f"rules={one_line(name, 200)}: not known{near}; use one of {', '.join(known)}, or the path of a file (.yaml)")
        return _shipped(str(name))
    if not os.path.exists(path):  # pathlib raises for a name too long or a folder that may not be entered
        raise InputError(f"rules={one_line(name, 200)}: no such file; give the path of a rule set, or one of {', '.join(list_rule_sets())}")
    rules = rule_set_from_dict(read_yaml(path), where=str(path), default_name=path.stem)
    if rules.name in list_rule_sets() and (rules.operators or rules.rules != _shipped(rules.name).rules):
        raise InputError(f"{path}: name={rules.name}: is that of a shipped rule set with other rules; give yours a name of its own")
    return check_rule_set(rules, where=str(path))


def check_rule_set(rules: RuleSet, *, where: str) -> RuleSet:
    """Return the rule set if models of every architecture support it. Raises InputError with all its faults."""
    from perfmodel.foundation.files import listed
    from perfmodel.parallel.algebra.rule_faults import faults_of

    faults = faults_of(rules)
    if faults:
        raise InputError(f"{where}: {listed(faults)}")
    return rules


def rule_set_of(value: object) -> RuleSet:
    """Return a rule set: the given one, or the one with that name or in that file."""
    if isinstance(value, RuleSet):
        return value
    if not isinstance(value, (str, Path)):
        raise bad_field("rules", shown(value), "must be a name, a path or a RuleSet", f"use one of {', '.join(list_rule_sets())}")
    return load_rule_set(value)


def is_shipped(rules: RuleSet) -> bool:
    """Return whether the rule set equals the shipped one of that name."""
    return rules.name in _names() and _shipped(rules.name).rules == rules.rules and not rules.operators


@lru_cache(maxsize=1)
def default_rule_sets() -> tuple[RuleSet, RuleSet]:
    """Return tensor parallelism without and with sequence parallelism: the defaults of a plan and of a search."""
    return _shipped(MEGATRON), _shipped(MEGATRON_SP)


def rule_labels(rules: RuleSet) -> str:
    """Return the name for output; "" for the two default rule sets, which sequence parallelism distinguishes."""
    return "" if rules in default_rule_sets() else rules.name


def check_agrees(rules: RuleSet, sequence_parallel: bool) -> None:
    """Refuse a sequence-parallel switch that contradicts the rules."""
    if rules.scatters_residual == sequence_parallel:
        return
    does = "cuts" if rules.scatters_residual else "does not cut"
    pair = default_rule_sets()[sequence_parallel].name
    raise bad_field(
        "sequence_parallel",
        str(sequence_parallel).lower(),
        f"the rule set {rules.name} {does} the residual stream (s_res) by tp",
        f"leave out one of the two, or use rules={pair}",
    )


def apply_rules(graph: Graph, rules: RuleSet) -> dict[str, Sharding]:
    """Return a sharding for every operator of the graph, by name; the axes of a graph with experts are finer."""
    shardings, has_experts = dict[str, Sharding](), False
    for operator in graph.operators:
        shardings[operator.name] = rules.sharding(operator)
        has_experts = has_experts or EXPERTS in operator.roles.logical.values()
    for name, sharding in shardings.items() if has_experts else ():
        shardings[name] = {dim: tuple(part for axis in axes for part in REFINED[axis]) for dim, axes in sharding.items()}
    return shardings
