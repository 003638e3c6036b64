"""The encoder-decoder Transformer for translation, attention as separate products and softmax.

Source: Vaswani et al., Attention Is All You Need, NIPS 2017 (base model: 6 + 6 layers, width 512, 8 heads, feed-forward layers of 2048),
norms after the additions; batch, length and vocabulary as in the graph of Elango, PaSE, IPDPS 2021. The two embeddings and the output
matrix are three parameters, attention projections have no bias, dropout is not modelled.
"""

from __future__ import annotations

from perfmodel.workload.graph import Graph, TensorRole
from perfmodel.workload.networks.builder import NetworkBuilder


def transformer(
    *,
    batch: int = 64,
    seq_len: int = 256,
    layers: int = 6,
    hidden: int = 512,
    heads: int = 8,
    head_dim: int = 64,
    intermediate: int = 2048,
    vocabulary: int = 50_000,
) -> Graph:
    """Build the network. layers: of the encoder, and again of the decoder; source and target have `seq_len` words each."""
    b = NetworkBuilder("transformer", batch=batch, source="Vaswani et al., NIPS 2017; Elango, PaSE (IPDPS 2021), graph of the Transformer")

    def embed(side: str) -> str:
        b.layer = f"{side}.embedding"
        tokens = b.input(f"{side}.tokens", batch, seq_len, role=TensorRole.INDEX)
        x = b.embedding(f"{side}.embedding", tokens, "b s", vocabulary, hidden)
        return b.pointwise(f"{side}.positions", "add", (x, "b s d"), (b.input("positions", seq_len, hidden), "s d"))

    def attend(name: str, x: str, memory: str, *, causal: bool) -> str:
        """Write attention with queries of x, and keys and values of the memory; added to x and normalised."""
        sizes = {"h": heads, "c": head_dim}
        q = b.linear(f"{name}.q_proj", x, "b s d", "h c d", "b h s c", bias=False, unsplit="c", new=sizes)
        k = b.linear(f"{name}.k_proj", memory, "b t d", "h c d", "b h t c", bias=False, unsplit="c", new=sizes)
        v = b.linear(f"{name}.v_proj", memory, "b t d", "h c d", "b h t c", bias=False, unsplit="c", new=sizes)
        scores = b.einsum(f"{name}.scores", (q, "b h s c"), (k, "b h t c"), "b h s t")
        scale, queries = head_dim**-0.5, "s" if causal else ""
        weights = b.softmax(f"{name}.softmax", scores, "b h s t", "t", scale=scale, causal_queries=queries)
        context = b.einsum(f"{name}.context", (weights, "b h s t"), (v, "b h t c"), "b h s c")
        y = b.linear(f"{name}.o_proj", context, "b h s c", "d h c", "b s d", bias=False, unsplit="c", new={"d": hidden})
        return close(name, x, y)

    def feed_forward(name: str, x: str) -> str:
        y = b.linear(f"{name}.up_proj", x, "b s d", "e d", "b s e", new={"e": intermediate})
        y = b.pointwise(f"{name}.relu", "relu", (y, "b s e"))
        return close(name, x, b.linear(f"{name}.down_proj", y, "b s e", "d e", "b s d", new={"d": hidden}))

    def close(name: str, x: str, y: str) -> str:
        total = b.pointwise(f"{name}.add", "add", (x, "b s d"), (y, "b s d"))
        return b.layer_norm(f"{name}.norm", total, "b s d", "d")

    memory = embed("encoder")
    for i in range(layers):
        b.layer = layer = f"encoder.{i}"
        memory = attend(f"{layer}.attention", memory, memory, causal=False)
        memory = feed_forward(f"{layer}.mlp", memory)
    x = embed("decoder")
    for i in range(layers):
        b.layer = layer = f"decoder.{i}"
        x = attend(f"{layer}.attention", x, x, causal=True)
        x = attend(f"{layer}.cross_attention", x, memory, causal=False)
        x = feed_forward(f"{layer}.mlp", x)
    b.layer = "projection"
    logits = b.linear("projection", x, "b s d", "v d", "b s v", bias=False, padded="v", new={"v": vocabulary})
    b.cross_entropy(logits, "b s v", "v")
    return b.build()
