"""Detection of attention in an imported graph: fused attention, or two products of activations with a softmax between them."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from perfmodel.workload.imported.graph import ImportedKind, SeenKeys
from perfmodel.workload.imported.wiring import Wiring


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedAttention:
    """An attention.

    at                          vertex of its output
    producers                   vertices of queries, keys and values; None: an input of the module
    heads, key_dim, value_dim   query heads, and entries of a key and of a value
    num_queries, num_keys       of a sequence
    has_sinks                   each head has a logit without a key
    """

    at: int
    producers: tuple[int | None, int | None, int | None]
    heads: int
    key_dim: int
    value_dim: int
    num_queries: int
    num_keys: int
    seen: SeenKeys
    has_sinks: bool = False


def find_attentions(wiring: Wiring) -> list[ImportedAttention]:
    """Return the attentions in execution order. Raises InputError for any other product of two activations."""
    attentions = []
    for at in range(len(wiring.graph.vertices)):
        vertex, into = wiring.vertex(at), wiring.into.get(at, {})
        if vertex.kind is ImportedKind.ATTENTION:
            dims = vertex.dims
            fused = ImportedAttention(
                at=at,
                producers=(into.get(0), into.get(1), into.get(2)),
                heads=dims.get("h", 1),
                key_dim=dims["d"],
                value_dim=dims["e"],
                num_queries=dims["s"],
                num_keys=dims["z"],
                seen=vertex.seen,
            )
            attentions.append(fused)
        elif at in wiring.products and wiring.matrices(at) is None:
            for number, producer in into.items():  # a product with values reads a softmax of the product that computes scores
                way = wiring.between(producer)
                products = way & wiring.products
                has_softmax = any(wiring.vertex(index).kind is ImportedKind.SOFTMAX for index in way)
                if has_softmax and len(products) == 1 and wiring.matrices(min(products)) is None:
                    attentions.append(_written_out(wiring, at, min(products), number, way - products))
                    wiring.products -= {at, *products}
                    break
    for at in sorted(wiring.products):
        if wiring.matrices(at) is None:
            rule = "is a product of two activations; attention is scaled_dot_product_attention, or such a product, a softmax and another"
            raise wiring.refused(at, rule)
    return attentions


def _written_out(wiring: Wiring, at: int, scores: int, number: int, way: set[int]) -> ImportedAttention:
    """Return an unfused attention; its sizes follow from those of the products. Scores have B h s z entries, the output B h s e, the
    module's tokens are T = B s. `number`: input of `at` with the softmax of scores; `way`: vertices between them."""
    product, output = wiring.vertex(scores), wiring.vertex(at)
    into = wiring.into.get(scores, {})
    tokens = next((vertex.inputs[-1].shape for vertex in wiring.graph.vertices if vertex.kind is ImportedKind.EMBEDDING), ())
    num_keys = tokens[-1] if tokens else 1
    rows = prod(tokens)
    heads = max(1, product.outputs[0].num_elements // (rows * num_keys))
    seen = next((wiring.vertex(index).seen for index in way if wiring.vertex(index).kind is ImportedKind.SOFTMAX), SeenKeys())
    of_heads = {parameter.name for parameter in wiring.graph.parameters if parameter.num_elements == heads}
    sinks = {operand.parameter for vertex in map(wiring.vertex, way) for operand in vertex.inputs} & of_heads
    return ImportedAttention(
        at=at,
        producers=(into.get(0), into.get(1), wiring.into.get(at, {}).get(1 - number)),
        heads=heads,
        key_dim=prod(product.dims[dim] for dim in product.inputs[0].dims if dim and dim not in product.outputs[0].dims),
        value_dim=max(1, output.outputs[0].num_elements // (rows * heads)),
        num_queries=num_keys,
        num_keys=num_keys,
        seen=seen,
        has_sinks=bool(sinks),
    )


__all__ = ["ImportedAttention", "find_attentions"]
