"""Concatenation, prepending, selection and flattening of tensors along a position."""

from __future__ import annotations

from collections.abc import Mapping

from perfmodel.foundation.errors import InputError
from perfmodel.workload.graph import Operand, Operator
from perfmodel.workload.work import Extent, Stream, extent, passes


def concat(
    name: str,
    inputs: tuple[Operand, ...],
    output: Operand,
    dims: Mapping[str, int],
    *,
    axis: int,
    sizes: tuple[int, ...],
    layer: str = "",
) -> Operator:
    """Return the concatenation of the inputs along the unsharded position `axis`; `sizes` are their entries there.

    In backward the gradients of the inputs are views of the output's: no memory traffic.
    """
    if len(inputs) != len(sizes) or not inputs:
        raise InputError(f"operator {name}: sizes={sizes}: must be one for each of the {len(inputs)} inputs; correct them")
    for operand in (*inputs, output):
        _check_whole(name, operand, axis)
        if operand.dims != output.dims:
            raise InputError(
                f"operator {name}: operand {operand.tensor} has dims={operand.dims}: must have those of the output, {output.dims}"
            )
    rest = extent(dims, output.dims)
    parts: list[Extent] = [((size, ""), *rest) for size in sizes]
    written: Extent = ((sum(sizes), ""), *rest)
    return Operator(
        name=name,
        kind="concat",
        dims=dims,
        inputs=inputs,
        output=output,
        forward=(Stream(kernel="add", elements=written, accesses=passes(*parts, written)),),
        backward=(),
        settings={"axis": axis, "sizes": sizes},
        layer=layer,
    )


def prepend(name: str, token: Operand, x: Operand, output: Operand, dims: Mapping[str, int], *, length: int, layer: str = "") -> Operator:
    """Return token[d] before the `length` entries of x[b,"",d]: y[b,"",d], a class token; backward sums its gradient over the batch."""
    for operand in (x, output):
        _check_whole(name, operand, 1)
    rest = extent(dims, output.dims)
    read: Extent = ((length, ""), *rest)
    written: Extent = ((length + 1, ""), *rest)
    return Operator(
        name=name,
        kind="prepend",
        dims=dims,
        inputs=(token, x),
        output=output,
        forward=(Stream(kernel="add", elements=written, accesses=passes(read, written)),),
        backward=(Stream(kernel="add", elements=rest, accesses=passes(rest)),),
        settings={"length": length},
        layer=layer,
    )


def select(
    name: str, x: Operand, output: Operand, dims: Mapping[str, int], *, axis: int, index: int, size: int, layer: str = ""
) -> Operator:
    """Return entry `index` of the `size` along position `axis` of x, which the output lacks; backward fills the others with zeros."""
    _check_whole(name, x, axis)
    if not 0 <= index < size:
        raise InputError(f"operator {name}: index={index}: must be from 0 to {size - 1}; correct it")
    taken = extent(dims, output.dims)
    read: Extent = ((size, ""), *taken)
    return Operator(
        name=name,
        kind="select",
        dims=dims,
        inputs=(x,),
        output=output,
        forward=(Stream(kernel="add", elements=taken, accesses=passes(taken, taken)),),
        backward=(Stream(kernel="add", elements=read, accesses=passes(taken, read)),),
        settings={"axis": axis, "index": index, "size": size},
        layer=layer,
    )


def flatten(name: str, x: Operand, output: Operand, dims: Mapping[str, int], *, width: int, layer: str = "") -> Operator:
    """Return an image as the sequence of its positions, row by row: x[b,n,h,""] -> y[b,h,n]; position 1 has h * width entries.

    Sharding h splits the sequence into runs of full rows. Forward and backward are copies (the features become the last position).
    """
    _check_whole(name, x, 3)
    entries: Extent = (*extent(dims, x.dims), (width, ""))
    stream = Stream(kernel="add", elements=entries, accesses=passes(entries, entries))
    return Operator(
        name=name,
        kind="flatten",
        dims=dims,
        inputs=(x,),
        output=output,
        forward=(stream,),
        backward=(stream,),
        settings={"width": width},
        layer=layer,
    )


def _check_whole(name: str, operand: Operand, axis: int) -> None:
    if not 0 <= axis < len(operand.dims) or operand.dims[axis]:
        raise InputError(f'operator {name}: axis={axis}: must be the whole position ("") of {operand.tensor} {operand.dims}; correct it')
