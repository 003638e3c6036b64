"""Model of a published training run, from the sizes that the run states."""

import re
from collections.abc import Mapping
from typing import Any

from perfmodel.foundation.errors import InputError, bad_field
from perfmodel.validation.expert_cases import has_experts, megatron_flags, with_experts
from perfmodel.validation.fields import stated_count
from perfmodel.validation.shipped_models import shipped_model
from perfmodel.workload.config import TransformerConfig, printable

#: GPT-2's vocabulary, which Megatron-LM pads to a multiple of 128 times the tensor-parallel degree.
_GPT2_VOCABULARY = 50257
_PADDING = 128

_NOT_MODELLED: Mapping[str, str] = {
    "encoder": "encoder models are not modelled yet (attention in both directions, another loss)",
    "encoder-decoder": "encoder-decoder models are not modelled yet",
    "decoder-xl": "Transformer-XL's segment recurrence and adaptive softmax are not modelled yet",
    "single-layer": "the row times one layer alone, which is not a training step",
    "cnn": "convolutional models are not modelled yet",
}


#: A run that states none of these has the shipped model of its name.
_SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")

#: Kinds of models with experts in most or all layers.
_WITH_EXPERTS = ("moe", "moe-mla")


def config_from_case(
    model: TransformerConfig | Mapping[str, Any], *, settings: object = None, seq_len: int = 2048, tp: int = 1, dropout: float = 0.1
) -> TransformerConfig:
    """Return the `model` object of a published run as a model; missing fields follow its generation. That of a user's run may be loaded.

    A gated MLP means Llama's block (RMSNorm, rotary positions, no bias), any other GPT-2's (LayerNorm, learned positions,
    biases, tanh GELU). Rows of the position table: `seq_len`. An unknown vocabulary is GPT-2's, padded as Megatron-LM pads it
    for `tp`. Unknown embedding tying follows GPT-2 or Llama. `dropout` applies to the GPT block only.
    A mixture-of-experts model is the shipped one of its name, else it follows from the run's sizes and Megatron-LM's flags in `settings`.
    """
    if isinstance(model, TransformerConfig):
        return model
    name = str(model.get("name") or "model")[:80]
    kind = str(model.get("kind") or "decoder")
    reason = _NOT_MODELLED.get(kind) or _NOT_MODELLED.get(kind.split(" ")[0])
    if reason is None and kind != "decoder" and not (kind in _WITH_EXPERTS and has_experts(model)):
        reason = "only decoder models are modelled, with experts where the run states how many"
    if reason is not None:
        raise InputError(f"model.kind={kind}: {reason}; {name} cannot be predicted")
    if has_experts(model) and not megatron_flags(settings):
        known = shipped_model(model)
        if known is not None and known.parts.experts is not None:
            return known

    if not any(model.get(size) is not None for size in _SIZES) and (known := shipped_model(model)) is not None:
        return known
    hidden, heads = (stated_count(model, size, within="model.", name=name) for size in ("hidden_size", "num_attention_heads"))
    head_dim = stated_count(model, "head_dim", default=0)
    if head_dim and (known := shipped_model(model)) is not None:
        return known
    if hidden % heads and not head_dim:
        raise bad_field("model.num_attention_heads", heads, f"must divide hidden_size={hidden}", "the run does not state a head_dim")
    gated = model.get("gated_mlp")
    if gated is None:
        raise bad_field("model.gated_mlp", printable(gated), "must be true or false", f"{name} cannot be predicted without it")
    assumed = []
    vocabulary = model.get("vocab_size")
    if vocabulary is None:
        step = _PADDING * tp
        vocabulary = -(-_GPT2_VOCABULARY // step) * step
        assumed.append("vocab_size")
    tied = model.get("tie_word_embeddings")
    if tied is None:
        tied = not gated
        assumed.append("tie_word_embeddings")
    config = TransformerConfig.of(
        name=name,
        num_hidden_layers=stated_count(model, "num_hidden_layers", within="model.", name=name),
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=heads if model.get("num_key_value_heads") is None else model["num_key_value_heads"],
        head_dim=head_dim or hidden // heads,
        intermediate_size=stated_count(model, "intermediate_size", within="model.", name=name),
        vocab_size=vocabulary,
        max_position_embeddings=seq_len,
        position="rotary" if gated else "learned",
        **block_fields(gated=gated),
        tie_word_embeddings=tied,
        **_windows(model),
        dropout=0.0 if gated else dropout,
        source="sizes of a published run" + (f"; assumed: {', '.join(assumed)}" if assumed else ""),
    )
    return with_experts(config, model, megatron_flags(settings)) if has_experts(model) else config


def block_fields(*, gated: bool) -> dict[str, Any]:
    """Return the fields of Llama's block for a gated MLP, and of GPT's for any other."""
    biases = dict.fromkeys(("qkv_bias", "attention_output_bias", "mlp_bias", "norm_bias"), not gated)
    if gated:
        return {"architecture": "llama", "gated_mlp": True, "activation": "silu", "norm": "rmsnorm", **biases}
    return {"architecture": "gpt2", "gated_mlp": False, "activation": "gelu_tanh", "norm": "layernorm", **biases}


def _windows(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of sliding windows: in all layers, or in those of `sliding_layers` (`3 of 4`)."""
    if model.get("sliding_window") is None:
        return {}
    window = stated_count(model, "sliding_window")
    share = model.get("sliding_layers")
    if share is None:
        return {"sliding_window": window}
    match = re.fullmatch(r"(\d{1,3}) of (\d{1,3})", share) if isinstance(share, str) else None
    if match is None or int(match[2]) - int(match[1]) != 1:
        raise bad_field("model.sliding_layers", printable(share), "must be all but one of a turn", "write 3 of 4")
    return {"sliding_window": window, "full_attention_every": int(match[2])}
