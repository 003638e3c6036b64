"""Search for the first index at which a condition holds."""

from bisect import bisect_left
from collections.abc import Callable


def first_index(length: int, holds: Callable[[int], bool]) -> int | None:
    """Return the first index whose condition holds, by growing steps and bisection; None if that of the last does not hold.

    The condition of an index implies that of the later ones. Small results need few calls.
    """
    low, high, step = 0, 0, 1
    while not holds(high):
        if high == length - 1:
            return None
        low, high, step = high + 1, min(high + step, length - 1), 2 * step
    return bisect_left(range(high), True, lo=low, key=holds)
