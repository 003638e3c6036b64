"""One step of serving: new tokens of some sequences, whose earlier tokens are in the cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from perfmodel.execute.serving.cache import PagedCache, Reads
from perfmodel.execute.serving.states import Slots
from perfmodel.execute.uniform.sharding import Sharding


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next tokens of a sequence, of which the cache has `start` tokens: a prompt, a piece of one, or the token that came last."""

    sequence: int
    start: int
    tokens: tuple[int, ...]

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class ChunkGroup:
    """Chunks of as many new tokens each, whose attention, or recurrence, is one call.

    rows      first row of the step that is theirs
    queries   new tokens of each
    reads     what they read of the cache, new tokens included
    slots     where their states are
    lengths   tokens of each in the cache, new ones included [b]; None where all have as many
    """

    rows: int
    queries: int
    reads: Reads
    slots: Slots
    lengths: torch.Tensor | None

    @property
    def stop(self) -> int:
        return self.rows + self.reads.number * self.queries


@dataclass(frozen=True, slots=True)
class ServedStep:
    """Rows of all chunks one after another: first those of one token, which are one call of attention, then each other by itself.

    places       of every row in the cache [t]
    last         of every chunk the row whose logits say its next token [chunks]
    """

    chunks: tuple[Chunk, ...]
    tokens: torch.Tensor
    positions: torch.Tensor
    places: torch.Tensor
    last: torch.Tensor
    groups: tuple[ChunkGroup, ...]


def make_step(chunks: Sequence[Chunk], cache: PagedCache) -> ServedStep:
    """`chunks` come in another order where one of several tokens is before one of a single token: `ServedStep.chunks` says which."""
    ordered = sorted(chunks, key=lambda chunk: len(chunk.tokens) > 1)
    single = sum(len(chunk.tokens) == 1 for chunk in ordered)
    runs = [ordered[:single]] if single else []
    runs += [[chunk] for chunk in ordered[single:]]
    groups, row, last = [], 0, []
    for run in runs:
        stops = [chunk.stop for chunk in run]
        sequences = [chunk.sequence for chunk in run]
        lengths = torch.tensor(stops, device=cache.device) if len(set(stops)) > 1 else None
        groups.append(ChunkGroup(row, len(run[0].tokens), cache.reads(sequences, stops), cache.states.of(sequences), lengths))
        for chunk in run:
            row += len(chunk.tokens)
            last.append(row - 1)

    def row_of(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, device=cache.device)

    return ServedStep(
        chunks=tuple(ordered),
        tokens=row_of([token for chunk in ordered for token in chunk.tokens]),
        positions=row_of([position for chunk in ordered for position in range(chunk.start, chunk.stop)]),
        places=row_of([place for chunk in ordered for place in cache.places(chunk.sequence, chunk.start, chunk.stop)]),
        last=row_of(last),
        groups=tuple(groups),
    )


@dataclass(slots=True)
class ServedSharding(Sharding):
    """How a serving rank's model is cut, and what its layers read in this step."""

    cache: PagedCache | None = None
    step: ServedStep | None = None

    def begin(self, step: ServedStep) -> None:
        self.step, self.positions = step, step.positions
        self.angles.clear()

    def now(self) -> tuple[PagedCache, ServedStep]:
        assert self.cache is not None
        assert self.step is not None
        return self.cache, self.step
