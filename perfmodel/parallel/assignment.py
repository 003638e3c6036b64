"""Which axes cut which dim of each operator of a plan's model: whether two rule sets say the same."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING

from perfmodel.parallel.algebra.rules import RuleSet
from perfmodel.workload.config import TransformerConfig
from perfmodel.workload.transformer import build_graph

if TYPE_CHECKING:
    from perfmodel.parallel.plan import Plan


def cuts_alike(plan: Plan, rules: RuleSet, axes: frozenset[str]) -> bool:
    """Whether the plan's operators are cut as `rules` would cut them, where only these fine axes have more than one rank."""
    model = plan.job.transformer
    if plan.rules.operators or rules.operators:
        dims = _dims(model, str(plan.attention))
        return all(_among(plan.rules.cut(*dim), axes) == _among(rules.cut(*dim), axes) for dim in dims)
    return left_of_model(plan.rules, model, axes) == left_of_model(rules, model, axes)


def left_of_model(rules: RuleSet, model: TransformerConfig, axes: frozenset[str]) -> Mapping[str, tuple[str, ...]]:
    """What the rules cut of this model where only these fine axes have more than one rank."""
    return {name: cut for name, cut in rules.among(axes).items() if name != "positions" or model.position == "learned"}


def _among(cut: tuple[str, ...], axes: frozenset[str]) -> tuple[str, ...]:
    return tuple(axis for axis in cut if axis in axes)


@lru_cache(maxsize=64)
def _dims(model: TransformerConfig, attention: str) -> tuple[tuple[str, str], ...]:
    """(operator, logical name of its dim) of every dim; neither sizes nor dtypes change them."""
    graph = build_graph(model, seq_len=1, attention=attention, dropout=True, activation_bytes=2.0, parameter_bytes=2.0)
    return tuple((operator.name, operator.logical_name(dim)) for operator in graph.operators for dim in operator.dims)
