"""Whether a plan fits: what it needs against what a runtime offers, with some of that kept free or to a probability. No plan is asked here.

Weights, gradients and optimizer states are sure. What comes and goes beside them, and what an allocator and libraries hold, is not: the
logarithm of how far it lies from its prediction has a distribution.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from perfmodel.foundation.columns import Column
from perfmodel.foundation.errors import InputError

DEFAULT_RISK = 0.05
"""Probability of running out of memory that a plan that fits may have."""


DEFAULT_HEADROOM = 0.05
"""Share of the usable memory that stays free of a plan whose outcome is predicted as a yes or no: of published runs, and of networks.

A risk of 5 % would call too many runs that ran unlikely to: whoever ran them was near the limit.

Of published runs (tests/golden), 845 primary ones that ran and 340 that ran out of memory: with nothing kept free .9 % and 1.2 % are
judged wrongly, with 5 % 1.7 % and .6 %, with 10 % 2.8 % and none. From 4 to 7 % neither is above 3 % within any source of ten runs or
more. A plan that dies costs more than one that is a little slower, so the second kind counts more.
"""


OUTCOME_RISK = 0.3
"""Probability of not fitting that a plan of an unknown framework may have, in addition to that headroom.

It refuses what would be too full if layers were dealt out otherwise, or gradients or shards lay there whole, and next to nothing else:
of 340 runs of nanotron that ran out of memory, its name hidden, none is told to fit, and not 29. Of a known framework the headroom stands
for it.
"""


MOST_HOST_MEMORY = 2e12 / 8
"""Memory of the host for each chip that is taken for there: servers with eight chips have 2 TB (DGX H100 user guide). [byte]"""


class Verdict(StrEnum):
    FITS = "fits"
    TIGHT = "tight"
    DOES_NOT_FIT = "does not fit"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUncertainty:
    """log(needed / predicted) of what is not sure, as a logistic distribution.

    centre, scale   its median, and the distance from it to 73 %
    of_stranger     whether habits that nobody knows may cost more than is predicted: layers dealt out otherwise than evenly, gradients
                    or shards that lie there whole beside what they become
    rests_on        what it was seen on
    """

    centre: float
    scale: float
    of_unseen: bool = False
    rests_on: str = ""

    def probability_below(self, log_ratio: float) -> float:
        """That no more than exp(log_ratio) times what was predicted is needed."""
        distance = (log_ratio - self.centre) / self.scale
        return 1.0 / (1.0 + math.exp(-distance)) if distance > -_FARTHEST else 0.0

    def ratio_at(self, probability: float) -> float:
        """Quantile of needed / predicted memory."""
        return math.exp(self.centre + self.scale * math.log(probability / (1.0 - probability)))


_FARTHEST = 700.0
"""Scales beyond which a probability is nothing, and an exponential cannot be had."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankNeed:
    """Memory that a pipeline rank needs, as numbers or columns. [byte]

    sure      of that what stays all through a step: to the byte
    outside   of what is not sure: what does not grow with the layers
    crowding  layers that it may hold over those that it is predicted with
    extra      memory that may be needed in addition to the prediction
    """

    total: Column
    sure: Column
    outside: Column = 0.0
    imbalance: Column = 1.0
    extra: Column = 0.0

    def allowed(self, usable: float, ratio: float) -> Any:
        """Largest prediction that still fits if the uncertain part is `ratio` times as large. [byte]"""
        return self.sure + (self._usable(usable) - self.sure) / ratio

    def log_headroom(self, usable: float) -> float:
        """By how much what is not sure may grow, as a logarithm."""
        left = self._usable(usable) - self.sure
        if left <= 0.0:
            return -math.inf
        return math.log(left / (self.total - self.sure)) if self.total > self.sure else math.inf

    def at_least(self, ratio: float) -> float:
        """Memory needed if the uncertain part is `ratio` times as large as predicted. [byte]"""
        return float(self.sure + (self.total - self.sure) * ratio)

    def at_most(self, ratio: float) -> float:
        """The same where it holds as many layers as it may, and all that may lie beside. [byte]"""
        return float((self.at_least(ratio) + self.extra - self.outside) * self.imbalance + self.outside)

    def _usable(self, usable: float) -> Any:
        return (usable - self.outside) / self.imbalance + (self.outside - self.extra)


def fit_probability(ranks: Iterable[RankNeed], usable: float, uncertainty: MemoryUncertainty) -> float:
    """That every rank fits: of the one that comes nearest to what is usable, for all have the same allocator."""
    return uncertainty.probability_below(min(rank.log_headroom(usable) for rank in ranks))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRule:
    """When a plan is said to fit: so much of the usable memory stays free, and it does not fit with so much probability at most.

    risk   1: whatever the probability
    """

    headroom: float
    risk: float

    def allowed(self, usable: float) -> float:
        """Largest prediction of a plan that fits, certain and uncertain parts together. [byte]"""
        return usable * (1.0 - self.headroom)

    def ratio(self, uncertainty: MemoryUncertainty) -> float | None:
        """Factor by which the uncertain part of a plan that fits may exceed its prediction; None: any factor."""
        return uncertainty.ratio_at(1.0 - self.risk) if self.risk < 1.0 else None

    def verdict(self, ranks: Sequence[RankNeed], usable: float, uncertainty: MemoryUncertainty) -> Verdict:
        """Tight: it would fit, but too little stays free, or too much is unsure."""
        needed, ratio = max(rank.total for rank in ranks), self.ratio(uncertainty)
        is_sure = ratio is None or all(rank.total <= rank.allowed(usable, ratio) for rank in ranks)
        if needed <= self.allowed(usable) and is_sure:
            return Verdict.FITS
        return Verdict.TIGHT if needed <= usable else Verdict.DOES_NOT_FIT


def memory_rule(memory_headroom: float | None = None, risk: float | None = None) -> MemoryRule:
    """Return the rule that is asked for: a headroom or a risk alone, or both; `DEFAULT_RISK` where neither is given."""
    if memory_headroom is None:
        return MemoryRule(headroom=0.0, risk=DEFAULT_RISK if risk is None else risk)
    return MemoryRule(headroom=memory_headroom, risk=1.0 if risk is None else risk)


def outcome_rule(uncertainty: MemoryUncertainty) -> MemoryRule:
    """Return the rule that predicts whether a run will fit, yes or no, with as few errors of either kind as published runs allow."""
    return MemoryRule(headroom=DEFAULT_HEADROOM, risk=OUTCOME_RISK if uncertainty.of_unseen else 1.0)


#: Below it, one minus the risk is one in float64.
_LEAST_RISK = 1e-9


def check_risk(risk: float) -> None:
    """Refuse what is no probability that a plan may be chosen by."""
    if not _LEAST_RISK <= risk < 1.0:
        raise InputError(f"risk={risk}: must be a probability between 0 and 1, at least {_LEAST_RISK:g}; write 5% or 0.05")


def check_headroom(memory_headroom: float | None) -> None:
    if memory_headroom is not None and not 0.0 <= memory_headroom < 1.0:
        raise InputError(f"memory_headroom={memory_headroom}: must be a share from 0 to below 1; write 0.1 for a tenth")
