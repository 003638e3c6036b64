"""A language model of LSTM layers: embedding, layers, projection to the vocabulary.

Source: Jozefowicz et al., Exploring the Limits of Language Modeling, arXiv 1602.02410; sizes as in the graph of Elango, PaSE, IPDPS 2021
(64 sequences of 256 words, width 2048, two layers, 100,000 words). The two biases of an LSTM layer are merged into one.
"""

from __future__ import annotations

from perfmodel.workload.graph import Graph, TensorRole
from perfmodel.workload.kinds.lstm import lstm
from perfmodel.workload.networks.builder import NetworkBuilder


def rnnlm(
    *, batch: int = 64, seq_len: int = 256, embedding: int = 2048, hidden: int = 2048, layers: int = 2, vocabulary: int = 100_000
) -> Graph:
    b = NetworkBuilder("rnnlm", batch=batch, source="Elango, PaSE (IPDPS 2021), graph of RNNLM")
    tokens = b.input("tokens", batch, seq_len, role=TensorRole.INDEX)
    b.layer = "embedding"
    x = b.embedding("embedding", tokens, "b s", vocabulary, embedding)
    for i in range(layers):
        b.layer = name = f"lstm{i}"
        # Dim i: the four gates, which the recurrence reads together.
        gates = b.linear(f"{name}.input", x, "b s d", "i e d", "b s i e", unsplit="i", new={"i": 4, "e": hidden})
        weight = b.parameter(f"{name}.weight", 4, hidden, hidden, rows=2)
        recurrence = lstm(name, gates, weight, f"{name}.out", batch=batch, seq_len=seq_len, hidden=hidden, layer=name)
        x = b.add(recurrence, batch, seq_len, hidden)
    b.layer = "projection"
    logits = b.linear("projection", x, "b s d", "v d", "b s v", bias=False, padded="v", new={"v": vocabulary})
    b.cross_entropy(logits, "b s v", "v")
    return b.build()
