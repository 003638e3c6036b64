"""Time of one operator on one chip: matrix multiplies, streaming kernels, fused attention, also of a sequence that ranks share.

All functions are elementwise on broadcast arrays, so that a row of a batch equals the single evaluation to the bit. Efficiency is a
smooth function of the shape with few parameters (see `perfmodel.hardware.calibration`).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.machine import AttentionRates, Machine, MatmulRates
from perfmodel.foundation.columns import Column
from perfmodel.hardware.calibration import KERNEL_CODE, KernelClass
from perfmodel.workload.causal import CausalWindow

Array = NDArray[np.float64]

STACK_LIMIT = 8192
"""Largest number of elements for which all tiles are evaluated in one array. Beyond it tiles are evaluated one by one, so that temporaries
stay in cache. The bits are the same.
"""


def matmul_time(
    *, batch: Column, m: Column, n: Column, k: Column, itemsize: Column, machine: Machine, rates: MatmulRates | None = None
) -> Any:
    """Return the time of a batch of matrix multiplies [m, k] x [k, n]. [s]

    t = t0 + (C^p + M^p)^(1/p)
    C = min over tiles of  max(wq, w0) * S * tm * tn * (1 + q * m0) * 2 (k max(r, D / (D + k)) + k0) / R
    wq = (1 - a) * w + a * ceil(w),   w = batch * ceil(m / tm) * ceil(n / tn) / S,   r = min(w / w0, 1)
    M = itemsize * batch * (m k + k n + m n) / B

    itemsize  bytes of an element of all three matrices                                         [byte]
    rates     of another kernel than the machine's plain one
    R   achieved FLOP rate (peak * clock * peak_fraction)         B   achieved memory bandwidth
    S   compute units    tm, tn  output tile    q  its penalty exponent    a, k0, m0, p, t0  calibration

    The last wave of tiles costs up to a full wave: time is that of S * wq tiles. The library is assumed to choose the best tile. With few
    tiles, a tile takes at least w0 of its time in a full wave, because it has more cache and power. Then (r < 1) idle units also split a
    long contraction, as far as there are enough of them, and less so the shorter k is (D: split-k, stream-k).
    Source: wave and tile quantisation as in NVIDIA, Matrix Multiplication Background User's Guide; the rest is fitted.
    """
    rates = rates or machine.matmul
    compute = compute_part(batch, m, n, k, rates)
    memory = batch * (m * (k + n) + k * n) * (itemsize / rates.bandwidth)
    return rates.floor_time + smooth_maximum(compute, memory, rates.sharpness)


def smooth_maximum(first: Column, second: Column, sharpness: float) -> Any:
    """(a^p + b^p)^(1/p)"""
    return np.power(np.power(first, sharpness) + np.power(second, sharpness), 1.0 / sharpness)


def compute_part(batch: Column, m: Column, n: Column, k: Column, rates: MatmulRates) -> Any:
    """Return C of `matmul_time`. [s]"""
    depths = () if rates.fills_units else (k * rates.inverse_least_waves, k, k / (1.0 + k * rates.inverse_split_depth))
    if np.broadcast(batch, m, n, *depths).size <= STACK_LIMIT:
        shape = (-1,) + (1,) * max(np.ndim(batch), np.ndim(m), np.ndim(n), *map(np.ndim, depths))
        inverse_m, inverse_n, weight = rates.tile_columns.reshape(3, *shape)
        work = _tile_work(batch, m, n, depths, inverse_m, inverse_n, weight, rates).min(axis=0)  # a minimum is exact in any order
    else:
        work = _tile_work(batch, m, n, depths, *rates.tiles[0], rates)
        for tile in rates.tiles[1:]:
            np.minimum(work, _tile_work(batch, m, n, depths, *tile, rates), out=work)
    scale = 2.0 * rates.compute_units / rates.flop_rate
    time = work * (scale if depths else (k + rates.depth_offset) * scale)
    return np.minimum(time, few_rows_part(batch, m, n, k, rates)) if rates.few_rows else time


def few_rows_part(batch: Column, m: Column, n: Column, k: Column, rates: MatmulRates) -> Any:
    """Return C of a kernel for products of few rows, which pads nothing and reaches half of the rate. [s]

    C = 2 batch n k max(2 m, mu) / R,   mu `MatmulModel.few_rows`
    """
    return np.maximum(2.0 * m, rates.few_rows) * (batch * n * k) * (2.0 / rates.flop_rate)


def grouped_matmul_time(
    *,
    experts: Column,
    rows: Column,
    tokens: Column,
    hidden_size: Column,
    intermediate_size: Column,
    itemsize: Column,
    machine: Machine,
    up_projections: Column = 2,
) -> Any:
    """Return the forward time of a layer's experts on one chip, as one fused call: two grouped products and passes over rows. [s]

    t = t0 + t1 e + P(e, r / e, u i, h) + P(e, r / e, h, i) + s (r (3 h + (u + 1) i) + T h) / B
    P(batch, m, n, k) = (C^p + M^p)^(1/p) of `matmul_time`, with its tiles (and one of 16 rows), waves and depths, at rates f R and g B

    experts            e  experts of this chip that have rows; their weights are read once           [-]
    rows               r  (token, expert) pairs that the chip computes; r / e to each expert          [-]
    tokens             T  input tokens of the chip, for which it writes the sum of experts            [-]
    hidden_size        h  of the layer     intermediate_size  i  of an expert, this chip's share of it
    up_projections     u  2 with a gate and an up projection, 1 without a gate
    itemsize           s  bytes of an element of weights and activations                              [byte]
    f, g, t0, t1       of `GroupedMatmulModel`; B: memory bandwidth that the passes over rows reach   [byte/s]

    Rows are copied in the order of their experts (2 r h), pass the activation (r (u + 1) i) and are added up for each token (r h + T h).
    Rows of an expert are padded to full tiles: few rows cost a full tile, or the read of the weights. Rows are assumed to be even: routing
    by a power law (exponents 1.01, 1.2) took 4-9 % longer for the same number of rows.
    f may exceed 1: the fit cannot separate the rate of the products from the time of the passes over rows.
    Source: as `matmul_time`, on which this is based; f, g, B, t0, t1 are fitted to TensorRT-LLM's fused kernel (aiconfigurator's tables) by
    `lab.kernels.chip_kernels`. Median error of layers that no fit saw, bf16: H100 and H200 4 %, B200 6 %, A100 9 %; fp8: 6-7 %.
    """
    e, r, h, i, u = experts, rows, hidden_size, intermediate_size, up_projections
    rates = machine.grouped_matmul
    up = matmul_time(batch=e, m=r / e, n=u * i, k=h, itemsize=itemsize, machine=machine, rates=rates.matmul)
    down = matmul_time(batch=e, m=r / e, n=h, k=i, itemsize=itemsize, machine=machine, rates=rates.matmul)
    passes = (r * (3 * h + (u + 1) * i) + tokens * h) * (itemsize / rates.row_bandwidth)
    return rates.floor_time + rates.expert_time * e + (up + down) + passes


def grouped_product_time(*, batch: Column, m: Column, n: Column, k: Column, itemsize: Column, machine: Machine) -> Any:
    """Return the time of one product of each of `batch` experts in training, forward or a gradient: one plain product an expert. [s]

    t = t0 batch + P(batch, m, n, k),   t0 and P of `matmul_time`

    batch  experts of this chip
    m      rows of one expert; they fill their own tiles, so few rows cost a full tile

    If a recipe's scales require it, m, n and k are padded to a multiple (`Machine.row_multiple`). The rows are m of forward and
    input-gradient products, and k of weight-gradient products.

    The fused kernel of serving (`grouped_matmul_time`) reaches 1.4 times these rates on B200.
    Source: Transformer Engine's GroupedLinear, which multiplies expert by expert with cuBLAS; the rates of SimuMax's 108 such products on
    B200 with 128 to 9,832 rows are those of plain products plus 2 to 5 us an expert.
    """
    if machine.row_multiple > 1.0:
        m, n, k = (np.ceil(size / machine.row_multiple) * machine.row_multiple for size in (m, n, k))
    return machine.matmul.floor_time * (batch - 1.0) + matmul_time(batch=batch, m=m, n=n, k=k, itemsize=itemsize, machine=machine)


def convolution_time(*, batch: Column, m: Column, n: Column, k: Column, num_bytes: Column, itemsize: Column, machine: Machine) -> Any:
    """Return the time of a convolution, or of one of its gradients, as a batch (groups) of products [m, k] x [k, n]. [s]

    t = t0 + 2 batch m n (k + k0) / R + V / B

    num_bytes  V  of input, weight and output: k repeats an entry of the input for every window that holds it   [byte]
    R, B          achieved FLOP rate and memory bandwidth    k0, t0  calibration

    Without measured convolutions: a matrix multiply of that size.
    """
    rates = machine.convolution
    if rates is None:
        return matmul_time(batch=batch, m=m, n=n, k=k, itemsize=itemsize, machine=machine)
    return rates.floor_time + batch * m * n * (k + rates.depth_offset) * (2.0 / rates.flop_rate) + num_bytes / rates.bandwidth


def _tile_work(
    batch: Column,
    m: Column,
    n: Column,
    depths: tuple[Column, ...],
    inverse_m: Column,
    inverse_n: Column,
    weight: Column,
    rates: MatmulRates,
) -> Any:
    """Return the work of each compute unit with one tile or a stack of tiles.

    The work is in multiplies, or in output elements if the number of tiles does not matter. Tile sides are powers of two: exact.

    depths  contraction lengths: k / w0, k, and the shortest after a split; none if a few tiles cost no more
    """
    waves = np.ceil(m * inverse_m) * np.ceil(n * inverse_n) * batch / rates.compute_units
    paid = waves * (1.0 - rates.wave_softness) + np.ceil(waves) * rates.wave_softness if rates.wave_softness else waves
    if not depths:
        return paid * weight
    spread, depth_of_k, shortest = depths
    depth = np.maximum(np.minimum(waves * spread, depth_of_k), shortest) + rates.depth_offset
    return np.maximum(paid, rates.least_waves) * weight * depth


def streaming_time(
    *, num_bytes: Column, num_elements: Column, kernel_class: KernelClass | NDArray[np.integer], machine: Machine, backward: Column = 0
) -> Any:
    """Return the time of a kernel that streams over memory: elementwise, normalisation, softmax, lookup, optimizer. [s]

    t = t0 + V * (1 / B0 + sum over caches of (1 / B_next - 1 / B_cache) * s(V / capacity)) + N * e,   s(x) = x^2 / (1 + x^2)

    num_bytes     V  read and written                                                          [byte]
    num_elements  N  elements of the output                                                    [-]
    kernel_class     a class, or an array of codes (`KERNEL_CODE`) that broadcasts against V
    backward         1 for the class's backward kernel, which takes `backward_factor` times as long; 0 else
    B0               achieved bandwidth of the innermost level in the class's model; e  [s] for each element

    With a floor, bandwidth saturates: half of it is reached at V = t0 * B. s is a smooth step from the bandwidth of one cache to the next.
    """
    V, N = num_bytes, num_elements
    rates = machine.streaming
    code = KERNEL_CODE[kernel_class] if isinstance(kernel_class, str) else kernel_class
    # for columns of machines, the last dim of `code` is the machine
    has_columns = rates.table.ndim > 2
    floor_time, inverse_bandwidth, element_time = table_entries(rates.table, code, has_columns=has_columns)
    for cache in rates.caches:
        inverse_capacity, step = table_entries(cache, code, has_columns=has_columns)
        x = V * inverse_capacity
        square = x * x
        inverse_bandwidth = inverse_bandwidth + step * (square / (1.0 + square))
    time = floor_time + V * inverse_bandwidth + N * element_time
    return time * (1.0 + backward * (rates.backward[code] - 1.0)) if rates.has_backward else time


def attention_time(
    *,
    batch: Column,
    heads: Column,
    kv_heads: Column,
    query_length: Column,
    key_length: Column,
    head_dim: Column,
    causal_fraction: Column,
    itemsize: Column,
    machine: Machine,
    kernel: str = "flash",
    value_head_dim: Column | None = None,
    is_backward: bool = False,
) -> Any:
    """Return the time of a fused attention kernel, forward or backward. [s]

    t = t0 + C + M; backward t0 + 2.5 / rate * C + 2 M
    C = 4 tile S wq f / R * (z (d + d0) + s1),   wq = (1 - a) * w + a * ceil(w),   w = b h ceil(q / tile) / S
    M = itemsize * b * d * (2 h q + 2 g z) / B

    d                   entries of a head; if values have another size (value_head_dim), the mean over the products (`head_width`)
    causal_fraction  f  share of the q x z scores that is computed (causal, q = z: 1/2)
    kv_heads         g  heads of keys and values: they count in memory only

    Query blocks are padded to full tiles; waves are quantised to the degree a. Backward has five products instead of two, at another rate.
    It reads q, k, v, o, do and writes dq, dk, dv.
    Source: the shape of Dao, FlashAttention-2 (2023): one thread block for each block of queries; offsets are fitted.
    """
    rates = machine.attention[kernel]
    model, values = rates.model, head_dim if value_head_dim is None else value_head_dim
    waves = np.ceil(query_length / model.query_tile) * (batch * heads) / rates.compute_units
    paid = waves * (1.0 - model.wave_softness) + np.ceil(waves) * model.wave_softness
    keys = key_length * (head_width(head_dim, values, is_backward=is_backward) + model.head_dim_offset) + model.sequence_offset
    compute = paid * causal_fraction * keys * (4.0 * model.query_tile * rates.compute_units / rates.flop_rate)
    if is_backward:
        compute = compute * (model.backward_flops / model.backward_rate)
    if rates.long is not None:
        # the last query sees twice the mean of keys under a causal mask, else those of the sliding window
        seen = key_length * np.minimum(1.0, 2.0 * causal_fraction)
        rate = rates.flop_rate * model.backward_rate if is_backward else rates.flop_rate
        compute = _at_long_sequence_rate(compute, seen, rates.long[int(is_backward)], rate, rates)
    passes = 4.0 if is_backward else 2.0
    memory = (
        (heads * query_length + kv_heads * key_length) * (batch * head_width(head_dim, values)) * (itemsize * (passes / rates.bandwidth))
    )
    return rates.floor_time + compute + memory


def head_width(head_dim: Column, value_head_dim: Column, *, is_backward: bool = False) -> Column:
    """Return the mean head size of fused attention's products. Forward: scores, and weighted values.

    Backward: scores, gradients of queries and keys; gradients of values and weights.
    """
    return (3 * head_dim + 2 * value_head_dim) / 5 if is_backward else (head_dim + value_head_dim) / 2


LONG_KEYS = 2.0**16
"""Number of keys at which attention's clock is half way between two values. Over few keys it is the clock of the step's mean power, set by
the matrix multiplies around it; over many keys it is the clock of attention's own power. The value is ours. Published runs of up to 32k
tokens show the first (torchtitan's, Composer's), those of 500k and more the second, and prime-rl's trainer at 64k lies between (0.6B to
8B on H100 and H200). The value was chosen with these runs in view, later runs of that trainer among them.
"""

_LONG_HEAD_DIM = 128.0


def _at_long_sequence_rate(compute: Column, keys: Column, long_rate: float, short_rate: float, rates: AttentionRates) -> Any:
    """Return C of attention over many keys, from C over few. [s]

    C (1 - s(z / Z) (1 - r)),   s(x) = x^2 / (1 + x^2),   r = (R / L) 128 / (128 + d0)

    keys  z   that the last query sees
    R, L      rates over few and over many keys (`SustainedRates.long_attention`)     Z  `LONG_KEYS`     d0  as in `attention_time`

    Where attention is most of a step, the chip runs at the clock that attention's power permits, however ranks share the queries.
    Source: the form is ours. Rates: what kernels reach in benchmarks of long sequences (Dao 2023, FlashAttention-2; Shah et al. 2024,
    FlashAttention-3), under the sustained clock of an A100, .95. With them runs of a million tokens on H100 (TRL's with cuDNN and
    FlashAttention-2, ArcticTraining's with FlashAttention-2) are predicted within 8 %, none of which these rates come from.
    """
    ratio = short_rate / long_rate * (_LONG_HEAD_DIM / (_LONG_HEAD_DIM + rates.model.head_dim_offset))
    square = (keys / LONG_KEYS) ** 2
    return compute * (1.0 - square / (1.0 + square) * (1.0 - ratio))


SMOOTH_MAXIMUM = 4.0
"""Exponent p of (a^p + b^p)^(1/p): at most 19 % above the larger of the two."""


def attention_decode_time(
    *,
    batch: Column,
    heads: Column,
    kv_heads: Column,
    key_length: Column,
    head_dim: Column,
    itemsize: Column,
    machine: Machine,
    kernel: str = "flash",
) -> Any:
    """Return the time of fused attention in decode: one new token a sequence against its KV cache, split over units as needed. [s]

    t = t0 + (W^p + M^p)^(1/p),   p = 4
    M = V / B + t1 s(V / V1),   s(x) = x^2 / (1 + x^2),   V = 2 itemsize b d (g z + h),   W = w b g / S

    key_length  z  tokens in the cache, the new one included     kv_heads  g     heads  h     head_dim  d     batch  b
    itemsize       bytes of an element of the cache, of the query and of the output                          [byte]
    B, t0, t1, V1, w   of `DecodeAttentionModel`     S  compute units

    Decode streams the cache. With t0 and t1 bandwidth saturates, so small caches reach a small fraction of it. t1 applies if the KV cache
    of one layer exceeds the chip's own cache (V1). Tables repeat one call, so below V1 they find the data there; a model of many layers
    does not.
    Each (sequence, key-value head) occupies a unit for w at least, which dominates if there are many short sequences.
    Source: the form is ours; parameters are fitted by `lab.kernels.chip_kernels` to aiconfigurator's generation attention (lengths
    from 128, up to 16 query heads to a key-value head, head dims 64 and 128). Median error of heads that no fit saw, bf16: B200 3 %,
    H100 6 %, A100 7 %, H200 9 %; caches over 200 MB: 1-8 %.
    """
    rates = machine.serving.decode_attention[kernel]
    num_bytes = (kv_heads * key_length + heads) * (batch * head_dim) * (2.0 * itemsize)
    outgrown = num_bytes * rates.inverse_ramp_bytes
    square = outgrown * outgrown
    memory = num_bytes / rates.bandwidth + rates.ramp_time * (square / (1.0 + square))
    units = batch * kv_heads * rates.unit_time
    return rates.floor_time + np.power(np.power(units, SMOOTH_MAXIMUM) + np.power(memory, SMOOTH_MAXIMUM), 1.0 / SMOOTH_MAXIMUM)


# --- attention of a sequence that several ranks share -----------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBehaviour:
    """How context-parallel ranks share the work of fused attention.

    mask                   None: every query sees every key
    shared_rate_fraction   rate of the kernel with shared queries over its rate without
    """

    mask: CausalWindow | None
    is_head_tail: bool
    shared_rate_fraction: float


SHARED_BLOCK = 32768.0
"""Keys of a rank's block in the runs that measured the slow-down of attention with shared queries (torchtitan's, December 2024)."""


def attention_share(behaviours: AttentionBehaviour, num_chunks: Array, num_keys: Array) -> Array:
    """Return the scores that the slowest rank of fused attention computes, over the square of its queries and all keys. [-]

    num_chunks  ranks that share the queries of a sequence
    num_keys    of the sequence

    A lower kernel rate with shared queries is modelled as more scores at the full rate. The overhead (sending blocks, merging partial
    results) grows with the length of a block, and the scores with its square. Long blocks therefore amortise it.
    """
    seen = 1.0 if behaviours.mask is None else behaviours.mask.over(num_keys).seen_by_slowest(num_chunks, head_tail=behaviours.is_head_tail)
    overhead = (1.0 / behaviours.shared_rate_fraction - 1.0) * np.minimum(1.0, SHARED_BLOCK * num_chunks / num_keys)
    return np.asarray(np.where(num_chunks > 1.0, seen * (1.0 + overhead), seen))


def table_entries(table: NDArray[np.float64], code: Any, *, has_columns: bool) -> NDArray[np.float64]:
    """Return table[..., code], of shape [..., *code.shape].

    With `has_columns` the table is [..., code, column], and the last dim of `code` are its columns.
    """
    if not has_columns:
        return table[..., code]
    return table[..., code, :] if np.ndim(code) == 0 else table[..., code[..., 0], :]
