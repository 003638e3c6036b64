"""Rewrites of the sharded graph of a serving step by the options of an engine, as in `rewrites.py` for training frameworks.

Engines fuse a bias into the product before it. With fused kernels, products that read one tensor are one call (q, k and v; gate and up).
A norm or rotary embedding of keys, an addition to the residual stream, and a product with an activation run in the kernel of their
neighbour. Without fusion, the convolution and the scan of a recurrent layer are kernels of their own classes.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from perfmodel.parallel.algebra.derive import ShardedGraph
from perfmodel.parallel.algebra.sharding import Layout
from perfmodel.workload.graph import Graph, Operator, Product, Stream, Tensor, Work
from perfmodel.workload.quantization import WeightPart

_NORMS = ("rms_norm", "layer_norm")
_CONVOLUTION = "causal_conv"


def with_engine(derivation: ShardedGraph, *, fuses: bool, low_parts: Collection[WeightPart]) -> ShardedGraph:
    """Return the graph with the same layouts, as an engine runs it.

    fuses      kernels are fused; else every operator is a kernel
    low_parts  parts whose weights are quantised
    """
    graph = derivation.graph
    calls = _calls(derivation) if fuses else {}
    fused = _fused_along(graph) if fuses else set()

    def work(op: Operator, kernel: Work) -> Work:
        if isinstance(kernel, Product):
            weight = weight_of(op, graph)
            low = weight is not None and graph.tensors[calls.get(op.name, (op, ""))[0].inputs[1].tensor].part in low_parts
            return replace(kernel, is_low=low, call=calls[op.name][1] if op.name in calls else "")
        return replace(kernel, is_fused=True) if isinstance(kernel, Stream) and op.name in fused else kernel

    def rewritten(op: Operator) -> Operator:
        if op.kind == "elementwise" and op.settings["function"] == "bias":
            return replace(op, forward=())
        forward = op.forward if fuses else _as_one_kernel(op)
        return replace(op, forward=tuple(work(op, kernel) for kernel in forward))

    return replace(derivation, graph=replace(graph, operators=tuple(map(rewritten, graph.operators))))


def weight_of(op: Operator, graph: Graph) -> Tensor | None:
    """Return the weight of a product, if it belongs to a part that formats of weights distinguish."""
    if not op.is_product or len(op.inputs) < 2:
        return None
    tensor = graph.tensors[op.inputs[1].tensor]
    return tensor if tensor.part != "other" else None


def _calls(derivation: ShardedGraph) -> dict[str, tuple[Operator, str]]:
    """Return the call of each product with weights: products that read one tensor in one layout share the first product and its name."""
    first: dict[tuple[str, str, Layout], Operator] = {}
    calls = {}
    for op in derivation.graph.operators:
        if weight_of(op, derivation.graph) is not None:
            first_operator = first.setdefault((op.layer, op.inputs[0].tensor, derivation.needed[op.name, 0]), op)
            calls[op.name] = (first_operator, first_operator.name)
    return calls


def _fused_along(graph: Graph) -> set[str]:
    """Return the operators that run in the kernel of a neighbour."""
    blocks = {region.name for region in graph.regions if region.is_block}
    fused = set()
    for op in graph.operators:
        function = op.settings.get("function")
        first = graph.producer(op.inputs[0].tensor)
        is_product = function == "mul" and first is not None and first.kind == "elementwise"
        if is_product or (function == "add" and op.layer in blocks):
            fused.add(op.name)
        elif op.kind == "cached_attention":
            fused |= _fused_before_attention(graph, op.inputs[1].tensor)
    return fused


def _fused_before_attention(graph: Graph, keys: str) -> set[str]:
    """Return the norms and rotary embeddings between the product of keys and attention that have no other reader."""
    op = graph.producer(keys)
    if op is None or op.is_product or len(graph.consumers(keys)) > 1:
        return set()
    names = {op.name} if op.kind in _NORMS or op.kind == "rotary" else set()
    return names.union(*(_fused_before_attention(graph, operand.tensor) for operand in op.inputs))


def _as_one_kernel(op: Operator) -> tuple[Work, ...]:
    """Return the convolution or the scan of a recurrent layer as one kernel, without the products of the scan.

    The kernel's elements are those of the state at each position, its bytes those of the time steps (operand 1).
    """

    streams = [work for work in op.forward if isinstance(work, Stream)]
    if op.kind == _CONVOLUTION:
        return tuple(replace(stream, kernel=op.kind) for stream in streams)
    if op.kind not in ("state_scan", "delta_scan"):
        return op.forward
    depth = op.settings["state" if op.kind == "state_scan" else "key_dim"]
    assert isinstance(depth, int)
    return tuple(
        replace(
            stream,
            kernel=op.kind,
            elements=(*stream.elements, (depth, "")),
            accesses=tuple(data for data in stream.accesses if data.of == 1),
        )
        for stream in streams
    )
