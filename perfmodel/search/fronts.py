"""Enumeration of all choices up to a cost bound within a limit on their weight: a front of (cost, weight), vertex by vertex.

A *label* is a choice for the vertices visited so far. It has a cost, a weight, and a *reduced cost* for each price x: the least
`cost + x * weight` of any completion minus the least of all choices. A label is dropped

- when a reduced cost shows that no completion within the limit costs at most `target`, or
- when another label has the same configurations at the vertices that still have later neighbours, and no larger cost and weight.

The last front contains the best choice within the limit if that costs at most `target`; otherwise no choice does.

Reduced costs come from the elimination tables, walked backward, and are exact. Where the tables do not fit, they come from the vectors and
matrices of a relaxation, which are lower bounds. Costs and weights are added as integers, so that equal blocks in another order give equal
sums.

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
#: Configurations of labels at each vertex with later neighbours.
Columns = dict[int, Integers]

#: Upper limit of sums of integers that represent costs and weights.
_LARGEST = 2.0**61
#: Entries of one block of labels times configurations.
_BLOCK = 1 << 21
#: Bytes of a live label (costs, columns, copies for sorting), and of its entry in the history.
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
        for v, bucket in enumerate(factors):
            turned = []
            for array, axes in bucket:
                others = tuple(u for u in axes if u != v)
                last = array.transpose([*(axes.index(u) for u in others), axes.index(v)])
                turned.append((last, others))
            self.factors.append(turned)

    @classmethod
    def from_tables(cls, problem: Problem, order: EliminationOrder) -> ReducedCosts:
        """Return exact reduced costs: the tables hold the cost of the cheapest completion."""
        buckets, tables = make_tables(problem, order)
        factors = buckets
        if math.isfinite(problem.forbidden_total):
            # forbidden entries are +inf again; tables may hold sums of their finite substitutes, which stay
            least = problem.forbidden_total
            factors = [[(np.where(array >= least, np.inf, array), axes) for array, axes in bucket] for bucket in buckets]
        reduced = cls(problem, _top_down(order), factors)
        roots = {v: np.asarray(sum(array for array, _ in buckets[v])).min() for v, rest in order.steps if not rest}
        reduced.tables = tables | roots
        alone = [float(matrix[0, 0]) for _, _, matrix in problem.edges if matrix.size == 1]
        reduced.bound = math.fsum([*map(float, roots.values()), *alone])
        return reduced

    @classmethod
    def from_relaxation(cls, relaxation: Relaxation) -> ReducedCosts:
        """Return lower bounds of the reduced costs: the residuals of the sweeps, none of them negative."""
        problem = relaxation.problem
        factors: list[list[Factor]] = [[(vector, (v,))] for v, vector in enumerate(relaxation.vectors)]
        before: list[list[int]] = [[] for _ in problem.costs]
        for edge, (u, v, matrix) in enumerate(problem.edges):
            left = matrix - relaxation.from_low[edge][:, None] - relaxation.from_high[edge]
            factors[v].append((np.where(matrix >= problem.forbidden_total, np.inf, left), (u, v)))
            before[v].append(u)
        reduced = cls(problem, [(v, tuple(rest)) for v, rest in enumerate(before)], factors)
        reduced.bound = relaxation.constant
        return reduced

    def of(self, v: int, columns: Columns, rest: Sequence[int], count: int) -> Array:
        """Return the reduced costs [label, configuration of v]."""
        total = np.zeros((count, self.sizes[v]))
        for array, others in self.factors[v]:
            total += array[tuple(columns[u] for u in others)]
        if v in self.tables:
            table = self.tables[v][tuple(columns[u] for u in rest)] if rest else self.tables[v]
            total -= table[..., None]
        return total


def _top_down(order: EliminationOrder) -> list[tuple[int, tuple[int, ...]]]:
    """Return each vertex after its dependent set. The largest subtree of a vertex comes last, so that few vertices stay needed."""
    rests = dict(order.steps)
    children: dict[int, list[int]] = {v: [] for v in rests}
    size = dict.fromkeys(rests, 1)
    for v, rest in order.steps:
        if rest:
            children[rest[0]].append(v)
            size[rest[0]] += size[v]
    walk = [v for v, rest in order.steps if not rest]
    sequence = []
    while walk:
        v = walk.pop()
        sequence.append((v, rests[v]))
        walk += sorted(children[v], key=size.__getitem__, reverse=True)
    return sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Largest reduced cost, `most`, of labels that are kept."""

    reduced: ReducedCosts
    most: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """Arrays with one entry per label; `reduced` has one array per window."""

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
            reduced=tuple(costs[kept] for costs in self.reduced),
            columns={u: column[kept] for u, column in self.columns.items()},
            parents=self.parents[kept],
            chosen=self.chosen[kept],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Enumeration:
    """Choices of the last front, cheapest first; whether no label was lost; and the number of labels."""

    choices: Iterator[list[int]]
    is_complete: bool
    num_labels: int


class Sums:
    """Costs or weights of configurations and pairs as integers: equal sums are equal in any order."""

    def __init__(self, vectors: Sequence[Array], edges: Sequence[tuple[int, int, Array]]) -> None:
        known: dict[int, Integers] = {}
        arrays = [*vectors, *(matrix for _, _, matrix in edges)]
        largest = math.fsum(float(np.abs(array[np.isfinite(array)]).max(initial=0.0)) for array in arrays)
        self.scale = 2.0 ** math.floor(math.log2(_LARGEST / largest)) if largest > 0 else 1.0

        def integers(array: Array) -> Integers:
            if id(array) not in known:
                finite = np.where(np.isfinite(array), array, 0.0)  # forbidden entries are never chosen
                known[id(array)] = np.rint(finite * self.scale).astype(np.int64)
            return known[id(array)]

        self.vectors = [integers(vector) for vector in vectors]
        self.around: list[list[tuple[int, Integers]]] = [[] for _ in vectors]
        for u, v, matrix in edges:
            entries = integers(matrix)
            if len(entries) == 1 or entries.shape[1] == 1:
                end = v if len(entries) == 1 else u
                self.vectors[end] = self.vectors[end] + entries.ravel()
            else:
                self.around[u].append((v, entries.T))
                self.around[v].append((u, entries))

    def of(self, v: int, chosen: Integers, columns: Columns, parents: Integers) -> Integers:
        total = self.vectors[v][chosen]
        for u, matrix in self.around[v]:
            if u in columns:
                total = total + matrix[columns[u][parents], chosen]
        return total


def enumerate_labels(
    windows: Sequence[Window], costs: Sums, weights: Sums, *, most_labels: int, memory_limit: float, budget: Budget
) -> Enumeration:
    """Enumerate all labels within the windows. Past `most_labels`, keep those of least reduced cost and a sample over the weights."""
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
            for u in [u for u in block.columns if last_use.get(u, -1) <= i]:
                del block.columns[u]
            blocks.append(_undominated(block))
            if budget.is_spent or sum(len(part.costs) for part in blocks) > 4 * most_labels:
                is_complete = is_complete and start + step >= len(labels.costs)
                break
        labels = blocks[0] if len(blocks) == 1 else _undominated(_joined(blocks))
        if len(labels.costs) > most_labels:
            # half of them by least reduced cost at the first price, and half evenly over the weights of the others
            best, others = np.split(np.argsort(labels.reduced[0], kind="stable"), [most_labels // 2])
            by_weight = others[np.argsort(labels.weights[others], kind="stable")]
            sample = by_weight[np.linspace(0, len(others) - 1, most_labels - len(best)).astype(np.int64)]
            labels = labels.take(np.sort(np.concatenate([best, sample])))
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
    """Extend the labels from `start` to `stop` by each configuration of v within the windows."""
    span = slice(start, stop)
    sizes = windows[0].reduced.sizes
    columns = {u: column[span] for u, column in labels.columns.items()}
    count = len(labels.costs[span])
    key = _keys(columns, rest, sizes, count)
    _, first, group = np.unique(key, return_index=True, return_inverse=True)
    of_group = {u: columns[u][first] for u in rest}
    gains = [window.reduced.of(v, of_group, rest, len(first)) for window in windows]
    mask = np.ones((len(first), sizes[v]), dtype=bool)
    for gain, window, reduced in zip(gains, windows, labels.reduced, strict=True):
        least = np.full(len(first), np.inf)
        np.minimum.at(least, group, reduced[span])
        mask &= least[:, None] + gain <= window.most
    options = np.nonzero(mask)[1]
    per_group = mask.sum(axis=1)
    begin = np.cumsum(per_group) - per_group
    per_label = per_group[group]
    parents = np.repeat(np.arange(count), per_label)
    nth = np.arange(len(parents)) - np.repeat(np.cumsum(per_label) - per_label, per_label)
    chosen = options[begin[group[parents]] + nth]
    stays = np.ones(len(parents), dtype=bool)
    totals = []
    for gain, window, reduced in zip(gains, windows, labels.reduced, strict=True):
        total = reduced[span][parents] + gain[group[parents], chosen]
        stays &= total <= window.most
        totals.append(total)
    parents, chosen = parents[stays], chosen[stays]
    return Labels(
        costs=labels.costs[span][parents] + costs.of(v, chosen, columns, parents),
        weights=labels.weights[span][parents] + weights.of(v, chosen, columns, parents),
        reduced=tuple(total[stays] for total in totals),
        columns={u: column[parents] for u, column in columns.items()} | {v: chosen},
        parents=parents + start,
        chosen=chosen,
    )


def _undominated(labels: Labels) -> Labels:
    """Drop labels that another one with equal columns dominates in cost and weight, and duplicates."""
    count = len(labels.costs)
    if count < 2:
        return labels
    sizes = {u: int(column.max()) + 1 for u, column in labels.columns.items()}
    key = _keys(labels.columns, list(labels.columns), sizes, count)
    order = np.lexsort((labels.weights, labels.costs, key))
    _, group = np.unique(key[order], return_inverse=True)
    _, rank = np.unique(labels.weights[order], return_inverse=True)
    fall = rank + (group[-1] - group) * count  # below all previous groups
    least = np.minimum.accumulate(fall)
    kept = np.ones(count, dtype=bool)
    kept[1:] = fall[1:] < least[:-1]
    return labels.take(order[kept])


def _keys(columns: Columns, over: Sequence[int], sizes: Sequence[int] | dict[int, int], count: int) -> Integers:
    """Return one number per combination of configurations."""
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
        costs=np.concatenate([block.costs for block in blocks]),
        weights=np.concatenate([block.weights for block in blocks]),
        reduced=tuple(np.concatenate(parts) for parts in zip(*(block.reduced for block in blocks), strict=True)),
        columns={u: np.concatenate([block.columns[u] for block in blocks]) for u in blocks[0].columns},
        parents=np.concatenate([block.parents for block in blocks]),
        chosen=np.concatenate([block.chosen for block in blocks]),
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
