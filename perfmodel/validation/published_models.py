"""Model of a published run, of training or of serving, from the sizes that the run states."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from perfmodel.foundation.errors import InputError, bad_field, one_line
from perfmodel.validation.expert_cases import has_experts, megatron_flags, with_experts
from perfmodel.validation.fields import stated_count
from perfmodel.validation.shipped_models import shipped_equivalent, shipped_model
from perfmodel.workload.config import MAX_LAYERS, TransformerConfig, printable
from perfmodel.workload.layer_specs import DeltaNet, Experts, FeedForward, LatentAttention, LayerSpec, Mamba, Mixer, kinds_of_layers

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


# --- Serving runs ------------------------------------------------------------------------------------------------------

#: Positions of a model with rotary embeddings: published runs do not state the limit, and one value serves models of all lengths.
_POSITIONS = 2**20
#: Letter of a layer pattern (Nemotron-H) -> token mixer and feed-forward of the layer.
_PATTERN: Mapping[str, tuple[Mixer, FeedForward]] = {
    "M": ("mamba", "none"), "*": ("attention", "none"), "E": ("none", "experts"), "-": ("none", "dense"),
}  # fmt: skip
_CHUNK = 128  # default chunk of a state-space scan


def model_of_case(model: Mapping[str, Any] | None, *, longest: int, drafts: bool = False) -> TransformerConfig:
    """Return the `model` object of a serving run as a model.

    A shipped model of the same sizes, independent of its name, supplies missing fields (norms, biases, gates). Otherwise a gated MLP means
    Llama's block and any other GPT's, as for training.

    longest   tokens of the longest sequence
    drafts    multi-token-prediction modules are loaded
    """
    if not model:
        raise InputError("model: the run does not state it; it cannot be predicted without its sizes")
    name = one_line(model.get("name") or "model", 80)
    layers, hidden, heads = (stated_count(model, field, within="model.", name=name) for field in ("layers", "hidden", "heads"))
    if layers > MAX_LAYERS:
        raise bad_field("model.layers", layers, f"must be {MAX_LAYERS:,} at most", "correct it in the case")
    gated = model.get("gated_mlp") is not False
    latent = _latent(model, name) if "mla" in (model.get("attention") or "gqa") else None
    experts = _experts(model.get("moe"), gated, name)
    head_dim = model.get("head_dim") or (latent.score_head_dim if latent is not None else None)
    if head_dim is None:
        if hidden % heads:
            raise bad_field("model.heads", heads, f"must divide hidden={hidden}", "state head_dim")
        head_dim = hidden // heads
    width = None if experts is None else experts.width
    window = model.get("sliding_window") or 0
    config = shipped_equivalent(
        TransformerConfig.of(
            name=name,
            num_hidden_layers=layers,
            hidden_size=hidden,
            num_attention_heads=heads,
            num_key_value_heads=heads if latent is not None else model.get("kv_heads") or heads,
            head_dim=head_dim,
            intermediate_size=stated_count(model, "ffn", width, within="model.", name=name),
            vocab_size=stated_count(model, "vocab", within="model.", name=name),
            max_position_embeddings=1,
            position="rotary",
            **block_fields(gated=gated),
            tie_word_embeddings=False,
            sliding_window=window,
            full_attention_every=(model.get("full_attention_interval") or 0) if window else 0,
            attention_gate=bool(model.get("attention_output_gate")),
            experts=experts,
            latent=latent,
            mamba=_mamba(model.get("mamba")),
            delta=_delta(model.get("linear_attention")),
            kinds=_kinds(model, layers, latent is not None, experts is not None),
            source="sizes of a published run",
        )
    )
    positions = longest if config.positions.position == "learned" else max(longest, _POSITIONS)
    return config.having(
        max_position_embeddings=max(config.positions.max_position_embeddings, positions),
        num_mtp_layers=max(config.num_mtp_layers, 1) if drafts else 0,
    )


def _latent(model: Mapping[str, Any], name: str) -> LatentAttention:
    sizes = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    rank, nope, rope, value = (stated_count(model, size, within="model.", name=name) for size in sizes)
    return LatentAttention(
        query_rank=stated_count(model, "q_lora_rank", default=0),
        key_value_rank=rank,
        nope_head_dim=nope,
        rope_head_dim=rope,
        value_head_dim=value,
        index_heads=stated_count(model, "index_heads", default=0),
        index_head_dim=stated_count(model, "index_head_dim", default=0),
        index_top=stated_count(model, "index_topk", default=0),
    )


def _experts(moe: Mapping[str, Any] | None, gated: bool, name: str) -> Experts | None:
    if not moe or not moe.get("experts"):
        return None
    count, top_k, width = (stated_count(moe, size, within="model.moe.", name=name) for size in ("experts", "top_k", "expert_ffn"))
    shared_width = stated_count(moe, "shared_ffn", default=0) * stated_count(moe, "shared", default=0)
    return Experts(num_experts=count, top_k=top_k, width=width, gated=gated, shared_width=shared_width)


def _mamba(mamba: Mapping[str, Any] | None) -> Mamba | None:
    if not mamba:
        return None
    return Mamba(
        num_heads=stated_count(mamba, "heads"),
        head_dim=stated_count(mamba, "head_dim"),
        num_groups=stated_count(mamba, "groups"),
        state_size=stated_count(mamba, "state"),
        conv_kernel=stated_count(mamba, "conv_kernel", default=4),
        chunk_size=_CHUNK,
    )


def _delta(delta: Mapping[str, Any] | None) -> DeltaNet | None:
    if not delta:
        return None
    sizes = {f"num_{field}": stated_count(delta, field) for field in ("key_heads", "value_heads")}
    sizes |= {field: stated_count(delta, field) for field in ("key_head_dim", "value_head_dim")}
    return DeltaNet(**sizes, conv_kernel=stated_count(delta, "conv_kernel", default=4))


def _kinds(model: Mapping[str, Any], layers: int, is_latent: bool, has_experts: bool) -> tuple[LayerSpec, ...]:
    """Return the kinds of the layers, empty if all layers are equal."""
    feeds: Sequence[FeedForward] = ["experts" if has_experts else "dense"] * layers
    pattern, every = model.get("layer_pattern"), model.get("full_attention_interval")
    if pattern is not None:
        unknown = sorted(set(pattern) - set(_PATTERN))
        if unknown or len(pattern) != layers:
            raise bad_field(
                "model.layer_pattern", one_line(pattern, 60), f"must be {layers} of {' '.join(_PATTERN)}", "correct it in the case"
            )
        return kinds_of_layers([_PATTERN[letter] for letter in pattern])
    if model.get("linear_attention") and every:
        mixers: list[Mixer] = ["attention" if (layer + 1) % every == 0 else "delta" for layer in range(layers)]
        return kinds_of_layers(list(zip(mixers, feeds, strict=True)))
    first = stated_count(model.get("moe") or {}, "first_dense_layers", default=0) if has_experts else 0
    if first:
        mixer: Mixer = "latent" if is_latent else "attention"
        return kinds_of_layers([(mixer, "dense" if layer < first else "experts") for layer in range(layers)])
    return ()
