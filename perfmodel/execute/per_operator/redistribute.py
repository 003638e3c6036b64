"""Redistribution of a tensor between two layouts, with the same collectives as `parallel.algebra.sharding.redistribute`.

At each position of a tensor, a rank holds a set of indices in ascending order. Each step maps one product of such sets to another.
HeldChunks in any order (R10) therefore need no special case: a peer receives the intersection of its target set with this rank's set.

DTensor is not used. On CPUs it implements sharding that moves between positions as an all-gather, it has no gather over several
positions at once, and on two ranks with gloo it takes 1.2 ms for a small tensor, where the collective alone takes 0.3 ms.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, prod

import numpy as np
import torch
import torch.distributed as dist

from perfmodel.execute.layers.kernel import differentiable
from perfmodel.execute.local import gathered, scattered
from perfmodel.execute.per_operator.mesh import NetworkMesh, Purpose, all_gather, reduce_scatter
from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.parallel.algebra.sharding import HeldChunks, Layout, Step, chunks_between, redistribute

#: Indices that a rank holds at each position.
Holding = tuple[np.ndarray, ...]
#: Location of a selection in a local tensor, at each position.
Selection = tuple["slice | torch.Tensor", ...]


def holding(layout: Layout, shape: Sequence[int], mesh: NetworkMesh, rank: int | None = None) -> Holding:
    """Return the indices of a tensor that a rank (default: this one) holds in a layout."""
    coordinates = mesh.coordinates(mesh.rank if rank is None else rank)
    return tuple(_held(size, HeldChunks(axes), mesh, coordinates) for size, axes in zip(shape, layout.cuts, strict=True))


def local_part(tensor: torch.Tensor, layout: Layout, mesh: NetworkMesh) -> torch.Tensor:
    """Return this rank's shard of an unsharded tensor."""
    full_range = tuple(np.arange(size) for size in tensor.shape)
    return _take(tensor, _selection(full_range, holding(layout, tensor.shape, mesh)))


def _held(size: int, chunks: HeldChunks, mesh: NetworkMesh, coordinates: dict[str, int]) -> np.ndarray:
    """Return the indices of a position of `size` held by the rank at `coordinates`; with uneven shards the last are shorter."""
    key = (size, chunks, *[coordinates[axis] for axis in (*chunks.axes, *chunks.further)])
    if key not in mesh.indices:
        indices, further = np.arange(size), (*chunks.axes, *chunks.further)
        if size % mesh.size(chunks.axes) == 0:
            grid = indices.reshape(*(mesh.sizes[axis] for axis in chunks.axes), -1)
            indices = grid[tuple(slice(None) if axis in chunks.free else coordinates[axis] for axis in chunks.axes)].reshape(-1)
            further = chunks.further
        elif chunks.free:
            raise AssertionError(f"uneven chunks of {size} over {chunks.axes}")
        for axis in further:
            share = ceil(len(indices) / mesh.sizes[axis])
            indices = indices[coordinates[axis] * share : (coordinates[axis] + 1) * share]
        mesh.indices[key] = indices
    return mesh.indices[key]


@dataclass(frozen=True, slots=True)
class _Stages:
    """Indices that a rank holds initially, after slices and the reduce-scatter, after the all-to-all, and finally."""

    first: Holding
    scattered: Holding
    exchanged: Holding
    last: Holding


def _stages(source: Layout, target: Layout, steps: Sequence[Step], shape: Sequence[int], mesh: NetworkMesh, rank: int) -> _Stages:
    between = chunks_between(source, target, steps)
    coordinates = mesh.coordinates(rank)

    def hold(chunks: Iterable[HeldChunks]) -> Holding:
        return tuple(_held(size, chunk, mesh, coordinates) for size, chunk in zip(shape, chunks, strict=True))

    return _Stages(
        hold(map(HeldChunks, source.cuts)),
        hold(scattered for scattered, _ in between),
        hold(after for _, after in between),
        hold(map(HeldChunks, target.cuts)),
    )


def _selection(held: Holding, wanted: Holding) -> Selection:
    """Return the location of `wanted` in a local tensor of `held`."""
    selection: list[slice | torch.Tensor] = []
    for have, want in zip(held, wanted, strict=True):
        at = np.searchsorted(have, want)
        if len(at) == 0:
            selection.append(slice(0, 0))
        elif at[-1] - at[0] + 1 == len(at):
            selection.append(slice(int(at[0]), int(at[-1]) + 1))
        else:
            selection.append(torch.from_numpy(at))
    return tuple(selection)


def _meet(one: Holding, other: Holding) -> Holding:
    return tuple(np.intersect1d(a, b, assume_unique=True) for a, b in zip(one, other, strict=True))


def _shape(held: Holding) -> tuple[int, ...]:
    return tuple(len(indices) for indices in held)


def _take(tensor: torch.Tensor, where: Selection) -> torch.Tensor:
    piece = tensor[tuple(at if isinstance(at, slice) else slice(None) for at in where)]
    for position, at in enumerate(where):
        if not isinstance(at, slice):
            piece = piece.index_select(position, at.to(tensor.device))
    return piece.contiguous()


def _put(tensor: torch.Tensor, where: Selection, piece: torch.Tensor) -> None:
    if all(isinstance(at, slice) for at in where):
        tensor[where] = piece  # type: ignore[index]
        return
    rows = []
    for position, at in enumerate(where):
        indices = torch.arange(tensor.shape[position])[at] if isinstance(at, slice) else at
        rows.append(indices.reshape([-1 if i == position else 1 for i in range(len(where))]).to(tensor.device))
    tensor[tuple(rows)] = piece


def _joined_position(pieces: Sequence[Holding], union: Holding) -> int:
    """Return the position along which concatenated pieces of equal size give the union; -1 if there is none."""
    for position, indices in enumerate(union):
        rows = [piece[position] for piece in pieces]
        others = all(len(piece[i]) == len(union[i]) for piece in pieces for i in range(len(union)) if i != position)
        if others and len({len(row) for row in rows}) == 1 and np.array_equal(np.concatenate(rows), indices):
            return position
    return -1


@dataclass(frozen=True, slots=True)
class _Move:
    """One step on this rank.

    num_elements   size of the full buffer, as counted by `NetworkTraffic`
    position       position along which equal pieces are gathered or scattered; -1: the pieces are selected one by one
    out            part of the local tensor that each peer receives; for a slice, the part that stays
    into           destination of each peer's piece; `shapes` of the pieces, `pick`: the part of each piece that is used
    """

    kind: CollectiveKind | None
    axes: tuple[str, ...] = ()
    num_elements: float = 0.0
    position: int = -1
    out: tuple[Selection, ...] = ()
    into: tuple[Selection, ...] = ()
    pick: tuple[Selection, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    shape: tuple[int, ...] = ()


class Redistribution:
    """Callable that redistributes a local tensor from layout `source` to `target`. The steps of this rank are computed once."""

    def __init__(self, source: Layout, target: Layout, shape: Sequence[int], mesh: NetworkMesh, purpose: Purpose) -> None:
        self.mesh, self.purpose = mesh, purpose
        key = (source, target, tuple(shape))  # identical layers share the moves
        if key not in mesh.moves:
            steps = tuple(step for step in redistribute(source, target) if mesh.size(step.axes) > 1)
            mesh.moves[key] = () if source == target else tuple(_moves(source, target, steps, shape, mesh))
        self.moves: tuple[_Move, ...] = mesh.moves[key]

    @property
    def is_identity(self) -> bool:
        return not self.moves

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        for move in self.moves:
            tensor = self._moved(tensor, move)
        return tensor

    def _moved(self, tensor: torch.Tensor, move: _Move) -> torch.Tensor:
        """Return the tensor after one step. (A function, so that the buffers of a step are freed before the next one.)"""
        if move.kind is None:
            return _take(tensor, move.out[0])
        if move.kind is CollectiveKind.ALL_REDUCE or move.position >= 0:
            self.mesh.note(move.kind, move.axes, move.num_elements, self.purpose)
            group = self.mesh.process_group(move.axes)
            assert group is not None
            if move.kind is CollectiveKind.ALL_GATHER:
                return gathered(tensor, move.position, group)
            if move.kind is CollectiveKind.REDUCE_SCATTER:
                return scattered(tensor, move.position, group)
            result = tensor.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(result, group=group)
            return result
        pieces = [_take(tensor, where).reshape(-1) for where in move.out]
        if move.kind is CollectiveKind.REDUCE_SCATTER:
            size = max(piece.numel() for piece in pieces)
            buffer = torch.stack([torch.nn.functional.pad(piece, (0, size - piece.numel())) for piece in pieces])
            reduced = reduce_scatter(self.mesh, buffer, move.axes, self.purpose, num_elements=move.num_elements)
            return reduced[: prod(move.shape)].view(move.shape)
        sizes = [prod(shape) for shape in move.shapes]
        if move.kind is CollectiveKind.ALL_TO_ALL:
            self.mesh.note(move.kind, move.axes, move.num_elements, self.purpose, issued=tensor.numel())
            flat, lengths = torch.cat(pieces), [piece.numel() for piece in pieces]
            received = flat.new_empty(sum(sizes))
            dist.all_to_all_single(received, flat, sizes, lengths, group=self.mesh.process_group(move.axes))
            parts = received.split(sizes)
        else:
            flat = torch.nn.functional.pad(tensor.reshape(-1), (0, max(sizes) - tensor.numel()))
            rows = all_gather(self.mesh, flat, move.axes, self.purpose, num_elements=move.num_elements)
            parts = tuple(row[:size] for row, size in zip(rows, sizes, strict=True))
        result = torch.empty(move.shape, dtype=tensor.dtype, device=tensor.device)
        for number, (part, where) in enumerate(zip(parts, move.into, strict=True)):
            part = part.view(move.shapes[number])
            _put(result, where, _take(part, move.pick[number]) if move.pick else part)
        return result


def _moves(source: Layout, target: Layout, steps: Sequence[Step], shape: Sequence[int], mesh: NetworkMesh) -> list[_Move]:
    mine = _stages(source, target, steps, shape, mesh, mesh.rank)
    elements = float(prod(shape))
    held, moves = mine.first, []
    kinds = [step.kind for step in steps]
    if CollectiveKind.REDUCE_SCATTER not in kinds and _shape(mine.scattered) != _shape(held):
        moves.append(_Move(None, out=(_selection(held, mine.scattered),)))
        held = mine.scattered
    for step in steps:
        axes = tuple(axis.name for axis in mesh.axes if axis.name in step.axes)
        peers = [_stages(source, target, steps, shape, mesh, rank) for rank in mesh.members(axes)]
        nominal = elements / mesh.size(step.remaining)
        if step.kind is CollectiveKind.REDUCE_SCATTER:
            goals = [peer.scattered for peer in peers]
            moves.append(
                _Move(
                    step.kind,
                    axes,
                    nominal,
                    _joined_position(goals, held),
                    out=tuple(_selection(held, goal) for goal in goals),
                    shape=_shape(mine.scattered),
                )
            )
            held = mine.scattered
        elif step.kind is CollectiveKind.ALL_TO_ALL:
            parts = [_meet(peer.scattered, mine.exchanged) for peer in peers]
            moves.append(
                _Move(
                    step.kind,
                    axes,
                    nominal,
                    out=tuple(_selection(held, _meet(held, peer.exchanged)) for peer in peers),
                    into=tuple(_selection(mine.exchanged, part) for part in parts),
                    shapes=tuple(_shape(part) for part in parts),
                    shape=_shape(mine.exchanged),
                )
            )
            held = mine.exchanged
        elif step.kind is CollectiveKind.ALL_REDUCE:
            moves.append(_Move(step.kind, axes, nominal))
        else:
            had = [peer.exchanged for peer in peers]
            union = tuple(np.unique(np.concatenate(rows)) for rows in zip(*had, strict=True))
            position = _joined_position(had, union)
            parts = [_meet(peer_holding, mine.last) for peer_holding in had]
            if position >= 0:
                moves.append(_Move(step.kind, axes, nominal, position))
                if _shape(union) != _shape(mine.last):
                    moves.append(_Move(None, out=(_selection(union, mine.last),)))
            else:
                moves.append(
                    _Move(
                        step.kind,
                        axes,
                        nominal,
                        into=tuple(_selection(mine.last, part) for part in parts),
                        pick=tuple(_selection(peer_holding, part) for peer_holding, part in zip(had, parts, strict=True)),
                        shapes=tuple(_shape(peer_holding) for peer_holding in had),
                        shape=_shape(mine.last),
                    )
                )
            held = mine.last
    assert all(np.array_equal(a, b) for a, b in zip(held, mine.last, strict=True)), (source, target)
    return moves


@dataclass(frozen=True, slots=True)
class Transition:
    """Redistribution of a tensor in forward and of its gradient in backward, divided by `ways` (replicated made partial: R7)."""

    there: Redistribution
    back: Redistribution
    ways: int = 1

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.there.is_identity and (not tensor.requires_grad or (self.back.is_identity and self.ways == 1)):
            return tensor
        return _redistribute(tensor, self)


_redistribute = differentiable(
    lambda tensor, transition: tensor.view_as(tensor) if transition.there.is_identity else transition.there(tensor),
    lambda gradient, transition: transition.back(gradient) if transition.ways == 1 else transition.back(gradient) / transition.ways,
    keeps_inputs=False,
    is_contiguous=False,
)
