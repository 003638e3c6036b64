"""Closed forms of queueing theory: running sequences in equilibrium, waits, and percentiles of counts and waits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from perfmodel.cost.serving.times import Array
from perfmodel.foundation.columns import Column
from perfmodel.workload.serving import Lengths

#: Standard deviations from the mean to the 99th percentile of a normal distribution.
NORMAL_99 = 2.326
#: One in a hundred.
RARE = 0.01
#: Largest count that is summed; if more are expected, the normal distribution is used.
_COUNTED = 40
_MANY = 12.0


def count_99(first: Array, offspring: Column = 0.0, rare: Column = RARE) -> Array:
    """Return the least number that a count exceeds with probability at most `rare` (1 %). [-]

        P(n) = theta (theta + n rho)^(n - 1) exp(-theta - n rho) / n!

    first      theta  expected initial events; their number is Poisson distributed
    offspring  rho    expected further events during each (prompts that arrive while prompts are prefilled); 0: Poisson distribution

    Source: Consul & Jain, Technometrics 15(4), 1973 (generalised Poisson distribution: all customers of a busy period). If more than a
    dozen are expected: the normal distribution of its mean theta / (1 - rho) and variance theta / (1 - rho)^3.
    """
    theta, rho = np.broadcast_arrays(np.maximum(np.asarray(first, dtype=float), 1e-300), np.clip(offspring, 0.0, 0.99))
    rare = np.asarray(rare)
    mean, deviation = theta / (1 - rho), np.sqrt(theta / (1 - rho) ** 3)
    beyond = -np.expm1(-theta)
    number = np.zeros(np.broadcast_shapes(theta.shape, rare.shape))
    log_factorial = 0.0
    for n in range(1, _COUNTED):
        if not np.any(beyond > rare):
            break
        number = np.where(beyond > rare, float(n), number)
        log_factorial += np.log(n)
        exponent = np.log(theta) + (n - 1) * np.log(theta + n * rho) - theta - n * rho - log_factorial
        beyond = beyond - np.exp(exponent)
    return np.where((mean + 2 * deviation) > _MANY, mean + NORMAL_99 * deviation, number)


def wait_tail_99(wait: Array, busy: Array) -> Array:
    """Return the difference of the 99th percentile of a wait and its mean. [s]

    P(W > t) = rho exp(-rho t / W), rho: the share of requests that wait at all
    """
    rho = np.maximum(busy, 1e-12)
    return np.asarray(np.maximum(wait / rho * np.log(np.maximum(rho / RARE, 1.0)) - wait, 0.0))


def tenth_percentile(lengths: Lengths) -> float:
    """Return the length that a tenth of the answers are below: a mean over few steps varies most. [token]"""
    return lengths.least + 0.1 * (lengths.most - lengths.least)


def relative_excess_99(lengths: Lengths) -> float:
    """Return the excess of the 99th percentile of uniform draws over their mean, relative to the mean. [-]"""
    return (0.5 - RARE) * (lengths.most - lengths.least) / lengths.mean


def completions_variance(lengths: Lengths) -> float:
    """Return the variance of the number of other sequences that end during one answer, per running sequence. [-]

    Answers last 1 +- w, uniformly. During one of length 1, each other sequence ends zero or two times with probability w / 4 each: w / 2.
    """
    return 0.25 * (lengths.most - lengths.least) / lengths.mean


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


def queue_wait(rate: Column, service_time: Column, servers: Column, *, squared_variation: Column = 0.0) -> Array:
    """Return the wait for one of x servers with service time t and Poisson arrivals (M/G/x; M/D/x if all services are equal). [s]

    W = (1 + cv^2) / 2  rho^(sqrt(2 (x + 1)) - 1) / (x (1 - rho)) t,   rho = r t / x;   infinite from rho = 1 on

    Source: Sakasegawa, Ann. Inst. Stat. Math. 29, 1977; for x = 1 it is the Pollaczek-Khinchine formula.
    """
    t, x = np.asarray(service_time, dtype=float), np.asarray(servers, dtype=float)
    rho = np.asarray(rate) * t / x
    with np.errstate(divide="ignore", invalid="ignore"):
        wait = (1 + np.asarray(squared_variation)) / 2 * rho ** (np.sqrt(2 * (x + 1)) - 1) / (x * (1 - rho)) * t
    return np.where(rho < 1, wait, np.inf)


def busy_probability(used: Column, servers: Column) -> Array:
    """Return the share of Poisson arrivals that find x servers busy. [-]

    rho^(sqrt(2 (x + 1)) - 1), rho for x = 1.   Source: as `queue_wait`.
    """
    return np.asarray(np.clip(used, 0.0, 1.0) ** (np.sqrt(2 * (np.asarray(servers, dtype=float) + 1)) - 1))
