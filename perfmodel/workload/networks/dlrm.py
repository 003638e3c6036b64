"""DLRM: embedding tables of categorical features, an MLP of dense features, pairwise dot products, an MLP to a click probability.

Source: Naumov et al., Deep Learning Recommendation Model for Personalization and Recommendation Systems, arXiv 1906.00091; widths of the
MLPerf Training benchmark (bottom 13-512-256-128, top 1024-1024-512-256-1). Table rows and indices per sample are those of its multi-hot
Criteo 1TB data set (version 2, at most 40 million rows); the interaction is the dot product of version 1.
"""

from __future__ import annotations

from perfmodel.foundation.errors import InputError
from perfmodel.workload.graph import Graph, Operand, TensorRole
from perfmodel.workload.kinds.interaction import interaction, interaction_width
from perfmodel.workload.kinds.vocabulary import binary_cross_entropy, embedding_bag
from perfmodel.workload.networks.builder import NetworkBuilder

_ROWS = (40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10, 2_209, 11_938, 155, 4, 976, 14,
         40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36)  # fmt: skip
_BAGS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)


def dlrm(
    *,
    batch: int = 65_536,
    dense: int = 13,
    rows: tuple[int, ...] = _ROWS,
    bags: tuple[int, ...] = _BAGS,
    features: int = 128,
    bottom: tuple[int, ...] = (512, 256),
    top: tuple[int, ...] = (1024, 1024, 512, 256),
) -> Graph:
    """Build DLRM. rows, bags: of each table, its rows and the indices summed per sample; bottom, top: widths of the hidden layers."""
    if len(rows) != len(bags):
        raise InputError(f"bags={len(bags)}: must be one for each of the {len(rows)} tables; give {len(rows)}")
    b = NetworkBuilder("dlrm", batch=batch, source="Naumov et al., arXiv 1906.00091; sizes of the MLPerf Training benchmark")

    def layers(name: str, x: str, widths: tuple[int, ...]) -> str:
        for i, width in enumerate(widths):
            x = b.linear(f"{name}{i}", x, "b k", "n k", "b n", new={"n": width})
            x = b.relu(f"{name}{i}_relu", x, "b n")
        return x

    b.layer = "bottom"
    vectors = [layers("bottom", b.input("dense", batch, dense), (*bottom, features))]
    for i, (count, bag) in enumerate(zip(rows, bags, strict=True)):
        b.layer = name = f"table{i}"
        ids = b.input(f"{name}.ids", batch, bag, role=TensorRole.INDEX)
        table = b.parameter(f"{name}.weight", count, features)
        lookup = embedding_bag(
            name,
            Operand(tensor=ids, dims=("b", "")),
            Operand(tensor=table, dims=("v", "d")),
            Operand(tensor=f"{name}.out", dims=("b", "d")),
            {"b": batch, "d": features, "v": count},
            bag=bag,
            layer=name,
        )
        vectors.append(b.add(lookup, batch, features))
    b.layer = "top"
    pairs = interaction("interaction", tuple(vectors), "interaction.out", batch=batch, features=features, layer=b.layer)
    x = b.add(pairs, batch, interaction_width(len(vectors), features))
    click = b.linear("click", layers("top", x, top), "b k", "n k", "b n", new={"n": 1})
    dims = ("b", "n")
    loss = binary_cross_entropy(
        "loss",
        Operand(tensor=click, dims=dims),
        Operand(tensor=b.input("labels", batch, 1), dims=dims),
        Operand(tensor="loss.out", dims=dims),
        {"b": batch, "n": 1},
        layer=b.layer,
    )
    b.add(loss, batch, 1)
    return b.build()
