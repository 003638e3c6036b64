"""Cross-entropy of logits against labels, one loss for each row."""

from __future__ import annotations

from collections.abc import Mapping

from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.foundation.errors import InputError
from perfmodel.workload.graph import DimRoles, Operand, Operator
from perfmodel.workload.work import Data, OwnTraffic, Pass, Stream, extent, passes, reduced_rows


def cross_entropy(
    name: str, logits: Operand, labels: Operand, output: Operand, dims: Mapping[str, int], *, over: str = "v", layer: str = ""
) -> Operator:
    """Return loss[rows] = log sum exp(logits) - logits[label], over dim `over` (several: "i j").

    A dim of the rows that the output lacks is summed.

    Where `over` is sharded, forward has three all-reduces of a number per row (maximum, sum, the label's logit), backward none. They
    complete the loss, so `over` is not in `sums`. Its shards may be uneven.

    Memory traffic of torch's two kernels each way: log_softmax reads the logits and writes its result, which is saved. Backward fills a
    gradient, reads both and writes the gradient of the logits.

    Source: sharding algebra, section 4.
    """
    summed = tuple(over.split())
    if not summed or any(dim not in logits.dims or dim in labels.dims or dim in output.dims for dim in summed):
        raise InputError(f"operator {name}: dim {over!r}: must be a dim of the logits {logits.dims} alone; correct it")
    entries = extent(dims, logits.dims)
    rows = reduced_rows(dims, logits.dims, summed)
    reduce = OwnTraffic(kind=CollectiveKind.ALL_REDUCE, over=summed, extent=rows, phase=Pass.FORWARD, itemsize=4.0)
    return Operator(
        name=name,
        kind="cross_entropy",
        dims=dims,
        inputs=(logits, labels),
        output=output,
        forward=(Stream(kernel="cross_entropy", elements=entries, accesses=passes(entries, entries)),),
        backward=(Stream(kernel="cross_entropy", elements=entries, accesses=passes(*(entries,) * 4)),),
        traffic=(reduce,) * 3,
        roles=DimRoles(sums=tuple(dim for dim in logits.dims if dim and dim not in (*summed, *output.dims)), padded=summed),
        saved=passes(entries),
        settings={"over": over},
        layer=layer,
    )


def binary_cross_entropy(
    name: str, logits: Operand, labels: Operand, output: Operand, dims: Mapping[str, int], *, layer: str = ""
) -> Operator:
    """Return loss = log(1 + exp(logits)) - labels logits, elementwise; the labels are data in [0, 1]. The logits are saved."""
    entries = extent(dims, logits.dims)
    return Operator(
        name=name,
        kind="binary_cross_entropy",
        dims=dims,
        inputs=(logits, labels),
        output=output,
        forward=(Stream(kernel="cross_entropy", elements=entries, accesses=passes(*(entries,) * 3)),),
        backward=(Stream(kernel="cross_entropy", elements=entries, accesses=passes(*(entries,) * 4)),),
        saved=(Data(extent=entries, of=0),),
        layer=layer,
    )
