"""Placement of the virtual stages of a pipeline on its ranks, as the schedule states it."""

from __future__ import annotations

from enum import StrEnum


class Placement(StrEnum):
    """Ranks of the virtual stages k, in model order.

    loop   k % p
    v      0 to p - 1, then p - 1 to 0: the last virtual stage is on the first rank (Qi et al. 2024, arXiv 2405.15362)
    """

    LOOP = "loop"
    V = "v"


def stages_of_rank(rank: int, num_ranks: int, num_stages: int, placement: Placement) -> tuple[int, ...]:
    """Return the virtual stages of a pipeline rank, in model order."""
    turns = (rank, num_ranks - 1 - rank if placement is Placement.V else rank)
    return tuple(chunk * num_ranks + turns[chunk % 2] for chunk in range(num_stages // num_ranks))


def stages_of_ranks(num_ranks: int, num_stages: int, placement: Placement) -> list[tuple[int, ...]]:
    """Return the virtual stages of each pipeline rank."""
    return [stages_of_rank(rank, num_ranks, num_stages, placement) for rank in range(num_ranks)]


def rank_of_stage(stage: int, num_ranks: int, placement: Placement) -> int:
    """Return the pipeline rank of a virtual stage."""
    chunk, rank = divmod(stage, num_ranks)
    return num_ranks - 1 - rank if placement is Placement.V and chunk % 2 else rank
