"""The fastest sharding of every operator whose weights, gradients and optimizer state fit, with proof (`search/constrained.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.estimate import Estimator
from perfmodel.cost.memory import static_memory
from perfmodel.cost.parameters import compile_parameters, parameter_cost
from perfmodel.cost.step import Stages, parameter_terms
from perfmodel.errors import bad_field
from perfmodel.parallel.layout import AttentionKernel
from perfmodel.parallel.parameters import stored_rows, zero_axes
from perfmodel.planner.operator_mesh import OperatorMesh
from perfmodel.planner.operator_parameters import parameter_layout
from perfmodel.planner.operator_space import parameters_of
from perfmodel.planner.operator_tables import OperatorTables
from perfmodel.planner.operators import OperatorPlan, plan_of, program_of, tables_of
from perfmodel.search import eliminate, eliminate_within
from perfmodel.units import format_bytes

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class FittingPlan:
    """The fastest within a limit: no other that fits takes less time than `lower_bound`, up to rounding.

    state_bytes: weights, gradients and optimizer state of one chip; price: seconds of a microbatch for a byte more, at the limit.
    """

    plan: OperatorPlan
    state_bytes: float
    price: float
    lower_bound: float
    num_searches: int

    @property
    def gap(self) -> float:
        """How far the time may be from the least that fits, as a share of it: 0 unless the search ran out of time."""
        return max(0.0, 1.0 - self.lower_bound / self.plan.time)


def fit_operators(
    estimator: Estimator,
    mesh: OperatorMesh,
    *,
    state_limit: float,
    micro_batch: int = 1,
    zero: int = 0,
    attention: AttentionKernel = AttentionKernel.FLASH,
    least_exposed: float = 0.0,
) -> FittingPlan:
    """The fastest whose weights, gradients and optimizer state take at most `state_limit` bytes of a chip."""
    tables = tables_of(estimator, mesh, micro_batch=micro_batch, zero=zero, attention=attention, least_exposed=least_exposed)
    held = state_bytes(estimator, tables, zero=zero, attention=attention)
    return fit_tables(tables, held, state_limit=state_limit)


def fit_tables(tables: OperatorTables, held: Sequence[Array], *, state_limit: float) -> FittingPlan:
    """The same on given tables. held: bytes of each configuration of each vertex."""
    allowed = [(u, v, np.where(np.isinf(matrix), np.inf, 0.0)) for u, v, matrix in tables.edges]
    least = eliminate(held, allowed).cost
    if not least <= state_limit:
        rule = f"no choice holds less than {format_bytes(least)}"
        raise bad_field("state_limit", format_bytes(state_limit), rule, "use a larger mesh or ZeRO stage")
    found = eliminate_within(tables.vertex_costs, tables.edges, held, state_limit)
    plan = plan_of("per-operator", tables, found.choice)
    return FittingPlan(
        plan=plan,
        state_bytes=found.weight,
        price=found.price,
        lower_bound=plan.time if found.is_proved else min(found.lower_bound, plan.time),
        num_searches=1 + found.num_searches,
    )


def state_bytes(estimator: Estimator, tables: OperatorTables, *, zero: int, attention: AttentionKernel) -> list[Array]:
    """Weights, gradients and optimizer state of the parameters that each vertex is the first to read, all layers together. [byte]"""
    space = tables.space
    graph, mesh = space.graph, space.mesh
    whole, sharded = _bytes_of_an_element(estimator, tables, zero=zero, attention=attention)
    held = [np.zeros(len(costs)) for costs in tables.vertex_times]
    for vertex, own in zip(space.vertices, held, strict=False):
        for op in vertex.operators:
            layers = graph.num_layers if op.region == "layer" else 1
            for i in parameters_of(graph, op):
                if graph.consumers(op.inputs[i].tensor)[0] != (op, i):
                    continue
                for c, sharding in enumerate(vertex.shardings):
                    parameter = parameter_layout(graph, op, i, sharding, (op.region,))
                    rows = np.ceil(parameter.num_rows / mesh.size(parameter.row_axes))
                    columns = parameter.num_columns / mesh.size(parameter.column_axes)
                    shard = stored_rows(rows, mesh.size(zero_axes(parameter))) * columns
                    own[c] += layers * float(rows * columns * whole + shard * sharded)
    return held


def _bytes_of_an_element(estimator: Estimator, tables: OperatorTables, *, zero: int, attention: AttentionKernel) -> tuple[float, float]:
    """What a chip holds for each element that it has whole and for each of its ZeRO shard: `static_memory` of one element. [byte]"""
    sizes, profile, mesh = estimator.sizes, estimator.profile, tables.space.mesh
    choice = tuple(int(np.argmin(costs)) for costs in tables.vertex_times)
    program = program_of(estimator, tables.space.shardings(_possible(tables, choice)), attention)
    compiled = compile_parameters(
        program.parameters, profile, zero=zero, pipelined=False, parameter_bytes=sizes.gathered, gradient_bytes=sizes.reduced
    )
    grid = mesh.grid(estimator.machine.tier_sizes)
    terms = parameter_terms(compiled, parameter_cost(compiled, profile, estimator.machine, grid))
    stages = Stages(first=1.0, middle=0.0, last=1.0, total=1.0, is_single=1.0)
    none, one = (0.0, 0.0, 0.0), (0.0, 1.0, 0.0)
    replicas = float(mesh.size(("dp_replicate", "dp_shard", "cp")))
    # where weights are stored as shards, their gradients come with the first backward pass and stay as shards
    late = sizes.sharded_gradient if compiled.holds_sharded_weights else 0.0

    def held(full: tuple[float, ...], shard: tuple[float, ...]) -> float:
        unit = replace(terms, full=full, shard=shard, tied=(0.0, 0.0))
        return float(sum(static_memory(unit, stages, sizes, num_replicas=replicas)[0][:3]))

    return held(one, none), held(none, one) + late


def _possible(tables: OperatorTables, choice: Sequence[int]) -> tuple[int, ...]:
    """Any choice without a forbidden pair."""
    costs = [np.where(np.arange(len(own)) == index, 0.0, 1.0) for own, index in zip(tables.vertex_times, choice, strict=True)]
    allowed = [(u, v, np.where(np.isinf(matrix), np.inf, 0.0)) for u, v, matrix in tables.edges]
    return eliminate(costs, allowed).choice
