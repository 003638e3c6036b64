"""Indexer of sparse attention: a small score of every query with every earlier key, and the top keys of each query."""

from __future__ import annotations

from collections.abc import Mapping

from perfmodel.workload.graph import DimRoles, Operand, Operator
from perfmodel.workload.work import Data, Extent, Product, Stream, extent

_FLOAT32 = 4.0


def index_scores(
    name: str,
    q: Operand,
    k: Operand,
    weights: Operand,
    output: Operand,
    dims: Mapping[str, int],
    *,
    heads: str,
    width: str,
    half_keys: Extent = (),
) -> Operator:
    """Return the top keys y[b,q,top] by the sum over heads of weights[b,q,heads] relu(q[b,q,heads,width] k[b,z,width]).

    All heads share one key. Keys are unsplit. Half of the score matrix is computed, in float32, and nothing of it is saved. Backward
    recomputes the scores and has two products, for the indexer's own loss: the selection has no gradient.

    half_keys   extent of the computed keys; none: half of the size of z

    Source: DeepSeek-V3.2, section 2.1 (lightning indexer).
    """
    batch = extent(dims, (q.dims[0], heads))
    rows, columns, sums = extent(dims, ("q",)), half_keys or ((max(dims["z"] // 2, 1), ""),), extent(dims, (width,))
    scores: Extent = (*extent(dims, (q.dims[0], "q")), *columns)
    score_product = Product(batch=batch, m=rows, n=columns, k=sums)
    square = Data(extent=scores, itemsize=_FLOAT32)
    read = tuple(Data(extent=extent(dims, operand.dims), of=position) for position, operand in enumerate((q, k, weights)))
    written = Data(extent=extent(dims, output.dims), of=3)
    gradients = tuple(data.gradient for data in read)
    return Operator(
        name=name,
        kind="index_scores",
        dims=dims,
        inputs=(q, k, weights),
        output=output,
        forward=(score_product, Stream(kernel="softmax", elements=scores, accesses=(*read, square, square, written))),
        backward=(
            score_product,
            Product(batch=batch, m=rows, n=sums, k=columns),
            Product(batch=batch, m=columns, n=sums, k=rows),
            Stream(kernel="default", elements=scores, accesses=(*read, square, *gradients)),
        ),
        roles=DimRoles(unsplit=("z", heads, width, *(dim for dim in output.dims if dim not in q.dims))),
        saved=read,
    )
