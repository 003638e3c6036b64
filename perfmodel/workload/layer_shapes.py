"""Parameter tensors of one layer, in the order of use."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from perfmodel.workload.config import TransformerConfig
    from perfmodel.workload.layer_specs import LayerSpec

Region = Literal["embedding", "layer", "head"]


class ParameterShape(NamedTuple):
    """A parameter tensor. A matrix is stored like torch.nn.Linear: rows are outputs, columns are inputs. Expert matrices have a leading
    expert dim."""

    name: str
    shape: tuple[int, ...]
    region: Region

    @property
    def num_elements(self) -> int:
        return prod(self.shape)


def shapes_of_layer(model: TransformerConfig, kind: LayerSpec) -> tuple[ParameterShape, ...]:
    """Return the parameter shapes of one layer of a kind."""
    h = model.hidden_size
    shapes: list[ParameterShape] = []
    if kind.mixer != "none":
        if model.norms.pre_norm:
            shapes += norm_shapes(model, "attention_norm", h)
        shapes += _MIXERS[kind.mixer](model)
        if model.norms.sandwich_norm:
            shapes += norm_shapes(model, "attention_post_norm", h)
    if kind.feed_forward != "none":
        if model.norms.pre_norm and not (model.norms.shared_norm and kind.mixer != "none"):
            shapes += norm_shapes(model, "mlp_norm", h)
        if kind.feed_forward == "experts":
            shapes += _experts(model)
        else:
            shapes += _mlp("", h, model.intermediate_size, gated=model.mlp.gated_mlp, bias=model.biases.mlp_bias)
        if model.norms.sandwich_norm:
            shapes += norm_shapes(model, "mlp_post_norm", h)
    return tuple(shapes)


def norm_shapes(model: TransformerConfig, name: str, size: int | tuple[int, ...], region: Region = "layer") -> list[ParameterShape]:
    shape = (size,) if isinstance(size, int) else size
    weight = ParameterShape(f"{name}.weight", shape, region)
    return [weight, ParameterShape(f"{name}.bias", shape, region)] if model.biases.norm_bias else [weight]


def is_routed(shape: ParameterShape) -> bool:
    """Return whether a parameter belongs to routed experts: dim 0 is the expert."""
    return shape.name.startswith("experts_")


# --- mixers -------------------------------------------------------------------------------------------------------


def _attention(model: TransformerConfig) -> list[ParameterShape]:
    h, d = model.hidden_size, model.head_dim
    queries, keys = model.num_attention_heads * d, model.num_key_value_heads * d
    shapes: list[ParameterShape] = []
    for name, rows in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
        shapes += _linear(name, rows, h, bias=model.biases.qkv_bias)
    if model.attention.attention_gate:
        shapes += _linear("q_gate_proj", queries, h, bias=model.biases.qkv_bias)
    if model.norms.qk_norm and model.norms.qk_norm_scope != "bare":
        for name, heads in (("q_norm", model.num_attention_heads), ("k_norm", model.num_key_value_heads)):
            shapes += norm_shapes(model, name, {"head": (d,), "own": (heads, d), "all": (heads * d,)}[model.norms.qk_norm_scope])
    if model.attention.attention_sinks:
        shapes.append(ParameterShape("sinks", (model.num_attention_heads,), "layer"))
    return shapes + _linear("o_proj", h, queries, bias=model.biases.attention_output_bias)


def _latent(model: TransformerConfig) -> list[ParameterShape]:
    """Return the shapes of latent attention: its norms are RMSNorms in every family, the indexer's key norm is a LayerNorm."""
    latent = model.parts.latent
    assert latent is not None
    h, n = model.hidden_size, model.num_attention_heads
    queries = n * latent.score_head_dim
    if latent.query_rank:
        shapes = _linear("q_a_proj", latent.query_rank, h, bias=model.biases.qkv_bias)
        shapes.append(ParameterShape("q_a_norm.weight", (latent.query_rank,), "layer"))
        shapes += _linear("q_b_proj", queries, latent.query_rank)
    else:
        shapes = _linear("q_proj", queries, h)
    shapes += _linear("kv_a_proj", latent.key_value_rank + latent.rope_head_dim, h, bias=model.biases.qkv_bias)
    shapes.append(ParameterShape("kv_a_norm.weight", (latent.key_value_rank,), "layer"))
    shapes += _linear("kv_b_proj", n * (latent.nope_head_dim + latent.value_head_dim), latent.key_value_rank)
    if latent.index_heads:
        shapes += _linear("index_q_proj", latent.index_heads * latent.index_head_dim, latent.query_rank or h)
        shapes += _linear("index_k_proj", latent.index_head_dim, h)
        shapes += [ParameterShape(f"index_k_norm.{part}", (latent.index_head_dim,), "layer") for part in ("weight", "bias")]
        shapes += _linear("index_weights_proj", latent.index_heads, h)
    return shapes + _linear("o_proj", h, n * latent.value_head_dim, bias=model.biases.attention_output_bias)


def _mamba(model: TransformerConfig) -> list[ParameterShape]:
    """Return the shapes of Mamba-2; rows of in_proj: gate, input, B and C of each group, the step of each head."""
    mamba = model.parts.mamba
    assert mamba is not None
    h, inner = model.hidden_size, mamba.inner_size
    mixed = inner + 2 * mamba.num_groups * mamba.state_size
    shapes = _linear("in_proj", inner + mixed + mamba.num_heads, h, bias=mamba.bias)
    shapes.append(ParameterShape("conv.weight", (mixed, mamba.conv_kernel), "layer"))
    if mamba.conv_bias:
        shapes.append(ParameterShape("conv.bias", (mixed,), "layer"))
    shapes += [ParameterShape(name, (mamba.num_heads,), "layer") for name in ("dt_bias", "A_log", "D")]
    shapes.append(ParameterShape("mamba_norm.weight", (inner,), "layer"))
    return shapes + _linear("out_proj", h, inner, bias=mamba.bias)


def _delta(model: TransformerConfig) -> list[ParameterShape]:
    """Return the shapes of a gated delta network. Rows of in_proj_qkvz: queries, keys, values, gate; of in_proj_ba: writing strength and
    decay of each value head."""
    delta = model.parts.delta
    assert delta is not None
    h = model.hidden_size
    keys, values = delta.num_key_heads * delta.key_head_dim, delta.num_value_heads * delta.value_head_dim
    return [
        *_linear("in_proj_qkvz", 2 * keys + 2 * values, h),
        *_linear("in_proj_ba", 2 * delta.num_value_heads, h),
        ParameterShape("conv.weight", (2 * keys + values, delta.conv_kernel), "layer"),
        ParameterShape("dt_bias", (delta.num_value_heads,), "layer"),
        ParameterShape("A_log", (delta.num_value_heads,), "layer"),
        ParameterShape("delta_norm.weight", (delta.value_head_dim,), "layer"),
        *_linear("out_proj", h, values),
    ]


_MIXERS = {"attention": _attention, "latent": _latent, "mamba": _mamba, "delta": _delta}


# --- feed-forwards ------------------------------------------------------------------------------------------------


def _experts(model: TransformerConfig) -> list[ParameterShape]:
    """Return the shapes of experts; gate and up of routed ones are one tensor with two halves, the operand of grouped GEMMs."""
    experts = model.parts.experts
    assert experts is not None
    h, e, f = model.hidden_size, experts.num_experts, experts.width
    up = (e, 2, f) if experts.gated else (e, f)
    shapes = _linear("router", e, h, bias=experts.router_bias)
    for name, rows, columns in (("experts_up", up, h), ("experts_down", (e, h), f)):
        shapes.append(ParameterShape(f"{name}.weight", (*rows, columns), "layer"))
        if experts.bias:
            shapes.append(ParameterShape(f"{name}.bias", rows, "layer"))
    if experts.shared_width:
        shapes += _mlp("shared_", h, experts.shared_width, gated=experts.gated, bias=experts.bias)
        if experts.shared_gate:
            shapes += _linear("shared_gate", 1, h)
    return shapes


def _mlp(prefix: str, hidden: int, width: int, *, gated: bool, bias: bool) -> list[ParameterShape]:
    shapes = _linear(f"{prefix}gate_proj", width, hidden, bias=bias) if gated else []
    shapes += _linear(f"{prefix}up_proj", width, hidden, bias=bias)
    return shapes + _linear(f"{prefix}down_proj", hidden, width, bias=bias)


def _linear(name: str, rows: int, columns: int, *, bias: bool = False) -> list[ParameterShape]:
    weight = ParameterShape(f"{name}.weight", (rows, columns), "layer")
    return [weight, ParameterShape(f"{name}.bias", (rows,), "layer")] if bias else [weight]
