"""Ranks that share the tokens of a sequence: of its cache while it decodes, of its prompt before that.

*Decode context parallelism.* By the algebra: the cache's token dim lies on `dcp`, an axis inside tp on which the cache would be replicated,
and the queries' heads leave that axis for the time of attention. The softmax over a cut dim leaves its output partial on `dcp`, to be
weighted by what each rank summed (its log-sum-exp), so

    queries [rows, n]: heads on (tp / dcp) * dcp -> on tp / dcp              an all-gather
    outputs [rows, n]: heads on tp / dcp, partial on dcp -> on both          a reduce-scatter, after the log-sum-exps are gathered

Each rank attends with dcp times its heads to 1 / dcp of the tokens: the same products, 1 / dcp of the cache's bytes.

*Prefill context parallelism.* `pcp` is the axis cp of training: ranks, each with all weights of its place in tp, that cut the tokens of a
prompt. What they send follows from the graph of prompts under its rule set (`program.py`): keys and values are gathered; of latent
attention latents, which each rank expands to its heads. Rank r has the r-th piece of 2 pcp from either end, so that all attend to as many
keys (`workload/causal.py`). Sequences that decode have nothing to cut: all ranks compute them, over a cache that each keeps; or that is
cut over pcp too, for which no heads need move:

    outputs [rows, n]: partial on pcp -> replicated                          an all-reduce

Sources: vLLM, docs/serving/context_parallel_deployment.md (at most tp / kv heads), vllm/v1/attention/ops/common.py (`cp_lse_ag_out_rs`),
vllm/config/parallel.py (beside pcp dcp is 1, pcp or tp * pcp), vllm/v1/worker/gpu/pcp_manager.py (DualChunkSwap; rows that decode are
replicated, what lies behind the last layer is gathered), vllm-project/vllm#46570; Bhatia et al., Helix Parallelism, arXiv:2507.07120, 2025.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from perfmodel.cost.serving.engine_step import Array, EngineStep
from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.frameworks.engine import Engine
from perfmodel.parallel.algebra.sharding import Layout, redistribute
from perfmodel.workload.config import TransformerConfig
from perfmodel.workload.graph import CacheAttention

_SUM_BYTES = 4.0
"""[byte] Of a log-sum-exp, which is kept in float32."""
CONTEXT_AXIS = "cp"
"""The axis of rule sets that cuts the tokens of a prompt."""
DCP, PCP = "dcp", "pcp"
"""Of ranks that share a cache: those inside tp, and those that share prompts."""
_TP = "tp"
_CUT, _WHOLE = Layout(cuts=((), (_TP, DCP))), Layout(cuts=((), (_TP,)))
_PARTIAL = Layout(cuts=((), (_TP,)), partial=frozenset([DCP, PCP]))

Exchange = tuple[CollectiveKind, frozenset[str], Array]
"""A collective, the axes of its group, and the bytes of its full buffer."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ContextTraffic:
    """Traffic of one layer: collectives of ranks that share a cache, and bytes of the pass that weighs their outputs."""

    collectives: tuple[Exchange, ...]
    weighted: Array


def cache_copies(model: TransformerConfig, tp: Any) -> Any:
    """Chips of tensor parallelism that hold the same part of a sequence's cache: tp / gcd(tp, key-value heads), tp of a latent. [-]"""
    tp = np.asarray(tp, dtype=np.int64)
    return tp if model.latent is not None else tp // np.gcd(tp, model.num_key_value_heads)


def why_no_context(model: TransformerConfig) -> str:
    """Why the tokens of the model's cache are not cut; empty where they can be."""
    if any(kind.mixer not in ("attention", "latent") for kind in model.layer_kinds):
        return f"{model.name} has recurrent layers, whose states have no tokens"
    if model.sliding_layer_fraction and (model.sliding_window or model.attention_chunk):
        return f"{model.name} has layers that keep a window of their tokens, which engines do not cut"
    if model.latent is not None and model.latent.index_heads:
        return f"{model.name} attends to tokens that it chooses, which engines do not cut"
    return ""


def why_not_shared(model: TransformerConfig, engine: Engine, *, pp: int, attention_dp: int) -> str:
    """Why chips do not share the tokens of the model's prompts under an engine; empty where they can."""
    if engine.runs.prefill_context == "none":
        return f"{engine.name} {engine.version} has no prefill context parallelism"
    if engine.runs.prefill_context == "latent" and model.latent is None:
        return f"{engine.name} shares prompts of models with latent attention only, which {model.name} has not"
    if any(kind.mixer not in ("attention", "latent") for kind in model.layer_kinds):
        return f"{model.name} has recurrent layers, whose tokens follow one another"
    degrees = {"pp": pp, "attention_dp": attention_dp}
    unsupported = [name for name, size in degrees.items() if size > 1 and name not in engine.runs.prefill_context_beside]
    return f"{engine.name} does not share prompts together with {' and '.join(unsupported)}" if unsupported else ""


def cache_cuts(model: TransformerConfig, *, tp: Any, dcp: Any, pcp: Any) -> tuple[Any, Any]:
    """Ranks of `dcp` inside tp, and those of pcp, which come first. [-]"""
    of_pcp = np.gcd(dcp, pcp)
    return np.gcd(dcp // of_pcp, cache_copies(model, tp)), of_pcp


def context_traffic(work: CacheAttention, heads: Array, kv_heads: Array, step: EngineStep) -> ContextTraffic:
    """Traffic in one layer of ranks that share the tokens of a cache, for sequences that decode and prompts whose beginning is cached.

    Queries and outputs travel; for prompts latents, and where the ranks share prompts keys and values too, are gathered.
    """
    rows, widths = step.decoding * step.new_tokens, work.cached_dims
    continued = np.where(step.prompt_cached > 0, step.own_prompt_rows, 0.0)
    cached = step.prompts * step.prompt_cached
    gathered: Exchange
    if not work.latent[0]:
        rows = rows + np.where(step.cut > 1, 0.0, continued)
        of_cache = np.where(step.cut > 1, cached * kv_heads * (sum(widths) * step.cache_bytes), 0.0)
        gathered = (CollectiveKind.ALL_GATHER, frozenset([PCP]), of_cache)
    else:  # prompts have keys and values of each head, to which gathered latents are expanded
        gathered = (CollectiveKind.ALL_GATHER, frozenset([DCP, PCP]), cached * (widths[0] * step.cache_bytes))
    element = step.element_bytes
    exchange = decode_exchange(rows=rows, heads=heads, key_dim=widths[0], value_dim=widths[1], dcp=step.dcp, cut=step.cut, itemsize=element)
    return ContextTraffic(collectives=(gathered, *exchange), weighted=2.0 * element * rows * heads * step.dcp * widths[1])


def decode_exchange(
    *, rows: Array, heads: Array, key_dim: float, value_dim: float, dcp: Array, cut: Array | float = 1.0, itemsize: float = 2.0
) -> Iterator[Exchange]:
    """Collectives of one layer, with the bytes of each full buffer. [byte]

    rows    tokens that attend
    heads   of a rank before the gather: n / tp
    dcp     ranks inside tp that share a cache; cut: those of pcp
    """
    gathered = rows * heads * dcp
    for step in redistribute(_CUT, _WHOLE):
        yield step.kind, step.axes, itemsize * gathered * key_dim
    yield CollectiveKind.ALL_GATHER, frozenset([DCP, PCP]), _SUM_BYTES * gathered * (dcp * cut)
    for step in redistribute(_PARTIAL, _CUT):
        elements = gathered if step.kind is CollectiveKind.REDUCE_SCATTER else rows * heads
        yield step.kind, step.axes, itemsize * elements * value_dim
