"""Table lookup by index: single rows, or sums over a bag."""

from __future__ import annotations

from collections.abc import Mapping

from perfmodel.foundation.errors import InputError
from perfmodel.workload.graph import DimRoles, Operand, Operator
from perfmodel.workload.work import Data, Extent, Stream, extent, passes


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
