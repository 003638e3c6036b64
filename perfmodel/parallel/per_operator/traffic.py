"""Every collective of one training step of a network under a plan, from layouts alone: what the cost model prices and the executor issues.

Forward, an edge redistributes what the producer leaves to what the reader needs; backward, the gradient of the reader's input to the layout
of the producer's output, partial replaced by replicated. A tensor with several readers goes by way of its held layout, once; a reader that
needs another layout than the held one redistributes from there by itself, and its gradient comes back there. A parameter's gradient is
all-reduced over the axes on which it is partial.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil

from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.parallel.algebra.sharding import Layout, gradient_layout, input_layout, output_layout, redistribute
from perfmodel.parallel.per_operator.plan import NetworkPlan, is_trained
from perfmodel.workload.graph import Extent, Graph, Pass, TensorRole


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkTraffic:
    """One collective, `repeats` times a step.

    num_elements   full buffer in the group; of an all-to-all the local buffer, of a send what is sent
    itemsize       bytes of an element; 0: that of activations, -1: that of gradients of parameters
    what           "edge", "own" or "gradient"
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


def network_traffic(network: Graph, plan: NetworkPlan) -> tuple[NetworkTraffic, ...]:
    """All collectives of a step, in the order of the operators; groups of one rank are left out."""
    return tuple(row for row in _all_rows(network, plan) if plan.size(row.axes) > 1)


def _all_rows(network: Graph, plan: NetworkPlan) -> Iterator[NetworkTraffic]:
    readers = network.readers()
    summed: dict[str, frozenset[str]] = {}
    for operator in network.operators:
        sharding = plan.shardings[operator.name]
        parts = {dim: plan.size(tuple(axes)) for dim, axes in sharding.items()}
        for own in operator.traffic:
            axes = frozenset(axis for dim in own.over for axis in sharding.get(dim, ()))
            yield NetworkTraffic(
                kind=own.kind,
                axes=axes,
                num_elements=local_elements(own.extent, parts),
                phase=own.phase,
                tensor=operator.output.tensor,
                operator=operator.name,
                what="own",
                repeats=own.repeats,
                itemsize=own.itemsize,
            )
        for operand in operator.inputs:
            if network.tensors[operand.tensor].role is TensorRole.PARAMETER:
                partial = gradient_layout(sharding, operand).partial
                summed[operand.tensor] = summed.get(operand.tensor, frozenset()) | partial
        tensor = operator.output.tensor
        left = output_layout(operator, sharding)
        reading = readers.get(tensor, [])
        if tensor in plan.held:
            held = plan.held[tensor]
            yield from _redistribution(network, plan, tensor, left, held.layout, Pass.FORWARD, operator.name)
            yield from _redistribution(network, plan, tensor, held.gradient, left.resolved(), Pass.BACKWARD, operator.name)
        for reader, position in reading:
            target = network.operators[reader]
            its = plan.shardings[target.name]
            needed = input_layout(its, target.inputs[position])
            gradient = gradient_layout(its, target.inputs[position])
            if tensor in plan.held:
                held = plan.held[tensor]
                yield from _redistribution(network, plan, tensor, held.layout, needed, Pass.FORWARD, target.name)
                goal = Layout(cuts=held.cuts, partial=held.partial & gradient.partial)
                yield from _redistribution(network, plan, tensor, gradient, goal, Pass.BACKWARD, target.name)
            else:
                yield from _redistribution(network, plan, tensor, left, needed, Pass.FORWARD, target.name)
                yield from _redistribution(network, plan, tensor, gradient, left.resolved(), Pass.BACKWARD, target.name)
    for name, partial in summed.items():
        yield _gradient_reduction(network, plan, name, partial, readers)


def _gradient_reduction(
    network: Graph, plan: NetworkPlan, name: str, partial: frozenset[str], readers: Mapping[str, list[tuple[int, int]]]
) -> NetworkTraffic:
    """Of the first reader's layout: readers of one parameter need it in one layout (`check_plan`)."""
    index, position = readers[name][0]
    operator = network.operators[index]
    layout = input_layout(plan.shardings[operator.name], operator.inputs[position])
    return NetworkTraffic(
        kind=CollectiveKind.ALL_REDUCE,
        axes=partial,
        num_elements=elements_of(network.tensors[name].shape, layout, plan),
        phase=Pass.BACKWARD,
        tensor=name,
        operator=operator.name,
        what="gradient",
        itemsize=-1.0,
    )


def _redistribution(
    network: Graph, plan: NetworkPlan, tensor: str, source: Layout, target: Layout, phase: Pass, operator: str
) -> Iterator[NetworkTraffic]:
    if not is_trained(network, tensor):
        return
    shape = network.tensors[tensor].shape
    for step in redistribute(source, target):
        # an all-to-all counts the local buffer; the others what the axes that remain leave of the tensor
        remaining = plan.size(step.remaining)
        total = 1.0
        for size in shape:
            total *= size
        yield NetworkTraffic(
            kind=step.kind,
            axes=step.axes,
            num_elements=total / remaining,
            phase=phase,
            tensor=tensor,
            operator=operator,
            what="edge",
        )


def elements_of(shape: tuple[int, ...], layout: Layout, plan: NetworkPlan) -> float:
    """Of one rank's share; uneven shares are padded to the largest."""
    total = 1.0
    for size, axes in zip(shape, layout.cuts, strict=True):
        total *= ceil(size / plan.size(tuple(axes)))
    return total


def local_elements(extent: Extent, parts: Mapping[str, int]) -> float:
    """Elements of an extent on one rank."""
    total = 1.0
    for size, dim in extent:
        total *= ceil(size / parts.get(dim, 1))
    return total
