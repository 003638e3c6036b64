"""Sources of uncertainty of a predicted step time, and measurements that reduce it, the cheapest first."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from perfmodel.parallel.interval import NORMAL, StepInterval


@dataclass(frozen=True, slots=True, kw_only=True)
class UncertaintySource:
    """Source of uncertainty of a step time.

    spread    its standard deviation of log(step time)
    share     of the variance of log(step time)
    rests_on  basis of the estimate
    """

    name: str
    spread: float
    share: float
    rests_on: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """Action that narrows the interval of a prediction.

    says, how       description; command or required measurement
    low, high       the interval afterwards, as factors of the prediction
    share_left      share of the variance that is left
    is_measured     it is a measurement: it needs no prior information
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
    """Uncertainty of a prediction.

    interval        with its grade
    uncertainties   the largest share first; shares add up to 1
    remedies        the cheapest first
    """

    interval: StepInterval
    uncertainties: tuple[UncertaintySource, ...]
    remedies: tuple[Remedy, ...]

    def __str__(self) -> str:
        """Return a few lines; `explain --trust` prints tables."""
        lines = [
            self.interval.trust,
            *(f"{source.share:.0%} of the variance: {source.name} ({source.rests_on})" for source in self.uncertainties),
        ]
        best = self.cheapest
        return "\n".join([*lines, *([f"{'halved' if best.halves else 'reduced most'} by: {best.says} ({best.how})"] if best else [])])

    @property
    def cheapest(self) -> Remedy | None:
        """Return the first measurement that halves the variance, else the first remedy that does, else the best one, if any."""
        halving = sorted((remedy for remedy in self.remedies if remedy.halves), key=lambda remedy: not remedy.is_measured)
        return halving[0] if halving else min(self.remedies, key=lambda remedy: remedy.share_left, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class VarianceSource:
    """Variance of log(step time) from one source. is_shared: all runs of one loop on these chips share its error."""

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
    """Return the sources, and as a further source the variance of the interval that they do not explain.

    The interval is empirical: sources that together exceed its variance are scaled down in proportion.
    """
    named = [source for source in variance_sources if source.variance > 0.0]
    total, together = variance_of(interval), sum(source.variance for source in named)
    if together > total:
        named = [replace(source, variance=source.variance * total / together) for source in named]
    elif total > together:
        named.append(VarianceSource(name=REST, variance=total - together, rests_on=rests_on, is_shared=False))
    return tuple(sorted(named, key=lambda source: -source.variance))


def uncertainty_sources(variance_sources: Iterable[VarianceSource]) -> tuple[UncertaintySource, ...]:
    sources = list(variance_sources)
    total = sum(source.variance for source in sources) or 1.0
    named = [source for source in sources if source.variance >= _WORTH_NAMING * total]
    small = [source for source in sources if source.variance < _WORTH_NAMING * total]
    if small:
        together = sum(source.variance for source in small)
        named.append(
            VarianceSource(
                name=SMALLER, variance=together, rests_on=f"{len(small)} other{'s' * (len(small) > 1)}, {small[0].name} the largest"
            )
        )
    return tuple(
        UncertaintySource(name=source.name, spread=math.sqrt(source.variance), share=source.variance / total, rests_on=source.rests_on)
        for source in named
    )


def remedy(says: str, how: str, *, left: float, total: float, interval: StepInterval, is_measured: bool = True) -> Remedy:
    """Return a remedy that narrows the interval in proportion.

    left, total   variance after it and before
    """
    share = left / total if total else 1.0
    shrinkage = math.sqrt(share)
    return Remedy(says=says, how=how, low=interval.low**shrinkage, high=interval.high**shrinkage, share_left=share, is_measured=is_measured)
