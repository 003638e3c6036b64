"""What the host launches for a pass of a region: kernels of its operators, as a framework runs the graph, and collectives.

The host runs ahead of the chip, so a pass takes what the chip needs or what its launches need, whichever is more (`cost/step.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.evaluate import summed
from perfmodel.cost.rows import TimedRows
from perfmodel.frameworks.profile import ExecutionProfile
from perfmodel.frameworks.rewrites import ENTRYWISE
from perfmodel.frameworks.settings import GRAPH_LAUNCH
from perfmodel.parallel.algebra.derive import Amount, extent_amount
from perfmodel.parallel.algebra.sharding import Sharding
from perfmodel.parallel.eager import KERNELS, WrittenOut
from perfmodel.workload.graph import FusedAttention, Graph, Operator, Stream, Work

Array = NDArray[np.float64]

FORWARD = 2.0
"""Host time of a kernel that Python's modules launch in a forward pass, over that of one that autograd's engine does in a backward pass:
22 against 11 us with torch 2.13 on tensors of no size, eight layers of GPT-2 on a core of an EPYC."""

ATTENTION_BACKWARD = 3.0
"""Kernels of a fused attention's backward pass: sums of rows, the pass itself, the gradient of the queries to its dtype (flash-attn)."""


def kernels_of(op: Operator, graph: Graph, profile: ExecutionProfile) -> tuple[float, float]:
    """Kernels of its forward and its backward pass, of a graph as the framework runs it (`with_habits`); views are none.

    A chain that is one kernel counts with its last operator. Each weight's gradient counts once more: a kernel adds it to those before,
    or, where the product that makes it has done so, its hook says that it is ready.
    """
    if op.kind in ENTRYWISE and not graph.tensors[op.output.tensor].is_stored:
        return 0.0, 0.0
    forward, backward = (float(sum(map(_kernels, works))) for works in (op.forward, op.backward))
    backward += (ATTENTION_BACKWARD - 1.0) * sum(isinstance(work, FusedAttention) for work in op.backward)
    if op.kind in KERNELS:
        more = _written_out(KERNELS[op.kind], profile)
        forward, backward = forward * more[0], backward * more[1]
    if op.backward:
        backward += sum(map(graph.is_trained, op.inputs))
    if profile.kernels.graph_scope and graph_part(op, graph) in profile.kernels.graph_scope:
        share = min(GRAPH_LAUNCH / profile.timing.host_launch_time, 1.0)
        return share * forward, share * backward
    return forward, backward


def graph_part(op: Operator, graph: Graph) -> str:
    """The part of Megatron-LM's --cuda-graph-scope that launches the operator: `attn` up to the norm of the feed-forward, `moe_router` from
    there to the choice of experts, `mlp` of a dense layer; empty outside of blocks and from the exchange of tokens on."""
    names = _parts_of(graph)
    return names.get(op.name, "")


@lru_cache(maxsize=64)
def _parts(operators: tuple[tuple[str, str, str, str], ...]) -> Mapping[str, str]:
    """operators: (name, name in its layer, kind, region) in order."""
    found: dict[str, str] = {}
    behind: dict[str, str] = {}
    has_experts = {region for _, _, kind, region in operators if kind == "route"}
    for name, inner, kind, region in operators:
        part = behind.get(region, "attn")
        if inner == "mlp_norm":
            part = "moe_router" if region in has_experts else "mlp"
        found[name] = part
        behind[region] = "" if kind == "route" or part == "" else part
    return found


def _parts_of(graph: Graph) -> Mapping[str, str]:
    blocks = {region.name for region in graph.regions if region.is_block}
    return _parts(tuple((op.name, op.name_in_layer, op.kind, op.layer) for op in graph.operators if op.layer in blocks))


def _kernels(work: Work) -> int:
    match work:
        case FusedAttention():
            return 1
        case Stream() if not work.accesses or work.is_launched_along:
            return 0
    return work.repeats


def _written_out(kind: WrittenOut, profile: ExecutionProfile) -> tuple[float, float]:
    """Kernels of each pass where the profile's traffic lies between that of one kernel and that of separate ones."""
    share = max(0.0, (profile.option(kind.traffic) - 1.0) / (kind.eager_traffic - 1.0))
    return 1.0 + (kind.forward - 1) * share, 1.0 + (kind.backward - 1) * share


FUSED_MATRICES, BY_HAND = 4.0, 4.0
"""Megatron's fused softmax takes a multiple of so many matrices of scores (sequences times heads of a rank). Other numbers are scaled,
masked, and cast to float32 and back by so many kernels more, in each pass (NVIDIA/Megatron-LM, megatron/model/fused_softmax.py)."""


def score_matrices(op: Operator, sharding: Sharding, profile: ExecutionProfile) -> Amount | None:
    """What must be a multiple of `FUSED_MATRICES`; None of anything but a causal softmax that Megatron's kernel may do."""
    if op.kind != "softmax" or not op.settings["causal_queries"] or profile.activations.softmax_keeps_float32:
        return None
    rows = {op.settings["over"], op.settings["causal_queries"]}
    return extent_amount(op, sharding, tuple((op.dims[dim], dim) for dim in op.output.dims if dim and dim not in rows))


def collective_launches(rows: TimedRows, sizes: Array) -> Any:
    """[traffic segments, columns] collectives that are issued: those of a group of more than one. `sizes`: of the groups, by mask."""
    return summed(_issued(rows, sizes), rows.traffic, rows.num_traffic_segments)


def counted_launches(rows: TimedRows, sizes: Array) -> Array | None:
    """[traffic segments, columns] those of `collective_launches` before which the host waits for their sizes; None where none is."""
    counted = rows.traffic.columns["counted"]
    if not counted.any():
        return None
    return summed(_issued(rows, sizes) * counted[:, None], rows.traffic, rows.num_traffic_segments)


def _issued(rows: TimedRows, sizes: Array) -> Array:
    """[traffic rows, columns] 1 where the group has more than one member."""
    return np.minimum(sizes[rows.traffic.columns["group"]] - 1.0, 1.0)


def graph_launches(graph: Graph, profile: ExecutionProfile) -> float:
    """Kernels of a microbatch, of all regions together, one of a forward pass as `FORWARD`."""
    counts = {region.name: region.count for region in graph.regions}
    readers = [graph.consumers(op.output.tensor) for op in graph.operators if graph.tensors[op.output.tensor].has_gradient]
    # gradients of several readers are added, a kernel for each reader after the first
    total = float(sum(counts[reader.layer] for each in readers for reader, _ in each[1:]))
    for op in graph.operators:
        forward, backward = kernels_of(op, graph, profile)
        total += counts[op.layer] * (FORWARD * forward + backward)
    return total
