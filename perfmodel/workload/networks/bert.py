"""BERT-large with masked-language modelling: encoder and word-prediction head, without the pooler and next-sentence head.

Source: Devlin, Chang, Lee & Toutanova, BERT, NAACL 2019 (24 layers, width 1024, 16 heads); parameters as Hugging Face's BertForMaskedLM of
bert-large-uncased. A loss is computed for every position. Dropout is not modelled.
"""

from __future__ import annotations

from perfmodel.workload.graph import Graph, TensorRole
from perfmodel.workload.networks.blocks import add, gelu_mlp, learned_positions, self_attention
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
) -> Graph:
    b = NetworkBuilder("bert-large", batch=batch, source="Devlin et al., BERT, NAACL 2019")
    b.layer = "embedding"
    tokens = b.input("tokens", batch, seq_len, role=TensorRole.INDEX)
    segments = b.input("segments", batch, seq_len, role=TensorRole.INDEX)
    x = b.embedding("embedding", tokens, "b s", vocabulary, hidden, feature_dim="h")
    kind = b.embedding("segment_embedding", segments, "b s", _SEGMENTS, hidden, feature_dim="h")
    x = add(b, "segment_embedding_add", x, kind)
    x = learned_positions(b, "position_embedding", x, positions)
    x = b.layer_norm("embedding_norm", x, "b s h", "h", eps=_EPS)
    for i in range(layers):
        b.layer = layer = f"layer{i}"
        y = self_attention(b, f"{layer}.", x, heads=heads, fused=fused_attention)
        x = b.layer_norm(f"{layer}.attention_norm", add(b, f"{layer}.attention_add", x, y), "b s h", "h", eps=_EPS)
        y = gelu_mlp(b, f"{layer}.", x, intermediate)
        x = b.layer_norm(f"{layer}.mlp_norm", add(b, f"{layer}.mlp_add", x, y), "b s h", "h", eps=_EPS)
    b.layer = "head"
    x = b.linear("transform", x, "b s h", "k h", "b s k", new={"k": hidden})
    x = b.pointwise("transform_gelu", "gelu", (x, "b s h"))
    x = b.layer_norm("transform_norm", x, "b s h", "h", eps=_EPS)
    # The embedding matrix again, with its own bias.
    logits = b.linear("decoder", x, "b s h", "v h", "b s v", weight="embedding.weight", padded="v", new={"v": vocabulary})
    b.cross_entropy(logits, "b s v", "v")
    return b.build()
