"""Splits of a cross-validation: the runs that are held out, and those that the fit sees."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Indices of the runs that are held out, and of those that are seen. label: of the former, where they share one."""

    label: str = ""
    held_out: list[int]
    seen: list[int]


def leave_one_out(labels: Sequence[str]) -> Iterator[Split]:
    """Yield a split for each label, such as a model, a framework or a chip, that holds out its runs."""
    for label in sorted(set(labels)):
        held_out = [index for index, other in enumerate(labels) if other == label]
        yield Split(label=label, held_out=held_out, seen=[index for index, other in enumerate(labels) if other != label])


def k_of_n(given: int, num_runs: int, *, draws: int, random: np.random.Generator) -> Iterator[Split]:
    """Yield splits that see `given` of the runs, drawn at random."""
    for _ in range(draws):
        order = random.permutation(num_runs).tolist()
        yield Split(held_out=order[given:], seen=order[:given])


def cross_validated(labels: Sequence[str], predict: Callable[[Split], Any]) -> Array:
    """Return the prediction of each run by the split that holds it out. predict: of the held-out runs, [runs] or [runs, values]."""
    predictions = [(split.held_out, np.asarray(predict(split), dtype=float)) for split in leave_one_out(labels)]
    every = np.empty((len(labels), *predictions[0][1].shape[1:]) if predictions else 0)
    for held_out, values in predictions:
        every[held_out] = values
    return every
