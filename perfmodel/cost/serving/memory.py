"""Memory of a serving chip: weights, memory reserved by engines, and the tokens of KV cache that fit in the rest."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from perfmodel.cost.serving.program import ServingProgram
from perfmodel.foundation.columns import Column
from perfmodel.foundation.dtypes import Dtype, itemsize
from perfmodel.frameworks.engine import Engine
from perfmodel.parallel.serving_plan import ServingColumns
from perfmodel.workload.config import TransformerConfig
from perfmodel.workload.kinds.cache import state_bytes, token_shapes
from perfmodel.workload.quantization import Quantization

_PLAIN_BYTES = 2.0


def weight_bytes(program: ServingProgram, quantization: Quantization, *, tp: Column, pp: Column, expert_cut: Column) -> Any:
    """Return the weights of a chip of the fullest stage. [byte]

    Each weight is divided over the axes that cut it; experts over all `expert_cut` chips of a stage. Layers are spread evenly over stages.
    The last stage also has the output matrix and the first the embedding table, whichever is larger.
    """
    model = program.model
    quantized_parts = quantization.parts(with_experts=model.parts.experts is not None)
    kv = np.gcd(np.asarray(tp, dtype=np.int64), model.num_key_value_heads).astype(float)
    layers: Column = 0.0
    ends: dict[str, Any] = {}
    graph, regions = program.derivation.graph, {region.name: region for region in program.regions}
    for parameter in program.derivation.parameters:
        tensor, axes = graph.tensors[parameter.name], parameter.elements.axes | parameter.elements.padded_axes
        element_bytes = quantization.weight_bytes if tensor.part in quantized_parts else tensor.itemsize
        parts: Column = 1.0
        if parameter.name in program.expert_inputs:
            parts = expert_cut
        else:
            if any(axis.startswith("tp_kv") for axis in axes):
                parts = parts * kv
            if any(axis.startswith("tp_q") for axis in axes):
                parts = parts * (np.asarray(tp) / kv)
        held = float(parameter.num_elements) * element_bytes / parts
        region = regions[parameter.regions[0]]
        if region.is_block:
            layers = layers + held * region.count
        else:
            ends[region.name] = ends.get(region.name, 0.0) + held
    first, last = ends.get("embedding", 0.0), ends.get("head", 0.0)
    tied = first if model.tie_word_embeddings else 0.0
    share = np.ceil(model.num_hidden_layers / np.asarray(pp)) / model.num_hidden_layers
    outer = np.where(np.asarray(pp) > 1, np.maximum(first, last + tied), first + last)
    return layers * share + outer


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """Cache of a sequence in elements of all layers, before any sharding.

    growing       per token, of layers with full attention; heads are cut by tp up to the number of key-value heads
    windowed      per token, of layers with a window, which keep `window` tokens
    latent        per token, of latent attention: replicated on every chip
    index         bytes per token, of a sparse indexer: replicated on every chip
    state         bytes per sequence, of recurrent layers, cut by tp (`states.py`)
    """

    growing: float
    windowed: float
    window: int
    latent: float
    index: float
    state: float

    def tokens_bytes(self, tokens: Column, *, tp: Column, kv_heads: int, cache_bytes: float, dcp: Column = 1.0) -> Any:
        """Return the cache of a sequence with this number of tokens, on each chip of a stage with all layers. [byte]

        dcp   chips that share tokens which each would otherwise store, except for windows and an indexer's keys
        """
        kv = np.gcd(np.asarray(tp, dtype=np.int64), kv_heads).astype(float)
        seen = np.minimum(tokens, self.window) if self.window else tokens
        heads = (self.growing * tokens / dcp + self.windowed * seen) * (cache_bytes / kv)
        return heads + (self.latent * cache_bytes / dcp + self.index) * tokens + self.state / np.asarray(tp)


def cache_shape(model: TransformerConfig) -> CacheShape:
    """Return the cache shape over all layers. The share of layers with a window is the model's."""
    growing = windowed = latent = index = state = 0.0
    for kind in model.layer_kinds:
        sizes = [float(prod(shape)) * kind.count for shape in token_shapes(model, kind.mixer)]
        if kind.mixer == "attention":
            windowed += sum(sizes) * model.sliding_layer_fraction
            growing += sum(sizes) * (1.0 - model.sliding_layer_fraction)
        elif sizes:
            latent += sizes[0]
            index += sum(sizes[1:])
        state += state_bytes(model, kind.mixer) * kind.count
    window = model.attention.window
    return CacheShape(growing=growing, windowed=windowed, window=window, latent=latent, index=index, state=state)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ServingMemory:
    """Memory of the fullest chip [byte], columns over plans; sequences of one replica.

    cache_capacity  free for the cache
    sequences       of mean length that fit at once
    usable          by the cache and all other classes together
    """

    weights: Column
    activations: Column
    graphs: Column
    context: Column
    reserve: Column
    cache_capacity: Column
    sequence_bytes: Column
    sequences: Column
    usable: Column

    @property
    def fits(self) -> Any:
        return self.sequences >= 1.0

    def classes(self, cached: Column = 0.0) -> dict[str, Column]:
        """Return the memory of each class, with `cached` bytes of the cache in use."""
        held = {"weights": self.weights, "cache": cached, "activations": self.activations}
        return held | {"graphs": self.graphs, "context": self.context, "reserve": self.reserve}


def serving_memory(
    program: ServingProgram,
    engine: Engine,
    quantization: Quantization,
    cache: Dtype,
    *,
    capacity: float,
    tokens_of_sequence: Column,
    plans: ServingColumns,
    max_tokens: Column,
    max_batch: Column,
    draft_bytes: Column = 0.0,
) -> ServingMemory:
    """Return the memory by class, and the sequences of `tokens_of_sequence` tokens that fit in a replica.

    M = u C - W - A - G - N - R,   or u (C - W - A - G - N - R) for an engine whose fraction applies to free memory
    R: `engine_reserve`
    sequences = attention_dp * M / bytes of a sequence on a chip (whole blocks)

    A = max(2 T min(n d, 2 h) x factor, W + min(B, T) V s)     s `sampler_bytes`, V the vocabulary, W `expert_workspace`

    max_tokens, max_batch   T, B of each plan's steps, by default the engine's

    Source: vLLM's, SGLang's and TensorRT-LLM's memory rules as in `Engine`; the factor of A is fitted by aiconfigurator.
    """
    model = program.model
    tp, pp, dcp = (degree.astype(float) for degree in (plans.tp, plans.pp, plans.dcp))
    attention_dp, of_stage = plans.attention_dp.astype(float), plans.chips_of_stage.astype(float)
    weights = weight_bytes(program, quantization, tp=tp, pp=pp, expert_cut=of_stage) + draft_bytes
    factors = engine.memory.expert_activation_factor if model.parts.experts is not None else engine.memory.activation_factor
    step = np.clip(np.floor(np.log2(tp)), 0, len(factors) - 1).astype(int)
    wide = model.num_attention_heads * (model.head_dim if model.parts.latent is None else model.parts.latent.value_head_dim)
    activations = np.maximum(
        2.0 * max_tokens * min(wide, 2 * model.hidden_size) * np.asarray(factors)[step], engine.memory.least_activation_bytes
    )
    kept = expert_workspace(model, max_tokens, expert_tp=of_stage / plans.ep) if engine.memory.keeps_expert_workspace else 0.0
    activations = np.maximum(activations, kept + np.minimum(max_batch, max_tokens) * model.vocab_size * engine.memory.sampler_bytes)
    links = np.where(of_stage * pp > 1, engine.memory.link_bytes, 0.0)
    context, graphs = engine.memory.context_bytes + links, engine.memory.graph_bytes
    reserve = engine_reserve(engine, chips=of_stage * pp, attention_dp=attention_dp, max_tokens=max_tokens)
    occupied = weights + activations + graphs + context + reserve
    fraction = engine.memory.memory_fraction
    cache_capacity = fraction * (capacity - occupied) if engine.memory.fraction_of_free else fraction * capacity - occupied
    usable = np.minimum(occupied + cache_capacity, capacity) if engine.memory.fraction_of_free else fraction * capacity
    block = engine.memory.block_tokens * dcp  # one block on each chip that shares the tokens
    rounded_tokens = np.ceil(np.asarray(tokens_of_sequence, dtype=float) / block) * block
    cached = cache_shape(model).tokens_bytes(
        rounded_tokens, tp=tp, kv_heads=model.num_key_value_heads, cache_bytes=itemsize(cache), dcp=dcp
    )
    layers = np.ceil(model.num_hidden_layers / pp) / model.num_hidden_layers
    sequence_bytes = cached * layers
    return ServingMemory(
        weights=weights,
        activations=activations,
        graphs=graphs,
        context=context,
        reserve=reserve,
        cache_capacity=cache_capacity,
        sequence_bytes=sequence_bytes,
        sequences=np.maximum(cache_capacity, 0.0) / sequence_bytes * attention_dp,
        usable=usable,
    )


def expert_workspace(model: TransformerConfig, max_tokens: Column, *, expert_tp: Column) -> Any:
    """Return the workspace of the experts' products of a step, in 16 bits: a buffer for inputs and outputs, one for intermediates. [byte]

    W = 2 T k (max(f, h) + max(2 f, h))     f the width of an expert on a chip

    Source: vLLM, model_executor/layers/fused_moe: fused_moe.py, deep_gemm_moe.py (workspace_shapes, without the rounding of its rows).
    """
    experts = model.parts.experts
    if experts is None:
        return 0.0
    width = experts.width / np.asarray(expert_tp)
    wide = np.maximum(width, model.hidden_size) + np.maximum(2.0 * width, model.hidden_size)
    return _PLAIN_BYTES * np.asarray(max_tokens) * experts.top_k * wide


def engine_reserve(engine: Engine, *, chips: Column, attention_dp: Column, max_tokens: Column) -> Any:
    """Return the memory that an engine reserves on each chip. [byte]

    R = max(r0 + r_T T + r_g chips + r_a dp [dp > 1], R_least)

    chips   of a replica
    Source: SGLang 0.5, server_args.py: 512 MiB + 1.5 MiB per token of a chunk + 1 GiB for eight chips + 2 MiB per captured sequence (3 MiB
    more for each attention rank; 256 are captured), at least 10 GiB on chips of over 60 GB. The rest is its mem_fraction_static.
    """
    ranks = np.where(np.asarray(attention_dp) > 1, attention_dp, 0.0)
    by_rank = engine.memory.reserve_chip_bytes * chips + engine.memory.reserve_rank_bytes * ranks
    return np.maximum(
        engine.memory.reserve_bytes + engine.memory.reserve_token_bytes * max_tokens + by_rank, engine.memory.least_reserve_bytes
    )
