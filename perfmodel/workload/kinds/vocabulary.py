"""Operators over a vocabulary: lookup of rows by index, single or summed over a bag; cross-entropy of logits against labels."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import filterfalse

from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.foundation.errors import InputError
from perfmodel.workload.graph import DimRoles, Operand, Operator
from perfmodel.workload.work import Data, Extent, OwnTraffic, Pass, Stream, extent, passes, reduced_rows


def embedding(
    name: str,
    ids: Operand,
    table: Operand,
    output: Operand,
    dims: Mapping[str, int],
    *,
    vocabulary: tuple[str, ...] = (),
    layer: str = "",
) -> Operator:
    """Return the lookup table[v,d] at ids[b,s] -> y[b,s,d].

    v is dim 0 of the table, or `vocabulary`. Where it is sharded, rows of other shards count as zero, so the output is partial; shards may
    be uneven. Backward adds the rows of the gradient into a table of zeros.
    """
    vocabulary = vocabulary or (_vocabulary(name, table, output),)
    rows = extent(dims, output.dims)
    gradient = Data(extent=extent(dims, table.dims), of=1, is_gradient=True)
    return Operator(
        name=name,
        kind="embedding",
        dims=dims,
        inputs=(ids, table),
        output=output,
        forward=(Stream(kernel="embedding", elements=rows, accesses=passes(rows, rows)),),
        backward=(Stream(kernel="embedding", elements=rows, accesses=(*passes(rows, rows), gradient)),),
        roles=DimRoles(sums=vocabulary, padded=vocabulary),
        layer=layer,
    )


def embedding_bag(
    name: str, ids: Operand, table: Operand, output: Operand, dims: Mapping[str, int], *, bag: int, layer: str = ""
) -> Operator:
    """Return the sum of table[v,d] at the `bag` indices of each row ids[b,""] -> y[b,d]; v as in `embedding`."""
    if isinstance(bag, bool) or not isinstance(bag, int) or bag < 1:
        raise InputError(f"operator {name}: bag={bag}: must be a whole number of at least 1; use the number of indices a row")
    vocabulary = _vocabulary(name, table, output)
    written = extent(dims, output.dims)
    rows: Extent = ((bag, ""), *written)
    gradient = Data(extent=extent(dims, table.dims), of=1, is_gradient=True)
    return Operator(
        name=name,
        kind="embedding_bag",
        dims=dims,
        inputs=(ids, table),
        output=output,
        forward=(Stream(kernel="embedding", elements=rows, accesses=passes(rows, written)),),
        backward=(Stream(kernel="embedding", elements=rows, accesses=(*passes(written, rows), gradient)),),
        roles=DimRoles(sums=(vocabulary,), padded=(vocabulary,)),
        settings={"bag": bag},
        layer=layer,
    )


def _vocabulary(name: str, table: Operand, output: Operand) -> str:
    if len(table.dims) != 2 or not table.dims[0] or table.dims[0] in output.dims:
        raise InputError(f"operator {name}: table dims={table.dims}: must be the vocabulary, which the output lacks, and one more")
    return table.dims[0]


# --- losses -----------------------------------------------------------------------------------------------------------


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
    if not summed or not set(summed) <= set(logits.dims) - {*labels.dims, *output.dims}:
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
        roles=DimRoles(sums=tuple(filterfalse({"", *summed, *output.dims}.__contains__, logits.dims)), padded=summed),
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
