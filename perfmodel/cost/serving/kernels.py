"""How long the kernels take that serving runs and training does not. Elementwise on broadcast arrays, as `perfmodel.cost.compute`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from perfmodel.cost.compute import compute_part, matmul_time, smooth_maximum
from perfmodel.cost.link_rates import NEVER

if TYPE_CHECKING:
    from perfmodel.cost.compute import Num
    from perfmodel.cost.machine import Machine
    from perfmodel.workload.quantization import Quantization

WIDE_ITEMSIZE = 2.0
"""Bytes of an element of what products read before it is narrowed, and of what they write."""


def small_all_reduce_time(num_bytes: Num, group_size: Num, machine: Machine) -> Any:
    """An all-reduce by the kernels that serving engines bring along, of ranks that read each other's memory (one node, NVLink). [s]

    t = min(a1 + c1 (n - 1) + V (n - 1) / B1,  a2 + c2 (n - 1) + 2 V (n - 1) / n / B2)

    num_bytes   V    the buffer of each rank    [byte]
    group_size  n    ranks                      [-]
    a, c, B     of `SmallAllReduceModel`, one-shot and two-shot: each rank reads all of V from every peer; or its share of it, and then the
                others' sums. On a full mesh few peers leave links idle, as in `collective_time`.

    0 for one rank; never the cheapest (1e30) for ranks of several nodes, or that cannot read each other's memory. It is small messages'
    time alone: the caller takes the least of it and `collective_time`. Where both start together: engines see ranks arrive one after
    the other, which this does not hold.
    Source: the form is that of the custom all-reduce of TensorRT-LLM and vLLM; fitted by `perfmodel.lab.kernels.all_reduce` to
    aiconfigurator's tables of it (2, 4 and 8 ranks) where it beats NCCL. Median error on decades of sizes that no fit saw: docs/kernels.md.
    """
    rates = machine.serving.all_reduce
    n = group_size
    peers = n - 1.0
    base, each, seconds = rates.one_shot
    slowdown = np.maximum(rates.mesh / np.maximum(peers, 1.0), 1.0)
    one_shot = base + each * peers + num_bytes * peers * (seconds * slowdown)
    base, each, seconds = rates.two_shot
    two_shot = base + each * peers + 2.0 * num_bytes * (peers / n) * (seconds * slowdown)
    time = np.minimum(one_shot, two_shot) * np.minimum(peers, 1.0)
    return np.where(n <= rates.most_ranks, time, np.where(n > 1, NEVER, 0.0))


def weight_product_time(*, m: Num, n: Num, k: Num, quantization: Quantization, machine: Machine, batch: Num = 1.0, casts: Num = 0.0) -> Any:
    """A batch of products of activations [m, k] with weights [k, n] held in `quantization`. [s]

    t = t0 + (C^p + M^p)^(1/p) + x (t1 + batch m k (2 + a) / (q B0))
    M = batch (w k n + a m k + 2 m n) / B

    w, a    bytes of an element of the weights and of the activations, scales included (`Quantization`)       [byte]
    casts   x  share that shows of a pass before the product which narrows the activations: 0 where a norm, an activation function or a
               collective before writes them narrow, 1 where the pass is a kernel of its own. It has no part in formats with a = 2.
    C       of `matmul_time`, at the rate of what the products are computed in; t0 the floor of products in 16 bits
    B0      memory bandwidth; the rest of `WeightProductModel`

    In 16 bits it is `matmul_time`. Where the chip has no units for the format's products they are computed in 16 bits.
    The tables' floors of 6-15 us in 8 and 4 bits are those of the pass before the product: with it the fp8 tables of H100, H200 and B200
    are 3-5 % off, without it 7-9 % and one shape in ten by more than 30 %.
    Source: fitted by `perfmodel.lab.kernels.weight_products` to aiconfigurator's products; formats that a chip's tables lack: the shares
    of the plain products' rates that another chip reaches. Errors on weights that no fit saw: docs/kernels.md.
    """
    if quantization.is_plain:
        return matmul_time(batch=batch, m=m, n=n, k=k, itemsize=WIDE_ITEMSIZE, machine=machine)
    serving = machine.serving
    model = serving.weight_product[quantization.name]
    rates = serving.product_rates(quantization.name, quantization.product)
    w, a = quantization.weight_bytes, quantization.activation_bytes
    compute = compute_part(batch, m, n, k, rates)
    memory = batch * (w * k * n + a * m * k + WIDE_ITEMSIZE * m * n) / rates.bandwidth
    time = rates.floor_time + smooth_maximum(compute, memory, rates.sharpness)
    if a >= WIDE_ITEMSIZE:
        return time
    cast = model.cast_time + batch * m * k * (WIDE_ITEMSIZE + a) / (model.cast_fraction * serving.memory_bandwidth)
    return time + casts * cast
