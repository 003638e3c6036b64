"""Percentiles that have a form: of counts of prompts, of waits, of the gaps between a client's tokens."""

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
#: Counts are added up to here; where more are expected, the normal law is used.
_COUNTED = 40
_MANY = 12.0


def count_99(first: Array, offspring: Column = 0.0, rare: Column = RARE) -> Array:
    """The least number that a count passes with probability at most `rare` (1 %). [-]

        P(n) = theta (theta + n rho)^(n - 1) exp(-theta - n rho) / n!

    first      theta  events expected at first; their number is Poisson's
    offspring  rho    further ones expected during each of them (prompts that arrive while prompts are prefilled); 0: Poisson's law

    Source: Consul & Jain, Technometrics 15(4), 1973 (generalised Poisson law: all that a busy period serves). The normal law of its
    mean theta / (1 - rho) and variance theta / (1 - rho)^3 where more than a dozen are expected.
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
    """From the mean of a wait to its 99th percentile, where P(W > t) = rho exp(-rho t / W); rho: the share that waits at all. [s]"""
    rho = np.maximum(busy, 1e-12)
    return np.asarray(np.maximum(wait / rho * np.log(np.maximum(rho / RARE, 1.0)) - wait, 0.0))


def tenth_percentile(lengths: Lengths) -> float:
    """The length that a tenth of the answers are below: a mean over few steps is the one that strays. [token]"""
    return lengths.least + 0.1 * (lengths.most - lengths.least)


def relative_excess_99(lengths: Lengths) -> float:
    """By what share of the mean the 99th percentile of even draws is above it. [-]"""
    return (0.5 - RARE) * (lengths.most - lengths.least) / lengths.mean


def completions_variance(lengths: Lengths) -> float:
    """Variance of the number of other sequences that end during one answer, per running sequence. [-]

    Of answers that last 1 +- w, evenly, one that lasts 1 sees of each other sequence none or two ends with probability w / 4 each: w / 2.
    """
    return 0.25 * (lengths.most - lengths.least) / lengths.mean


def chunked_gap(filled: Filling, *, share: Array, arriving: Array) -> Array:
    """99th percentile of gaps where prompts ride in decode steps. [s]

    share     steps with a prompt, of all
    arriving  prompts expected to arrive in the time of a step, which will then share one

    The largest number k of prompts for which share P(k - 1 more) is over one in a hundred, as far as a step has room.
    """
    more = np.minimum(
        count_99(arriving, rare=np.minimum(RARE / np.maximum(share, 1e-12), 1.0)), np.maximum(filled.max_prompts - filled.together, 0.0)
    )
    return np.where(share > RARE, filled.stalled + more * filled.alongside, filled.decode)
