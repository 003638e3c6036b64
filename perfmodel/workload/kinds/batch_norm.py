"""Batch normalisation in training: each channel by the mean and variance of the batch."""

from __future__ import annotations

from collections.abc import Mapping

from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.foundation.errors import InputError
from perfmodel.workload.graph import Data, Extent, Operand, Operator, OwnTraffic, Pass, Stream
from perfmodel.workload.kinds.extents import extent, passes


def batch_norm(
    name: str,
    x: Operand,
    weight: Operand | None,
    bias: Operand | None,
    output: Operand,
    dims: Mapping[str, int],
    *,
    features: tuple[str, ...] = (),
    synchronised: bool = False,
    eps: float = 1e-5,
    layer: str = "",
) -> Operator:
    """y = weight (x - mean) / sqrt(variance + eps) + bias, the statistics over every dim but the `features`, those of the weight.

    synchronised   where those dims are cut, statistics of the whole batch: one all-reduce of two numbers a channel in forward (sums of x
                   and x^2) and one in backward (sums of dy and dy x). Else each share has its own: no traffic, but other mathematics

    x is read twice forward (statistics, then the result), x and dy twice backward. Running averages are not counted.

    Source: sharding algebra, section 4 (BatchNorm).
    """
    features = features or tuple(dim for dim in weight.dims if dim) if weight else features
    over = tuple(dim for dim in x.dims if dim and dim not in features)
    if not over or any(dim not in x.dims for dim in features):
        raise InputError(f"operator {name}: weight dims={features}: must be some of the dims {x.dims} of the input; correct them")
    entries = extent(dims, x.dims)
    statistics: Extent = ((2, ""), *extent(dims, features))
    return Operator(
        name=name,
        kind="batch_norm",
        dims=dims,
        inputs=tuple(each for each in (x, weight, bias) if each is not None),
        output=output,
        forward=(Stream(kernel="layernorm", elements=entries, accesses=passes(*(entries,) * 3)),),
        backward=(Stream(kernel="layernorm", elements=entries, accesses=passes(*(entries,) * 5)),),
        traffic=tuple(
            OwnTraffic(kind=CollectiveKind.ALL_REDUCE, over=over, extent=statistics, phase=phase, itemsize=4.0)
            for phase in Pass
            if synchronised
        ),
        saved=(Data(extent=entries, of=0), Data(extent=statistics)),
        settings={"synchronised": synchronised, "eps": eps},
        layer=layer,
    )
