"""Unrolling of repeated layers: every layer gets its own operators, and the batch becomes an ordinary size.

A decoder's graph has one layer that represents all, with sizes of one sequence: its plans shard all layers alike and set the microbatch.
Where operators may be sharded individually, each layer needs its own. Work, parameters, saved data and scratch equal those of the folded
graph, layer by layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from perfmodel.foundation.errors import InputError, bad_field
from perfmodel.workload.config import MAX_SIZE
from perfmodel.workload.graph import Graph, Operand, Operator, Tensor
from perfmodel.workload.layer_specs import interleaved
from perfmodel.workload.rewriting import with_extents
from perfmodel.workload.work import Extent

#: The largest built-in network has a third of them.
MAX_OPERATORS = 10_000


def unrolled(graph: Graph, *, batch: int, layers: int = 0, keeps_places: bool = False) -> Graph:
    """Return `graph` for `batch` samples with named layers: operators, tensors and parameters of the fourth `layer` have the prefix
    `layer3.`.

    layers   runs of repeated layers; 0: as in the graph

    Layout boundaries (identity operators) are removed unless `keeps_places`: their readers read the boundary's input.
    """

    def is_left_out(operator: Operator) -> bool:
        works = operator.forward or operator.backward or operator.traffic or operator.saved
        is_place = operator.is_linear and operator.passes_gradient and len(operator.inputs) == 1 and not works
        return is_place and not keeps_places

    if isinstance(batch, bool) or not isinstance(batch, int) or not 1 <= batch <= MAX_SIZE:
        raise bad_field("batch", batch, f"must be a whole number from 1 to {MAX_SIZE}", "leave it out for the default")
    counts = {repeat.layer: layers or repeat.count for repeat in graph.repeats}
    total = sum(counts.get(operator.layer, 1) for operator in graph.operators if not is_left_out(operator))
    if total > MAX_OPERATORS:
        raise InputError(f"network {graph.name}: has {total:,} operators, more than {MAX_OPERATORS:,}; use fewer layers")
    runs = {region.name: _Run.of(graph, region.name, is_left_out, batch) for region in graph.regions}
    order = []
    for position, index in interleaved([(region.turn, counts.get(region.name, 1)) for region in graph.regions]):
        layer = graph.regions[position].name
        order.append((layer, f"{layer}{index}." if layer in counts else ""))
    operators, tensors = _in_order(graph, runs, order, _tensors_of_batch(graph, batch))
    blocks = {f"{layer}{index}": 1.0 for layer, count in counts.items() for index in range(count)}
    return replace(graph, operators=operators, tensors=tensors, batch=batch, repeats=(), blocks=blocks)


def with_first_run_apart(graph: Graph, name: str) -> Graph:
    """Return `graph` with the first run of its only repeated layer as a separate layer `name`."""
    (repeat,) = graph.repeats
    prefix, rest = f"{name}.", () if repeat.count == 1 else (replace(repeat, count=repeat.count - 1),)
    runs = {region.name: _Run.of(graph, region.name) for region in graph.regions}
    of_repeat = [(repeat.layer, prefix), *([(repeat.layer, "")] if rest else [])]
    order = [run for region in graph.regions for run in (of_repeat if region.name == repeat.layer else [(region.name, "")])]
    operators, written = _in_order(graph, runs, order, graph.tensors)
    tensors = {tensor: written[tensor] for tensor in dict.fromkeys((*graph.tensors, *written)) if tensor in written}
    first = replace(repeat, layer=name, count=1, carried=prefix + repeat.carried)
    return replace(graph, operators=operators, tensors=tensors, repeats=(first, *rest))


def _in_order(
    graph: Graph, runs: Mapping[str, _Run], order: Iterable[tuple[str, str]], given: Mapping[str, Tensor]
) -> tuple[tuple[Operator, ...], dict[str, Tensor]]:
    """Return the operators and tensors of a graph whose layers run in this order, with a prefix for each run.

    given   tensors by their names in `graph`
    """
    repeats = {repeat.layer: repeat for repeat in graph.repeats}
    operators: list[Operator] = []
    tensors: dict[str, Tensor] = {}
    now: dict[str, str] = {}  # tensor of the folded graph -> tensor that the next operator reads in its place
    before: dict[str, str] = {}  # output of the previous run, by repeat or turn
    for layer, prefix in order:
        run, repeat = runs[layer], repeats.get(layer)
        if repeat and (repeat.turn or layer) in before:
            entry = graph.producer(repeat.carried)
            assert entry is not None
            now[entry.inputs[0].tensor] = before[repeat.turn or layer]
        now |= {tensor: prefix + tensor for tensor in run.exclusive}
        for output, source in run.boundaries.items():
            now[output] = now[source]
        for operator in run.operators:
            for tensor in _tensors(operator):
                name = now.setdefault(tensor, tensor)
                product = given[tensor].bias_of
                tensors.setdefault(name, replace(given[tensor], name=name, bias_of=product and prefix + product))
            operators.append(_named(operator, prefix, now))
        if repeat:
            before[repeat.turn or layer] = now[_handed_on(graph, layer)]
    return tuple(operators), tensors


@dataclass(frozen=True, slots=True)
class _Run:
    """Operators of a layer, at the batch's size.

    exclusive   tensors that it produces or that only it reads
    boundaries  output of each removed layout boundary -> its input
    """

    operators: tuple[Operator, ...]
    exclusive: frozenset[str]
    boundaries: Mapping[str, str]

    @classmethod
    def of(cls, graph: Graph, layer: str, is_left_out: Callable[[Operator], bool] = lambda operator: False, batch: int = 0) -> _Run:
        """Return a layer without some of its operators. batch: 0: the samples stay a quantity of the plan."""
        members = graph.operators_of(layer)
        sized = tuple(_of_batch(operator, batch) if batch else operator for operator in members if not is_left_out(operator))
        exclusive = frozenset(tensor for operator in sized for tensor in _tensors(operator) if _is_only_of(graph, layer, tensor))
        return cls(sized, exclusive, {operator.output.tensor: operator.inputs[0].tensor for operator in members if is_left_out(operator)})


def _tensors(operator: Operator) -> Iterator[str]:
    return (operand.tensor for operand in operator.operands)


def _is_only_of(graph: Graph, layer: str, tensor: str) -> bool:
    """Return whether a tensor is produced by a layer, or read by it alone."""
    maker = graph.producer(tensor)
    return maker.layer == layer if maker else all(reader.layer == layer for reader, _ in graph.consumers(tensor))


def _handed_on(graph: Graph, layer: str) -> str:
    """Return the output tensor of a repeated layer, which its next run and the successor read."""
    outputs = (operator.output.tensor for operator in graph.operators_of(layer))
    return next(tensor for tensor in outputs if any(reader.layer != layer for reader, _ in graph.consumers(tensor)))


def _named(operator: Operator, prefix: str, now: Mapping[str, str]) -> Operator:
    def reading(operand: Operand) -> Operand:
        return replace(operand, tensor=now[operand.tensor])

    layer = prefix.removesuffix(".") or operator.layer
    inputs = tuple(map(reading, operator.inputs))
    return replace(operator, name=prefix + operator.name, inputs=inputs, output=reading(operator.output), layer=layer)


# --- the batch as a size --------------------------------------------------------------------------------------------


def _tensors_of_batch(graph: Graph, batch: int) -> dict[str, Tensor]:
    sized = dict(graph.tensors)
    for operator in graph.operators:
        for operand in operator.operands:
            samples = [position for position, dim in enumerate(operand.dims) if dim in operator.roles.per_sample]
            tensor = graph.tensors[operand.tensor]
            if samples:
                shape = tuple(size * batch if position in samples else size for position, size in enumerate(tensor.shape))
                sized[operand.tensor] = replace(tensor, shape=shape)
    return sized


def _of_batch(operator: Operator, batch: int) -> Operator:
    """Return the operator with the batch in the size of its sample dims."""
    samples = operator.roles.per_sample

    def sized(extent: Extent) -> Extent:
        return tuple((size * batch if dim in samples else size, dim) for size, dim in extent)

    dims = {dim: size * batch if dim in samples else size for dim, size in operator.dims.items()}
    return with_extents(operator, sized, dims=dims, roles=replace(operator.roles, per_sample=()))
