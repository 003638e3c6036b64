"""Every collective of one training step of a network under a plan: the cost model prices them, the executor issues them.

`derive` derives them from layouts; tensors with several readers are redistributed through their held layouts. This module gives them sizes
on the plan's mesh. A parameter's gradient is all-reduced over the axes on which it is partial.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.parallel.algebra.derive import ShardedGraph, Traffic, derive
from perfmodel.parallel.per_operator.assignment import Assignment
from perfmodel.parallel.plan import Plan
from perfmodel.workload.graph import Graph
from perfmodel.workload.work import Pass


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkTraffic:
    """One collective, issued `repeats` times per step.

    num_elements   full buffer of the group; local buffer of an all-to-all; message of a send
    itemsize       bytes per element; 0: that of activations, -1: that of gradients of parameters
    what           "edge", "own" or "gradient"; of parameter units also "weights", and "sum" of a gradient before its reduce-scatter
    """

    kind: CollectiveKind
    axes: frozenset[str]
    num_elements: float
    phase: Pass
    tensor: str
    operator: str
    what: str
    repeats: int = 1
    itemsize: float = 0.0


def derive_assigned(network: Graph, assignment: Assignment) -> ShardedGraph:
    """Derive layouts, traffic and parameters of a network, with the assignment's held layouts; without any, as for rule sets."""
    held = assignment.held if assignment.held or not network.shared() else None
    return derive(network, assignment.shardings, held=held, axes=[axis.name for axis in assignment.axes])


def network_traffic(network: Graph, plan: Plan) -> tuple[NetworkTraffic, ...]:
    """Return all collectives of a step, in order; groups of one rank are left out."""
    return traffic_on(plan, derive_assigned(network, plan.cuts))


def traffic_on(plan: Plan, derivation: ShardedGraph) -> tuple[NetworkTraffic, ...]:
    """Return `network_traffic` of a derived graph.

    Backward runs the operators in reverse order; gradients of parameters are reduced after it.
    """
    graph = derivation.graph
    producers, readers = graph.producers(), graph.readers()
    index_of = {operator.name: index for index, operator in enumerate(graph.operators)}

    size = cache(plan.cuts.size)

    def turn(row: Traffic) -> tuple[bool, int, int]:
        """Return the order of an operator's traffic: its inputs, then its own, then its output's redistribution to the held layout."""
        at = index_of[row.operator]
        then = 1 if row.is_own else 2 if producers[row.tensor] == at else 0
        return (True, -at, -then) if row.phase is Pass.BACKWARD else (False, at, then)

    issued = [
        NetworkTraffic(
            kind=row.kind,
            axes=row.axes,
            # an edge with uneven shares is padded when it is run, but priced by the mean
            num_elements=row.elements.on(size) if row.is_own else row.elements.mean_on(size),
            phase=row.phase,
            tensor=row.tensor,
            operator=row.operator,
            what="own" if row.is_own else "edge",
            repeats=row.repeats,
            itemsize=row.itemsize,
        )
        for row in sorted((row for row in derivation.traffic if size(row.axes) > 1), key=turn)
    ]
    reduced = [
        NetworkTraffic(
            kind=CollectiveKind.ALL_REDUCE,
            axes=parameter.gradient_axes,
            num_elements=parameter.elements.on(size),
            phase=Pass.BACKWARD,
            tensor=parameter.name,
            operator=graph.operators[readers[parameter.name][0][0]].name,
            what="gradient",
            itemsize=-1.0,
        )
        for parameter in derivation.parameters
        if size(parameter.gradient_axes) > 1 and not parameter.is_frozen
    ]
    return (*issued, *reduced)
