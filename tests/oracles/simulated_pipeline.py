"""Times and activations of a pipeline from the package's event simulation (`perfmodel/cost/schedules.py`), which uses no formula."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from perfmodel.parallel.layout import Placement
from perfmodel.parallel.pass_orders import FORWARD, INPUT_GRADIENT, Pass, pass_times


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """When the last pass ended, and for each rank the most virtual stages' activations that it held at once."""

    time: float
    held: tuple[int, ...]


def simulate(
    orders: Sequence[Sequence[Pass]], lengths: Mapping[str, Sequence[float]], *, placement: Placement = Placement.LOOP, hop: float = 0.0
) -> Run:
    """Run the orders; arguments as `pass_times` has them."""
    passes = pass_times(orders, lengths, placement=placement, hop=hop)
    ends = (of_rank[-1][1] for of_rank in passes)
    return Run(time=max(ends), held=tuple(_most_held(order) for order in orders))


def _most_held(order: Sequence[Pass]) -> int:
    """Most forward passes whose backward, or gradients of weights, are still to come; the passes of one rank do not overlap."""
    held = most = 0
    for kind, _, _ in order:
        held += 1 if kind == FORWARD else 0 if kind == INPUT_GRADIENT else -1
        most = max(most, held)
    return most


def layers_held(order: Sequence[Pass], layers: Sequence[int]) -> list[tuple[int, frozenset[int], int]]:
    """As each backward pass of a rank begins: passes of layers that it holds, its chunks whose backward has run for some microbatch, and
    the chunk that runs.

    layers: of each chunk.
    """
    alive: set[tuple[int, int]] = set()
    ran: set[int] = set()
    held = []
    for kind, chunk, microbatch in order:
        if kind == INPUT_GRADIENT:
            continue
        if kind == FORWARD:
            alive.add((chunk, microbatch))
            continue
        held.append((sum(layers[held_chunk] for held_chunk, _ in alive), frozenset(ran), chunk))
        alive.remove((chunk, microbatch))
        ran.add(chunk)
    return held
