"""Tolerance of the gradient check, and its verdict. (No torch here: the parent process judges the ranks' errors.)"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from perfmodel.foundation.errors import RunError

#: Largest relative error that a correct fp32 program shows, with room: measured ones are below 1e-5.
TOLERANCE = 1e-4
#: A gradient smaller than this share of the largest one is compared with that share instead of itself.
ROUND_OFF_FLOOR = 1e-2


def worst_error(errors: Iterable[Mapping[str, float]], tolerance: float, sentence: Callable[[str, float, int], str]) -> float:
    """The largest error on any rank; nan where nothing was checked.

    errors     of each rank by name
    sentence   what a RunError says of the worst name, its error, and how many others are beyond the tolerance
    """
    together: dict[str, float] = {}
    for found in errors:
        for name, error in found.items():
            # nan is worse than any number, and stays
            together[name] = max(together.get(name, 0.0), float("inf") if error != error else error)
    if not together:
        return float("nan")
    wrong = {name: error for name, error in together.items() if error > tolerance}
    if wrong:
        name = max(wrong, key=lambda key: wrong[key])
        raise RunError(sentence(name, wrong[name], len(wrong) - 1))
    return max(together.values())
