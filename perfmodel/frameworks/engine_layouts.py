"""Layouts that a replica of a serving engine can have, and why it cannot have others: dims of the model, and what the engine runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from perfmodel.foundation.errors import bad_field
from perfmodel.frameworks.engine import Engine
from perfmodel.workload.config import TransformerConfig


class LayoutFault(NamedTuple):
    """Why a replica cannot have these degrees.

    degree         that breaks the rule
    rule, remedy   of the sentence
    reason         the rule without numbers, by which searches count layouts
    is_predicted   a plan has a prediction in spite of it: only the engine does not run it
    """

    degree: str
    rule: str
    remedy: str
    reason: str
    is_predicted: bool = False


def cache_copies(model: TransformerConfig, tp: object) -> Any:
    """Return the chips of tensor parallelism with the same part of the cache: tp / gcd(tp, key-value heads), tp for a latent. [-]"""
    tp = np.asarray(tp, dtype=np.int64)
    return tp if model.parts.latent is not None else tp // np.gcd(tp, model.num_key_value_heads)


def why_no_context(model: TransformerConfig) -> str:
    """Return why the cached tokens of the model cannot be cut; empty if they can."""
    if any(kind.mixer not in ("attention", "latent") for kind in model.layer_kinds):
        return f"{model.name} has recurrent layers, whose states have no tokens"
    if model.sliding_layer_fraction and model.attention.window:
        return f"{model.name} has layers that keep a window of their tokens, which engines do not cut"
    if model.parts.latent is not None and model.parts.latent.index_heads:
        return f"{model.name} attends to tokens that it chooses, which engines do not cut"
    return ""


def why_not_shared(model: TransformerConfig, engine: Engine, *, pp: int, attention_dp: int) -> str:
    """Return why chips do not share the tokens of the model's prompts under an engine; empty if they can."""
    if engine.runs.prefill_context == "none":
        return f"{engine.name} {engine.version} has no prefill context parallelism"
    if engine.runs.prefill_context == "latent" and model.parts.latent is None:
        return f"{engine.name} shares prompts of models with latent attention only, which {model.name} has not"
    if any(kind.mixer not in ("attention", "latent") for kind in model.layer_kinds):
        return f"{model.name} has recurrent layers, whose tokens follow one another"
    degrees = {"pp": pp, "attention_dp": attention_dp}
    unsupported = [name for name, size in degrees.items() if size > 1 and name not in engine.runs.prefill_context_beside]
    return f"{engine.name} does not share prompts together with {' and '.join(unsupported)}" if unsupported else ""


def layout_faults(
    model: TransformerConfig, engine: Engine, *, tp: int, pp: int, attention_dp: int, ep: int, dcp: int = 1, pcp: int = 1
) -> Iterator[LayoutFault]:
    """Yield the rules of the model and the engine that a replica with these degrees breaks."""
    heads, kv_heads, name = model.num_attention_heads, model.num_key_value_heads, engine.name
    if heads % tp:
        rule = f"must divide the {heads} attention heads of {model.name}"
        yield LayoutFault("tp", rule, f"use {_divisors(heads)}", "tp does not divide the attention heads")
    if model.parts.latent is None and kv_heads % tp and tp % kv_heads:
        rule = f"and the {kv_heads} key-value heads of {model.name} do not divide each other, which {name} requires"
        yield LayoutFault("tp", rule, f"use {_divisors(kv_heads)}", "tp and the key-value heads do not divide each other", True)
    if dcp > 1:
        yield from _context_faults(model, engine, tp=tp, dcp=dcp, pcp=pcp)
    if pcp > 1 and (reason := why_not_shared(model, engine, pp=pp, attention_dp=attention_dp)):
        yield LayoutFault("pcp", reason, "use pcp=1" + (" or engine vllm" if engine.runs.prefill_context == "none" else ""), reason)
    if pp > model.num_hidden_layers:
        rule = f"must be at most the {model.num_hidden_layers} layers of {model.name}"
        yield LayoutFault("pp", rule, "use fewer stages", "more stages than layers")
    experts, chips = model.parts.experts, tp * pcp * attention_dp
    if experts is None:
        if ep > 1:
            yield LayoutFault("ep", f"{model.name} has no experts", "use ep=1", "ep without experts")
        return
    if experts.num_experts % ep:
        rule = f"must divide the {experts.num_experts} experts"
        yield LayoutFault("ep", rule, f"use {_divisors(experts.num_experts)}", "ep does not divide the experts")
    if experts.width % (chips // ep):
        rule = f"leaves {chips // ep} chips to share an expert, whose width is {experts.width}"
        reason = "an expert's width does not divide among the chips that share it"
        yield LayoutFault("ep", rule, "distribute experts over more chips", reason)
    if attention_dp > 1 and (engine.runs.attention_dp == "none" or (engine.runs.attention_dp == "whole" and tp > 1)):
        rule = f"{name} has {'no attention dp' if engine.runs.attention_dp == 'none' else 'attention dp with tp 1 only'}"
        yield LayoutFault("attention_dp", rule, "use attention_dp=1", f"{name} has no such attention dp", True)
    if ep > 1 and (engine.runs.expert_parallel == "none" or (engine.runs.expert_parallel == "whole" and ep != chips)):
        rule = f"{name} has ep 1{f' or {chips}, all chips of a stage,' if engine.runs.expert_parallel == 'whole' else ''} only"
        yield LayoutFault("ep", rule, "use ep=1", f"{name} has no such ep", True)


def _context_faults(model: TransformerConfig, engine: Engine, *, tp: int, dcp: int, pcp: int) -> Iterator[LayoutFault]:
    """Yield the broken rules of ranks that share a cache: each would otherwise store it."""
    if not engine.runs.has_decode_context:
        rule = f"{engine.name} {engine.version} has no decode context parallelism"
        yield LayoutFault("dcp", rule, "use dcp=1 or engine vllm", f"{engine.name} has no decode context parallelism")
    if reason := why_no_context(model):
        yield LayoutFault("dcp", reason, "use dcp=1", reason)
        return
    copies = int(cache_copies(model, tp)) * pcp
    if copies % dcp:
        where = f"tp {tp}" if pcp == 1 else f"pcp {pcp} of tp {tp}"
        rule = f"{where} keeps {copies} {'copies' if copies > 1 else 'copy'} of the cache of {model.name}, and dcp must divide that"
        yield LayoutFault("dcp", rule, f"use {_divisors(copies)}, or more tp", "dcp does not divide the copies of the cache")
    if pcp > 1 and dcp not in (pcp, tp * pcp):
        rule = f"with pcp {pcp} and tp {tp} must be 1, {pcp} or {tp * pcp}"
        yield LayoutFault("dcp", rule, "use one of them", "dcp with pcp must be 1, pcp or tp * pcp")


def check_layout(model: TransformerConfig, engine: Engine, **degrees: int) -> str:
    """Return why the engine does not run a replica with these degrees; empty if it does. Raises InputError if it has no prediction."""
    faults = list(layout_faults(model, engine, **degrees))
    for fault in faults:
        if not fault.is_predicted:
            raise bad_field(fault.degree, degrees[fault.degree], fault.rule, fault.remedy)
    return "; ".join(f"{fault.degree}={degrees[fault.degree]}: {fault.rule}" for fault in faults)


def _divisors(number: int) -> str:
    return ", ".join(str(divisor) for divisor in (1, 2, 4, 8, 16, 32, 64, 128) if number % divisor == 0)
