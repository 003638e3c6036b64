"""One layer: mixer and feed-forward with their residual connections."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from perfmodel.workload.decoder.attention import attention_mixer
from perfmodel.workload.decoder.builder import DecoderBuilder
from perfmodel.workload.decoder.experts import expert_mixture
from perfmodel.workload.decoder.feed_forward import branch_end, dense_mlp
from perfmodel.workload.decoder.latent import latent_mixer
from perfmodel.workload.decoder.recurrent import delta_mixer, mamba_mixer
from perfmodel.workload.layer_specs import FeedForward, LayerSpec, Mixer

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
