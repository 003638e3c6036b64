"""Sums and means over full dims, such as global average pooling."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from perfmodel.foundation.errors import InputError, suggest
from perfmodel.workload.graph import DimRoles, Operand, Operator
from perfmodel.workload.work import Stream, extent, passes

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
