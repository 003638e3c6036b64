"""The whole prediction of a plan whose operators have shardings of their own: step time with what hides, memory with activations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from perfmodel.cost.estimate import Estimator
from perfmodel.cost.program import compile_program
from perfmodel.errors import bad_field
from perfmodel.memory_room import DEFAULT_HEADROOM
from perfmodel.parallel.derive import derive
from perfmodel.parallel.layout import Recompute
from perfmodel.parallel.plan import Plan
from perfmodel.parallel.prediction import Prediction
from perfmodel.parallel.rules import list_rule_sets
from perfmodel.parallel.sharding import AXIS_PARTS, FINE_AXES, Sharding
from perfmodel.planner.operator_mesh import OperatorMesh
from perfmodel.planner.operators import search_operators

#: Shares of gradient reductions that are taken to show: what shows in truth is a maximum, which no sum over operators is.
_SHARES = (0.0, 0.5, 1.0)


def mesh_of(plan: Plan) -> OperatorMesh:
    """The mesh of a plan without a pipeline: its degrees, tp as tp_kv x tp_q, in its order."""
    layout = plan.layout
    if layout.pp > 1:
        raise bad_field("pp", layout.pp, "each operator is searched by itself on one stage", "use 1")
    order = [part for axis in plan.order if axis in AXIS_PARTS for part in reversed(AXIS_PARTS[axis])]
    kv_ranks = math.gcd(layout.tp, plan.job.model.num_key_value_heads)
    sizes = {"tp_kv": kv_ranks, "tp_q": layout.tp // kv_ranks}
    return OperatorMesh(sizes={axis: sizes[axis] if axis in sizes else layout.degree(axis) for axis in FINE_AXES}, order=tuple(order))


def predicted_operators(estimator: Estimator, plan: Plan, *, memory_headroom: float = DEFAULT_HEADROOM) -> tuple[Prediction, ...]:
    """Whole predictions of what the per-operator search finds on the mesh of `plan`, and of the rule sets, best first: those that fit,
    by time, then those that do not, by memory."""
    if plan.recompute is not Recompute.NONE:
        raise bad_field("recompute", plan.recompute, "the per-operator search prices steps without recomputation", "use none")
    mesh = mesh_of(plan)
    candidates: dict[str, Mapping[str, Sharding]] = {}
    for share in _SHARES:
        found = search_operators(
            estimator, mesh, micro_batch=plan.micro_batch, zero=int(plan.zero), attention=plan.attention, least_exposed=share
        )
        candidates[f"per-operator, {share:.0%} of reductions shown"] = found.plan.shardings
        candidates |= {f"{rules.name} (rule set)": rules.shardings for rules in found.rule_sets}
    predictions = [
        predict_shardings(estimator, plan, shardings, name=name, memory_headroom=memory_headroom) for name, shardings in candidates.items()
    ]
    return tuple(sorted(predictions, key=lambda p: (not p.fits, p.step_time if p.fits else p.memory["total"])))


def predict_shardings(
    estimator: Estimator,
    plan: Plan,
    shardings: Mapping[str, Sharding],
    *,
    name: str = "per-operator",
    memory_headroom: float = DEFAULT_HEADROOM,
) -> Prediction:
    """`plan` with these shardings in the place of its rule set; its degrees and order are the mesh, tp being tp_kv x tp_q.

    The estimator that is given stays as it is.
    """
    if name in list_rule_sets():
        raise bad_field("name", name, "is that of a shipped rule set", "use another")
    program = compile_program(
        derive(estimator.graph(plan.attention), shardings),
        estimator.profile,
        recompute_operators=plan.recompute_operators,
        attention_kernel=str(plan.attention),
    )
    own = replace(estimator, programs={(name, plan.attention, plan.recompute_operators): program}, parameter_programs={})
    return own.predict(replace(plan, rule_set=name), memory_headroom=memory_headroom)
