"""Host launches of a pass of a region: kernels of its operators, as a framework runs the graph, and collectives.

The host runs ahead of the chip, so a pass takes the longer of its device time and its launch time (`cost/step.py`).
"""

from __future__ import annotations

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
from perfmodel.workload.graph import Graph, Operator
from perfmodel.workload.work import CacheAttention, FusedAttention, RoutedExperts, Stream, Work

Array = NDArray[np.float64]

FORWARD = 2.0
"""Host time of a forward kernel, launched by Python modules, over that of a backward kernel, launched by autograd's engine: 22 against
11 us with torch 2.13 on empty tensors, eight layers of GPT-2 on a core of an EPYC.
"""

ATTENTION_BACKWARD = 3.0
"""Kernels of fused attention's backward pass: row sums, the pass itself, the cast of the query gradient (flash-attn)."""


def kernels_of(graph: Graph, profile: ExecutionProfile) -> dict[str, tuple[float, float]]:
    """Return the kernels of each operator's forward and backward pass, for a graph as the framework runs it (`with_behaviour`).

    Views launch no kernel. A fused chain counts with its last operator. Each weight gradient counts one more: a kernel adds it to the
    accumulator, or, if the matrix product has accumulated it already, its hook runs.
    """
    scope = profile.kernels.graph_scope
    parts = graph_parts(graph) if scope else {}
    kernels: dict[str, tuple[float, float]] = {}
    for op in graph.operators:
        if op.kind in ENTRYWISE and not graph.tensors[op.output.tensor].is_stored:
            kernels[op.name] = 0.0, 0.0
            continue
        forward, backward = float(sum(map(_kernels, op.forward))), float(sum(map(_kernels, op.backward)))
        if op.is_attention:
            backward += (ATTENTION_BACKWARD - 1.0) * sum(isinstance(work, FusedAttention) for work in op.backward)
        if op.kind in KERNELS:
            # the profile's traffic lies between that of one fused kernel and that of separate kernels
            kind = KERNELS[op.kind]
            share = max(0.0, (getattr(profile.kernels, kind.traffic) - 1.0) / (kind.eager_traffic - 1.0))
            forward, backward = forward * (1.0 + (kind.forward - 1) * share), backward * (1.0 + (kind.backward - 1) * share)
        if op.backward:
            backward += sum(operand.tensor in graph.trained for operand in op.inputs)
        if parts.get(op.name) in scope:
            share = min(GRAPH_LAUNCH / profile.timing.host_launch_time, 1.0)
            forward, backward = share * forward, share * backward
        kernels[op.name] = forward, backward
    return kernels


def graph_parts(graph: Graph) -> dict[str, str]:
    """Return the part of Megatron-LM's --cuda-graph-scope that launches each operator.

    `attn` reaches up to the norm of the feed-forward, `moe_router` from there to the choice of experts; `mlp` is that of a dense layer.
    Operators outside of blocks, and those from the token exchange on, have no part.
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
"""Megatron's fused softmax requires a multiple of 4 score matrices (sequences times heads of a rank). Other numbers take 4 more kernels
in each pass: scaling, masking, and casts to float32 and back (NVIDIA/Megatron-LM, megatron/model/fused_softmax.py).
"""


def score_matrices(op: Operator, sharding: Sharding, profile: ExecutionProfile) -> Amount | None:
    """Return the number of score matrices of Megatron's fused causal softmax, a multiple of `FUSED_MATRICES`; None for other operators."""
    if op.kind != "softmax" or not op.settings.get("causal_queries") or profile.activations.softmax_keeps_float32:
        return None
    rows = {op.settings["over"], op.settings["causal_queries"]}
    return extent_amount(op, sharding, tuple((op.dims[dim], dim) for dim in op.output.dims if dim and dim not in rows))


def collective_launches(rows: TimedRows, sizes: Array) -> tuple[Array, Array | None]:
    """Return [traffic segments, columns] issued collectives: those of groups of more than one rank. sizes: of the groups, by mask.

    The second are those before which the host waits for counted sizes; None: there are none.
    """
    traffic, number, counted = rows.traffic, rows.num_traffic_segments, rows.traffic.columns["counted"]
    issued = has_several(traffic.columns["group"], sizes)
    return summed(issued, traffic, number), summed(issued * counted[:, None], traffic, number) if counted.any() else None


def graph_launches(graph: Graph, profile: ExecutionProfile) -> float:
    """Return the kernels of a micro-batch over all regions; a forward kernel counts as `FORWARD`."""
    counts = {region.name: region.count for region in graph.regions}
    readers = [graph.consumers(op.output.tensor) for op in graph.operators if graph.tensors[op.output.tensor].has_gradient]
    # gradients from several readers are added: one kernel for each reader after the first
    total = float(sum(counts[reader.layer] for tensor_readers in readers for reader, _ in tensor_readers[1:]))
    kernels = kernels_of(graph, profile)
    for op in graph.operators:
        forward, backward = kernels[op.name]
        total += counts[op.layer] * (FORWARD * forward + backward)
    return total
