"""Rewrites of the sharded graph of a serving step by the options of an engine: as `rewrites.py` for training frameworks.

Engines add biases inside the product before them. Where they fuse kernels, products that read one tensor are one call (q, k and v; gate
and up), and a norm or a rotation of keys, an addition to the residual stream and a product with an activation run in the kernel of their
neighbour. Where they do not, the convolution and the scan of a layer with a state are kernels of their own classes.
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
    """The same graph with the same layouts, as an engine runs it.

    fuses      kernels are fused, else every operator is one
    low_parts  of which the weights are held in fewer bits
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
    """The weight of a layer's product that formats of weights tell apart."""
    if not op.is_product or len(op.inputs) < 2:
        return None
    tensor = graph.tensors[op.inputs[1].tensor]
    return tensor if tensor.part != "other" else None


def _calls(derivation: ShardedGraph) -> dict[str, tuple[Operator, str]]:
    """Products of weights that read one tensor in one layout: the first of each call, and its name."""
    first: dict[tuple[str, str, Layout], Operator] = {}
    calls = {}
    for op in derivation.graph.operators:
        if weight_of(op, derivation.graph) is not None:
            of = first.setdefault((op.layer, op.inputs[0].tensor, derivation.needed[op.name, 0]), op)
            calls[op.name] = (of, of.name)
    return calls


def _fused_along(graph: Graph) -> set[str]:
    blocks = {region.name for region in graph.regions if region.is_block}
    """Operators in the kernel of a neighbour."""
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
    """Norms and rotations between the product that makes keys and attention, which nothing else reads."""
    op = graph.producer(keys)
    if op is None or op.is_product or len(graph.consumers(keys)) > 1:
        return set()
    names = {op.name} if op.kind in _NORMS or op.kind == "rotary" else set()
    return names.union(*(_fused_before_attention(graph, operand.tensor) for operand in op.inputs))


def _as_one_kernel(op: Operator) -> tuple[Work, ...]:
    """The convolution and the scan of a layer with a state as one kernel each, whatever products a scan consists of.

    A scan's elements are those of the state at each position, its bytes those of the steps.
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
