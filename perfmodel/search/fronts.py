"""All choices up to a bound that may matter within a limit on their weight: cost against weight, vertex by vertex.

A *label* is a choice for the vertices seen so far: its cost, its weight, and for each price x its *reduced cost*, by which the least
`cost + x * weight` of any completion exceeds the least of all choices. A label goes

- when a reduced cost shows that no completion within the limit costs at most `target`, or
- when another label, of the same configurations at the vertices that still have neighbours to come, costs and weighs no more.

What is left at the end holds the best choice within the limit if that costs at most `target`; else no choice does.

Reduced costs come from the tables of elimination, walked backward: they are exact then. Where the tables do not fit they come from the
vectors and matrices that a relaxation leaves, which are lower bounds. Costs and weights are added as integers, so that equal blocks in
another order give equal sums.

Source: Ibaraki, Enumerative approaches to combinatorial optimization, Annals of Operations Research 10-11, 1987 (dominance and bounds);
Handler & Zang, A dual algorithm for the constrained shortest path problem, Networks 10, 1980 (the Lagrangian bounds).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perfmodel.search.bounds import Relaxation
from perfmodel.search.budget import ENTRIES_OF_A_FRONT, ENTRIES_OF_A_LABEL, Budget
from perfmodel.search.order import EliminationOrder
from perfmodel.search.problem import Array, Problem
from perfmodel.search.tables import Factor, make_tables

Integers = NDArray[np.int64]
#: Configurations of labels at each vertex that is still needed.
Columns = dict[int, Integers]

#: Integers that stand for costs and weights add up to less than this.
_LARGEST = 2.0**61
#: Entries of one block of labels times configurations.
_BLOCK = 1 << 21
#: Bytes of a label while it is alive (costs, columns, copies for sorting), and of its place in the history.
_BYTES_OF_A_LABEL = 400.0
_BYTES_OF_HISTORY = 16.0
_LEAST_HISTORY = 1e6


class ReducedCosts:
    """Amount that a configuration adds to a label's bound, at one price. `bound`: least of all choices; `scopes`: vertices in order."""

    __slots__ = ("bound", "factors", "scopes", "sizes", "tables")

    def __init__(self, problem: Problem, scopes: Sequence[tuple[int, tuple[int, ...]]], factors: Sequence[Sequence[Factor]]) -> None:
        self.sizes = problem.sizes
        self.scopes = tuple(scopes)
        self.bound = 0.0
        self.tables: dict[int, Array] = {}
        self.factors: list[list[Factor]] = []
        for v, own in enumerate(factors):
            turned = []
            for array, axes in own:
                others = tuple(u for u in axes if u != v)
                last = array.transpose([*(axes.index(u) for u in others), axes.index(v)])
                turned.append((last, others))
            self.factors.append(turned)

    @classmethod
    def from_tables(cls, problem: Problem, order: EliminationOrder) -> ReducedCosts:
        """Exact: the tables say what the cheapest completion costs."""
        buckets, tables = make_tables(problem, order)
        found = cls(problem, _top_down(order), [_with_forbidden(own, problem) for own in buckets])
        roots = {v: np.asarray(sum(array for array, _ in buckets[v])).min() for v, rest in order.steps if not rest}
        found.tables = tables | roots
        alone = [float(matrix[0, 0]) for _, _, matrix in problem.edges if matrix.size == 1]
        found.bound = math.fsum([*map(float, roots.values()), *alone])
        return found

    @classmethod
    def from_relaxation(cls, relaxation: Relaxation) -> ReducedCosts:
        """Lower bounds: what the sweeps left, none of it negative."""
        problem = relaxation.problem
        factors: list[list[Factor]] = [[(vector, (v,))] for v, vector in enumerate(relaxation.vectors)]
        before: list[list[int]] = [[] for _ in problem.costs]
        for edge, (u, v, matrix) in enumerate(problem.edges):
            left = matrix - relaxation.from_low[edge][:, None] - relaxation.from_high[edge]
            factors[v].append((np.where(matrix >= problem.forbidden_total, np.inf, left), (u, v)))
            before[v].append(u)
        found = cls(problem, [(v, tuple(rest)) for v, rest in enumerate(before)], factors)
        found.bound = relaxation.constant
        return found

    def of(self, v: int, columns: Columns, rest: Sequence[int], count: int) -> Array:
        """[label, configuration of v]"""
        total = np.zeros((count, self.sizes[v]))
        for array, others in self.factors[v]:
            total += array[tuple(columns[u] for u in others)]
        if v in self.tables:
            table = self.tables[v][tuple(columns[u] for u in rest)] if rest else self.tables[v]
            total -= table[..., None]
        return total


def _with_forbidden(factors: Sequence[Factor], problem: Problem) -> list[Factor]:
    """Forbidden entries as +inf again: a table may hold sums of what stands for them, which stay."""
    if not math.isfinite(problem.forbidden_total):
        return list(factors)
    return [(np.where(array >= problem.forbidden_total, np.inf, array), axes) for array, axes in factors]


def _top_down(order: EliminationOrder) -> list[tuple[int, tuple[int, ...]]]:
    """Each vertex after its dependent set, and of the parts that hang on it the largest last: few vertices stay needed."""
    rests = dict(order.steps)
    children: dict[int, list[int]] = {v: [] for v in rests}
    size = dict.fromkeys(rests, 1)
    for v, rest in order.steps:
        if rest:
            children[rest[0]].append(v)
            size[rest[0]] += size[v]
    walk = [v for v, rest in order.steps if not rest]
    found = []
    while walk:
        v = walk.pop()
        found.append((v, rests[v]))
        walk += sorted(children[v], key=size.__getitem__, reverse=True)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Labels stay while their reduced costs are at most `most`."""

    reduced: ReducedCosts
    most: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """One entry for each label in every array; `reduced` has one array for each window."""

    costs: Integers
    weights: Integers
    reduced: tuple[Array, ...]
    columns: Columns
    parents: Integers
    chosen: Integers

    def take(self, kept: Integers) -> Labels:
        return Labels(
            costs=self.costs[kept],
            weights=self.weights[kept],
            reduced=tuple(each[kept] for each in self.reduced),
            columns={u: column[kept] for u, column in self.columns.items()},
            parents=self.parents[kept],
            chosen=self.chosen[kept],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Enumeration:
    """Choices of the last front, cheapest first; whether nothing was lost on the way; and how many labels there were."""

    choices: Iterator[list[int]]
    is_complete: bool
    num_labels: int


class Sums:
    """One kind of amount (cost or weight) of configurations and pairs, as integers: equal sums are equal whatever their order."""

    def __init__(self, vectors: Sequence[Array], edges: Sequence[tuple[int, int, Array]]) -> None:
        known: dict[int, Integers] = {}
        largest = math.fsum(_largest(array) for array in [*vectors, *(matrix for _, _, matrix in edges)])
        self.scale = 2.0 ** math.floor(math.log2(_LARGEST / largest)) if largest > 0 else 1.0

        def integers(array: Array) -> Integers:
            if id(array) not in known:
                finite = np.where(np.isfinite(array), array, 0.0)  # what is forbidden is never chosen
                known[id(array)] = np.rint(finite * self.scale).astype(np.int64)
            return known[id(array)]

        self.vectors = [integers(vector) for vector in vectors]
        self.around: list[list[tuple[int, Integers]]] = [[] for _ in vectors]
        for u, v, matrix in edges:
            own = integers(matrix)
            if len(own) == 1 or own.shape[1] == 1:
                end = v if len(own) == 1 else u
                self.vectors[end] = self.vectors[end] + own.ravel()
            else:
                self.around[u].append((v, own.T))
                self.around[v].append((u, own))

    def of(self, v: int, chosen: Integers, columns: Columns, parents: Integers) -> Integers:
        total = self.vectors[v][chosen]
        for u, matrix in self.around[v]:
            if u in columns:
                total = total + matrix[columns[u][parents], chosen]
        return total


def _largest(array: Array) -> float:
    return float(np.abs(array[np.isfinite(array)]).max(initial=0.0))


def enumerate_labels(
    windows: Sequence[Window], costs: Sums, weights: Sums, *, most_labels: int, memory_limit: float, budget: Budget
) -> Enumeration:
    """All that the windows leave; where there are more than `most_labels`, those of least reduced cost and some of every weight."""
    scopes = windows[0].reduced.scopes
    last_use = {u: i for i, (_, rest) in enumerate(scopes) for u in rest}
    one = np.zeros(1, dtype=np.int64)
    labels = Labels(costs=one, weights=one, reduced=tuple(np.zeros(1) for _ in windows), columns={}, parents=one, chosen=one)
    history: list[tuple[Integers, Integers]] = []
    is_complete, count = True, 0
    for i, (v, rest) in enumerate(scopes):
        size = windows[0].reduced.sizes[v]
        step = max(1, _BLOCK // size)
        blocks = []
        for start in range(0, len(labels.costs), step):
            block = _extend(labels, start, start + step, v, rest, windows, costs, weights)
            budget.spend(ENTRIES_OF_A_FRONT + ENTRIES_OF_A_LABEL * len(block.costs))
            block = _drop_columns(block, i, last_use)
            blocks.append(_undominated(block))
            if budget.is_spent or sum(len(own.costs) for own in blocks) > 4 * most_labels:
                is_complete = is_complete and start + step >= len(labels.costs)
                break
        labels = blocks[0] if len(blocks) == 1 else _undominated(_joined(blocks))
        if len(labels.costs) > most_labels:
            labels = labels.take(_some(labels, most_labels))
            is_complete = False
        count += len(labels.costs)
        history.append((labels.parents.astype(np.int32), labels.chosen.astype(np.int32)))
        if len(labels.costs) == 0 or count * _BYTES_OF_HISTORY > max(memory_limit, _LEAST_HISTORY) or budget.is_spent:
            is_complete = is_complete and len(labels.costs) == 0
            return Enumeration(choices=iter(()), is_complete=is_complete, num_labels=count)
    return Enumeration(choices=_choices(labels, history, scopes), is_complete=is_complete, num_labels=count)


def labels_that_fit(memory_limit: float) -> int:
    return max(1000, int(memory_limit / _BYTES_OF_A_LABEL))


def _extend(
    labels: Labels, start: int, stop: int, v: int, rest: Sequence[int], windows: Sequence[Window], costs: Sums, weights: Sums
) -> Labels:
    """The labels from `start` to `stop` with each configuration of v that the windows leave."""
    own = slice(start, stop)
    sizes = windows[0].reduced.sizes
    columns = {u: column[own] for u, column in labels.columns.items()}
    count = len(labels.costs[own])
    key = _keys(columns, rest, sizes, count)
    _, first, group = np.unique(key, return_index=True, return_inverse=True)
    of_group = {u: columns[u][first] for u in rest}
    gains = [window.reduced.of(v, of_group, rest, len(first)) for window in windows]
    mask = np.ones((len(first), sizes[v]), dtype=bool)
    for gain, window, reduced in zip(gains, windows, labels.reduced, strict=True):
        least = np.full(len(first), np.inf)
        np.minimum.at(least, group, reduced[own])
        mask &= least[:, None] + gain <= window.most
    options = np.nonzero(mask)[1]
    per_group = mask.sum(axis=1)
    begin = np.cumsum(per_group) - per_group
    per_label = per_group[group]
    parents = np.repeat(np.arange(count), per_label)
    nth = np.arange(len(parents)) - np.repeat(np.cumsum(per_label) - per_label, per_label)
    chosen = options[begin[group[parents]] + nth]
    stays = np.ones(len(parents), dtype=bool)
    found = []
    for gain, window, reduced in zip(gains, windows, labels.reduced, strict=True):
        total = reduced[own][parents] + gain[group[parents], chosen]
        stays &= total <= window.most
        found.append(total)
    parents, chosen = parents[stays], chosen[stays]
    return Labels(
        costs=labels.costs[own][parents] + costs.of(v, chosen, columns, parents),
        weights=labels.weights[own][parents] + weights.of(v, chosen, columns, parents),
        reduced=tuple(total[stays] for total in found),
        columns={u: column[parents] for u, column in columns.items()} | {v: chosen},
        parents=parents + start,
        chosen=chosen,
    )


def _some(labels: Labels, count: int) -> Integers:
    """Half of them of least reduced cost at the first price, half evenly spread over the weights of the others."""
    ranked = np.argsort(labels.reduced[0], kind="stable")
    best, others = ranked[: count // 2], ranked[count // 2 :]
    by_weight = others[np.argsort(labels.weights[others], kind="stable")]
    spread = by_weight[np.linspace(0, len(others) - 1, count - len(best)).astype(np.int64)]
    return np.sort(np.concatenate([best, spread]))


def _drop_columns(labels: Labels, i: int, last_use: dict[int, int]) -> Labels:
    for u in [u for u in labels.columns if last_use.get(u, -1) <= i]:
        del labels.columns[u]
    return labels


def _undominated(labels: Labels) -> Labels:
    """Labels that no other label with equal columns dominates in cost and weight; one of equal labels."""
    count = len(labels.costs)
    if count < 2:
        return labels
    sizes = {u: int(column.max()) + 1 for u, column in labels.columns.items()}
    key = _keys(labels.columns, list(labels.columns), sizes, count)
    order = np.lexsort((labels.weights, labels.costs, key))
    _, group = np.unique(key[order], return_inverse=True)
    _, rank = np.unique(labels.weights[order], return_inverse=True)
    fall = rank + (group[-1] - group) * count  # below all of the groups before
    least = np.minimum.accumulate(fall)
    kept = np.ones(count, dtype=bool)
    kept[1:] = fall[1:] < least[:-1]
    return labels.take(order[kept])


def _keys(columns: Columns, over: Sequence[int], sizes: Sequence[int] | dict[int, int], count: int) -> Integers:
    """One number for each combination of configurations."""
    key = np.zeros(count, dtype=np.int64)
    most = 1.0
    for u in over:
        most *= sizes[u]
        if most >= _LARGEST:
            _, key = np.unique(key, return_inverse=True)
            most = float(count) * sizes[u]
        key = key * sizes[u] + columns[u]
    return key


def _joined(blocks: Sequence[Labels]) -> Labels:
    return Labels(
        costs=np.concatenate([own.costs for own in blocks]),
        weights=np.concatenate([own.weights for own in blocks]),
        reduced=tuple(np.concatenate(parts) for parts in zip(*(own.reduced for own in blocks), strict=True)),
        columns={u: np.concatenate([own.columns[u] for own in blocks]) for u in blocks[0].columns},
        parents=np.concatenate([own.parents for own in blocks]),
        chosen=np.concatenate([own.chosen for own in blocks]),
    )


def _choices(
    labels: Labels, history: Sequence[tuple[Integers, Integers]], scopes: Sequence[tuple[int, tuple[int, ...]]]
) -> Iterator[list[int]]:
    for at in np.argsort(labels.costs, kind="stable"):
        choice = [0] * len(scopes)
        for (v, _), (parents, chosen) in zip(reversed(scopes), reversed(history), strict=True):
            choice[v] = int(chosen[at])
            at = parents[at]
        yield choice
