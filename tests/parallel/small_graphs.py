"""Small graphs written as text: `y[b,f] = x[b,h] * w[f,h]`."""

from __future__ import annotations

import re
from dataclasses import replace

from perfmodel.workload.graph import Graph, Operand, Operator, Repeat, Tensor, TensorRole
from perfmodel.workload.kinds.dense import einsum, elementwise

SIZE = 16


def operator(text: str, *, unsplit: str = "", layer: str = "layer") -> Operator:
    """An operator named after its output: `*` joins an einsum's operands, `+` an addition's; any other has layouts alone."""
    output, *inputs = (Operand(tensor=t, dims=tuple(d.split(","))) for t, d in re.findall(r"(\w+)\[([\w,]+)\]", text))
    dims = dict.fromkeys((d for operand in (*inputs, output) for d in operand.dims), SIZE)
    if "*" in text:
        result = einsum(output.tensor, *inputs, output, dims)
    elif "+" in text:
        result = elementwise(output.tensor, "add", tuple(inputs), output, dims)
    else:
        result = Operator(name=output.tensor, kind="any", dims=dims, inputs=tuple(inputs), output=output)
    return replace(result, roles=replace(result.roles, unsplit=tuple(unsplit)), layer=layer)


def small_graph(*operators: Operator, index: tuple[str, ...] = ("x",)) -> Graph:
    """Tensors that nothing makes are parameters, but for those named in `index` (no gradient); elements of two bytes."""
    outputs = {op.output.tensor for op in operators}
    tensors = {}
    for op in operators:
        for operand in (*op.inputs, op.output):
            t = operand.tensor
            role = TensorRole.ACTIVATION if t in outputs else TensorRole.INDEX if t in index else TensorRole.PARAMETER
            tensors[t] = Tensor(name=t, shape=tuple(op.dims[d] for d in operand.dims), role=role, itemsize=2.0, num_rows=1)
    return Graph(
        name="small", operators=operators, tensors=tensors, repeats=(Repeat(layer="layer", count=1, carried=operators[0].output.tensor),)
    )
