"""Families with several kinds of mixers: attention in some layers, a recurrent state in the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from perfmodel.workload.config import MAX_LAYERS
from perfmodel.workload.config_fields import ConfigFields, Values, layer_parts
from perfmodel.workload.families.dense import LLAMA, qwen3
from perfmodel.workload.families.experts import feed_forwards_of_qwen, qwen_experts
from perfmodel.workload.layer_specs import DeltaNet, Experts, FeedForward, Mamba, Mixer


def _qwen3_next(fields: ConfigFields) -> Values:
    experts = qwen_experts(fields, shared_width=fields.count("shared_expert_intermediate_size"))
    return {**_gated(fields), **_with_memory(fields, feed_forwards_of_qwen(fields), experts)}


def _qwen3_5(fields: ConfigFields) -> Values:
    feed_forwards: list[FeedForward] = ["dense"] * fields.num_layers()
    return {**_gated(fields), **_with_memory(fields, feed_forwards, None), **_further_tokens(fields)}


def _qwen3_5_moe(fields: ConfigFields) -> Values:
    experts = qwen_experts(fields, shared_width=fields.count("shared_expert_intermediate_size"))
    feed_forwards: list[FeedForward] = ["experts"] * fields.num_layers()
    values = _gated(fields, width="moe_intermediate_size")
    return {**values, **_with_memory(fields, feed_forwards, experts), **_further_tokens(fields)}


def _gated(fields: ConfigFields, *, width: str = "intermediate_size") -> Values:
    """Return the values of Qwen3 with a gate on the attention output."""
    return {**qwen3(fields, width=width), "attention_gate": True}


def _further_tokens(fields: ConfigFields) -> Values:
    return {"num_mtp_layers": fields.count("mtp_num_hidden_layers", default=0)}


def _with_memory(fields: ConfigFields, feed_forwards: Sequence[FeedForward], experts: Experts | None) -> Values:
    """Return the layers: attention in every fourth one, a gated delta network in the others, unless `layer_types` lists them."""
    num_layers = fields.num_layers()
    words: Sequence[str] = fields.of_each_layer("layer_types", ("linear_attention", "full_attention"), num_layers)
    if not words:
        every = max(1, fields.count("full_attention_interval", default=4))
        words = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(num_layers)]
    delta = fields.record(
        DeltaNet,
        num_key_heads=fields.count("linear_num_key_heads"),
        num_value_heads=fields.count("linear_num_value_heads"),
        key_head_dim=fields.count("linear_key_head_dim"),
        value_head_dim=fields.count("linear_value_head_dim"),
        conv_kernel=fields.count("linear_conv_kernel_dim", default=4),
    )
    mixers: list[Mixer] = ["delta" if word == "linear_attention" else "attention" for word in words]
    return layer_parts(list(zip(mixers, feed_forwards, strict=True)), experts=experts, delta=delta)


def _nemotron_h(fields: ConfigFields) -> Values:
    """Return the values of Nemotron-H: each layer is either a mixer or a feed-forward, with one norm. No positions; MLPs and experts have
    two matrices."""
    layers = _blocks(fields)
    bias = fields.flag("attention_bias", default=False)
    mlp_bias = fields.flag("mlp_bias", default=False)
    mamba = fields.record(
        Mamba,
        num_heads=fields.count("mamba_num_heads"),
        head_dim=fields.count("mamba_head_dim"),
        num_groups=fields.count("n_groups", "mamba_n_groups"),
        state_size=fields.count("ssm_state_size"),
        conv_kernel=fields.count("conv_kernel", "mamba_d_conv"),
        chunk_size=fields.count("chunk_size", "mamba_chunk_size"),
        conv_bias=fields.flag("use_conv_bias", default=True),
        bias=fields.flag("use_bias", default=False),
    )
    if ("none", "experts") in layers:
        fields.must_be("num_nextn_predict_layers", 0, "modules of several layers that predict further tokens are")
        experts = fields.record(
            Experts,
            num_experts=fields.count("n_routed_experts"),
            top_k=fields.count("num_experts_per_tok"),
            width=fields.count("moe_intermediate_size"),
            gated=False,
            bias=mlp_bias,
            shared_width=fields.count("moe_shared_expert_intermediate_size"),
            score="sigmoid",
            num_groups=fields.count("n_group", default=1),
            top_groups=fields.count("topk_group", default=1),
        )
    else:
        experts = None
    return {
        **LLAMA,
        "num_hidden_layers": len(layers),
        "hidden_size": fields.count("hidden_size"),
        "num_attention_heads": fields.count("num_attention_heads"),
        "num_key_value_heads": fields.count("num_key_value_heads"),
        "head_dim": fields.count("head_dim", "attention_head_dim"),
        "intermediate_size": fields.count("intermediate_size"),
        "vocab_size": fields.count("vocab_size"),
        "max_position_embeddings": fields.count("max_position_embeddings"),
        "gated_mlp": False,
        "position": "none",
        "qkv_bias": bias,
        "attention_output_bias": bias,
        "mlp_bias": mlp_bias,
        "activation": fields.activation("mlp_hidden_act", default="relu2"),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", default=False),
        **layer_parts(layers, mamba=mamba, experts=experts),
    }


_BLOCKS: Mapping[str, tuple[Mixer, FeedForward]] = {
    "M": ("mamba", "none"),
    "*": ("attention", "none"),
    "-": ("none", "dense"),
    "E": ("none", "experts"),
}
_BLOCK_OF_WORD = {"mamba": "M", "linear_attention": "M", "attention": "*", "full_attention": "*", "mlp": "-", "moe": "E"}


def _blocks(fields: ConfigFields) -> list[tuple[Mixer, FeedForward]]:
    """Return the kind of each layer: one letter each, or one word of `layers_block_type` (newer files, without a number of layers)."""
    pattern = fields.data.get("hybrid_override_pattern")
    if pattern is None:
        listed = fields.entries("layers_block_type")
        words = fields.of_each_layer("layers_block_type", tuple(_BLOCK_OF_WORD), len(listed))
        pattern = "".join(_BLOCK_OF_WORD[word] for word in words)
    if not isinstance(pattern, str) or not pattern or set(pattern) - set(_BLOCKS):
        rule = f"must have a letter for each layer: {' '.join(_BLOCKS)}"
        fields.refuse("hybrid_override_pattern", rule, "M is Mamba-2, * attention, - an MLP, E experts")
        return [("attention", "dense")]
    if fields.has("num_hidden_layers") and fields.count("num_hidden_layers") != len(pattern):
        fields.refuse("num_hidden_layers", f"contradicts the {len(pattern)} letters of hybrid_override_pattern", "correct one of the two")
    return [_BLOCKS[letter] for letter in pattern[:MAX_LAYERS]]


HYBRID: Mapping[str, Callable[[ConfigFields], Values]] = {
    "qwen3_next": _qwen3_next,
    "qwen3_5_text": _qwen3_5,
    "qwen3_5_moe_text": _qwen3_5_moe,
    "nemotron_h": _nemotron_h,
}
