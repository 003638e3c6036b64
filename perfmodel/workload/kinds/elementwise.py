"""Elementwise operators: activations, residual additions, biases, gate products."""

from __future__ import annotations

from collections.abc import Mapping

from perfmodel.foundation.errors import InputError, suggest
from perfmodel.workload.activations import ACTIVATIONS
from perfmodel.workload.graph import DimRoles, Operand, Operator
from perfmodel.workload.work import Data, Stream, extent

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
