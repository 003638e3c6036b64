"""The best sharding of every operator: space, tables and the search kernel in one line, and the same cost by the road of a whole plan."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from perfmodel.cost.estimate import Estimator
from perfmodel.cost.microbatch import microbatch_cost
from perfmodel.cost.program import Program, compile_program
from perfmodel.cost.step import phase_times
from perfmodel.errors import InputError, bad_field
from perfmodel.parallel.derive import derive
from perfmodel.parallel.layout import AttentionKernel
from perfmodel.parallel.rules import list_rule_sets
from perfmodel.parallel.sharding import Sharding
from perfmodel.planner.operator_mesh import OperatorMesh, Prices
from perfmodel.planner.operator_parameters import ParameterTerms
from perfmodel.planner.operator_space import operator_space
from perfmodel.planner.operator_tables import OperatorTables, operator_tables
from perfmodel.search import Solution, eliminate
from perfmodel.workload.operator import REGIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorPlan:
    """A sharding for every operator, and its time for one microbatch: the embedding, all layers and the head, forward and backward.

    microbatch_time   work and communication of activations  [s]
    parameter_time    exposed collectives of parameters and gradients, for each microbatch  [s]
    """

    name: str
    shardings: Mapping[str, Sharding]
    microbatch_time: float
    parameter_time: float

    @property
    def time(self) -> float:
        return self.microbatch_time + self.parameter_time


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorSearch:
    """What a per-operator search found, beside the shipped rule sets that its space contains; times of tables and search. [s]"""

    plan: OperatorPlan
    rule_sets: tuple[OperatorPlan, ...]
    solution: Solution
    tables: OperatorTables
    table_time: float
    search_time: float


def search_operators(
    estimator: Estimator,
    mesh: OperatorMesh,
    *,
    micro_batch: int = 1,
    zero: int = 0,
    attention: AttentionKernel = AttentionKernel.FLASH,
    least_exposed: float = 0.0,
) -> OperatorSearch:
    """The choice of every operator's sharding that takes least time, with proof.

    The rest of the plan is as given: the data axes of the mesh cut the batch, ZeRO stage `zero` stores weights, nothing is recomputed.
    Gradient reductions are taken to hide as the profile says, as long as the backward pass beside them; `least_exposed` is the share that
    shows at the least. `operator_predict.predict_shardings` says what shows in truth.
    """
    start = time.perf_counter()
    tables = tables_of(estimator, mesh, micro_batch=micro_batch, zero=zero, attention=attention, least_exposed=least_exposed)
    middle = time.perf_counter()
    solution = eliminate(tables.vertex_costs, tables.edges)
    end = time.perf_counter()
    uniform = []
    for name in list_rule_sets():
        try:
            choice = tables.space.choice_of(estimator.shardings(name, attention))
        except InputError:
            continue  # it does not divide on this mesh
        uniform.append(plan_of(name, tables, choice))
    return OperatorSearch(
        plan=plan_of("per-operator", tables, solution.choice),
        rule_sets=tuple(sorted(uniform, key=lambda plan: plan.time)),
        solution=solution,
        tables=tables,
        table_time=middle - start,
        search_time=end - middle,
    )


def tables_of(
    estimator: Estimator,
    mesh: OperatorMesh,
    *,
    micro_batch: int,
    zero: int,
    attention: AttentionKernel,
    least_exposed: float = 0.0,
) -> OperatorTables:
    """The space and its costs for the job of an estimator."""
    if isinstance(micro_batch, bool) or not isinstance(micro_batch, int) or micro_batch < 1:
        raise bad_field("micro_batch", micro_batch, "must be a whole number of at least 1", "use 1")
    if not 0.0 <= least_exposed <= 1.0:
        raise bad_field("least_exposed", least_exposed, "is a share", "use 0 to 1")
    ranks, batch = mesh.size(("dp_replicate", "dp_shard")), estimator.job.global_batch
    if batch % (ranks * micro_batch):
        raise bad_field("global_batch", batch, f"must be a multiple of data ranks times micro_batch={ranks * micro_batch}", "change one")
    profile = estimator.profile
    space = operator_space(estimator.graph(attention), mesh, micro_batch=micro_batch, fuses_elementwise=profile.fuses_elementwise)
    return operator_tables(
        space,
        Prices(mesh=mesh, machine=estimator.machine, profile=profile, micro_batch=micro_batch),
        attention_kernel=str(attention),
        parameters=ParameterTerms(
            zero=zero,
            num_microbatches=batch // (ranks * micro_batch),
            parameter_bytes=estimator.sizes.gathered,
            gradient_bytes=estimator.sizes.reduced,
            least_exposed=least_exposed,
        ),
    )


def plan_of(name: str, tables: OperatorTables, choice: tuple[int, ...]) -> OperatorPlan:
    return OperatorPlan(
        name=name,
        shardings=tables.space.shardings(choice),
        microbatch_time=tables.microbatch_time(choice),
        parameter_time=tables.parameter_time(choice),
    )


def program_of(estimator: Estimator, shardings: Mapping[str, Sharding], attention: AttentionKernel) -> Program:
    """These shardings compiled as a uniform plan is."""
    return compile_program(
        derive(estimator.graph(attention), shardings),
        estimator.profile,
        recompute_operators=(),
        attention_kernel=str(attention),
    )


def derived_microbatch_time(
    estimator: Estimator,
    shardings: Mapping[str, Sharding],
    mesh: OperatorMesh,
    *,
    micro_batch: int = 1,
    attention: AttentionKernel = AttentionKernel.FLASH,
) -> float:
    """The microbatch time of any shardings by the cost model of whole plans: derived, compiled and summed by regions. [s]"""
    program = program_of(estimator, shardings, attention)
    grid = mesh.grid(estimator.machine.tier_sizes)
    micro = microbatch_cost(program, estimator.machine, grid, np.array([float(micro_batch)]))
    total = 0.0
    for region, name in enumerate(REGIONS):
        once = sum(float(np.asarray(value)[0]) for value in phase_times(micro, estimator.profile, region).values())
        total += once * (program.graph.num_layers if name == "layer" else 1)
    return total


__all__ = ["OperatorPlan", "OperatorSearch", "derived_microbatch_time", "plan_of", "program_of", "search_operators", "tables_of"]
