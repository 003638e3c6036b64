"""The attention of an imported decoder's layer, recognised by its products: grouped-query or latent attention.

It is fused, or two products of activations with a softmax between them.
Latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) is recognised by the sources of keys. One product computes values and the
first part of keys from a latent. The second part of keys, with positions and shared by all heads, is computed with the latent.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from perfmodel.workload.config import QkNormScope
from perfmodel.workload.imported.graph import ImportedKind, Reach, SeenKeys
from perfmodel.workload.imported.wiring import Wiring
from perfmodel.workload.layer_specs import LatentAttention

OF_ANOTHER = "has keys of another tensor than its queries (cross-attention), which have no cache of their own tokens"

#: A norm in separate operators contains a mean.
NORMS = (ImportedKind.NORM, ImportedKind.REDUCTION)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class MixerWidths:
    """Widths shared by all layers; `head_dim` is that of keys."""

    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    latent: LatentAttention | None
    qkv_bias: bool
    output_bias: bool
    qk_norm: bool
    qk_norm_scope: QkNormScope
    sinks: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedMixer:
    """An attention and its products."""

    attention: int
    widths: MixerWidths
    seen: SeenKeys
    products: frozenset[int]
    output: int

    @property
    def first(self) -> int:
        return min(self.products)


def find_attentions(wiring: Wiring) -> list[ImportedAttention]:
    """Return the attentions in execution order. Raises InputError for any other product of two activations."""
    attentions = []
    for at in range(len(wiring.graph.vertices)):
        vertex, into = wiring.vertex(at), wiring.into[at]
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
    into = wiring.into[scores]
    tokens = next((vertex.inputs[-1].shape for vertex in wiring.graph.vertices if vertex.kind is ImportedKind.EMBEDDING), ())
    num_keys = tokens[-1] if tokens else 1
    rows = prod(tokens)
    heads = max(1, product.outputs[0].num_elements // (rows * num_keys))
    seen = next((wiring.vertex(index).seen for index in way if wiring.vertex(index).kind is ImportedKind.SOFTMAX), SeenKeys())
    of_heads = {parameter.name for parameter in wiring.graph.parameters if parameter.num_elements == heads}
    sinks = {operand.parameter for vertex in map(wiring.vertex, way) for operand in vertex.inputs} & of_heads
    return ImportedAttention(
        at=at,
        producers=(into.get(0), into.get(1), wiring.into[at].get(1 - number)),
        heads=heads,
        key_dim=prod(product.dims[dim] for dim in product.inputs[0].dims if dim and dim not in product.outputs[0].dims),
        value_dim=max(1, output.outputs[0].num_elements // (rows * heads)),
        num_queries=num_keys,
        num_keys=num_keys,
        seen=seen,
        has_sinks=bool(sinks),
    )


def read_mixer(wiring: Wiring, attention: ImportedAttention) -> ImportedMixer:
    """Return the mixer of an attention. Raises InputError for parts that no decoder has."""
    at, (queries_at, keys_at, values_at) = attention.at, attention.producers
    q, z = attention.num_queries, attention.num_keys
    if q != z:
        raise wiring.refused(at, f"attends with {q} queries to {z} keys; a decoder attends to its own tokens")
    if attention.seen.reach is Reach.ALL:
        raise wiring.refused(at, "attends to later tokens too; a decoder's attention is causal (is_causal=True, or a mask)")
    if attention.seen.reach is Reach.OTHER:
        raise wiring.refused(at, "sees by its mask neither all earlier tokens, nor a window of them, nor those of its chunk")
    producers = []
    for name, producer, most in (("queries", queries_at, 1), ("keys", keys_at, 2), ("values", values_at, 1)):
        products = set() if producer is None else wiring.products_before(producer)
        if not 1 <= len(products) <= most:
            raise wiring.refused(at, f"has {name} that {len(products)} products make; one is needed")
        producers.append(products)
    output = wiring.product_after(at)
    if output is None:
        raise wiring.refused(at, "has no product after it")
    (queries,), keys, (values,) = producers
    return (_latent if len(keys) > 1 else _plain)(wiring, attention, queries, keys, values, output)


# --- plain ------------------------------------------------------------------------------------------------------------------------


def _plain(wiring: Wiring, attention: ImportedAttention, queries: int, keys: set[int], values: int, output: int) -> ImportedMixer:
    (key,) = keys
    products = frozenset((queries, key, values))
    if len({wiring.source(product) for product in products}) > 1:
        raise wiring.refused(attention.at, OF_ANOTHER)
    heads, head_dim = attention.heads, attention.key_dim
    if attention.value_dim != head_dim:
        raise wiring.refused(
            attention.at, f"has values of {attention.value_dim} entries and keys of {head_dim}; heads of one size are modelled"
        )
    hidden, total = wiring.weights(queries).in_features, sum(wiring.weights(product).out_features for product in products)
    kv_heads, rest = divmod(total - heads * head_dim, 2 * head_dim)
    if rest or kv_heads < 1 or heads % kv_heads:
        raise wiring.refused(attention.at, f"has {heads} heads of {head_dim} entries, and products of {total} entries make them")
    has_norm, scope = _norm_of(wiring, attention, heads, head_dim)
    widths = MixerWidths(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        hidden=hidden,
        latent=None,
        qkv_bias=any(wiring.weights(product).has_bias for product in products),
        output_bias=wiring.weights(output).has_bias,
        qk_norm=has_norm,
        qk_norm_scope=scope,
        sinks=attention.has_sinks,
    )
    return _mixer(wiring, attention, widths, products, output, heads * head_dim)


def _norm_of(wiring: Wiring, attention: ImportedAttention, heads: int, head_dim: int) -> tuple[bool, QkNormScope]:
    """Return whether queries are normed, and the scope: the norm has a weight per entry of a head, or of all heads."""
    way = wiring.between(attention.producers[0] or 0)
    if not any(wiring.vertex(at).kind in NORMS for at in way):
        return False, "head"
    shapes = {operand.shape for at in way if at not in wiring.products for operand in wiring.vertex(at).inputs if operand.parameter}
    sizes = {len(shape): shape for shape in shapes}
    if not shapes:
        return True, "bare"
    if (heads, head_dim) in shapes and head_dim > 1:
        return True, "own"
    return True, "all" if sizes.get(1) == (heads * head_dim,) and heads > 1 else "head"


# --- of a latent ------------------------------------------------------------------------------------------------------------------


def _latent(wiring: Wiring, attention: ImportedAttention, queries: int, keys: set[int], values: int, output: int) -> ImportedMixer:
    """Return latent attention of n heads: kv_a computes latent and rotary key, kv_b n (nope + value) entries, queries n (nope + rope)."""
    heads, head_dim = attention.heads, attention.key_dim
    rank = wiring.weights(values).in_features
    up = {product for product in keys | {values} if wiring.weights(product).in_features == rank and product != queries}
    down = {before for product in up for before in wiring.products_into(product)}
    apart = keys - up
    sources = {wiring.source(product) for product in (*down, *(apart - down))}
    if len(down) != 1 or len(apart | down) > 2 or not apart:
        rule = "has keys of two parts, and they are not a latent's and one with positions for all heads, as of latent attention"
        raise wiring.refused(attention.at, rule)
    (kv_a,) = down
    query_down = set() if wiring.source(queries) in sources else wiring.products_into(queries)
    query_rank = wiring.weights(queries).in_features if query_down else 0
    sources |= {wiring.source(product) for product in query_down}
    if len(sources) > 1 or len(query_down) > 1:
        raise wiring.refused(attention.at, OF_ANOTHER)
    shared = query_rank if query_down == {kv_a} else 0  # one product computes both latents
    rope = sum(wiring.weights(product).out_features for product in apart | down) - rank - shared
    value_dim = wiring.weights(output).in_features // heads
    up_features = sum(wiring.weights(product).out_features for product in up)
    nope = head_dim - rope
    if rope < 1 or nope < 1 or up_features != heads * (nope + value_dim) or wiring.weights(queries).out_features != heads * head_dim:
        rule = f"has {heads} heads of {head_dim} and {value_dim} entries, which a latent of {rank} and {rope} with positions do not make"
        raise wiring.refused(attention.at, rule)
    widths = MixerWidths(
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        hidden=wiring.weights(kv_a).in_features,
        latent=LatentAttention(
            query_rank=query_rank, key_value_rank=rank, nope_head_dim=nope, rope_head_dim=rope, value_head_dim=value_dim
        ),
        qkv_bias=wiring.weights(kv_a).has_bias,
        output_bias=wiring.weights(output).has_bias,
        qk_norm=False,
        qk_norm_scope="head",
        sinks=attention.has_sinks,
    )
    products = frozenset((queries, *query_down, *up, *down, *apart))
    return _mixer(wiring, attention, widths, products, output, heads * value_dim)


def is_normed_before(wiring: Wiring, mixer: ImportedMixer) -> bool:
    """Return whether there is a norm between the tables and the first product of the first layer."""
    return any(wiring.vertex(at).kind in NORMS for at in wiring.between(wiring.source(mixer.first)))


def is_normed_after(wiring: Wiring, mixer: ImportedMixer, end: int) -> bool:
    """Return whether a norm before vertex `end` reads only attention's output projection, before the residual addition."""
    for at in range(mixer.output + 1, end):
        if wiring.vertex(at).kind in NORMS:
            way = wiring.between(at, first=mixer.first)
            read = [producer for index in way - wiring.products for producer in wiring.into[index].values()]
            if way & wiring.products == {mixer.output} and min(read) >= mixer.first:
                return True
    return False


def _mixer(
    wiring: Wiring, attention: ImportedAttention, widths: MixerWidths, products: frozenset[int], output: int, entries: int
) -> ImportedMixer:
    taken = wiring.weights(output)
    if (taken.in_features, taken.out_features) != (entries, widths.hidden):
        raise wiring.refused(output, f"takes {taken.text} in and out, and attention's output {entries} to {widths.hidden}")
    return ImportedMixer(
        attention=attention.at,
        widths=widths,
        seen=attention.seen,
        products=products,
        output=output,
    )


__all__ = ["ImportedMixer", "MixerWidths", "find_attentions", "is_normed_after", "is_normed_before", "read_mixer"]
