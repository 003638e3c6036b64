"""A graph whose linear operators multiply in 8 or 4 bits: casts before its products, and what of them is kept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from perfmodel.workload.graph import Data, Graph, Operator, Product, Stream, Tensor, TensorRole, Work
from perfmodel.workload.recipes import KEPT_HIGH, Recipe

#: Kinds that can write a cast copy beside, or in place of, what they make: a cast after them reads nothing.
_FUSES_CASTS = ("rms_norm", "layer_norm", "elementwise", "gated")


def with_recipe(
    graph: Graph, recipe: Recipe, *, keeps_copies: bool = True, sends_rows: bool = False, gathers_weights: bool = False
) -> Graph:
    """`graph` where products with weights of repeated layers are as `recipe` says.

    keeps_copies      the framework keeps copies, of inputs for backward and of weights; else inputs as they are, cast again in backward
    sends_rows        rows go to experts, and gradients of what experts made, as they are cast, where the recipe can; back in full
    gathers_weights   weights are gathered as they are cast, where the recipe can, and where copies are kept live as these alone

    An input is cast once for all that read it, and kept as its cast copy alone; the gradient of each output is cast once. A cast is a pass
    over memory: it reads the tensor (twice where its largest entry must be known first; not at all where what makes the tensor writes the
    copies) and writes the copies. The extension that multiplies launches it too. Weights are cast once a step, with the optimizer's pass
    over them, which is not counted.
    """
    blocks = {region.name for region in graph.regions if region.is_block}
    low = {op.name for op in graph.operators if op.layer in blocks and _is_low(op, graph)}
    cast: set[str] = set()
    operators = []
    for op in graph.operators:
        if op.name in low:
            is_first = op.inputs[0].tensor not in cast
            cast.add(op.inputs[0].tensor)
            op = _with_casts(op, graph, recipe, is_first=is_first, keeps_copies=keeps_copies)
        operators.append(op)
    weights = {op.inputs[1].tensor for op in operators if op.name in low}
    copies = recipe.weight_copies * recipe.copy_bytes if keeps_copies else 0.0
    gathered = recipe.copy_bytes if gathers_weights and recipe.gathers_weights else 0.0
    tensors = dict(graph.tensors)
    for name in weights:
        beside = copies - (tensors[name].itemsize if gathered and keeps_copies else 0.0)
        tensors[name] = replace(tensors[name], copy_bytes=beside, gathered_bytes=gathered)
    if sends_rows and recipe.sends_rows:
        tensors |= {each.name: each for each in _sent_low(graph, recipe)}
    return replace(graph, operators=tuple(operators), tensors=tensors)


def _sent_low(graph: Graph, recipe: Recipe) -> Iterator[Tensor]:
    """Of rows on their way to experts the rows, of those on their way back the gradients, which travel the other way."""
    for op in graph.operators:
        rows = graph.tensors[op.output.tensor]
        if op.kind != "permute" or not rows.is_set:
            continue
        readers = {reader.kind for reader, _ in graph.consumers(rows.name)}
        if "permute" in readers:
            yield replace(rows, sent_bytes=recipe.copy_bytes)
        elif "unpermute" in readers:
            yield replace(rows, sent_gradient_bytes=recipe.copy_bytes)


def _is_low(op: Operator, graph: Graph) -> bool:
    is_linear = op.kind == "einsum" and graph.tensors[op.inputs[1].tensor].role is TensorRole.PARAMETER
    return is_linear and op.name_in_layer not in KEPT_HIGH


def _with_casts(op: Operator, graph: Graph, recipe: Recipe, *, is_first: bool, keeps_copies: bool) -> Operator:
    entries = next(data.extent for data in op.saved if data.of == 0) if op.saved else op.extent(op.inputs[0].dims)
    into, out = Data(extent=entries, of=0), Data(extent=op.extent(op.output.dims), of=len(op.inputs), is_gradient=True)
    maker = graph.producer(op.inputs[0].tensor)
    writes_copies = maker is not None and maker.kind in _FUSES_CASTS and maker.layer == op.layer
    forward, saved = list(map(_low, op.forward)), op.saved
    if keeps_copies:
        saved = tuple(data for data in op.saved if data.of != 0)
    copies = recipe.activation_copies if keeps_copies else 1
    if is_first:
        forward.insert(0, _cast(into, recipe, int(recipe.reads_twice) + int(not writes_copies), copies))
        saved = (*saved, Data(extent=entries, itemsize=recipe.copy_bytes)) if keeps_copies else saved
    again = [_cast(into, recipe, 1 + recipe.reads_twice, 1)] if is_first and not keeps_copies else []
    backward = [*again, _cast(out, recipe, 1 + recipe.reads_twice, recipe.gradient_copies), *map(_low, op.backward)]
    return replace(op, forward=tuple(forward), backward=tuple(backward), saved=saved)


def _cast(data: Data, recipe: Recipe, reads: int, copies: int) -> Stream:
    written = Data(extent=data.extent, itemsize=recipe.copy_bytes)
    accesses = (*(data,) * reads, *(written,) * copies)
    return Stream(kernel="add", elements=data.extent, accesses=accesses, is_launched_along=True)


def _low(work: Work) -> Work:
    return replace(work, is_low=True) if isinstance(work, Product) else work
