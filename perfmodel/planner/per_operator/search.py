"""Search for the best sharding of every operator of a network on a cluster.

Exposed communication of parameter collectives is a maximum over the whole step (they overlap with the available compute). It is no sum
over operators, but at least every mixture of its two sides (`cost/per_operator/overlap.py`). So the best plan of a mixture bounds the step
time of all plans. The mixture moves to where the bound is largest, every plan on the way is predicted in full, and the best is returned.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.estimate import Estimator
from perfmodel.cost.memory.chip import sole_outside_bytes
from perfmodel.cost.per_operator.operators import MeshPrices, StepSetting
from perfmodel.cost.program import graph_launches
from perfmodel.foundation.errors import InputError, bad_field
from perfmodel.foundation.plain import picked
from perfmodel.foundation.units import format_bytes
from perfmodel.parallel.per_operator.mesh import MeshAxis, mesh_axes
from perfmodel.parallel.plan import Plan, assigned_plan
from perfmodel.parallel.prediction import Prediction
from perfmodel.planner.per_operator.fold import Fold, FoldedEdges, fold_layers, unfolded
from perfmodel.planner.per_operator.space import Configurations, NetworkSpace, network_space
from perfmodel.planner.per_operator.tables import NetworkTables, TableMaker, table_entries
from perfmodel.search import Budget, OutOfBudget, Solution, eliminate, eliminate_within
from perfmodel.workload.graph import Graph, Operator
from perfmodel.workload.work import FusedAttention, Product

Array = NDArray[np.float64]


class HasTotals(Protocol):
    """Totals of a plan that a search needs: of a `Prediction`, or of the tables of a paper."""

    @property
    def step_time(self) -> float: ...

    @property
    def memory(self) -> Mapping[str, float]: ...


#: Selects the configurations that an operator may have, as a mask of its rows.
Filter = Callable[[Operator, Configurations], NDArray[np.bool_]]

#: Largest number of mixtures that are searched; the search ends when the bound is within this share of the best plan.
_MOST_MIXTURES, _CLOSE = 5, 1e-3
#: Number of operators beyond which equal layers choose alike by default.
FOLD_BEYOND = 400
#: Largest size of the tables of a search. [byte]
_MOST_TABLES = 8e8
#: Accepted gap of a plan under a memory limit, as a share of its time.
_GAP = 1e-4
_ROUNDING = 1e-9


Priced = TypeVar("Priced", bound=HasTotals)


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSearch(Generic[Priced]):
    """Result of a search for a network's plan.

    lower_bound          of the step time of any plan of the space that fits, by its additive part; in a folded search, of any plan whose
                         layers choose alike  [s]
    is_proved            each search ended with a proof; gap: the largest gap of one, as a share
    cut_off              reason for an early end: `work limit`, `memory limit` or the user's `time limit`; else empty
    price                seconds of a step saved per additional byte at the memory limit; 0 where memory does not bind  [s/byte]
    has_equal_layers     equal layers choose alike
    most_dims            largest number of dims of an operator that are sharded within the innermost tier; 0: any number
    """

    best: Priced
    lower_bound: float
    is_proved: bool
    gap: float
    cut_off: str
    price: float
    has_equal_layers: bool
    most_dims: int
    num_configurations: tuple[int, ...]
    table_time: float
    search_time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Solved:
    """Result of one search: choices of all vertices."""

    choice: tuple[int, ...]
    cost: float
    lower_bound: float
    is_proved: bool
    price: float = 0.0
    cut_off: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NetworkPlanner(Generic[Priced]):
    """A network on a mesh, with tables that are shared by many searches.

    price           predicts a choice of configurations in full; the tables are its additive part
    context_bytes   memory of a chip that no choice changes
    least_time      of a step for any choice: host time   [s]
    maker           of the tables, for the same network and mesh at another ZeRO stage
    """

    network: Graph
    price: Callable[[Sequence[int]], Priced]
    context_bytes: float
    least_time: float
    setting: StepSetting
    space: NetworkSpace
    tables: NetworkTables
    table_time: float
    maker: TableMaker | None = None

    def search(
        self,
        allowed: Filter | None = None,
        *,
        memory_limit: float = math.inf,
        has_equal_layers: bool | None = None,
        budget: Budget | None = None,
    ) -> NetworkSearch[Priced]:
        """Return the best plan, or the best among the configurations that `allowed` leaves.

        memory_limit      of one chip, for everything (`Prediction.memory`)  [byte]
        has_equal_layers  equal layers choose alike; if left out: where the network has more operators than `FOLD_BEYOND`
        budget            of each of the searches; one that finds nothing raises `OutOfBudget`
        """
        start = time.perf_counter()
        barred = self._barred(allowed)
        is_folded = len(self.network.operators) > FOLD_BEYOND if has_equal_layers is None else has_equal_layers
        fold = fold_layers(self.space) if is_folded else unfolded(len(barred))
        edges = fold.edges(self.tables.edges)
        mixtures: dict[float, list[Array]] = {}

        def costs_at(share: float) -> list[Array]:
            if share not in mixtures:
                mixtures[share] = self.tables.costs(share, self.setting)
            return mixtures[share]

        total = budget or Budget()
        times, profile = self.setting.num_microbatches, self.setting.profile
        results: list[tuple[Priced, _Solved]] = []
        more = 0.0  # bytes that a plan needs in addition to the tables
        lines: dict[tuple[int, ...], tuple[float, float]] = {}
        share, bound, tried, cut_off = 0.0, self.least_time, set[float](), ""
        while len(results) < _MOST_MIXTURES and share not in tried:
            if results and total.is_late:
                cut_off = "time limit"
                break
            tried.add(share)
            costs = [cost if bar is None else np.where(bar, np.inf, cost) for cost, bar in zip(costs_at(share), barred, strict=True)]
            try:
                solved = self._solve(fold, costs, edges, memory_limit=memory_limit - more, budget=total.part(total.most))
            except OutOfBudget:
                raise
            except InputError:
                if not results:
                    raise
                results.append(self._leanest(fold, costs, edges))
                break
            results.append((self.price(solved.choice), solved))
            if not more and share == 0.0:
                # always exposed; reductions overlap with activation collectives too, which mixtures ignore
                bound = max(bound, solved.lower_bound * times + profile.timing.step_time_constant)
            needed = results[-1][0].memory["total"]
            if needed > memory_limit * (1.0 + _ROUNDING) and len(results) < _MOST_MIXTURES:
                # reserve what only the full prediction includes (moments, buffers), and try the same mixture again
                more = max(more, needed - self.context_bytes - self.bytes_of(solved.choice))
                tried.discard(share)
                continue
            least = min(result[0].step_time for result in results)
            if least - bound <= _CLOSE * least:
                break
            lines[solved.choice] = (self._cost(solved.choice, costs_at(0.0)), self._cost(solved.choice, costs_at(1.0)))
            share = _highest(list(lines.values())) if tried >= {0.0, 1.0} else 1.0 if tried == {0.0} else 0.0
        fitting = [result for result in results if result[0].memory["total"] <= memory_limit * (1.0 + _ROUNDING)]
        if not fitting:
            raise _too_large(memory_limit, min(result[0].memory["total"] for result in results))
        best, _ = min(fitting, key=lambda result: result[0].step_time)
        return NetworkSearch(
            best=best,
            lower_bound=min(bound, best.step_time),
            is_proved=all(solved.is_proved for _, solved in results),
            gap=max(0.0, *(1.0 - solved.lower_bound / solved.cost for _, solved in results)),
            cut_off=next((solved.cut_off for _, solved in results if solved.cut_off), cut_off),
            price=max(solved.price for _, solved in results) * times,
            has_equal_layers=is_folded,
            most_dims=self.space.most_dims,
            num_configurations=self.space.num_configurations,
            table_time=self.table_time,
            search_time=time.perf_counter() - start,
        )

    def _solve(self, fold: Fold, costs: list[Array], edges: FoldedEdges, *, memory_limit: float, budget: Budget) -> _Solved:
        """Return the best choice; under the limit if the unconstrained one does not fit."""
        vectors, between = fold.costs(costs, edges.within), edges.between
        solution = eliminate(vectors, between, budget=budget)
        if not np.isfinite(solution.cost):
            raise InputError("allowed: no choice of configurations is left; allow more of them")
        choice = fold.unfold(solution.choice)
        limit = memory_limit - self.context_bytes
        if math.isinf(limit) or self.bytes_of(choice) <= limit:
            return _Solved(choice=choice, **picked(solution, "cost lower_bound is_proved cut_off"))
        weights, copies = fold.problem(self.tables.held_bytes(), self.tables.edge_bytes)
        try:
            within = eliminate_within(vectors, between, weights, limit, edge_weights=copies, gap=_GAP, budget=budget)
        except OutOfBudget:
            raise
        except InputError:
            least = self._lean(fold, vectors, between).cost + self.context_bytes
            raise _too_large(memory_limit, least) from None
        return _Solved(choice=fold.unfold(within.choice), **picked(within, "cost lower_bound is_proved price cut_off"))

    def bytes_of(self, choice: Sequence[int]) -> float:
        """Return the memory of a choice, without the context. [byte]"""
        num_bytes = sum(float(held[index]) for held, index in zip(self.tables.held_bytes(), choice, strict=True))
        return num_bytes + sum(float(matrix[choice[u], choice[v]]) for u, v, matrix in self.tables.edge_bytes)

    def _lean(self, fold: Fold, vectors: list[Array], edges: list[tuple[int, int, Array]]) -> Solution:
        """Return the choice of least memory that `vectors` and `edges` do not forbid; its cost is its bytes."""
        weights, copies = fold.problem(self.tables.held_bytes(), self.tables.edge_bytes)
        lean = [np.where(np.isinf(cost), np.inf, weight) for cost, weight in zip(vectors, weights, strict=True)]
        forbidden = [(u, v, np.where(np.isinf(matrix), np.inf, 0.0)) for u, v, matrix in edges if np.isinf(matrix).any()]
        return eliminate(lean, [*copies, *forbidden])

    def _leanest(self, fold: Fold, costs: list[Array], edges: FoldedEdges) -> tuple[Priced, _Solved]:
        """Return the choice of least memory by the tables, for the case that nothing fits with the reserve of a faster plan."""
        solution = self._lean(fold, fold.costs(costs, edges.within), edges.between)
        choice = fold.unfold(solution.choice)
        cost = self._cost(choice, costs)
        return self.price(choice), _Solved(choice=choice, cost=cost, lower_bound=0.0, is_proved=False, cut_off="memory limit")

    def _cost(self, choice: Sequence[int], costs: Sequence[Array]) -> float:
        """Return the additive cost of a choice. [s]"""
        vertex_cost = sum(float(cost[index]) for cost, index in zip(costs, choice, strict=True))
        return vertex_cost + sum(float(matrix[choice[u], choice[v]]) for u, v, matrix in self.tables.edges)

    def _barred(self, allowed: Filter | None) -> list[NDArray[np.bool_] | None]:
        vertices = len(self.tables.vertices)
        if allowed is None:
            return [None] * vertices
        barred: list[NDArray[np.bool_] | None] = []
        for operator, rows in zip(self.network.operators, self.space.operators, strict=True):
            keep = allowed(operator, rows)
            if not keep.any():
                raise bad_field(f"allowed[{operator.name}]", "none", "no configuration is left", "the mesh may not divide its dims")
            barred.append(~keep)
        return [*barred, *([None] * (vertices - len(barred)))]


def _highest(lines: Sequence[tuple[float, float]]) -> float:
    """Return the share at which the least of the lines (value at 0, value at 1) is highest, rounded for convergence."""
    shares = [0.0, 1.0]
    for (a, b), (c, d) in itertools.combinations(lines, 2):
        slope = (b - a) - (d - c)
        if slope != 0.0 and 0.0 < (c - a) / slope < 1.0:
            shares.append(round((c - a) / slope, 3))
    return max(shares, key=lambda share: min(a + share * (b - a) for a, b in lines))


def chosen_plan(
    estimator: Estimator,
    space: NetworkSpace,
    setting: StepSetting,
    choice: Sequence[int],
    *,
    cluster: str,
    stages: tuple[str, ...] = (),
) -> Plan:
    """Return a choice of configurations as a plan of the estimator's job; `stages` as in `Assignment`."""
    job = estimator.job
    return assigned_plan(
        job,
        cluster=cluster,
        assignment=space.assignment(choice, stages=stages),
        micro_batch=job.global_batch // setting.num_microbatches,
        zero=setting.zero,
        profile=estimator.profile.name,
    )


def network_planner(
    estimator: Estimator,
    *,
    cluster: str,
    num_microbatches: int = 1,
    zero: int = 0,
    num_stages: int = 1,
    axes: tuple[MeshAxis, ...] = (),
    most_dims: int = 0,
    maker: TableMaker | None = None,
) -> NetworkPlanner[Prediction]:
    """Return space and tables of the estimator's network, at the batch of one microbatch, on the chips of one stage.

    cluster     name of the cluster in plans
    most_dims   see `network_space`; lowered if the tables would take more than .8 GB, and reported as `NetworkSearch.most_dims`
    maker       `NetworkPlanner.maker` of the same network on the same mesh at another ZeRO stage
    """
    job, machine = estimator.job, estimator.machine
    network = estimator.programs.network(job.global_batch // num_microbatches)
    start = time.perf_counter()
    setting = StepSetting(
        policy=job.policy, optimizer=job.optimizer, profile=estimator.profile, zero=zero, num_microbatches=num_microbatches
    )
    if maker is None:
        num_chips = estimator.cluster.num_chips // num_stages
        mesh = axes or mesh_axes(num_chips, machine.tier_sizes)
        maker = TableMaker(_affordable_space(network, mesh, most_dims), setting, MeshPrices(axes=mesh, machine=machine))
    space, tables = maker.space, maker.build(setting)

    def price(choice: Sequence[int]) -> Prediction:
        return estimator.predict(chosen_plan(estimator, space, setting, choice, cluster=cluster))

    least_time, timing = 0.0, estimator.profile.timing
    if num_stages == 1:
        # host time of the launches of `run`, in which every possible fusion is made
        launches = graph_launches(maker.run, estimator.profile)
        least_time = num_microbatches * timing.host_launch_time * launches + timing.step_time_constant
    return NetworkPlanner(
        network=network,
        price=price,
        context_bytes=sole_outside_bytes(estimator.profile, machine, estimator.cluster.num_chips // num_stages),
        least_time=least_time,
        setting=setting,
        space=space,
        tables=tables,
        table_time=time.perf_counter() - start,
        maker=maker,
    )


def _affordable_space(network: Graph, axes: tuple[MeshAxis, ...], most_dims: int) -> NetworkSpace:
    """Return the full space, or a coarser one with tables that fit."""
    if not any(operator.forward or operator.backward for operator in network.operators):
        raise bad_field("network", network.name, "computes nothing: it returns what it is given", "give one that takes time")
    space = network_space(network, axes, most_dims=most_dims)
    for coarser in (3, 2, 1):
        if 8.0 * table_entries(space) <= _MOST_TABLES:
            break
        if not most_dims or coarser < most_dims:
            space = network_space(network, axes, most_dims=coarser)
    # without a product that can be sharded, chips would only repeat each other's work
    num_chips = math.prod(axis.size for axis in axes)
    products = [
        rows
        for operator, rows in zip(network.operators, space.operators, strict=True)
        if any(isinstance(work, (Product, FusedAttention)) for work in operator.forward)
    ]
    if products and num_chips > 1 and max(float(rows.parts.prod(axis=1).max()) for rows in products) == 1.0:
        factors = sorted({axis.size for axis in space.axes})
        raise bad_field(
            "chips",
            num_chips,
            f"no dim of a product in {network.name} divides by {' or '.join(map(str, factors))}",
            "use another number, or another batch",
        )
    return space


def _too_large(memory_limit: float, least: float) -> InputError:
    return InputError(
        f"memory: {format_bytes(memory_limit)} of a chip: no plan of the space needs less than {format_bytes(least)}; "
        "use more chips, a higher ZeRO stage, smaller microbatches or a pipeline"
    )


def fixed_parts(wanted: Mapping[str, Mapping[str, int]]) -> Filter:
    """Fix the number of parts of each dim of some operators by name (1 where left out); others are free."""

    def keep(operator: Operator, rows: Configurations) -> NDArray[np.bool_]:
        if operator.name not in wanted:
            return np.ones(len(rows), dtype=bool)
        parts = wanted[operator.name]
        for dim in parts:
            if dim not in rows.dims:
                raise bad_field(f"parts[{operator.name}]", dim, "is not a dim of the operator", f"use {', '.join(rows.dims)}")
        return np.asarray((rows.parts == np.array([parts.get(dim, 1) for dim in rows.dims])).all(axis=1))

    return keep
