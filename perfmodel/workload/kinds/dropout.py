"""Dropout with a saved mask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from perfmodel.workload.graph import Data, Operand, Operator, Stream
from perfmodel.workload.kinds.extents import extent


def dropout(name: str, x: Operand, output: Operand, dims: Mapping[str, int]) -> Operator:
    """Return output = mask x / (1 - p), elementwise. Saved for backward: the mask, one byte per entry."""
    entries = extent(dims, output.dims)
    read, written, mask = Data(extent=entries, of=0), Data(extent=entries, of=1), Data(extent=entries, itemsize=1.0)
    back = (replace(written, is_gradient=True), mask, replace(read, is_gradient=True))
    return Operator(
        name=name,
        kind="dropout",
        dims=dims,
        inputs=(x,),
        output=output,
        forward=(Stream(kernel="dropout", elements=entries, accesses=(read, written, mask)),),
        backward=(Stream(kernel="dropout", elements=entries, accesses=back),),
        saved=(mask,),
    )
