"""Partition of a chain of blocks into pipeline stages, with a layout for each tensor between blocks.

    minimise   sum over stages i of T_i  +  (num_microbatches - 1) * max over i of T_i
    T_i      = times of the blocks of stage i  +  send time of the tensor that leaves it (none after the last)
    subject to  held weights of its blocks  +  in_flight[i] * their kept weights  <=  limits[i]

This is the time of one step of a synchronous pipeline (GPipe, 1F1B). T_i is the time of forward and backward of one microbatch.

1. `least[a, b, l, m]` is a lower bound of the time of the blocks a to b - 1 from layout l to layout m. It is a (min, +) product of their
   matrices at several prices of weight. Runs of equal blocks are multiplied once.
2. A dynamic program over (number of stages, number of blocks, layout) finds the partition of least sum whose T_i are all below a threshold.
   Its stages are then solved exactly (`constrained.py`). If a stage takes longer than its bound, the program runs again.
3. The threshold starts at infinity and falls. A partition with largest T_i = t settles all partitions between t and the previous threshold.
   The search ends when no remaining partition can be better.

Source: Zheng et al., Alpa, OSDI 2022 (arXiv 2201.12023), section 5.2 and equation 3. They enumerate the thresholds upward from a list.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from perfmodel.foundation.errors import InputError, bad_field
from perfmodel.search.budget import Budget
from perfmodel.search.constrained import eliminate_within
from perfmodel.search.problem import Array

#: Relative difference of two times or weights that are equal except for rounding.
_ROUNDING = 1e-12
#: Prices of weight at which bounds are computed, as multiples of (least time of all blocks / limit).
_PRICES = (0.0, *(2.0 ** (power / 2) for power in range(-14, 11)))

#: Least number of entries, and least time [s], that a started stage may use.
_LEAST_WORK, _LEAST_TIME = 3e7, 0.1
#: Fixed cost of one addition of the dynamic program, in entries.
_ENTRIES_OF_A_SUM = 5_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePartition:
    """Partition into stages: stage i has blocks `cuts[i]` to `cuts[i + 1] - 1`; `layouts[k]` is the layout of the tensor before block k.

    No partition costs less than `lower_bound` (up to rounding). `is_proved` is set where that equals `cost`: the partition is optimal.
    `cut_off` is the reason for an early end: `work limit`, or the user's `time limit`.
    """

    cost: float
    cuts: tuple[int, ...]
    layouts: tuple[int, ...]
    stage_times: tuple[float, ...]
    stage_weights: tuple[float, ...]
    lower_bound: float
    is_proved: bool
    num_programs: int
    num_searches: int
    cut_off: str = ""

    @property
    def gap(self) -> float:
        """Gap between the cost and its lower bound, as a share of the cost."""
        if self.is_proved or self.cost == self.lower_bound:
            return 0.0
        return (self.cost - self.lower_bound) / self.cost


def partition_chain(
    times: Sequence[ArrayLike],
    *,
    num_stages: int,
    num_microbatches: int,
    send_times: Sequence[ArrayLike] = (),
    held: Sequence[ArrayLike] = (),
    kept: Sequence[ArrayLike] = (),
    in_flight: Sequence[float] = (),
    limits: Sequence[float] = (),
    budget: Budget | None = None,
) -> StagePartition:
    """Return the partition of least cost.

    times       one matrix [layout before, layout after] per block, +inf forbids; adjacent blocks have the same layouts between them
    send_times  one vector over the layouts per tensor (n + 1 around n blocks): the sender's cost of a cut there; +inf forbids
    held, kept  weights, shaped as `times`: held once by a stage, and kept per microbatch in flight
    in_flight   largest number of microbatches in flight per stage; 1 if left out
    limits      largest weight of each stage; no limit if left out
    budget      when it is spent, the best partition so far is returned with its gap; a new `Budget` if left out

    Blocks passed as the same object are computed once.
    """
    chain = _read(times, send_times, held, kept)
    for field, number, least in (("num_stages", num_stages, 1), ("num_microbatches", num_microbatches, 1)):
        if isinstance(number, bool) or not isinstance(number, int | np.integer) or number < least:
            raise bad_field(field, number, "must be a whole number of at least 1", "give one")
    if num_stages > len(chain.times):
        raise bad_field("num_stages", num_stages, f"a stage needs a block, and there are {len(chain.times)}", "use fewer stages")
    loads = []
    for field, values, default in (("in_flight", in_flight, 1.0), ("limits", limits, math.inf)):
        numbers = [float(value) for value in values] or [default] * num_stages
        if len(numbers) != num_stages:
            raise bad_field(field, f"{len(numbers)} numbers", f"there are {num_stages} stages", "give one for each")
        for i, value in enumerate(numbers):
            if not value >= 0 or (field == "in_flight" and math.isinf(value)):
                raise bad_field(f"{field}[{i}]", value, "must be a number of at least 0", "give one for each stage")
        loads.append(numbers)
    return _Partition(chain, list(zip(*loads, strict=True)), int(num_microbatches), budget=budget or Budget()).run()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chain:
    times: list[Array]
    held: list[Array]
    kept: list[Array]
    sends: list[Array]

    @property
    def sizes(self) -> list[int]:
        return [len(send) for send in self.sends]

    def kinds(self) -> list[int]:
        """Return a number for each block; blocks made of the same objects share it."""
        seen: dict[tuple[int, int, int], int] = {}
        return [seen.setdefault((id(t), id(h), id(k)), len(seen)) for t, h, k in zip(self.times, self.held, self.kept, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    """Solution of the blocks a to b - 1 between two layouts. It takes `time`, at least `bound`; `layouts` are those at all boundaries."""

    time: float
    bound: float
    weight: float
    layouts: tuple[int, ...]


_IMPOSSIBLE = _Stage(time=math.inf, bound=math.inf, weight=math.inf, layouts=())
_UNKNOWN = _Stage(time=math.inf, bound=0.0, weight=math.inf, layouts=())


class _Load:
    """All runs of blocks under one (in_flight, limit): bounds of their times, and solutions of some."""

    def __init__(self, chain: _Chain, in_flight: float, limit: float) -> None:
        self.chain, self.limit = chain, limit
        weights: dict[tuple[int, int], Array] = {}
        self.weights = [weights.setdefault((id(h), id(k)), h + in_flight * k) for h, k in zip(chain.held, chain.kept, strict=True)]
        self.solved: dict[tuple[int, int, int], _Stage] = {}
        self.num_searches = 0
        n, most = len(chain.times), max(chain.sizes)
        self.least = np.full((n + 1, n + 1, most, most), np.inf)
        self.run_of = np.full((n + 1, n + 1), -1)
        self.ranges: dict[int, list[tuple[int, int]]] = {}
        self.fill()

    def fill(self) -> None:
        """Number the runs of blocks, equal runs alike, and bound each; a product is kept while longer runs need it."""
        chain, n, kinds = self.chain, len(self.chain.times), self.chain.kinds()
        fastest = math.fsum(float(t.min()) for t in chain.times)
        scale = fastest / self.limit if 0 < self.limit < math.inf and math.isfinite(fastest) else 0.0
        prices = np.array([price * scale for price in _PRICES]) if scale else np.zeros(1)
        longer: dict[int, dict[int, int]] = {-1: {}}
        for a in range(n):
            run = -1
            for b in range(a + 1, n + 1):
                run = longer[run].setdefault(kinds[b - 1], len(longer) - 1)
                longer.setdefault(run, {})
                self.run_of[a, b] = run
                self.ranges.setdefault(run, []).append((a, b))
        priced = {kind: self.stack(k, prices) for k, kind in enumerate(kinds)}
        waiting = [(run, priced[kind]) for kind, run in longer[-1].items()]
        while waiting:
            run, product = waiting.pop()
            self.bound_run(run, product, prices)
            for kind, child in longer[run].items():
                waiting.append((child, (product[:, :, :, None] + priced[kind][:, None, :, :]).min(axis=2)))

    def bound_run(self, run: int, product: Array, prices: Array) -> None:
        bound = product[0]
        if math.isfinite(self.limit):
            bounds = product[:-1] - prices[:, None, None] * self.limit
            bound = np.maximum(bounds.max(axis=0), bound)
            bound = np.where(product[-1] > self.limit * (1.0 + _ROUNDING), np.inf, bound)
        for a, b in self.ranges[run]:
            self.least[a, b, : bound.shape[0], : bound.shape[1]] = bound

    def stack(self, k: int, prices: Array) -> Array:
        """Return time + price * weight of a block for every price, then its weight."""
        t, w = self.chain.times[k], self.weights[k]
        return np.stack([*(t + price * w for price in prices), np.where(np.isinf(t), np.inf, w)])

    def solve(self, a: int, b: int, first: int, last: int, *, budget: Budget) -> _Stage:
        key = (int(self.run_of[a, b]), first, last)
        if key not in self.solved:
            self.solved[key] = stage = self.search(a, b, first, last, budget=budget)
            for c, d in self.ranges[key[0]]:
                self.least[c, d, first, last] = max(self.least[c, d, first, last], stage.bound)
        return self.solved[key]

    def search(self, a: int, b: int, first: int, last: int, *, budget: Budget) -> _Stage:
        ends = [np.array([first]), *(np.arange(size) for size in self.chain.sizes[a + 1 : b]), np.array([last])]
        cut = {0, b - a - 1}

        def edges(arrays: Sequence[Array]) -> list[tuple[int, int, Array]]:
            blocks = arrays[a:b]
            return [(k, k + 1, matrix[np.ix_(ends[k], ends[k + 1])] if k in cut else matrix) for k, matrix in enumerate(blocks)]

        zeros = {len(options): np.zeros(len(options)) for options in ends}
        nothing = [zeros[len(options)] for options in ends]
        self.num_searches += 1
        allowed = budget.part(max(_LEAST_WORK, budget.left), least_time=_LEAST_TIME)
        pairs = edges(self.weights) if math.isfinite(self.limit) else []
        try:
            solution = eliminate_within(nothing, edges(self.chain.times), nothing, self.limit, edge_weights=pairs, budget=allowed)
        except InputError:  # every path forbidden or over the limit (bounds are rounded, this is not), or no budget
            return _UNKNOWN if allowed.is_spent else _IMPOSSIBLE
        layouts = tuple(int(options[label]) for options, label in zip(ends, solution.choice, strict=True))
        weight = math.fsum(float(matrix[pair]) for matrix, pair in zip(self.weights[a:b], itertools.pairwise(layouts), strict=True))
        return _Stage(time=solution.cost, bound=solution.lower_bound, weight=weight, layouts=layouts)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Path:
    """Result of the dynamic program: (first block, end block, first layout, last layout) of each stage."""

    total: float
    stages: tuple[tuple[int, int, int, int], ...]


class _Partition:
    """State of one search, with the best partition so far."""

    def __init__(self, chain: _Chain, loads: Sequence[tuple[float, float]], num_microbatches: int, *, budget: Budget) -> None:
        self.chain, self.budget = chain, budget
        self.repeats = num_microbatches - 1
        by_load = {load: _Load(chain, *load) for load in dict.fromkeys(loads)}
        self.loads = [by_load[load] for load in loads]
        most = max(chain.sizes)
        self.sends = np.full((len(chain.sizes), most), np.inf)
        for k, send in enumerate(chain.sends):
            self.sends[k, : len(send)] = send
        self.best: tuple[float, list[_Stage], _Path, list[float]] | None = None
        self.num_programs = 0

    def run(self) -> StagePartition:
        threshold, bound, is_cut_off = math.inf, math.inf, False
        while threshold > 0:
            path, stages = self.shortest(threshold)
            if path is None:
                break
            stage_times = self.stage_times(path, stages)
            cost = math.fsum(stage_times) + self.repeats * max(stage_times)
            if math.isfinite(cost) and (self.best is None or cost < self.best[0]):
                self.best = (cost, stages, path, stage_times)
            if self.budget.is_spent or self.best is None:
                is_cut_off, bound = True, min(bound, path.total)
                break
            # no partition below the threshold has a smaller sum; a better one has a smaller maximum than `largest_better`
            largest = max(self.stage_times(path, stages, of_bounds=True))
            bound = min(bound, path.total + self.repeats * largest)
            largest_better = (self.best[0] - path.total) / self.repeats if self.repeats else 0.0
            threshold = min(largest, largest_better) * (1.0 - _ROUNDING)
        if self.best is None:
            if is_cut_off:
                raise self.budget.ran_out("no partition")
            raise InputError("limits: no partition is possible; raise the limits, use more stages or allow more layouts")
        cost, stages, path, stage_times = self.best
        bound = min(bound, cost)
        is_proved = not is_cut_off and cost - bound <= _ROUNDING * cost
        return StagePartition(
            cost=cost,
            cuts=(*(a for a, _, _, _ in path.stages), len(self.chain.times)),
            layouts=(stages[0].layouts[0], *(layout for stage in stages for layout in stage.layouts[1:])),
            stage_times=tuple(stage_times),
            stage_weights=tuple(stage.weight for stage in stages),
            lower_bound=cost if is_proved else bound,
            is_proved=is_proved,
            num_programs=self.num_programs,
            num_searches=sum(load.num_searches for load in dict.fromkeys(self.loads)),
            cut_off="" if is_proved else self.budget.spent,
        )

    def shortest(self, threshold: float) -> tuple[_Path | None, list[_Stage]]:
        """Return the partition of least sum whose stages all take less than the threshold, and its solved stages."""
        while True:
            path = self.program(threshold)
            if path is None:
                return None, []
            before = [self.least_of(i, *stage) for i, stage in enumerate(path.stages)]
            stages = [self.loads[i].solve(*stage, budget=self.budget) for i, stage in enumerate(path.stages)]
            after = [self.least_of(i, *stage) for i, stage in enumerate(path.stages)]
            if all(new <= old + _ROUNDING * abs(old) for old, new in zip(before, after, strict=True)):
                return path, stages
            if self.budget.is_spent:
                return path, stages

    def least_of(self, i: int, a: int, b: int, first: int, last: int) -> float:
        return float(self.loads[i].least[a, b, first, last])

    def stage_times(self, path: _Path, stages: Sequence[_Stage], *, of_bounds: bool = False) -> list[float]:
        sent = [float(self.sends[b, last]) for _, b, _, last in path.stages[:-1]]
        return [(stage.bound if of_bounds else stage.time) + send for stage, send in zip(stages, [*sent, 0.0], strict=True)]

    def program(self, threshold: float) -> _Path | None:
        """Return the partition of least sum by the bounds. total[b, m]: least sum of stages that end before block b in layout m."""
        self.num_programs += 1
        n, most = len(self.chain.times), max(self.chain.sizes)
        self.budget.spend(len(self.loads) * n * (0.5 * n * most**2 + _ENTRIES_OF_A_SUM))
        total = np.full((n + 1, most), np.inf)
        total[0, : self.chain.sizes[0]] = 0.0
        history: list[tuple[NDArray[np.int64], Array]] = []
        for i, load in enumerate(self.loads):
            is_last = i == len(self.loads) - 1
            longer = np.full((n + 1, most), np.inf)
            origin = np.zeros((n + 1, most), dtype=np.int64)
            for b in [n] if is_last else range(i + 1, n):
                stage_times = load.least[i:b, b] if is_last else load.least[i:b, b] + self.sends[b]
                sums = np.where(stage_times <= threshold, stage_times + total[i:b, :, None], np.inf).reshape(-1, most)
                origin[b] = sums.argmin(axis=0) + i * most
                longer[b] = sums.min(axis=0)
            history.append((origin, longer))
            total = longer
        last = int(total[n].argmin())
        if math.isinf(total[n, last]):
            return None
        stages, b, m = [], n, last
        for origin, _ in reversed(history):
            a, first = divmod(int(origin[b, m]), most)
            stages.append((a, b, first, m))
            b, m = a, first
        return _Path(total=float(total[n, last]), stages=tuple(reversed(stages)))


# --- input ----------------------------------------------------------------------------------------------------------------------------


def _read(times: Sequence[ArrayLike], send_times: Sequence[ArrayLike], held: Sequence[ArrayLike], kept: Sequence[ArrayLike]) -> _Chain:
    known: dict[int, tuple[object, Array]] = {}

    def array(field: str, given: ArrayLike, *, dims: int, may_forbid: bool) -> Array:
        if id(given) not in known:
            try:
                known[id(given)] = (given, np.asarray(given, dtype=np.float64))
            except (TypeError, ValueError):
                raise bad_field(field, given, "times and weights are real numbers in a rectangular array", "give float64") from None
        numbers = known[id(given)][1]
        if numbers.ndim != dims:
            raise bad_field(field, f"{numbers.ndim} dims", f"this is a {'vector' if dims == 1 else 'matrix'}", f"give {dims}")
        if numbers.size == 0:
            raise bad_field(field, "[]", "a tensor has at least one layout", "give an entry for each")
        wrong = numbers[~(numbers >= 0)] if may_forbid else numbers[~((numbers >= 0) & np.isfinite(numbers))]
        if wrong.size:
            rule = "a time is a number of at least 0" if may_forbid else "a weight is a finite number of at least 0"
            raise bad_field(field, wrong.flat[0], rule, "forbid a pair of layouts by a time of inf")
        return numbers

    if not len(times):
        raise bad_field("times", "[]", "a chain has at least one block", "give one matrix for each")
    blocks = [array(f"times[{k}]", given, dims=2, may_forbid=True) for k, given in enumerate(times)]
    for k in range(1, len(blocks)):
        if blocks[k].shape[0] != blocks[k - 1].shape[1]:
            rule = f"the tensor between blocks {k - 1} and {k} has {blocks[k - 1].shape[1]} layouts"
            raise bad_field(f"times[{k}]", f"matrix {blocks[k].shape}", rule, "give matrix[layout before, layout after]")
    sizes = [blocks[0].shape[0], *(block.shape[1] for block in blocks)]
    zeros: dict[tuple[int, ...], Array] = {}
    weights = []
    for field, values in (("held", held), ("kept", kept)):
        if len(values) not in (0, len(blocks)):
            raise bad_field(field, f"{len(values)} matrices", f"there are {len(blocks)} blocks", "give one matrix for each")
        matrices = [array(f"{field}[{k}]", given, dims=2, may_forbid=False) for k, given in enumerate(values)]
        for k, matrix in enumerate(matrices):
            if matrix.shape != blocks[k].shape:
                raise bad_field(f"{field}[{k}]", f"matrix {matrix.shape}", f"block {k} has times {blocks[k].shape}", "give the same shape")
        weights.append(matrices or [zeros.setdefault(block.shape, np.zeros(block.shape)) for block in blocks])
    if len(send_times) not in (0, len(sizes)):
        raise bad_field("send_times", f"{len(send_times)} vectors", f"there are {len(sizes)} tensors", "give one vector for each")
    sends = [array(f"send_times[{k}]", given, dims=1, may_forbid=True) for k, given in enumerate(send_times)]
    for k, send in enumerate(sends):
        if len(send) != sizes[k]:
            raise bad_field(f"send_times[{k}]", f"{len(send)} entries", f"tensor {k} has {sizes[k]} layouts", "give a time for each")
    return _Chain(times=blocks, held=weights[0], kept=weights[1], sends=sends or [np.zeros(size) for size in sizes])
