"""ViT-L/16: patches of 16 x 16 pixels, a class token, 24 transformer layers with the norm before each branch.

Source: Dosovitskiy et al., An Image is Worth 16x16 Words, ICLR 2021, table 1 (Large: 24 layers, width 1024, 4096, 16 heads), 224 x 224
images; parameters as torchvision's vit_l_16. Dropout is not modelled.
"""

from __future__ import annotations

from perfmodel.workload.graph import Graph, Operand
from perfmodel.workload.kinds.joining import flatten, prepend, select
from perfmodel.workload.networks.blocks import add, gelu_mlp, self_attention
from perfmodel.workload.networks.builder import NetworkBuilder
from perfmodel.workload.networks.images import images

_EPS = 1e-6


def vit_large(
    *,
    batch: int = 128,
    image: int = 224,
    patch: int = 16,
    layers: int = 24,
    hidden: int = 1024,
    heads: int = 16,
    intermediate: int = 4096,
    classes: int = 1000,
    fused_attention: bool = True,
) -> Graph:
    b = NetworkBuilder("vit-large", batch=batch, source="Dosovitskiy et al., An Image is Worth 16x16 Words, ICLR 2021, table 1 (ViT-L/16)")
    b.layer = "embedding"
    x = b.convolution("patches", images(b, image), hidden, patch, stride=patch, bias=True)
    x = _sequence(b, x)
    positions = b.parameter("position_embedding.weight", b.shape(x)[1], hidden)
    x = b.pointwise("position_embedding", "add", (x, "b s h"), (positions, "s h"))
    for i in range(layers):
        b.layer = layer = f"layer{i}"
        y = b.layer_norm(f"{layer}.attention_norm", x, "b s h", "h", eps=_EPS)
        x = add(b, f"{layer}.attention_add", x, self_attention(b, f"{layer}.", y, heads=heads, fused=fused_attention))
        y = b.layer_norm(f"{layer}.mlp_norm", x, "b s h", "h", eps=_EPS)
        x = add(b, f"{layer}.mlp_add", x, gelu_mlp(b, f"{layer}.", y, intermediate))
    b.layer = "head"
    x = b.layer_norm("final_norm", x, "b s h", "h", eps=_EPS)
    _, length, _ = b.shape(x)
    operator = select(
        "class_output",
        Operand(tensor=x, dims=("b", "", "h")),
        Operand(tensor="class_output.out", dims=("b", "h")),
        {"b": batch, "h": hidden},
        axis=1,
        index=0,
        size=length,
        layer=b.layer,
    )
    logits = b.linear("head", b.add(operator, batch, hidden), "b h", "n h", "b n", new={"n": classes})
    b.cross_entropy(logits, "b n", "n")
    return b.build()


def _sequence(b: NetworkBuilder, x: str) -> str:
    """Write the patches as a sequence after the class token."""
    batch, hidden, rows, columns = b.shape(x)
    length = rows * columns
    operator = flatten(
        "flatten",
        Operand(tensor=x, dims=("b", "n", "h", "")),
        Operand(tensor="flatten.out", dims=("b", "h", "n")),
        {"b": batch, "h": rows, "n": hidden},
        width=columns,
        layer=b.layer,
    )
    x = b.add(operator, batch, length, hidden)
    operator = prepend(
        "class_token",
        Operand(tensor=b.parameter("class_token.weight", hidden), dims=("h",)),
        Operand(tensor=x, dims=("b", "", "h")),
        Operand(tensor="class_token.out", dims=("b", "", "h")),
        {"b": batch, "h": hidden},
        length=length,
        layer=b.layer,
    )
    return b.add(operator, batch, length + 1, hidden)
