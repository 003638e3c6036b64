"""Layers of a decoder: mixer and feed-forward with their residual connections; head, loss and multi-token-prediction modules.

A multi-token-prediction module (DeepSeek-V3, arXiv 2412.19437) has its own norms, projection and layer, and shares the model's token table
and output matrix. All belong to the head region, on the last pipeline stage, without recomputation; each rank projects its own tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from perfmodel.workload.decoder.attention import attention_mixer
from perfmodel.workload.decoder.builder import DecoderBuilder, operand
from perfmodel.workload.decoder.experts import expert_mixture
from perfmodel.workload.decoder.latent import latent_mixer
from perfmodel.workload.decoder.recurrent import delta_mixer, mamba_mixer
from perfmodel.workload.kinds.pieces import side_by_side
from perfmodel.workload.kinds.vocabulary import cross_entropy
from perfmodel.workload.layer_specs import FeedForward, LayerSpec, Mixer


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


#: Writers of each part: hidden state in, branch output out, on the residual stream's dims.
MIXERS: Mapping[Mixer, Callable[[DecoderBuilder, str], str]] = {
    "attention": attention_mixer,
    "latent": latent_mixer,
    "mamba": mamba_mixer,
    "delta": delta_mixer,
}
FEED_FORWARDS: Mapping[FeedForward, Callable[[DecoderBuilder, str], str]] = {"dense": dense_mlp, "experts": expert_mixture}


def write_layer(b: DecoderBuilder, kind: LayerSpec, x: str) -> str:
    """Write the operators of one layer that reads `x`; return its output tensor."""
    model = b.model
    x = b.identity("block_input", x)
    if model.parallel_block:  # both branches read the same residual
        normed = b.norm("attention_norm", x) if model.norms.pre_norm else x
        mlp_in = normed if model.norms.shared_norm else b.norm("mlp_norm", x)
        mixed = MIXERS[kind.mixer](b, normed)
        both = b.sum("parallel_add", mixed, FEED_FORWARDS[kind.feed_forward](b, mlp_in))
        if model.biases.attention_output_bias:
            both = b.bias("o_proj", both, "b s_res h", "b s h", "h")
        if model.biases.mlp_bias:
            both = b.bias("down_proj", both, "b s_res h", "b s h", "h")
        if b.drops:
            both = b.dropout("block_dropout", both)
        x = b.sum("block_add", x, both)
    else:
        if kind.mixer != "none":
            mixed = MIXERS[kind.mixer](b, b.norm("attention_norm", x) if model.norms.pre_norm else x)
            bias = "o_proj" if model.biases.attention_output_bias and kind.mixer in ("attention", "latent") else ""
            x = b.sum("attention_add", x, branch_end(b, "attention", mixed, bias=bias))
        if kind.feed_forward != "none":
            out = FEED_FORWARDS[kind.feed_forward](b, b.norm("mlp_norm", x) if model.norms.pre_norm else x)
            bias = "down_proj" if model.biases.mlp_bias and kind.feed_forward == "dense" else ""
            x = b.sum("mlp_add", x, branch_end(b, "mlp", out, bias=bias))
    return b.identity("block_output", x)


# --- the head ---------------------------------------------------------------------------------------------------------

_FP32 = 4.0


def write_loss(b: DecoderBuilder, x: str, head_weight: str) -> None:
    """Write the operators from the last hidden state to the loss."""
    x = b.norm("final_norm", x)
    logits = b.product("lm_head", "b s v_out h", (x, "b s h"), (head_weight, "v h"), ("logits", "b s v"))
    if b.model.biases.lm_head_bias:
        logits = b.bias("lm_head", logits, "b s v_out", "b s v", "v")
    dims = "b s v_out"
    labels, loss = operand(b.index("labels", "b s"), "b s"), operand("loss", "b s")
    b.add(cross_entropy("cross_entropy", operand(logits, "b s v"), labels, loss, b.of(dims)), dims, itemsize=_FP32)


def write_further_tokens(b: DecoderBuilder, x: str, *, table: str, head_weight: str) -> None:
    """Write the modules in sequence, each from the previous hidden state and the embedding of the token one position further."""
    for depth in range(b.model.num_mtp_layers):
        b.prefix = f"mtp{depth}."
        token = b.embedding("token_embedding", "tokens", "b s", table, "b s v_in h", "v h")
        hidden, token = b.norm("hidden_norm", x), b.norm("embedding_norm", token)
        dims = "b s_res h hn hh"
        both = operand(hidden, "b s h"), operand(token, "b s hn"), operand("joint.out", "b s hh")
        joint = b.add(side_by_side("joint", *both, b.of(dims)), dims)
        projected = b.linear("joint_proj", joint, "b s_res h hh", "b s hh", "h hh", 1, "b s h", part="other")
        x = write_layer(b, b.model.mtp_kind, projected)
        write_loss(b, x, head_weight)
    b.prefix = ""
