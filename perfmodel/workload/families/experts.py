"""Families with experts in the place of the MLP, in all layers or in some, and usual attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from perfmodel.workload.config_fields import ConfigFields, Values, made_of
from perfmodel.workload.families.dense import mistral, qwen2, qwen3
from perfmodel.workload.layer_specs import Experts, FeedForward, Mixer

# How scores become weights (norm_topk_prob, routed_scaling_factor), losses that balance the load and a bias that is moved by hand
# (e_score_correction_bias, a buffer) have no trained parameters and next to no work: they are not counted.


def _mixtral(fields: ConfigFields) -> Values:
    experts = fields.record(
        Experts,
        num_experts=fields.count("num_local_experts"),
        top_k=fields.count("num_experts_per_tok"),
        width=fields.count("intermediate_size"),
    )
    return {**mistral(fields), "experts": experts}


def _qwen2_moe(fields: ConfigFields) -> Values:
    """Beside the experts one that every token runs, scaled by a gate."""
    shared = fields.count("shared_expert_intermediate_size")
    return {**qwen2(fields), "qkv_bias": fields.flag("qkv_bias", default=True), **_qwen_experts(fields, shared_width=shared)}


def _qwen3_moe(fields: ConfigFields) -> Values:
    return {**qwen3(fields, head_dim_required=False), **_qwen_experts(fields)}


def _qwen_experts(fields: ConfigFields, *, shared_width: int = 0) -> Values:
    experts = fields.record(
        Experts,
        num_experts=fields.count("num_experts", "num_local_experts"),
        top_k=fields.count("num_experts_per_tok"),
        width=expert_width(fields),
        shared_width=shared_width,
        shared_gate=shared_width > 0,
    )
    sparse = sparse_of_qwen(fields)
    return made_of([("attention", "experts" if each else "dense") for each in sparse], experts=experts)


def sparse_of_qwen(fields: ConfigFields) -> list[bool]:
    """Whether each layer has experts: every `decoder_sparse_step`-th one but those of `mlp_only_layers`."""
    num_layers = fields.num_layers()
    step, dense = max(1, fields.count("decoder_sparse_step", default=1)), fields.indices("mlp_only_layers", num_layers)
    return [i not in dense and (i + 1) % step == 0 for i in range(num_layers)]


def expert_width(fields: ConfigFields) -> int:
    return fields.count("moe_intermediate_size" if fields.has("moe_intermediate_size") else "intermediate_size")


def routed_and_shared(fields: ConfigFields, *, sigmoid: bool) -> Experts | None:
    """Under DeepSeek's names."""
    width = expert_width(fields)
    shared = 0 if "n_shared_experts" in fields.data and not fields.has("n_shared_experts") else fields.count("n_shared_experts")  # null
    score = fields.choice("scoring_func", ("softmax", "sigmoid"), default="sigmoid" if sigmoid else "softmax")
    in_groups = fields.data.get("topk_method") != "greedy"  # which ignores them
    return fields.record(
        Experts,
        num_experts=fields.count("n_routed_experts"),
        top_k=fields.count("num_experts_per_tok"),
        width=width,
        shared_width=width * shared,
        score=score,
        num_groups=fields.count("n_group", default=1) if in_groups else 1,
        top_groups=fields.count("topk_group", default=1) if in_groups else 1,
    )


def after_dense_layers(fields: ConfigFields, mixer: Mixer) -> list[tuple[Mixer, FeedForward]]:
    """The first layers are dense: `first_k_dense_replace` of them, or as `mlp_layer_types` says."""
    num_layers = fields.num_layers()
    fields.must_be("moe_layer_freq", 1, "experts in every so many layers are")
    words: Sequence[str] = fields.of_each_layer("mlp_layer_types", ("dense", "sparse"), num_layers)
    if not words:
        dense = fields.count("first_k_dense_replace")
        words = ["dense" if i < dense else "sparse" for i in range(num_layers)]
    return [(mixer, "dense" if word == "dense" else "experts") for word in words]


EXPERTS: Mapping[str, Callable[[ConfigFields], Values]] = {
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
}
