"""Operators that map entries one by one: activations, residual additions, biases, dropout, products of gates."""

from __future__ import annotations

from collections.abc import Mapping

from perfmodel.workload.network import Extent, NetworkOperator, Operand, Stream

#: What backward reads besides the gradient: nothing, the output, or the inputs.
_KEPT = {"add": "", "bias": "", "relu": "output", "tanh": "output", "sigmoid": "output", "gelu": "input", "gelu_tanh": "input",
         "silu": "input", "mul": "input"}  # fmt: skip


def elementwise(
    name: str, function: str, inputs: tuple[Operand, ...], output: Operand, dims: Mapping[str, int], *, layer: str = ""
) -> NetworkOperator:
    """output = function(inputs...), entry by entry; an input that lacks a dim is broadcast along it.

    Memory traffic: each input read and the output written once; backward reads the output's gradient and what is kept, and writes each
    input's gradient.
    """

    def extent(operand: Operand) -> Extent:
        return tuple((dims[dim], dim) for dim in operand.dims if dim)

    kept = _KEPT[function]
    saved = [extent(output)] if kept == "output" else [extent(operand) for operand in inputs] if kept == "input" else []
    out = extent(output)
    into = [] if function == "bias" else [extent(operand) for operand in inputs]
    kernel = function if function in ("gelu", "gelu_tanh", "silu") else "add"
    return NetworkOperator(
        name=name,
        kind="elementwise",
        dims=dims,
        inputs=inputs,
        output=output,
        forward=(Stream(kernel=kernel, elements=out, accesses=(*(extent(operand) for operand in inputs), out)),),
        backward=(Stream(kernel=kernel, elements=out, accesses=(out, *saved, *into)),),
        saved=tuple(saved),
        settings={"function": function},
        layer=layer,
    )
