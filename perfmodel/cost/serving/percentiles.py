"""Percentiles with a closed form: of counts of prompts, of waits, of the gaps between a client's tokens."""

from __future__ import annotations

import numpy as np

from perfmodel.cost.serving.filling import Filling
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


def chunked_gap(filled: Filling, *, share: Array, arriving: Array) -> Array:
    """Return the 99th percentile of gaps if prompts are chunked into decode steps. [s]

    share     of steps with a prompt
    arriving  expected arrivals of prompts during a step, which will then share one

    The largest number k of prompts for which share P(k - 1 more) is over one in a hundred, limited by the prompts that fit into a step.
    """
    more = np.minimum(
        count_99(arriving, rare=np.minimum(RARE / np.maximum(share, 1e-12), 1.0)), np.maximum(filled.max_prompts - filled.together, 0.0)
    )
    return np.where(share > RARE, filled.stalled + more * filled.alongside, filled.decode)
