"""Operators that map entries one by one: activations, residual additions, biases, products of gates."""

from __future__ import annotations

from collections.abc import Mapping

from perfmodel.foundation.errors import InputError, suggest
from perfmodel.workload.kinds.extents import extent
from perfmodel.workload.network import NetworkOperator, Operand, Stream

#: What backward reads besides the gradient: nothing, the output, or the inputs.
_KEPT = {"add": "", "bias": "", "relu": "output", "tanh": "output", "sigmoid": "output", "gelu": "input", "gelu_tanh": "input",
         "silu": "input", "mul": "input"}  # fmt: skip


def elementwise(
    name: str,
    function: str,
    inputs: tuple[Operand, ...],
    output: Operand,
    dims: Mapping[str, int],
    *,
    whole: tuple[str, ...] = (),
    padded: tuple[str, ...] = (),
    layer: str = "",
) -> NetworkOperator:
    """output = function(inputs...), entry by entry; an input that lacks a dim is broadcast along it.

    Memory traffic: each input read and the output written once; backward reads the output's gradient and what is kept, and writes each
    input's gradient. The gradient of a sum is that of each of its terms: only terms that were broadcast are summed and written.
    """
    if function not in _KEPT:
        raise InputError(f"operator {name}: function={function}: is not known{suggest(function, _KEPT)}")
    kept = _KEPT[function]
    out = extent(dims, output.dims)
    into = [extent(dims, operand.dims) for operand in inputs]
    saved = [out] if kept == "output" else into if kept == "input" else []
    written = [each for each in into if len(each) < len(out)] if function == "add" else [] if function == "bias" else into
    kernel = function if function in ("gelu", "gelu_tanh", "silu") else "add"
    backward = Stream(kernel=kernel, elements=out, accesses=(out, *saved, *written))
    return NetworkOperator(
        name=name,
        kind="elementwise",
        dims=dims,
        inputs=inputs,
        output=output,
        forward=(Stream(kernel=kernel, elements=out, accesses=(*into, out)),),
        backward=() if function == "add" and not written else (backward,),
        whole=whole,
        padded=padded,
        saved=tuple(saved),
        kept=(output.tensor,) if kept == "output" else tuple(operand.tensor for operand in inputs) if kept == "input" else (),
        settings={"function": function},
        layer=layer,
    )
