"""The best sharding of every operator of any network on a cluster: space, tables and search kernel in one line.

What shows of gradient reductions is a maximum over the whole step (they hide under backward while there is any), which no sum over
operators is. So the search runs with several shares of them taken to show, each result is predicted whole, and the best prediction wins;
`lower_bound` comes from the least share that can show.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.machine import Machine
from perfmodel.cost.network_cost import MeshPrices, StepSetting
from perfmodel.cost.network_predict import NetworkPrediction, predict_network
from perfmodel.errors import InputError, bad_field
from perfmodel.parallel.network_plan import MeshAxis, mesh_axes
from perfmodel.planner.network_space import Configurations, NetworkSpace, network_space
from perfmodel.planner.network_tables import NetworkTables, network_tables
from perfmodel.search import eliminate
from perfmodel.workload.network import Network, NetworkOperator

Array = NDArray[np.float64]

#: Which configurations an operator may have: a mask of its rows; all where it is empty.
Filter = Callable[[NetworkOperator, Configurations], NDArray[np.bool_]]

_SHARES = (0.5, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSearch:
    """lower_bound: of the step time of any plan of the space, by its additive part [s]; is_proved: each search ended with a proof."""

    best: NetworkPrediction
    lower_bound: float
    is_proved: bool
    gap: float
    num_configurations: tuple[int, ...]
    table_time: float
    search_time: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NetworkPlanner:
    """A network on a mesh, with its tables made once for many searches."""

    network: Network
    cluster: str
    machine: Machine
    setting: StepSetting
    space: NetworkSpace
    tables: NetworkTables
    table_time: float

    def search(self, allowed: Filter | None = None, *, time_limit: float = 600.0) -> NetworkSearch:
        """The best plan, or the best among the configurations that `allowed` lets each operator have."""
        start = time.perf_counter()
        barred = self._barred(allowed)
        found: list[NetworkPrediction] = []
        bound, is_proved, gap = 0.0, True, 0.0
        for share in self._shares():
            costs = [
                cost if bar is None else np.where(bar, np.inf, cost)
                for cost, bar in zip(self.tables.costs(reduction_share=share, gather_share=share), barred, strict=True)
            ]
            solution = eliminate(costs, self.tables.edges, time_limit=time_limit)
            if not np.isfinite(solution.cost):
                raise InputError("allowed: no choice of configurations is left; allow more of them")
            if not found:
                bound = solution.lower_bound * self.setting.num_microbatches + self.setting.profile.step_time_constant
            is_proved, gap = is_proved and solution.is_proved, max(gap, 1.0 - solution.lower_bound / solution.cost)
            plan = self.space.plan(solution.choice, cluster=self.cluster)
            found.append(predict_network(self.network, plan, self.setting, self.machine))
        best = min(found, key=lambda prediction: prediction.step_time)
        return NetworkSearch(
            best=best,
            lower_bound=min(bound, best.step_time),
            is_proved=is_proved,
            gap=gap,
            num_configurations=self.space.num_configurations,
            table_time=self.table_time,
            search_time=time.perf_counter() - start,
        )

    def _shares(self) -> tuple[float, ...]:
        """Least share of parameter collectives that can show, then more of it; all of them where nothing hides."""
        profile = self.setting.profile
        if not profile.overlaps_gradients:
            return (1.0,)
        least = profile.exposed_gradient_fraction + (1.0 - profile.exposed_gradient_fraction) * profile.compute_slowdown_under_communication
        return (least, *(share for share in _SHARES if share > least))

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


def network_planner(
    network: Network,
    *,
    cluster: str,
    num_chips: int,
    machine: Machine,
    setting: StepSetting,
    axes: tuple[MeshAxis, ...] = (),
    most_dims: int = 0,
) -> NetworkPlanner:
    """Space and tables of a network on so many chips of a cluster."""
    start = time.perf_counter()
    mesh = axes or mesh_axes(num_chips, machine.tier_sizes)
    space = network_space(network, mesh, most_dims=most_dims)
    tables = network_tables(space, setting, MeshPrices(axes=mesh, machine=machine))
    return NetworkPlanner(
        network=network,
        cluster=cluster,
        machine=machine,
        setting=setting,
        space=space,
        tables=tables,
        table_time=time.perf_counter() - start,
    )


def fixed_parts(wanted: Mapping[str, Mapping[str, int]]) -> Filter:
    """Operators by name with the number of parts of each of their dims (1 where left out); others may be anything."""

    def keep(operator: NetworkOperator, rows: Configurations) -> NDArray[np.bool_]:
        if operator.name not in wanted:
            return np.ones(len(rows), dtype=bool)
        parts = wanted[operator.name]
        for dim in parts:
            if dim not in rows.dims:
                raise bad_field(f"parts[{operator.name}]", dim, "is not a dim of the operator", f"use {', '.join(rows.dims)}")
        return np.asarray((rows.parts == np.array([parts.get(dim, 1) for dim in rows.dims])).all(axis=1))

    return keep
