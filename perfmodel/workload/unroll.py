"""A graph with its repeats written out: every layer has operators of its own, and the batch is a size like any other.

A decoder's graph has one layer that stands for all, with sizes of one sequence: its plans cut all layers alike and say the microbatch.
Where every operator may be cut in its own way, each layer needs operators of its own. They are the same ones: work, parameters, what is
saved and scratch are those of the folded graph, layer by layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from perfmodel.foundation.errors import InputError, bad_field
from perfmodel.workload.config import MAX_SIZE
from perfmodel.workload.graph import Extent, Graph, Operand, Operator, Tensor
from perfmodel.workload.rewriting import with_extents

#: The largest network known by name has a third of them.
MAX_OPERATORS = 10_000


def unrolled(graph: Graph, *, batch: int, layers: int = 0, keeps_places: bool = False) -> Graph:
    """`graph` for `batch` samples, the fourth run of a repeated `layer` as `layer3`: so are its operators, tensors and parameters named.

    layers   how often repeated layers run; 0: as often as the graph says

    Places where a layout is required, which do nothing, are left out unless `keeps_places`: their readers read what the place hands on.
    """

    def is_left_out(operator: Operator) -> bool:
        return not keeps_places and _is_place(operator)

    if isinstance(batch, bool) or not isinstance(batch, int) or not 1 <= batch <= MAX_SIZE:
        raise bad_field("batch", batch, f"must be a whole number from 1 to {MAX_SIZE}", "leave it out for the default")
    repeats = {repeat.layer: repeat for repeat in graph.repeats}
    counts = {layer: layers or repeat.count for layer, repeat in repeats.items()}
    total = sum(counts.get(operator.layer, 1) for operator in graph.operators if not is_left_out(operator))
    if total > MAX_OPERATORS:
        raise InputError(f"network {graph.name}: has {total:,} operators, more than {MAX_OPERATORS:,}; use fewer layers")
    operators: list[Operator] = []
    tensors: dict[str, Tensor] = {}
    given = _tensors_of_batch(graph, batch)
    now: dict[str, str] = {}  # a tensor of the folded graph -> what an operator that is written next reads in its place
    before: dict[str, str] = {}  # what the run before handed on, of each repeat or turn
    runs = {layer: _Run.of(graph, layer, batch, is_left_out) for layer in dict.fromkeys(op.layer for op in graph.operators)}
    for layer, index in _in_order(graph, counts):
        run, repeat = runs[layer], repeats.get(layer)
        prefix = f"{layer}{index}." if repeat else ""
        if repeat and (repeat.turn or layer) in before:
            entry = graph.producer(repeat.carried)
            assert entry is not None
            now[entry.inputs[0].tensor] = before[repeat.turn or layer]
        now |= {tensor: prefix + tensor for tensor in run.own}
        for place, source in run.places.items():
            now[place] = now[source]
        for operator in run.operators:
            for tensor in _tensors(operator):
                name = now.setdefault(tensor, tensor)
                product = given[tensor].bias_of
                tensors.setdefault(name, replace(given[tensor], name=name, bias_of=product and prefix + product))
            operators.append(_named(operator, prefix, now))
        if repeat:
            before[repeat.turn or layer] = now[_handed_on(graph, layer)]
    blocks = {f"{layer}{index}": 1.0 for layer, count in counts.items() for index in range(count)}
    return replace(graph, operators=tuple(operators), tensors=tensors, batch=batch, repeats=(), blocks=blocks)


def with_first_run_apart(graph: Graph, name: str) -> Graph:
    """`graph` in which the first run of its only repeated layer has operators, tensors and parameters of its own: of a layer `name`."""
    (repeat,) = graph.repeats
    prefix, handed_on = f"{name}.", _handed_on(graph, repeat.layer)
    members = graph.operators_of(repeat.layer)
    own = {tensor: prefix + tensor for operator in members for tensor in _tensors(operator) if _is_only_of(graph, repeat.layer, tensor)}
    tensors = dict(graph.tensors)
    for tensor, renamed in own.items():
        product = tensors[tensor].bias_of
        tensors[renamed] = replace(tensors[tensor], name=renamed, bias_of=product and prefix + product)
    entry = graph.producer(repeat.carried)
    assert entry is not None
    given = entry.inputs[0].tensor

    def named(operator: Operator, now: Mapping[str, str]) -> Operator:
        inputs = tuple(replace(operand, tensor=now.get(operand.tensor, operand.tensor)) for operand in operator.inputs)
        return replace(operator, inputs=inputs)

    operators: list[Operator] = []
    begun, once = False, repeat.count == 1
    for operator in graph.operators:
        if operator.layer != repeat.layer:
            operators.append(named(operator, {handed_on: own[handed_on]}) if begun and once else operator)
            continue
        if not begun:
            begun = True
            operators += [_named(each, prefix, own | {t: t for t in _tensors(each) if t not in own}) for each in members]
        if not once:
            operators.append(named(operator, {given: own[handed_on]}))
    if once:
        for tensor in own:
            del tensors[tensor]
    first = replace(repeat, layer=name, count=1, carried=own[repeat.carried])
    rest = () if once else (replace(repeat, count=repeat.count - 1),)
    return replace(graph, operators=tuple(operators), tensors=tensors, repeats=(first, *rest))


@dataclass(frozen=True, slots=True)
class _Run:
    """A layer at the batch's size: operators, tensors that are made by it or given to it alone, and what left-out places hand on."""

    operators: tuple[Operator, ...]
    own: frozenset[str]
    places: Mapping[str, str]

    @classmethod
    def of(cls, graph: Graph, layer: str, batch: int, is_left_out: Callable[[Operator], bool]) -> _Run:
        members = graph.operators_of(layer)
        sized = tuple(_of_batch(operator, batch) for operator in members if not is_left_out(operator))
        own = frozenset(tensor for operator in sized for tensor in _tensors(operator) if _is_only_of(graph, layer, tensor))
        return cls(sized, own, {operator.output.tensor: operator.inputs[0].tensor for operator in members if is_left_out(operator)})


def _in_order(graph: Graph, counts: Mapping[str, int]) -> list[tuple[str, int]]:
    """(layer, run) as they come: those that take turns each as its share of the others has run."""
    begins: dict[str, int] = {}
    order = []
    for place, region in enumerate(graph.regions):
        begin = begins.setdefault(region.turn, place) if region.turn else place
        count = counts.get(region.name, 1)
        order += [(begin, (index + 1) / count, place, index) for index in range(count)]
    return [(graph.regions[place].name, index) for *_, place, index in sorted(order)]


def _is_place(operator: Operator) -> bool:
    """Whether it does nothing with its only input: a boundary, where rule sets require a layout."""
    works = operator.forward or operator.backward or operator.traffic or operator.saved
    return operator.is_linear and operator.passes_gradient and len(operator.inputs) == 1 and not works


def _tensors(operator: Operator) -> Iterator[str]:
    return (operand.tensor for operand in operator.operands)


def _is_only_of(graph: Graph, layer: str, tensor: str) -> bool:
    """Whether a tensor is made by a layer, or given to it alone."""
    maker = graph.producer(tensor)
    return maker.layer == layer if maker else all(reader.layer == layer for reader, _ in graph.consumers(tensor))


def _handed_on(graph: Graph, layer: str) -> str:
    """Tensor that a repeated layer hands to its next run and to what follows."""
    made = (operator.output.tensor for operator in graph.operators_of(layer))
    return next(tensor for tensor in made if any(reader.layer != layer for reader, _ in graph.consumers(tensor)))


def _named(operator: Operator, prefix: str, now: Mapping[str, str]) -> Operator:
    def reading(operand: Operand) -> Operand:
        return replace(operand, tensor=now[operand.tensor])

    layer = prefix.removesuffix(".") or operator.layer
    inputs = tuple(map(reading, operator.inputs))
    return replace(operator, name=prefix + operator.name, inputs=inputs, output=reading(operator.output), layer=layer)


# --- the batch as a size --------------------------------------------------------------------------------------------


def _tensors_of_batch(graph: Graph, batch: int) -> dict[str, Tensor]:
    found = dict(graph.tensors)
    for operator in graph.operators:
        for operand in operator.operands:
            samples = [place for place, dim in enumerate(operand.dims) if dim in operator.per_sample]
            tensor = graph.tensors[operand.tensor]
            if samples:
                shape = tuple(size * batch if place in samples else size for place, size in enumerate(tensor.shape))
                found[operand.tensor] = replace(tensor, shape=shape)
    return found


def _of_batch(operator: Operator, batch: int) -> Operator:
    """With dims that count samples at their size; nothing is a quantity of the plan any more."""
    samples = operator.per_sample

    def sized(extent: Extent) -> Extent:
        return tuple((size * batch if dim in samples else size, dim) for size, dim in extent)

    dims = {dim: size * batch if dim in samples else size for dim, size in operator.dims.items()}
    return with_extents(operator, sized, dims=dims, per_sample=())
