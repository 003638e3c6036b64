"""Views between operators on one rank's part of a tensor.

A tensor of the network has a position for each piece of a dim; torch's tensor has positions that are products of pieces. A view of the
exported graph is repeated on the local tensor with the sizes that its runs have there.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from perfmodel.execute.importer.exported_graph import EXPANSIONS, PERMUTATIONS, ExportedValue, ViewStep
from perfmodel.workload.imported.dims import Piece
from perfmodel.workload.imported.views import Position, Stride

#: Pieces of a tensor at each of its positions in torch; None: a position of size 1.
Grouping = Sequence[Sequence[Piece | None]]
#: Steps that take a part of a parameter or buffer.
PARTS = frozenset({"split", "split_with_sizes", "chunk", "tensor_split", "unbind", "slice", "select", "narrow"})


def joined_pieces(tensor: torch.Tensor, grouping: Sequence[Sequence[object]]) -> torch.Tensor:
    """A tensor of the network with the positions that torch gives it; `grouping`: its positions that are one of torch's."""
    sizes, start = [], 0
    for pieces in grouping:
        sizes.append(prod(tensor.shape[start : start + len(pieces)]))
        start += len(pieces)
    return tensor.reshape(sizes)


def viewed(tensor: torch.Tensor, value: ExportedValue, grouping: Grouping, *, is_part: bool = False) -> torch.Tensor:
    """The local part of `value`, from that of the tensor that it views.

    tensor    local, with the network's positions: each piece of `grouping` whole or a share
    is_part   it is the part of a parameter that the first steps of the path take
    """
    local = dict(zip([piece for pieces in grouping for piece in pieces], tensor.shape, strict=True))

    def size(run: Stride) -> int:
        pieces = [] if not run.dim else [piece for piece in grouping[int(run.dim)] if piece is not None and _meets(piece, run)]
        is_whole = all(local[piece] == piece.size for piece in pieces)
        return run.size if is_whole else prod(local[piece] for piece in pieces)

    def sizes(view: Sequence[Position]) -> list[int]:
        return [prod(size(run) for run in position) for position in view]

    found = joined_pieces(tensor, grouping)
    for step in value.path:
        found = _stepped(found, step, sizes(step.view), is_part=is_part)
    goal = sizes(value.view)
    return found if list(found.shape) == goal else found.reshape(goal)


def _meets(piece: Piece, run: Stride) -> bool:
    return piece.inner < run.inner * run.size and run.inner < piece.inner * piece.size


def _stepped(tensor: torch.Tensor, step: ViewStep, sizes: list[int], *, is_part: bool) -> torch.Tensor:
    if step.function in PARTS:
        if is_part:
            return tensor.reshape(sizes)
        found = step.node.target(tensor, *step.node.args[1:], **step.node.kwargs)  # type: ignore[operator]
        return found if isinstance(found, torch.Tensor) else found[step.number]  # type: ignore[no-any-return]
    if step.function in PERMUTATIONS:
        return step.node.target(tensor, *step.node.args[1:], **step.node.kwargs)  # type: ignore[operator, no-any-return]
    return tensor.expand(sizes) if step.function in EXPANSIONS else tensor.reshape(sizes)
