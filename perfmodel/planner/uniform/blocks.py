"""Columns of many plans at once, [layouts, micro-batches, recompute, schedules], and the memory of each plan."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.estimate import Estimator
from perfmodel.cost.memory.chip import LiveLayers, outside_bytes, reserve_factor, runs_at
from perfmodel.cost.memory.moments import ActivationTerms, At, MemoryTerms
from perfmodel.cost.memory.plan import activations_as, extra_memory, imbalance_of, rank_memory_terms, replicas
from perfmodel.cost.stages import sum_of
from perfmodel.cost.step import RegionTimes, hop_time
from perfmodel.cost.update import ParameterTerms
from perfmodel.foundation.columns import Column
from perfmodel.foundation.memory_headroom import MemoryUncertainty, RankNeed
from perfmodel.frameworks.profile import ExecutionProfile
from perfmodel.parallel.grid import LayoutGrid
from perfmodel.parallel.pass_orders import MOST_GATHERED
from perfmodel.planner.uniform.schedules import schedule_columns
from perfmodel.planner.uniform.space import PipelineGroup
from perfmodel.planner.uniform.tables import take_grid

Array = NDArray[np.float64]
Index = NDArray[np.int64]
Cells = NDArray[np.bool_]
KeptBytes = dict[int, dict[At, Array]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Columns:
    """Quantities of layouts, micro-batches and kinds of recomputation that depend on no schedule and no stage.

    All layouts have one pipeline degree and rule set.

    grid          columns [layouts, 1, 1, 1]
    is_scattered  whether the residual stream is sharded over tp
    outside, num_replicas   see `MemoryTerms`
    """

    estimator: Estimator
    pp: int
    grid: LayoutGrid
    regions: RegionTimes
    activations: ActivationTerms
    activation_bytes: float
    num_microbatches: Array
    is_scattered: bool
    outside: Array
    num_replicas: Array

    @classmethod
    def at(cls, estimator: Estimator, grid: LayoutGrid, **others: Any) -> Columns:
        """Return the columns of the layouts of a grid [layouts]."""
        grid = column_grid(grid)
        outside = np.broadcast_to(outside_bytes(estimator.profile, estimator.machine, grid), grid.degree["pp"].shape)
        return cls(estimator=estimator, grid=grid, outside=outside, num_replicas=replicas(grid), **others)

    def take(self, some: slice | Index) -> Columns:
        """Return the columns of some of the layouts."""
        pick = itemgetter(some)
        return replace(
            self,
            grid=take_grid(self.grid, some),
            regions=self.regions.map_columns(pick),
            activations=activations_as(self.activations, pick),
            num_microbatches=self.num_microbatches if len(self.num_microbatches) == 1 else self.num_microbatches[some],
            outside=self.outside[some],
            num_replicas=self.num_replicas[some],
        )

    def hop(self) -> Any:
        machine, profile = self.estimator.machine, self.estimator.profile
        boundary, tp, seq_len = self.activations.boundary, self.grid.degree["tp"], float(self.estimator.job.seq_len)
        return hop_time(boundary, tp, profile, machine, self.grid, seq_len=seq_len, is_scattered=self.is_scattered)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Flight:
    """Microbatches in flight in the pipelines of some columns (see `schedule_columns`), for the ranks that may be the fullest."""

    ranks: tuple[int, ...]
    kept: KeptBytes
    live: dict[int, LiveLayers]
    legal: Cells

    @classmethod
    def of(cls, columns: Columns, pipelines: PipelineGroup, least_microbatches: int) -> Flight:
        ranks = ranks_to_compare(columns.estimator.profile, pipelines, columns.pp)
        kept, live, legal = schedule_columns(
            columns.estimator,
            columns.activations,
            pipelines,
            columns.activation_bytes,
            columns.pp,
            columns.num_microbatches,
            ranks,
            least_microbatches,
        )
        return cls(ranks=ranks, kept=kept, live=live, legal=legal)

    def take(self, layouts: slice | Index, choices: slice | Index = slice(None)) -> Flight:
        """Return the entries of some of the layouts and schedules."""

        def some(values: Any) -> Any:
            values = values if len(values) == 1 else values[layouts]
            return values if values.shape[-1] == 1 or isinstance(choices, slice) else values[..., choices]

        kept = {rank: {at: values[layouts][..., choices] for at, values in of_rank.items()} for rank, of_rank in self.kept.items()}
        names = [field.name for field in fields(LiveLayers)]
        live = {rank: LiveLayers(**{name: some(getattr(of, name)) for name in names}) for rank, of in self.live.items()}
        return replace(self, kept=kept, live=live, legal=some(self.legal))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimit:
    """Memory that plans may take.

    uncertainty   distribution of needed over predicted memory
    ratio         largest allowed ratio of needed to predicted memory, for the uncertain part; None: any ratio
    capacity      the usable memory less the headroom   [byte]
    """

    uncertainty: MemoryUncertainty
    ratio: float | None
    capacity: float


def least_fixed(static: tuple[Any, Any, Any, Any], pipelines: PipelineGroup, outside: Any = 0.0) -> Any:
    """Return a lower bound of the fixed memory of a rank, by schedule: many virtual stages do not all keep their weights gathered."""
    fixed = pipelines.of_choices(sum_of(static) + outside)
    frees = np.array([float(choice.virtual_stages > MOST_GATHERED) for choice in pipelines.choices])
    return fixed - pipelines.of_choices(static[-1]) * frees if frees.any() and np.any(static[-1]) else fixed


def memory_lower_bound(flight: Flight, pipelines: PipelineGroup, static: list[Any], outside: object) -> Array:
    """Return a lower bound of the memory: kept activations of microbatches and fixed memory, without the working set. [byte]"""
    largest: Any = 0.0
    for rank in flight.ranks:
        stays = least_fixed(static[rank], pipelines, outside)
        for in_flight in flight.kept[rank].values():
            largest = np.maximum(largest, in_flight + stays)
    return np.asarray(largest)


def plan_memory(
    columns: Columns, flight: Flight, pipelines: PipelineGroup, terms: ParameterTerms, static: list[Any], memory_limit: MemoryLimit
) -> tuple[Array, Cells]:
    """Return the peak memory of every plan [byte], and which of them fit."""
    estimator, stages = columns.estimator, pipelines.stages
    profile = estimator.profile
    holding = MemoryTerms(
        activations=columns.activations,
        terms=terms,
        stages=stages,
        static=static,
        num_replicas=columns.num_replicas,
        num_microbatches=columns.num_microbatches,
        tp=columns.grid.degree["tp"],
        is_scattered=columns.is_scattered,
        activation_bytes=columns.activation_bytes,
        profile=profile,
        sizes=estimator.programs.sizes,
        factor=reserve_factor(profile, estimator.machine),
        outside=columns.outside,
    )
    memory: Any = None
    is_sure: Any = None
    uncertainty = memory_limit.uncertainty
    imbalance, extra = imbalance_of(estimator.job.model, columns.pp, stages, uncertainty), extra_memory(holding, uncertainty)
    for rank in flight.ranks:
        held = rank_memory_terms(holding, rank, flight.live[rank], of_live=pipelines.stages_of())
        most = _largest_prediction(memory_limit, estimator.machine.memory.usable, held.fixed, columns.outside, imbalance[rank], extra[rank])
        # if gradients wait for reduction, each moment has a working set of its own, even with the same microbatches in flight
        times = runs_at(rank, stages) if terms.program.keeps_gathered else tuple(flight.kept[rank])
        largest: Any = None
        for at in times:
            in_flight = flight.kept[rank].get(at, flight.kept[rank][At.BLOCKS])
            base = pipelines.of_choices(held.base(at, times))
            need = in_flight + (base if held.unreduced is None else base + held.unreduced.at(at))
            largest = need if largest is None else np.maximum(largest, need, out=largest)
        if most is not None:
            most = pipelines.of_choices(most)
            is_sure = largest <= most if is_sure is None else is_sure & (largest <= most)
        memory = largest if memory is None else np.maximum(memory, largest, out=memory)
    fits = memory <= memory_limit.capacity
    return memory, fits if is_sure is None else fits & is_sure


def _largest_prediction(memory_limit: MemoryLimit, usable: float, sure: Any, outside: Any, imbalance: Column, extra: Any) -> Any:
    """Return the largest prediction of a rank that fits at the risk, as columns; None if the headroom is stricter. [byte]"""
    if memory_limit.ratio is None:
        return None
    if np.all(imbalance == 1.0) and isinstance(extra, float) and usable / memory_limit.ratio >= memory_limit.capacity:
        return None  # usable / ratio is the least value of the largest prediction, at sure = 0
    need = RankNeed(total=0.0, sure=sure, outside=outside, imbalance=imbalance, extra=extra)
    return np.asarray(need.allowed(usable, memory_limit.ratio))


def column_grid(grid: LayoutGrid) -> LayoutGrid:
    """Return the layouts as columns [layouts, 1, 1, 1], to broadcast against micro-batches, recomputation and schedules."""

    def wide(column: Array) -> Array:
        return column[:, None, None, None]

    return LayoutGrid(
        degree={axis: wide(c) for axis, c in grid.degree.items()},
        fine={axis: wide(c) for axis, c in grid.fine.items()},
        inside=tuple({axis: wide(c) for axis, c in tier.items()} for tier in grid.inside),
        hop=tuple(wide(c) for c in grid.hop),
    )


def ranks_to_compare(profile: ExecutionProfile, pipelines: PipelineGroup, pp: int) -> tuple[int, ...]:
    """Return the pipeline ranks, of those in `Stages`, that may be the fullest.

    A middle rank with no more layers and no more passes in flight holds no more than the first, unless it keeps twice the boundaries;
    rounding keeps the order.
    """
    ranks = tuple(range(pipelines.stages.num_ranks))
    if pp > 2 and (profile.stages.pipeline_keeps_boundaries or pipelines.fuller_middle):
        return ranks
    return ranks[0], ranks[-1]
