"""Checks of network plans before any process starts."""

from __future__ import annotations

from collections.abc import Collection

from perfmodel.foundation.errors import InputError, bad_field
from perfmodel.parallel.per_operator.assignment import check_assignment
from perfmodel.parallel.per_operator.parameters import holding_stages
from perfmodel.parallel.per_operator.stages import stage_runs
from perfmodel.parallel.per_operator.traffic import derive_assigned
from perfmodel.parallel.plan import Plan
from perfmodel.workload.graph import Graph


def check_runnable(network: Graph, plan: Plan, further_kinds: Collection[str] = ()) -> None:
    """Check that the plan is legal, all kinds have torch functions, readers of a parameter agree, and the stages are possible."""
    from perfmodel.execute.per_operator.functions import FUNCTIONS  # imports torch

    name = plan.job.model.name
    if name != network.name:
        raise bad_field("network", name, f"the plan is not for {network.name}", "use the network that it was made for")
    check_assignment(plan.cuts, network, needs_held=True)
    for operator in network.operators:
        if operator.kind not in FUNCTIONS and operator.kind not in further_kinds:
            raise InputError(
                f"operator {operator.name}: kind {operator.kind!r} has no torch function; add one to the table or pass it as functions"
            )
    derive_assigned(network, plan.cuts)
    runs, readers = stage_runs(network, plan), network.readers()
    for parameter in network.tied:
        stages = holding_stages(network, runs, parameter)
        if len({stage % plan.layout.pp for stage in stages}) < len(stages):
            raise bad_field("stages", parameter, "is read in two stages of one rank", "use other stages, or virtual_stages=1")
    for operator in network.operators[: runs[-1][0]]:
        if operator.output.tensor not in readers:
            rule = "ends in an earlier stage than the last: a pipeline hands on one tensor alone"
            raise bad_field("stages", operator.name, rule, "use stages that end after it")
