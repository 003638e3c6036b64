"""Decoder-only transformers (GPT, Llama, ...): the graph of uniform plans, unrolled layer by layer."""

from __future__ import annotations

from dataclasses import replace

from perfmodel.foundation.errors import bad_field
from perfmodel.workload.config import TransformerConfig
from perfmodel.workload.graph import Graph, Operator, Setting
from perfmodel.workload.models import load_model
from perfmodel.workload.transformer import build_graph
from perfmodel.workload.unroll import unrolled

_DEFAULT_BATCH = 8
#: Models with a longer context are trained mostly at this length.
_LONGEST_DEFAULT = 8192


def language_model(
    name: str,
    *,
    batch: int = _DEFAULT_BATCH,
    seq_len: int = 0,
    layers: int = 0,
    hidden: int = 0,
    heads: int = 0,
    kv_heads: int = 0,
    head_dim: int = 0,
    intermediate: int = 0,
    vocabulary: int = 0,
    fused_attention: bool = True,
    dropout: bool = False,
) -> Graph:
    """Build a shipped model or that of a config.json, with replaced sizes. hidden without heads keeps the number of heads. seq_len 0: the
    longest, up to 8192."""
    config = load_model(name)
    changes = {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads or (heads if config.num_key_value_heads == config.num_attention_heads else 0),
        "head_dim": head_dim or (hidden // (heads or config.num_attention_heads) if hidden else 0),
        "intermediate_size": intermediate,
        "vocab_size": vocabulary,
    }
    if layers:
        config = replace(config.with_layers(layers), name=config.name)
    config = config.having(**{field: value for field, value in changes.items() if value})
    length = seq_len or min(config.positions.max_position_embeddings, _LONGEST_DEFAULT)
    return transformer_network(config, batch=batch, seq_len=length, fused_attention=fused_attention, dropout=dropout)


def transformer_network(
    config: TransformerConfig,
    *,
    batch: int,
    seq_len: int,
    fused_attention: bool = True,
    dropout: bool = False,
    shares_queries: bool = False,
) -> Graph:
    """Build one training step on `batch` sequences. Operators of layer 3 are `layer3.q_proj` and so on.

    Work is that of the folded graph, so the mean over layers where only some have a window or rotary positions. For execution, the settings
    of each layer are its own. `shares_queries`: ranks may share queries of causal attention, although later ones attend to more keys.
    """
    if config.positions.position == "learned" and seq_len > config.positions.max_position_embeddings:
        raise bad_field(
            "seq_len", seq_len, f"{config.name} has learned positions for {config.positions.max_position_embeddings}", "use a shorter one"
        )
    folded = build_graph(
        config,
        seq_len=seq_len,
        attention="flash" if fused_attention else "unfused",
        dropout=dropout,
        activation_bytes=0.0,
        parameter_bytes=0.0,
        weight_form_kv=False,
        shares_queries=shares_queries,
    )
    graph = unrolled(folded, batch=batch)
    numbers = range(config.num_hidden_layers)
    unwindowed = {f"layer{i}" for i in numbers if (every := config.attention.full_attention_every) and (i + 1) % every == 0}
    unturned = {f"layer{i}" for i in numbers if (every := config.positions.no_rotary_every) and (i + 1) % every == 0}

    window = config.attention.window

    def as_run(operator: Operator) -> Operator:
        changes: dict[str, Setting] = {}
        has_scores = operator.is_attention or (operator.kind == "softmax" and bool(operator.group))
        if has_scores and 0 < window < seq_len:
            changes["window"] = 0 if operator.layer in unwindowed else window
            changes |= {"chunked": True} if config.attention.attention_chunk else {}
        if has_scores and config.positions.position == "alibi":
            changes["alibi"] = True
        if operator.kind == "rotary" and operator.layer in unturned:
            changes["turns"] = False
        return replace(operator, settings={**operator.settings, **changes}) if changes else operator

    return replace(graph, operators=tuple(map(as_run, graph.operators)), source=config.origin.source)
