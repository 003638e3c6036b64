"""Pairwise dot products of feature vectors (DLRM)."""

from __future__ import annotations

from perfmodel.foundation.errors import InputError
from perfmodel.workload.graph import Operand, Operator
from perfmodel.workload.work import Extent, Product, Stream, passes


def interaction(name: str, inputs: tuple[str, ...], output: str, *, batch: int, features: int, layer: str = "") -> Operator:
    """Return f tensors [b, features] -> y[b, features + f (f - 1) / 2]: the first tensor, then the dot product of each pair.

    The vectors are stacked to t[b,f,d], and the full product t t' is computed, of which the lower triangle is kept, as in the reference
    code. Only the batch may be sharded.

    Source: Naumov et al., Deep Learning Recommendation Model for Personalization and Recommendation Systems, arXiv 1906.00091, section 2.
    """
    if len(inputs) < 2:
        raise InputError(f"operator {name}: inputs={len(inputs)}: must be at least 2 vectors; add one")
    count = len(inputs)
    b: Extent = ((batch, "b"),)
    f: Extent = ((count, ""),)
    d: Extent = ((features, ""),)
    stacked: Extent = (*b, *f, *d)
    pairs: Extent = (*b, *f, *f)
    written: Extent = (*b, (interaction_width(count, features), ""))
    return Operator(
        name=name,
        kind="interaction",
        dims={"b": batch},
        inputs=tuple(Operand(tensor=tensor, dims=("b", "")) for tensor in inputs),
        output=Operand(tensor=output, dims=("b", "")),
        forward=(
            Stream(kernel="add", elements=stacked, accesses=passes(stacked, stacked)),
            Product(batch=b, m=f, n=f, k=d),
            Stream(kernel="add", elements=written, accesses=passes(written, written)),
        ),
        backward=(
            Stream(kernel="add", elements=pairs, accesses=passes(written, pairs)),
            Product(batch=b, m=f, n=d, k=f),
            Product(batch=b, m=f, n=d, k=f),
            Stream(kernel="add", elements=stacked, accesses=passes(*(stacked,) * 3)),
        ),
        saved=passes(stacked),
        settings={"count": count, "features": features},
        layer=layer,
    )


def interaction_width(count: int, features: int) -> int:
    """Return the entries per output row for `count` vectors of `features` entries."""
    return features + count * (count - 1) // 2
