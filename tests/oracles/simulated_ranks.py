"""A mesh of ranks in numpy: buffers, collectives among them, and redistributions executed step by step.

Nothing here asks the package what is right. A buffer knows which global indices it holds at each position; a collective may
only use the buffers of its group and must be even; what comes out is compared with the global tensor.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.parallel.algebra.sharding import Layout, Step, redistribute

Rank = tuple[int, ...]
Redistribute = Callable[[Layout, Layout], tuple[Step, ...]]


@dataclass(frozen=True)
class SimulatedMesh:
    sizes: Mapping[str, int]

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(self.sizes)

    @cached_property
    def ranks(self) -> list[Rank]:
        return list(itertools.product(*(range(n) for n in self.sizes.values())))

    def coordinate(self, rank: Rank, axis: str) -> int:
        return rank[self.axes.index(axis)] if axis in self.sizes else 0

    def size(self, axes: frozenset[str]) -> int:
        return math.prod(self.sizes.get(axis, 1) for axis in axes)

    def groups(self, axes: frozenset[str]) -> list[list[Rank]]:
        """Ranks that differ in these axes only."""
        by_rest: dict[Rank, list[Rank]] = {}
        for rank in self.ranks:
            rest = tuple(c for axis, c in zip(self.axes, rank, strict=True) if axis not in axes)
            by_rest.setdefault(rest, []).append(rank)
        return list(by_rest.values())


def digit(mesh: SimulatedMesh, cut: tuple[str, ...], axis: str, length: int) -> np.ndarray:
    """For each index along a position cut by `cut`, outermost first: the coordinate on `axis` of the chip that holds it."""
    outer = mesh.size(frozenset(cut[: cut.index(axis)]))
    return np.arange(length) * outer * mesh.sizes.get(axis, 1) // length % mesh.sizes.get(axis, 1)


def held(mesh: SimulatedMesh, layout: Layout, shape: tuple[int, ...], rank: Rank) -> list[np.ndarray]:
    """Global indices that a rank holds at each position."""
    indices = []
    for cut, length in zip(layout.cuts, shape, strict=True):
        keep = np.ones(length, dtype=bool)
        for axis in cut:
            keep &= digit(mesh, cut, axis, length) == mesh.coordinate(rank, axis)
        indices.append(np.flatnonzero(keep))
    return indices


def distribute(mesh: SimulatedMesh, layout: Layout, value: np.ndarray, random: np.random.Generator) -> dict[Rank, np.ndarray]:
    """Buffers of a global tensor in this layout; partial ones are random numbers that add up to it."""
    parts: dict[Rank, np.ndarray] = {}
    for group in mesh.groups(layout.partial):
        rest = value.astype(float)
        for rank in group[:-1]:
            parts[rank] = random.integers(-4, 5, value.shape).astype(float)
            rest = rest - parts[rank]
        parts[group[-1]] = rest
    if layout.partial:  # ranks that differ in other axes hold pieces of the same parts
        first = {tuple(mesh.coordinate(rank, a) for a in sorted(layout.partial)): rank for rank in reversed(mesh.ranks)}
        parts = {rank: parts[first[tuple(mesh.coordinate(rank, a) for a in sorted(layout.partial))]] for rank in mesh.ranks}
    return {rank: parts[rank][np.ix_(*held(mesh, layout, value.shape, rank))] for rank in mesh.ranks}


def check_reassembles(mesh: SimulatedMesh, layout: Layout, buffers: Mapping[Rank, np.ndarray], value: np.ndarray) -> None:
    """Every rank's buffer, summed over the partial axes, is its part of the global tensor."""
    for group in mesh.groups(layout.partial):
        total = sum(buffers[rank] for rank in group)
        wanted = value[np.ix_(*held(mesh, layout, value.shape, group[0]))]
        assert np.allclose(total, wanted, rtol=1e-9, atol=1e-9), (layout, group)


@dataclass
class _Buffers:
    """Buffers on their way from one layout to another.

    Which indices a rank holds at a position follows from constraints: on its coordinate by the source's chunks, by the
    target's chunks, or ("inner") an even piece of what the other constraints leave.
    """

    mesh: SimulatedMesh
    source: Layout
    target: Layout
    shape: tuple[int, ...]
    values: dict[Rank, np.ndarray]
    constraints: list[dict[str, str]]
    indices: dict[Rank, list[np.ndarray]] = field(default_factory=dict)

    def remaining_indices(self) -> dict[Rank, list[np.ndarray]]:
        """Return the indices that the constraints leave to every rank."""
        known: dict[tuple[int, ...], np.ndarray] = {}
        indices: dict[Rank, list[np.ndarray]] = {rank: [] for rank in self.mesh.ranks}
        for rank, position in itertools.product(self.mesh.ranks, range(len(self.shape))):
            key = (position, *(self.mesh.coordinate(rank, axis) for axis in self.constraints[position]))
            if key not in known:
                known[key] = self._at(rank, position)
            indices[rank].append(known[key])
        return indices

    def _at(self, rank: Rank, position: int) -> np.ndarray:
        length = self.shape[position]
        keep = np.ones(length, dtype=bool)
        kinds = self.constraints[position]
        for axis, kind in kinds.items():
            if kind != "inner":
                cut = (self.source if kind == "source" else self.target).cuts[position]
                keep &= digit(self.mesh, cut, axis, length) == self.mesh.coordinate(rank, axis)
        indices = np.flatnonzero(keep)
        for axis, kind in kinds.items():
            if kind == "inner":
                n = self.mesh.sizes.get(axis, 1)
                assert len(indices) % n == 0, f"{axis}: {len(indices)} indices do not split in {n}"
                indices = np.split(indices, n)[self.mesh.coordinate(rank, axis)]
        return indices

    def constrain(self, axis: str, kind: str) -> None:
        goal = _position(self.target, axis)
        if kind == "inner" and goal is None:
            goal = _position(self.source, axis)
        assert goal is not None
        self.constraints[goal][axis] = kind

    def release(self, axes: frozenset[str]) -> None:
        for constraint in self.constraints:
            for axis in axes:
                constraint.pop(axis, None)

    def take(self) -> None:
        """A local slice: each rank keeps a part of what it has."""
        wanted = self.remaining_indices()
        for rank, indices in wanted.items():
            self.values[rank] = _pick(self.values[rank], self.indices[rank], indices)
        self.indices = wanted


def _position(layout: Layout, axis: str) -> int | None:
    return next((i for i, cut in enumerate(layout.cuts) if axis in cut), None)


def _shared(have: list[np.ndarray], want: list[np.ndarray]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return where the indices in both lists are in `have`, and where in `want`, at each position."""
    positions = [np.searchsorted(h, w) for h, w in zip(have, want, strict=True)]
    are_shared = [h.take(at, mode="clip") == w for h, w, at in zip(have, want, positions, strict=True)]
    return [at[mask] for at, mask in zip(positions, are_shared, strict=True)], [np.flatnonzero(mask) for mask in are_shared]


def _pick(values: np.ndarray, have: list[np.ndarray], want: list[np.ndarray]) -> np.ndarray:
    source, target = _shared(have, want)
    assert all(len(at) == len(w) for at, w in zip(target, want, strict=True)), "a rank would need what it does not hold"
    return values[np.ix_(*source)]


def _size(indices: list[np.ndarray]) -> int:
    return math.prod(len(i) for i in indices)


def _collect(state: _Buffers, group: list[Rank], want: list[np.ndarray]) -> np.ndarray:
    """The elements `want`, each from exactly one member of the group."""
    result = np.zeros([len(w) for w in want])
    times = np.zeros(result.shape, dtype=int)
    for member in group:
        source, target = _shared(state.indices[member], want)
        if all(map(len, target)):
            at = np.ix_(*target)
            result[at] += state.values[member][np.ix_(*source)]
            times[at] += 1
    assert (times == 1).all(), "the group does not hold every element once"
    return result


def execute(
    mesh: SimulatedMesh,
    source: Layout,
    target: Layout,
    buffers: Mapping[Rank, np.ndarray],
    shape: tuple[int, ...],
    *,
    redistribute: Redistribute = redistribute,
) -> tuple[dict[Rank, np.ndarray], list[tuple[Step, int]]]:
    """Runs the steps of a redistribution as collectives; returns the buffers and each step's full buffer in elements."""
    steps = redistribute(source, target)
    state = _Buffers(
        mesh=mesh,
        source=source,
        target=target,
        shape=shape,
        values=dict(buffers),
        constraints=[dict.fromkeys(cut, "source") for cut in source.cuts],
    )
    state.indices = state.remaining_indices()
    in_exchange = frozenset(a for s in steps if s.kind is CollectiveKind.ALL_TO_ALL for a in s.axes)
    in_gather = frozenset(a for s in steps if s.kind is CollectiveKind.ALL_GATHER for a in s.axes)
    scattered = frozenset(a for s in steps if s.kind is CollectiveKind.REDUCE_SCATTER for a in s.axes)
    slices = [a for cut in target.cuts for a in cut if a not in source.cut_axes and a not in scattered]
    assert not source.partial & frozenset(slices), "a partial sum is sliced without being reduced"
    early = [a for a in slices if all(a in step.remaining for step in steps)]
    for axis in early:
        state.constrain(axis, "inner" if axis in in_exchange else "target")
    state.take()
    sizes = []
    order = [s.kind for s in steps]
    assert len(set(order)) == len(order), "one collective of each kind"
    for step in steps:
        before = {rank: _size(i) for rank, i in state.indices.items()}
        groups = mesh.groups(step.axes)
        old, values = state.indices, {}
        if step.kind in (CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_REDUCE):
            assert step.axes <= source.partial
            for axis in target_order(target, step.axes) if step.kind is CollectiveKind.REDUCE_SCATTER else ():
                state.constrain(axis, "inner" if axis in in_exchange | in_gather else "target")
            new = state.remaining_indices()
            for group in groups:
                assert all(all(map(np.array_equal, old[rank], old[group[0]])) for rank in group), "members hold different pieces"
                total = sum(state.values[rank] for rank in group)
                for rank in group:
                    values[rank] = _pick(total, old[group[0]], new[rank])
            elements = before
        elif step.kind is CollectiveKind.ALL_TO_ALL:
            state.release(step.axes)
            for axis in (*target_order(target, step.axes), *sorted(step.axes - target.cut_axes)):
                state.constrain(axis, "target" if axis in target.cut_axes else "inner")
            new = state.remaining_indices()
            for group in groups:
                for rank in group:
                    values[rank] = _collect(state, group, new[rank])
            assert all(_size(new[rank]) == before[rank] for rank in mesh.ranks), "an uneven all-to-all"
            elements = before
        else:
            assert step.kind is CollectiveKind.ALL_GATHER
            state.release(step.axes)
            gathered = state.remaining_indices()
            for group in groups:
                for rank in group:
                    values[rank] = _collect(state, group, gathered[rank])
            elements = {rank: _size(i) for rank, i in gathered.items()}
            assert all(elements[rank] == before[rank] * mesh.size(step.axes) for rank in mesh.ranks), "an uneven all-gather"
            state.values, state.indices = values, gathered
            for axis in target_order(target, step.axes):
                state.constrain(axis, "target")
            state.take()
            new, values = state.indices, state.values
        state.values, state.indices = values, new
        assert len(set(elements.values())) == 1
        sizes.append((step, next(iter(elements.values()))))
    for axis in slices:
        if axis not in early:
            state.constrain(axis, "target")
    state.take()
    for rank in mesh.ranks:
        assert all(map(np.array_equal, state.indices[rank], held(mesh, target, shape, rank))), "not the target layout"
    return state.values, sizes


def target_order(target: Layout, axes: frozenset[str]) -> list[str]:
    return [axis for cut in target.cuts for axis in cut if axis in axes]
