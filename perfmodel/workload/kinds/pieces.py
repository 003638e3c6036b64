"""Views of a tensor along its last position, contiguous copies of them, and the concatenation of two tensors."""

from __future__ import annotations

from collections.abc import Mapping

from perfmodel.foundation.errors import InputError
from perfmodel.workload.graph import DimRoles, Operand, Operator
from perfmodel.workload.work import Data, Stream, extent


def piece(name: str, x: Operand, output: Operand, dims: Mapping[str, int], *, start: int) -> Operator:
    """Return the view of the last position of x from `start` on, with the entries of the output's last dim: no work.

    Both positions are unsplit. An operator that saves the view keeps all of x in memory (`Operator.parts`).
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
        roles=DimRoles(unsplit=(entries, taken)),
        passes_gradient=True,
        settings={"start": start},
    )


def copy(name: str, x: Operand, output: Operand, dims: Mapping[str, int]) -> Operator:
    """Return a contiguous copy of a view, for kernels that need one; its gradient is copied back."""
    entries = extent(dims, output.dims)
    read, written = Data(extent=entries, of=0), Data(extent=entries, of=1)
    return Operator(
        name=name,
        kind="copy",
        dims=dims,
        inputs=(x,),
        output=output,
        forward=(Stream(kernel="default", elements=entries, accesses=(read, written)),),
        backward=(Stream(kernel="default", elements=entries, accesses=(written.gradient, read.gradient)),),
    )


def side_by_side(name: str, first: Operand, second: Operand, output: Operand, dims: Mapping[str, int]) -> Operator:
    """Return the concatenation first[..., n], second[..., o] -> y[..., n + o]. Positions that the second lacks (heads) get the same
    entries. The last positions are unsplit."""
    one, other, both = first.dims[-1], second.dims[-1], output.dims[-1]
    if dims[one] + dims[other] != dims[both]:
        raise InputError(f"operator {name}: {both}={dims[both]}: must be {one}={dims[one]} and {other}={dims[other]}; correct the shape")
    operands = (first, second, output)
    data = [Data(extent=extent(dims, operand.dims), of=position) for position, operand in enumerate(operands)]
    gradients = [operand_data.gradient for operand_data in data]
    entries = data[2].extent
    return Operator(
        name=name,
        kind="side_by_side",
        dims=dims,
        inputs=(first, second),
        output=output,
        forward=(Stream(kernel="default", elements=entries, accesses=tuple(data)),),
        backward=(Stream(kernel="default", elements=entries, accesses=(gradients[2], *gradients[:2])),),
        roles=DimRoles(unsplit=(one, other, both)),
    )
