"""Attention of a serving step: of decoding sequences, of prompts, and the collectives of ranks that share a cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from perfmodel.cost.compute import attention_time, streaming_time
from perfmodel.cost.machine import Machine
from perfmodel.cost.serving.context import DCP, PCP, context_traffic
from perfmodel.cost.serving.engine_step import Array, EngineStep, Group, engine_collective_time
from perfmodel.cost.serving.kernels import cached_attention_time as cached_kernel_time
from perfmodel.cost.serving.kernels import latent_decode_time
from perfmodel.foundation.columns import Column
from perfmodel.hardware.calibration import COLLECTIVE_CODE, LATENT_KERNEL, KernelClass
from perfmodel.workload.causal import ALL_BEFORE
from perfmodel.workload.work import CacheAttention


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


def shared_cache_time(work: CacheAttention, heads: Array, kv_heads: Array, step: EngineStep, machine: Machine) -> Array:
    """Return the communication time in one layer of ranks that share the tokens of a cache. [s]"""
    ranks = step.dcp * step.cut
    if np.max(ranks) <= 1:
        return np.zeros_like(step.cached)
    collectives, weighted = context_traffic(work, heads, kv_heads, step)
    time = np.where(weighted > 0, pass_time(weighted, machine), 0.0)
    for kind, axes, num_bytes in collectives:
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
