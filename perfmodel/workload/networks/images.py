"""Common parts of image networks: input data and classification head."""

from __future__ import annotations

from perfmodel.workload.graph import Graph
from perfmodel.workload.networks.builder import NetworkBuilder


def images(b: NetworkBuilder, side: int) -> str:
    """Declare the data: `side` x `side` pixels of three colours."""
    return b.input("images", b.batch, 3, side, side)


def classify(b: NetworkBuilder, x: str, classes: int) -> Graph:
    """Write global average pooling, one fully connected layer and the loss; return the graph."""
    b.layer = "head"
    x = b.mean("mean", x, "b c h w", "b c")
    logits = b.linear("fc", x, "b c", "n c", "b n", new={"n": classes})
    b.cross_entropy(logits, "b n", "n")
    return b.build()
