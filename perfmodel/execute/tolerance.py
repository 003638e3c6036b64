"""Tolerance of the gradient check. (Does not import torch: the parent process evaluates the ranks' errors.)"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from perfmodel.foundation.errors import RunError

#: Largest relative error of a correct fp32 program, with a margin: measured errors are below 1e-5.
TOLERANCE = 1e-4
#: A gradient smaller than this share of the largest one is compared relative to that share.
ROUND_OFF_FLOOR = 1e-2


def worst_error(errors: Iterable[Mapping[str, float]], tolerance: float, sentence: Callable[[str, float, int], str]) -> float:
    """Return the largest error on any rank; nan if nothing was checked. Raise RunError if it exceeds the tolerance.

    errors     errors of each rank, by name
    sentence   error message for the worst name, its error, and the number of further names beyond the tolerance
    """
    together: dict[str, float] = {}
    for by_name in errors:
        for name, error in by_name.items():
            # nan counts as infinite
            together[name] = max(together.get(name, 0.0), float("inf") if error != error else error)
    if not together:
        return float("nan")
    wrong = {name: error for name, error in together.items() if error > tolerance}
    if wrong:
        name = max(wrong, key=lambda key: wrong[key])
        raise RunError(sentence(name, wrong[name], len(wrong) - 1))
    return max(together.values())
