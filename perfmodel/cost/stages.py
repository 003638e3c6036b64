"""Runs of each region of the graph on the distinct ranks of a pipeline: those that can be the slowest or the fullest.

Regions are assigned to ranks in graph order: regions before the first block to the first rank, regions after the last block to the
last rank, and blocks as the plan assigns them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice, zip_longest
from operator import add, attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.foundation.columns import Column
from perfmodel.foundation.session import session_cache
from perfmodel.parallel.layout import Placement, rank_of_stage, stages_of_ranks
from perfmodel.workload.graph import Region

if TYPE_CHECKING:
    from perfmodel.cost.program import Program

Regions = tuple[Region, ...]
#: One value for each distinct rank: the first, the distinct middle ranks of `Stages`, the last.
Ranks = tuple[Any, ...]
#: One value for each region.
ByRegion = tuple[Any, ...]
#: (region, number of runs; None: once) for each region that runs at all.
Terms = tuple[tuple[int, Any], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """Runs of each region on the distinct pipeline ranks, as columns, or as numbers if all plans agree.

    Distinct ranks are the first, the middle ranks that may hold most (none with fewer than three ranks), and the last. With one rank the
    first and the last are the same.

    inner      regions from the first block to the last
    runs       [rank][region]
    total      [region] over all ranks
    is_single  1 with one rank, else 0
    unequal    blocks of the longest virtual stage, less the mean of those of the largest rank
    is_folded  whether the last virtual stage is on the first rank (`Placement.V`)
    by_stage   [virtual stage][region] runs, in model order; empty unless the stages were asked for it

    num_ranks        number of distinct ranks
    is_first, is_last  [rank] 1 for the first rank, and for that of the last virtual stage, else 0
    has_both_ends    [rank] 1 if the first and the last virtual stage are on it, else 0
    ending           the rank of the last virtual stage; with one rank, the last entry stands for it
    blocks           [rank] number of blocks of all kinds
    sums, total_sum, stage_terms  terms of the sum over regions: on each distinct rank, over all ranks, on each virtual stage
    """

    regions: Regions
    inner: range
    runs: tuple[ByRegion, ...]
    total: ByRegion
    is_single: Column
    unequal: Column = 0.0
    is_folded: bool = False
    by_stage: tuple[ByRegion, ...] = ()
    num_ranks: int = field(init=False)
    is_first: Ranks = field(init=False, repr=False, compare=False)
    is_last: Ranks = field(init=False, repr=False, compare=False)
    has_both_ends: Ranks = field(init=False, repr=False, compare=False)
    ending: int = field(init=False, repr=False, compare=False)
    blocks: Ranks = field(init=False, repr=False, compare=False)
    sums: tuple[Terms, ...] = field(init=False, repr=False, compare=False)
    total_sum: Terms = field(init=False, repr=False, compare=False)
    stage_terms: tuple[Terms, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        count, blocks, sums = len(self.runs), list[Any](), list[Terms]()
        for runs in (*self.runs, self.total, *self.by_stage):
            terms: list[tuple[int, Any]] = []
            number: Any = None
            for i, times in enumerate(runs):
                if not isinstance(times, float):
                    terms.append((i, times))
                elif times != 0.0:
                    terms.append((i, None if times == 1.0 else times))
                if self.regions[i].is_block:
                    number = times if number is None else number + times
            sums.append(tuple(terms))
            blocks.append(0.0 if number is None else number)
        sums[count - 1] = sums[count - 1][::-1]  # the last rank is summed from its end of the graph, as the first is
        from_first = (1.0, *(0.0,) * (count - 2), self.is_single)
        ranks = {
            "num_ranks": count,
            "is_first": from_first,
            "is_last": from_first if self.is_folded else from_first[::-1],
            "has_both_ends": (1.0, *(0.0,) * (count - 1)) if self.is_folded else (self.is_single,) * count,
            "ending": 0 if self.is_folded else count - 1,
            "blocks": tuple(blocks[:count]),
            "sums": tuple(sums[:count]),
            "total_sum": sums[count],
            "stage_terms": tuple(sums[count + 1 :]),
        }
        for name, value in ranks.items():
            object.__setattr__(self, name, value)

    def take(self, places: NDArray[np.int64]) -> Stages:
        """Return the stages of some of the plans."""

        def some(value: object) -> Any:
            return value[places] if isinstance(value, np.ndarray) else value

        return Stages(
            regions=self.regions,
            inner=self.inner,
            runs=tuple(tuple(map(some, runs)) for runs in self.runs),
            total=tuple(map(some, self.total)),
            is_single=some(self.is_single),
            unequal=some(self.unequal),
            is_folded=self.is_folded,
            by_stage=tuple(tuple(map(some, runs)) for runs in self.by_stage),
        )


def sum_of(values: Sequence[Any]) -> Any:
    total = values[0] if values else 0.0
    for value in values[1:]:
        total = total + value
    return total


def block_rows(regions: Regions) -> NDArray[np.bool_]:
    """Return [regions, 1]: whether each region is a block."""
    return np.array([*map(attrgetter("is_block"), regions)])[:, None]


def inner_regions(regions: Regions) -> range:
    """Return the regions from the first block to the last; without blocks, an empty range before the last region."""
    blocks = np.flatnonzero(block_rows(regions)).tolist()
    return range(blocks[0], blocks[-1] + 1) if blocks else range(len(regions) - 1, len(regions) - 1)


def mean_block(values: ByRegion, of: Stages | Program, runs: ByRegion) -> Any:
    """Return the mean of a quantity over the blocks, with the regions between them: the value itself for one kind of block, 0 for none.

    runs   number of times that each region runs: on a rank, on all ranks, or in the graph
    """
    inner = of.inner
    if len(inner) < 2:
        return values[inner.start] if inner else 0.0
    number = sum_of([runs[i] for i in inner if of.regions[i].is_block])
    return sum_of([runs[i] * values[i] for i in inner]) / np.maximum(number, 1.0)


def neighbour(regions: Regions, region: int, step: int) -> int:
    """Return the region that runs before this one in steady state: forward (step -1) or backward (step 1).

    It is the region itself if it is repeated, and its predecessor in the cycle if regions alternate. Out of range: there is none.
    """
    this, next_to = regions[region], region + step
    turn = [i for i, other in enumerate(regions) if this.turn and other.turn == this.turn]
    if len(turn) > 1:
        return turn[(turn.index(region) + step) % len(turn)]
    is_alone = this.count == 1 and 0 <= next_to < len(regions) and regions[next_to].is_block
    return region if this.carried and not is_alone else next_to


@session_cache(maxsize=4096)
def stages_of(
    regions: Regions, stage_layers: tuple[int, ...], num_ranks: int, placement: Placement = Placement.LOOP, by_stage: bool = False
) -> Stages:
    """Return the stages for the blocks of each virtual stage, in model order. by_stage: with the runs of each."""
    stages = _stages(regions, runs_of_ranks(regions, stage_layers, num_ranks, placement), stage_layers, placement)
    if not by_stage:
        return stages
    return replace(stages, by_stage=tuple(map(tuple, runs_of_stages(regions, stage_layers).astype(np.float64).tolist())))


@session_cache(maxsize=4096)
def stages_on_pools(regions: Regions, stage_layers: tuple[int, ...], pools: tuple[int, ...], placement: Placement) -> Stages:
    """Return stages whose ranks run on chips of several kinds: pipeline rank i on pool `pools[i]`.

    Consecutive ranks on one pool have their own copy of the regions. A quantity of a region can then differ by pool, and the sums over
    ranks stay valid.
    """
    every = tuple(replace(it, turn=f"{it.turn}/{copy}" if it.turn else "") for copy in range(_copies(pools)[-1] + 1) for it in regions)
    return _stages(every, runs_on_pools(regions, stage_layers, pools, placement), stage_layers, placement)


def _copies(pools: tuple[int, ...]) -> list[int]:
    """Return the copy of the regions that each pipeline rank runs."""
    return [0, *np.cumsum(np.diff(pools) != 0).tolist()]


def runs_on_pools(regions: Regions, stage_layers: tuple[int, ...], pools: tuple[int, ...], placement: Placement) -> list[tuple[float, ...]]:
    """Return how often each rank runs each region of `stages_on_pools`."""
    copies, nothing = _copies(pools), (0.0,) * len(regions)
    runs = zip(runs_of_ranks(regions, stage_layers, len(pools), placement), copies, strict=True)
    return [(*nothing * copy, *runs_of_rank, *nothing * (copies[-1] - copy)) for runs_of_rank, copy in runs]


def order_on_pools(regions: Regions, stage_layers: Sequence[int], pools: tuple[int, ...], placement: Placement) -> list[list[int]]:
    """Return the regions of `stages_on_pools` of each virtual stage in forward order."""
    copies = _copies(pools)
    return [
        [copies[rank_of_stage(stage, len(pools), placement)] * len(regions) + region for region in run]
        for stage, run in enumerate(stage_order(regions, stage_layers))
    ]


def _stages(regions: Regions, per_rank: Sequence[tuple[float, ...]], stage_layers: tuple[int, ...], placement: Placement) -> Stages:
    """Return the stages of pipeline ranks, given how often each rank runs each region."""
    p = len(per_rank)
    of_ranks = stages_of_ranks(p, len(stage_layers), placement)
    by_rank = np.array(stage_layers)[np.array(of_ranks)]
    between = _largest(per_rank[1:-1]) if p > 2 else [(0.0,) * len(regions)]
    return Stages(
        regions=regions,
        inner=inner_regions(regions),
        runs=(per_rank[0], *between, per_rank[-1]),
        total=tuple(np.sum(per_rank, axis=0).tolist()),
        is_single=1.0 if p == 1 else 0.0,
        unequal=max(stage_layers) - float(by_rank.sum(axis=1).max() / by_rank.shape[1]),
        is_folded=p > 1 and len(stage_layers) - 1 in of_ranks[0],
    )


def _largest(ranks: Sequence[tuple[float, ...]]) -> list[tuple[float, ...]]:
    """Return the ranks without those that run no region more often than another one."""
    maximal: list[tuple[float, ...]] = []
    for rank in dict.fromkeys(ranks):
        if not any(all(a >= b for a, b in zip(other, rank, strict=True)) for other in maximal):
            maximal = [other for other in maximal if any(a > b for a, b in zip(other, rank, strict=True))] + [rank]
    return maximal


def rank_runs(regions: Regions, stage_layers: Sequence[int], num_ranks: int, rank: int, placement: Placement) -> tuple[float, ...]:
    """Return how often one rank runs each region."""
    return runs_of_ranks(regions, tuple(stage_layers), num_ranks, placement)[rank]


@session_cache(maxsize=4096)
def runs_of_ranks(regions: Regions, stage_layers: tuple[int, ...], num_ranks: int, placement: Placement) -> tuple[tuple[float, ...], ...]:
    """Return how often each rank runs each region."""
    by_rank = runs_of_stages(regions, stage_layers)[np.array(stages_of_ranks(num_ranks, len(stage_layers), placement))].sum(axis=1)
    return tuple(map(tuple, by_rank.astype(np.float64).tolist()))


def stage_order(regions: Regions, stage_layers: Sequence[int]) -> list[list[int]]:
    """Return the regions of each virtual stage in forward order."""
    inner, order = inner_regions(regions), iter(_order(regions))
    stage_regions = []
    for runs in runs_of_stages(regions, stage_layers).tolist():
        before = [i for i in range(inner.start) if runs[i]]
        after = [i for i in range(inner.stop, len(regions)) if runs[i]]
        stage_regions.append([*before, *islice(order, sum(runs[inner.start : inner.stop])), *after])
    return stage_regions


def runs_of_stages(regions: Regions, stage_layers: Sequence[int]) -> NDArray[np.int64]:
    """Return the number of runs as [virtual stage, region]."""
    inner = inner_regions(regions)
    stage_runs = np.zeros((len(stage_layers), len(regions)), dtype=np.int64)
    stage_runs[0, : inner.start] = 1
    stage_runs[-1, inner.stop :] = 1
    if len(inner) == 1:
        stage_runs[:, inner.start] = stage_layers
        return stage_runs
    ends, done, stage = np.cumsum(stage_layers).tolist(), 0, 0
    for i in _order(regions):
        # a region that is not a block runs with the next block
        while stage < len(ends) - 1 and done >= ends[stage]:
            stage += 1
        stage_runs[stage, i] += 1
        done += int(regions[i].is_block)
    return stage_runs


def _order(regions: Regions) -> list[int]:
    """Return the inner regions in execution order. Regions that alternate are interleaved in proportion to their counts."""
    inner = inner_regions(regions)
    begins: dict[str, int] = {}
    order = []
    for i in inner:
        begin = begins.setdefault(regions[i].turn, i) if regions[i].turn else i
        order += [(begin, (number + 1) / regions[i].count, i) for number in range(regions[i].count)]
    return [i for *_, i in sorted(order)]


def stage_columns(plans: Sequence[Stages]) -> Stages:
    """Return the stages of several plans as one: arrays with one entry a plan, or numbers if all are the same."""
    if all(stages is plans[0] for stages in plans):
        return plans[0]
    between = max(stages.num_ranks for stages in plans) - 2
    nothing = (0.0,) * len(plans[0].regions)
    by_stage = [stages.by_stage for stages in plans]
    ranks = [(stages.runs[0], *stages.runs[1:-1], *[nothing] * (between - stages.num_ranks + 2), stages.runs[-1]) for stages in plans]
    return Stages(
        regions=plans[0].regions,
        inner=plans[0].inner,
        runs=tuple(tuple(map(_column, zip(*rank, strict=True))) for rank in zip(*ranks, strict=True)),
        total=tuple(map(_column, zip(*(stages.total for stages in plans), strict=True))),
        is_single=np.array([stages.is_single for stages in plans]),
        unequal=np.array([stages.unequal for stages in plans]),
        is_folded=plans[0].is_folded,
        by_stage=tuple(tuple(map(_column, zip(*of_plans, strict=True))) for of_plans in zip_longest(*by_stage, fillvalue=nothing)),
    )


def _column(values: tuple[float, ...]) -> Any:
    return values[0] if values[0] in (0.0, 1.0) and len(set(values)) == 1 else np.array(values)


# --- sums over what ranks run -----------------------------------------------------------------------------------


def region_sum(values: ByRegion, terms: Terms) -> Any:
    """Return the sum of a quantity over regions: of a rank, of a virtual stage, or of all ranks (`Stages.total_sum`)."""
    total: Column | None = None
    for region, times in terms:
        more = values[region] if times is None else times * values[region]
        total = more if total is None else total + more
    return 0.0 if total is None else total


def stage_sums(values: ByRegion, stages: Stages) -> Ranks:
    """Return the sum of a quantity over the regions of each distinct rank."""
    return tuple(map(partial(region_sum, values), stages.sums))


def run_times(times: Column, value: Column) -> Any:
    """Return `times * value`, without a multiplication for 0 and 1."""
    if isinstance(times, float) and times in (0.0, 1.0):
        return value if times else 0.0
    return times * value


def slowest_stage(values: Sequence[Any]) -> Any:
    slowest = values[0]
    for other in values[1:]:
        slowest = np.maximum(slowest, other)
    return slowest


def plus(values: Ranks, others: Ranks) -> Ranks:
    return tuple(map(add, values, others))
