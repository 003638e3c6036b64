"""Recognition of an imported module as a decoder-only transformer.

A recognised decoder supports everything that these models do: KV caches, prefill and decode, serving plans.

Recognition uses operators and their connections, never module names: a token table, layers of equal widths around one attention each, an
output matrix. The products of a layer are those of queries, keys and values (or of their latent), of attention's output and of the
feed-forward, dense or with experts. Any other product with a weight is refused. Attention with an unknown mask is assumed to be causal; a
module that attends to later tokens has no cache and is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from perfmodel.foundation.errors import InputError, shown
from perfmodel.workload.config import TransformerConfig
from perfmodel.workload.config_fields import Values, layer_parts
from perfmodel.workload.imported.feed_forwards import ImportedFeedForward, read_feed_forward
from perfmodel.workload.imported.graph import SCHEMA_VERSION, ImportedGraph, ImportedKind, Reach
from perfmodel.workload.imported.mixers import ImportedMixer, find_attentions, is_normed_after, is_normed_before, read_mixer
from perfmodel.workload.imported.wiring import Wiring, difference, is_choice
from perfmodel.workload.layer_specs import FeedForward, Mixer

ARCHITECTURE = "imported"
#: Largest share of parameters that may be outside a decoder of its widths: extra norms, scales, learned gates.
OTHER_SHARE = 0.01
_NO_DECODER = (
    ImportedKind.CONVOLUTION, ImportedKind.RECURRENT, ImportedKind.BATCH_NORM, ImportedKind.POOLING, ImportedKind.CROSS_ENTROPY,
    ImportedKind.UNRECOGNISED,
)  # fmt: skip


def is_saved_graph(data: Mapping[str, Any]) -> bool:
    """Return whether a file was written by `perfmodel import --save`."""
    return {"schema_version", "vertices", "parameters"} <= set(data)


def read_graph(data: Mapping[str, Any], *, where: str) -> ImportedGraph:
    """Return the graph that `graph_to_dict` wrote, also in version 1 of its form. Raises InputError."""
    if data.get("schema_version") == 1:
        data = _without_edges(data, where)
    if data.get("schema_version") != SCHEMA_VERSION:
        raise InputError(f"{where}: schema_version={shown(data.get('schema_version'))}: must be {SCHEMA_VERSION}; import the module again")
    plain = _with_unit({name: value for name, value in data.items() if name != "schema_version"}, "buffer_bytes")
    if isinstance(plain["vertices"], list):
        plain["vertices"] = [_with_unit(vertex, "activation_bytes") for vertex in plain["vertices"]]
    from perfmodel.foundation.schema import checked_record

    return checked_record(ImportedGraph, plain, where=where)


def _without_edges(data: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return the data of a file of version 1 in the present form: each edge in the input that it leads to."""
    try:
        vertices = [{**vertex, "inputs": [dict(operand) for operand in vertex["inputs"]]} for vertex in data["vertices"]]
        for edge in data["edges"]:
            operand = vertices[edge["consumer"]]["inputs"][edge["input"]]
            operand |= {"producer": [edge["producer"], edge["output"]], "links": edge["links"]}
    except (KeyError, IndexError, TypeError, ValueError):
        raise InputError(f"{where}: edges: must lead to inputs of vertices; import the module again") from None
    return {**{name: value for name, value in data.items() if name != "edges"}, "vertices": vertices, "schema_version": SCHEMA_VERSION}


def _with_unit(data: Any, name: str) -> Any:
    """Return the data with the unit of a size, as record files need it: the graph's own file stores plain bytes."""
    value = data.get(name) if isinstance(data, Mapping) else None
    return {**data, name: f"{value!r} B"} if isinstance(value, (int, float)) and not isinstance(value, bool) else data


def decoder_of(graph: ImportedGraph, *, name: str = "") -> TransformerConfig:
    """Return the decoder of the module. Raises InputError with the first part that no decoder has."""
    for vertex in graph.vertices:  # a file may have been edited
        operands = (*vertex.inputs, *vertex.outputs)
        if vertex.kind is ImportedKind.ATTENTION:
            is_complete = {"s", "z", "d", "e"} <= set(vertex.dims) and all(size > 0 for size in vertex.dims.values())
        elif vertex.kind is ImportedKind.MATMUL or is_choice(vertex):
            has_sizes = all(operand.shape and min(operand.shape) > 0 for operand in operands)
            is_complete = bool(vertex.inputs) and bool(vertex.outputs) and has_sizes
        else:
            is_complete = vertex.kind is not ImportedKind.EMBEDDING or all(op.shape for op in vertex.inputs if op.parameter)
        if not is_complete:
            rule = "lacks dims or sizes that every import has; import the module again"
            raise InputError(f"model={graph.name}: operator {vertex.name} {rule}")
    wiring = Wiring(graph)
    for at, vertex in enumerate(graph.vertices):
        if vertex.kind in _NO_DECODER and not (vertex.outputs and all(output.is_index for output in vertex.outputs)):
            raise wiring.refused(at, f"is no operator of a decoder ({vertex.kind}: {vertex.operator})")
    layers, head = _layers(wiring)
    return _checked(wiring, name or graph.name, layers, head)


def description_of(model: TransformerConfig) -> str:
    """Return a summary of the recognised model: "48 layers, 32 heads of 128 over 4 of keys, 8 of 128 experts of width 768"."""
    words, heads = [f"{model.num_hidden_layers} layers"], f"{model.num_attention_heads} heads of {model.head_dim}"
    latent, experts = model.parts.latent, model.parts.experts
    if latent is not None:
        words.append(f"{heads} of a latent of {latent.key_value_rank} and {latent.rope_head_dim} with positions")
    else:
        words.append(f"{heads} over {model.num_key_value_heads} of keys")
    for number, name in ((model.attention.sliding_window, "a window"), (model.attention.attention_chunk, "chunks")):
        if number:
            words.append(f"{name} of {number} tokens in {model.sliding_layer_fraction:.0%} of the layers")
    if any(kind.feed_forward == "dense" for kind in model.layer_kinds):
        words.append(f"a feed-forward of width {model.intermediate_size}")
    if experts is not None:
        shared = f" and a shared one of {experts.shared_width}" if experts.shared_width else ""
        words.append(f"{experts.top_k} of {experts.num_experts} experts of width {experts.width}{shared}")
    return ", ".join(words)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    mixer: ImportedMixer
    feed_forward: ImportedFeedForward
    is_parallel: bool
    shares_norm: bool
    has_norm_after: bool


def _layers(wiring: Wiring) -> tuple[list[_Layer], int]:
    """Return the layers and the product that computes the logits. Refuse layers that differ, except between dense and expert
    feed-forwards."""
    attentions = find_attentions(wiring)
    if not attentions:
        raise InputError(f"model={wiring.graph.name}: has no attention, so no cache and no decode step")
    mixers = [read_mixer(wiring, attention) for attention in attentions]
    taken = {product for mixer in mixers for product in (*mixer.products, mixer.output)}
    rest = sorted(wiring.products - taken)
    if not rest:
        raise InputError(f"model={wiring.graph.name}: has no product after its last layer that makes logits")
    *rest, head = rest
    begins = [0, *(mixer.first for mixer in mixers[1:]), len(wiring.graph.vertices)]
    layers: list[_Layer] = []
    for mixer, (begin, end) in zip(mixers, pairwise(begins), strict=True):
        products = [at for at in rest if begin <= at < end]
        feed_forward = read_feed_forward(wiring, products, mixer.widths.hidden, mixer.attention, end)
        source = wiring.source(min(products))
        is_parallel = mixer.output not in wiring.products_before(source, first=min(begin, mixer.first))
        after = is_normed_after(wiring, mixer, min(products))
        shares = is_parallel and source == wiring.source(mixer.first)
        layers.append(_Layer(mixer=mixer, feed_forward=feed_forward, is_parallel=is_parallel, shares_norm=shares, has_norm_after=after))
    first: dict[str, _Layer] = {}
    for layer in layers:
        known = first.setdefault(_feed_forward(layer), layer)
        differences = [
            *difference(layers[0].mixer.widths, layer.mixer.widths),
            *difference(known.feed_forward, layer.feed_forward),
            *(["feed-forward parallel to attention in one of them"] if layer.is_parallel != layers[0].is_parallel else []),
            *(["norm after attention in one of them"] if layer.has_norm_after != layers[0].has_norm_after else []),
        ]
        if differences:
            rule = f"is in a layer unlike the first ({', '.join(differences)}); decoders have equal layers"
            raise wiring.refused(layer.mixer.attention, rule)
    return layers, head


def _feed_forward(layer: _Layer) -> FeedForward:
    return "experts" if layer.feed_forward.experts is not None else "dense"


def _tables(graph: ImportedGraph) -> list[tuple[str, int]]:
    """Return the embedding tables, with their numbers of rows, the token table (the largest) first."""
    rows: dict[str, int] = {}
    for vertex in graph.vertices:
        if vertex.kind is ImportedKind.EMBEDDING:
            rows |= {operand.parameter: operand.shape[0] for operand in vertex.inputs if operand.parameter}
    if not 1 <= len(rows) <= 2:
        raise InputError(
            f"model={graph.name}: has {len(rows)} tables of embeddings; a decoder has one of tokens, and perhaps one of positions"
        )
    return sorted(rows.items(), key=lambda table: -table[1])


def _checked(wiring: Wiring, name: str, layers: Sequence[_Layer], head: int) -> TransformerConfig:
    graph = wiring.graph
    tables = _tables(graph)
    (table, vocab), logits = tables[0], wiring.weights(head)
    widths = layers[0].mixer.widths
    if (logits.in_features, logits.out_features) != (widths.hidden, vocab):
        raise wiring.refused(head, f"takes {logits.text} in and out, and logits of {vocab} tokens are made of {widths.hidden} entries")
    positions = tables[1][1] if len(tables) > 1 else 0
    sandwich = layers[0].has_norm_after and not layers[0].is_parallel
    is_layer_norm = any("layer_norm" in vertex.operator for vertex in graph.vertices if vertex.kind is ImportedKind.NORM)
    config = TransformerConfig.of(
        name=name,
        architecture=ARCHITECTURE,
        num_hidden_layers=len(layers),
        hidden_size=widths.hidden,
        num_attention_heads=widths.heads,
        num_key_value_heads=widths.kv_heads,
        head_dim=widths.head_dim,
        vocab_size=vocab,
        max_position_embeddings=positions or UNBOUNDED,
        norm="layernorm" if is_layer_norm else "rmsnorm",
        position="learned" if positions else "rotary",
        qkv_bias=widths.qkv_bias,
        attention_output_bias=widths.output_bias,
        norm_bias=is_layer_norm,
        lm_head_bias=logits.has_bias,
        tie_word_embeddings=logits.parameter == table,
        parallel_block=layers[0].is_parallel,
        shared_norm=layers[0].shares_norm,
        pre_norm=is_normed_before(wiring, layers[0].mixer) or not sandwich,
        sandwich_norm=sandwich,
        qk_norm=widths.qk_norm,
        qk_norm_scope=widths.qk_norm_scope,
        attention_sinks=widths.sinks,
        source=f"imported: {graph.source}",
        **_parts(layers),
        **_reach(wiring, layers),
    )
    counted, has = config.num_parameters, graph.num_parameters
    if abs(counted - has) > OTHER_SHARE * has:
        raise InputError(f"model={graph.name}: has {has:,} parameters, and a decoder of its layers {counted:,}: the rest is no part of one")
    return config


def _parts(layers: Sequence[_Layer]) -> Values:
    """Return the parts and kinds of the layers; without dense layers the experts' width is that of the feed-forward."""
    mixer: Mixer = "latent" if layers[0].mixer.widths.latent is not None else "attention"
    feed_forwards = [layer.feed_forward for layer in layers]
    experts = next((feed_forward.experts for feed_forward in feed_forwards if feed_forward.experts is not None), None)
    dense = next((feed_forward.dense for feed_forward in feed_forwards if feed_forward.dense is not None), None)
    widths = dense or experts
    assert widths is not None  # each layer has one of the two
    return {
        "intermediate_size": widths.width,
        "gated_mlp": widths.gated,
        "mlp_bias": dense is not None and dense.bias,
        "activation": feed_forwards[0].activation,
        **layer_parts([(mixer, _feed_forward(layer)) for layer in layers], latent=layers[0].mixer.widths.latent, experts=experts),
    }


def _reach(wiring: Wiring, layers: Sequence[_Layer]) -> Values:
    """Return the attention window by the masks: equal in all layers, except full attention in every n-th one."""
    fields = {Reach.WINDOW: "sliding_window", Reach.CHUNK: "attention_chunk"}
    cut = {layer.mixer.seen for layer in layers if layer.mixer.seen.reach in fields}
    if not cut:
        return {}
    is_full = [layer.mixer.seen.reach not in fields for layer in layers]
    every = is_full.index(True) + 1 if any(is_full) else 0
    repeats = [every > 0 and (number + 1) % every == 0 for number in range(len(layers))]
    if len(cut) > 1 or is_full != repeats:
        reaches = ", ".join(f"{layer.mixer.seen.reach} {layer.mixer.seen.num_keys or ''}".strip() for layer in layers[:8])
        rule = f"is in layers that see by their masks {reaches}; one window is modelled, and layers without it at a fixed period"
        raise wiring.refused(layers[0].mixer.attention, f"{rule} (full_attention_every)")
    (seen,) = cut
    return {fields[seen.reach]: seen.num_keys, "full_attention_every": every}


UNBOUNDED = 2**20
"""[token] Longest context of a module without a position table."""


__all__ = ["decoder_of", "is_saved_graph", "read_graph", "description_of"]
