"""Attention of a serving step: of decoding sequences, of prompts, and the collectives of ranks that share the tokens of a sequence.

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

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from perfmodel.cost.compute import attention_time, streaming_time
from perfmodel.cost.machine import Machine
from perfmodel.cost.serving.engine_step import Array, EngineStep, Group, engine_collective_time
from perfmodel.cost.serving.kernels import cached_attention_time as cached_kernel_time
from perfmodel.cost.serving.kernels import latent_decode_time
from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.foundation.columns import Column
from perfmodel.frameworks.engine_layouts import cache_copies
from perfmodel.hardware.calibration import COLLECTIVE_CODE, LATENT_KERNEL, KernelClass
from perfmodel.parallel.algebra.sharding import Layout, redistribute
from perfmodel.workload.causal import ALL_BEFORE
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


def cached_attention_time(work: CacheAttention, heads: Array, kv_heads: Array, step: EngineStep, machine: Machine) -> Array:
    """Return the attention time of one layer, averaged over layers with and without a window. [s]"""
    total = np.zeros_like(step.cached)
    if step.decoding.any():
        time = _over_windows(lambda tokens: _decoding(work, heads, kv_heads, tokens, step, machine), step.cached, work)
        total = np.where(step.decoding > 0, time, 0.0)
    if work.takes_prompts:
        seen = step.prompt_tokens + step.prompt_cached
        time = _over_windows(lambda tokens: _prompts(work, heads, kv_heads, tokens, step, machine), seen, work)
        if work.index[0]:
            time = np.where(seen > work.window, np.maximum(time, _selected(work, heads, step, machine)), time)
        total = total + np.where(step.prompts > 0, time, 0.0)
    return total + _indexing(work, step, machine) + step.kernels.sparse_attention_time if work.index[0] else total


def _over_windows(time: Callable[[Array], Array], tokens: Array, work: CacheAttention) -> Array:
    """Average a time over layers that attend to all tokens and layers that attend to a window of them."""
    if not work.windowed:
        return time(tokens)
    cut = time(np.minimum(tokens, float(work.window)))
    return cut if work.windowed == 1.0 else work.windowed * cut + (1.0 - work.windowed) * time(tokens)


def _decoding(work: CacheAttention, heads: Array, kv_heads: Array, cached: Array, step: EngineStep, machine: Machine) -> Array:
    """Return the attention time of decoding sequences."""
    heads, cached = heads * step.dcp, np.maximum(cached / (step.dcp * step.cut), 1.0)
    of_step: dict[str, Any] = {"batch": step.decoding, "queries": step.new_tokens, "machine": machine}
    of_step |= {"cache_itemsize": step.formats.cache_bytes, "itemsize": step.formats.element_bytes}
    if work.latent[0]:
        latent, rotary = work.latent
        time = latent_decode_time(heads=heads, key_length=cached, latent_dim=latent, rotary_dim=rotary, **of_step)
    else:
        shared = kv_heads if step.kernels.shares_key_values else heads
        time = cached_kernel_time(heads=heads, kv_heads=shared, key_length=cached, head_dim=work.head_dim, **of_step)
    return np.asarray(time) / step.kernels.decode_attention_fraction


def _prompts(work: CacheAttention, heads: Array, kv_heads: Array, seen: Array, step: EngineStep, machine: Machine) -> Array:
    """Return the attention time of prompts, causal among the new tokens only.

    A token attends to z - (q - 1) / 2 of z keys on average, at most to those of a window. Under prefill context parallelism each rank has
    q / pcp queries of a prompt, a piece from either end. All ranks attend to the same number of keys.
    """
    q = np.maximum(step.prompt_tokens, 1.0)
    keys = np.maximum(seen, 1.0)
    context = step.prompt_tokens + step.prompt_cached
    unseen = 1.0 - ALL_BEFORE.seen_by_slowest(step.sharing, head_tail=True)
    share = np.where(seen < context, 1.0, (keys - unseen * (np.minimum(q, keys) - 1.0)) / keys)
    time = attention_time(
        batch=step.prompts,
        heads=heads,
        kv_heads=kv_heads,
        query_length=q / step.sharing,
        key_length=keys,
        head_dim=work.head_dim,
        causal_fraction=share,
        itemsize=step.formats.element_bytes,
        machine=machine,
        kernel=LATENT_KERNEL if work.latent[0] and LATENT_KERNEL in machine.attention else "flash",
        value_head_dim=work.value_head_dim,
    )
    return np.asarray(time)


def _selected(work: CacheAttention, heads: Array, step: EngineStep, machine: Machine) -> Array:
    """Return the sparse attention time of prompts longer than the selection: every new token reads its selected latents, as in decode."""
    new = np.maximum(step.prompt_tokens, 1.0)
    time = latent_decode_time(
        batch=step.prompts * new / step.sharing,
        heads=heads,
        key_length=keys_within(work.window, new, step.prompt_cached),
        machine=machine,
        latent_dim=work.latent[0],
        rotary_dim=work.latent[1],
        cache_itemsize=step.formats.cache_bytes,
        itemsize=step.formats.element_bytes,
    )
    return np.asarray(time)


def _indexing(work: CacheAttention, step: EngineStep, machine: Machine) -> Array:
    """Return the time of a sparse indexer: one byte per key element, read once per sequence, and 8-bit products of a few heads."""
    heads, width = work.index
    queries = step.decoding * step.new_tokens * step.cached + step.own_prompt_rows * step.prompt_tokens * 0.5
    read = (step.decoding * step.cached + step.prompts * step.prompt_tokens) * width
    return np.maximum(pass_time(read, machine), 2.0 * queries * heads * width / (0.5 * machine.peak_flop_rate))


def pass_time(num_bytes: Array, machine: Machine) -> Array:
    """Return the time of a pass over memory by an elementwise kernel. [s]"""
    return np.asarray(streaming_time(num_bytes=num_bytes, num_elements=0.0, kernel_class=KernelClass.DEFAULT, machine=machine))


def cached_attention_work(work: CacheAttention, heads: Array, kv_heads: Array, step: EngineStep) -> tuple[Array, Array]:
    """Return the FLOPs of one layer's attention, and its least memory traffic: visible keys, read once for all queries of a sequence."""
    b, prompt_rows, cut = step.decoding, step.own_prompt_rows, step.dcp * step.cut
    seen = keys_seen(work, 1.0, step.cached - 1.0) / cut
    key_dim, width = work.cached_dims[0], float(sum(work.cached_dims))
    of_cache = key_dim if work.latent[0] else kv_heads * width  # heads share a latent, which contains the value
    flops = 2.0 * b * (heads * step.dcp) * seen * width
    moved = b * (seen * of_cache * step.formats.cache_bytes + step.formats.element_bytes * (heads * step.dcp) * width)
    if work.takes_prompts:
        width = float(work.head_dim + work.value_head_dim)
        tokens = step.prompts * (step.prompt_tokens + step.prompt_cached)
        flops = flops + 2.0 * heads * prompt_rows * keys_seen(work, np.maximum(step.prompt_tokens, 1.0), step.prompt_cached) * width
        moved = moved + step.formats.element_bytes * (heads * prompt_rows * width + kv_heads * tokens * width)
    return flops, moved


def keys_seen(work: CacheAttention, queries: Column, before: Column) -> Any:
    """Return the keys to which a new token attends after `before` others, averaged over tokens and layers, with and without a window."""
    unwindowed = before + 0.5 * (queries + 1.0)
    return work.windowed * keys_within(work.window, queries, before) + (1.0 - work.windowed) * unwindowed if work.windowed else unwindowed


def keys_within(most: Column, queries: Column, before: Column) -> Any:
    """Return the keys to which a new token attends after `before` others, if it attends to `most` at most: mean over the tokens. [-]"""
    growing = np.clip(np.asarray(most, dtype=float) - before, 0.0, queries)  # tokens that attend to all tokens before them
    return (growing * (before + 0.5 * (growing + 1.0)) + (queries - growing) * most) / queries


# --- ranks that share the tokens of a sequence ------------------------------------------------------------------------


def cache_cuts(model: TransformerConfig, *, tp: Any, dcp: Any, pcp: Any) -> tuple[Any, Any]:
    """Return the ranks of `dcp` inside tp, and those of pcp, which are used first. [-]"""
    of_pcp = np.gcd(dcp, pcp)
    return np.gcd(dcp // of_pcp, cache_copies(model, tp)), of_pcp


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


def shared_cache_time(work: CacheAttention, heads: Array, kv_heads: Array, step: EngineStep, machine: Machine) -> Array:
    """Return the communication time in one layer of ranks that share the tokens of a cache. [s]

    Queries and outputs of decoding sequences, and of prompts with a cached prefix, are exchanged; a pass weights the outputs. For prompts,
    latents are gathered; if the ranks share prompts, keys and values are gathered too.
    """
    ranks = step.dcp * step.cut
    if np.max(ranks) <= 1:
        return np.zeros_like(step.cached)
    rows, (key_dim, value_dim), element = step.decoding * step.new_tokens, work.cached_dims, step.formats.element_bytes
    cached = step.prompts * step.prompt_cached * step.formats.cache_bytes
    gathered: Exchange
    if not work.latent[0]:
        continued = np.where(step.prompt_cached > 0, step.own_prompt_rows, 0.0)
        rows = rows + np.where(step.cut > 1, 0.0, continued)
        gathered = (CollectiveKind.ALL_GATHER, frozenset([PCP]), np.where(step.cut > 1, cached * kv_heads * (key_dim + value_dim), 0.0))
    else:  # gathered latents are expanded to keys and values of each head of a prompt
        gathered = (CollectiveKind.ALL_GATHER, frozenset([DCP, PCP]), cached * key_dim)
    weighted = 2.0 * element * rows * heads * step.dcp * value_dim
    time = np.where(weighted > 0, pass_time(weighted, machine), 0.0)
    exchange = decode_exchange(rows=rows, heads=heads, key_dim=key_dim, value_dim=value_dim, dcp=step.dcp, cut=step.cut, itemsize=element)
    for kind, axes, num_bytes in (gathered, *exchange):
        code, group = COLLECTIVE_CODE[kind], _sharing(axes, step)
        time = time + np.where(num_bytes > 0, engine_collective_time(code, num_bytes, group, machine, step.kernels), 0.0)
    return np.where(ranks > 1, time, 0.0)


def _sharing(axes: frozenset[str], step: EngineStep) -> Group:
    """Return the group of ranks that share the tokens of a cache (tp, pcp or both), and its members inside a domain of each tier."""
    size: Array = np.ones(1)
    inside: list[Array] = []
    for axis, members, of in ((DCP, step.dcp, "tp"), (PCP, step.cut, "pcp")):
        if axis in axes:
            near = [np.minimum(tier, members) for tier in step.groups[of][1]]
            size, inside = size * members, [one * other for one, other in zip(inside, near, strict=True)] if inside else near
    return size, inside
