"""Small graphs written as text: `y[b,f] = x[b,h] * w[f,h]`."""

from __future__ import annotations

import re

from perfmodel.workload.operator import Dim, Graph, Operand, Operator, OperatorKind, Tensor, TensorRole

SIZE = 16


def operator(
    text: str, *, kernel_class: str = "", reduced: str = "", region: str = "layer", logical: dict[str, str] | None = None
) -> Operator:
    """An operator named after its output: `*` joins an einsum's operands, `+` an addition's, `,` those of any other kernel."""
    output, *inputs = (Operand(tensor=t, dims=tuple(d.split(","))) for t, d in re.findall(r"(\w+)\[([\w,]+)\]", text))
    kind = OperatorKind.EINSUM if "*" in text else OperatorKind.ADD if "+" in text else OperatorKind.STREAM
    if kernel_class in (OperatorKind.ATTENTION, OperatorKind.CROSS_ENTROPY, OperatorKind.EMBEDDING, OperatorKind.IDENTITY):
        kind = OperatorKind(kernel_class)
    names = dict.fromkeys(d for operand in (*inputs, output) for d in operand.dims)
    return Operator(
        name=output.tensor,
        kind=kind,
        region=region,
        dims=tuple(Dim(name=d, size=SIZE, logical=(logical or {}).get(d, d)) for d in names),
        inputs=tuple(inputs),
        output=output,
        kernel_class=kernel_class,
        reduced_dims=tuple(reduced),
    )


def small_graph(*operators: Operator, index: tuple[str, ...] = ("x",)) -> Graph:
    """Tensors that nothing makes are parameters, but for those named in `index` (no gradient); elements of two bytes."""
    made = {op.output.tensor for op in operators}
    tensors = {}
    for op in operators:
        for operand in (*op.inputs, op.output):
            t = operand.tensor
            role = TensorRole.ACTIVATION if t in made else TensorRole.INDEX if t in index else TensorRole.PARAMETER
            tensors[t] = Tensor(name=t, role=role, itemsize=2.0, num_rows=1)
    return Graph(name="small", operators=operators, tensors=tensors, num_layers=1, boundary=operators[0].output.tensor)
