"""Traffic of a sharded graph, derived from layouts: kind, axes and size of every collective.

Forward redistributes each output from its producer's layout to the layouts that its consumers need. Backward applies the same table to
gradients. Parameters have their own layouts and lifetimes (R14) and are returned separately.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from fractions import Fraction
from functools import cached_property
from itertools import chain, repeat
from math import ceil, prod
from operator import attrgetter
from typing import NamedTuple

from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.foundation.copies import Copies
from perfmodel.foundation.errors import InputError
from perfmodel.parallel.algebra.sharding import (
    MESH_AXES,
    Held,
    Layout,
    Sharding,
    Step,
    check_sharding,
    ends_of_edge,
    gradient_layout,
    input_layout,
    join_gradients,
    output_layout,
    redistribute,
    sliced_towards,
)
from perfmodel.workload.graph import NO_CASTS, Graph, Operand, Operator, Tensor, TensorRole, WeightCasts
from perfmodel.workload.work import Extent, Pass, extent


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """Elements (or bytes) on one chip as a formula of the mesh, the micro-batch and the sequence length.

    base * |batch_dim| * seq_len ** length_power / parts * ceil(padded_size / |padded_axes|) / |axes| * |times|

    batch_dim   dim whose size depends on the plan (samples of a micro-batch) or on a step (its tokens, its sequences); "": none
    parts       divisor of a token (experts, chunks), separate from `base` so that integers stay exact
    """

    base: float
    batch_dim: str = ""
    length_power: int = 0
    parts: int = 1
    axes: frozenset[str] = frozenset()
    padded_size: float = 1.0
    padded_axes: frozenset[str] = frozenset()
    times: frozenset[str] = frozenset()

    def on(self, size: Callable[[frozenset[str]], float]) -> float:
        """Return the amount on a mesh with groups of these sizes; for one sample if it has a batch dim."""
        return self.base * ceil(self.padded_size / size(self.padded_axes)) / size(self.axes)

    def mean_on(self, size: Callable[[frozenset[str]], float]) -> float:
        """Return the mean over the chips; with padding `on` is the largest share."""
        return self.base * self.padded_size / size(self.axes | self.padded_axes)

    def at_once(self, tokens: int) -> Amount:
        """Return the amount for `tokens` tokens in place of the whole sequence."""
        return replace(self, base=self.base * tokens, length_power=self.length_power - 1)

    def scaled(self, factor: float) -> Amount:
        """Return the amount times `factor`."""
        return self.on_axes(self.axes, times=self.times, base=self.base * factor)

    def on_axes(self, axes: frozenset[str], *, times: frozenset[str], base: float | None = None) -> Amount:
        """Return the amount divided and multiplied by other axes; `dataclasses.replace` takes ten times as long."""
        return Amount(
            base=self.base if base is None else base,
            batch_dim=self.batch_dim,
            length_power=self.length_power,
            parts=self.parts,
            axes=axes,
            padded_size=self.padded_size,
            padded_axes=self.padded_axes,
            times=times,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """One collective, issued `repeats` times per micro-batch, in each of equal layers.

    elements   full buffer of the group; local buffer of an all-to-all; message of a send
    itemsize   bytes per element; 0: that of activations, which the graph does not give
    copies     of an all-to-all of copied rows: copies for one destination are sent once; None: each copy is sent
    is_counted the host waits for the sizes before it issues the collective
    is_own     issued by the operator itself; else a redistribution of the tensor or of its gradient
    """

    kind: CollectiveKind
    axes: frozenset[str]
    elements: Amount
    itemsize: float
    region: str
    phase: Pass
    tensor: str
    operator: str
    is_own: bool = False
    repeats: int = 1
    copies: Copies | None = None
    is_counted: bool = False

    @property
    def amount(self) -> Amount:
        """Size in bytes."""
        return self.elements.scaled(self.itemsize)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterLayout:
    """Layout of a parameter in its operators, before ZeRO sharding.

    num_rows, num_columns   of the stored matrix; row_axes, column_axes: axes that shard it in the operator (tensor parallelism)
    gradient_axes           axes on which the gradient is partial after a micro-batch: the group of the gradient reduction
    sum_axes                of the bias of a linear: axes over which the linear's output is summed before the bias is added
    regions                 regions that use it; more than one: tied
    elements                of the whole parameter on one chip
    is_end, is_last         used only by the graph's first or last region, which are no blocks; used by the last region
    copy_bytes, gathered_bytes   bytes per element of its low-precision copies, and of the gathered parameter (0: as stored)
    casts                   casts that make those copies
    is_frozen               it has no gradient; itemsize: bytes per element as stored and gathered in that case
    runs_backward           some operator of the region that gathers it runs backward
    """

    name: str
    num_rows: int
    num_columns: int
    row_axes: frozenset[str]
    column_axes: frozenset[str]
    gradient_axes: frozenset[str]
    sum_axes: frozenset[str]
    regions: tuple[str, ...]
    elements: Amount
    is_end: bool = False
    is_last: bool = False
    is_frozen: bool = False
    itemsize: float = 0.0
    copy_bytes: float = 0.0
    gathered_bytes: float = 0.0
    casts: WeightCasts = NO_CASTS
    runs_backward: bool = True

    @property
    def num_elements(self) -> int:
        return self.num_rows * self.num_columns


class ExchangePosition(StrEnum):
    """Position of a block's operator relative to the block's exchanges of rows (the dispatch of tokens to experts)."""

    BEFORE = "before"
    AFTER = "after"
    CONCURRENT = "beside"


@dataclass(frozen=True, kw_only=True)
class ShardedGraph:
    """A graph with a sharding for every operator, and the derived layouts, collectives and parameters.

    needed   layout that each operator needs of each input
    left     layout in which its producer leaves each tensor
    joined   partial tensor -> tensor to which it is added before the reduction; that one has the traffic of the sum
    """

    graph: Graph
    shardings: Mapping[str, Sharding]
    traffic: tuple[Traffic, ...]
    parameters: tuple[ParameterLayout, ...]
    needed: Mapping[tuple[str, int], Layout]
    left: Mapping[str, Layout]
    joined: Mapping[str, str]

    @cached_property
    def moved(self) -> Mapping[tuple[str, Pass], list[Traffic]]:
        """Collectives by tensor and pass, in order; those of backward move the gradient."""
        rows: dict[tuple[str, Pass], list[Traffic]] = {}
        for row in self.traffic:
            rows.setdefault((row.tensor, row.phase), []).append(row)
        return rows

    def traffic_of(self, tensor: str, phase: Pass) -> list[Traffic]:
        return self.moved.get((tensor, phase), [])

    def axes_of(self, tensor: str, phase: Pass) -> frozenset[str]:
        """Return the axes over which the tensor, or its gradient, is redistributed."""
        return frozenset[str]().union(*map(attrgetter("axes"), self.traffic_of(tensor, phase)))

    @cached_property
    def activations(self) -> Mapping[str, list[Operand]]:
        """Activations among the inputs of each operator."""
        tensors, activations = self.graph.tensors, dict[str, list[Operand]]()
        for op in self.graph.operators:
            activations[op.name] = []
            for operand in op.inputs:
                if tensors[operand.tensor].role is TensorRole.ACTIVATION:
                    activations[op.name].append(operand)
        return activations

    @cached_property
    def handed(self) -> Mapping[str, list[Operand]]:
        """Activations that enter the operator's group from outside; the group is one function and holds them until it returns."""
        handed: dict[str, list[Operand]] = {}
        for op in self.graph.operators:
            handed[op.name] = []
            for operand in self.activations[op.name] if op.group else ():
                maker = self.graph.producer(operand.tensor)
                if maker is None or maker.group != op.group:
                    handed[op.name].append(operand)
        return handed

    @cached_property
    def entering(self) -> Mapping[str, frozenset[str]]:
        """Inputs of each region: the only tensors of it that full recomputation saves.

        An input that an operator passes on unchanged has the name of that operator's output.
        """
        inputs: dict[str, frozenset[str]] = {}
        for region in self.graph.regions:
            names = {region.carried} if region.carried else set[str]()
            for op in () if region.carried else self.graph.operators_of(region.name):
                is_view = op.passes_gradient and len(op.inputs) == 1 and not op.forward
                for operand in self.activations[op.name]:
                    maker = self.graph.producer(operand.tensor)
                    if maker is not None and maker.layer != region.name:
                        names.add(op.output.tensor if is_view else operand.tensor)
            inputs[region.name] = frozenset(names)
        return inputs

    @cached_property
    def exchange_position(self) -> Mapping[str, ExchangePosition]:
        """Position of each operator of the blocks that exchange rows.

        Before: it leads to a set of rows, or to an input that is read with one. After: it depends on a set. Concurrent: neither.
        """
        graph, positions, sets = self.graph, dict[str, ExchangePosition](), self.graph.sets
        for region in graph.regions if sets else ():
            operators = graph.operators_of(region.name) if region.is_block else []
            inputs = {op.name: {operand.tensor for operand in op.inputs} for op in operators}
            wanted = sets.union(*(read for read in inputs.values() if read & sets))
            leading = set[str]()
            for op in reversed(operators):
                if op.output.tensor in wanted:
                    leading.add(op.name)
                    wanted |= inputs[op.name]
            exchanged = set(sets)
            for op in operators if leading else ():
                positions[op.name] = ExchangePosition.BEFORE if op.name in leading else ExchangePosition.CONCURRENT
                if inputs[op.name] & exchanged:
                    positions[op.name] = ExchangePosition.AFTER
                    exchanged.add(op.output.tensor)
        return positions

    def operand_bytes(self, op: Operator, operand: Operand, *, itemsize: float | None = None, is_expanded: bool = True) -> Amount:
        """Return the bytes of an operand in the operator's layout, with the tensor's itemsize unless another is given.

        Of copies that the producer made of a dim (key-value heads), a rank holds one. A batched product reads one copy for each query
        head (`is_expanded`). Of an input that is streamed in blocks, a rank holds its own block.
        """
        maker, dims = self.graph.producer(operand.tensor), operand.dims
        if maker is not None and op.streamed and op.streams(operand):
            op, dims = maker, maker.output.dims
        elif maker is not None and maker is not op and not (is_expanded and op.is_product):
            dims = tuple(name for name, produced in zip(dims, maker.output.dims, strict=True) if produced not in maker.roles.stretched)
        tensor = self.graph.tensors[operand.tensor]
        amount = amount_of(op, self.shardings[op.name], dims, scale=tensor.itemsize if itemsize is None else itemsize)
        return amount.at_once(tensor.tokens_at_once) if tensor.tokens_at_once else amount

    def layout_of(self, parameter: ParameterLayout) -> Layout:
        """Return the layout that all readers of the parameter need, partial where the sum of their gradients is."""
        op, i = self.graph.consumers(parameter.name)[0]
        return Layout(cuts=self.needed[op.name, i].cuts, partial=parameter.gradient_axes)


_ONE = Fraction(1)


def amount_of(operator: Operator, sharding: Sharding, dims: tuple[str, ...], *, scale: float = 1.0) -> Amount:
    """Return the local elements over `dims` under the sharding."""
    return extent_amount(operator, sharding, extent(operator.dims, dims), scale=scale)


def extent_amount(operator: Operator, sharding: Sharding, extent: Extent, *, scale: float = 1.0) -> Amount:
    """Return the local elements of an extent of the operator under the sharding (axes on stretched dims do not divide it).

    One padded dim is rounded up; a second one counts with its mean.
    """
    roles, base, batch_dim, cutting, uneven = operator.roles, scale, "", list[str](), ""
    padded_size, padded_axes = 1.0, frozenset[str]()
    length_power, share = 0, _ONE
    for size, name in extent:
        if name in roles.per_sample:
            batch_dim = name
        if name in roles.per_token:
            length_power += 1
        if not isinstance(size, int) and isinstance(size, Fraction):  # the first check is much faster
            share, size = share * size, 1
        if name in roles.stretched:
            continue
        of_dim = sharding.get(name, ())
        if name in roles.padded and not uneven:
            uneven, padded_size, padded_axes = name, float(size), frozenset(of_dim)
        else:
            base *= size
            cutting += of_dim
    return Amount(
        base=base * share.numerator,
        batch_dim=batch_dim,
        length_power=length_power,
        parts=share.denominator,
        axes=frozenset(cutting),
        padded_size=padded_size,
        padded_axes=padded_axes,
    )


def _step_amount(operator: Operator, tensor: Tensor, source: Layout, target: Layout, step: Step) -> Amount:
    """Return the buffer of one redistribution step of the operator's output: the tensor divided by the axes that still shard it."""
    # an all-to-all counts the local send buffer; later steps find the axes at their new positions
    after_exchange = step.kind in (CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER)
    dims, layouts = operator.output.dims, (source, target) if after_exchange else (target, source)
    dim_of: dict[str, str] = {}
    for layout in layouts:
        for dim, axes in zip(dims, layout.cuts, strict=True):
            dim_of |= dict.fromkeys(axes, dim)
    sharding: dict[str, tuple[str, ...]] = {}
    for axis in step.remaining:
        sharding[dim_of[axis]] = (*sharding.get(dim_of[axis], ()), axis)  # positions without a dim share one name, the empty one
    return extent_amount(operator, sharding, tuple(zip(tensor.shape, dims, strict=True)))


class _Move(NamedTuple):
    """A redistribution of a tensor, or of its gradient, issued at an operator."""

    source: Layout
    target: Layout
    phase: Pass
    region: str
    operator: str


def derive(
    graph: Graph,
    shardings: Mapping[str, Sharding],
    *,
    held: Mapping[str, Held] | None = None,
    axes: Collection[str] = MESH_AXES,
) -> ShardedGraph:
    """Derive all traffic of one micro-batch and the layouts of all parameters.

    held   the plan's layouts of tensors with several readers. Such a tensor is redistributed once to its held layout, and from there to
           each reader; partial sums of two tensors are then never joined (R7). None: as few redistributions as the layouts allow
    axes   axes that shardings may use
    """
    left: dict[str, Layout] = {}
    needed: dict[tuple[str, int], Layout] = {}
    for op in graph.operators:
        if op.name not in shardings:
            raise InputError(f"operator {op.name}: has no sharding; give it one (an empty map leaves it whole)")
        if held is None and len(op.roles.padded) > 1:
            raise InputError(f"operator {op.name}: padded dims={op.roles.padded}: at most one may be padded; let the others divide")
        check_sharding(op, shardings[op.name], axes)
        left[op.output.tensor] = output_layout(op, shardings[op.name])
        for i, operand in enumerate(op.inputs):
            needed[op.name, i] = input_layout(shardings[op.name], operand)
    _check_edges(graph, needed, left)
    joined = _joined_inputs(graph, left) if held is None else {}
    traffic: list[Traffic] = []
    for producer in graph.operators:
        tensor = graph.tensors[producer.output.tensor]
        readers = graph.consumers(tensor.name)
        if not readers or tensor.role is not TensorRole.ACTIVATION or tensor.name in joined:
            continue  # added locally to another partial input and reduced with it (R7)
        reading = [(op, needed[op.name, i], gradient_layout(shardings[op.name], op.inputs[i])) for op, i in readers]
        if held is None:
            moves = _joint_moves(producer, left[tensor.name], reading)
        else:
            moves = _moves_through_held(held.get(tensor.name), producer, left[tensor.name], reading)
        for move in moves:
            if move.phase is Pass.BACKWARD and not tensor.has_gradient:
                continue
            sent = tensor.sent_bytes if move.phase is Pass.FORWARD else tensor.sent_gradient_bytes
            for step in redistribute(move.source, move.target, is_set=tensor.is_set):
                is_exchange = step.kind is CollectiveKind.ALL_TO_ALL
                elements = _step_amount(producer, tensor, move.source, move.target, step)
                traffic.append(
                    Traffic(
                        kind=step.kind,
                        axes=step.axes,
                        elements=elements.scaled(tensor.exchanged) if is_exchange else elements,
                        itemsize=sent or tensor.itemsize,
                        region=move.region,
                        phase=move.phase,
                        tensor=tensor.name,
                        operator=move.operator,
                        copies=tensor.copies if is_exchange else None,
                        is_counted=tensor.is_counted and is_exchange and move.phase is Pass.FORWARD,
                    )
                )
    activation_bytes = graph.activation_bytes
    for op in graph.operators:
        traffic.extend(_own_traffic(op, shardings[op.name], activation_bytes))
    return ShardedGraph(
        graph=graph,
        shardings=dict(shardings),
        traffic=tuple(traffic),
        parameters=_parameters(graph, shardings, needed, left, skips_unread=held is not None),
        needed=needed,
        left=left,
        joined=joined,
    )


#: A reader of a tensor, the layout that it needs, and the layout in which it leaves the gradient.
_Reading = tuple[Operator, Layout, Layout]


def _joint_moves(producer: Operator, left: Layout, reading: Sequence[_Reading]) -> Iterator[_Move]:
    """Yield one redistribution for each distinct layout, most finely sharded first; gradients are added before they are reduced (R7)."""
    start, goal = left, left.resolved()
    first: dict[Layout, Operator] = {}
    gradients: list[Layout] = []
    for op, needed, gradient in reading:
        first.setdefault(needed, op)
        gradients.append(sliced_towards(gradient, goal))
    for target, op in first.items() if len(first) == 1 else sorted(first.items(), key=lambda item: -len(item[0].cut_axes)):
        yield _Move(start, target, Pass.FORWARD, op.layer, op.name)
        if start.partial:
            start = target  # a second layout starts from the first, already reduced
    for gradient in join_gradients(gradients):
        yield _Move(gradient, goal, Pass.BACKWARD, reading[0][0].layer, producer.name)


def _moves_through_held(held: Held | None, producer: Operator, left: Layout, reading: Sequence[_Reading]) -> Iterator[_Move]:
    """Yield the redistributions to the held layout of a tensor, and from there to each reader."""
    if held is not None:
        yield _Move(left, held.layout, Pass.FORWARD, producer.layer, producer.name)
        yield _Move(held.gradient, left.resolved(), Pass.BACKWARD, producer.layer, producer.name)
    for op, needed, gradient in reading:
        source, goal = ends_of_edge(left, held, gradient)
        yield _Move(source, needed, Pass.FORWARD, op.layer, op.name)
        yield _Move(gradient, goal, Pass.BACKWARD, op.layer, op.name)


def _check_edges(graph: Graph, needed: Mapping[tuple[str, int], Layout], left: Mapping[str, Layout]) -> None:
    """Refuse graphs that the algebra does not express, which would get a wrong price.

    A repeated block reads the output of the block, or of the region, before it. So all edges between regions must have one layout.
    The copies of a stretched dim exist for the axes that shard it, so nothing may be redistributed at its position.
    """
    boundary: dict[Layout, str] = {}
    for region in graph.repeats:
        if graph.producer(region.carried) is not None:
            boundary[left[region.carried]] = region.carried
    for producer in graph.operators:
        tensor = producer.output.tensor
        for reader, i in graph.consumers(tensor):
            wanted = needed[reader.name, i]
            if graph.repeats and reader.layer != producer.layer:
                boundary.setdefault(left[tensor], tensor)
                boundary.setdefault(wanted, reader.name)
            for position, name in enumerate(producer.output.dims if producer.roles.stretched else ()):
                if name in producer.roles.stretched and left[tensor].cuts[position] != wanted.cuts[position]:
                    raise InputError(
                        f"operator {reader.name}: needs {tensor} as {wanted}, made as {left[tensor]}: "
                        f"copies ({producer.logical_name(name)}) must be cut as they are read; give both dims one rule"
                    )
    if len(boundary) > 1:
        what = ", ".join(f"{name} {layout}" for layout, name in boundary.items())
        raise InputError(f"layer boundary: {what}: must be one layout; give the operators at the boundary one rule")


def _joined_inputs(graph: Graph, left: Mapping[str, Layout]) -> dict[str, str]:
    """Return partial input of an addition -> the other input of the same layout with which it is reduced.

    Neither may have another reader, which would need the tensor and not the sum.
    """
    joined: dict[str, str] = {}
    for op in graph.operators:
        if not op.is_linear:
            continue
        first: dict[Layout, str] = {}
        for operand in op.inputs:
            layout = left.get(operand.tensor)
            if layout is None or not layout.partial or len(graph.consumers(operand.tensor)) > 1:
                continue
            if layout in first:
                joined[operand.tensor] = first[layout]
            else:
                first[layout] = operand.tensor
    return joined


def _own_traffic(op: Operator, sharding: Sharding, activation_bytes: float) -> Iterator[Traffic]:
    """Yield the collectives that an operator issues itself: norms and the loss reduce over a sharded dim."""
    for collective in op.traffic:
        axes = frozenset[str]().union(*map(sharding.get, collective.over, repeat(())))
        if axes:
            yield Traffic(
                kind=collective.kind,
                axes=axes,
                elements=extent_amount(op, sharding, collective.extent),
                itemsize=collective.itemsize or activation_bytes,
                region=op.layer,
                phase=collective.phase,
                tensor=op.output.tensor,
                operator=op.name,
                is_own=True,
                repeats=collective.repeats,
            )


def _parameters(
    graph: Graph,
    shardings: Mapping[str, Sharding],
    needed: Mapping[tuple[str, int], Layout],
    left: Mapping[str, Layout],
    *,
    skips_unread: bool,
) -> tuple[ParameterLayout, ...]:
    parameters: list[ParameterLayout] = []
    ends = {region.name for region in (graph.regions[0], graph.regions[-1]) if not region.is_block}
    for name, tensor in graph.tensors.items():
        if tensor.role is not TensorRole.PARAMETER:
            continue
        uses = graph.consumers(name)
        if not uses and skips_unread:
            continue  # a user's module may have parameters that it never uses
        if not uses:
            raise InputError(f"parameter {name}: no operator reads it; remove it")
        layouts = {needed[op.name, i] for op, i in uses}
        if len(layouts) != 1:
            cuts = zip(*(layout.cuts for layout in layouts), strict=True)
            differ = [position for position, axes in enumerate(cuts) if len(set(axes)) > 1]
            names = dict.fromkeys(op.logical_name(op.inputs[i].dims[position]) for position in differ for op, i in uses)
            readers = " and ".join(dict.fromkeys(op.name for op, _ in uses))
            raise InputError(f"parameter {name}: {readers} need it in {len(layouts)} layouts; cut {' and '.join(names)} alike, by one rule")
        # a pipeline stage may begin between a product and its bias
        biased = [op for op in graph.operators if op.name == tensor.bias_of] if tensor.bias_of else ()
        sums = left[biased[0].output.tensor].partial if biased else frozenset[str]()
        layout = parameter_layout(tensor, uses, shardings, sum_axes=sums)
        first = graph.operators_of(layout.regions[0])
        parameters.append(
            replace(
                layout,
                is_end=ends.issuperset(layout.regions),
                is_last=graph.regions[-1].name in layout.regions,
                is_frozen=not tensor.has_gradient,
                itemsize=0.0 if tensor.has_gradient else tensor.itemsize,
                runs_backward=tensor.has_gradient or any(graph.tensors[op.output.tensor].has_gradient for op in first),
                copy_bytes=tensor.copy_bytes,
                gathered_bytes=tensor.gathered_bytes,
                casts=tensor.casts,
            )
        )
    return tuple(parameters)


def parameter_layout(
    tensor: Tensor, uses: Sequence[tuple[Operator, int]], shardings: Mapping[str, Sharding], *, sum_axes: frozenset[str] = frozenset()
) -> ParameterLayout:
    """Return the layout in the first reader (operator, input); the gradient is partial where any reader leaves it so."""
    gradient_axes, regions = frozenset[str](), dict[str, None]()
    for reader, position in uses:
        gradient_axes |= gradient_layout(shardings[reader.name], reader.inputs[position]).partial
        regions[reader.layer] = None
    op, i = uses[0]
    cuts = input_layout(shardings[op.name], op.inputs[i]).cuts
    return ParameterLayout(
        name=tensor.name,
        num_rows=prod(tensor.shape[: tensor.num_rows]),
        num_columns=prod(tensor.shape[tensor.num_rows :]),
        row_axes=frozenset(chain.from_iterable(cuts[: tensor.num_rows])),
        column_axes=frozenset(chain.from_iterable(cuts[tensor.num_rows :])),
        gradient_axes=gradient_axes,
        sum_axes=sum_axes,
        regions=tuple(regions),
        elements=extent_amount(op, shardings[op.name], tuple(zip(tensor.shape, op.inputs[i].dims, strict=True))),
    )
