"""The dense feed-forward branch, and the end of a branch."""

from __future__ import annotations

from perfmodel.workload.decoder.builder import DecoderBuilder


def branch_end(b: DecoderBuilder, name: str, x: str, *, bias: str) -> str:
    """Write the end of a branch after its last projection: bias, post-norm, dropout; all in the residual stream's layout."""
    if bias:
        x = b.bias(bias, x, "b s_res h", "b s h", "h")
    if b.model.norms.sandwich_norm:
        x = b.norm(f"{name}_post_norm", x)
    if b.drops:
        x = b.dropout(f"{name}_dropout", x)
    return x


def dense_mlp(b: DecoderBuilder, x: str) -> str:
    model = b.model
    hidden, wide = "b s f h", "b s f"
    if model.mlp.gated_mlp:
        gate = b.linear("gate_proj", x, hidden, "b s h", "f h", 1, wide, part="dense")
        up = b.linear("up_proj", x, hidden, "b s h", "f h", 1, wide, part="dense")
        if model.biases.mlp_bias:
            gate = b.bias("gate_proj", gate, wide, wide, "f")
            up = b.bias("up_proj", up, wide, wide, "f")
        y = b.pointwise("activation", model.mlp.activation, [(gate, wide)], wide)
        y = b.pointwise("gate_product", "mul", [(y, wide), (up, wide)], wide)
    else:
        up = b.linear("up_proj", x, hidden, "b s h", "f h", 1, wide, part="dense")
        if model.biases.mlp_bias:
            up = b.bias("up_proj", up, wide, wide, "f")
        y = b.pointwise("activation", model.mlp.activation, [(up, wide)], wide)
    return b.linear("down_proj", y, "b s f h", wide, "h f", 1, "b s h", part="dense")
