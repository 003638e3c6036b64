"""Reasons why the serving executor cannot run a model. Pure Python."""

from __future__ import annotations

from perfmodel.workload.config import TransformerConfig


def not_served_reason(config: TransformerConfig, tp: int, *, ep: int = 1) -> str:
    """Return why this model cannot be served on `tp` ranks with experts distributed over `ep` of them; "" if it can."""
    used = {part for kind in config.layer_kinds for part in (kind.mixer, kind.feed_forward)}
    lacking = ["attention in chunks"] if config.attention_chunk else []
    if config.attention_sinks and config.position == "alibi":
        lacking.append("sinks with ALiBi")
    if lacking:
        return (
            f"model={config.name}: has {' and '.join(lacking)}, which the serving executor does not run; predict it, or use another model"
        )
    if config.qk_norm and config.qk_norm_scope not in ("head", "all"):
        return f"qk_norm_scope={config.qk_norm_scope}: the executor has no such norm; use another model"
    if tp < 1:
        return f"tp={tp}: must be at least 1; use 1"
    if ep < 1 or tp % ep or (ep > 1 and (config.experts is None or config.experts.num_experts % ep)):
        return f"ep={ep}: must divide tp={tp} and the number of experts; use a divisor of both"
    if used - {"attention", "dense", "experts"} and config.parallel_block:
        return (
            f"model={config.name}: has a mixer other than attention in a parallel block, which the executor does not run; use another model"
        )
    if tp == 1:
        return ""
    if config.qk_norm and config.qk_norm_scope == "all":
        return f"tp={tp}: a norm over all heads of {config.name} is not cut by the executor; use tp=1"
    cuts: dict[str, int] = {}
    if used & {"attention", "latent"}:
        cuts |= {"num_attention_heads": config.num_attention_heads, "num_key_value_heads": config.num_key_value_heads}
    if config.mamba is not None:
        cuts["n_groups"] = config.mamba.num_groups
    if config.delta is not None:
        cuts["linear_num_key_heads"] = config.delta.num_key_heads
    if "dense" in used:
        cuts["intermediate_size"] = config.intermediate_size
    if config.experts is not None:
        cuts |= {"the width of an expert": config.experts.width * ep, "the width of shared experts": config.experts.shared_width}
    for name, size in cuts.items():
        if size % tp:
            return f"tp={tp}: must divide {name}={size}; use a smaller tp"
    return ""
