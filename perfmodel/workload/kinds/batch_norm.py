"""Batch normalisation in training: each channel by the batch's mean and variance."""

from __future__ import annotations

from collections.abc import Mapping

from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.foundation.errors import InputError
from perfmodel.workload.graph import Operand, Operator
from perfmodel.workload.work import Data, Extent, OwnTraffic, Pass, Stream, extent, passes


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
    """Return y = weight (x - mean) / sqrt(variance + eps) + bias, with statistics over every dim but the `features` (dims of the weight).

    synchronised   where those dims are sharded, statistics of the full batch: one all-reduce of two numbers a channel in forward (sums of
                   x and x^2) and one in backward (sums of dy and dy x). Else each shard has its own: no traffic, but different results

    Forward reads x twice (statistics, then the result), backward reads x and dy twice. Running averages are not counted.

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
        inputs=tuple(operand for operand in (x, weight, bias) if operand is not None),
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
