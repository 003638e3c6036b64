"""Decode context parallelism: the tokens of a sequence's cache cut over ranks of tensor parallelism that would each keep them all.

By the algebra: the cache's token dim lies on `dcp`, an axis inside tp on which the cache would be replicated, and the queries' heads leave
that axis for the time of attention. The softmax over a cut dim leaves its output partial on `dcp`, to be weighted by what each rank
summed (its log-sum-exp), so

    queries [rows, n]: heads on (tp / dcp) * dcp -> on tp / dcp              an all-gather
    outputs [rows, n]: heads on tp / dcp, partial on dcp -> on both          a reduce-scatter, after the log-sum-exps are gathered

Each rank attends with dcp times its heads to 1 / dcp of the tokens: the same products, 1 / dcp of the cache's bytes.

Sources: vLLM, docs/serving/context_parallel_deployment.md (at most tp / kv heads), vllm/v1/attention/ops/common.py (`cp_lse_ag_out_rs`);
Bhatia et al., Helix Parallelism, arXiv:2507.07120, 2025.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.parallel.algebra.sharding import Layout, redistribute
from perfmodel.workload.config import TransformerConfig

Array = NDArray[np.float64]

_ELEMENT_BYTES = 2.0
_SUM_BYTES = 4.0
"""[byte] Of a log-sum-exp, which is kept in float32."""
_TP, _DCP = "tp", "dcp"
_CUT, _WHOLE = Layout(cuts=((), (_TP, _DCP))), Layout(cuts=((), (_TP,)))
_PARTIAL = Layout(cuts=((), (_TP,)), partial=frozenset([_DCP]))


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


def decode_exchange(*, rows: Array, heads: Array, key_dim: float, value_dim: float, dcp: Array) -> Iterator[tuple[CollectiveKind, Array]]:
    """Collectives over `dcp` of one layer, with the bytes of each full buffer. [byte]

    rows    tokens that attend
    heads   of a rank before the gather: n / tp
    """
    gathered = rows * heads * dcp
    for step in redistribute(_CUT, _WHOLE):
        yield step.kind, _ELEMENT_BYTES * gathered * key_dim
    yield CollectiveKind.ALL_GATHER, _SUM_BYTES * gathered * dcp
    for step in redistribute(_PARTIAL, _CUT):
        yield step.kind, _ELEMENT_BYTES * gathered * value_dim
