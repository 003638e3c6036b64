"""Padding of unevenly sharded sizes, so that all shards are equal: a vocabulary of 10 over 4 ranks becomes 12.

The padding has no effect: rows of a table that are never indexed, columns of logits that the loss leaves out, zeros elsewhere.
A run issues the traffic of the padded network. If all sizes are divisible, it is the network itself.
"""

from __future__ import annotations

from dataclasses import replace
from math import lcm

from perfmodel.foundation.disjoint_sets import DisjointSets
from perfmodel.parallel.plan import Plan
from perfmodel.workload.graph import Graph, Operator, OwnTraffic


def padded_network(network: Graph, plan: Plan) -> Graph:
    """Return the network with every unevenly sharded size rounded up to a multiple that suits all operators with that size."""
    classes = _same_sizes(network)
    parts: dict[object, int] = {}
    uneven: set[object] = set()
    for operator in network.operators:
        for dim, axes in plan.cuts.shardings[operator.name].items():
            number = plan.cuts.size(tuple(axes))
            root = classes[operator.name, dim]
            parts[root] = lcm(parts.get(root, 1), number)
            if dim in operator.roles.padded and operator.dims[dim] % number:
                uneven.add(root)
    if not uneven:
        return network

    def padded(key: tuple[str, str | int], size: int) -> int:
        root = classes.get(key)
        return -(-size // parts[root]) * parts[root] if root in uneven else size

    tensors = {
        name: replace(tensor, shape=tuple(padded((f"tensor {name}", position), size) for position, size in enumerate(tensor.shape)))
        for name, tensor in network.tensors.items()
    }
    operators = tuple(
        _resized(operator, {dim: padded((operator.name, dim), size) for dim, size in operator.dims.items()})
        for operator in network.operators
    )
    return replace(network, operators=operators, tensors=tensors)


def _same_sizes(network: Graph) -> dict[tuple[str, str | int], tuple[str, str | int]]:
    """Map dims of operators and positions of tensors to one representative for all that must be padded to the same size."""
    joined = DisjointSets[tuple[str, str | int]]((operator.name, dim) for operator in network.operators for dim in operator.dims)
    for operator in network.operators:
        for operand in (*operator.inputs, operator.output):
            for position, dim in enumerate(operand.dims):
                if dim:
                    joined.join((operator.name, dim), (f"tensor {operand.tensor}", position))
    return joined.representatives()


def _resized(operator: Operator, dims: dict[str, int]) -> Operator:
    """Return the operator with these dims and their traffic; its work is not updated, as it is not used here."""
    if dims == dict(operator.dims):
        return operator

    def resized(old: OwnTraffic) -> OwnTraffic:
        extent = tuple((dims[dim] if dim and size == operator.dims[dim] else size, dim) for size, dim in old.extent)
        return replace(old, extent=extent)

    return replace(operator, dims=dims, traffic=tuple(resized(entry) for entry in operator.traffic))
