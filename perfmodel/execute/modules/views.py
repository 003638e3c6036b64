"""Views between operators on one rank's shard of a tensor.

A tensor of the network has one position per piece of a dim. Torch's tensor has positions that are products of pieces. A view of the
exported graph is repeated on the local tensor with the local sizes of its runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from perfmodel.execute.importer.exported_module import ExportedValue
from perfmodel.execute.importer.node_views import EXPANSIONS, PERMUTATIONS
from perfmodel.workload.imported.dims import Piece
from perfmodel.workload.imported.views import Position, Stride

#: Pieces of a tensor at each of its positions in torch; None: a position of size 1.
Grouping = Sequence[Sequence[Piece | None]]
#: Views that slice a parameter or buffer.
PARTS = frozenset({"split", "split_with_sizes", "chunk", "tensor_split", "unbind", "slice", "select", "narrow"})


def joined_pieces(tensor: torch.Tensor, grouping: Sequence[Sequence[object]]) -> torch.Tensor:
    """Merge the positions of a network tensor into torch's; `grouping`: network positions in each position of torch."""
    sizes, start = [], 0
    for pieces in grouping:
        sizes.append(prod(tensor.shape[start : start + len(pieces)]))
        start += len(pieces)
    return tensor.reshape(sizes)


def viewed(tensor: torch.Tensor, value: ExportedValue, grouping: Grouping, *, is_part: bool = False) -> torch.Tensor:
    """Return the local part of `value`, given the local part of the tensor that it views.

    tensor    local tensor in the network's shape: each piece of `grouping` full or sharded
    is_part   the tensor is the part of a parameter that the first steps of the path select
    """
    local = dict(zip([piece for pieces in grouping for piece in pieces], tensor.shape, strict=True))

    def size(run: Stride) -> int:
        pieces = [
            piece
            for piece in (grouping[int(run.dim)] if run.dim else ())
            if piece is not None and piece.inner < run.inner * run.size and run.inner < piece.inner * piece.size
        ]
        is_whole = all(local[piece] == piece.size for piece in pieces)
        return run.size if is_whole else prod(local[piece] for piece in pieces)

    def sizes(view: Sequence[Position]) -> list[int]:
        return [prod(size(run) for run in position) for position in view]

    result = joined_pieces(tensor, grouping)
    for step in value.path:
        if step.function in PERMUTATIONS or (step.function in PARTS and not is_part):
            outputs = step.node.target(result, *step.node.args[1:], **step.node.kwargs)  # type: ignore[operator]
            result = outputs if isinstance(outputs, torch.Tensor) else outputs[step.number]
        elif step.function in EXPANSIONS:
            result = result.expand(sizes(step.view))
        else:
            result = result.reshape(sizes(step.view))
    goal = sizes(value.view)
    return result if list(result.shape) == goal else result.reshape(goal)
