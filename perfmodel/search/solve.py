"""Least-cost configuration of every vertex of a graph with costs of vertices and of pairs.

1. If elimination is cheap, it runs at once (`tables.py`).
2. Otherwise sweeps give a lower bound of every configuration (`bounds.py`), and elimination on the most promising ones gives a choice.
   Configurations that cannot be part of a better choice are dropped. This repeats until elimination of the rest is affordable, usually
   after two or three rounds.
3. If it never is, a branch and bound (`branch`) does the same for parts of the problem. It ends with a proof, or out of budget with a gap.

No optimum is lost. A configuration is dropped only if its bound exceeds the cost of a known choice by more than rounding,
or if another configuration of its vertex replaces it at no cost (`dominance.py`).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from perfmodel.foundation.disjoint_sets import DisjointSets
from perfmodel.foundation.errors import InputError, bad_field
from perfmodel.search.bounds import Relaxation
from perfmodel.search.budget import ENTRIES_OF_A_CALL, ENTRIES_OF_AN_ITEM, Budget
from perfmodel.search.dominance import undominated
from perfmodel.search.order import EliminationOrder, best_order, line_up
from perfmodel.search.problem import Labels, Problem, read_problem
from perfmodel.search.solution import SearchMethod, Solution
from perfmodel.search.tables import solve_by_tables

BYTES_OF_AN_ENTRY = 8.0
#: Fixed cost of an edge in a sweep, in entries, in addition to its matrix.
_ENTRIES_OF_AN_EDGE = 6_000.0
#: Elimination runs at once if it costs at most this number of sweeps.
_SWEEPS_OF_A_SEARCH = 6.0
#: Largest work of elimination before branch and bound is tried, in joined entries (minutes).
_MOST_WORK = 3e10
#: Rounding of a bound, as a share of the sum of the absolute entries of a choice.
_ROUNDING = 1e-10
#: Rounding of a total, used at the end of a proof.
_LAST_DIGITS = 1e-13
#: Rounds without progress before the sweeps count as converged.
_PATIENCE = 4
_PROGRESS = 0.02
_MOST_SWEEPS = 16
_FOREST_MOVES = 4
#: Promising configurations have bounds within gap / 2^h. Values of h tried per round, starting near the last one, and the largest h.
_MOST_ATTEMPTS = 12
_MOST_HALVINGS = 36
#: Closing a part of the branch and bound: rounds, least share of the gap closed by a round, and work of elimination in sweeps.
_ROUNDS_OF_A_PART = 4
_PROGRESS_OF_A_PART = 0.1
_SWEEPS_OF_A_PART = 20.0


def eliminate(
    vertex_costs: Sequence[ArrayLike],
    edges: Sequence[tuple[int, int, ArrayLike]],
    *,
    memory_limit: float = 1e9,
    budget: Budget | None = None,
) -> Solution:
    """Return the choice c of least  sum over v of vertex_costs[v][c_v]  +  sum over (u, v, matrix) of matrix[c_u, c_v].

    vertex_costs  one vector per vertex: the cost of each of its configurations
    edges         (u, v, matrix): any graph; parallel edges add up, u > v is allowed, isolated vertices too
    memory_limit  limit of the tables; where elimination would need more, branch and bound takes over  [byte]
    budget        when it is spent, the best choice so far is returned with its gap; a new `Budget` if left out

    An entry of +inf forbids a configuration or a pair. Memory and work of eliminating the whole graph can be computed beforehand:
    `best_order(sizes, pairs)` has `table_entries(sizes)` and `work(sizes)`. The search never holds more than `memory_limit` of tables.
    """
    if not memory_limit > 0:
        raise bad_field("memory_limit", memory_limit, "must be positive", "use inf for none")
    budget = budget or Budget()
    given = read_problem(vertex_costs, edges)
    budget.spend(ENTRIES_OF_A_CALL + ENTRIES_OF_AN_ITEM * (len(given.costs) + len(given.given_edges)))
    sequence = line_up(len(given.costs), given.pairs)
    solution = _Search(given.renumbered(sequence), memory_limit=memory_limit, budget=budget).run()
    choice = tuple(label for _, label in sorted(zip(sequence, solution.choice, strict=True)))
    cost = given.given_total(choice)
    return replace(solution, choice=choice, cost=cost, lower_bound=cost if solution.is_proved else min(solution.lower_bound, cost))


class _Search:
    """State of one search: the best choice so far and its cost."""

    def __init__(self, problem: Problem, *, memory_limit: float, budget: Budget) -> None:
        self.problem = problem
        self.most_entries = memory_limit / BYTES_OF_AN_ENTRY
        self.budget = budget
        self.choice = [int(cost.argmin()) for cost in problem.costs]
        self.total = problem.total(self.choice)
        self.slack = _ROUNDING * problem.magnitude(self.choice)
        self.neighbours: list[set[int]] = [set() for _ in problem.costs]
        for u, v in problem.pairs:
            self.neighbours[u].add(v)
            self.neighbours[v].add(u)
        self.permutations = _permutations(len(problem.costs))
        self.kept_entries = 0.0
        self.num_branches = 0

    def run(self) -> Solution:
        problem = self.problem
        order = best_order(problem.sizes, problem.pairs)
        sweep = sweep_effort(problem)
        if self.fits(order, problem) and order.effort(problem.sizes) <= _SWEEPS_OF_A_SEARCH * sweep:
            self.offer(self.solve_exactly(problem, order))
            return self.solution(SearchMethod.ELIMINATION, order, self.total)
        relaxation = Relaxation(problem, [np.arange(size) for size in problem.sizes])
        self.budget.spend(sweep)
        if self.close(relaxation):
            return self.solution(SearchMethod.BOUNDED_ELIMINATION, order, self.total)
        bound = self.branch(relaxation)
        return self.solution(SearchMethod.BRANCH_AND_BOUND, order, bound)

    # --- the pieces -------------------------------------------------------------------------------------------------------------------

    @property
    def limit(self) -> float:
        """Largest bound that a choice as good as the best so far can have."""
        return self.total + self.slack

    @property
    def proof(self) -> float:
        """Bound from which the best choice so far is optimal, up to the last digits."""
        return self.total - self.slack * (_LAST_DIGITS / _ROUNDING)

    def fits(self, order: EliminationOrder, problem: Problem) -> bool:
        return order.table_entries(problem.sizes) <= self.most_entries

    def solve_exactly(self, problem: Problem, order: EliminationOrder) -> list[int]:
        self.kept_entries = max(self.kept_entries, order.table_entries(problem.sizes))
        self.budget.spend(order.effort(problem.sizes))
        return solve_by_tables(problem, order)

    def offer(self, choice: Sequence[int]) -> bool:
        total = self.problem.total(choice)
        if total >= self.total:
            return False
        self.choice, self.total = list(choice), total
        self.slack = _ROUNDING * self.problem.magnitude(choice)
        return True

    def solve_part(self, relaxation: Relaxation, kept: Sequence[Labels], order: EliminationOrder) -> None:
        """Offer the best choice among the configurations at the positions `kept`."""
        part = self.solve_exactly(relaxation.problem.restrict(kept), order)
        self.offer(self.translate(relaxation, [int(positions[label]) for positions, label in zip(kept, part, strict=True)]))

    # --- rounds of sweeps -------------------------------------------------------------------------------------------------------------

    def close(self, relaxation: Relaxation) -> bool:
        """Sweep and prune; return True once the best choice is known, and False if the sweeps converge first."""
        waited, halvings, num_sweeps = 0, 0, 2
        effort = 0.0
        is_first = True  # the first round runs whatever the budget: before it there is rarely a possible choice
        while waited < _PATIENCE and (is_first or not self.budget.is_spent):
            is_first = False
            before, total, entries = relaxation.constant, self.total, sweep_effort(relaxation.problem)
            for _ in range(num_sweeps):
                self.sweep(relaxation)
            effort += num_sweeps * entries
            halvings, spent = self.try_the_promising(relaxation, halvings, affordable=max(effort, 2 * entries))
            effort += spent
            if halvings == 0 or relaxation.constant >= self.proof:
                return True
            if self.total == total:
                effort += self.move_forests(relaxation)
            if self.total == total:
                num_sweeps = min(2 * num_sweeps, _MOST_SWEEPS)
            has_cut = relaxation.cut(relaxation.survivors(self.limit)) or relaxation.cut(undominated(relaxation.problem))
            has_risen = relaxation.constant - before > _PROGRESS * (self.limit - relaxation.constant)
            waited = 0 if self.total < total or has_cut or has_risen else waited + 1
        return self.eliminate_survivors(relaxation, most_work=min(_MOST_WORK, self.budget.left), is_quick=False)

    def close_part(self, relaxation: Relaxation) -> bool:
        """Close a part of the branch and bound: like `close`, without the search for better choices and with earlier convergence."""
        for _ in range(_ROUNDS_OF_A_PART):
            before, entries = relaxation.constant, sweep_effort(relaxation.problem)
            for _ in range(2):
                self.sweep(relaxation)
            if relaxation.constant > self.limit:
                return True
            missing = self.limit - relaxation.constant
            relaxation.cut(relaxation.survivors(self.limit))
            if relaxation.constant - before < _PROGRESS_OF_A_PART * missing:
                break
        return self.eliminate_survivors(relaxation, most_work=_SWEEPS_OF_A_PART * entries, is_quick=True)

    def sweep(self, relaxation: Relaxation) -> None:
        self.budget.spend(sweep_effort(relaxation.problem))
        self.offer(self.translate(relaxation, relaxation.sweep()))

    def translate(self, relaxation: Relaxation, positions: Sequence[int]) -> list[int]:
        return [int(labels[position]) for labels, position in zip(relaxation.labels, positions, strict=True)]

    def try_the_promising(self, relaxation: Relaxation, halvings: int, *, affordable: float) -> tuple[int, float]:
        """Eliminate the configurations whose bounds are within gap / 2^h, for the least affordable h; return h and the work spent.

        h = 0 means all configurations: the best choice is known.
        """
        missing = self.limit - relaxation.constant
        first = max(0, halvings - 1)
        for attempt in range(first, first + _MOST_ATTEMPTS):
            kept = relaxation.survivors(relaxation.constant + missing / 2.0**attempt)
            if attempt == 0 and min(map(len, kept)) == 0:
                return 0, 0.0  # no choice is better than the best so far
            kept = filled(relaxation, kept)
            sizes = [len(labels) for labels in kept]
            if attempt and max(sizes) == 1:
                return attempt, 0.0
            order = best_order(sizes, relaxation.problem.pairs, is_quick=True)
            if order.effort(sizes) <= affordable and order.table_entries(sizes) <= self.most_entries:
                self.solve_part(relaxation, kept, order)
                return attempt, order.effort(sizes)
        return (first + _MOST_ATTEMPTS) % _MOST_HALVINGS + 1, 0.0

    def move_forests(self, relaxation: Relaxation) -> float:
        """Fix all vertices except a random forest and choose anew for the forest; return the work spent."""
        position = [int(np.searchsorted(labels, label)) for labels, label in zip(relaxation.labels, self.choice, strict=True)]
        held = [np.array([min(at, len(labels) - 1)]) for at, labels in zip(position, relaxation.labels, strict=True)]
        all_labels = [np.arange(len(labels)) for labels in relaxation.labels]
        for _ in range(_FOREST_MOVES):
            kept = [all_labels[v] if free else held[v] for v, free in enumerate(self.random_forest())]
            sizes = [len(labels) for labels in kept]
            self.solve_part(relaxation, kept, best_order(sizes, relaxation.problem.pairs, is_quick=True))
        return _FOREST_MOVES * sweep_effort(relaxation.problem)

    def random_forest(self) -> list[bool]:
        trees = DisjointSets[int]()
        inside = [False] * len(self.neighbours)
        for v in next(self.permutations):
            met = [trees.find(u) for u in self.neighbours[v] if inside[u]]
            if len(set(met)) == len(met):
                inside[v] = True
                for tree in met:
                    trees.join(tree, v)
        return inside

    def eliminate_survivors(self, relaxation: Relaxation, *, most_work: float, is_quick: bool) -> bool:
        """Eliminate all remaining configurations exactly, if that fits and is affordable; return whether it did."""
        kept = relaxation.survivors(self.limit)
        if min(map(len, kept)) == 0:
            return True
        sizes = [len(labels) for labels in kept]
        order = best_order(sizes, relaxation.problem.pairs, is_quick=is_quick)
        if order.table_entries(sizes) > self.most_entries or order.work(sizes) > most_work:
            return False
        self.solve_part(relaxation, kept, order)
        return True

    # --- branch and bound -------------------------------------------------------------------------------------------------------------

    def branch(self, root: Relaxation) -> float:
        """Split the configurations of a vertex in two and bound each part; return the bound reached.

        The part of least bound is next. Where the open parts take half of the memory, the newest is next, so that they stop growing.
        """
        count = itertools.count()
        open_parts = [(root.constant, next(count), root)]
        entries = root.entries
        while open_parts:
            if entries <= self.most_entries / 2:
                bound, _, relaxation = heapq.heappop(open_parts)
            else:
                newest = max(range(len(open_parts)), key=lambda index: open_parts[index][1])
                bound, _, relaxation = open_parts.pop(newest)
                heapq.heapify(open_parts)
            entries -= relaxation.entries
            if bound >= self.proof:
                continue
            if self.budget.is_spent:
                return min([bound, *(part[0] for part in open_parts)])
            for kept in self.split(relaxation):
                part = relaxation.fork()
                part.cut(kept)
                self.num_branches += 1
                if not self.close_part(part):
                    heapq.heappush(open_parts, (max(bound, part.constant), next(count), part))
                    entries += part.entries
        return self.total

    def split(self, relaxation: Relaxation) -> list[list[Labels]]:
        """Halve the configurations of the vertex with the largest share of the gap, for the choice that the bounds suggest."""
        kept = filled(relaxation, relaxation.survivors(self.limit))
        best = [int(bound.argmin()) for bound in relaxation.bounds]
        missing = [float(vector[label]) for vector, label in zip(relaxation.vectors, best, strict=True)]
        for edge, (u, v, matrix) in enumerate(relaxation.problem.edges):
            left = float(matrix[best[u], best[v]] - relaxation.from_low[edge][best[u]] - relaxation.from_high[edge][best[v]])
            missing[u] += left
            missing[v] += left
        several = [v for v, labels in enumerate(kept) if len(labels) > 1]
        if not several:
            self.offer(self.translate(relaxation, [int(labels[0]) for labels in kept]))
            return []
        at = max(several, key=missing.__getitem__)
        ranked = kept[at][np.argsort(relaxation.bounds[at][kept[at]], kind="stable")]
        cut = 1 if len(ranked) <= 4 else len(ranked) // 2
        return [[np.sort(half) if v == at else labels for v, labels in enumerate(kept)] for half in (ranked[:cut], ranked[cut:])]

    # --- the end ----------------------------------------------------------------------------------------------------------------------

    def solution(self, method: SearchMethod, order: EliminationOrder, bound: float) -> Solution:
        is_proved = bound >= self.total
        if self.total >= self.problem.forbidden_total:
            if is_proved:
                raise InputError("edges=inf: no choice is possible, every one meets a forbidden entry; allow more pairs")
            raise self.budget.ran_out("no choice without a forbidden entry")
        return Solution(
            cost=self.total,
            choice=tuple(self.choice),
            lower_bound=min(bound, self.total),
            is_proved=is_proved,
            method=method,
            width=order.width,
            table_entries=order.table_entries(self.problem.sizes),
            kept_entries=self.kept_entries,
            num_branches=self.num_branches,
            cut_off="" if is_proved else self.budget.spent,
        )


def sweep_effort(problem: Problem) -> float:
    """Return the work of one sweep of a relaxation, in entries."""
    return math.fsum(matrix.size + _ENTRIES_OF_AN_EDGE for _, _, matrix in problem.edges)


def _permutations(size: int) -> Iterator[list[int]]:
    """Yield random orders of the vertices, the same in each search; numpy's generator is created with the first."""
    generator = np.random.default_rng(0)
    while True:
        yield generator.permutation(size).tolist()


def filled(relaxation: Relaxation, kept: Sequence[Labels]) -> list[Labels]:
    """Return `kept` with the configuration of least bound where a vertex keeps none (rounding of bounds can empty a vertex)."""
    return [labels if len(labels) else np.array([bound.argmin()]) for labels, bound in zip(kept, relaxation.bounds, strict=True)]
