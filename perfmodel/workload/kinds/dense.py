"""Operators of dense tensors: products of two tensors (any einsum), elementwise functions, norms, softmax, sums and means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.foundation.errors import InputError, suggest
from perfmodel.workload.activations import ACTIVATIONS
from perfmodel.workload.graph import DimRoles, Operand, Operator
from perfmodel.workload.work import Data, OwnTraffic, Pass, Product, Stream, extent, passes, reduced_rows


def einsum(
    name: str,
    first: Operand,
    second: Operand,
    output: Operand,
    dims: Mapping[str, int],
    *,
    second_is_parameter: bool = True,
    first_has_gradient: bool = True,
    second_has_gradient: bool = True,
    grouped: bool = False,
    unsplit: tuple[str, ...] = (),
    padded: tuple[str, ...] = (),
    layer: str = "",
) -> Operator:
    """Return first[...] * second[...] -> output[...], summed over the dims that the output lacks.

    Forward is one product; backward has one for the gradient of each operand. Dims of both operands and the output are the batch of
    products, those of one operand and the output m or n, those of both operands only k. Each operand is saved for the gradient of the other
    (parameters are in memory anyway). grouped: the batch of products is one call of a grouped GEMM kernel (experts).

    Source: R3 and R4 of the sharding algebra.
    """

    of_batch, of_m, of_n, of_k = list[str](), list[str](), list[str](), list[str]()
    for dim in dims:
        if dim not in output.dims:
            of_k.append(dim)
        elif dim in first.dims and dim in second.dims:
            of_batch.append(dim)
        elif dim in first.dims:
            of_m.append(dim)
        elif dim in second.dims:
            of_n.append(dim)
    batch, m, n, k = extent(dims, of_batch), extent(dims, of_m), extent(dims, of_n), extent(dims, of_k)
    backward, saved = [], []
    if first_has_gradient:
        backward.append(Product(batch=batch, m=m, n=k, k=n, gradient_of=0, is_grouped=grouped))
    if second_has_gradient:
        backward.append(Product(batch=batch, m=k, n=n, k=m, gradient_of=1, is_grouped=grouped))
        saved.append(Data(extent=extent(dims, first.dims), of=0))
    if first_has_gradient and not second_is_parameter:
        saved.append(Data(extent=extent(dims, second.dims), of=1))
    return Operator(
        name=name,
        kind="einsum",
        dims=dims,
        inputs=(first, second),
        output=output,
        forward=(Product(batch=batch, m=m, n=n, k=k, is_grouped=grouped),),
        backward=tuple(backward),
        roles=DimRoles(sums=tuple(of_k), unsplit=unsplit, padded=padded),
        saved=tuple(saved),
        layer=layer,
    )


#: Data that backward reads in addition to the gradient: none, the output, or the inputs.
_KEPT = {"add": "", "bias": "", "scale": "", "mul": "input", "sigmoid_gate": "input", "tanh": "output", "sigmoid": "output"} | {
    name: activation.kept for name, activation in ACTIVATIONS.items()
}


def elementwise(
    name: str,
    function: str,
    inputs: tuple[Operand, ...],
    output: Operand,
    dims: Mapping[str, int],
    *,
    unsplit: tuple[str, ...] = (),
    padded: tuple[str, ...] = (),
    layer: str = "",
) -> Operator:
    """Return output = function(inputs...), elementwise; an input that lacks a dim is broadcast along it.

    `scale` multiplies by a number; `sigmoid_gate` multiplies the first input by the sigmoid of the second.

    Memory traffic: each input is read and the output written once (a bias stays in the cache). Backward reads the output's gradient and the
    saved data, and writes each input's gradient. Terms of a sum get the sum's gradient unchanged: only those of broadcast terms are summed
    and written.
    """
    if function not in _KEPT:
        raise InputError(f"operator {name}: function={function}: is not known{suggest(function, _KEPT)}")
    kept = _KEPT[function]
    entries = extent(dims, output.dims)
    out = Data(extent=entries, of=len(inputs))
    into = [Data(extent=extent(dims, operand.dims), of=position) for position, operand in enumerate(inputs)]
    saved = [out] if kept == "output" else into if kept == "input" else []
    written = [data for data in into if len(data.extent) < len(entries)] if function == "add" else [] if function == "bias" else into
    read = into[:1] if function == "bias" else into
    kernel = ACTIVATIONS[function].kernel if function in ACTIVATIONS else "add"
    gradients = [data.gradient for data in (out, *written)]
    backward = Stream(kernel=kernel, elements=entries, accesses=(gradients[0], *saved, *gradients[1:]))
    return Operator(
        name=name,
        kind="elementwise",
        dims=dims,
        inputs=inputs,
        output=output,
        forward=(Stream(kernel=kernel, elements=entries, accesses=(*read, out)),),
        backward=() if function == "add" and not written else (backward,),
        roles=DimRoles(unsplit=unsplit, padded=padded),
        saved=tuple(saved),
        is_linear=function == "add",
        passes_gradient=function == "bias" or (function == "add" and not written),
        settings={"function": function},
        layer=layer,
    )


def identity(name: str, x: Operand, output: Operand, dims: Mapping[str, int]) -> Operator:
    """Return output = x: no work; the gradient of the output is that of the input."""
    return Operator(name=name, kind="identity", dims=dims, inputs=(x,), output=output, is_linear=True, passes_gradient=True)


def dropout(name: str, x: Operand, output: Operand, dims: Mapping[str, int]) -> Operator:
    """Return output = mask x / (1 - p), elementwise. Saved for backward: the mask, one byte per entry."""
    entries = extent(dims, output.dims)
    read, written, mask = Data(extent=entries, of=0), Data(extent=entries, of=1), Data(extent=entries, itemsize=1.0)
    return Operator(
        name=name,
        kind="dropout",
        dims=dims,
        inputs=(x,),
        output=output,
        forward=(Stream(kernel="dropout", elements=entries, accesses=(read, written, mask)),),
        backward=(Stream(kernel="dropout", elements=entries, accesses=(written.gradient, mask, read.gradient)),),
        saved=(mask,),
    )


def layer_norm(
    name: str,
    x: Operand,
    weight: Operand | None,
    bias: Operand | None,
    output: Operand,
    dims: Mapping[str, int],
    *,
    eps: float = 1e-5,
    over: tuple[str, ...] = (),
    unsplit: tuple[str, ...] = (),
    layer: str = "",
) -> Operator:
    """Return y = weight (x - mean) / sqrt(variance + eps) + bias over the dims `over` (default: dims of the weight). The inputs are x,
    weight and bias, as far as given."""
    inputs = tuple(operand for operand in (x, weight, bias) if operand is not None)
    return _norm(
        name, "layer_norm", inputs, output, dims, kernel="layernorm", statistics=2, eps=eps, over=over, unsplit=unsplit, layer=layer
    )


def rms_norm(
    name: str,
    x: Operand,
    weight: Operand | None,
    output: Operand,
    dims: Mapping[str, int],
    *,
    eps: float = 1e-6,
    over: tuple[str, ...] = (),
) -> Operator:
    """Return y = weight x / sqrt(mean of x^2 + eps) over the dims `over` (default: dims of the weight)."""
    inputs = (x,) if weight is None else (x, weight)
    return _norm(name, "rms_norm", inputs, output, dims, kernel="rmsnorm", statistics=1, eps=eps, over=over)


def _norm(
    name: str,
    kind: str,
    inputs: tuple[Operand, ...],
    output: Operand,
    dims: Mapping[str, int],
    *,
    kernel: str,
    statistics: int,
    eps: float,
    over: tuple[str, ...],
    unsplit: tuple[str, ...] = (),
    layer: str = "",
) -> Operator:
    """Return a norm. Where a normalised dim is sharded: an all-reduce of the row statistics in forward, and one of the same size in
    backward.

    Source: sharding algebra, section 4 (norm over sharded h). Saved for backward: the input and the statistics.
    """
    x, scale = inputs[0], inputs[1].dims if len(inputs) > 1 else ()
    over = over or tuple(filter(None, scale))
    if not over or not set(over) <= set(x.dims):
        raise InputError(f"operator {name}: weight dims={scale}: must be some of the dims {x.dims} of the input; correct them")
    entries = extent(dims, x.dims)
    rows = reduced_rows(dims, x.dims, over)
    sums = reduced_rows(dims, x.dims, over, values=statistics)
    read, written = Data(extent=entries, of=0), Data(extent=entries, of=len(inputs))
    reduced = OwnTraffic(kind=CollectiveKind.ALL_REDUCE, over=over, extent=sums, phase=Pass.FORWARD, itemsize=4.0)
    return Operator(
        name=name,
        kind=kind,
        dims=dims,
        inputs=inputs,
        output=output,
        forward=(Stream(kernel=kernel, elements=entries, accesses=(read, written)),),
        backward=(Stream(kernel=kernel, elements=entries, accesses=(written.gradient, read, read.gradient)),),
        traffic=(reduced, replace(reduced, phase=Pass.BACKWARD)),
        roles=DimRoles(unsplit=unsplit),
        saved=(read, *(Data(extent=rows, itemsize=4.0),) * statistics),
        settings={"eps": eps, "over": " ".join(over)},
        layer=layer,
    )


def softmax(
    name: str,
    x: Operand,
    output: Operand,
    dims: Mapping[str, int],
    *,
    over: str,
    scale: float = 1.0,
    causal_queries: str = "",
    sinks: Operand | None = None,
    layer: str = "",
) -> Operator:
    """Return y = softmax(scale x) over dim `over` (several: "i j").

    With a causal mask, entries i >= j of dim `causal_queries` attend to entry j of `over`.

    sinks: extra logits in every sum, without an output entry (a logit of each head without a key).

    Where `over` is sharded: all-reduces of the maximum and the sum of every row in forward, of the sum of y dy in backward. The output is
    saved.

    Source: sharding algebra, section 4.
    """
    reduced = tuple(over.split())
    for dim in (*reduced, causal_queries) if causal_queries else reduced:
        if dim not in x.dims:
            raise InputError(f"operator {name}: dim {dim!r}: is not one of the dims {x.dims} of the input; name one of them")
    entries = extent(dims, x.dims)
    rows = reduced_rows(dims, x.dims, reduced)
    inputs = (x,) if sinks is None else (x, sinks)
    read, written = Data(extent=entries, of=0), Data(extent=entries, of=len(inputs))
    return Operator(
        name=name,
        kind="softmax",
        dims=dims,
        inputs=inputs,
        output=output,
        forward=(Stream(kernel="softmax", elements=entries, accesses=(read, written)),),
        backward=(Stream(kernel="softmax", elements=entries, accesses=(written.gradient, written, read.gradient)),),
        traffic=tuple(
            OwnTraffic(kind=CollectiveKind.ALL_REDUCE, over=reduced, extent=rows, phase=phase, itemsize=4.0)
            for phase in (Pass.FORWARD, Pass.FORWARD, Pass.BACKWARD)
            if reduced
        ),
        saved=(written,),
        settings={"over": over, "scale": scale, "causal_queries": causal_queries},
        layer=layer,
    )


FUNCTIONS = ("mean", "sum")


def reduction(name: str, x: Operand, output: Operand, dims: Mapping[str, int], *, function: str = "mean", layer: str = "") -> Operator:
    """Return the sum of x over the dims that the output lacks, or the mean: that sum over `count`, the number of summed entries unsharded.

    Both are linear: where a summed dim is sharded the output is partial. Nothing is saved for backward.
    """
    if function not in FUNCTIONS:
        raise InputError(f"operator {name}: function={function}: is not known{suggest(function, FUNCTIONS)}")
    summed = tuple(dim for dim in x.dims if dim and dim not in output.dims)
    if not summed:
        raise InputError(f"operator {name}: output dims={output.dims}: must lack a dim of the input; leave out what is reduced")
    read, written = extent(dims, x.dims), extent(dims, output.dims)
    return Operator(
        name=name,
        kind="reduction",
        dims=dims,
        inputs=(x,),
        output=output,
        forward=(Stream(kernel="default", elements=read, accesses=passes(read, written)),),
        backward=(Stream(kernel="default", elements=read, accesses=passes(written, read)),),
        roles=DimRoles(sums=summed),
        settings={"function": function, "count": prod(dims[dim] for dim in summed)},
        layer=layer,
    )
