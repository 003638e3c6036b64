"""Layer normalisation and RMSNorm: each row by its own statistics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.foundation.errors import InputError
from perfmodel.workload.graph import DimRoles, Operand, Operator
from perfmodel.workload.work import Data, OwnTraffic, Pass, Stream, extent, reduced_rows


def layer_norm(
    name: str,
    x: Operand,
    weight: Operand | None,
    bias: Operand | None,
    output: Operand,
    dims: Mapping[str, int],
    *,
    eps: float = 1e-5,
    over: tuple[str, ...] = (),
    unsplit: tuple[str, ...] = (),
    layer: str = "",
) -> Operator:
    """Return y = weight (x - mean) / sqrt(variance + eps) + bias over the dims `over` (default: dims of the weight). The inputs are x,
    weight and bias, as far as given."""
    inputs = tuple(operand for operand in (x, weight, bias) if operand is not None)
    return _norm(
        name, "layer_norm", inputs, output, dims, kernel="layernorm", statistics=2, eps=eps, over=over, unsplit=unsplit, layer=layer
    )


def rms_norm(
    name: str,
    x: Operand,
    weight: Operand | None,
    output: Operand,
    dims: Mapping[str, int],
    *,
    eps: float = 1e-6,
    over: tuple[str, ...] = (),
) -> Operator:
    """Return y = weight x / sqrt(mean of x^2 + eps) over the dims `over` (default: dims of the weight)."""
    inputs = (x,) if weight is None else (x, weight)
    return _norm(name, "rms_norm", inputs, output, dims, kernel="rmsnorm", statistics=1, eps=eps, over=over)


def _norm(
    name: str,
    kind: str,
    inputs: tuple[Operand, ...],
    output: Operand,
    dims: Mapping[str, int],
    *,
    kernel: str,
    statistics: int,
    eps: float,
    over: tuple[str, ...],
    unsplit: tuple[str, ...] = (),
    layer: str = "",
) -> Operator:
    """Return a norm. Where a normalised dim is sharded: an all-reduce of the row statistics in forward, and one of the same size in
    backward.

    Source: sharding algebra, section 4 (norm over sharded h). Saved for backward: the input and the statistics.
    """
    x, scale = inputs[0], inputs[1].dims if len(inputs) > 1 else ()
    over = over or tuple(filter(None, scale))
    if not over or not set(over) <= set(x.dims):
        raise InputError(f"operator {name}: weight dims={scale}: must be some of the dims {x.dims} of the input; correct them")
    entries = extent(dims, x.dims)
    rows = reduced_rows(dims, x.dims, over)
    sums = reduced_rows(dims, x.dims, over, values=statistics)
    read, written = Data(extent=entries, of=0), Data(extent=entries, of=len(inputs))
    reduced = OwnTraffic(kind=CollectiveKind.ALL_REDUCE, over=over, extent=sums, phase=Pass.FORWARD, itemsize=4.0)
    return Operator(
        name=name,
        kind=kind,
        dims=dims,
        inputs=inputs,
        output=output,
        forward=(Stream(kernel=kernel, elements=entries, accesses=(read, written)),),
        backward=(Stream(kernel=kernel, elements=entries, accesses=(written.gradient, read, read.gradient)),),
        traffic=(reduced, replace(reduced, phase=Pass.BACKWARD)),
        roles=DimRoles(unsplit=unsplit),
        saved=(read, *(Data(extent=rows, itemsize=4.0),) * statistics),
        settings={"eps": eps, "over": " ".join(over)},
        layer=layer,
    )
