"""MoE parallel folding: the expert mesh and the attention mesh as different products of the same finer axes.

world / pp = tp * cp * dp = etp * ep * edp. Both meshes number the ranks alike, tensor parallelism innermost. etp is the inner part of tp.
ep takes the rest of tp, then the inner part of cp, then of the data axis; edp is what remains. So each attention axis is the product of a
part that shards the experts (`..._ep`) and the rest.

Source: MoE Parallel Folding, arXiv 2504.14960; Megatron-LM's expert rank generator (order tp-cp-ep-dp-pp).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from perfmodel.foundation.columns import Column

#: Parts of axes over which experts are sharded.
EXPERT_AXES = ("dp_ep", "cp_ep", "tp_kv_ep", "tp_q_ep")

#: Axis of rule sets -> finer axes of a graph with experts, outermost first. `dp_rest` and `cp_rest`: the parts that experts do not use.
REFINED: Mapping[str, tuple[str, ...]] = {
    "dp_replicate": ("dp_replicate",),
    "dp_shard": ("dp_shard", "dp_ep"),
    "cp": ("cp", "cp_ep"),
    "tp_kv": ("tp_kv_ep", "tp_kv"),
    "tp_q": ("tp_q_ep", "tp_q"),
    "ep": EXPERT_AXES,
    "etp": ("tp_kv", "tp_q"),
    "dp_rest": ("dp_shard",),
    "cp_rest": ("cp",),
}


def expert_parts(*, tp_kv: Column, tp_q: Column, cp: Column, ep: Column, etp: Column) -> dict[str, Any]:
    """Return the size of each of `EXPERT_AXES`, for numbers or columns: etp = tp_q' tp_kv', ep = tp / etp * cp_ep * dp_ep.

    etp fills tp_q before tp_kv, in the order of ranks. Where a size is no integer, the degrees do not fold (`folding_fault`).
    """
    inner = np.minimum(tp_q, etp)
    outer = etp / inner
    tp_parts = tp_kv * tp_q / etp
    left = ep / tp_parts
    cp_part = np.minimum(cp, left)
    return {"dp_ep": left / cp_part, "cp_ep": cp_part, "tp_kv_ep": tp_kv / outer, "tp_q_ep": tp_q / inner}


def data_axis(dp_shard: int) -> str:
    """Return the data axis from which experts take ranks: dp_shard if it has several, else dp_replicate."""
    return "dp_shard" if dp_shard > 1 else "dp_replicate"


def takes_replicas(*, dp_shard: Column, cp: Column, tp: Column, ep: Column, etp: Column) -> Any:
    """Return whether experts are sharded over replicas, for numbers or columns. ZeRO does not shard over replicas and excludes this."""
    return (dp_shard == 1) & (ep * etp > tp * cp)


def foldings(*, num_experts: int, width: int, tp_kv: int, tp_q: int, cp: int, data: int) -> list[tuple[int, int]]:
    """Return every (ep, etp) that folds over these degrees and shards experts evenly; etp is tp or 1."""
    tp = tp_kv * tp_q
    pairs = []
    for etp in dict.fromkeys((tp, 1)):
        for ep in range(1, min(num_experts, tp // etp * cp * data) + 1):
            if num_experts % ep or width % etp:
                continue
            if not folding_fault(tp_kv=tp_kv, tp_q=tp_q, cp=cp, data=data, ep=ep, etp=etp):
                pairs.append((ep, etp))
    return pairs


def folding_fault(*, tp_kv: int, tp_q: int, cp: int, data: int, ep: int, etp: int) -> str:
    """Return why these degrees do not fold; "" if they do. data: size of the data axis from which experts take ranks."""
    tp = tp_kv * tp_q
    if tp % etp:
        return f"etp={etp}: must divide tp={tp}; use a divisor of it"
    if ep % (tp // etp):
        rule = f"must be a multiple of tp/etp={tp // etp}, because experts are split over tp/etp ranks of tp"
        return f"ep={ep}: {rule}; use ep={tp // etp}, or etp={tp} (--etp {tp}, Megatron's --expert-tensor-parallel-size)"
    left = ep // (tp // etp)
    if left > 1 and left % cp and cp % left:
        return f"ep={ep}: takes {left} ways of cp and the data axes, and neither divides cp={cp} nor is a multiple of it; use another ep"
    if data % max(left // cp, 1):
        return f"ep={ep}: takes {left // cp} ways of the data axis, which has {data}: must divide it; use a smaller ep, or more chips"
    parts = expert_parts(tp_kv=tp_kv, tp_q=tp_q, cp=cp, ep=ep, etp=etp)
    if any(float(part) != int(part) for part in parts.values()):
        return f"etp={etp}: does not factor with tp={tp}, of which {tp_kv} ways cut key-value heads; use etp=1 or etp={tp}"
    return ""
