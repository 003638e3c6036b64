"""A chain of blocks cut into pipeline stages: where to cut, and which layout every tensor between blocks has.

    minimise   sum over stages i of T_i  +  (num_microbatches - 1) * max over i of T_i
    T_i      = times of the blocks of stage i  +  send time of the tensor that leaves it (none after the last)
    subject to  held weights of its blocks  +  in_flight[i] * their kept weights  <=  limits[i]

That is the time of one step of a synchronous pipeline (GPipe, 1F1B) with T_i for the forward and backward passes of one microbatch.

1. `least[a, b, l, m]` bounds the time of the blocks a to b - 1 from layout l to layout m from below: (min, +) products of their matrices,
   at some prices of weight. Runs of equal blocks are multiplied once.
2. A dynamic program over (stages so far, blocks so far, layout) finds the partition of least sum whose T_i all lie below a threshold. The
   stages that it uses are then solved exactly (`constrained.py`); where one takes longer than its bound, the program runs again.
3. The threshold falls from infinity: a partition whose largest T_i is t settles all partitions between t and the threshold before. It ends
   where none is left that could be better.

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

#: Two times or weights that are equal but for rounding, as a share.
_ROUNDING = 1e-12
#: Prices of weight whose bounds are taken: these multiples of the least time of all blocks over the limit.
_PRICES = (0.0, *(2.0 ** (power / 2) for power in range(-14, 11)))

#: A stage that is begun may take at least so many entries, and so long. [s]
_LEAST_WORK, _LEAST_TIME = 3e7, 0.1
#: One addition of the dynamic program, whatever the number of layouts.
_ENTRIES_OF_A_SUM = 5_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePartition:
    """Stage i has the blocks from `cuts[i]` to `cuts[i + 1] - 1`; `layouts[k]` is the layout of the tensor before block k.

    No partition costs less than `lower_bound` (up to rounding); where that is `cost`, this one `is_proved` to be the best.
    `cut_off` says what ended the search before: `work limit`, or the user's `time limit`.
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
    """The partition of least cost.

    times       one matrix [layout before, layout after] for each block, +inf forbids; neighbours agree in the layouts between them
    send_times  for each of the n + 1 tensors around n blocks one vector over its layouts: what a cut there costs its sender; +inf forbids
    held, kept  weights as `times`: what a stage holds once, and for each microbatch in flight
    in_flight   microbatches that each stage keeps at most; 1 unless given
    limits      largest weight of each stage; none unless given
    budget      after which the best partition so far is returned with its gap; one of its own if left out

    Blocks that are given as the same objects are computed once.
    """
    chain = _read(times, send_times, held, kept)
    for field, number, least in (("num_stages", num_stages, 1), ("num_microbatches", num_microbatches, 1)):
        if isinstance(number, bool) or not isinstance(number, int | np.integer) or number < least:
            raise bad_field(field, number, "must be a whole number of at least 1", "give one")
    if num_stages > len(chain.times):
        raise bad_field("num_stages", num_stages, f"a stage needs a block, and there are {len(chain.times)}", "use fewer stages")
    loads = []
    for field, values, default in (("in_flight", in_flight, 1.0), ("limits", limits, math.inf)):
        own = [float(value) for value in values] or [default] * num_stages
        if len(own) != num_stages:
            raise bad_field(field, f"{len(own)} numbers", f"there are {num_stages} stages", "give one for each")
        for i, value in enumerate(own):
            if not value >= 0 or (field == "in_flight" and math.isinf(value)):
                raise bad_field(f"{field}[{i}]", value, "must be a number of at least 0", "give one for each stage")
        loads.append(own)
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
        """A number for each block, the same for the same objects."""
        seen: dict[tuple[int, int, int], int] = {}
        return [seen.setdefault((id(t), id(h), id(k)), len(seen)) for t, h, k in zip(self.times, self.held, self.kept, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    """The blocks a to b - 1 from one layout to another, solved: at best `time`, at least `bound`, by the layouts before each and after."""

    time: float
    bound: float
    weight: float
    layouts: tuple[int, ...]


_IMPOSSIBLE = _Stage(time=math.inf, bound=math.inf, weight=math.inf, layouts=())
_UNKNOWN = _Stage(time=math.inf, bound=0.0, weight=math.inf, layouts=())


class _Load:
    """All runs of blocks under one (in_flight, limit): bounds of their times, and those that were solved."""

    def __init__(self, chain: _Chain, in_flight: float, limit: float) -> None:
        self.chain, self.limit = chain, limit
        made: dict[tuple[int, int], Array] = {}
        self.weights = [made.setdefault((id(h), id(k)), h + in_flight * k) for h, k in zip(chain.held, chain.kept, strict=True)]
        self.solved: dict[tuple[int, int, int], _Stage] = {}
        self.num_searches = 0
        n, most = len(chain.times), max(chain.sizes)
        self.least = np.full((n + 1, n + 1, most, most), np.inf)
        self.run_of = np.full((n + 1, n + 1), -1)
        self.places: dict[int, list[tuple[int, int]]] = {}
        self.fill()

    def fill(self) -> None:
        """Number the runs of blocks, equal ones alike, and bound each; a product is kept while longer runs need it."""
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
                self.places.setdefault(run, []).append((a, b))
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
        for a, b in self.places[run]:
            self.least[a, b, : bound.shape[0], : bound.shape[1]] = bound

    def stack(self, k: int, prices: Array) -> Array:
        """Time + price * weight of a block for every price, and its weight alone."""
        t, w = self.chain.times[k], self.weights[k]
        return np.stack([*(t + price * w for price in prices), np.where(np.isinf(t), np.inf, w)])

    def solve(self, a: int, b: int, first: int, last: int, *, budget: Budget) -> _Stage:
        key = (int(self.run_of[a, b]), first, last)
        if key not in self.solved:
            self.solved[key] = stage = self.search(a, b, first, last, budget=budget)
            for c, d in self.places[key[0]]:
                self.least[c, d, first, last] = max(self.least[c, d, first, last], stage.bound)
        return self.solved[key]

    def search(self, a: int, b: int, first: int, last: int, *, budget: Budget) -> _Stage:
        ends = [np.array([first]), *(np.arange(size) for size in self.chain.sizes[a + 1 : b]), np.array([last])]
        cut = {0, b - a - 1}

        def edges(arrays: Sequence[Array]) -> list[tuple[int, int, Array]]:
            own = arrays[a:b]
            return [(k, k + 1, each[np.ix_(ends[k], ends[k + 1])] if k in cut else each) for k, each in enumerate(own)]

        zeros = {len(own): np.zeros(len(own)) for own in ends}
        nothing = [zeros[len(own)] for own in ends]
        self.num_searches += 1
        allowed = budget.part(max(_LEAST_WORK, budget.left), least_time=_LEAST_TIME)
        pairs = edges(self.weights) if math.isfinite(self.limit) else []
        try:
            found = eliminate_within(nothing, edges(self.chain.times), nothing, self.limit, edge_weights=pairs, budget=allowed)
        except InputError:  # no path without a forbidden entry, none within the limit (bounds are rounded, this is not), or no budget
            return _UNKNOWN if allowed.is_spent else _IMPOSSIBLE
        layouts = tuple(int(own[label]) for own, label in zip(ends, found.choice, strict=True))
        weight = math.fsum(float(own[pair]) for own, pair in zip(self.weights[a:b], itertools.pairwise(layouts), strict=True))
        return _Stage(time=found.cost, bound=found.lower_bound, weight=weight, layouts=layouts)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Path:
    """Result of the dynamic program: for each stage its blocks and the layouts at its ends."""

    total: float
    stages: tuple[tuple[int, int, int, int], ...]


class _Partition:
    """One search: the best partition so far."""

    def __init__(self, chain: _Chain, loads: Sequence[tuple[float, float]], num_microbatches: int, *, budget: Budget) -> None:
        self.chain, self.budget = chain, budget
        self.repeats = num_microbatches - 1
        made = {load: _Load(chain, *load) for load in dict.fromkeys(loads)}
        self.loads = [made[load] for load in loads]
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
            # no partition below the threshold has a smaller sum; one that beats the best has a smaller maximum than this
            largest = max(self.stage_times(path, stages, of_bounds=True))
            bound = min(bound, path.total + self.repeats * largest)
            room = (self.best[0] - path.total) / self.repeats if self.repeats else 0.0
            threshold = min(largest, room) * (1.0 - _ROUNDING)
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
        """The partition of least sum whose stages all take less than the threshold, with its stages solved."""
        while True:
            path = self.program(threshold)
            if path is None:
                return None, []
            before = [self.least_of(i, *own) for i, own in enumerate(path.stages)]
            stages = [self.loads[i].solve(*own, budget=self.budget) for i, own in enumerate(path.stages)]
            after = [self.least_of(i, *own) for i, own in enumerate(path.stages)]
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
        """total[b, m]: least sum of the stages so far when they end before block b in layout m."""
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
                own = load.least[i:b, b] if is_last else load.least[i:b, b] + self.sends[b]
                sums = np.where(own <= threshold, own + total[i:b, :, None], np.inf).reshape(-1, most)
                origin[b] = sums.argmin(axis=0) + i * most
                longer[b] = sums.min(axis=0)
            history.append((origin, longer))
            total = longer
        last = int(total[n].argmin())
        if math.isinf(total[n, last]):
            return None
        found, b, m = [], n, last
        for origin, _ in reversed(history):
            a, first = divmod(int(origin[b, m]), most)
            found.append((a, b, first, m))
            b, m = a, first
        return _Path(total=float(total[n, last]), stages=tuple(reversed(found)))


# --- input ----------------------------------------------------------------------------------------------------------------------------


def _read(times: Sequence[ArrayLike], send_times: Sequence[ArrayLike], held: Sequence[ArrayLike], kept: Sequence[ArrayLike]) -> _Chain:
    known: dict[int, tuple[object, Array]] = {}

    def array(field: str, given: ArrayLike, *, dims: int, may_forbid: bool) -> Array:
        if id(given) not in known:
            try:
                known[id(given)] = (given, np.asarray(given, dtype=np.float64))
            except (TypeError, ValueError):
                raise bad_field(field, given, "times and weights are real numbers in a rectangular array", "give float64") from None
        own = known[id(given)][1]
        if own.ndim != dims:
            raise bad_field(field, f"{own.ndim} dims", f"this is a {'vector' if dims == 1 else 'matrix'}", f"give {dims}")
        if own.size == 0:
            raise bad_field(field, "[]", "a tensor has at least one layout", "give an entry for each")
        wrong = own[~(own >= 0)] if may_forbid else own[~((own >= 0) & np.isfinite(own))]
        if wrong.size:
            rule = "a time is a number of at least 0" if may_forbid else "a weight is a finite number of at least 0"
            raise bad_field(field, wrong.flat[0], rule, "forbid a pair of layouts by a time of inf")
        return own

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
        own = [array(f"{field}[{k}]", given, dims=2, may_forbid=False) for k, given in enumerate(values)]
        for k, matrix in enumerate(own):
            if matrix.shape != blocks[k].shape:
                raise bad_field(f"{field}[{k}]", f"matrix {matrix.shape}", f"block {k} has times {blocks[k].shape}", "give the same shape")
        weights.append(own or [zeros.setdefault(block.shape, np.zeros(block.shape)) for block in blocks])
    if len(send_times) not in (0, len(sizes)):
        raise bad_field("send_times", f"{len(send_times)} vectors", f"there are {len(sizes)} tensors", "give one vector for each")
    sends = [array(f"send_times[{k}]", given, dims=1, may_forbid=True) for k, given in enumerate(send_times)]
    for k, send in enumerate(sends):
        if len(send) != sizes[k]:
            raise bad_field(f"send_times[{k}]", f"{len(send)} entries", f"tensor {k} has {sizes[k]} layouts", "give a time for each")
    return _Chain(times=blocks, held=weights[0], kept=weights[1], sends=sends or [np.zeros(size) for size in sizes])
