"""One step of serving: new tokens of some sequences whose earlier tokens are in the cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from perfmodel.execute.serving.cache import PagedCache, Reads, Slots
from perfmodel.execute.uniform.sharding import Sharding


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next tokens of a sequence with `start` cached tokens: a prompt, a chunk of a prompt, or the last generated token."""

    sequence: int
    start: int
    tokens: tuple[int, ...]

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class ChunkGroup:
    """Chunks with the same number of new tokens, whose attention or recurrence is one call.

    rows      first row of the group in the step
    queries   new tokens per chunk
    reads     slots that they read from the cache, new tokens included
    slots     their state slots
    lengths   cached tokens of each, new ones included [b]; None if all are equal
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
    """Rows of all chunks in sequence: first the single tokens, which share one attention call, then each longer chunk.

    places       cache slot of every row [t]
    last         row of every chunk whose logits give its next token [chunks]
    """

    chunks: tuple[Chunk, ...]
    tokens: torch.Tensor
    positions: torch.Tensor
    places: torch.Tensor
    last: torch.Tensor
    groups: tuple[ChunkGroup, ...]


def make_step(chunks: Sequence[Chunk], cache: PagedCache) -> ServedStep:
    """Build a step from chunks. `ServedStep.chunks` has them in the order of the rows: single tokens first."""
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
        places=row_of([slot for chunk in ordered for slot in cache.places(chunk.sequence, chunk.start, chunk.stop)]),
        last=row_of(last),
        groups=tuple(groups),
    )


@dataclass(slots=True)
class ServedSharding(Sharding):
    """Sharding of a serving rank's model, and the inputs of its layers in this step."""

    cache: PagedCache | None = None
    step: ServedStep | None = None

    def begin(self, step: ServedStep) -> None:
        self.step, self.positions = step, step.positions
        self.angles.clear()

    def now(self) -> tuple[PagedCache, ServedStep]:
        assert self.cache is not None
        assert self.step is not None
        return self.cache, self.step
