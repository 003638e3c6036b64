"""The forward graph of a decoder-only transformer, assembled from the parts in `workload/decoder/`.

It has one embedding, one layer of each kind and one head.
"""

from __future__ import annotations

from math import lcm

from perfmodel.workload.config import TransformerConfig
from perfmodel.workload.decoder.builder import DecoderBuilder, sizes_of
from perfmodel.workload.decoder.layer import write_further_tokens, write_layer, write_loss
from perfmodel.workload.graph import Graph, Region, Repeat, regions_of
from perfmodel.workload.layer_specs import LayerSpec
from perfmodel.workload.routing import EVEN, RankRows


def graph_length(model: TransformerConfig, seq_len: int) -> int:
    """Return the `seq_len` of `build_graph` for sequences of that length: 0 where the graph of one token represents them.

    It does where the length is a multiple of all chunk sizes, and at least the number of keys that a sparse indexer selects.
    """
    chunks: list[int] = []
    for recurrence in (model.parts.mamba, model.parts.delta):
        if recurrence is not None:
            chunks.append(recurrence.chunk_size)
    if model.parts.latent is not None and model.parts.latent.index_heads:
        if seq_len < model.parts.latent.index_top:
            return seq_len
        chunks.append(2)  # half of the score matrix
    return seq_len if seq_len % lcm(*chunks) else 0


def build_graph(
    model: TransformerConfig,
    *,
    seq_len: int,
    attention: str,
    dropout: bool,
    activation_bytes: float,
    parameter_bytes: float,
    weight_form_kv: bool = True,
    shares_queries: bool = True,
    dispatcher: str = "alltoall",
    rank_rows: RankRows = EVEN,
    absorbs: bool = False,
) -> Graph:
    """Return the forward graph of `model`.

    seq_len         0: a quantity of the plan, like the batch; sizes are those of one token (`DimRoles.per_token`, `graph_length`)
    attention       "flash" or "unfused"
    dropout         run dropout operators (where the model has any)
    *_bytes         bytes of an element of activations and of weights in the computation
    weight_form_kv  where tp exceeds the key-value heads, the weights of k and v are expanded, not k and v (algebra, GQA)
    rank_rows       expert rows of the fullest rank, or of a given one
    dispatcher      transport of tokens to experts: "alltoall" or "allgather"
    absorbs         latent attention reads the latents directly (`decoder/absorbed.py`)
    shares_queries  ranks may share the queries of causal attention (`kinds.attention`)
    """
    b = DecoderBuilder(
        model=model,
        seq_len=seq_len,
        activation_bytes=activation_bytes,
        parameter_bytes=parameter_bytes,
        sizes=sizes_of(model, seq_len, rank_rows),
        attention=attention,
        drops=dropout and model.dropout > 0,
        weight_form_kv=weight_form_kv,
        shares_queries=shares_queries,
        dispatcher=dispatcher,
        rank_rows=rank_rows,
        absorbs=absorbs,
    )

    table = "embedding.weight"
    x = b.embedding("token_embedding", "tokens", "b s", table, "b s v_in h", "v h")
    if model.positions.position == "learned":
        positions = b.embedding("position_embedding", "positions", "s", "position_embedding.weight", "b s_res p h", "p h")
        x = b.sum("embedding_add", x, positions)
    if model.norms.embedding_layernorm:
        x = b.norm("embedding_norm", x)
    if b.drops:
        x = b.dropout("embedding_dropout", x)
    x = b.identity("embedding_output", x)

    repeats: list[Repeat] = []
    for kind in model.layer_kinds:
        repeats.append(_repeat(model, kind))
        b.region, b.prefix = kind.name, model.prefix_of(kind)
        x = write_layer(b, kind, x)

    b.region, b.prefix = "head", ""
    x = b.identity("head_input", x)
    head_weight = table if model.tie_word_embeddings else b.parameter("lm_head.weight", "v h", 1)
    if model.num_mtp_layers:
        write_further_tokens(b, x, table=table, head_weight=head_weight)
    write_loss(b, x, head_weight)
    return Graph(
        name=model.name,
        operators=tuple(b.operators),
        tensors=b.tensors,
        repeats=tuple(repeats),
        loss="cross_entropy",
        tied=(table,) if model.tie_word_embeddings or model.num_mtp_layers else (),
    )


def _repeat(model: TransformerConfig, kind: LayerSpec) -> Repeat:
    return Repeat(layer=kind.name, count=kind.count, carried=f"{model.prefix_of(kind)}block_input.out", turn=kind.turn)


def decoder_regions(model: TransformerConfig) -> tuple[Region, ...]:
    """Return `Graph.regions` of `model` without building its graph."""
    kinds = model.layer_kinds
    return regions_of(("embedding", *(kind.name for kind in kinds), "head"), [_repeat(model, kind) for kind in kinds])
