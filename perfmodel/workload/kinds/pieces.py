"""Pieces of a tensor along its last position, copies of them, and two put side by side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from perfmodel.foundation.errors import InputError
from perfmodel.workload.graph import Data, Operand, Operator, Stream
from perfmodel.workload.kinds.extents import extent


def piece(name: str, x: Operand, output: Operand, dims: Mapping[str, int], *, start: int, layer: str = "") -> Operator:
    """Entries of the last position of x from `start` on, as many as the last of the output has, where they lie: no work.

    Both positions are whole. What keeps a piece keeps all of x (`Operator.parts` of the one that does).
    """
    *kept, entries = x.dims
    *_, taken = output.dims
    if output.dims[:-1] != tuple(kept) or start + dims[taken] > dims[entries]:
        raise InputError(
            f"operator {name}: start={start}: must leave {dims[taken]} entries of the {dims[entries]} of {x.tensor}; correct it"
        )
    return Operator(
        name=name,
        kind="piece",
        dims=dims,
        inputs=(x,),
        output=output,
        unsplit=(entries, taken),
        passes_gradient=True,
        settings={"start": start},
        layer=layer,
    )


def copy(name: str, x: Operand, output: Operand, dims: Mapping[str, int], *, layer: str = "") -> Operator:
    """A piece as a tensor of its own, for kernels that want their entries side by side; its gradient is copied back."""
    entries = extent(dims, output.dims)
    read, written = Data(extent=entries, of=0), Data(extent=entries, of=1)
    back = (replace(written, is_gradient=True), replace(read, is_gradient=True))
    return Operator(
        name=name,
        kind="copy",
        dims=dims,
        inputs=(x,),
        output=output,
        forward=(Stream(kernel="default", elements=entries, accesses=(read, written)),),
        backward=(Stream(kernel="default", elements=entries, accesses=back),),
        layer=layer,
    )


def side_by_side(name: str, first: Operand, second: Operand, output: Operand, dims: Mapping[str, int], *, layer: str = "") -> Operator:
    """first[..., n] beside second[..., o]: y[..., n + o], along positions that the second lacks (heads) with the same entries. The last
    positions are whole."""
    one, other, both = first.dims[-1], second.dims[-1], output.dims[-1]
    if dims[one] + dims[other] != dims[both]:
        raise InputError(f"operator {name}: {both}={dims[both]}: must be {one}={dims[one]} and {other}={dims[other]}; correct the shape")
    operands = (first, second, output)
    data = [Data(extent=extent(dims, operand.dims), of=place) for place, operand in enumerate(operands)]
    gradients = [replace(each, is_gradient=True) for each in data]
    entries = data[2].extent
    return Operator(
        name=name,
        kind="side_by_side",
        dims=dims,
        inputs=(first, second),
        output=output,
        forward=(Stream(kernel="default", elements=entries, accesses=tuple(data)),),
        backward=(Stream(kernel="default", elements=entries, accesses=(gradients[2], *gradients[:2])),),
        unsplit=(one, other, both),
        layer=layer,
    )
