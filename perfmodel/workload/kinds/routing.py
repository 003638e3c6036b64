"""Routing operators: choice of experts, permutation of rows to expert order, and their weighted sum."""

from __future__ import annotations

from collections.abc import Mapping

from perfmodel.workload.activations import ACTIVATIONS
from perfmodel.workload.graph import INDEX_BYTES, DimRoles, Operand, Operator
from perfmodel.workload.work import Data, RoutedExperts, Stream, extent

_FLOAT32 = 4.0


def route(name: str, logits: Operand, output: Operand, dims: Mapping[str, int], *, score: str) -> Operator:
    """Return the router: scores of all experts, top-k and weights: logits[b,s,x] -> weights[b,s,k], in float32.

    score    "softmax" or "sigmoid"

    Passes over the logits: the scores are written, read for the selection, and written again as a map of token weights. Saved for backward:
    logits and scores. Not linear (R6); a token needs all its logits: the dim of experts is unsplit.
    """
    entries = extent(dims, logits.dims)
    read, scores = Data(extent=entries, of=0), Data(extent=entries, itemsize=_FLOAT32)
    chosen = Data(extent=extent(dims, output.dims), of=1)
    experts = tuple(dim for dim in logits.dims if dim not in output.dims)
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
        backward=(Stream(kernel="softmax", elements=entries, accesses=(chosen.gradient, scores, read.gradient)),),
        roles=DimRoles(unsplit=experts),
        saved=(read, scores),
        settings={"score": score},
    )


def permute(name: str, x: Operand, output: Operand, dims: Mapping[str, int]) -> Operator:
    """Return each token's row once per chosen expert: x[b,s,h] -> rows[b,s,k,h]; or a reordering of the same number of rows.

    Backward adds up the copies. It is a gather: only the order is saved, which is an index.
    """
    read, written = Data(extent=extent(dims, x.dims), of=0), Data(extent=extent(dims, output.dims), of=1)
    return Operator(
        name=name,
        kind="permute",
        dims=dims,
        inputs=(x,),
        output=output,
        forward=(Stream(kernel="permute", elements=written.extent, accesses=(read, written)),),
        backward=(Stream(kernel="permute", elements=read.extent, accesses=(written.gradient, read.gradient)),),
        is_linear=True,
    )


def unpermute(name: str, rows: Operand, weights: Operand | None, output: Operand, dims: Mapping[str, int]) -> Operator:
    """Return the sum of the rows of each token: rows[b,s,k,h] (* weights[b,s,k]) -> y[b,s,h].

    weights   None where the rows were weighted before: then only the index of each row's token is saved; else rows and weights are saved
              for backward, which computes both gradients
    """
    inputs = (rows,) if weights is None else (rows, weights)
    into = [Data(extent=extent(dims, operand.dims), of=position) for position, operand in enumerate(inputs)]
    out = Data(extent=extent(dims, output.dims), of=len(inputs))
    kept = tuple(into) if weights is not None else ()
    places = Data(extent=extent(dims, rows.dims[:-1]), itemsize=INDEX_BYTES)
    return Operator(
        name=name,
        kind="unpermute",
        dims=dims,
        inputs=inputs,
        output=output,
        forward=(Stream(kernel="permute", elements=into[0].extent, accesses=(*into, out)),),
        backward=(Stream(kernel="permute", elements=into[0].extent, accesses=(out.gradient, *kept, *(data.gradient for data in into))),),
        roles=DimRoles(sums=tuple(dim for dim in rows.dims if dim and dim not in output.dims)),
        saved=kept or (places,),
        is_linear=weights is None,
    )


def gated(
    name: str, function: str, x: Operand, weights: Operand | None, output: Operand, dims: Mapping[str, int], *, apart: float = 0.0
) -> Operator:
    """Return function(x_0) x_1 of the two halves of x[..., y, w] (function(x) without halves), times the row weight, in one kernel.

    apart   bytes of an entry where a separate kernel weights the rows of the output, which is saved for it; 0: no such kernel

    Saved for backward: the input, and the weights.
    """
    inputs = (x,) if weights is None else (x, weights)
    into = [Data(extent=extent(dims, operand.dims), of=position) for position, operand in enumerate(inputs)]
    out = Data(extent=extent(dims, output.dims), of=len(inputs))
    kernel = ACTIVATIONS[function].kernel
    forward: tuple[Stream, ...] = (Stream(kernel=kernel, elements=out.extent, accesses=(*into, out)),)
    backward: tuple[Stream, ...] = (
        Stream(kernel=kernel, elements=out.extent, accesses=(out.gradient, *into, *(data.gradient for data in into))),
    )
    if apart:
        unweighted, gradient = Data(extent=out.extent, itemsize=apart), out.gradient
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
        roles=DimRoles(unsplit=tuple(dim for dim in x.dims if dim and dim not in output.dims)),
        saved=tuple(into),
        settings={"function": function},
    )


def routed_experts(name: str, inputs: tuple[Operand, ...], output: Operand, dims: Mapping[str, int], *, top_k: int) -> Operator:
    """Return x[b,s,h], weights[b,s,k] of the chosen experts, up[e,(y,)w,h] and down[e,h,w] (and biases) -> y[b,s,h], as one fused call.

    Dispatch and combine are included. The engine assigns its experts to chips: no axis shards e or w.
    """
    work = RoutedExperts(num_experts=dims["e"], top_k=top_k, width=dims["w"], hidden_size=dims["h"], matrices=dims.get("y", 1))
    unsplit = tuple(dim for dim in dims if dim not in output.dims)
    return Operator(
        name=name, kind="routed_experts", dims=dims, inputs=inputs, output=output, forward=(work,), roles=DimRoles(unsplit=unsplit)
    )
