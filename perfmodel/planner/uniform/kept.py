"""Layouts and memory of a space, which depend on no rate: searches on machines that differ only in rates share them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.estimate import Estimator
from perfmodel.foundation.session import session_cache
from perfmodel.parallel.algebra.rules import RuleSet
from perfmodel.parallel.choices import Dispatcher, Recompute
from perfmodel.planner.uniform.space import LayoutRows, PipelineGroup

_Value = TypeVar("_Value")

#: Most memory needs of plans that are kept, 8 bytes each.
MOST_KEPT = 1 << 25


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayoutChunk:
    """Layouts of one (pipeline, data-parallel) degree and rule set, with their micro-batches and recomputation, evaluated at once.

    layouts            their indices among those of the space
    rule               index of rules and dispatcher in `Space.cuts`
    num_microbatches   of a step   [1, micro-batches, 1, 1]
    """

    rows: LayoutRows
    layouts: NDArray[np.int64]
    rule: int
    rules: RuleSet
    dispatcher: Dispatcher
    micro: tuple[int, ...]
    num_microbatches: NDArray[np.float64]
    recomputes: tuple[Recompute, ...]
    recompute_operators: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanRange:
    """Plans [layouts, micro-batches, recompute, schedules] of a range of a chunk's layouts, with one ZeRO stage."""

    chunk: LayoutChunk
    pipelines: PipelineGroup
    zero: int
    layouts: slice
    shape: tuple[int, int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCounts:
    """Numbers of plans.

    num_feasible   plans that fit with the headroom, or at the risk
    num_static     plans whose weights, gradients and optimizer state alone exceed the usable memory
    num_tight      plans within the usable memory that do not leave the headroom
    """

    num_evaluated: int = 0
    num_feasible: int = 0
    num_static: int = 0
    num_tight: int = 0

    def __add__(self, other: PlanCounts) -> PlanCounts:
        return PlanCounts(
            num_evaluated=self.num_evaluated + other.num_evaluated,
            num_feasible=self.num_feasible + other.num_feasible,
            num_static=self.num_static + other.num_static,
            num_tight=self.num_tight + other.num_tight,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanMemory:
    """Memory of a range of plans, and their numbers.

    least, least_index   least memory of a plan [byte], and its flat index
    fitting              layouts of the range that have a plan that fits
    memory               of the plans of these layouts; infinite where a plan does not fit   [byte]
    """

    plans: PlanRange
    counts: PlanCounts
    least: float
    least_index: int
    fitting: NDArray[np.int64]
    memory: NDArray[np.float64]


@dataclass(slots=True, kw_only=True, eq=False)
class KeptSpace:
    """Values of one space by key.

    most   most memory needs of plans that are kept; 0: nothing is kept
    size   number of those that are kept
    """

    most: int = 0
    size: int = 0
    values: dict[Hashable, Any] = field(default_factory=dict)

    def once(self, key: Hashable, make: Callable[[], _Value]) -> _Value:
        """Return the value of a key."""
        if not self.most:
            return make()
        if key not in self.values:
            self.values[key] = make()
        kept: _Value = self.values[key]
        return kept

    def parts(self, key: Hashable, make: Callable[[], Iterator[PlanMemory]]) -> Iterable[PlanMemory]:
        """Return the memory of some plans. It is kept as far as the limit allows."""
        if key in self.values:
            kept: tuple[PlanMemory, ...] = self.values[key]
            return kept
        if self.size >= self.most:
            return make()
        self.values[key] = parts = tuple(make())
        self.size += sum(part.memory.size for part in parts)
        return parts


@dataclass(slots=True, kw_only=True, eq=False)
class KeptSpaces:
    """Values of spaces, each with the quantities that they depend on."""

    spaces: list[tuple[tuple[Any, ...], KeptSpace]] = field(default_factory=list)

    def of(self, estimator: Estimator, *limits: object) -> KeptSpace:
        """Return the values of the space within these limits. The other spaces are dropped if they take half of `MOST_KEPT`."""
        machine, memory = estimator.machine, estimator.machine.memory
        of_memory = memory.usable, memory.context_bytes, memory.communicator_bytes, memory.allocator_factor, machine.tier_sizes
        depends_on = *limits, estimator.job, estimator.cluster.num_chips, estimator.profile, estimator.programs.compiled, *of_memory
        for known, space in self.spaces:
            if known == depends_on:
                return space
        if sum(space.size for _, space in self.spaces) > MOST_KEPT // 2:
            self.spaces.clear()
        self.spaces.append((depends_on, space := KeptSpace(most=MOST_KEPT // 2)))
        return space


@session_cache(maxsize=1)
def spaces_of(exploration: str) -> KeptSpaces:
    """Return the spaces that a process keeps for the exploration with this identifier."""
    return KeptSpaces()
