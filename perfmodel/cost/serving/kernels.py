"""Times of kernels that serving runs and training does not. Elementwise on broadcast arrays, as `perfmodel.cost.compute`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from perfmodel.cost.compute import SMOOTH_MAXIMUM, attention_decode_time, compute_part, grouped_matmul_time, matmul_time, smooth_maximum
from perfmodel.cost.link_rates import NEVER
from perfmodel.foundation.columns import Column
from perfmodel.hardware.serving_kernels import FEW, FP8_CACHE, LATENT_CACHE, LATENT_FP8_CACHE

if TYPE_CHECKING:
    from perfmodel.cost.machine import Machine, MatmulRates
    from perfmodel.hardware.serving_kernels import GroupedWeightModel, WeightProductModel
    from perfmodel.workload.quantization import Quantization

WIDE_ITEMSIZE = 2.0
"""Bytes of an unquantized element, as products read it before quantization and write it."""


def small_all_reduce_time(num_bytes: Column, group_size: Column, machine: Machine) -> Any:
    """Return the time of a custom all-reduce of serving engines, for ranks that read each other's memory (one node, NVLink). [s]

    t = min(a1 + c1 (n - 1) + V (n - 1) / B1,  a2 + c2 (n - 1) + 2 V (n - 1) / n / B2)

    num_bytes   V    the buffer of each rank    [byte]
    group_size  n    ranks                      [-]
    a, c, B     of `SmallAllReduceModel`, one-shot and two-shot. One-shot: each rank reads all of V from every peer. Two-shot: it reads its
                share of V, and then the sums of the others. On a full mesh few peers leave links idle, as in `collective_time`.

    0 for one rank; never the cheapest (1e30) for ranks of several nodes, or ranks that cannot read each other's memory. The formula holds
    for small messages alone: the caller takes the minimum with `collective_time`. All ranks are assumed to start together; in engines they
    arrive one after another.
    Source: the form is that of the custom all-reduce of TensorRT-LLM and vLLM; fitted by `lab.kernels.serving` to
    aiconfigurator's tables of it (2, 4 and 8 ranks) where it beats NCCL. Median error on held-out decades of sizes: docs/kernels.md.
    """
    rates, mesh = machine.links.peer_memory, machine.links.mesh[0]
    n = group_size
    peers = n - 1.0
    base, per_peer, seconds = rates.one_shot
    slowdown = np.maximum(mesh / np.maximum(peers, 1.0), 1.0)
    one_shot = base + per_peer * peers + num_bytes * peers * (seconds * slowdown)
    base, per_peer, seconds = rates.two_shot
    two_shot = base + per_peer * peers + 2.0 * num_bytes * (peers / n) * (seconds * slowdown)
    time = np.minimum(one_shot, two_shot) * np.minimum(peers, 1.0)
    return np.where(n <= rates.most_ranks, time, np.where(n > 1, NEVER, 0.0))


def weight_product_time(
    *,
    m: Column,
    n: Column,
    k: Column,
    quantization: Quantization,
    machine: Machine,
    batch: Column = 1.0,
    casts: Column = 0.0,
    untuned: float = 1.0,
) -> Any:
    """Return the time of a batch of products of activations [m, k] with weights [k, n] stored in `quantization`. [s]

    t = t0 + (C^p + M^p)^(1/p) + x (y t1 + batch m k (2 + a) / (q B0))
    M = batch (w k n + a m k + 2 m n) / B

    w, a    bytes of an element of the weights and of the activations, scales included (`Quantization`)       [byte]
    casts   x  exposed share of a quantization pass over the activations before the product: 0 if a preceding norm, activation function or
               collective writes them quantized, 1 if the pass is a separate kernel. Unused in formats with a = 2.
    untuned u  share of the rate of large products reached by a library without kernels for few rows; 1: it has them. The time is at least
               t0 + (C'^p + M^p)^(1/p), C' = 2 batch m n k / (u R)
    y       exposed share of a kernel's floor
    C       of `matmul_time`, at the rate of the compute dtype, with an additional tile of 16 rows where a = 2 (`WIDENED_TILE`)
    t0      floor of products in 16 bits
    B0      memory bandwidth; the rest of `WeightProductModel`

    The machine computes in 16 bits, and so do products of a format for which the chip has no units. Without quantization it is
    `matmul_time`.
    The tables' floors of 6-15 us in 8 and 4 bits are those of the quantization pass. With it the fp8 tables of H100, H200 and B200
    are 3-5 % off; without it 7-9 %, and one shape in ten by more than 30 %.
    Source: fitted by `lab.kernels.serving` to aiconfigurator's products. For formats that a chip's tables lack: the fractions
    of the unquantized rates that another chip reaches. Errors on held-out weights: docs/kernels.md.
    """
    serving, a = machine.serving, quantization.activation_bytes
    if quantization.is_plain:
        time = matmul_time(batch=batch, m=m, n=n, k=k, itemsize=quantization.weight_bytes, machine=machine)
    else:
        model = serving.kernels.weight_product[quantization.kernel]
        tiled = machine.matmul if a < WIDE_ITEMSIZE else serving.widened
        plain = replace(machine.matmul, tiles=tiled.tiles, tile_columns=tiled.tile_columns)
        rates = replace(
            _weight_rates(plain, model, quantization, machine),
            least_waves=machine.matmul.least_waves * model.waves_factor,
            inverse_least_waves=machine.matmul.inverse_least_waves / model.waves_factor,
            inverse_split_depth=machine.matmul.inverse_split_depth / model.split_factor,
        )
        time = rates.floor_time + _quantized_product(batch, m, n, k, quantization, rates)
        if a < WIDE_ITEMSIZE:
            num_bytes, bandwidth = batch * m * k * (WIDE_ITEMSIZE + a), model.cast_fraction * machine.memory.bandwidth
            time = time + casts * (model.cast_time * serving.exposed_floor + num_bytes / bandwidth)
    if untuned >= 1.0:
        return time
    plain = machine.matmul
    compute = (2.0 * batch) * m * n * k / (untuned * plain.flop_rate)
    memory = _product_bytes(batch, m, n, k, quantization) / plain.bandwidth
    return np.maximum(time, plain.floor_time + smooth_maximum(compute, memory, plain.sharpness))


def _product_bytes(batch: Column, m: Column, n: Column, k: Column, quantization: Quantization) -> Any:
    w, a = quantization.weight_bytes, quantization.activation_bytes
    return batch * (w * k * n + a * m * k + WIDE_ITEMSIZE * m * n)


def grouped_weight_time(
    *,
    experts: Column,
    rows: Column,
    tokens: Column,
    hidden_size: Column,
    intermediate_size: Column,
    quantization: Quantization,
    machine: Machine,
    up_projections: Column = 2,
) -> Any:
    """Return the forward time of the experts of a layer on one chip, as one fused call, with weights stored in `quantization`. [s]

    t = t0 + t1 e + P(e, r / e, u i, h) + P(e, r / e, h, i) + 2 (r (3 h + (u + 1) i) + T h) / (b B0)
    P(batch, m, n, k) = (C^p + M^p)^(1/p) of `weight_product_time`, with an additional tile of 16 rows

    Arguments as of `grouped_matmul_time`, to which it is equal without quantization; parameters of `GroupedWeightModel`, which includes
    the quantization of rows.
    The call is a sequence of dependent kernels (choices sorted, rows copied, two products, sums): its floor is fully exposed.
    Source: fitted by `lab.kernels.serving` to aiconfigurator's fused layers with even routing, the fastest of several kernels (on Blackwell
    mxfp4 is multiplied with mxfp8). In 4 bits there is one kernel for experts of few rows and one for those of many: the faster counts.
    Median error of held-out layers: fp8 4-7 %; 4 bits, whose kernels jump from tile to tile, 18-22 %.
    """
    e, r, h, i, u = experts, rows, hidden_size, intermediate_size, up_projections
    serving = machine.serving
    if quantization.is_plain:
        sizes = {"hidden_size": h, "intermediate_size": i, "up_projections": u, "itemsize": quantization.weight_bytes}
        time = grouped_matmul_time(experts=e, rows=r, tokens=tokens, machine=machine, **sizes)
        return time + machine.grouped_matmul.floor_time * (1.0 / max(serving.exposed_floor, 1e-3) - 1.0)
    passes = WIDE_ITEMSIZE * (r * (3 * h + (u + 1) * i) + tokens * h) / machine.memory.bandwidth
    small = machine.grouped_matmul.matmul
    plain = replace(machine.matmul, tiles=small.tiles, tile_columns=small.tile_columns)

    def kernel_time(model: GroupedWeightModel) -> Any:
        rates = _weight_rates(plain, model, quantization, machine)
        rows_per_expert = r / np.maximum(e, 1e-9)  # a step without rows activates no expert
        products = _quantized_product(e, rows_per_expert, u * i, h, quantization, rates) + _quantized_product(
            e, rows_per_expert, h, i, quantization, rates
        )
        return model.floor_time + model.expert_time * e + products + passes / model.row_fraction

    time = kernel_time(serving.kernels.grouped_weight[quantization.kernel])
    few = serving.kernels.grouped_weight.get(quantization.kernel + FEW)
    return time if few is None else np.minimum(time, kernel_time(few))


def _weight_rates(
    plain: MatmulRates, model: WeightProductModel | GroupedWeightModel, quantization: Quantization, machine: Machine
) -> MatmulRates:
    """Return the rates of products with quantized weights, relative to `plain` ones; in 16 bits if the chip has no units for them."""
    return replace(
        plain,
        flop_rate=plain.flop_rate * machine.serving.relative_rate.get(quantization.product, 1.0) * model.rate_fraction,
        bandwidth=plain.bandwidth * model.memory_fraction,
        depth_offset=plain.depth_offset * model.depth_factor,
        sharpness=model.sharpness or plain.sharpness,
    )


def _quantized_product(batch: Column, m: Column, n: Column, k: Column, quantization: Quantization, rates: MatmulRates) -> Any:
    """Return (C^p + M^p)^(1/p) of `weight_product_time`. [s]"""
    memory = _product_bytes(batch, m, n, k, quantization) / rates.bandwidth
    return smooth_maximum(compute_part(batch, m, n, k, rates), memory, rates.sharpness)


def cached_attention_time(
    *,
    batch: Column,
    heads: Column,
    kv_heads: Column,
    key_length: Column,
    head_dim: Column,
    machine: Machine,
    cache_itemsize: float = WIDE_ITEMSIZE,
    queries: Column = 1.0,
    itemsize: float = WIDE_ITEMSIZE,
) -> Any:
    """Return the attention time of a few new tokens per sequence over a cache of keys and values, in 16 or in 8 bits. [s]

    t = t0 + (W^p + C^p + M^p)^(1/p) + Q / (bq B0),   p = 4
    M = V / (b B0) + t1 s(V / V1),   s(x) = x^2 / (1 + x^2),   V = 2 c b d g z,   Q = 4 b d h q
    C = 4 b h q z d / (e R0),   W = w b g / S

    key_length      z  tokens in the cache, the new ones included     kv_heads  g     heads  h     head_dim  d     batch  b
    queries         q  new tokens per sequence, more than 1 if drafted tokens are verified
    cache_itemsize  c  that of queries, or 1                                        [byte]
    itemsize           of an element of queries and outputs                         [byte]
    B0, R0, S       memory bandwidth, FLOP rate in 16 bits, compute units of the chip; the rest of `CachedAttentionModel`

    With a cache in the dtype of the queries it is `attention_decode_time`.
    Source: as that function; fitted by `lab.kernels.serving` to aiconfigurator's generation attention with an fp8 cache (lengths
    from 128, up to 16 query heads per key-value head, head dims 64 and 128). Errors on held-out heads: docs/kernels.md.
    """
    if cache_itemsize == itemsize:
        return attention_decode_time(
            batch=batch,
            heads=heads * queries,
            kv_heads=kv_heads,
            key_length=key_length,
            head_dim=head_dim,
            itemsize=itemsize,
            machine=machine,
        )
    flops = (4.0 * batch * head_dim) * (heads * queries) * key_length
    cache = (2.0 * cache_itemsize) * batch * head_dim * kv_heads * key_length
    others = (2.0 * WIDE_ITEMSIZE) * batch * head_dim * (heads * queries)
    return _cached_time(FP8_CACHE, flops, cache, others, batch * kv_heads, machine)


def latent_decode_time(
    *,
    batch: Column,
    heads: Column,
    key_length: Column,
    machine: Machine,
    latent_dim: Column = 512,
    rotary_dim: Column = 64,
    cache_itemsize: float = WIDE_ITEMSIZE,
    queries: Column = 1.0,
    itemsize: float = WIDE_ITEMSIZE,
) -> Any:
    """Return the attention time of a few new tokens per sequence over a latent cache, with absorbed projections (MLA). [s]

    As `cached_attention_time`, with one vector per token for all heads, which is both key and value:
    V = c b z (l + r),   Q = 2 b h q (2 l + r),   C = 2 b h q z (2 l + r) / (e R0),   W = w b / S

    heads  h  of this chip: all heads with data parallel attention, which is then compute-bound; a share with tensor parallelism, where
              every chip reads the full cache      latent_dim  l     rotary_dim  r

    The two small products with the absorbed weights are not included (`weight_product_time`, a batch of heads).
    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1, absorbed; fitted to aiconfigurator's generation MLA of DeepSeek's dims, 1 to 128
    heads, lengths from 128. The A100's table, of a kernel that reaches a quarter of its memory bandwidth, is not fitted.
    """
    width = 2.0 * latent_dim + rotary_dim
    flops = (2.0 * batch) * (heads * queries) * key_length * width
    cache = cache_itemsize * batch * key_length * (latent_dim + rotary_dim)
    others = itemsize * batch * (heads * queries) * width
    return _cached_time(LATENT_CACHE if cache_itemsize == itemsize else LATENT_FP8_CACHE, flops, cache, others, batch, machine)


def _cached_time(kernel: str, flops: Column, cache: Column, others: Column, sequences: Column, machine: Machine) -> Any:
    """Return the time of a cached attention kernel. [s]

    flops          of both products
    cache, others  bytes of the cache; of queries and outputs
    sequences      multiplied by their key-value heads
    """
    serving = machine.serving
    model, bandwidth = serving.kernels.cached_attention[kernel], machine.memory.bandwidth
    outgrown = cache * (1.0 / model.ramp_bytes)
    square = outgrown * outgrown
    memory = cache / (bandwidth * model.memory_fraction) + model.ramp_time * (square / (1.0 + square))
    compute = flops / (serving.peak_flop_rate * model.peak_fraction)
    units = sequences * (model.wave_time / machine.compute_units)
    p = SMOOTH_MAXIMUM
    longest = np.power(np.power(units, p) + np.power(compute, p) + np.power(memory, p), 1.0 / p)
    return model.floor_time * serving.exposed_floor + longest + others / (bandwidth * model.query_fraction)
