"""Pipeline stages of a plan with a sharding per operator.

The operators in their order are a chain of blocks. A block ends where a single tensor is live and no parameter is read on both sides.
A stage is a run of blocks. It sends that tensor to the next stage, in the layout of its producer.

"""

from __future__ import annotations

import itertools
from collections.abc import Collection

import numpy as np

from perfmodel.foundation.errors import bad_field
from perfmodel.parallel.algebra.sharding import Layout, output_layout
from perfmodel.parallel.plan import Plan
from perfmodel.workload.graph import Graph, TensorRole


def crossing(network: Graph, position: int) -> list[str]:
    """Return the activations produced before operator `position` and read by it or a later one."""
    produced = {operator.output.tensor for operator in network.operators[:position]}
    tensors = []
    for operator in network.operators[position:]:
        for operand in operator.inputs:
            if operand.tensor in produced and operand.tensor not in tensors:
                tensors.append(operand.tensor)
    return tensors


def blocks_of(network: Graph, *, spanning: Collection[str] = ()) -> list[tuple[int, int]]:
    """Return the runs [start, end) of operators between the positions where a stage may end.

    There a single tensor is live, and no parameter is read on both sides, except those that may be on several stages (`spanning`).
    """
    count = len(network.operators)
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    producers = network.producers()
    for index, operator in enumerate(network.operators):
        for operand in operator.inputs:
            role = network.tensors[operand.tensor].role
            if operand.tensor in producers or (role is TensorRole.PARAMETER and operand.tensor not in spanning):
                first.setdefault(operand.tensor, producers.get(operand.tensor, index))
                last[operand.tensor] = index
    live = np.zeros(count + 1, dtype=np.int64)
    for tensor, start in first.items():
        # live at the positions start + 1 .. last; a parameter read on both sides excludes the position
        weight = 1 if tensor in producers else 2
        live[start + 1] += weight
        live[min(last[tensor] + 1, count)] -= weight
    alive = np.cumsum(live)
    cuts = [0, *(position for position in range(1, count) if alive[position] == 1), count]
    return list(itertools.pairwise(cuts))


def stage_runs(network: Graph, plan: Plan) -> list[tuple[int, int]]:
    """Return the operators [start, end) of each stage; one run without a pipeline. Raises InputError for stages that cannot begin there.

    Stages may share a tied parameter, of which each has a copy.
    """
    if not plan.cuts.stages:
        return [(0, len(network.operators))]
    names = [operator.name for operator in network.operators]
    starts = {names[start]: start for start, _ in blocks_of(network, spanning=network.tied)}
    for name in plan.cuts.stages:
        if name not in starts:
            raise bad_field("stages", name, "no stage can begin there", "one begins where one tensor alone goes on; search again and save")
    begins = [starts[name] for name in plan.cuts.stages]
    if begins[0] or begins != sorted(set(begins)):
        rule = "must begin with the first operator and go on in order"
        raise bad_field("stages", ", ".join(plan.cuts.stages), rule, "search again and save")
    return list(itertools.pairwise([*begins, len(names)]))


def sections_of(network: Graph, run: tuple[int, int]) -> list[tuple[int, int]]:
    """Return the runs of operators of one layer inside a stage."""
    start, end = run
    cuts = [start, *(i for i in range(start + 1, end) if network.operators[i].layer != network.operators[i - 1].layer), end]
    return list(itertools.pairwise(cuts))


def stage_send(network: Graph, plan: Plan, start: int) -> tuple[str, Layout]:
    """Return the tensor that the stage beginning with operator `start` receives, and its layout on the sending stage."""
    (tensor,) = crossing(network, start)
    producer = network.operators[network.producers()[tensor]]
    return tensor, output_layout(producer, plan.cuts.shardings[producer.name])
