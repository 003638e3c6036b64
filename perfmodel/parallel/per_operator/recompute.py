"""Operators of a plan that backward passes recompute, and collectives that are issued again.

Under full recomputation each block is a function whose inputs alone are kept; under selective recomputation each run of operators of the
groups that the plan names, with its inputs as it reads them. Such a function runs again up to the last of its operators that keeps
something, as torch's checkpoints do.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby

from perfmodel.parallel.layout import Recompute
from perfmodel.parallel.per_operator.stages import sections_of
from perfmodel.parallel.per_operator.traffic import NetworkTraffic
from perfmodel.parallel.plan import Plan
from perfmodel.workload.graph import Graph, Pass


def recomputed_runs(network: Graph, plan: Plan, run: tuple[int, int]) -> list[tuple[int, int]]:
    """Runs of operators of a stage, each of which runs again as one function. A graph without blocks has them in all its layers."""
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
    """Whether a backward pass issues a collective of the stage's forward pass again."""
    runs = recomputed_runs(network, plan, run)
    if not runs:
        return lambda row: False
    index_of = {operator.name: index for index, operator in enumerate(network.operators)}
    producers = network.producers()
    of: dict[int, tuple[int, int]] = {}
    for start, end in runs:
        last = max((index for index in range(start, end) if network.operators[index].saved), default=-1)
        of |= dict.fromkeys(range(start, end), (start, last))

    def again(row: NetworkTraffic) -> bool:
        index = index_of[row.operator]
        if row.phase is Pass.BACKWARD or row.what == "gradient" or index not in of:
            return False
        start, last = of[index]
        if row.what == "edge" and producers[row.tensor] == index:
            return index < last  # on its way to the layout that holds it
        is_read_before = plan.recompute is Recompute.SELECTIVE and row.what == "edge" and producers[row.tensor] < start
        return index <= last and not is_read_before

    return again
