"""Least-cost configuration of every vertex of a graph within a limit on the total weight.

    L(x) = min over choices of [ cost + x * weight ]  -  x * limit

is a lower bound of the cost of any choice within the limit, for every price x >= 0 of a unit of weight.

1. The best choice without the limit is the answer if it is within the limit. The choice of least weight shows whether any is.
2. The price rises from chord to chord of the convex front of (weight, cost) until no choice lies below the chord: the best bound.
3. Better choices within the limit may lie above the chord. All choices up to a target above the bound are enumerated (`fronts.py`).
   The target rises until a choice is found or the target reaches the best one so far. Either is a proof.

Where the elimination tables do not fit, the configurations that the bounds leave are enumerated in the same way. Where that is still too
much, or the budget is spent, the best choice so far is returned with its gap.

Source: Everett, Generalized Lagrange multiplier method, Operations Research 11(3), 1963; Handler & Zang, Networks 10, 1980.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import ArrayLike

from perfmodel.foundation.errors import bad_field
from perfmodel.search.bounds import Relaxation
from perfmodel.search.budget import ENTRIES_OF_AN_ITEM, Budget
from perfmodel.search.fronts import ReducedCosts, Sums, Window, enumerate_labels, labels_that_fit
from perfmodel.search.order import best_order, line_up
from perfmodel.search.problem import Array, Edge, Labels, Problem, Reader, read_problem
from perfmodel.search.solve import BYTES_OF_AN_ENTRY, eliminate, filled, sweep_effort

#: Rounding of a bound, as a share of the sum of the absolute entries of a choice.
_ROUNDING = 1e-12
#: Largest work of tables over all configurations; past it bounds prune configurations first. Largest work of tables after pruning.
_MOST_WORK = 3e9
_MOST_WORK_LEFT = 3e10
_SWEEPS = 24
#: The first target, as a share of the gap between the bound and the best choice, and its growth factor.
_FIRST_TARGET = 1.0 / 256.0
_GROWTH = 4.0
#: Labels of a first, small pass; a better choice that it finds lowers the target.
_FEW_LABELS = 2000
#: Further prices, as multiples of the best one. Their bounds rule out labels that are far too light or too heavy.
_SIDE_PRICES = (0.8, 1.25)


class ConstrainedMethod(StrEnum):
    UNCONSTRAINED = "elimination"
    LAGRANGIAN = "Lagrangian"
    FRONTS = "fronts of cost and weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstrainedSolution:
    """A choice of one configuration for every vertex, within a limit.

    No choice within the limit costs less than `lower_bound` (up to rounding). `is_proved` is set where that equals `cost`: it is optimal.
    price: decrease of the bound per unit of weight at the limit; 0 where the limit does not bind.
    num_searches: eliminations; num_labels: partial choices enumerated in addition.
    cut_off: reason for an end before the requested gap: `work limit`, the user's `time limit`, or `memory limit`.
    """

    cost: float
    choice: tuple[int, ...]
    weight: float
    price: float
    lower_bound: float
    is_proved: bool
    num_searches: int
    method: ConstrainedMethod
    num_labels: int = 0
    cut_off: str = ""

    @property
    def gap(self) -> float:
        """Gap between the cost and its lower bound, as a share of the cost."""
        if self.is_proved or self.cost == self.lower_bound:
            return 0.0
        return (self.cost - self.lower_bound) / abs(self.cost) if self.cost else math.inf


def eliminate_within(
    vertex_costs: Sequence[ArrayLike],
    edges: Sequence[tuple[int, int, ArrayLike]],
    weights: Sequence[ArrayLike],
    limit: float,
    *,
    edge_weights: Sequence[tuple[int, int, ArrayLike]] = (),
    gap: float = 0.0,
    memory_limit: float = 1e9,
    budget: Budget | None = None,
) -> ConstrainedSolution:
    """Return the choice of least cost (as in `eliminate`) among those whose weight is at most `limit`.

    weights       one vector per vertex: the weight of each of its configurations, finite and not negative
    edge_weights  (u, v, matrix): weights of pairs, whether or not they are in `edges`
    gap           stop at a choice proved to be within this share of the least cost
    memory_limit  limit of the tables, and of the labels  [byte]
    budget        when it is spent, the best choice so far is returned with its gap; a new `Budget` if left out
    """
    if not memory_limit > 0:
        raise bad_field("memory_limit", memory_limit, "must be positive", "use inf for none")
    if not gap >= 0:
        raise bad_field("gap", gap, "must not be negative", "use 0 for the least cost itself")
    if math.isnan(limit):
        raise bad_field("limit", limit, "a limit is a number", "use inf for none")
    budget = budget or Budget()
    space = _read(vertex_costs, edges, weights, edge_weights)
    sequence = line_up(len(space.costs), [(u, v) for u, v, _, _ in space.edges])
    budget.spend(ENTRIES_OF_AN_ITEM * (len(space.costs) + len(space.edges)))
    search = _Search(space.renumbered(sequence), float(limit), gap=gap, memory_limit=memory_limit, budget=budget)
    return search.run(sequence)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Space:
    """Costs (+inf forbids) and weights of vertices and of pairs u < v, each pair once. Equal objects stay equal objects.

    `given_costs` and `given_weights` are the pairs as passed by the caller: a total over them is rounded once.
    """

    costs: list[Array]
    weights: list[Array]
    edges: list[tuple[int, int, Array, Array]]
    given_costs: list[Edge]
    given_weights: list[Edge]

    def renumbered(self, sequence: Sequence[int]) -> _Space:
        number = {v: i for i, v in enumerate(sequence)}
        turned: dict[int, Array] = {}

        def turn(array: Array) -> Array:
            return turned.setdefault(id(array), array.T)

        return _Space(
            costs=[self.costs[v] for v in sequence],
            weights=[self.weights[v] for v in sequence],
            edges=[
                (number[u], number[v], cost, weight) if number[u] < number[v] else (number[v], number[u], turn(cost), turn(weight))
                for u, v, cost, weight in self.edges
            ],
            given_costs=[(number[u], number[v], matrix) for u, v, matrix in self.given_costs],
            given_weights=[(number[u], number[v], matrix) for u, v, matrix in self.given_weights],
        )

    def restrict(self, kept: Sequence[Labels]) -> _Space:
        names = [labels.tobytes() for labels in kept]
        cache: dict[tuple[object, ...], Array] = {}

        def part(array: Array, *ends: int) -> Array:
            key = (id(array), *(names[v] for v in ends))
            if key not in cache:
                cache[key] = array[np.ix_(*(kept[v] for v in ends))]
            return cache[key]

        return _Space(
            costs=[part(cost, v) for v, cost in enumerate(self.costs)],
            weights=[part(weight, v) for v, weight in enumerate(self.weights)],
            edges=[(u, v, part(cost, u, v), part(weight, u, v)) for u, v, cost, weight in self.edges],
            given_costs=[],
            given_weights=[],
        )

    def priced(self, price: float) -> tuple[list[Array], list[Edge]]:
        """Return cost + price * weight; the weight alone if the price is infinite."""
        cache: dict[tuple[int, int], Array] = {}

        def mixed(cost: Array, weight: Array) -> Array:
            key = (id(cost), id(weight))
            if key not in cache:
                cache[key] = np.where(np.isinf(cost), np.inf, weight) if math.isinf(price) else cost + price * weight
            return cache[key]

        vectors = [mixed(cost, weight) for cost, weight in zip(self.costs, self.weights, strict=True)]
        return vectors, [(u, v, mixed(cost, weight)) for u, v, cost, weight in self.edges]

    def amounts(self) -> tuple[Sums, Sums]:
        costs = Sums(self.costs, [(u, v, cost) for u, v, cost, _ in self.edges])
        return costs, Sums(self.weights, [(u, v, weight) for u, v, _, weight in self.edges])

    def cost(self, choice: Sequence[int]) -> float:
        return math.fsum(_entries(self.costs, self.given_costs, choice))

    def weight(self, choice: Sequence[int]) -> float:
        return math.fsum(_entries(self.weights, self.given_weights, choice))

    def magnitude(self, choice: Sequence[int]) -> float:
        return math.fsum(map(abs, _entries(self.costs, self.given_costs, choice)))


def _entries(vectors: Sequence[Array], edges: Sequence[Edge], choice: Sequence[int]) -> list[float]:
    entries = [float(vector[label]) for vector, label in zip(vectors, choice, strict=True)]
    return entries + [float(matrix[choice[u], choice[v]]) for u, v, matrix in edges]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Point:
    choice: tuple[int, ...]
    cost: float
    weight: float


class _Search:
    """State of one search: the best choice within the limit so far, and the best bound."""

    def __init__(self, space: _Space, limit: float, *, gap: float, memory_limit: float, budget: Budget) -> None:
        self.space, self.limit, self.gap = space, limit, gap
        self.memory_limit, self.budget = memory_limit, budget
        self.best: _Point | None = None
        self.bound = -math.inf
        self.price = 0.0
        self.num_searches = self.num_labels = 0
        self.method = ConstrainedMethod.UNCONSTRAINED

    def run(self, sequence: Sequence[int]) -> ConstrainedSolution:
        heavy = self.cheapest(0.0)
        if heavy.weight > self.limit:
            light = self.cheapest(math.inf)
            if self.best is None and self.budget.is_spent:
                raise self.budget.ran_out("no choice within the limit")
            if self.best is None:
                least = f"no choice weighs less than {light.weight:.12g}"
                raise bad_field("limit", f"{self.limit:.12g}", least, "raise the limit or give lighter configurations")
            self.method = ConstrainedMethod.LAGRANGIAN
            self.raise_price(heavy, light)
            if not self.is_done:
                self.method = ConstrainedMethod.FRONTS
                self.close()
        best = self.incumbent
        is_proved = best.cost - self.bound <= self.slack
        return ConstrainedSolution(
            cost=best.cost,
            choice=tuple(label for _, label in sorted(zip(sequence, best.choice, strict=True))),
            weight=best.weight,
            price=self.price,
            lower_bound=best.cost if is_proved else self.bound,
            is_proved=is_proved,
            num_searches=self.num_searches,
            method=self.method,
            num_labels=self.num_labels,
            cut_off="" if self.is_close else self.budget.spent or "memory limit",
        )

    # --- the pieces -------------------------------------------------------------------------------------------------------------------

    @property
    def incumbent(self) -> _Point:
        if self.best is None:
            raise self.budget.ran_out("no choice within the limit")
        return self.best

    @property
    def slack(self) -> float:
        return _ROUNDING * self.space.magnitude(self.incumbent.choice)

    @property
    def is_done(self) -> bool:
        return self.is_close or self.budget.is_spent

    @property
    def is_close(self) -> bool:
        return self.incumbent.cost - self.bound <= max(self.slack, self.gap * abs(self.incumbent.cost))

    def cheapest(self, price: float) -> _Point:
        """Return the choice of least cost + price * weight, and update the bound."""
        solution = eliminate(*self.space.priced(price), memory_limit=self.memory_limit, budget=self.budget)
        self.num_searches += 1
        if math.isfinite(price):
            bound = solution.lower_bound - (price * self.limit if price else 0.0)
            if bound > self.bound:
                self.bound, self.price = bound, price
        return self.offer(solution.choice)

    def offer(self, choice: Sequence[int]) -> _Point:
        point = _Point(choice=tuple(choice), cost=self.space.cost(choice), weight=self.space.weight(choice))
        if point.weight <= self.limit and math.isfinite(point.cost) and (self.best is None or point.cost < self.best.cost):
            self.best = point
        return point

    def raise_price(self, heavy: _Point, light: _Point) -> None:
        """Raise the price from chord to chord until no choice lies below the chord."""
        while light.cost > heavy.cost and not self.budget.is_spent:
            price = (light.cost - heavy.cost) / (heavy.weight - light.weight)
            point = self.cheapest(price)
            if point.cost + price * point.weight >= heavy.cost + price * heavy.weight - _ROUNDING * abs(price * heavy.weight) - self.slack:
                break
            if point.weight <= self.limit:
                light = point
            else:
                heavy = point

    # --- closing the gap --------------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Enumerate all choices up to a target, and raise the target."""
        kept, space, reduced = self.reduced_costs()
        amounts = space.amounts()
        most = labels_that_fit(self.memory_limit)
        share = _FIRST_TARGET
        while not self.is_done:
            best = self.incumbent.cost
            target = min(best, self.bound + max(share * (best - self.bound), self.slack))
            is_complete = False
            for count in (min(_FEW_LABELS, most), most):
                is_complete = self.enumerate(kept, reduced, amounts, target, count)
                if is_complete or self.incumbent.cost < best:
                    break
            if is_complete:
                self.bound = max(self.bound, min(target, self.incumbent.cost))
                share = min(1.0, share * _GROWTH)
            elif self.incumbent.cost == best:
                break

    def enumerate(
        self, kept: list[Labels], reduced: list[tuple[float, ReducedCosts]], amounts: tuple[Sums, Sums], target: float, most: int
    ) -> bool:
        """Offer the choices within the limit that cost at most `target`; return whether none of them was lost."""
        windows = []
        for price, costs in reduced:
            top = self.limit if math.isinf(price) else target + price * self.limit
            scale = abs(top) + abs(costs.bound) + (0.0 if math.isinf(price) else self.slack / _ROUNDING)
            windows.append(Window(reduced=costs, most=top - costs.bound + _ROUNDING * scale))
        enumeration = enumerate_labels(windows, *amounts, most_labels=most, memory_limit=self.memory_limit, budget=self.budget)
        self.num_labels += enumeration.num_labels
        for choice in enumeration.choices:
            if self.offer([int(kept[v][label]) for v, label in enumerate(choice)]).weight <= self.limit:
                break
        return enumeration.is_complete

    def reduced_costs(self) -> tuple[list[Labels], _Space, list[tuple[float, ReducedCosts]]]:
        """Return reduced costs at the best price, then at others, over the configurations that the bounds leave."""
        space = self.space
        kept: list[Labels] = [np.arange(len(cost)) for cost in space.costs]
        problem = read_problem(*space.priced(self.price))
        order = best_order(problem.sizes, problem.pairs)
        most_entries = self.memory_limit / BYTES_OF_AN_ENTRY / (len(_SIDE_PRICES) + 2)
        if order.work(problem.sizes) > _MOST_WORK or order.table_entries(problem.sizes) > most_entries:
            kept, relaxation = self.survivors(problem)
            space = space.restrict(kept)
            problem = read_problem(*space.priced(self.price))
            order = best_order(problem.sizes, problem.pairs)
            if order.work(problem.sizes) > _MOST_WORK_LEFT or order.table_entries(problem.sizes) > most_entries:
                return kept, space, [(self.price, ReducedCosts.from_relaxation(relaxation))]
        prices = [self.price, *(factor * self.price for factor in _SIDE_PRICES), math.inf]
        problems: list[tuple[float, Problem]] = [(price, read_problem(*space.priced(price))) for price in prices]
        self.budget.spend(len(problems) * order.effort(problem.sizes))
        return kept, space, [(price, ReducedCosts.from_tables(problem, order)) for price, problem in problems]

    def survivors(self, problem: Problem) -> tuple[list[Labels], Relaxation]:
        """Return the configurations that may be part of a better choice, by the bounds at the best price, and the relaxation."""
        relaxation = Relaxation(problem, [np.arange(size) for size in problem.sizes])
        for _ in range(_SWEEPS):
            if self.budget.is_spent:
                break
            self.budget.spend(sweep_effort(relaxation.problem))
            relaxation.sweep()
            most = self.incumbent.cost + self.price * self.limit + 1e2 * self.slack
            relaxation.cut(filled(relaxation, relaxation.survivors(most)))
        return list(relaxation.labels), relaxation


# --- input ----------------------------------------------------------------------------------------------------------------------------


def _read(
    vertex_costs: Sequence[ArrayLike],
    edges: Sequence[tuple[int, int, ArrayLike]],
    weights: Sequence[ArrayLike],
    edge_weights: Sequence[tuple[int, int, ArrayLike]],
) -> _Space:
    problem = read_problem(vertex_costs, edges)
    if len(weights) != len(problem.costs):
        rule = f"there are {len(problem.costs)} vertices"
        raise bad_field("weights", f"{len(weights)} vectors", rule, "give one vector for each vertex")
    for field, given in [
        *((f"weights[{v}]", vector) for v, vector in enumerate(weights)),
        *((f"edge_weights[{i}]", edge[2]) for i, edge in enumerate(edge_weights) if isinstance(edge, tuple | list) and len(edge) == 3),
    ]:
        try:
            array = np.asarray(given, dtype=np.float64)
        except (TypeError, ValueError):
            raise bad_field(field, given, "weights are real numbers in a rectangular array", "give float64") from None
        if array.size and not (np.isfinite(array).all() and array.min() >= 0):
            wrong = array[~(np.isfinite(array) & (array >= 0))].flat[0]
            raise bad_field(field, wrong, "a weight is a finite number of at least 0", "forbid a configuration by a cost of inf")
    reader = Reader("weights", "edge_weights")
    vectors = [reader.vector(v, weight) for v, weight in enumerate(weights)]
    for v, (weight, cost) in enumerate(zip(vectors, problem.costs, strict=True)):
        if len(weight) != len(cost):
            rule = f"vertex {v} has {len(cost)} configurations"
            raise bad_field(f"weights[{v}]", f"{len(weight)} entries", rule, "give a weight for each")
    pairs: dict[tuple[int, int], Array] = {}
    pairs_given: list[Edge] = []
    turned: dict[int, Array] = {}
    for index, edge in enumerate(edge_weights):
        u, v, matrix = reader.edge(index, edge, vectors)
        pairs_given.append((u, v, matrix))
        if u > v:
            u, v, matrix = v, u, turned.setdefault(id(matrix), matrix.T)
        pairs[u, v] = pairs[u, v] + matrix if (u, v) in pairs else matrix
    return _joined(problem, vectors, pairs, pairs_given)


def _joined(problem: Problem, weights: list[Array], pairs: dict[tuple[int, int], Array], pairs_given: list[Edge]) -> _Space:
    zeros: dict[tuple[int, ...], Array] = {}
    given: dict[int, Array] = {}

    def zero(u: int, v: int) -> Array:
        shape = (len(weights[u]), len(weights[v]))
        return zeros.setdefault(shape, np.zeros(shape))

    def with_forbidden(cost: Array) -> Array:
        if id(cost) not in given:
            given[id(cost)] = np.where(cost >= problem.forbidden_total, np.inf, cost)
        return given[id(cost)]

    costs = {(u, v): with_forbidden(matrix) for u, v, matrix in problem.edges}
    both = [*costs, *(pair for pair in pairs if pair not in costs)]
    return _Space(
        costs=[with_forbidden(cost) for cost in problem.costs],
        weights=weights,
        edges=[(u, v, costs.get((u, v), zero(u, v)), pairs.get((u, v), zero(u, v))) for u, v in both],
        given_costs=list(problem.given_edges),
        given_weights=pairs_given,
    )
