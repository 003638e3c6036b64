"""Dims tracked through reshapes: the runs of dims at each position of a view.

A position is a product of runs, outermost first. A reshape splits and joins runs in row-major order; dims are lost where its sizes do not
divide them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from perfmodel.workload.imported.graph import Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Stride:
    """`size` entries of a dim with stride `inner`. dim "": a broadcast, or a lost dim."""

    dim: str
    size: int
    inner: int


Position = tuple[Stride, ...]


def identity_view(shape: Shape, dims: Sequence[str]) -> tuple[Position, ...]:
    """Return the view of a tensor in its producer's shape."""
    return tuple((Stride(dim=dim, size=size, inner=1),) if size != 1 else () for size, dim in zip(shape, dims, strict=True))


def lost(shape: Shape) -> tuple[Position, ...]:
    return identity_view(shape, [""] * len(shape))


def reshaped(view: Sequence[Position], shape: Shape) -> tuple[Position, ...]:
    """Return the same entries in row-major order in another shape."""
    runs = _joined([run for position in view for run in position])
    positions: list[Position] = []
    for size in shape:
        taken: list[Stride] = []
        while (rest := size // prod(run.size for run in taken)) > 1:
            if not runs:
                return lost(shape)
            run = runs.pop(0)
            if rest % run.size == 0:
                taken.append(run)
            elif run.size % rest == 0:
                within = run.size // rest
                taken.append(Stride(dim=run.dim, size=rest, inner=run.inner * within))
                runs.insert(0, Stride(dim=run.dim, size=within, inner=run.inner))
            else:
                return lost(shape)
        positions.append(tuple(_joined(taken)))
    return tuple(positions)


def _joined(runs: Sequence[Stride]) -> list[Stride]:
    """Merge adjacent runs that form one run of a dim."""
    result: list[Stride] = []
    for run in runs:
        last = result[-1] if result else None
        if last is not None and last.dim == run.dim and run.dim and last.inner == run.inner * run.size:
            result[-1] = Stride(dim=run.dim, size=last.size * run.size, inner=run.inner)
        else:
            result.append(run)
    return result


def permuted(view: Sequence[Position], order: Sequence[int]) -> tuple[Position, ...]:
    return tuple(view[index] for index in order)


def expanded(view: Sequence[Position], shape: Shape) -> tuple[Position, ...]:
    """Broadcast a view to `shape`, aligned at the last position."""
    aligned = [(), *[()] * (len(shape) - len(view)), *view][1:]
    return tuple(
        position if prod(run.size for run in position) == size else (Stride(dim="", size=size, inner=1),)
        for position, size in zip(aligned, shape, strict=True)
    )
