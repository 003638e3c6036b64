"""Maximum and average pooling over a window."""

from __future__ import annotations

from perfmodel.foundation.errors import InputError, suggest
from perfmodel.workload.graph import DimRoles, Operand, Operator, Tensor
from perfmodel.workload.work import Data, Extent, OwnTraffic, Stream, halo_exchange, halo_rows, passes, window_output

MODES = ("max", "average")

#: Indices of the maxima are int64: the memory of two float32 entries.
_INDEX: Extent = ((2, ""),)


def pooling(
    name: str,
    x: Tensor,
    output: str,
    *,
    window: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int] = (0, 0),
    mode: str = "max",
    layer: str = "",
) -> Operator:
    """Return x[b,c,h,w] -> y[b,c,h,w], each channel separately; h, w and their halo as in a convolution.

    x      an image; its shape determines that of the output
    mode   "max", or "average" with padding counted as zeros (torch's default)

    Saved for backward, as in torch: the input, and for a maximum its index.
    """
    if mode not in MODES:
        raise InputError(f"operator {name}: mode={mode}: is not known{suggest(mode, MODES)}")
    batch, channels, height, width = x.shape
    rows = window_output(name, height, window[0], stride[0], padding[0])
    columns = window_output(name, width, window[1], stride[1], padding[1])
    unsplit = [dim for dim, out, step, size in (("h", rows, stride[0], height), ("w", columns, stride[1], width)) if size != step * out]
    maps: Extent = ((batch, "b"), (channels, "c"))
    read: Extent = (*maps, (height, "h"), (width, "w"))
    written: Extent = (*maps, (rows, "h"), (columns, "w"))
    kept: tuple[Extent, ...] = ((*_INDEX, *written),) if mode == "max" else ()
    kernel = "max_pooling" if mode == "max" else "average_pooling"
    # Every output entry compares or adds a full window.
    taps: Extent = ((window[0], ""), (window[1], ""), *written)
    traffic: list[OwnTraffic] = []
    if "h" not in unsplit:
        traffic += halo_exchange("h", halo_rows(window[0], stride[0], padding[0]), (*maps, (width, "w")))
    if "w" not in unsplit:
        traffic += halo_exchange("w", halo_rows(window[1], stride[1], padding[1]), (*maps, (height, "h")))
    return Operator(
        name=name,
        kind="pooling",
        dims={"b": batch, "h": rows, "w": columns, "c": channels},
        inputs=(Operand(tensor=x.name, dims=("b", "c", "h", "w")),),
        output=Operand(tensor=output, dims=("b", "c", "h", "w")),
        forward=(Stream(kernel=kernel, elements=taps, accesses=passes(read, written, *kept)),),
        backward=(Stream(kernel=kernel, elements=taps, accesses=passes(written, *kept, read)),),
        traffic=tuple(traffic),
        roles=DimRoles(unsplit=tuple(unsplit)),
        saved=(Data(extent=read, of=0), *passes(*kept)),
        settings={"mode": mode, "window": window, "stride": stride, "padding": padding},
        layer=layer,
    )
