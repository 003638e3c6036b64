"""The forward pass of a serving step, compiled once: one row for each product, pass over memory, attention and collective.

The graph is training's own, forward, written for sequences of one token: dims `b s` then count the step's rows whatever sequences they
are of (their number is a column). What engines make of it:

- products that read one tensor run as one (q, k and v; gate and up): fewer floors, better filled
- a norm, an addition to the residual stream and a rotation of keys share the launch of their neighbour
- experts run as one fused call, whose own passes are those of `grouped_matmul_time`; what tokens send to them and back is the engine's
- latent attention reads the latents themselves when it decodes (`workload/decoder/absorbed.py`)
- ranks that share the tokens of a prompt gather its latents, and each expands them to the heads that it has
- no loss: the last row of a sequence has logits, and one pass over them is the choice of a token
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.evaluate import values_of_sizes
from perfmodel.cost.rows import RowCompiler, TimedRows
from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.frameworks.profile import load_profile
from perfmodel.parallel.algebra.derive import ShardedGraph, derive
from perfmodel.parallel.algebra.rules import apply_rules, rule_set_of
from perfmodel.workload.config import TransformerConfig
from perfmodel.workload.graph import Graph, Operator, Pass, Product, Region, Stream, TensorRole, Work
from perfmodel.workload.quantization import WeightPart
from perfmodel.workload.transformer import build_graph

#: Prompts are compiled for sequences of so many tokens, which only state-space layers notice (their chunks).
PROMPT_LENGTH = 2048

#: What its kernels are fused like: Megatron's inference and the serving engines have the same fused operators.
_HABITS = "megatron"
#: torch's modules one by one, on a machine whose host nothing hides.
_EAGER = "torch-gloo"

#: From latents to keys and values of heads: of all tokens wherever their queries lie.
_EXPANDS = ("kv_b_proj", "nope_key", "keys", "value", "values")

#: Kinds whose work is not taken from their rows: what a decoding step does of them follows from the cache (`step.py`), or from the engine.
_STATE_SCANS = ("state_scan", "delta_scan")
_CONVOLUTION = "causal_conv"
_OF_EXPERTS = ("permute", "unpermute", "gated")
_INDEXER = "index_scores"
#: Launched with their neighbour by the engines' kernels.
_LAUNCHED_ALONG = (
    "attention_add", "mlp_add", "experts_add", "parallel_add", "block_add", "k_rotary", "k_norm", "shared_product", "gate_product",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FusedProducts:
    """Plain products by fused call; indices are of the rows of `TimedRows.matmul`.

    rows     of all calls one after another; starts: where a call begins
    region   of each call; names: its operators
    parts    whose weights they multiply
    """

    rows: NDArray[np.int64]
    starts: NDArray[np.int64]
    region: NDArray[np.int64]
    names: tuple[tuple[str, ...], ...]
    parts: tuple[WeightPart, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldWeight:
    """A parameter as a chip holds it: elements over the axes that cut it, in how many layers of which region.

    is_expert   it lies with the routed experts, biases included
    """

    name: str
    region: int
    elements: float
    axes: frozenset[str]
    part: WeightPart
    is_expert: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ServingProgram:
    """Rows of one step. Segments of all rows are places of regions.

    head         place of the head's region, whose rows are sequences
    experts      regions with routed experts
    states       regions with a state of fixed size in place of a cache
    along        rows of streaming that another kernel's launch starts
    """

    model: TransformerConfig
    is_prompt: bool
    derivation: ShardedGraph
    rows: TimedRows
    regions: tuple[Region, ...]
    head: int
    experts: tuple[int, ...]
    states: tuple[int, ...]
    fused: FusedProducts
    along: NDArray[np.bool_]
    weights: tuple[HeldWeight, ...]

    def amounts(self, sizes: NDArray[np.float64], rows: NDArray[np.float64]) -> NDArray[np.float64]:
        """[amounts, columns] of steps of so many rows; sizes of the groups of axes as `amount_values` has them."""
        return values_of_sizes(self.rows.amounts, sizes, rows / _length(self.is_prompt))

    @property
    def counts(self) -> NDArray[np.float64]:
        """How often each region runs."""
        return np.array([float(region.count) for region in self.regions])


def _length(is_prompt: bool) -> int:
    """Tokens of the sequences that the graph is written for."""
    return PROMPT_LENGTH if is_prompt else 1


@lru_cache(maxsize=256)
def serving_program(model: TransformerConfig, *, is_prompt: bool, fuses: bool = True) -> ServingProgram:
    """The program of decode steps, or of prompts. fuses: kernels are fused as engines do it, else every operator is one."""
    plain = replace(model, num_mtp_layers=0)
    graph = build_graph(
        plain,
        seq_len=_length(is_prompt),
        attention="flash",
        dropout=False,
        activation_bytes=2.0,
        parameter_bytes=2.0,
        dispatcher="allgather",
        absorbs=plain.latent is not None and not is_prompt,
    )
    whole: dict[str, tuple[str, ...]] = {"s": ()}
    rules = replace(rule_set_of("megatron"), operators=dict.fromkeys(_EXPANDS, whole) if plain.latent is not None and is_prompt else {})
    derivation = derive(graph, apply_rules(graph, rules))
    place = {region.name: i for i, region in enumerate(graph.regions)}
    compiler = RowCompiler(graph, load_profile(_HABITS if fuses else _EAGER), graph.activation_bytes)
    for op in graph.operators:
        if op.kind in _OF_EXPERTS or op.kind == _INDEXER or (op.kind in _STATE_SCANS and not is_prompt):
            continue
        if op.name_in_layer.endswith("_bias"):
            continue  # added by the product before it
        for work in op.forward if fuses else _as_one_kernel(op):
            if not (isinstance(work, Product) and work.is_grouped):
                compiler.work(op, derivation.shardings[op.name], work, segment=place[op.layer], name=op.name, is_backward=False)
    routed = _after_routers(graph)
    for traffic in derivation.traffic:
        if (
            traffic.phase is Pass.FORWARD
            and traffic.kind is not CollectiveKind.SEND_RECV
            and traffic.operator not in routed
            and traffic.region != "head"
        ):
            compiler.collective(traffic.kind, traffic.axes, traffic.amount, segment=place[traffic.region], name=traffic.tensor)
    weights = _weights(derivation, compiler, place)
    rows = compiler.rows(attention_kernel="flash", num_segments=len(graph.regions), num_traffic_segments=len(graph.regions))
    specs = {kind.name: kind for kind in plain.layer_kinds}
    return ServingProgram(
        model=plain,
        is_prompt=is_prompt,
        derivation=derivation,
        rows=rows,
        regions=graph.regions,
        head=place["head"],
        experts=tuple(place[name] for name, spec in specs.items() if spec.feed_forward == "experts"),
        states=tuple(place[name] for name, spec in specs.items() if spec.mixer in ("mamba", "delta")),
        fused=_fused(graph, rows, fuses=fuses),
        along=np.array([fuses and graph.operator(name).name_in_layer in _LAUNCHED_ALONG for name in rows.streaming.names], dtype=bool),
        weights=weights,
    )


def _as_one_kernel(op: Operator) -> tuple[Work, ...]:
    """Work of an operator without fusion: in a layer with a state the convolution and the scan are kernels of their own classes, whatever
    products a scan consists of. A scan's elements are those of the state at each position, its bytes those of the steps.
    """
    if op.kind not in (_CONVOLUTION, *_STATE_SCANS):
        return op.forward
    (stream,) = (work for work in op.forward if isinstance(work, Stream))
    stream = replace(stream, kernel=op.kind)
    if op.kind == _CONVOLUTION:
        return (stream,)
    depth = op.settings["state" if op.kind == "state_scan" else "key_dim"]
    assert isinstance(depth, int)
    steps = tuple(each for each in stream.accesses if each.of == 1)
    return (replace(stream, elements=(*stream.elements, (depth, "")), accesses=steps),)


def _after_routers(graph: Graph) -> set[str]:
    """Readers and makers between a router and the residual stream: what they send each other is the engine's to decide."""
    found: set[str] = set()
    inside: dict[str, bool] = {}
    for op in graph.operators:
        if op.name_in_layer == "router":
            inside[op.layer] = True
        if inside.get(op.layer):
            found.add(op.name)
    return found


def _is_layer_weight(op: Operator, graph: Graph) -> bool:
    """A linear of a layer, but for what decides where tokens go; a scan over a prompt multiplies activations, whatever rates it reads."""
    block = any(region.name == op.layer and region.is_block for region in graph.regions)
    reads = any(graph.tensors[each.tensor].role is TensorRole.PARAMETER for each in op.inputs)
    is_linear = op.is_product and op.kind not in _STATE_SCANS
    return block and is_linear and reads and op.name_in_layer not in ("router", "shared_gate", "index_weights_proj")


def _part(op: Operator, graph: Graph) -> WeightPart:
    name = op.name_in_layer
    if not _is_layer_weight(op, graph):
        return "other"
    if name.startswith("experts"):
        return "experts"
    return "dense" if name.startswith(("gate_proj", "up_proj", "down_proj", "shared")) else "attention"


def _fused(graph: Graph, rows: TimedRows, *, fuses: bool) -> FusedProducts:
    """Calls in the order of their first product."""
    columns = rows.matmul.columns
    calls: dict[tuple[object, ...], list[int]] = {}
    for row, name in enumerate(rows.matmul.names):
        op = graph.operator(name)
        reads_weight = len(op.inputs) > 1 and graph.tensors[op.inputs[1].tensor].role is TensorRole.PARAMETER
        source = op.inputs[0].tensor if reads_weight else name
        key = (int(rows.matmul.segments[row]), source, int(columns["m"][row]), int(columns["k"][row]), int(columns["batch"][row]))
        calls.setdefault(key if fuses and _is_layer_weight(op, graph) else (name, row), []).append(row)
    groups = list(calls.values())
    first = [graph.operator(rows.matmul.names[group[0]]) for group in groups]
    return FusedProducts(
        rows=np.array([row for group in groups for row in group], dtype=np.int64),
        starts=np.cumsum([0, *(len(group) for group in groups[:-1])]) if groups else np.empty(0, dtype=np.int64),
        region=np.array([rows.matmul.segments[group[0]] for group in groups], dtype=np.int64),
        names=tuple(tuple(rows.matmul.names[row] for row in group) for group in groups),
        parts=tuple(_part(op, graph) for op in first),
    )


def _weights(derivation: ShardedGraph, compiler: RowCompiler, place: Mapping[str, int]) -> tuple[HeldWeight, ...]:
    graph = derivation.graph
    readers = {operand.tensor: op for op in reversed(graph.operators) for operand in op.inputs}
    found = []
    for parameter in derivation.parameters:
        op = readers[parameter.name]
        compiler.mask(parameter.elements.axes | parameter.elements.padded_axes)
        is_expert = any(isinstance(work, Product) and work.is_grouped for work in op.forward) or op.name_in_layer.startswith("experts")
        found.append(
            HeldWeight(
                name=parameter.name,
                region=place[parameter.regions[0]],
                elements=float(parameter.num_elements),
                axes=parameter.elements.axes | parameter.elements.padded_axes,
                part=_part(op, graph),
                is_expert=is_expert,
            )
        )
    return tuple(found)
