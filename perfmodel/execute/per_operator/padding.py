"""Padding of unevenly sharded sizes, so that all shards are equal: a vocabulary of 10 over 4 ranks becomes 12.

The padding has no effect: rows of a table that are never indexed, columns of logits that the loss leaves out, zeros elsewhere.
A run issues the traffic of the padded network. If all sizes are divisible, it is the network itself.
"""

from __future__ import annotations

from dataclasses import replace
from math import lcm

from perfmodel.foundation.disjoint_sets import DisjointSets
from perfmodel.parallel.plan import Plan
from perfmodel.workload.graph import Graph


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
    operators = []
    for operator in network.operators:
        dims = {dim: padded((operator.name, dim), size) for dim, size in operator.dims.items()}
        if dims != dict(operator.dims):  # its work is not updated, as it is not used here
            extents = [
                tuple((dims[dim] if dim and size == operator.dims[dim] else size, dim) for size, dim in entry.extent)
                for entry in operator.traffic
            ]
            traffic = tuple(replace(entry, extent=extent) for entry, extent in zip(operator.traffic, extents, strict=True))
            operator = replace(operator, dims=dims, traffic=traffic)
        operators.append(operator)
    return replace(network, operators=tuple(operators), tensors=tensors)


def _same_sizes(network: Graph) -> dict[tuple[str, str | int], tuple[str, str | int]]:
    """Map dims of operators and positions of tensors to one representative for all that must be padded to the same size."""
    joined = DisjointSets[tuple[str, str | int]]((operator.name, dim) for operator in network.operators for dim in operator.dims)
    for operator in network.operators:
        for operand in (*operator.inputs, operator.output):
            for position, dim in enumerate(operand.dims):
                if dim:
                    joined.join((operator.name, dim), (f"tensor {operand.tensor}", position))
    return joined.representatives()
