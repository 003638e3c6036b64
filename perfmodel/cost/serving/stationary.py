"""Mean number of running sequences at a request rate: a fixed point, elementwise, with few evaluations of step times."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from perfmodel.cost.serving.times import Array

#: Interpolation points of the number of running sequences, in equal ratios from 1 to all slots.
_POINTS = 5
_HALVINGS = 40
_CORRECTIONS = 2


def stationary_running(filled: Callable[[Array], tuple[Array, Array]], *, rate: Array, steps: Array, slots: Array) -> tuple[Array, Array]:
    """Return the sequences that run in addition to an arriving one in equilibrium, and the slope of t_d there. [-], [s]

        m - 1 = r D t_d(m) / (1 - r t_p'(m)),   1 <= m <= slots,   the least such m

    filled  (t_d, t_p') of m sequences   [s]
    rate    r  requests a second         [1/s]
    steps   D  decode steps of each      [-]

    t_d and t_p' are interpolated linearly between points, which makes the equation quadratic; it is solved by bisection. Newton steps with
    the exact times correct the remaining error.
    """
    r, D, top = np.broadcast_arrays(*(np.asarray(column, dtype=float) for column in (rate, steps, slots)))
    count = np.stack([np.maximum(top, 1.0) ** (k / (_POINTS - 1)) for k in range(_POINTS)])
    decode, alongside, _ = np.broadcast_arrays(*filled(count), count)
    enough = (count - 1) * (1 - r * alongside) - r * D * decode >= 0
    upper = np.where(enough.any(axis=0), np.maximum(enough.argmax(axis=0), 1), _POINTS - 1)

    def line(values: Array) -> tuple[Array, Array, Array]:
        left, right = (np.take_along_axis(values, index[None], axis=0)[0] for index in (upper - 1, upper))
        return left, right, (right - left) / np.maximum(width, 1e-12)

    width = np.asarray(1.0)
    low, high, _ = line(count)
    width = high - low
    d, _, d_slope = line(decode)
    a, _, a_slope = line(alongside)

    def short(m: Array, decode: Array, alongside: Array) -> Array:
        return (m - 1) * (1 - r * alongside) - r * D * decode

    start, end = low, high
    for _ in range(_HALVINGS):
        middle = (start + end) / 2
        below = short(middle, d + d_slope * (middle - low), a + a_slope * (middle - low)) < 0
        start, end = np.where(below, middle, start), np.where(below, end, middle)
    m = (start + end) / 2
    for _ in range(_CORRECTIONS):
        true_decode, true_alongside = filled(m)
        growth = 1 - r * true_alongside - (m - 1) * r * a_slope - r * D * d_slope
        better = m - short(m, true_decode, true_alongside) / np.where(growth > 1e-3, growth, np.inf)
        m = np.clip(better, 1.0, np.maximum(top, 1.0))
    return m - 1, np.maximum(d_slope, 0.0)


def piecewise_linear(function: Callable[[Array], Array], top: Array) -> Callable[[Array], Array]:
    """Return a function of a number from 1 to `top`, interpolated between a few points in equal ratios; constant below 1."""
    top = np.maximum(np.asarray(top, dtype=float), 1.0)
    ratio = np.maximum(np.log(top), 1e-9) / (_POINTS - 1)
    values = np.stack(np.broadcast_arrays(*(function(np.exp(ratio * k)) for k in range(_POINTS))))

    def between(number: Array) -> Array:
        inside = np.clip(number, 1.0, top)
        index = np.clip(np.floor(np.log(inside) / ratio), 0, _POINTS - 2).astype(int)
        index, inside, steps = np.broadcast_arrays(index, inside, ratio)
        every = np.broadcast_to(values, (_POINTS, *np.broadcast_shapes(values.shape[1:], inside.shape)))
        left, right = (np.take_along_axis(every, np.broadcast_to(point, every.shape[1:])[None], axis=0)[0] for point in (index, index + 1))
        low, high = np.exp(steps * index), np.exp(steps * (index + 1))
        return np.asarray(left + (right - left) * (inside - low) / np.maximum(high - low, 1e-12))

    return between
