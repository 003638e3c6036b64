"""Rewrite of the graph for 8- or 4-bit products: casts before them, and the copies saved for backward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from perfmodel.workload.graph import Graph, Operator, Tensor, TensorRole, WeightCasts
from perfmodel.workload.recipes import KEPT_HIGH, Recipe
from perfmodel.workload.work import Data, Product, Stream, Work, extent

#: Kinds that can write a cast copy with or instead of their output: a cast after them reads nothing.
_FUSES_CASTS = ("rms_norm", "layer_norm", "elementwise", "gated")


def with_recipe(
    graph: Graph,
    recipe: Recipe,
    *,
    keeps_copies: bool = True,
    sends_rows: bool = False,
    gathers_weights: bool = False,
    pads_rows: bool = False,
    master_bytes: float = 4.0,
) -> Graph:
    """Return `graph` with the products of weights in repeated layers computed by `recipe`.

    keeps_copies      the framework keeps low-precision copies, of inputs for backward and of weights; else it saves inputs unchanged and
                      casts again in backward
    sends_rows        dispatch of rows to experts, and of gradients of expert outputs, in the cast format, where the recipe allows it;
                      the combine in full precision
    gathers_weights   weights are all-gathered in the cast format, where the recipe allows it; kept copies then replace 16-bit weights
    pads_rows         rows of experts are copied to padded multiples for their products, and back
    master_bytes      bytes of an element of the master weights, from which such weights are cast

    An input is cast once for all its readers, and only the cast copy is saved; the gradient of each output is cast once. A cast is a pass
    over memory: it reads the tensor and writes the copies. It reads twice where the absolute maximum must be known first, and not at all
    where the producer writes the copies. The library call of the product launches it too. A weight is cast as in `_weight_casts` where
    copies are kept, or gathered. Else it is cast in every pass, forward and backward, in the operand order of that product (torchao,
    `float8/float8_linear.py`).
    """
    blocks = {region.name for region in graph.regions if region.is_block}
    einsums = [op for op in graph.operators if op.layer in blocks and op.kind == "einsum" and op.name_in_layer not in KEPT_HIGH]
    low = {op.name for op in einsums if graph.tensors[op.inputs[1].tensor].role is TensorRole.PARAMETER}
    cast: set[str] = set()
    operators = []
    for op in graph.operators:
        if op.name in low:
            is_first = op.inputs[0].tensor not in cast
            cast.add(op.inputs[0].tensor)
            op = _with_casts(op, graph, recipe, is_first=is_first, keeps_copies=keeps_copies)
            if pads_rows:
                op = _with_padding(op, graph)
            if not keeps_copies:
                op = _with_weight_casts(op, recipe, is_gathered_low=gathers_weights and recipe.gathers_weights)
        operators.append(op)
    weights = {op.inputs[1].tensor for op in operators if op.name in low}
    copies = recipe.weight_copies * recipe.copy_bytes if keeps_copies else 0.0
    gathered = recipe.copy_bytes if gathers_weights and recipe.gathers_weights else 0.0
    tensors = dict(graph.tensors)
    for name in weights:
        extra = copies - (tensors[name].itemsize if gathered and keeps_copies else 0.0)
        casts = _weight_casts(tensors[name], recipe, keeps_copies=keeps_copies, is_gathered_low=gathered > 0.0, master_bytes=master_bytes)
        tensors[name] = replace(tensors[name], copy_bytes=extra, gathered_bytes=gathered, casts=casts)
    if sends_rows and recipe.sends_rows:
        tensors |= {tensor.name: tensor for tensor in _sent_low(graph, recipe)}
    return replace(graph, operators=tuple(operators), tensors=tensors)


def _weight_casts(weight: Tensor, recipe: Recipe, *, keeps_copies: bool, is_gathered_low: bool, master_bytes: float) -> WeightCasts:
    """Return the memory traffic per element of making the copies of a weight.

    from 16 bits     r w + n c            one pass reads the weight (r = 2 where the absolute maximum must be known first) and writes n
                                         copies
    from the copy    2 c (n - 1)          the copy arrives with the all-gather; each further order is made from it: a read and a write
    from the master  r m + c - w          the optimizer casts its update in a separate pass, in place of writing the weight; where no
                                         copies are kept (torchao) the all-gather casts, and (r - 1) m is left: the absolute maxima,
                                         once a step for all gathers

    w, c, m   bytes of an element of the weight in 16 bits, of a copy with its scales, of the master

    Source: TransformerEngine, `pytorch/module/linear.py` (workspace of a cast weight), `pytorch/tensor/utils.py`
    (`quantize_master_weights`: maxima of float32 shards, then their cast; `post_all_gather_processing`: the other order);
    torchao, `float8/fsdp_utils.py` (`precompute_float8_dynamic_scale_for_fsdp`).
    """
    reads, copies, c = 1 + recipe.reads_twice, recipe.weight_copies, recipe.copy_bytes
    if not is_gathered_low:
        read = reads * weight.itemsize
        return WeightCasts(all_copies=read + copies * c, one_copy=read + c) if keeps_copies else WeightCasts()
    update = reads * master_bytes + c - weight.itemsize if keeps_copies else (reads - 1) * master_bytes
    others = 2.0 * c * (copies - 1) if keeps_copies else 0.0
    return WeightCasts(all_copies=others, update=update if weight.has_gradient else 0.0)


def _with_weight_casts(op: Operator, recipe: Recipe, *, is_gathered_low: bool) -> Operator:
    """Add a cast pass to each product that reads the weight: forward, and backward for the input's gradient. For a weight gathered in the
    cast format, only the operand order of backward is made, from the copy."""
    weight = Data(extent=extent(op.dims, op.inputs[1].dims), of=1)
    if is_gathered_low:
        copy = replace(weight, of=None, itemsize=recipe.copy_bytes)
        again = [_cast(copy, recipe, 1, 1)] if recipe.weight_copies > 1 else []
        return replace(op, backward=(*again, *op.backward))
    cast = _cast(weight, recipe, 1 + recipe.reads_twice, 1)
    return replace(op, forward=(cast, *op.forward), backward=(cast, *op.backward))


def _with_padding(op: Operator, graph: Graph) -> Operator:
    """Add row padding to grouped products: a copy of the rows before the first product of an expert, and one after the last. Each has one
    for the gradients. The padding passes are counted without the padded rows."""
    if not any(isinstance(work, Product) and work.is_grouped for work in op.forward):
        return op
    maker = graph.producer(op.inputs[0].tensor)
    is_first = maker is not None and maker.kind == "permute"
    position = 0 if is_first else len(op.inputs)
    rows = Data(extent=extent(op.dims, op.operands[position].dims), of=position)
    gradient = rows.gradient
    copy = Stream(kernel="permute", elements=rows.extent, accesses=(rows, rows))
    back = Stream(kernel="permute", elements=rows.extent, accesses=(gradient, gradient))
    if is_first:
        return replace(op, forward=(copy, *op.forward), backward=(*op.backward, back))
    return replace(op, forward=(*op.forward, copy), backward=(back, *op.backward))


def _sent_low(graph: Graph, recipe: Recipe) -> Iterator[Tensor]:
    """Yield the tensors sent in low precision: rows dispatched to experts, and gradients of rows in the combine's backward."""
    for op in graph.operators:
        rows = graph.tensors[op.output.tensor]
        if op.kind != "permute" or not rows.is_set:
            continue
        readers = {reader.kind for reader, _ in graph.consumers(rows.name)}
        if "permute" in readers:
            yield replace(rows, sent_bytes=recipe.copy_bytes)
        elif "unpermute" in readers:
            yield replace(rows, sent_gradient_bytes=recipe.copy_bytes)


def _with_casts(op: Operator, graph: Graph, recipe: Recipe, *, is_first: bool, keeps_copies: bool) -> Operator:
    entries = next((data.extent for data in op.saved if data.of == 0), extent(op.dims, op.inputs[0].dims))
    into, out = Data(extent=entries, of=0), Data(extent=extent(op.dims, op.output.dims), of=len(op.inputs), is_gradient=True)
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
