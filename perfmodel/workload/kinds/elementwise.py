"""Operators that map entries one by one: activations, residual additions, biases, products of gates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from perfmodel.foundation.errors import InputError, suggest
from perfmodel.workload.activations import ACTIVATIONS
from perfmodel.workload.graph import Data, Operand, Operator, Stream
from perfmodel.workload.kinds.extents import extent

#: What backward reads besides the gradient: nothing, the output, or the inputs.
_KEPT = {"add": "", "bias": "", "scale": "", "mul": "input", "sigmoid_gate": "input", "tanh": "output", "sigmoid": "output"} | {
    name: each.kept for name, each in ACTIVATIONS.items()
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
    """output = function(inputs...), entry by entry; an input that lacks a dim is broadcast along it. `scale`: times a number;
    `sigmoid_gate`: the first times the sigmoid of the second.

    Memory traffic: each input read and the output written once (a bias stays in the cache); backward reads the output's gradient and what
    is kept, and writes each input's gradient. The gradient of a sum is that of each of its terms: only terms that were broadcast are
    summed and written.
    """
    if function not in _KEPT:
        raise InputError(f"operator {name}: function={function}: is not known{suggest(function, _KEPT)}")
    kept = _KEPT[function]
    entries = extent(dims, output.dims)
    out = Data(extent=entries, of=len(inputs))
    into = [Data(extent=extent(dims, operand.dims), of=place) for place, operand in enumerate(inputs)]
    saved = [out] if kept == "output" else into if kept == "input" else []
    written = [each for each in into if len(each.extent) < len(entries)] if function == "add" else [] if function == "bias" else into
    read = into[:1] if function == "bias" else into
    kernel = ACTIVATIONS[function].kernel if function in ACTIVATIONS else "add"
    gradients = [replace(each, is_gradient=True) for each in (out, *written)]
    backward = Stream(kernel=kernel, elements=entries, accesses=(gradients[0], *saved, *gradients[1:]))
    return Operator(
        name=name,
        kind="elementwise",
        dims=dims,
        inputs=inputs,
        output=output,
        forward=(Stream(kernel=kernel, elements=entries, accesses=(*read, out)),),
        backward=() if function == "add" and not written else (backward,),
        unsplit=unsplit,
        padded=padded,
        saved=tuple(saved),
        is_linear=function == "add",
        passes_gradient=function == "bias" or (function == "add" and not written),
        settings={"function": function},
        layer=layer,
    )
