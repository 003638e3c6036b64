"""Softmax over one dim, with the scale and the causal mask of attention scores."""

from __future__ import annotations

from collections.abc import Mapping

from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.foundation.errors import InputError
from perfmodel.workload.graph import Operand, Operator
from perfmodel.workload.work import Data, OwnTraffic, Pass, Stream, extent, reduced_rows


def softmax(
    name: str,
    x: Operand,
    output: Operand,
    dims: Mapping[str, int],
    *,
    over: str,
    scale: float = 1.0,
    causal_queries: str = "",
    sinks: Operand | None = None,
    layer: str = "",
) -> Operator:
    """Return y = softmax(scale x) over dim `over` (several: "i j").

    With a causal mask, entries i >= j of dim `causal_queries` attend to entry j of `over`.

    sinks: extra logits in every sum, without an output entry (a logit of each head without a key).

    Where `over` is sharded: all-reduces of the maximum and the sum of every row in forward, of the sum of y dy in backward. The output is
    saved.

    Source: sharding algebra, section 4.
    """
    reduced = tuple(over.split())
    for dim in (*reduced, causal_queries) if causal_queries else reduced:
        if dim not in x.dims:
            raise InputError(f"operator {name}: dim {dim!r}: is not one of the dims {x.dims} of the input; name one of them")
    entries = extent(dims, x.dims)
    rows = reduced_rows(dims, x.dims, reduced)
    inputs = (x,) if sinks is None else (x, sinks)
    read, written = Data(extent=entries, of=0), Data(extent=entries, of=len(inputs))
    return Operator(
        name=name,
        kind="softmax",
        dims=dims,
        inputs=inputs,
        output=output,
        forward=(Stream(kernel="softmax", elements=entries, accesses=(read, written)),),
        backward=(Stream(kernel="softmax", elements=entries, accesses=(written.gradient, written, read.gradient)),),
        traffic=tuple(
            OwnTraffic(kind=CollectiveKind.ALL_REDUCE, over=reduced, extent=rows, phase=phase, itemsize=4.0)
            for phase in (Pass.FORWARD, Pass.FORWARD, Pass.BACKWARD)
            if reduced
        ),
        saved=(written,),
        settings={"over": over, "scale": scale, "causal_queries": causal_queries},
        layer=layer,
    )
