"""BERT-large, trained on masked words: encoder and the head that predicts words, without the pooler and its next-sentence head.

Source: Devlin, Chang, Lee & Toutanova, BERT, NAACL 2019 (24 layers, width 1024, 16 heads); parameters as Hugging Face's BertForMaskedLM of
bert-large-uncased. A loss is computed for every position. Dropout is left out.
"""

from __future__ import annotations

from perfmodel.workload.network import Network, TensorRole
from perfmodel.workload.networks.blocks import QUERY, attend, head_dim, learned_positions
from perfmodel.workload.networks.builder import NetworkBuilder

_EPS = 1e-12
_SEGMENTS = 2


def bert_large(
    *,
    batch: int = 32,
    seq_len: int = 512,
    layers: int = 24,
    hidden: int = 1024,
    heads: int = 16,
    intermediate: int = 4096,
    vocabulary: int = 30_522,
    positions: int = 512,
    fused_attention: bool = True,
) -> Network:
    b = NetworkBuilder("bert-large", batch=batch, source="Devlin et al., BERT, NAACL 2019")
    b.layer = "embedding"
    tokens = b.input("tokens", batch, seq_len, role=TensorRole.INDEX)
    segments = b.input("segments", batch, seq_len, role=TensorRole.INDEX)
    x = b.embedding("embedding", tokens, "b s", vocabulary, hidden, feature_dim="h")
    kind = b.embedding("segment_embedding", segments, "b s", _SEGMENTS, hidden, feature_dim="h")
    x = b.pointwise("segment_embedding_add", "add", (x, "b s h"), (kind, "b s h"))
    x = learned_positions(b, "position_embedding", x, positions)
    x = b.layer_norm("embedding_norm", x, "b s h", "h", eps=_EPS)
    for i in range(layers):
        b.layer = layer = f"layer{i}"
        sizes = {"g": heads, "d": head_dim(hidden, heads)}
        q = b.linear(f"{layer}.q_proj", x, "b s h", "g r d h", QUERY, whole="d", new=sizes | {"r": 1})
        k = b.linear(f"{layer}.k_proj", x, "b s h", "g d h", "b s g d", whole="d", new=sizes)
        v = b.linear(f"{layer}.v_proj", x, "b s h", "g d h", "b s g d", whole="d", new=sizes)
        y = attend(b, f"{layer}.", q, k, v, causal=False, fused=fused_attention)
        y = b.linear(f"{layer}.o_proj", y, QUERY, "h g r d", "b s h", whole="d", new={"h": hidden})
        x = b.layer_norm(
            f"{layer}.attention_norm", b.pointwise(f"{layer}.attention_add", "add", (x, "b s h"), (y, "b s h")), "b s h", "h", eps=_EPS
        )
        y = b.pointwise(
            f"{layer}.gelu", "gelu", (b.linear(f"{layer}.up_proj", x, "b s h", "f h", "b s f", new={"f": intermediate}), "b s f")
        )
        y = b.linear(f"{layer}.down_proj", y, "b s f", "h f", "b s h", new={"h": hidden})
        x = b.layer_norm(f"{layer}.mlp_norm", b.pointwise(f"{layer}.mlp_add", "add", (x, "b s h"), (y, "b s h")), "b s h", "h", eps=_EPS)
    b.layer = "head"
    x = b.pointwise("transform_gelu", "gelu", (b.linear("transform", x, "b s h", "k h", "b s k", new={"k": hidden}), "b s h"))
    x = b.layer_norm("transform_norm", x, "b s h", "h", eps=_EPS)
    # the matrix of the embedding once more, with a bias of its own
    logits = b.linear("decoder", x, "b s h", "v h", "b s v", weight="embedding.weight", padded="v", new={"v": vocabulary})
    b.cross_entropy(logits, "b s v", "v")
    return b.build()
