"""Pipelines around the per-operator search: stages of a network, each with its own sharding over the chips of its stage.

The operators in order are a chain of blocks; a block ends where a single tensor continues. Stages are runs of blocks. With S stages, m
microbatches and t_i for one microbatch on stage i (forward and backward), 1F1B takes

    T = sum over i of t_i + (m - 1) * max over i of t_i + sends + costs once per step

On each mesh (chips / S for a stage) the whole network is searched once. Blocks then have times and memory, and `partition_chain` finds the
stages of least T. A stage whose weights, state and min(m, S - i) live microbatches do not fit is searched again under its limit.
This is done for every number of stages and of microbatches: first on a coarse space (an operator shards at most two dims within a network
tier), then on the full space for the most promising.

Source: Zheng et al., Alpa, OSDI 2022, section 5.2 (stages by dynamic programming over the largest stage time); Narayanan et al., Efficient
large-scale language model training on GPU clusters using Megatron-LM, SC 2021 (1F1B).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.estimate import Estimator, evaluate_memory, memory_on_rank, rank_times
from perfmodel.cost.memory.plan import scalar
from perfmodel.foundation.errors import InputError, bad_field
from perfmodel.foundation.units import format_bytes
from perfmodel.parallel.per_operator.mesh import mesh_axes
from perfmodel.parallel.per_operator.stages import blocks_of, stage_runs
from perfmodel.parallel.plan import Plan
from perfmodel.parallel.prediction import Prediction
from perfmodel.planner.per_operator.fold import Fold, fold_layers
from perfmodel.planner.per_operator.search import NetworkPlanner, chosen_plan, network_planner
from perfmodel.search import Budget, OutOfBudget, Solution, eliminate, eliminate_within, partition_chain
from perfmodel.search.budget import MOST_WORK

Array = NDArray[np.float64]

#: Number of mesh axes beyond which the outermost are joined, so that spaces stay small.
MOST_AXES = 6
#: Number of candidates (stages, microbatches) that are searched on the full space after the coarse one, and their largest coarse time
#: over the least.
_FINE, _CLOSE = 2, 1.03
_COARSE_DIMS = 2
#: Work limit of finding the cuts, in entries (`search/budget.py`).
_CUT_WORK = 6e8
#: Mixtures of parameter collectives (`cost/per_operator/overlap.py`) that are searched.
_SHARES = (0.0, 0.5, 1.0)
#: Share of a step below which exposed parameter collectives are not reduced further.
_HARDLY = 0.01
#: Number of times that a plan that does not fit is searched again with less memory.
_MOST_RETRIES = 3
#: Accepted gap of a stage under its memory limit, and its work limit in entries: on the coarse space, on the full one.
_COARSE_EFFORT, _FINE_EFFORT = (0.03, 6e8), (0.005, 1.5e9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A run of operators on the chips of one stage.

    microbatch_time   forward and backward of one microbatch, with the collectives of activations  [s]
    memory            peak memory of one chip by class  [byte]
    """

    first: str
    last: str
    num_operators: int
    in_flight: int
    microbatch_time: float
    memory: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSearch:
    """The best plan and its prediction: its stages, and the sharding of every operator on the mesh of a stage.

    lower_bound   of the time of any split into the same numbers of stages and microbatches: (1 + (m - 1) / S) times the least time of all
                  operators
    price         seconds of a microbatch saved per additional byte, in the stage where that is largest   [s/byte]
    cut_off       reason for an early end of a search of its cuts or of a stage, or of the search over numbers of stages: `work limit`,
                  `memory limit` or the user's `time limit`; else empty
    """

    best: Prediction
    stages: tuple[Stage, ...]
    lower_bound: float
    price: float
    num_candidates: int
    search_time: float
    cut_off: str = ""

    @property
    def step_time(self) -> float:
        return self.best.step_time

    @property
    def gap(self) -> float:
        """Gap between the time and its lower bound for these stages and microbatches, as a share of the time."""
        return 1.0 - self.lower_bound / self.step_time


def plan_stages(estimator: Estimator, plan: Plan) -> tuple[Stage, ...]:
    """Return the stages of a plan with per-operator shardings, each with its time and memory."""
    network = estimator.programs.network(plan.micro_batch)
    runs = stage_runs(network, plan)
    times, profile = rank_times(estimator, plan), estimator.profile
    around = profile.allocator.workspace_bytes + scalar(evaluate_memory(estimator, plan).of.outside)
    stages = []
    for index, (start, end) in enumerate(runs):
        _, _, memory = memory_on_rank(estimator, plan, index)
        stages.append(
            Stage(
                first=network.operators[start].name,
                last=network.operators[end - 1].name,
                num_operators=end - start,
                in_flight=min(plan.num_microbatches, len(runs) - index),
                microbatch_time=times[index],
                memory={**memory, "framework": around, "total": sum(memory.values()) + around},
            )
        )
    return tuple(stages)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Candidate:
    num_stages: int
    num_microbatches: int


def search_pipeline(
    estimator: Estimator,
    *,
    cluster: str,
    zero: int,
    memory_limit: float,
    stages: Sequence[int] = (),
    microbatches: Sequence[int] = (),
    beat: float = math.inf,
    budget: Budget | None = None,
    progress: Callable[[float, str], None] | None = None,
) -> PipelineSearch:
    """Return the fastest plan of the estimator's job over all numbers of stages and microbatches (or the given ones).

    cluster        name of the estimator's cluster in plans
    memory_limit   of one chip, for everything  [byte]
    beat           step time of a known plan: candidates that cannot be faster are skipped  [s]
    budget         has the user's time limit, after which the best plan so far is returned; work is counted for each search separately
    """
    start = time.perf_counter()
    allowed = budget or Budget(math.inf)
    candidates = _candidates(estimator.job.global_batch, estimator.cluster.num_chips, stages, microbatches)

    def report(done: float, candidate: _Candidate, what: str) -> None:
        if progress is not None:
            progress(done, f"{candidate.num_stages} stages, {candidate.num_microbatches} microbatches: {what}")

    def pipeline(candidate: _Candidate, most_dims: int) -> _Pipeline:
        chips = estimator.cluster.num_chips // candidate.num_stages
        planner = network_planner(
            estimator,
            cluster=cluster,
            num_microbatches=candidate.num_microbatches,
            zero=zero,
            num_stages=candidate.num_stages,
            axes=mesh_axes(chips, estimator.machine.tier_sizes, most=MOST_AXES),
            most_dims=most_dims,
        )
        return _Pipeline(planner, candidate, estimator, cluster, memory_limit, is_coarse=most_dims > 0, budget=allowed)

    bounds: list[tuple[float, int]] = []
    reasons: list[str] = []
    cut_off = ""
    for index, candidate in enumerate(candidates):
        if bounds and allowed.is_late:
            cut_off = "time limit"
            break
        report(0.3 * index / len(candidates), candidate, "bound")
        try:
            bounds.append((pipeline(candidate, _COARSE_DIMS).bound(), index))
        except InputError as error:
            reasons.append(str(error))
    # the most promising first: once a plan beats the bounds of all remaining ones, they are skipped
    times: list[tuple[float, int]] = []
    coarse: dict[int, PipelineSearch] = {}
    for done, (bound, index) in enumerate(sorted(bounds)):
        if bound >= min([beat, *(seconds for seconds, _ in times)]):
            break
        if times and allowed.is_late:
            cut_off = "time limit"
            break
        report(0.3 + 0.5 * done / len(bounds), candidates[index], "coarse space")
        try:
            coarse[index] = pipeline(candidates[index], _COARSE_DIMS).run()
            times.append((coarse[index].step_time, index))
        except InputError as error:
            reasons.append(str(error))
            if isinstance(error, OutOfBudget):
                cut_off = allowed.spent or "work limit"
    if not times:
        raise InputError(reasons[-1] if reasons else f"step_time={beat:g} s: no plan is faster; search without it")
    times.sort()
    close = [index for seconds, index in times[:_FINE] if seconds <= _CLOSE * times[0][0]]
    plans: list[PipelineSearch] = []
    for done, index in enumerate(close):
        if allowed.is_late:
            cut_off = "time limit"
            plans.append(coarse[index])
            continue
        report(0.8 + 0.2 * done / len(close), candidates[index], "whole space")
        try:
            plans.append(pipeline(candidates[index], 0).run())
        except OutOfBudget:
            cut_off = allowed.spent or "work limit"
            plans.append(coarse[index])
    best = min(plans, key=lambda plan: plan.step_time)
    spent = time.perf_counter() - start
    return replace(best, num_candidates=len(candidates), search_time=spent, cut_off=cut_off or best.cut_off)


def _candidates(global_batch: int, num_chips: int, stages: Sequence[int], microbatches: Sequence[int]) -> list[_Candidate]:
    """Return stages that divide the chips, and microbatches that divide the batch and leave each chip of a stage 1/8 sample or more."""
    candidates = []
    # many stages first: small meshes are searched quickly, and their plans bound the others
    for count in stages or [s for s in (32, 16, 8, 4, 2, 1) if num_chips % s == 0]:
        if isinstance(count, bool) or count < 1 or num_chips % count:
            raise bad_field("stages", count, f"must divide the {num_chips} chips", "use a divisor")
        chips = num_chips // count
        options = microbatches or [
            global_batch // batch
            for batch in dict.fromkeys(max(1, chips // part) for part in (8, 4, 2, 1))
            if global_batch % batch == 0 and global_batch // batch >= count
        ]
        for times in options:
            if isinstance(times, bool) or times < 1 or global_batch % times:
                raise bad_field("microbatches", times, f"must divide the batch of {global_batch}", "use a divisor")
            candidates.append(_Candidate(num_stages=count, num_microbatches=times))
    if not candidates:
        raise bad_field("global_batch", global_batch, "leaves no microbatch for any number of stages", "use a larger batch")
    return candidates


class _Pipeline:
    """Search for one number of stages and microbatches, on shared tables."""

    def __init__(
        self,
        planner: NetworkPlanner[Prediction],
        candidate: _Candidate,
        estimator: Estimator,
        cluster: str,
        memory_limit: float,
        *,
        is_coarse: bool,
        budget: Budget,
    ) -> None:
        self.budget, self.cut_off = budget, ""
        self.planner, self.candidate, self.estimator, self.cluster, self.is_coarse = planner, candidate, estimator, cluster, is_coarse
        self.memory_limit = memory_limit
        self.limit = memory_limit - planner.context_bytes
        self.tables, self.space, self.network = planner.tables, planner.space, planner.network
        self.fold: Fold = fold_layers(self.space)
        self.edges = self.fold.edges(self.tables.edges)
        self.solutions: dict[float, Solution] = {}
        self.blocks = blocks_of(self.network)
        # a held tensor belongs to the block of its first reader
        of = [0] * len(self.network.operators)
        for index, (start, end) in enumerate(self.blocks):
            for operator in range(start, end):
                of[operator] = index
        readers = self.network.readers()
        self.block_of = of + [of[readers[tensor][0][0]] for tensor in self.space.held]

    def bound(self) -> float:
        """Return a lower bound of the time of any plan with these numbers of stages and microbatches, without a memory limit. [s]

        The t_i add up to at least the least sum over all operators, and the largest is at least their mean:
        T >= (1 + (m - 1) / S) sum of t_i.
        """
        if len(self.blocks) < self.candidate.num_stages:
            rule = f"the network has {len(self.blocks)} places to cut"
            raise bad_field("stages", self.candidate.num_stages, rule, "use fewer stages")
        least = self._solved(0.0)
        return least.lower_bound * (1.0 + (self.candidate.num_microbatches - 1.0) / self.candidate.num_stages)

    def _solved(self, share: float) -> Solution:
        """Return the solution of all operators with this mixture, without a memory limit."""
        if share not in self.solutions:
            costs = self.tables.costs(share, self.planner.setting)
            budget = self.budget.part(MOST_WORK)
            self.solutions[share] = eliminate(self.fold.costs(costs, self.edges.within), self.edges.between, budget=budget)
        return self.solutions[share]

    def run(self) -> PipelineSearch:
        """Return the best plan over several mixtures of the exposed parameter collectives."""
        bound = self.bound()
        least, *more = _SHARES
        best = self._run(least, bound)
        for _ in range(_MOST_RETRIES):
            over = best.best.memory["total"] - self.memory_limit
            if over <= 0.0:
                break
            self.limit -= over  # reserve what only the full prediction includes (moments, buffers)
            best = self._run(least, bound)
        for share in more:
            # with almost nothing exposed, no other plan can overlap more
            parts = best.best.parts
            if parts["parameter_gather"] + parts["gradient_reduction"] < _HARDLY * best.step_time:
                break
            best = min(best, self._run(share, bound), key=lambda run: (run.best.memory["total"] > self.memory_limit, run.step_time))
        return best

    def _run(self, share: float, bound: float) -> PipelineSearch:
        self.costs, self.cut_off = self.tables.costs(share, self.planner.setting), ""
        stages = self.candidate.num_stages
        solution = self._solved(share)
        choice = list(self.fold.unfold(solution.choice))
        prices = [0.0] * stages
        bounds = self._cut(choice)
        lean: tuple[int, ...] = ()
        for stage in range(stages):
            inside = {v for v, block in enumerate(self.block_of) if bounds[stage] <= block < bounds[stage + 1]}
            if self._bytes(choice, inside, stage) <= self.limit:
                continue
            mixed = [lean[v] if lean and v in inside else label for v, label in enumerate(choice)]
            if lean and self._bytes(mixed, inside, stage) <= self.limit:
                choice = mixed
                continue
            labels, prices[stage] = self._fit(choice, inside, stage)
            choice = [labels.get(v, label) for v, label in enumerate(choice)]
            # these labels are tried in the other stages before they are searched
            by_fold = {self.fold.of[v]: label for v, label in labels.items()}
            lean = tuple(by_fold.get(self.fold.of[v], label) for v, label in enumerate(choice))
        first = tuple(self.network.operators[self.blocks[block][0]].name for block in bounds[:-1])
        begins = first if len(first) > 1 else ()
        plan = chosen_plan(self.estimator, self.space, self.planner.setting, choice, cluster=self.cluster, stages=begins)
        best = self.estimator.predict(plan)
        return PipelineSearch(
            best=best,
            stages=plan_stages(self.estimator, plan),
            lower_bound=min(bound, best.step_time),
            price=max(prices),
            num_candidates=1,
            search_time=0.0,
            cut_off=self.cut_off,
        )

    # --- stages -----------------------------------------------------------------------------------------------------------------------

    def _cut(self, choice: Sequence[int]) -> list[int]:
        """Return the blocks at which the stages begin, and the number of blocks, at least sum + (m - 1) * max.

        Within the memory of the stages if this choice fits in any partition; else by time alone, and stages are searched again.
        """
        count, stages = len(self.blocks), self.candidate.num_stages
        times, held, kept = np.zeros(count), np.zeros(count), np.zeros(count)
        for v, label in enumerate(choice):
            column, block = self.tables.vertices[v], self.block_of[v]
            times[block] += column.forward[label] + column.backward[label] + column.collectives[label]
            held[block] += column.state_bytes[label]
            kept[block] += column.saved_bytes[label]
        for u, v, matrix in self.tables.edges:
            times[self.block_of[v]] += matrix[choice[u], choice[v]]
        for u, v, matrix in self.tables.edge_bytes:
            kept[self.block_of[v]] += matrix[choice[u], choice[v]]
        alike: dict[float, Array] = {}
        chains = [[alike.setdefault(value, np.array([[value]])) for value in column.tolist()] for column in (times, held, kept)]
        common: dict[str, Any] = {"num_stages": stages, "num_microbatches": self.candidate.num_microbatches}
        try:
            partition = partition_chain(
                chains[0],
                held=chains[1],
                kept=chains[2],
                in_flight=[float(self._in_flight(stage)) for stage in range(stages)],
                limits=[self.limit] * stages,
                budget=self.budget.part(_CUT_WORK),
                **common,
            )
        except InputError as error:
            if isinstance(error, OutOfBudget):
                self.cut_off = self.budget.spent or "work limit"
            partition = partition_chain(chains[0], budget=self.budget.part(_CUT_WORK), **common)
        self.cut_off = self.cut_off or partition.cut_off
        return list(partition.cuts)

    def _in_flight(self, stage: int) -> int:
        return min(self.candidate.num_microbatches, self.candidate.num_stages - stage)

    def _bytes(self, choice: Sequence[int], inside: set[int], stage: int) -> float:
        live = float(self._in_flight(stage))
        num_bytes = sum(
            float(self.tables.vertices[v].state_bytes[choice[v]] + live * self.tables.vertices[v].saved_bytes[choice[v]]) for v in inside
        )
        return num_bytes + live * sum(float(matrix[choice[u], choice[v]]) for u, v, matrix in self.tables.edge_bytes if v in inside)

    def _fit(self, choice: Sequence[int], inside: set[int], stage: int) -> tuple[dict[int, int], float]:
        """Return the choice of the stage under its limit, with fixed neighbours, and its price. Equal layers of the stage choose alike."""
        members = sorted(inside)
        number = {v: i for i, v in enumerate(members)}
        costs = [self.costs[v] for v in members]
        held = self.tables.held_bytes(in_flight=float(self._in_flight(stage)))
        edges, copies = [], []
        for u, v, matrix in self.tables.edges:
            if u in number and v in number:
                edges.append((number[u], number[v], matrix))
            elif v in number:
                costs[number[v]] = costs[number[v]] + matrix[choice[u], :]
            elif u in number:
                costs[number[u]] = costs[number[u]] + matrix[:, choice[v]]
        scaled: dict[int, Array] = {}
        for u, v, matrix in self.tables.edge_bytes:
            if u in number and v in number:
                copies.append((number[u], number[v], scaled.setdefault(id(matrix), matrix * self._in_flight(stage))))
        labels: dict[int, int] = {}
        of = tuple(labels.setdefault(self.fold.of[v], len(labels)) for v in members)
        fold = Fold(of=of, first=tuple(of.index(f) for f in range(len(labels))))
        vectors, joined = fold.problem(costs, edges)
        weights, joined_copies = fold.problem([held[v] for v in members], copies)
        gap, work = _COARSE_EFFORT if self.is_coarse else _FINE_EFFORT
        budget = self.budget.part(work)
        try:
            # copies only add memory: the configurations of least memory are a lower bound
            if sum(float(weight.min()) for weight in weights) > self.limit:
                raise InputError("memory")
            solution = eliminate_within(vectors, joined, weights, self.limit, edge_weights=joined_copies, gap=gap, budget=budget)
        except OutOfBudget:
            raise
        except InputError:
            raise InputError(
                f"memory: {format_bytes(self.limit)} of a chip for stage {stage + 1} of {self.candidate.num_stages}: no plan fits; "
                "use more chips or stages, a higher ZeRO stage or smaller microbatches"
            ) from None
        self.cut_off = self.cut_off or solution.cut_off
        unfolded = fold.unfold(solution.choice)
        return {v: unfolded[i] for i, v in enumerate(members)}, solution.price
