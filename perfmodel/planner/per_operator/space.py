"""Space of a per-operator search on any network: configurations of operators and of tensors with several readers.

A configuration puts every axis of the mesh on one dim of the operator or on none. Axes of equal size in one tier are interchangeable: only
their number on a dim matters. They are assigned in the order of the dims, so that a tensor's shardings match from operator to operator.
The order is one for the whole network: dims that are the same position of the same tensor are one class (`dim_classes`).

With t axes of one tier and k dims that is (t + k choose k) configurations a tier: 1,225 for three dims and a node of 8 in 8.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np
from numpy.typing import NDArray

from perfmodel.foundation.disjoint_sets import DisjointSets
from perfmodel.foundation.grouping import grouped
from perfmodel.parallel.algebra.sharding import Held, Sharding
from perfmodel.parallel.per_operator.assignment import Assignment, cut_sizes, divides
from perfmodel.parallel.per_operator.mesh import MeshAxis, axes_mask
from perfmodel.workload.graph import Graph, Operator, TensorRole

Masks = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Configurations:
    """Configurations of a vertex. masks[i, d]: axes on dim d of configuration i, as a bit mask; parts[i, d]: the number of parts."""

    dims: tuple[str, ...]
    masks: Masks
    parts: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.masks)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NetworkSpace:
    """Configurations of operators first, then of tensors with several readers. Equal operators share one `Configurations`.

    most_dims   largest number of dims that an operator shards within the innermost tier (0: any)
    held[i]     tensor of vertex len(operators) + i; its configurations have a dim for each position, and "partial" last
    """

    network: Graph
    axes: tuple[MeshAxis, ...]
    operators: tuple[Configurations, ...]
    held: tuple[str, ...]
    layouts: tuple[Configurations, ...]
    most_dims: int = 0

    @property
    def num_configurations(self) -> tuple[int, ...]:
        return (*map(len, self.operators), *map(len, self.layouts))

    def names(self, mask: int) -> tuple[str, ...]:
        """Return the axes of a mask, outermost first."""
        return tuple(axis.name for i, axis in enumerate(self.axes) if mask >> i & 1)

    def mask(self, names: Sequence[str] | frozenset[str]) -> int:
        return axes_mask(self.axes, names)

    def assignment(self, choice: Sequence[int], *, stages: tuple[str, ...] = ()) -> Assignment:
        """Return the assignment of a choice of configurations; `stages` as in `Assignment`."""
        shardings: dict[str, Sharding] = {}
        for operator, space, index in zip(self.network.operators, self.operators, choice, strict=False):
            masks = space.masks[index]
            shardings[operator.name] = {dim: self.names(int(mask)) for dim, mask in zip(space.dims, masks, strict=True) if mask}
        held = {}
        for tensor, space, index in zip(self.held, self.layouts, choice[len(self.operators) :], strict=True):
            *cuts, partial = (int(mask) for mask in space.masks[index])
            held[tensor] = Held(cuts=tuple(self.names(mask) for mask in cuts), partial=frozenset(self.names(partial)))
        return Assignment(axes=self.axes, shardings=shardings, held=held, stages=stages)

    def choice(self, assignment: Assignment) -> tuple[int, ...]:
        """Return the configurations of an assignment; -1 for those that are not in the space."""
        rows = []
        for operator, space in zip(self.network.operators, self.operators, strict=True):
            sharding = assignment.shardings[operator.name]
            rows.append(_row(space.masks, [self.mask(tuple(sharding.get(dim, ()))) for dim in space.dims]))
        for tensor, space in zip(self.held, self.layouts, strict=True):
            held = assignment.held[tensor]
            rows.append(_row(space.masks, [*(self.mask(cut) for cut in held.cuts), self.mask(held.partial)]))
        return tuple(rows)


def _row(masks: Masks, wanted: Sequence[int]) -> int:
    rows = np.flatnonzero((masks == np.array(wanted)).all(axis=1))
    return int(rows[0]) if len(rows) else -1


def dim_classes(network: Graph) -> tuple[Mapping[tuple[int, str], int], int]:
    """Return (operator, dim) -> class and the number of classes: dims at one position of a tensor are joined; numbered by appearance."""
    joined = DisjointSets[tuple[int, str]]()
    at: dict[tuple[str, int], tuple[int, str]] = {}
    for index, operator in enumerate(network.operators):
        for operand in (*operator.inputs, operator.output):
            for position, dim in enumerate(operand.dims):
                if dim:
                    joined.join((index, dim), at.setdefault((operand.tensor, position), (index, dim)))
    order: dict[tuple[int, str], int] = {}
    classes = {}
    for index, operator in enumerate(network.operators):
        for dim in operator.dims:
            classes[index, dim] = order.setdefault(joined.find((index, dim)), len(order))
    return classes, len(order)


def network_space(network: Graph, axes: tuple[MeshAxis, ...], *, most_dims: int = 0) -> NetworkSpace:
    """Return all configurations of operators and of tensors with several readers.

    most_dims   largest number of sharded dims of an operator within the innermost tier; one less (at least one) within each other; 0: any
    """
    classes, _ = dim_classes(network)
    groups = list(grouped(range(len(axes)), lambda i: (axes[i].tier, axes[i].size)).values())  # of interchangeable axes
    counts = _part_counts(axes)
    known: dict[object, Configurations] = {}
    operators = []
    for index, operator in enumerate(network.operators):
        order = sorted(operator.dims, key=lambda dim: classes[index, dim])
        limits: dict[str, tuple[int, ...]] = {}
        for dim in order:
            if dim in operator.roles.unsplit or dim in operator.roles.padded:
                limits[dim] = tuple(part for part in counts if divides(operator, network, dim, part))
            else:
                common = gcd(*cut_sizes(operator, network, dim))
                limits[dim] = tuple(part for part in counts if common % part == 0)
        key = (tuple(order), tuple(limits.items()))
        if key not in known:
            known[key] = _configurations(tuple(order), limits, groups, axes, most_dims)
        operators.append(known[key])
    shared, producers = network.shared(), network.producers()
    layouts = tuple(
        _layouts(network, tensor, producers[tensor], reading, classes, axes, groups, most_dims, known) for tensor, reading in shared.items()
    )
    return NetworkSpace(network=network, axes=axes, operators=tuple(operators), held=tuple(shared), layouts=layouts, most_dims=most_dims)


def _part_counts(axes: tuple[MeshAxis, ...]) -> list[int]:
    counts = {1}
    for axis in axes:
        counts |= {count * axis.size for count in counts}
    return sorted(counts)


def _configurations(
    dims: tuple[str, ...],
    limits: Mapping[str, tuple[int, ...]],
    groups: list[list[int]],
    axes: tuple[MeshAxis, ...],
    most_dims: int,
) -> Configurations:
    """Return all assignments of the axes of each group to the dims, in order; the last axes of a group may be unused."""
    masks = np.zeros((1, len(dims)), dtype=np.int64)
    parts = np.ones((1, len(dims)), dtype=np.int64)
    allowed = [np.array(limits[dim]) for dim in dims]
    free = [d for d, dim in enumerate(dims) if limits[dim] != (1,)]
    for group in groups:
        size = axes[group[0]].size
        rows_masks, rows_parts = [], []
        for counts in _compositions(len(group), len(free)):
            row, cut, start = [0] * len(dims), [1] * len(dims), 0
            for d, count in zip(free, counts, strict=True):
                row[d] = sum(1 << bit for bit in group[start : start + count])
                cut[d] = size**count
                start += count
            rows_masks.append(row)
            rows_parts.append(cut)
        shape = (len(masks) * len(rows_masks), len(dims))  # not -1: an operator without dims has one row of no columns
        masks = (masks[:, None, :] | np.array(rows_masks, dtype=np.int64)[None]).reshape(shape)
        parts = (parts[:, None, :] * np.array(rows_parts, dtype=np.int64)[None]).reshape(shape)
        legal = np.ones(len(parts), dtype=bool)
        for d, options in enumerate(allowed):
            legal &= np.isin(parts[:, d], options)
        if most_dims:
            tier = axes[group[0]].tier
            bits = sum(1 << i for i, axis in enumerate(axes) if axis.tier == tier)
            legal &= ((masks & bits) != 0).sum(axis=1) <= (most_dims if tier == 0 else max(1, most_dims - 1))
        masks, parts = masks[legal], parts[legal]
    return Configurations(dims=dims, masks=masks, parts=parts)


def _compositions(total: int, places: int) -> list[tuple[int, ...]]:
    """Return non-negative counts for each place that add up to at most `total`."""
    if places == 0:
        return [()]
    return [(count, *rest) for count in range(total + 1) for rest in _compositions(total - count, places - 1)]


def _layouts(
    network: Graph,
    tensor: str,
    producer: int,
    reading: Sequence[tuple[int, int]],
    classes: Mapping[tuple[int, str], int],
    axes: tuple[MeshAxis, ...],
    groups: list[list[int]],
    most_dims: int,
    known: dict[object, Configurations],
) -> Configurations:
    """Return the layouts that the producer or a reader can have, each with the axes on which the sum of the readers' gradients is partial.

    Partial axes are assigned as those of a last dim after all positions: in a reader, they are on dims that the tensor lacks.
    """
    shape = network.tensors[tensor].shape
    ends: list[tuple[int, Operator, tuple[str, ...]]] = [
        (producer, network.operators[producer], network.operators[producer].output.dims),
        *((index, network.operators[index], network.operators[index].inputs[position].dims) for index, position in reading),
    ]
    counts = _part_counts(axes)
    limits: dict[str, tuple[int, ...]] = {}
    rank: dict[str, tuple[int, int]] = {}
    for position in range(len(shape)):
        name = str(position)
        at_position = [(index, operator, dims[position]) for index, operator, dims in ends]
        cuttable = [{part for part in counts if (divides(op, network, dim, part) if dim else part == 1)} for _, op, dim in at_position]
        limits[name] = tuple(sorted(set().union(*cuttable)))
        named = [classes[index, dim] for index, _, dim in at_position if dim]
        rank[name] = (min(named) if named else 1 << 30, position)
    order = sorted(rank, key=lambda name: rank[name])
    has_gradient = network.tensors[tensor].role is TensorRole.ACTIVATION
    limits["partial"] = tuple(counts) if has_gradient else (1,)
    key = ("held", tuple(order), tuple(limits.items()))
    if key not in known:
        configurations = _configurations((*order, "partial"), limits, groups, axes, most_dims)
        columns = [order.index(str(position)) for position in range(len(shape))] + [len(order)]
        known[key] = Configurations(
            dims=(*(str(position) for position in range(len(shape))), "partial"),
            masks=configurations.masks[:, columns],
            parts=configurations.parts[:, columns],
        )
    return known[key]
