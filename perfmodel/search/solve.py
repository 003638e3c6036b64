"""The best configuration of every vertex of a graph, given what each costs and what each pair costs.

1. Where elimination is cheap, it is done at once (`tables.py`).
2. Else sweeps give a lower bound of every configuration (`bounds.py`), elimination on the most promising configurations gives a choice,
   and what cannot be part of a better one is dropped. It goes on until elimination of what is left is affordable; usually little is
   left after two or three rounds.
3. Where it never is, the same is done inside a branch and bound (`branch`), which ends with a proof or, out of work, with a gap.

No optimum is lost on the way: a configuration goes only when its bound exceeds the cost of a choice already held, by more than rounding,
or when another one of its vertex replaces it at no cost (`dominance.py`).
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
#: A sweep costs its matrices once, and as much as this many entries for each edge.
_ENTRIES_OF_AN_EDGE = 6_000.0
#: Elimination at once where it costs no more than this many sweeps.
_SWEEPS_OF_A_SEARCH = 6.0
#: Past this many joined entries (minutes), branch and bound is asked first.
_MOST_WORK = 3e10
#: Rounding of a bound, as a share of the absolute entries that a choice adds up.
_ROUNDING = 1e-10
#: Rounding of a total, for the end of a proof.
_LAST_DIGITS = 1e-13
#: Rounds without progress before the sweeps count as come to rest, at the root and below it.
_PATIENCE = 4
_PROGRESS = 0.02
_MOST_SWEEPS = 16
_FOREST_MOVES = 4
#: Promising configurations are those within gap / 2^h: so many h are tried in a round, and from there the next time, up to the largest.
_MOST_ATTEMPTS = 12
_MOST_HALVINGS = 36
#: A part of a branch and bound: sweeps while they close this share of the gap, then elimination if it costs no more than so many sweeps.
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
    """The choice c of least  sum over v of vertex_costs[v][c_v]  +  sum over (u, v, matrix) of matrix[c_u, c_v].

    vertex_costs  one vector for each vertex: a cost for each of its configurations
    edges         (u, v, matrix): any graph; parallel edges add up, u > v is allowed, vertices may stand alone
    memory_limit  bytes that tables may take; where elimination would need more, branch and bound takes over  [byte]
    budget        after which the best choice so far is returned with its gap; one of its own if left out

    An entry of +inf forbids a configuration or a pair. What eliminating the whole graph would hold and do is known beforehand:
    `best_order(sizes, pairs)` has `table_entries(sizes)` and `work(sizes)`; the search never holds more than `memory_limit` of tables.
    """
    if not memory_limit > 0:
        raise bad_field("memory_limit", memory_limit, "must be positive", "use inf for none")
    budget = budget or Budget()
    given = read_problem(vertex_costs, edges)
    budget.spend(ENTRIES_OF_A_CALL + ENTRIES_OF_AN_ITEM * (len(given.costs) + len(given.given_edges)))
    sequence = line_up(len(given.costs), given.pairs)
    found = _Search(given.renumbered(sequence), memory_limit=memory_limit, budget=budget).run()
    choice = tuple(label for _, label in sorted(zip(sequence, found.choice, strict=True)))
    cost = given.given_total(choice)
    return replace(found, choice=choice, cost=cost, lower_bound=cost if found.is_proved else min(found.lower_bound, cost))


class _Search:
    """One search: the best choice so far, and what it has cost."""

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
        """A bound above this cannot belong to a choice as good as the best so far."""
        return self.total + self.slack

    @property
    def proof(self) -> float:
        """A bound from here on is the best total so far, but for its last digits."""
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
        """The best choice among the configurations at the positions `kept`."""
        part = self.solve_exactly(relaxation.problem.restrict(kept), order)
        self.offer(self.translate(relaxation, [int(own[label]) for own, label in zip(kept, part, strict=True)]))

    # --- rounds of sweeps -------------------------------------------------------------------------------------------------------------

    def close(self, relaxation: Relaxation) -> bool:
        """Sweep and prune until the best choice of all is known: True. False: the sweeps have come to rest before."""
        waited, halvings, num_sweeps = 0, 0, 2
        effort = 0.0
        is_first = True  # which is done whatever the budget: rarely is a choice possible before
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
        """The same in short, for a part of a branch and bound: no search for better choices, and an early rest."""
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
        """Eliminate the configurations whose bounds are within the gap / 2^h, the least h that is affordable, and what that took.

        With h = 0 it was all of them: the best choice is known.
        """
        missing = self.limit - relaxation.constant
        first = max(0, halvings - 1)
        for attempt in range(first, first + _MOST_ATTEMPTS):
            kept = relaxation.survivors(relaxation.constant + missing / 2.0**attempt)
            if attempt == 0 and min(map(len, kept)) == 0:
                return 0, 0.0  # no choice is better than the best so far
            kept = filled(relaxation, kept)
            sizes = [len(own) for own in kept]
            if attempt and max(sizes) == 1:
                return attempt, 0.0
            order = best_order(sizes, relaxation.problem.pairs, is_quick=True)
            if order.effort(sizes) <= affordable and order.table_entries(sizes) <= self.most_entries:
                self.solve_part(relaxation, kept, order)
                return attempt, order.effort(sizes)
        return (first + _MOST_ATTEMPTS) % _MOST_HALVINGS + 1, 0.0

    def move_forests(self, relaxation: Relaxation) -> float:
        """Hold all vertices but a random forest of them, and choose for the forest anew; says what that took."""
        position = [int(np.searchsorted(labels, label)) for labels, label in zip(relaxation.labels, self.choice, strict=True)]
        held = [np.array([min(at, len(labels) - 1)]) for at, labels in zip(position, relaxation.labels, strict=True)]
        whole = [np.arange(len(labels)) for labels in relaxation.labels]
        for _ in range(_FOREST_MOVES):
            kept = [whole[v] if free else held[v] for v, free in enumerate(self.random_forest())]
            sizes = [len(own) for own in kept]
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
        """Exact elimination of all that is left, if it fits and does not take too long."""
        kept = relaxation.survivors(self.limit)
        if min(map(len, kept)) == 0:
            return True
        sizes = [len(own) for own in kept]
        order = best_order(sizes, relaxation.problem.pairs, is_quick=is_quick)
        if order.table_entries(sizes) > self.most_entries or order.work(sizes) > most_work:
            return False
        self.solve_part(relaxation, kept, order)
        return True

    # --- branch and bound -------------------------------------------------------------------------------------------------------------

    def branch(self, root: Relaxation) -> float:
        """Split the configurations of a vertex in two and bound each part; returns the bound that was reached.

        The part of least bound comes next, or, where the open parts take half of the memory, the newest: then they grow no further.
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
        """Two halves of the configurations of the vertex whose part of the gap is largest in the choice that the bounds suggest."""
        kept = filled(relaxation, relaxation.survivors(self.limit))
        best = [int(bound.argmin()) for bound in relaxation.bounds]
        missing = [float(vector[label]) for vector, label in zip(relaxation.vectors, best, strict=True)]
        for edge, (u, v, matrix) in enumerate(relaxation.problem.edges):
            left = float(matrix[best[u], best[v]] - relaxation.from_low[edge][best[u]] - relaxation.from_high[edge][best[v]])
            missing[u] += left
            missing[v] += left
        several = [v for v, own in enumerate(kept) if len(own) > 1]
        if not several:
            self.offer(self.translate(relaxation, [int(own[0]) for own in kept]))
            return []
        at = max(several, key=missing.__getitem__)
        ranked = kept[at][np.argsort(relaxation.bounds[at][kept[at]], kind="stable")]
        cut = 1 if len(ranked) <= 4 else len(ranked) // 2
        return [[np.sort(half) if v == at else own for v, own in enumerate(kept)] for half in (ranked[:cut], ranked[cut:])]

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
    """Work of one sweep of a relaxation, in entries."""
    return math.fsum(matrix.size + _ENTRIES_OF_AN_EDGE for _, _, matrix in problem.edges)


def _permutations(size: int) -> Iterator[list[int]]:
    """Ever new orders of the vertices, the same ones in each search; numpy's generator is loaded when the first is asked for."""
    generator = np.random.default_rng(0)
    while True:
        yield generator.permutation(size).tolist()


def filled(relaxation: Relaxation, kept: Sequence[Labels]) -> list[Labels]:
    """`kept` with the configuration of least bound where a vertex keeps none (bounds of different moments may disagree that much)."""
    return [own if len(own) else np.array([bound.argmin()]) for own, bound in zip(kept, relaxation.bounds, strict=True)]
