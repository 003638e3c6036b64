"""Context parallelism in serving: ranks that share the tokens of a sequence, of its cache in decode and of its prompt in prefill.

*Decode context parallelism.* In the algebra, the token dim of the cache is cut over `dcp`, an axis inside tp on which the cache would be
replicated. The heads of the queries leave that axis during attention. The softmax over a cut dim leaves its output partial on `dcp`; each
rank's part is weighted by its log-sum-exp. Hence

    queries [rows, n]: heads on (tp / dcp) * dcp -> on tp / dcp              an all-gather
    outputs [rows, n]: heads on tp / dcp, partial on dcp -> on both          a reduce-scatter, after the log-sum-exps are gathered

Each rank attends with dcp times its heads to 1 / dcp of the tokens: the same FLOPs, 1 / dcp of the cache traffic.

*Prefill context parallelism.* `pcp` is the axis cp of training: ranks with the same weights of tp that share the tokens of a prompt. Their
communication follows from the graph of prompts under its rule set (`program.py`). Keys and values are gathered; for latent attention the
latents are, and each rank expands them to its heads. Rank r has the r-th piece of 2 pcp from either end, so that all ranks attend to the
same number of keys (`workload/causal.py`). Decoding sequences are not split: all ranks compute them, over a cache that each rank stores.
The cache may also be cut over pcp, which moves no heads:

    outputs [rows, n]: partial on pcp -> replicated                          an all-reduce

Sources: vLLM, docs/serving/context_parallel_deployment.md (at most tp / kv heads), vllm/v1/attention/ops/common.py (`cp_lse_ag_out_rs`),
vllm/config/parallel.py (with pcp, dcp is 1, pcp or tp * pcp), vllm/v1/worker/gpu/pcp_manager.py (DualChunkSwap; decode rows are
replicated, the output of the last layer is gathered), vllm-project/vllm#46570; Bhatia et al., Helix Parallelism, arXiv:2507.07120, 2025.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from perfmodel.cost.serving.engine_step import Array, EngineStep
from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.frameworks.engine_layouts import cache_copies
from perfmodel.parallel.algebra.sharding import Layout, redistribute
from perfmodel.workload.config import TransformerConfig
from perfmodel.workload.work import CacheAttention

_SUM_BYTES = 4.0
"""Size of a log-sum-exp, which is stored in float32. [byte]"""
CONTEXT_AXIS = "cp"
"""Axis of rule sets that cuts the tokens of a prompt."""
DCP, PCP = "dcp", "pcp"
"""Axes of ranks that share a cache: inside tp, and the axis of ranks that share prompts."""
_TP = "tp"
_CUT, _WHOLE = Layout(cuts=((), (_TP, DCP))), Layout(cuts=((), (_TP,)))
_PARTIAL = Layout(cuts=((), (_TP,)), partial=frozenset([DCP, PCP]))

Exchange = tuple[CollectiveKind, frozenset[str], Array]
"""A collective, the axes of its group, and the bytes of its full buffer."""


def cache_cuts(model: TransformerConfig, *, tp: Any, dcp: Any, pcp: Any) -> tuple[Any, Any]:
    """Return the ranks of `dcp` inside tp, and those of pcp, which are used first. [-]"""
    of_pcp = np.gcd(dcp, pcp)
    return np.gcd(dcp // of_pcp, cache_copies(model, tp)), of_pcp


def context_traffic(work: CacheAttention, heads: Array, kv_heads: Array, step: EngineStep) -> tuple[tuple[Exchange, ...], Array]:
    """Return the collectives of one layer of ranks that share the cached tokens, and the bytes of the pass that weights their outputs.

    They are of decoding sequences and of prompts with a cached prefix.

    Queries and outputs are exchanged. For prompts, latents are gathered; if the ranks share prompts, keys and values are gathered too.
    """
    rows, widths = step.decoding * step.new_tokens, work.cached_dims
    continued = np.where(step.prompt_cached > 0, step.own_prompt_rows, 0.0)
    cached = step.prompts * step.prompt_cached
    gathered: Exchange
    if not work.latent[0]:
        rows = rows + np.where(step.cut > 1, 0.0, continued)
        of_cache = np.where(step.cut > 1, cached * kv_heads * (sum(widths) * step.formats.cache_bytes), 0.0)
        gathered = (CollectiveKind.ALL_GATHER, frozenset([PCP]), of_cache)
    else:  # gathered latents are expanded to keys and values of each head of a prompt
        gathered = (CollectiveKind.ALL_GATHER, frozenset([DCP, PCP]), cached * (widths[0] * step.formats.cache_bytes))
    element = step.formats.element_bytes
    exchange = decode_exchange(rows=rows, heads=heads, key_dim=widths[0], value_dim=widths[1], dcp=step.dcp, cut=step.cut, itemsize=element)
    return (gathered, *exchange), 2.0 * element * rows * heads * step.dcp * widths[1]


def decode_exchange(
    *, rows: Array, heads: Array, key_dim: float, value_dim: float, dcp: Array, cut: Array | float = 1.0, itemsize: float = 2.0
) -> Iterator[Exchange]:
    """Yield the collectives of one layer, with the bytes of each full buffer. [byte]

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
