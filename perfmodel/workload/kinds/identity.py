"""A layout boundary: between layers and at pipeline cuts."""

from __future__ import annotations

from collections.abc import Mapping

from perfmodel.workload.graph import Operand, Operator


def identity(name: str, x: Operand, output: Operand, dims: Mapping[str, int]) -> Operator:
    """Return output = x: no work; the gradient of the output is that of the input."""
    return Operator(name=name, kind="identity", dims=dims, inputs=(x,), output=output, is_linear=True, passes_gradient=True)
