"""Sources of uncertainty of a predicted step time, and measurements that reduce it, the cheapest first."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from perfmodel.parallel.interval import NORMAL, StepInterval


@dataclass(frozen=True, slots=True, kw_only=True)
class UncertaintySource:
    """Something that is not known exactly.

    spread    one standard deviation of log(step time) that it makes
    share     of the variance of log(step time)
    rests_on  what is known of it
    """

    name: str
    spread: float
    share: float
    rests_on: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """Something that would make a prediction surer.

    says, how       in words; what to type, or what it takes
    low, high       the interval thereafter, as factors of the prediction
    share_left      of the variance
    is_measured     it can be done whoever asks: nothing has to be known beforehand
    """

    says: str
    how: str
    low: float
    high: float
    share_left: float
    is_measured: bool = True

    @property
    def halves(self) -> bool:
        return self.share_left <= 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class TrustAccount:
    """interval: with its grade; doubts: the largest share first, they add up to 1; remedies: the cheapest first."""

    interval: StepInterval
    uncertainties: tuple[UncertaintySource, ...]
    remedies: tuple[Remedy, ...]

    def __str__(self) -> str:
        """In a few lines; `explain --trust` prints tables."""
        lines = [self.interval.trust, *(f"{each.share:.0%} of the variance: {each.name} ({each.rests_on})" for each in self.uncertainties)]
        best = self.cheapest
        return "\n".join([*lines, *([f"{'halved' if best.halves else 'reduced most'} by: {best.says} ({best.how})"] if best else [])])

    @property
    def cheapest(self) -> Remedy | None:
        """The first measurement that halves the variance, else the first remedy; where none does, the one that leaves least, if any."""
        halving = sorted((each for each in self.remedies if each.halves), key=lambda each: not each.is_measured)
        return halving[0] if halving else min(self.remedies, key=lambda each: each.share_left, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class VarianceSource:
    """variance: of log(step time); is_shared: all runs of one loop on these chips have the same of it."""

    name: str
    variance: float
    rests_on: str
    is_shared: bool = True


_WORTH_NAMING = 0.005
"""Share of the variance from which a source of uncertainty has its own line."""

REST, SMALLER = "residual error of runs", "smaller sources"


def variance_of(interval: StepInterval) -> float:
    """Variance of log(step time), with the interval taken as that of a normal distribution."""
    return (math.log(interval.high / interval.low) / (2.0 * NORMAL)) ** 2


def with_rest(variance_sources: Iterable[VarianceSource], interval: StepInterval, *, rests_on: str) -> tuple[VarianceSource, ...]:
    """The carriers, and what of the interval they do not explain: runs differ by that too.

    The interval is what was seen of runs: where the carriers are wider than that together, each is cut by as much.
    """
    named = [each for each in variance_sources if each.variance > 0.0]
    whole, together = variance_of(interval), sum(each.variance for each in named)
    if together > whole:
        named = [replace(each, variance=each.variance * whole / together) for each in named]
    elif whole > together:
        named.append(VarianceSource(name=REST, variance=whole - together, rests_on=rests_on, is_shared=False))
    return tuple(sorted(named, key=lambda each: -each.variance))


def uncertainty_sources(variance_sources: Iterable[VarianceSource]) -> tuple[UncertaintySource, ...]:
    found = list(variance_sources)
    total = sum(each.variance for each in found) or 1.0
    named = [each for each in found if each.variance >= _WORTH_NAMING * total]
    small = [each for each in found if each.variance < _WORTH_NAMING * total]
    if small:
        together = sum(each.variance for each in small)
        named.append(
            VarianceSource(
                name=SMALLER, variance=together, rests_on=f"{len(small)} other{'s' * (len(small) > 1)}, {small[0].name} the largest"
            )
        )
    return tuple(
        UncertaintySource(name=each.name, spread=math.sqrt(each.variance), share=each.variance / total, rests_on=each.rests_on)
        for each in named
    )


def remedy(says: str, how: str, *, left: float, total: float, interval: StepInterval, is_measured: bool = True) -> Remedy:
    """left, total: variance after it and before; the interval keeps its form."""
    share = left / total if total else 1.0
    shrinks = math.sqrt(share)
    return Remedy(says=says, how=how, low=interval.low**shrinks, high=interval.high**shrinks, share_left=share, is_measured=is_measured)
