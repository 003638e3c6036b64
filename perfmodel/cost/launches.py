"""Host launches of a pass of a region: kernels of its operators, as a framework runs the graph, and collectives.

The host runs ahead of the chip, so a pass takes what the chip needs or what its launches need, whichever is more (`cost/step.py`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.evaluate import has_several, summed
from perfmodel.cost.rows import TimedRows
from perfmodel.frameworks.profile import ExecutionProfile
from perfmodel.frameworks.rewrites import ENTRYWISE
from perfmodel.frameworks.settings import GRAPH_LAUNCH
from perfmodel.parallel.algebra.derive import Amount, extent_amount
from perfmodel.parallel.algebra.sharding import Sharding
from perfmodel.parallel.eager import KERNELS
from perfmodel.workload.graph import CacheAttention, FusedAttention, Graph, Operator, RoutedExperts, Stream, Work

Array = NDArray[np.float64]

FORWARD = 2.0
"""Host time of a kernel that Python's modules launch in a forward pass, over that of one that autograd's engine does in a backward pass:
22 against 11 us with torch 2.13 on tensors of no size, eight layers of GPT-2 on a core of an EPYC."""

ATTENTION_BACKWARD = 3.0
"""Kernels of a fused attention's backward pass: sums of rows, the pass itself, the gradient of the queries to its dtype (flash-attn)."""


def kernels_of(graph: Graph, profile: ExecutionProfile) -> dict[str, tuple[float, float]]:
    """Kernels of each operator's forward and backward pass, of a graph as the framework runs it (`with_habits`); views are none.

    A chain that is one kernel counts with its last operator. Each weight's gradient counts once more: a kernel adds it to those before,
    or, where the product that makes it has done so, its hook says that it is ready.
    """
    scope = profile.kernels.graph_scope
    parts = graph_parts(graph) if scope else {}
    kernels: dict[str, tuple[float, float]] = {}
    for op in graph.operators:
        if op.kind in ENTRYWISE and not graph.tensors[op.output.tensor].is_stored:
            kernels[op.name] = 0.0, 0.0
            continue
        forward, backward = (float(sum(map(_kernels, works))) for works in (op.forward, op.backward))
        backward += (ATTENTION_BACKWARD - 1.0) * sum(isinstance(work, FusedAttention) for work in op.backward)
        if op.kind in KERNELS:
            # the profile's traffic lies between that of one kernel and that of separate ones
            kind = KERNELS[op.kind]
            share = max(0.0, (profile.option(kind.traffic) - 1.0) / (kind.eager_traffic - 1.0))
            forward, backward = forward * (1.0 + (kind.forward - 1) * share), backward * (1.0 + (kind.backward - 1) * share)
        if op.backward:
            backward += sum(map(graph.is_trained, op.inputs))
        if parts.get(op.name) in scope:
            share = min(GRAPH_LAUNCH / profile.timing.host_launch_time, 1.0)
            forward, backward = share * forward, share * backward
        kernels[op.name] = forward, backward
    return kernels


def graph_parts(graph: Graph) -> dict[str, str]:
    """The part of Megatron-LM's --cuda-graph-scope that launches each operator: `attn` up to the norm of the feed-forward, `moe_router`
    from there to the choice of experts, `mlp` of a dense layer. Operators outside of blocks and from the exchange of tokens on have none.
    """
    parts: dict[str, str] = {}
    for region in graph.regions:
        operators = graph.operators_of(region.name) if region.is_block else []
        has_experts, part = any(op.kind == "route" for op in operators), "attn"
        for op in operators:
            if op.name_in_layer == "mlp_norm":
                part = "moe_router" if has_experts else "mlp"
            parts[op.name] = part
            if op.kind == "route":
                break
    return parts


def _kernels(work: Work) -> int:
    match work:
        case FusedAttention() | CacheAttention() | RoutedExperts():
            return 1
        case Stream() if not work.accesses or work.is_launched_along:
            return 0
    return work.repeats


FUSED_MATRICES, BY_HAND = 4.0, 4.0
"""Megatron's fused softmax takes a multiple of so many matrices of scores (sequences times heads of a rank). Other numbers are scaled,
masked, and cast to float32 and back by so many kernels more, in each pass (NVIDIA/Megatron-LM, megatron/model/fused_softmax.py)."""


def score_matrices(op: Operator, sharding: Sharding, profile: ExecutionProfile) -> Amount | None:
    """Number of score matrices, a multiple of `FUSED_MATRICES` for Megatron's fused causal softmax; None for other operators."""
    if op.kind != "softmax" or not op.settings.get("causal_queries") or profile.activations.softmax_keeps_float32:
        return None
    rows = {op.settings["over"], op.settings["causal_queries"]}
    return extent_amount(op, sharding, tuple((op.dims[dim], dim) for dim in op.output.dims if dim and dim not in rows))


def collective_launches(rows: TimedRows, sizes: Array) -> Any:
    """[traffic segments, columns] collectives that are issued: those of a group of more than one. `sizes`: of the groups, by mask."""
    return summed(has_several(rows.traffic.columns["group"], sizes), rows.traffic, rows.num_traffic_segments)


def counted_launches(rows: TimedRows, sizes: Array) -> Array | None:
    """[traffic segments, columns] those of `collective_launches` before which the host waits for their sizes; None where none is."""
    counted = rows.traffic.columns["counted"]
    if not counted.any():
        return None
    return summed(has_several(rows.traffic.columns["group"], sizes) * counted[:, None], rows.traffic, rows.num_traffic_segments)


def graph_launches(graph: Graph, profile: ExecutionProfile) -> float:
    """Kernels of a microbatch, of all regions together, one of a forward pass as `FORWARD`."""
    counts = {region.name: region.count for region in graph.regions}
    readers = [graph.consumers(op.output.tensor) for op in graph.operators if graph.tensors[op.output.tensor].has_gradient]
    # gradients of several readers are added, a kernel for each reader after the first
    total = float(sum(counts[reader.layer] for tensor_readers in readers for reader, _ in tensor_readers[1:]))
    kernels = kernels_of(graph, profile)
    for op in graph.operators:
        forward, backward = kernels[op.name]
        total += counts[op.layer] * (FORWARD * forward + backward)
    return total
