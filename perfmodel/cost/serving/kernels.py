"""How long the kernels take that serving runs and training does not. Elementwise on broadcast arrays, as `perfmodel.cost.compute`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from perfmodel.cost.link_rates import NEVER

if TYPE_CHECKING:
    from perfmodel.cost.compute import Num
    from perfmodel.cost.machine import Machine


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
