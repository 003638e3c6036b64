"""Collectives of parameters as a price of each operator: gathers, gradient reductions, publishing.

A framework joins the parameters of a layer into one collective. That is no sum over operators, so each parameter here pays its bytes at
the rate of a collective as large as its whole region's; what the plan found costs in truth is seen by predicting it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from perfmodel.cost.program import DATA_AXES
from perfmodel.parallel.derive import ParameterLayout
from perfmodel.parallel.parameters import ParameterEvent, is_one_end_unit, profile_events, stored_rows, zero_axes
from perfmodel.parallel.profile import ExecutionProfile
from perfmodel.parallel.sharding import FINE_AXES, Collective, Sharding, gradient_layout
from perfmodel.planner.operator_mesh import Prices
from perfmodel.workload.operator import Graph, Operator, TensorRole


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterTerms:
    """zero: ZeRO stage; num_microbatches: of a step; *_bytes: of an element, as gathered and as reduced.

    least_exposed: share of reductions that shows at least; 1 where they are longer than the backward pass that they hide under
    """

    zero: int
    num_microbatches: int
    parameter_bytes: float
    gradient_bytes: float
    least_exposed: float = 0.0


def parameter_layout(graph: Graph, op: Operator, index: int, sharding: Sharding, regions: tuple[str, ...]) -> ParameterLayout:
    """A parameter as this operator holds it."""
    operand = op.inputs[index]
    tensor = graph.tensors[operand.tensor]
    rows, columns = operand.dims[: tensor.num_rows], operand.dims[tensor.num_rows :]
    return ParameterLayout(
        name=operand.tensor,
        num_rows=op.size(rows),
        num_columns=op.size(columns),
        row_axes=frozenset(axis for dim in rows for axis in sharding.get(dim, ())),
        column_axes=frozenset(axis for dim in columns for axis in sharding.get(dim, ())),
        gradient_axes=gradient_layout(op, sharding, operand).partial,
        sum_axes=frozenset(),
        padded_rows=any(op.dim(dim).padded for dim in rows),
        regions=regions,
    )


def parameter_price(
    graph: Graph, op: Operator, index: int, sharding: Sharding, regions: tuple[str, ...], prices: Prices, terms: ParameterTerms
) -> float:
    """Exposed seconds of a parameter's collectives, for each microbatch."""
    parameter = parameter_layout(graph, op, index, sharding, regions)
    profile = prices.profile
    joins_ends = is_one_end_unit([parameter], zero=terms.zero, pipelined=False)
    events = profile_events(parameter, profile, zero=terms.zero, pipelined=False, joins_ends=joins_ends)
    local_rows = np.ceil(parameter.num_rows / prices.mesh.size(parameter.row_axes))
    columns = parameter.num_columns / prices.mesh.size(parameter.column_axes)
    ways = prices.mesh.size(zero_axes(parameter))
    shard = float(stored_rows(local_rows, ways) * columns)
    is_scattered = any(event.kind is Collective.REDUCE_SCATTER for event in events)
    time = 0.0
    for event in events:
        on_shard = is_scattered and event.kind is Collective.ALL_REDUCE and event.what != "sum"
        is_whole = terms.zero == 0 or event.what == "sum"
        elements = shard if on_shard else float(local_rows * columns) if is_whole else shard * ways
        itemsize = terms.parameter_bytes if event.dtype == "parameter" else terms.gradient_bytes
        num_bytes = elements * itemsize
        times = 1.0 if event.times == "microbatch" else 1.0 / terms.num_microbatches
        reference = max(num_bytes, _region_elements(graph, op.region) * itemsize / _parts(event.axes, prices))
        rate = prices.collective(event.kind, event.axes, reference) / reference
        time += rate * num_bytes * times * max(exposed_share(event, profile, zero=terms.zero), _least(event, terms))
    return time


def exposed_share(event: ParameterEvent, profile: ExecutionProfile, *, zero: int) -> float:
    """Share of a parameter collective that does not hide, where it is shorter than the compute beside it."""
    match event.what:
        case "gather_forward" | "gather_backward":
            return profile.compute_slowdown_under_communication if profile.prefetches_parameters else 1.0
        case "reduce" | "finish":
            if not profile.hides_reductions(zero):
                return 1.0
            once = profile.exposed_gradient_fraction if event.times == "step" else 0.0
            return once + profile.compute_slowdown_under_communication
    return 1.0


def _least(event: ParameterEvent, terms: ParameterTerms) -> float:
    return terms.least_exposed if event.what in ("reduce", "finish") else 0.0


def _region_elements(graph: Graph, region: str) -> float:
    """Elements of all parameters of a region."""
    total: dict[str, float] = {}
    for op in graph.operators:
        if op.region == region:
            for operand in op.inputs:
                if graph.tensors[operand.tensor].role is TensorRole.PARAMETER:
                    total[operand.tensor] = float(op.size(operand.dims))
    return sum(total.values())


def _parts(axes: frozenset[str], prices: Prices) -> int:
    """Ways in which weights are taken to be cut where their gradient is reduced over `axes`: all that is left of the model axes."""
    return prices.mesh.size(set(FINE_AXES) - DATA_AXES - axes)
