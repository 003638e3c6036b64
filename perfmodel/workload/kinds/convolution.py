"""Two-dimensional convolutions, including grouped and depthwise ones."""

from __future__ import annotations

from perfmodel.foundation.errors import InputError
from perfmodel.workload.graph import DimRoles, Operand, Operator, Tensor
from perfmodel.workload.work import Data, Extent, OwnTraffic, Pass, Product, halo_exchange, halo_rows, window_output


def convolution(
    name: str,
    x: Tensor,
    weight: str,
    output: str,
    *,
    filters: int,
    window: tuple[int, int],
    stride: tuple[int, int] = (1, 1),
    padding: tuple[int, int] = (0, 0),
    dilation: tuple[int, int] = (1, 1),
    groups: int = 1,
    first_has_gradient: bool = True,
    layer: str = "",
) -> Operator:
    """Return x[b,c,h,w] * W[n,c,r,s] -> y[b,n,h,w]; grouped x[b,g,h,w] * W[g,,r,s] -> y[b,g,h,w], where g shards full groups.

    x                   an image; its shape determines that of the output
    first_has_gradient  False where x is the input data

    h and w are dims of the output. They shard the input likewise, so they are unsplit unless input = stride * output. A sharded dim
    exchanges the rows that windows share with the neighbours (halo). Forward is a product with m = b h w, n, k = c r s; backward has one
    for each gradient.

    Source: sharding algebra, section 2 (convolution). Halos reach one neighbour: a shard has at least the rows of the halo.
    """
    batch, channels, height, width = x.shape
    for field, value in (("channels", channels), ("filters", filters)):
        if groups < 1 or value % groups:
            raise InputError(f"operator {name}: groups={groups}: must divide {field}={value}; use a divisor")
    rows = window_output(name, height, window[0], stride[0], padding[0], dilation[0])
    columns = window_output(name, width, window[1], stride[1], padding[1], dilation[1])
    taps: Extent = ((window[0], ""), (window[1], ""))
    if groups == 1:
        dims = {"b": batch, "h": rows, "w": columns, "n": filters, "c": channels}
        reads, writes = "c", "n"
        by_group: Extent = ()
        n: Extent = ((filters, "n"),)
        k: Extent = ((channels, "c"), *taps)
    else:
        dims = {"b": batch, "h": rows, "w": columns, "g": groups}
        reads = writes = "g"
        by_group = ((groups, "g"),)
        n = ((filters // groups, ""),)
        k = ((channels // groups, ""), *taps)
    m: Extent = ((batch, "b"), (rows, "h"), (columns, "w"))
    owned: Extent = ((batch, "b"), (channels, reads))
    read: Extent = (*owned, (height, "h"), (width, "w"))
    # A window of one entry is a plain product.
    tensors = (read, (*by_group, *n, *k), (*by_group, *m, *n)) if window != (1, 1) else ()
    backward = [Product(batch=by_group, m=n, n=k, k=m, tensors=tensors)]
    if first_has_gradient:
        backward.append(Product(batch=by_group, m=m, n=k, k=n, tensors=tensors))
    unsplit = [dim for dim, out, step, size in (("h", rows, stride[0], height), ("w", columns, stride[1], width)) if size != step * out]
    traffic: list[OwnTraffic] = []
    if "h" not in unsplit:
        traffic += halo_exchange("h", halo_rows(window[0], stride[0], padding[0], dilation[0]), (*owned, (width, "w")))
    if "w" not in unsplit:
        traffic += halo_exchange("w", halo_rows(window[1], stride[1], padding[1], dilation[1]), (*owned, (height, "h")))
    if not first_has_gradient:
        traffic = [collective for collective in traffic if collective.phase is Pass.FORWARD]
    return Operator(
        name=name,
        kind="convolution",
        dims=dims,
        inputs=(
            Operand(tensor=x.name, dims=("b", reads, "h", "w")),
            Operand(tensor=weight, dims=("n", "c", "", "") if groups == 1 else ("g", "", "", "")),
        ),
        output=Operand(tensor=output, dims=("b", writes, "h", "w")),
        forward=(Product(batch=by_group, m=m, n=n, k=k, tensors=tensors),),
        backward=tuple(backward),
        traffic=tuple(traffic),
        roles=DimRoles(sums=("c",) if groups == 1 else (), unsplit=tuple(unsplit)),
        saved=(Data(extent=read, of=0),),
        settings={"window": window, "stride": stride, "padding": padding, "dilation": dilation, "groups": groups},
        layer=layer,
    )
