"""Inputs of a plan with a sharding for each operator: its graph with the blocks of each stage, its layouts, its mesh as a grid.

The rest is shared with all plans: rows (`cost/program.py`), terms on columns, one assembly (`cost/assemble.py`), one memory model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import accumulate

import numpy as np

from perfmodel.cost.program import Program
from perfmodel.parallel.algebra.sharding import AXIS_PARTS, TENSOR_AXES
from perfmodel.parallel.grid import LayoutGrid, neighbours_together
from perfmodel.parallel.layout import DEFAULT_ORDER
from perfmodel.parallel.per_operator.assignment import Assignment
from perfmodel.workload.graph import Graph, TensorRole


def priced_graph(graph: Graph, assignment: Assignment, *, activation_bytes: float, parameter_bytes: float) -> Graph:
    """Return the graph with element sizes of all tensors and with blocks: every layer of a network, or the blocks of a decoder.

    Each block belongs to one stage: a layer that spans two stages becomes one block on each.
    """
    priced = graph.with_itemsizes(activation=activation_bytes, parameter=parameter_bytes, compute_bytes=activation_bytes)
    blocks = dict(graph.blocks) or dict.fromkeys((operator.layer for operator in graph.operators), 0.0)
    if not assignment.stages:
        return replace(priced, blocks=blocks)
    home: dict[str, int] = {}
    operators = tuple(
        operator if home.setdefault(operator.layer, stage) == stage else replace(operator, layer=f"{operator.layer} on stage {stage}")
        for stage, operator in zip(_stages(graph, assignment), graph.operators, strict=True)
    )
    in_graph, numbers = (Counter(operator.layer for operator in group) for group in (graph.operators, operators))
    pieces = {
        piece.layer: blocks.get(layer.layer, 0.0) * numbers[piece.layer] / in_graph[layer.layer]
        for layer, piece in zip(graph.operators, operators, strict=True)
        if layer.layer in blocks or numbers[piece.layer] != in_graph[layer.layer]
    }
    return replace(priced, operators=operators, blocks=pieces)


def _stages(graph: Graph, assignment: Assignment) -> Iterator[int]:
    """Yield the stage of each operator."""
    begins = frozenset(assignment.stages[1:])
    return accumulate(int(operator.name in begins) for operator in graph.operators)


def stage_blocks(graph: Graph, assignment: Assignment) -> tuple[int, ...]:
    """Return the blocks of each stage of a `priced_graph`, as `Plan.stage_layers` does for a decoder."""
    layers: list[set[str]] = [set() for _ in range(assignment.num_stages)]
    for stage, operator in zip(_stages(graph, assignment), graph.operators, strict=True):
        if operator.layer in graph.blocks:
            layers[stage].add(operator.layer)
    return tuple(map(len, layers))


def boundary_tensors(graph: Graph, assignment: Assignment) -> tuple[str, ...]:
    """Return the boundary tensors of all stages but the last; with one stage, those of its layers."""
    stages, layers = _stages(graph, assignment), (operator.layer for operator in graph.operators)
    homes: Iterable[int | str] = stages if assignment.stages else layers
    homes_of, tensors = dict[str, int | str](), dict[str, None]()
    for home, operator in zip(homes, graph.operators, strict=True):
        homes_of[operator.output.tensor] = home
        crossing = (operand.tensor for operand in operator.inputs if homes_of.get(operand.tensor, home) != home)
        tensors |= dict.fromkeys(tensor for tensor in crossing if graph.tensors[tensor].role is TensorRole.ACTIVATION)
    return tuple(tensors)


def is_scattered(program: Program) -> bool:
    """Return whether boundary tensors are sharded over tp: sequence parallelism."""
    derivation = program.derivation
    return any(derivation.left[tensor].cut_axes & TENSOR_AXES for tensor in program.boundary_tensors)


def assigned_grid(assignment: Assignment, pp: int, tier_sizes: tuple[int, ...]) -> LayoutGrid:
    """Return a grid of one column: the mesh of a stage by its own axes, with stages in order on the network.

    Axes with the names of a rule set keep their role. Other axes count as data-parallel where only that matters.
    """
    chips = assignment.num_chips

    def column(value: int) -> np.ndarray:
        return np.array([float(value)])

    degree = {axis: column(assignment.size(AXIS_PARTS.get(axis, ()))) for axis in DEFAULT_ORDER} | {"pp": column(pp)}
    degree["dp_replicate"] = column(chips) / (degree["tp"] * degree["cp"] * degree["dp_shard"])
    inside: list[Mapping[str, np.ndarray]] = [
        {axis.name: column(axis.size if axis.tier <= tier else 1) for axis in assignment.axes} for tier in range(len(tier_sizes))
    ]
    return LayoutGrid(
        degree=degree,
        fine={axis.name: column(axis.size) for axis in assignment.axes},
        inside=tuple(inside),
        hop=tuple(1.0 + neighbours_together(column(chips), column(pp), size) for size in tier_sizes),
    )
