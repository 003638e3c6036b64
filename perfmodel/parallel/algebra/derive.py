"""The traffic of a sharded graph, derived from layouts alone: which collectives, over which axes, of how much.

Forward redistributes what a producer leaves to what its consumers need; backward is the same table applied to gradients;
parameters have their own layouts and lifetimes (R14) and are returned as such.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.foundation.errors import InputError
from perfmodel.parallel.algebra.sharding import (
    Layout,
    Sharding,
    Step,
    check_sharding,
    gradient_layout,
    input_layout,
    join_gradients,
    output_layout,
    redistribute,
    sliced_towards,
)
from perfmodel.workload.graph import Extent, Graph, Operator, Pass, TensorRole


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """A number of elements (or bytes) on one chip as a formula of the mesh and the microbatch.

    base * microbatch^per_sample * ceil(padded_size / |padded_axes|) / |axes|
    """

    base: float
    per_sample: bool = False
    axes: frozenset[str] = frozenset()
    padded_size: float = 1.0
    padded_axes: frozenset[str] = frozenset()

    def scaled(self, factor: float) -> Amount:
        return Amount(
            base=self.base * factor, per_sample=self.per_sample, axes=self.axes, padded_size=self.padded_size, padded_axes=self.padded_axes
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """One collective, once a microbatch (and once a layer in the layer region). `amount`: full buffer in the group, in bytes."""

    kind: CollectiveKind
    axes: frozenset[str]
    amount: Amount
    region: str
    phase: Pass
    tensor: str
    operator: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterLayout:
    """A parameter as its operators hold it, before any ZeRO cut.

    num_rows, num_columns   of the stored matrix; row_axes, column_axes: what cuts them in the operator (tensor parallelism)
    gradient_axes           axes on which its gradient is partial after a microbatch: the group of the gradient reduction
    sum_axes                of the bias of a linear: axes over which the linear's output is summed before the bias is added
    regions                 where it is used; more than one: tied
    is_end, is_last         used by the graph's first and last region alone, which are no blocks; by the last one
    """

    name: str
    num_rows: int
    num_columns: int
    row_axes: frozenset[str]
    column_axes: frozenset[str]
    gradient_axes: frozenset[str]
    sum_axes: frozenset[str]
    regions: tuple[str, ...]
    is_end: bool = False
    is_last: bool = False

    @property
    def num_elements(self) -> int:
        return self.num_rows * self.num_columns


@dataclass(frozen=True, slots=True, kw_only=True)
class Derivation:
    graph: Graph
    shardings: Mapping[str, Sharding]
    traffic: tuple[Traffic, ...]
    parameters: tuple[ParameterLayout, ...]
    needed: Mapping[tuple[str, int], Layout]
    """Layout of each operator's input as it computes with it."""
    left: Mapping[str, Layout]
    """Layout of each tensor as its producer leaves it."""


def amount_of(operator: Operator, sharding: Sharding, dims: tuple[str, ...], *, scale: float = 1.0) -> Amount:
    """Local elements over `dims` under the sharding."""
    return extent_amount(operator, sharding, operator.extent(dims), scale=scale)


def extent_amount(operator: Operator, sharding: Sharding, extent: Extent, *, scale: float = 1.0) -> Amount:
    """Local elements of an extent of the operator under the sharding (stretched dims never divide)."""
    base, per_sample, cutting = scale, False, set[str]()
    padded_size, padded_axes = 1.0, frozenset[str]()
    for size, name in extent:
        per_sample = per_sample or name in operator.per_sample
        if name in operator.stretched:
            continue
        of_dim = sharding.get(name, ())
        if name in operator.padded:
            padded_size, padded_axes = float(size), frozenset(of_dim)
        else:
            base *= size
            cutting.update(of_dim)
    return Amount(base=base, per_sample=per_sample, axes=frozenset(cutting), padded_size=padded_size, padded_axes=padded_axes)


def _step_amount(operator: Operator, source: Layout, target: Layout, step: Step, itemsize: float) -> Amount:
    """Bytes of the buffer of one redistribution step of the operator's output: the tensor divided by the axes that still cut it."""
    position_of = {axis: i for i, axes in enumerate(target.cuts) for axis in axes}
    before = {axis: i for i, axes in enumerate(source.cuts) for axis in axes}
    # an all-to-all counts the local buffer that leaves; what comes after it finds the axes at their new positions
    after_exchange = step.kind in (CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER)
    position_of = before | position_of if after_exchange else position_of | before
    cuts = {
        name: tuple(axis for axis in step.remaining if position_of[axis] == position) for position, name in enumerate(operator.output.dims)
    }
    return extent_amount(operator, cuts, operator.extent(operator.output.dims), scale=itemsize)


def derive(graph: Graph, shardings: Mapping[str, Sharding]) -> Derivation:
    """All traffic of one microbatch and the layouts of all parameters."""
    for op in graph.operators:
        if op.name not in shardings:
            raise InputError(f"operator {op.name}: has no sharding; give it one (an empty map leaves it whole)")
        if len(op.padded) > 1:
            raise InputError(f"operator {op.name}: padded dims={op.padded}: at most one may be padded; let the others divide")
        check_sharding(op, shardings[op.name])
    left = {op.output.tensor: output_layout(op, shardings[op.name]) for op in graph.operators}
    needed = {(op.name, i): input_layout(shardings[op.name], operand) for op in graph.operators for i, operand in enumerate(op.inputs)}
    consumers: dict[str, list[tuple[Operator, int]]] = {}
    for op in graph.operators:
        for i, operand in enumerate(op.inputs):
            consumers.setdefault(operand.tensor, []).append((op, i))
    _check_edges(graph, consumers, needed, left)
    merged = _merged_inputs(graph, left)
    traffic: list[Traffic] = []

    def add(producer: Operator, source: Layout, target: Layout, *, phase: Pass, region: str, reader: str) -> None:
        tensor = producer.output.tensor
        for step in redistribute(source, target):
            amount = _step_amount(producer, source, target, step, graph.tensors[tensor].itemsize)
            traffic.append(
                Traffic(kind=step.kind, axes=step.axes, amount=amount, region=region, phase=phase, tensor=tensor, operator=reader)
            )

    for producer in graph.operators:
        tensor = producer.output.tensor
        readers = consumers.get(tensor, [])
        if not readers or (readers[0][0].name, tensor) in merged:
            continue  # added up locally with another partial input, reduced with it (R7)
        start = left[tensor]
        for target, op in _distinct_targets([(needed[op.name, i], op) for op, i in readers]):
            add(producer, start, target, phase=Pass.FORWARD, region=op.layer, reader=op.name)
            if start.partial:
                start = target  # a second layout starts from the first, already reduced
        goal = left[tensor].resolved()
        gradients = [sliced_towards(gradient_layout(shardings[op.name], op.inputs[i]), goal) for op, i in readers]
        for gradient in join_gradients(gradients):
            add(producer, gradient, goal, phase=Pass.BACKWARD, region=readers[0][0].layer, reader=producer.name)
    for op in graph.operators:
        traffic.extend(_own_traffic(op, shardings[op.name], graph.activation_bytes))
    return Derivation(
        graph=graph,
        shardings=dict(shardings),
        traffic=tuple(traffic),
        parameters=_parameters(graph, shardings, consumers, left),
        needed=needed,
        left=left,
    )


def _check_edges(
    graph: Graph,
    consumers: Mapping[str, list[tuple[Operator, int]]],
    needed: Mapping[tuple[str, int], Layout],
    left: Mapping[str, Layout],
) -> None:
    """What the algebra does not express is refused, not priced wrong.

    Blocks follow one another as they follow what comes before them, so all edges between regions of a graph with blocks have one layout.
    The copies of a stretched dim are there for the axes that cut it: nothing may be redistributed at its position.
    """
    boundary = {left[each.carried]: each.carried for each in graph.repeats if graph.producer(each.carried) is not None}
    for producer in graph.operators:
        tensor = producer.output.tensor
        for reader, i in consumers.get(tensor, []):
            wanted = needed[reader.name, i]
            if graph.repeats and reader.layer != producer.layer:
                boundary.setdefault(left[tensor], tensor)
                boundary.setdefault(wanted, reader.name)
            for position, name in enumerate(producer.output.dims):
                if name in producer.stretched and left[tensor].cuts[position] != wanted.cuts[position]:
                    raise InputError(
                        f"operator {reader.name}: needs {tensor} as {wanted}, made as {left[tensor]}: "
                        f"copies ({producer.logical_name(name)}) must be cut as they are read; give both dims one rule"
                    )
    if len(boundary) > 1:
        what = ", ".join(f"{name} {layout}" for layout, name in boundary.items())
        raise InputError(f"layer boundary: {what}: must be one layout; give the operators at the boundary one rule")


def _distinct_targets(wanted: list[tuple[Layout, Operator]]) -> list[tuple[Layout, Operator]]:
    """One redistribution for each distinct layout, the most finely cut first."""
    distinct: dict[Layout, Operator] = {}
    for layout, op in wanted:
        distinct.setdefault(layout, op)
    return sorted(distinct.items(), key=lambda item: -len(item[0].cut_axes))


def _merged_inputs(graph: Graph, left: Mapping[str, Layout]) -> set[tuple[str, str]]:
    """(operator, tensor) of partial inputs of an addition that another input of the same layout carries along.

    Neither may be read by another operator: the sum is not what that one needs.
    """
    merged: set[tuple[str, str]] = set()
    for op in graph.operators:
        if not op.is_linear:
            continue
        first: dict[Layout, str] = {}
        for operand in op.inputs:
            layout = left.get(operand.tensor)
            if layout is None or not layout.partial or len(graph.consumers(operand.tensor)) > 1:
                continue
            if layout in first:
                merged.add((op.name, operand.tensor))
            else:
                first[layout] = operand.tensor
    return merged


def _own_traffic(op: Operator, sharding: Sharding, activation_bytes: float) -> Iterator[Traffic]:
    """Collectives that an operator issues by itself: norms and the loss reduce over a cut dim."""
    for own in op.traffic:
        axes = frozenset(axis for dim in own.over for axis in sharding.get(dim, ()))
        if axes:
            yield from (
                Traffic(
                    kind=own.kind,
                    axes=axes,
                    amount=extent_amount(op, sharding, own.extent, scale=own.itemsize or activation_bytes),
                    region=op.layer,
                    phase=own.phase,
                    tensor=op.output.tensor,
                    operator=op.name,
                )
                for _ in range(own.repeats)
            )


def _sum_axes(graph: Graph, left: Mapping[str, Layout], product: str) -> frozenset[str]:
    """The axes over which the product with that name leaves its output partial."""
    return left[graph.operator(product).output.tensor].partial if product else frozenset()


def _parameters(
    graph: Graph,
    shardings: Mapping[str, Sharding],
    consumers: Mapping[str, list[tuple[Operator, int]]],
    left: Mapping[str, Layout],
) -> tuple[ParameterLayout, ...]:
    found: list[ParameterLayout] = []
    ends = {region.name for region in (graph.regions[0], graph.regions[-1]) if not region.is_block}
    for name, tensor in graph.tensors.items():
        if tensor.role is not TensorRole.PARAMETER:
            continue
        uses = consumers.get(name, [])
        if not uses:
            raise InputError(f"parameter {name}: no operator reads it; remove it")
        layouts = {input_layout(shardings[op.name], op.inputs[i]) for op, i in uses}
        if len(layouts) != 1:
            cuts = zip(*(layout.cuts for layout in layouts), strict=True)
            differ = [position for position, axes in enumerate(cuts) if len(set(axes)) > 1]
            names = dict.fromkeys(op.logical_name(op.inputs[i].dims[position]) for position in differ for op, i in uses)
            readers = " and ".join(dict.fromkeys(op.name for op, _ in uses))
            raise InputError(f"parameter {name}: {readers} need it in {len(layouts)} layouts; give {' and '.join(names)} one rule")
        gradient_axes: frozenset[str] = frozenset()
        for op, i in uses:
            gradient_axes |= gradient_layout(shardings[op.name], op.inputs[i]).partial
        op, i = uses[0]
        dims, sharding = op.inputs[i].dims, shardings[op.name]
        rows, columns = dims[: tensor.num_rows], dims[tensor.num_rows :]
        regions = tuple(dict.fromkeys(op.layer for op, _ in uses))
        found.append(
            ParameterLayout(
                name=name,
                num_rows=op.size(rows),
                num_columns=op.size(columns),
                row_axes=frozenset(a for d in rows for a in sharding.get(d, ())),
                column_axes=frozenset(a for d in columns for a in sharding.get(d, ())),
                gradient_axes=gradient_axes,
                sum_axes=_sum_axes(graph, left, tensor.bias_of),
                regions=regions,
                is_end=ends.issuperset(regions),
                is_last=graph.regions[-1].name in regions,
            )
        )
    return tuple(found)
