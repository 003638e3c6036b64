"""Which of many like parameters run in `make check`, in `make test`, and in `make test-all` only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest

NIGHTLY = (pytest.mark.slow, pytest.mark.nightly)
"""Marks of a test, or of a parameter, that only `make test-all` runs."""

SIZES = frozenset({"num_chips", "batch", "micro_batch", "seq_len"})
"""Knobs whose values are sizes, not forms."""


def mostly_slow(values: Iterable[Any], *, quick: int = 1) -> list[Any]:
    """Parameters of which all but the first few are marked `slow`: they show the same law on more of its domain."""
    return [pytest.param(value, marks=() if index < quick else pytest.mark.slow) for index, value in enumerate(values)]


def one_in(every: int, values: Iterable[Any]) -> list[Any]:
    """Drawn parameters of one law, of which `make test` runs the first of each `every`."""
    return [pytest.param(*_arguments(value), marks=NIGHTLY if index % every else ()) for index, value in enumerate(values)]


def mostly_nightly(values: Iterable[Any], kept: Iterable[Any]) -> list[Any]:
    """Parameters of which `make test` runs those in `kept`."""
    values, kept = list(values), set(kept)
    assert kept <= set(values), kept - set(values)
    return [pytest.param(*_arguments(value), marks=() if value in kept else NIGHTLY) for value in values]


def pairwise(*knobs: Sequence[Any]) -> list[Any]:
    """Combinations of the knobs' values, of which `make test` runs few that show each pair of values."""
    forms = list(product(*(range(len(values)) for values in knobs)))
    missing = {pair for form in forms for pair in combinations(enumerate(form), 2)}
    kept = set()
    while missing:
        best = max(forms, key=lambda form: len(missing.intersection(combinations(enumerate(form), 2))))
        kept.add(best)
        missing.difference_update(combinations(enumerate(best), 2))
    values = {form: tuple(options[index] for options, index in zip(knobs, form, strict=True)) for form in forms}
    return [pytest.param(*values[form], marks=() if form in kept else NIGHTLY) for form in forms]


def _arguments(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def covering(
    forms: Mapping[str, Any], *, together: int = 2, cost: Callable[[Any], float] = lambda form: 1.0, kept: Iterable[str] = ()
) -> list[str]:
    """Return names of few forms that show each value of each knob, each pair of knobs, and each model, as all forms do.

    A form is a mapping of knobs, alone or in a tuple with the names of models. Greedy: the form that adds most for its cost comes next.

    together    knobs that are shown together: 2, pairs; 1, none
    kept        forms that are shown anyway
    """
    features = {name: _features(form, together) for name, form in forms.items()}
    missing = set().union(*features.values()).difference(*(features[name] for name in kept))
    chosen: list[str] = []
    while missing:
        best = max(features, key=lambda name: len(features[name] & missing) / cost(forms[name]))
        chosen.append(best)
        missing -= features[best]
    return chosen


def _features(form: Any, together: int) -> frozenset[tuple[str, ...]]:
    parts = form if isinstance(form, tuple) else (form,)
    knobs = {name: value for part in parts if isinstance(part, Mapping) for name, value in part.items() if name not in SIZES}
    return frozenset(
        {(name, str(value)) for name, value in knobs.items()}
        | (set(combinations(sorted(knobs), together)) if together > 1 else set())
        | {(part,) for part in parts if isinstance(part, str)}
    )
