"""An imported module as a decoder-only transformer, where it is one: then all that is known of such models (caches, prefill and decode,
plans of serving) holds for it.

Read from what its operators compute and how they hang together, never from names of its modules: a table of tokens, layers of equal
widths around one fused attention each, an output matrix. Products of each layer are those of its queries, keys and values, of attention's
output and of a feed-forward of two or three products; whatever else has a weight and is a product is refused. That attention is causal is
not imported, and taken for granted: a module that attends to later tokens has no cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from perfmodel.foundation.errors import InputError
from perfmodel.foundation.records import record_from_data
from perfmodel.workload.activations import ACTIVATIONS
from perfmodel.workload.config import TransformerConfig
from perfmodel.workload.imported.graph import SCHEMA_VERSION, ImportedGraph, ImportedKind, ImportedVertex

ARCHITECTURE = "imported"
#: Of its parameters, how many may be elsewhere than in a decoder of its widths: norms of their own, scales, learned gates.
OTHER_SHARE = 0.01
_NO_DECODER = (
    ImportedKind.CONVOLUTION, ImportedKind.RECURRENT, ImportedKind.BATCH_NORM, ImportedKind.POOLING, ImportedKind.CROSS_ENTROPY,
    ImportedKind.UNRECOGNISED,
)  # fmt: skip


def is_saved_graph(data: Mapping[str, Any]) -> bool:
    """Whether a file is what `perfmodel import --save` writes."""
    return {"schema_version", "vertices", "edges", "parameters"} <= set(data)


def read_graph(data: Mapping[str, Any], *, where: str) -> ImportedGraph:
    """What `graph_to_dict` wrote. Raises InputError."""
    if data.get("schema_version") != SCHEMA_VERSION:
        raise InputError(f"{where}: schema_version={data.get('schema_version')!r}: must be {SCHEMA_VERSION}; import the module again")
    plain = _with_unit({name: value for name, value in data.items() if name != "schema_version"}, "buffer_bytes")
    if isinstance(plain["vertices"], list):
        plain["vertices"] = [_with_unit(each, "activation_bytes") for each in plain["vertices"]]
    return record_from_data(ImportedGraph, plain, where=where)


def _with_unit(data: Any, name: str) -> Any:
    """A size as records are read from files: the graph's own file has it in bytes."""
    value = data.get(name) if isinstance(data, Mapping) else None
    return {**data, name: f"{value!r} B"} if isinstance(value, (int, float)) and not isinstance(value, bool) else data


def decoder_of(graph: ImportedGraph, *, name: str = "") -> TransformerConfig:
    """The decoder that the module is. Raises InputError with the first thing that a decoder has not."""
    return _Reader(graph).config(name or graph.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """Widths of a layer; equal for all of a decoder."""

    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    width: int
    gated: bool
    activation: str
    qk_norm: bool
    is_parallel: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool


@dataclass(slots=True)
class _Reader:
    graph: ImportedGraph
    into: dict[int, dict[int, int]] = field(init=False)
    out_of: dict[int, list[int]] = field(init=False)

    def __post_init__(self) -> None:
        self.into, self.out_of = {}, {}
        for edge in self.graph.edges:
            self.into.setdefault(edge.consumer, {})[edge.input] = edge.producer
            self.out_of.setdefault(edge.producer, []).append(edge.consumer)

    def config(self, name: str) -> TransformerConfig:
        vertices = self.graph.vertices
        attentions = [at for at, vertex in enumerate(vertices) if vertex.kind is ImportedKind.ATTENTION]
        for at, vertex in enumerate(vertices):
            if vertex.kind in _NO_DECODER:
                raise self._refused(at, f"is no operator of a decoder ({vertex.kind}: {vertex.operator})")
            if not _is_whole(vertex):
                raise self._refused(at, "lacks dims or sizes that every import has; import the module again")
            if vertex.kind is ImportedKind.MATMUL and not _weight(vertex):
                rule = "is a product of two activations; attention is recognised where it is torch's scaled_dot_product_attention"
                raise self._refused(at, rule)
        if not attentions:
            raise InputError(f"model={self.graph.name}: has no attention (scaled_dot_product_attention), so no cache and no decode step")
        products = [at for at, vertex in enumerate(vertices) if vertex.kind is ImportedKind.MATMUL]
        projections = [self._projections(at) for at in attentions]
        outputs = [self._output(at) for at in attentions]
        taken = {product for each in projections for product in each} | set(outputs)
        first = [min(each) for each in projections]
        layers: list[_Layer] = []
        rest = [at for at in products if at not in taken]
        head: list[int] = []
        for number, attention in enumerate(attentions):
            end = first[number + 1] if number + 1 < len(first) else len(vertices)
            own = [at for at in rest if (first[number] if number else -1) < at < end]
            if number == len(attentions) - 1:
                own, head = own[:-1], own[-1:]
            layers.append(self._layer(attention, projections[number], outputs[number], own))
            if layers[-1] != layers[0]:
                raise self._refused(
                    attention, f"is in a layer unlike the first ({_difference(layers[0], layers[-1])}); decoders have equal layers"
                )
        if not head:
            raise InputError(f"model={self.graph.name}: has no product after its last layer that makes logits")
        return self._checked(name, layers[0], len(layers), head[0], self._tables())

    # --- parts --------------------------------------------------------------------------------------------------------------------

    def _projections(self, attention: int) -> tuple[int, int, int]:
        """The products that make queries, keys and values; one and the same where they are fused."""
        q, z = (self.graph.vertices[attention].dims[dim] for dim in "sz")
        if q != z:
            raise self._refused(attention, f"attends with {q} queries to {z} keys; a decoder attends to its own tokens")
        found = []
        for number, name in enumerate(("queries", "keys", "values")):
            producer = self.into.get(attention, {}).get(number)
            made = set() if producer is None else self._products_before(producer)
            if len(made) != 1:
                raise self._refused(attention, f"has {name} that {len(made)} products make; one is needed")
            found.append(made.pop())
        sources = {self._source(at) for at in found}
        if len(sources) > 1:
            raise self._refused(
                attention, "has keys of another tensor than its queries (cross-attention), which have no cache of their own tokens"
            )
        return found[0], found[1], found[2]

    def _output(self, attention: int) -> int:
        """The product that takes what attention made."""
        reached, seen, wanted = [attention], {attention}, set()
        while reached:
            for consumer in self.out_of.get(reached.pop(), ()):
                if self.graph.vertices[consumer].kind is ImportedKind.MATMUL:
                    wanted.add(consumer)
                elif consumer not in seen:
                    seen.add(consumer)
                    reached.append(consumer)
        if not wanted:
            raise self._refused(attention, "has no product after it")
        return min(wanted)

    def _layer(self, attention: int, made: Sequence[int], output: int, own: Sequence[int]) -> _Layer:
        vertices = self.graph.vertices
        dims = vertices[attention].dims
        heads, head_dim = dims.get("h", 1), dims["d"]
        if dims["e"] != head_dim:
            raise self._refused(attention, f"has values of {dims['e']} entries and keys of {head_dim}; heads of one size are modelled")
        hidden = _widths(vertices[made[0]])[0]
        widths = {at: _widths(vertices[at])[1] for at in made}
        total = sum(widths.values())
        kv_heads, rest = divmod(total - heads * head_dim, 2 * head_dim)
        if rest or kv_heads < 1 or heads % kv_heads:
            raise self._refused(attention, f"has {heads} heads of {head_dim} entries, and products of {total} entries make them")
        if _widths(vertices[output]) != (heads * head_dim, hidden):
            raise self._refused(
                output, f"takes {_text(vertices[output])} in and out, and attention's output {heads * head_dim} to {hidden}"
            )
        width, gated = self._feed_forward(own, hidden, attention)
        between = self._between(self._source(attention))
        return _Layer(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            hidden=hidden,
            width=width,
            gated=gated,
            activation=self._activation(own),
            qk_norm=any(vertices[at].kind is ImportedKind.NORM for at in between),
            is_parallel=output not in self._products_before(self._source(own[0])),
            qkv_bias=any(_has_bias(vertices[at]) for at in made),
            output_bias=_has_bias(vertices[output]),
            mlp_bias=any(_has_bias(vertices[at]) for at in own),
        )

    def _feed_forward(self, own: Sequence[int], hidden: int, attention: int) -> tuple[int, bool]:
        """Its width, and whether it is gated: two products up or one of both, and one down."""
        vertices = self.graph.vertices
        if len(own) not in (2, 3):
            raise self._refused(attention, f"is in a layer with {len(own)} products beside its own; a feed-forward has two or three")
        ups, (width, out) = [_widths(vertices[at]) for at in own[:-1]], _widths(vertices[own[-1]])
        is_plain = ups == [(hidden, width)]
        is_gated = ups in ([(hidden, 2 * width)], [(hidden, width)] * 2)
        if out != hidden or not (is_plain or is_gated):
            shapes = ", ".join(_text(vertices[at]) for at in own)
            raise self._refused(own[0], f"is of a feed-forward with products of {shapes} entries, which is neither gated nor plain")
        return width, is_gated

    def _activation(self, own: Sequence[int]) -> str:
        """By the name of its torch operator; gelu where none of them is known."""
        names = [self.graph.vertices[at].operator.split(".")[1] for at in range(min(own), max(own)) if self._is_elementwise(at)]
        return next((name for name in names if name in ACTIVATIONS), "gelu")

    def _is_elementwise(self, at: int) -> bool:
        vertex = self.graph.vertices[at]
        return vertex.kind is ImportedKind.ELEMENTWISE and vertex.operator.count(".") > 1

    def _tables(self) -> list[tuple[str, int]]:
        """Parameters that rows are taken from, with how many they have, those of tokens (the most) first."""
        found: dict[str, int] = {}
        for vertex in self.graph.vertices:
            if vertex.kind is ImportedKind.EMBEDDING:
                found |= {each.parameter: each.shape[0] for each in vertex.inputs if each.parameter}
        if not 1 <= len(found) <= 2:
            raise InputError(
                f"model={self.graph.name}: has {len(found)} tables of embeddings; a decoder has one of tokens, and perhaps one of positions"
            )
        return sorted(found.items(), key=lambda each: -each[1])

    def _checked(self, name: str, layer: _Layer, number: int, head: int, tables: Sequence[tuple[str, int]]) -> TransformerConfig:
        vertices, (table, vocab) = self.graph.vertices, tables[0]
        if _widths(vertices[head]) != (layer.hidden, vocab):
            raise self._refused(
                head, f"takes {_text(vertices[head])} in and out, and logits of {vocab} tokens are made of {layer.hidden} entries"
            )
        positions = tables[1][1] if len(tables) > 1 else 0
        norms = [vertex.operator for vertex in vertices if vertex.kind is ImportedKind.NORM]
        config = TransformerConfig(
            name=name,
            architecture=ARCHITECTURE,
            num_hidden_layers=number,
            hidden_size=layer.hidden,
            num_attention_heads=layer.heads,
            num_key_value_heads=layer.kv_heads,
            head_dim=layer.head_dim,
            intermediate_size=layer.width,
            vocab_size=vocab,
            max_position_embeddings=positions or UNBOUNDED,
            gated_mlp=layer.gated,
            activation=layer.activation,
            norm="layernorm" if any("layer_norm" in each for each in norms) else "rmsnorm",
            position="learned" if positions else "rotary",
            qkv_bias=layer.qkv_bias,
            attention_output_bias=layer.output_bias,
            mlp_bias=layer.mlp_bias,
            norm_bias=any("layer_norm" in each for each in norms),
            lm_head_bias=_has_bias(vertices[head]),
            tie_word_embeddings=_weight(vertices[head]) == table,
            parallel_block=layer.is_parallel,
            qk_norm=layer.qk_norm,
            source=f"imported: {self.graph.source}",
        )
        counted, has = config.num_parameters, self.graph.num_parameters
        if abs(counted - has) > OTHER_SHARE * has:
            raise InputError(
                f"model={self.graph.name}: has {has:,} parameters, and a decoder of its layers {counted:,}: the rest is no part of one"
            )
        return config

    # --- the graph ----------------------------------------------------------------------------------------------------------------

    def _products_before(self, at: int) -> set[int]:
        """The last products on all ways to a vertex."""
        return {each for each in self._between(at) if self.graph.vertices[each].kind is ImportedKind.MATMUL}

    def _between(self, at: int) -> set[int]:
        """A vertex and those before it, back to products (included)."""
        reached, seen = [at], {at}
        while reached:
            here = reached.pop()
            if self.graph.vertices[here].kind is ImportedKind.MATMUL:
                continue
            for producer in self.into.get(here, {}).values():
                if producer not in seen:
                    seen.add(producer)
                    reached.append(producer)
        return seen

    def _source(self, at: int) -> int:
        """What makes the first input of an operator; the caller's first input where it is a parameter or a constant."""
        return self.into.get(at, {}).get(0, 0)

    def _refused(self, at: int, rule: str) -> InputError:
        vertex = self.graph.vertices[at]
        place = f" of {vertex.module}" if vertex.module else ""
        return InputError(f"model={self.graph.name}: operator {vertex.name}{place} {rule}")


UNBOUNDED = 2**20
"""[token] A module without a table of positions says no longest context."""


def _is_whole(vertex: ImportedVertex) -> bool:
    """Whether it has what is read of its kind: a file may have been changed."""
    if vertex.kind is ImportedKind.ATTENTION:
        return {"s", "z", "d", "e"} <= set(vertex.dims) and all(size > 0 for size in vertex.dims.values())
    if vertex.kind is ImportedKind.MATMUL:
        return bool(vertex.outputs) and bool(vertex.outputs[0].shape) and vertex.outputs[0].shape[-1] > 0
    return vertex.kind is not ImportedKind.EMBEDDING or all(each.shape for each in vertex.inputs if each.parameter)


def _weight(vertex: ImportedVertex) -> str:
    """The matrix that a product reads; "" for none."""
    return next((each.parameter for each in vertex.inputs if each.parameter and len(each.shape) > 1), "")


def _has_bias(vertex: ImportedVertex) -> bool:
    return any(each.parameter and len(each.shape) == 1 for each in vertex.inputs)


def _widths(vertex: ImportedVertex) -> tuple[int, int]:
    """Entries that a product takes and makes."""
    matrix = next(each for each in vertex.inputs if each.parameter and len(each.shape) > 1)
    made = vertex.outputs[0].shape[-1]
    elements = 1
    for size in matrix.shape:
        elements *= size
    return elements // made, made


def _text(vertex: ImportedVertex) -> str:
    return " x ".join(str(each) for each in _widths(vertex))


def _difference(one: _Layer, other: _Layer) -> str:
    return ", ".join(
        f"{name} {getattr(other, name)}, not {getattr(one, name)}"
        for name in _Layer.__slots__
        if getattr(one, name) != getattr(other, name)
    )


__all__ = ["decoder_of", "is_saved_graph", "read_graph"]
