"""Which axes cut which dim of each operator of a plan's model: whether two rule sets say the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perfmodel.foundation.dtypes import itemsize
from perfmodel.parallel.algebra.rules import RuleSet
from perfmodel.workload.transformer import build_graph

if TYPE_CHECKING:
    from perfmodel.parallel.plan import Plan


def cuts_alike(plan: Plan, rules: RuleSet, axes: frozenset[str]) -> bool:
    """Whether the plan's operators are cut as `rules` would cut them, where only these fine axes have more than one rank."""
    if plan.rules.operators or rules.operators:
        return _assignment(plan, plan.rules, axes) == _assignment(plan, rules, axes)
    return _of_model(plan, plan.rules, axes) == _of_model(plan, rules, axes)


def _of_model(plan: Plan, rules: RuleSet, axes: frozenset[str]) -> dict[str, tuple[str, ...]]:
    return {name: cut for name, cut in rules.among(axes).items() if name != "positions" or plan.job.model.position == "learned"}


def _assignment(plan: Plan, rules: RuleSet, axes: frozenset[str]) -> list[tuple[str, ...]]:
    policy = plan.job.policy
    graph = build_graph(
        plan.job.model,
        seq_len=plan.job.seq_len,
        attention=str(plan.attention),
        dropout=True,
        activation_bytes=itemsize(policy.compute),
        parameter_bytes=itemsize(policy.parameter),
    )
    dims = [(operator.name, operator.logical_name(dim)) for operator in graph.operators for dim in operator.dims]
    return [tuple(axis for axis in rules.cut(operator, dim) if axis in axes) for operator, dim in dims]
