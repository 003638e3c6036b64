"""Pipelines around the per-operator search: stages of a network, each cut in its own way over the chips of its stage.

The operators in their order are a chain of blocks: a block ends where one tensor alone goes on. Stages are runs of blocks. With S stages, m
microbatches and t_i for one microbatch on stage i (forward and backward), 1F1B takes

    T = sum over i of t_i + (m - 1) * max over i of t_i + sends + what a step does once

On each mesh (chips / S for a stage) the whole network is searched once; blocks then have times and memory, and `partition_chain` finds the
stages of least T. A stage whose weights, state and min(m, S - i) live microbatches do not fit is searched again under its limit.
This is done for every number of stages and of microbatches: first on a coarse space (within a network tier an operator cuts two dims), then
on the whole space for the most promising.

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

from perfmodel.cost.collectives import collective_time
from perfmodel.cost.machine import Machine
from perfmodel.cost.per_operator.operators import StepSetting
from perfmodel.cost.per_operator.overlap import exposed_time
from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.foundation.errors import InputError, bad_field
from perfmodel.foundation.units import format_bytes
from perfmodel.parallel.per_operator.plan import NetworkPlan, check_plan, mesh_axes
from perfmodel.parallel.per_operator.stages import blocks_of, crossing, stage_runs
from perfmodel.planner.per_operator.fold import Fold, fold_layers
from perfmodel.planner.per_operator.search import NetworkPlanner, network_planner
from perfmodel.search import Budget, OutOfBudget, Solution, eliminate, eliminate_within, partition_chain
from perfmodel.search.budget import MOST_WORK
from perfmodel.workload.graph import Graph

Array = NDArray[np.float64]

#: Axes of a mesh beyond which the outermost are joined, so that spaces stay small.
MOST_AXES = 6
#: Of the candidates (stages, microbatches), so many are searched on the whole space after all were on the coarse one, and only those that
#: took there at most this many times the best one's time.
_FINE, _CLOSE = 2, 1.03
_COARSE_DIMS = 2
#: Finding the cuts may take so many entries (`search/budget.py`).
_CUT_WORK = 6e8
#: Mixtures of parameter collectives (`cost/per_operator/overlap.py`) that are searched.
_SHARES = (0.0, 0.5, 1.0)
#: Exposed parameter collectives below this share of a step are left as they are.
_HARDLY = 0.01
#: A stage under its memory limit may be off by this share of its time, and take so many entries: on the coarse space, on the whole one.
_COARSE_EFFORT, _FINE_EFFORT = (0.03, 6e8), (0.005, 1.5e9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A run of operators on the chips of one stage.

    microbatch_time   forward, backward and communication of one microbatch; step_time: once a step (gradients, optimizer)  [s]
    exposed_time      of these, what shows of parameter collectives in a whole step  [s]
    memory            weights, gradients and state; saved activations of `in_flight` microbatches; context  [byte]
    price             seconds of a microbatch that one more byte would save  [s/byte]
    """

    first: str
    last: str
    num_operators: int
    in_flight: int
    microbatch_time: float
    step_time: float
    exposed_time: float
    memory: Mapping[str, float]
    price: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePrediction:
    """The best plan found: its stages, the sharding of every operator on the mesh of a stage, and the step time by parts. [s]

    lower_bound   no split into as many stages and microbatches takes less: (1 + (m - 1) / S) times the least time of all operators
    cut_off       what ended a search of its cuts or of a stage before it was as close as it should be, or of other numbers of stages before
                  they were all tried: `work limit`, `memory limit` or the user's `time limit`; else nothing
    """

    plan: NetworkPlan
    stages: tuple[Stage, ...]
    num_microbatches: int
    step_time: float
    parts: Mapping[str, float]
    memory_capacity: float
    memory_usable: float
    lower_bound: float
    price: float
    num_candidates: int
    search_time: float
    cut_off: str = ""

    @property
    def num_chips(self) -> int:
        return self.plan.num_chips * len(self.stages)

    @property
    def gap(self) -> float:
        """How far the time may be from the least of as many stages and microbatches, as a share of it."""
        return 1.0 - self.lower_bound / self.step_time


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Candidate:
    num_stages: int
    num_microbatches: int


def search_pipeline(
    network_at: Callable[[int], Graph],
    *,
    global_batch: int,
    cluster: str,
    num_chips: int,
    machine: Machine,
    setting: StepSetting,
    memory_limit: float,
    stages: Sequence[int] = (),
    microbatches: Sequence[int] = (),
    beat: float = math.inf,
    budget: Budget | None = None,
    progress: Callable[[float, str], None] | None = None,
) -> PipelinePrediction:
    """The fastest plan found over all numbers of stages and microbatches (or those given).

    network_at     the network at a batch: that of one microbatch, on all chips of a stage together
    memory_limit   of one chip, for everything  [byte]
    beat           the step time of a plan at hand: what cannot be faster is not searched  [s]
    budget         with the user's time limit, after which the best plan so far is returned; work is counted for each search by itself
    """
    start = time.perf_counter()
    allowed = budget or Budget(math.inf)
    candidates = _candidates(global_batch, num_chips, stages, microbatches)

    def report(done: float, candidate: _Candidate, what: str) -> None:
        if progress is not None:
            progress(done, f"{candidate.num_stages} stages, {candidate.num_microbatches} microbatches: {what}")

    def pipeline(candidate: _Candidate, most_dims: int) -> _Pipeline:
        chips = num_chips // candidate.num_stages
        planner = network_planner(
            network_at(global_batch // candidate.num_microbatches),
            cluster=cluster,
            num_chips=chips,
            machine=machine,
            setting=replace(setting, num_microbatches=candidate.num_microbatches),
            axes=mesh_axes(chips, machine.tier_sizes, most=MOST_AXES),
            most_dims=most_dims,
        )
        return _Pipeline(planner, candidate, machine, memory_limit, chips, is_coarse=most_dims > 0, budget=allowed)

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
    # the most promising first: once a plan beats the bounds of all that are left, they need no search
    found: list[tuple[float, int]] = []
    coarse: dict[int, PipelinePrediction] = {}
    for done, (bound, index) in enumerate(sorted(bounds)):
        if bound >= min([beat, *(seconds for seconds, _ in found)]):
            break
        if found and allowed.is_late:
            cut_off = "time limit"
            break
        report(0.3 + 0.5 * done / len(bounds), candidates[index], "coarse space")
        try:
            coarse[index] = pipeline(candidates[index], _COARSE_DIMS).run()
            found.append((coarse[index].step_time, index))
        except InputError as error:
            reasons.append(str(error))
            if isinstance(error, OutOfBudget):
                cut_off = allowed.spent or "work limit"
    if not found:
        raise InputError(reasons[-1] if reasons else f"step_time={beat:g} s: no plan is faster; search without it")
    found.sort()
    close = [index for seconds, index in found[:_FINE] if seconds <= _CLOSE * found[0][0]]
    plans: list[PipelinePrediction] = []
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


def predict_pipeline(network: Graph, plan: NetworkPlan, *, machine: Machine, setting: StepSetting) -> PipelinePrediction:
    """A plan in stages, predicted as the search that finds it predicts it; nothing is searched, so its bound is 0."""
    planner = network_planner(
        network, cluster=plan.cluster, num_chips=plan.num_chips, machine=machine, setting=setting, axes=plan.axes, most_dims=0
    )
    check_plan(plan, network)
    candidate = _Candidate(num_stages=len(plan.stages), num_microbatches=plan.num_microbatches)
    return _Pipeline(planner, candidate, machine, math.inf, plan.num_chips, is_coarse=False, budget=Budget()).of_plan(plan)


def _candidates(global_batch: int, num_chips: int, stages: Sequence[int], microbatches: Sequence[int]) -> list[_Candidate]:
    """Stages that divide the chips, microbatches that divide the batch and leave a stage's chips an eighth of a sample each or more."""
    found = []
    # many stages first: small meshes are searched in no time, and their plans bound the others
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
            found.append(_Candidate(num_stages=count, num_microbatches=times))
    if not found:
        raise bad_field("global_batch", global_batch, "leaves no microbatch for any number of stages", "use a larger batch")
    return found


class _Pipeline:
    """One number of stages and microbatches, on tables made once."""

    def __init__(
        self,
        planner: NetworkPlanner,
        candidate: _Candidate,
        machine: Machine,
        memory_limit: float,
        chips: int,
        *,
        is_coarse: bool,
        budget: Budget,
    ) -> None:
        self.budget, self.cut_off = budget, ""
        self.planner, self.candidate, self.machine, self.is_coarse = planner, candidate, machine, is_coarse
        self.limit = memory_limit - machine.context_bytes
        self.chips = chips
        self.tables, self.space, self.network = planner.tables, planner.space, planner.network
        self.fold: Fold = fold_layers(self.space)
        self.edges = self.fold.edges(self.tables.edges)
        self.solutions: dict[float, Solution] = {}
        self.blocks = blocks_of(self.network)
        self.block_of = self._blocks_of_vertices()

    def _blocks_of_vertices(self) -> list[int]:
        """Block of each vertex; a held tensor belongs where it is read first."""
        of = [0] * len(self.network.operators)
        for index, (start, end) in enumerate(self.blocks):
            for operator in range(start, end):
                of[operator] = index
        readers = self.network.readers()
        return of + [of[readers[tensor][0][0]] for tensor in self.space.held]

    def bound(self) -> float:
        """No plan of as many stages and microbatches takes less, memory or not. [s]

        All operators add up to sum of t_i at least, and the largest t_i is at least their mean: T >= (1 + (m - 1) / S) sum of t_i.
        """
        if len(self.blocks) < self.candidate.num_stages:
            rule = f"the network has {len(self.blocks)} places to cut"
            raise bad_field("stages", self.candidate.num_stages, rule, "use fewer stages")
        least = self._solved(0.0)
        return least.lower_bound * (1.0 + (self.candidate.num_microbatches - 1.0) / self.candidate.num_stages)

    def _solved(self, share: float) -> Solution:
        """All operators searched with this mixture, memory aside."""
        if share not in self.solutions:
            costs = self.tables.costs(share, self.planner.setting)
            budget = self.budget.part(MOST_WORK)
            self.solutions[share] = eliminate(self.fold.costs(costs, self.edges.within), self.edges.between, budget=budget)
        return self.solutions[share]

    def run(self) -> PipelinePrediction:
        """The best of what the search finds with several mixtures of what shows of parameter collectives."""
        bound = self.bound()
        least, *more = _SHARES
        best = self._run(least, bound)
        for share in more:
            # where next to nothing shows, more of it cannot be hidden by another plan
            if best.parts["parameter_collectives"] < _HARDLY * best.step_time:
                break
            best = min(best, self._run(share, bound), key=lambda plan: plan.step_time)
        return best

    def _run(self, share: float, bound: float) -> PipelinePrediction:
        self.costs, self.cut_off = self.tables.costs(share, self.planner.setting), ""
        stages = self.candidate.num_stages
        solution = self._solved(share)
        choice = list(self.fold.unfold(solution.choice))
        prices = [0.0] * stages
        bounds = self._cut(choice)
        lean: tuple[int, ...] = ()
        for stage in range(stages):
            inside = self._inside(bounds, stage)
            if self._bytes(choice, inside, stage) <= self.limit:
                continue
            mixed = [lean[v] if lean and v in inside else label for v, label in enumerate(choice)]
            if lean and self._bytes(mixed, inside, stage) <= self.limit:
                choice = mixed
                continue
            own, prices[stage] = self._fit(choice, inside, stage)
            choice = [own.get(v, label) for v, label in enumerate(choice)]
            # what fits here is tried in the other stages before they are searched
            lean = self._spread(own, choice)
        return self._prediction(choice, bounds, prices, bound)

    def _spread(self, own: Mapping[int, int], choice: Sequence[int]) -> tuple[int, ...]:
        """A stage's choice for every vertex that folds with one of its vertices."""
        by_fold = {self.fold.of[v]: label for v, label in own.items()}
        return tuple(by_fold.get(self.fold.of[v], label) for v, label in enumerate(choice))

    # --- stages -----------------------------------------------------------------------------------------------------------------------

    def _cut(self, choice: Sequence[int]) -> list[int]:
        """Blocks at which the stages begin, and the number of blocks: least sum + (m - 1) * max.

        Within the memory of the stages if this choice fits in any way; else by time alone, and stages are searched again.
        """
        count, stages = len(self.blocks), self.candidate.num_stages
        times, held, kept = np.zeros(count), np.zeros(count), np.zeros(count)
        for v, label in enumerate(choice):
            column, block = self.tables.vertices[v], self.block_of[v]
            times[block] += column.forward[label] + column.backward[label] + column.own[label]
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
            found = partition_chain(
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
            found = partition_chain(chains[0], budget=self.budget.part(_CUT_WORK), **common)
        self.cut_off = self.cut_off or found.cut_off
        return list(found.cuts)

    def _inside(self, bounds: Sequence[int], stage: int) -> set[int]:
        return {v for v, block in enumerate(self.block_of) if bounds[stage] <= block < bounds[stage + 1]}

    def _in_flight(self, stage: int) -> int:
        return min(self.candidate.num_microbatches, self.candidate.num_stages - stage)

    def _bytes(self, choice: Sequence[int], inside: set[int], stage: int) -> float:
        live = float(self._in_flight(stage))
        own = sum(
            float(self.tables.vertices[v].state_bytes[choice[v]] + live * self.tables.vertices[v].saved_bytes[choice[v]]) for v in inside
        )
        return own + live * sum(float(matrix[choice[u], choice[v]]) for u, v, matrix in self.tables.edge_bytes if v in inside)

    def _fit(self, choice: Sequence[int], inside: set[int], stage: int) -> tuple[dict[int, int], float]:
        """The stage searched under its limit; what its neighbours chose stays. Equal layers of the stage choose alike."""
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
            # copies only add: what the leanest configurations hold is needed at least
            if sum(float(weight.min()) for weight in weights) > self.limit:
                raise InputError("memory")
            found = eliminate_within(vectors, joined, weights, self.limit, edge_weights=joined_copies, gap=gap, budget=budget)
        except OutOfBudget:
            raise
        except InputError:
            raise InputError(
                f"memory: {format_bytes(self.limit)} of a chip for stage {stage + 1} of {self.candidate.num_stages}: no plan fits; "
                "use more chips or stages, a higher ZeRO stage or smaller microbatches"
            ) from None
        self.cut_off = self.cut_off or found.cut_off
        own = fold.unfold(found.choice)
        return {v: own[i] for i, v in enumerate(members)}, found.price

    def of_plan(self, plan: NetworkPlan) -> PipelinePrediction:
        """The plan's own choice and cuts."""
        choice = self.space.choice(plan)
        if -1 in choice:
            named = [*(operator.name for operator in self.network.operators), *self.space.held][choice.index(-1)]
            raise bad_field(f"shardings[{named}]", "this one", "is not in the space of the search", "search again and save")
        begins = [start for start, _ in self.blocks]
        bounds = [*(begins.index(start) for start, _ in stage_runs(self.network, plan)), len(begins)]
        return self._prediction(choice, bounds, [0.0] * len(plan.stages), 0.0)

    # --- prediction -------------------------------------------------------------------------------------------------------------------

    def _prediction(self, choice: Sequence[int], bounds: Sequence[int], prices: Sequence[float], lower_bound: float) -> PipelinePrediction:
        stages, times = self.candidate.num_stages, self.candidate.num_microbatches
        rows = [self._stage(choice, self._inside(bounds, i), i, prices[i]) for i in range(stages)]
        slowest = max(row.microbatch_time for row in rows)
        send = sum(self._send(choice, bounds[i]) for i in range(1, stages))
        constant = self.planner.setting.profile.step_time_constant
        mean = sum(row.microbatch_time for row in rows) / stages
        last = max(rows, key=lambda row: row.step_time)
        exposed = sum(row.exposed_time for row in rows) / stages
        parts = {
            "microbatches": times * mean + last.step_time - exposed,
            "parameter_collectives": exposed,
            "uneven_stages": times * (slowest - mean),
            "pipeline_bubble": sum(row.microbatch_time for row in rows) - slowest,
            "sends": 2.0 * send,
            "step_constant": constant,
        }
        total = sum(parts.values())
        plan = replace(
            self.space.plan(choice, cluster=self.planner.cluster),
            stages=tuple(row.first for row in rows) if stages > 1 else (),
            num_microbatches=times,
        )
        return PipelinePrediction(
            plan=plan,
            stages=tuple(rows),
            num_microbatches=times,
            step_time=total,
            parts=parts,
            memory_capacity=self.machine.memory_capacity,
            memory_usable=self.machine.memory_usable,
            lower_bound=min(lower_bound, total),
            price=max(prices),
            num_candidates=1,
            search_time=0.0,
            cut_off=self.cut_off,
        )

    def _stage(self, choice: Sequence[int], inside: set[int], stage: int, price: float) -> Stage:
        columns = [(self.tables.vertices[v], choice[v]) for v in sorted(inside)]
        forward = sum(float(c.forward[i]) for c, i in columns)
        backward = sum(float(c.backward[i]) for c, i in columns)
        own = sum(float(c.own[i]) for c, i in columns)
        moved = sum(float(matrix[choice[u], choice[v]]) for u, v, matrix in self.tables.edges if v in inside)
        setting = self.planner.setting
        times = setting.num_microbatches
        reductions = sum(float(c.reductions[i]) for c, i in columns)
        gathers = sum(float(c.gathers[i]) for c, i in columns)
        each = reductions if setting.reduces_each_microbatch else 0.0
        shown = float(exposed_time(reductions=each, gathers=gathers, forward=forward, backward=backward, setting=setting))
        # else gradients of a step leave under the backward pass of the last microbatch
        once = 0.0 if setting.reduces_each_microbatch else times * reductions
        late = float(exposed_time(reductions=once, gathers=0.0, forward=0.0, backward=backward, setting=setting))
        optimizer = times * sum(float(c.published[i] + c.optimizer[i]) for c, i in columns)
        state = sum(float(c.state_bytes[i]) for c, i in columns)
        saved = self._bytes(choice, inside, stage) - state
        operators = [v for v in sorted(inside) if v < len(self.network.operators)]
        memory = {"parameters_and_state": state, "saved_activations": saved, "context": self.machine.context_bytes}
        memory["total"] = sum(memory.values())
        return Stage(
            first=self.network.operators[operators[0]].name,
            last=self.network.operators[operators[-1]].name,
            num_operators=len(operators),
            in_flight=self._in_flight(stage),
            microbatch_time=forward + backward + own + moved + shown,
            step_time=late + optimizer,
            exposed_time=times * shown + late,
            memory=memory,
            price=price,
        )

    def _send(self, choice: Sequence[int], block: int) -> float:
        """A rank's share of the tensor that enters a block, to its neighbour. [s]"""
        start = self.blocks[block][0]
        tensor = crossing(self.network, start)[0]
        producer = self.network.producers()[tensor]
        operator, rows = self.network.operators[producer], self.space.operators[producer]
        parts = 1.0
        for dim in operator.output.dims:
            if dim:
                parts *= float(rows.parts[choice[producer], rows.dims.index(dim)])
        num_bytes = self.network.tensors[tensor].num_elements / parts * self.planner.setting.activation_bytes
        inside = [np.array([2.0 if 2 * self.chips <= size else 1.0]) for size in self.machine.tier_sizes]
        inside[-1] = np.array([2.0])
        sent = collective_time(
            CollectiveKind.SEND_RECV, np.array([num_bytes]), group_size=np.array([2.0]), inside=inside, machine=self.machine
        )
        return float(np.asarray(sent).reshape(-1)[0])
