"""Operators of a plan that backward passes recompute, and collectives that are issued again.

Under full recomputation each block is one function of which only the inputs are saved. Under selective recomputation it is each run of
operators of the named groups, with its inputs in the layout in which it reads them. Backward runs such a function again up to its last
operator that saves something, as torch's activation checkpointing does.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby

from perfmodel.parallel.choices import Recompute
from perfmodel.parallel.per_operator.stages import sections_of
from perfmodel.parallel.per_operator.traffic import NetworkTraffic
from perfmodel.parallel.plan import Plan
from perfmodel.workload.graph import Graph
from perfmodel.workload.work import Pass


def recomputed_runs(network: Graph, plan: Plan, run: tuple[int, int]) -> list[tuple[int, int]]:
    """Return the runs of operators of a stage that are recomputed as one function each; in a graph without blocks, those of all layers."""
    if plan.recompute is Recompute.NONE:
        return []
    layers = [
        (start, end) for start, end in sections_of(network, run) if not network.blocks or network.operators[start].layer in network.blocks
    ]
    if plan.recompute is Recompute.FULL:
        return layers
    runs = []
    for start, end in layers:
        for group, members in groupby(range(start, end), key=lambda index: network.operators[index].group):
            if group and group in plan.recompute_operators:
                places = list(members)
                runs.append((places[0], places[-1] + 1))
    return runs


def issued_again(network: Graph, plan: Plan, run: tuple[int, int]) -> Callable[[NetworkTraffic], bool]:
    """Return a predicate: whether a backward pass issues a collective of the stage's forward pass again."""
    runs = recomputed_runs(network, plan, run)
    if not runs:
        return lambda row: False
    index_of = {operator.name: index for index, operator in enumerate(network.operators)}
    producers = network.producers()
    run_of: dict[int, tuple[int, int]] = {}
    for start, end in runs:
        last = max((index for index in range(start, end) if network.operators[index].saved), default=-1)
        run_of |= dict.fromkeys(range(start, end), (start, last))

    def again(row: NetworkTraffic) -> bool:
        index = index_of[row.operator]
        if row.phase is Pass.BACKWARD or row.what == "gradient" or index not in run_of:
            return False
        start, last = run_of[index]
        if row.what == "edge" and producers[row.tensor] == index:
            return index < last  # the redistribution to its held layout
        is_read_before = plan.recompute is Recompute.SELECTIVE and row.what == "edge" and producers[row.tensor] < start
        return index <= last and not is_read_before

    return again
