"""Routing operators: choice of experts, permutation of rows to expert order, and their weighted sum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from perfmodel.workload.activations import ACTIVATIONS
from perfmodel.workload.graph import INDEX_BYTES, Data, Operand, Operator, RoutedExperts, Stream
from perfmodel.workload.kinds.extents import extent

_FLOAT32 = 4.0


def route(name: str, logits: Operand, output: Operand, dims: Mapping[str, int], *, score: str) -> Operator:
    """Scores of all experts, the best of them and their weights: logits[b,s,x] -> weights[b,s,k], in float32.

    score    softmax or sigmoid

    Passes over the logits: the scores are written, read to choose, and written again as a map with a weight where a token goes. Kept for
    backward: logits and scores. Not linear (R6), and a token needs all its logits: the dim of experts stays whole.
    """
    entries = extent(dims, logits.dims)
    read, scores = Data(extent=entries, of=0), Data(extent=entries, itemsize=_FLOAT32)
    chosen = Data(extent=extent(dims, output.dims), of=1)
    experts = tuple(dim for dim in logits.dims if dim not in output.dims)
    back = (replace(chosen, is_gradient=True), scores, replace(read, is_gradient=True))
    return Operator(
        name=name,
        kind="route",
        dims=dims,
        inputs=(logits,),
        output=output,
        forward=(
            Stream(kernel="softmax", elements=entries, accesses=(read, scores)),
            Stream(kernel="softmax", elements=entries, accesses=(scores, scores, chosen)),
        ),
        backward=(Stream(kernel="softmax", elements=entries, accesses=back),),
        unsplit=experts,
        saved=(read, scores),
        settings={"score": score},
    )


def permute(name: str, x: Operand, output: Operand, dims: Mapping[str, int]) -> Operator:
    """Each token's row once for each expert that it goes to: x[b,s,h] -> rows[b,s,k,h]; or rows in another order, as many as before.

    Backward adds the copies up. It is a gather: nothing is kept but the order, which is an index.
    """
    read, written = Data(extent=extent(dims, x.dims), of=0), Data(extent=extent(dims, output.dims), of=1)
    back = (replace(written, is_gradient=True), replace(read, is_gradient=True))
    return Operator(
        name=name,
        kind="permute",
        dims=dims,
        inputs=(x,),
        output=output,
        forward=(Stream(kernel="permute", elements=written.extent, accesses=(read, written)),),
        backward=(Stream(kernel="permute", elements=read.extent, accesses=back),),
        is_linear=True,
    )


def unpermute(name: str, rows: Operand, weights: Operand | None, output: Operand, dims: Mapping[str, int]) -> Operator:
    """The rows of a token added up: rows[b,s,k,h] (* weights[b,s,k]) -> y[b,s,h].

    weights   None where the rows were weighted before: then it is kept alone which row is of which token; else rows and weights are kept
              for backward, which makes the gradient of both
    """
    inputs = (rows,) if weights is None else (rows, weights)
    into = [Data(extent=extent(dims, operand.dims), of=place) for place, operand in enumerate(inputs)]
    out = Data(extent=extent(dims, output.dims), of=len(inputs))
    kept = tuple(into) if weights is not None else ()
    back = (replace(out, is_gradient=True), *kept, *(replace(each, is_gradient=True) for each in into))
    places = Data(extent=extent(dims, rows.dims[:-1]), itemsize=INDEX_BYTES)
    return Operator(
        name=name,
        kind="unpermute",
        dims=dims,
        inputs=inputs,
        output=output,
        forward=(Stream(kernel="permute", elements=into[0].extent, accesses=(*into, out)),),
        backward=(Stream(kernel="permute", elements=into[0].extent, accesses=back),),
        sums=tuple(dim for dim in rows.dims if dim and dim not in output.dims),
        saved=kept or (places,),
        is_linear=weights is None,
    )


def gated(
    name: str, function: str, x: Operand, weights: Operand | None, output: Operand, dims: Mapping[str, int], *, apart: float = 0.0
) -> Operator:
    """function(x_0) x_1 of the two halves of x[..., y, w] (function(x), where there is one), times the weight of its row, as one kernel.

    apart   bytes of an entry where a kernel of its own weights the rows of what was made, which is kept for it; 0: nothing does

    Kept for backward: the input, and the weights.
    """
    inputs = (x,) if weights is None else (x, weights)
    into = [Data(extent=extent(dims, operand.dims), of=place) for place, operand in enumerate(inputs)]
    out = Data(extent=extent(dims, output.dims), of=len(inputs))
    back = (replace(out, is_gradient=True), *into, *(replace(each, is_gradient=True) for each in into))
    kernel = ACTIVATIONS[function].kernel
    forward: tuple[Stream, ...] = (Stream(kernel=kernel, elements=out.extent, accesses=(*into, out)),)
    backward: tuple[Stream, ...] = (Stream(kernel=kernel, elements=out.extent, accesses=back),)
    if apart:
        unweighted, gradient = Data(extent=out.extent, itemsize=apart), replace(out, is_gradient=True)
        forward = (*forward, Stream(kernel="add", elements=out.extent, accesses=(unweighted, out)))
        backward = (Stream(kernel="add", elements=out.extent, accesses=(gradient, unweighted, gradient)), *backward)
        into.append(unweighted)
    return Operator(
        name=name,
        kind="gated",
        dims=dims,
        inputs=inputs,
        output=output,
        forward=forward,
        backward=backward,
        unsplit=tuple(dim for dim in x.dims if dim and dim not in output.dims),
        saved=tuple(into),
        settings={"function": function},
    )


def routed_experts(name: str, inputs: tuple[Operand, ...], output: Operand, dims: Mapping[str, int], *, top_k: int) -> Operator:
    """x[b,s,h], weights[b,s,k] of the chosen experts, up[e,(y,)w,h] and down[e,h,w] (and their biases) -> y[b,s,h], as one fused call.

    Dispatch and combine are part of it. Its experts lie where an engine deals them over chips: no axis cuts e or w.
    """
    work = RoutedExperts(num_experts=dims["e"], top_k=top_k, width=dims["w"], hidden_size=dims["h"], matrices=dims.get("y", 1))
    unsplit = tuple(dim for dim in dims if dim not in output.dims)
    return Operator(name=name, kind="routed_experts", dims=dims, inputs=inputs, output=output, forward=(work,), unsplit=unsplit)
