"""Every collective of one training step of a network under a plan: what the cost model prices and the executor issues.

`derive` finds them from layouts alone, tensors with several readers by way of their held layouts; here their sizes are those of the plan's
mesh. A parameter's gradient is all-reduced over the axes on which it is partial.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.parallel.algebra.derive import ShardedGraph, Traffic, derive
from perfmodel.parallel.per_operator.assignment import Assignment
from perfmodel.parallel.plan import Plan
from perfmodel.workload.graph import Graph, Pass


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkTraffic:
    """One collective, `repeats` times a step.

    num_elements   full buffer in the group; of an all-to-all the local buffer, of a send what is sent
    itemsize       bytes of an element; 0: that of activations, -1: that of gradients of parameters
    what           "edge", "own" or "gradient"; of parameters in units also "weights", and "sum" of a gradient as it is made
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
    """Layouts, traffic and parameters of a network: tensors with several readers as they are held; if none is, as rule sets have them."""
    held = assignment.held if assignment.held or not network.shared() else None
    return derive(network, assignment.shardings, held=held, axes=[axis.name for axis in assignment.axes])


def network_traffic(network: Graph, plan: Plan) -> tuple[NetworkTraffic, ...]:
    """All collectives of a step, as they follow one another; groups of one rank are left out."""
    return traffic_on(plan, derive_assigned(network, plan.cuts))


def traffic_on(plan: Plan, derivation: ShardedGraph) -> tuple[NetworkTraffic, ...]:
    """`network_traffic` of what is derived already.

    Backward goes through the operators the other way; gradients of parameters are reduced after it.
    """
    graph = derivation.graph
    producers, readers = graph.producers(), graph.readers()
    index_of = {operator.name: index for index, operator in enumerate(graph.operators)}

    size = cache(plan.cuts.size)

    def turn(row: Traffic) -> tuple[bool, int, int]:
        """Order of an operator's traffic: its inputs, then its own, then its output's change to the layout that is held."""
        at = index_of[row.operator]
        then = 1 if row.is_own else 2 if producers[row.tensor] == at else 0
        return (True, -at, -then) if row.phase is Pass.BACKWARD else (False, at, then)

    issued = [
        NetworkTraffic(
            kind=row.kind,
            axes=row.axes,
            # what an edge moves in uneven shares is padded when it is run: priced by the mean
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
