"""Rules for whether a plan fits: needed against usable memory, with a headroom or up to a probability. No plan is evaluated here.

Weights, gradients and optimizer states are certain. Transient memory and the reserve of allocators and libraries are uncertain: the
logarithm of needed over predicted memory has a distribution.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from operator import attrgetter, methodcaller
from typing import Any

from perfmodel.foundation.columns import Column
from perfmodel.foundation.errors import InputError

DEFAULT_RISK = 0.05
"""Default probability of running out of memory that a fitting plan may have."""


DEFAULT_HEADROOM = 0.05
"""Share of the usable memory that stays free, for plans whose outcome is predicted as a yes or no: published runs and networks.

A risk of 5 % would reject too many runs that ran, because users run near the limit.

Published runs (tests/golden): 845 primary runs that ran and 340 that ran out of memory. With no headroom .9 % and 1.2 % are judged
wrongly, with 5 % 1.7 % and .6 %, with 10 % 2.8 % and none. From 4 to 7 % neither is above 3 % within any source of ten runs or more. A
plan that runs out of memory costs more than one that is a little slower, so the second kind counts more.
"""


OUTCOME_RISK = 0.3
"""Probability of not fitting that a plan of an unknown framework may have, in addition to that headroom.

It refuses plans that would be too full with another distribution of layers, or with unsharded gradients or shards, and hardly any
others. Of 340 runs of nanotron that ran out of memory, treated as an unseen framework, none is predicted to fit, instead of 29. For a
known framework the headroom replaces it.
"""


MOST_HOST_MEMORY = 2e12 / 8
"""Assumed host memory for each chip: servers with eight chips have 2 TB (DGX H100 user guide). [byte]"""


class Verdict(StrEnum):
    FITS = "fits"
    TIGHT = "tight"
    DOES_NOT_FIT = "does not fit"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUncertainty:
    """Distribution of log(needed / predicted) of the uncertain memory: logistic.

    centre, scale   its median, and the distance from it to 73 %
    of_unseen       whether an unknown framework may need more than predicted: uneven layers, or gradients or shards that are held in full
                    in addition to their final form
    rests_on        basis: the runs that it was estimated from
    """

    centre: float
    scale: float
    of_unseen: bool = False
    rests_on: str = ""

    def probability_below(self, log_ratio: float) -> float:
        """Return the probability that at most exp(log_ratio) times the predicted memory is needed."""
        distance = (log_ratio - self.centre) / self.scale
        return 1.0 / (1.0 + math.exp(-distance)) if distance > -_FARTHEST else 0.0

    def ratio_at(self, probability: float) -> float:
        """Return the quantile of needed / predicted memory."""
        return math.exp(self.centre + self.scale * math.log(probability / (1.0 - probability)))


_FARTHEST = 700.0
"""Number of scales beyond which a probability is 0 and the exponential overflows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankNeed:
    """Memory that a pipeline rank needs, as numbers or columns. [byte]

    sure       part of the total that stays through a step: exact to the byte
    outside    part of the uncertain memory that does not grow with the layers
    imbalance  largest number of layers on the rank over the predicted number
    extra      memory that may be needed in addition to the prediction
    """

    total: Column
    sure: Column
    outside: Column = 0.0
    imbalance: Column = 1.0
    extra: Column = 0.0

    def allowed(self, usable: float, ratio: float) -> Any:
        """Return the largest prediction that still fits if the uncertain part is `ratio` times as large. [byte]"""
        return self.sure + (self._usable(usable) - self.sure) / ratio

    def log_headroom(self, usable: float) -> float:
        """Return the log of the factor by which the uncertain memory may grow."""
        left = self._usable(usable) - self.sure
        if left <= 0.0:
            return -math.inf
        return math.log(left / (self.total - self.sure)) if self.total > self.sure else math.inf

    def at_least(self, ratio: float) -> float:
        """Return the memory needed if the uncertain part is `ratio` times as large as predicted. [byte]"""
        return float(self.sure + (self.total - self.sure) * ratio)

    def at_most(self, ratio: float) -> float:
        """Return `at_least` with the largest imbalance of layers and all extra memory. [byte]"""
        return float((self.at_least(ratio) + self.extra - self.outside) * self.imbalance + self.outside)

    def _usable(self, usable: float) -> Any:
        return (usable - self.outside) / self.imbalance + (self.outside - self.extra)


def fit_probability(ranks: Iterable[RankNeed], usable: float, uncertainty: MemoryUncertainty) -> float:
    """Return the probability that every rank fits: that of the rank nearest to the usable memory, as all have the same allocator."""
    return uncertainty.probability_below(min(map(methodcaller("log_headroom", usable), ranks)))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRule:
    """Condition for a plan to fit: a share of the usable memory stays free, and the probability of not fitting is at most `risk`.

    risk   1: any probability
    """

    headroom: float
    risk: float

    def allowed(self, usable: float) -> float:
        """Return the largest prediction of a plan that fits, certain and uncertain parts together. [byte]"""
        return usable * (1.0 - self.headroom)

    def ratio(self, uncertainty: MemoryUncertainty) -> float | None:
        """Return the factor by which the uncertain part of a fitting plan may exceed its prediction; None: any factor."""
        return uncertainty.ratio_at(1.0 - self.risk) if self.risk < 1.0 else None

    def verdict(self, ranks: Sequence[RankNeed], usable: float, uncertainty: MemoryUncertainty) -> Verdict:
        """Return the verdict. Tight: the plan would fit, but with too little headroom or too low a probability."""
        needed, ratio = max(map(attrgetter("total"), ranks)), self.ratio(uncertainty)
        if needed > self.allowed(usable):
            return Verdict.TIGHT if needed <= usable else Verdict.DOES_NOT_FIT
        for rank in ranks:
            if ratio is not None and rank.total > rank.allowed(usable, ratio):
                return Verdict.TIGHT
        return Verdict.FITS


def memory_rule(memory_headroom: float | None = None, risk: float | None = None) -> MemoryRule:
    """Return the rule of a headroom, a risk, or both; `DEFAULT_RISK` if neither is given."""
    if memory_headroom is None:
        return MemoryRule(headroom=0.0, risk=DEFAULT_RISK if risk is None else risk)
    return MemoryRule(headroom=memory_headroom, risk=1.0 if risk is None else risk)


def outcome_rule(uncertainty: MemoryUncertainty) -> MemoryRule:
    """Return the rule that predicts whether a run fits, yes or no, with as few errors of either kind as published runs allow."""
    return MemoryRule(headroom=DEFAULT_HEADROOM, risk=OUTCOME_RISK if uncertainty.of_unseen else 1.0)


#: Smallest risk: below it, one minus the risk is one in float64.
_LEAST_RISK = 1e-9


def check_risk(risk: float) -> None:
    """Raise `InputError` unless the risk is a valid probability."""
    if not _LEAST_RISK <= risk < 1.0:
        raise InputError(f"risk={risk}: must be a probability between 0 and 1, at least {_LEAST_RISK:g}; write 5% or 0.05")


def check_headroom(memory_headroom: float | None) -> None:
    if memory_headroom is not None and not 0.0 <= memory_headroom < 1.0:
        raise InputError(f"memory_headroom={memory_headroom}: must be a share from 0 to below 1; write 0.1 for a tenth")
