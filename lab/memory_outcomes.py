"""Fit of the memory uncertainty to runs that ran and to runs that ran out of memory, for the probability of fitting.

A run that ran needed no more memory than its chip has; a run that failed needed more. The uncertainty is the maximum-likelihood
estimate for these outcomes. Published allocator figures give the needed bytes themselves. Every source weighs one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lab.cases import planned_cases
from lab.pages import table
from lab.splits import Split, cross_validated
from perfmodel.cost.estimate import evaluate_memory
from perfmodel.foundation.errors import InputError
from perfmodel.foundation.memory_headroom import MemoryUncertainty, RankNeed, Verdict, outcome_rule
from perfmodel.frameworks.profile import uncertainty_of_memory
from perfmodel.validation.case_plan import PlannedCase
from perfmodel.validation.cases import Case
from perfmodel.validation.validate import CasePredictor

NUM_BINS = 10
_ENOUGH = 10
"""Least number of runs of a bin whose share is reported as the worst."""

_VARIANCE = math.pi**2 / 3.0
"""Variance of a logistic distribution of scale 1."""

_LEAST_SCALE = 0.01
"""Lower bound of the fitted scale, for few outcomes that any smaller scale would fit."""

_FARTHEST = 9.0
"""Bound of the log headroom: the exact part alone exceeds the memory, or no part is uncertain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOutcome:
    """Outcome of one run. log_headroom: logarithm of the growth of the uncertain part that still fits. verdict: of the default rule."""

    id: str
    model: str
    log_headroom: float
    ran: bool
    verdict: Verdict


def outcome_of(case: Case, planned: PlannedCase, predictor: CasePredictor) -> MemoryOutcome:
    """Return the outcome of a case that ran or ran out of memory. Raises InputError where it cannot be predicted."""
    ranks, usable, uncertainty = _needs(planned, predictor)
    headroom = min(rank.log_headroom(usable) for rank in ranks)
    return MemoryOutcome(
        id=case.id,
        model=planned.plan.job.model.name,
        log_headroom=min(max(headroom, -_FARTHEST), _FARTHEST),
        ran=case.ran is True,
        verdict=outcome_rule(uncertainty).verdict(ranks, usable, uncertainty),
    )


def _needs(planned: PlannedCase, predictor: CasePredictor) -> tuple[Sequence[RankNeed], float, MemoryUncertainty]:
    """Return the needed memory of each rank, the usable memory of a chip [byte], and the uncertainty of the profile."""
    estimator, uncertainty = predictor.estimator(planned), uncertainty_of_memory(planned.profile)
    ranks = evaluate_memory(estimator, planned.plan).needs(planned.plan, uncertainty)
    return ranks, estimator.machine.memory.usable, uncertainty


def own_outcomes(cases: Iterable[Case], predictor: CasePredictor, framework: str) -> Iterator[MemoryOutcome]:
    """Yield the outcomes of a framework's runs, predicted with its own profile."""
    for case, planned in planned_cases(cases, lambda case: case.ran is not None and not case.reason):
        if planned.framework.profile == framework:
            with suppress(InputError):
                yield outcome_of(case, planned, predictor)


def own_figures(cases: Iterable[Case], predictor: CasePredictor, framework: str) -> Iterator[float]:
    """Yield log(needed / predicted) of the uncertain part, for runs that report the allocator's peak on the fullest rank."""
    for case, planned in planned_cases(cases, lambda case: not (math.isnan(case.measured("memory")) or case.reason)):
        if planned.framework.profile == framework:
            with suppress(InputError):
                rank = max(_needs(planned, predictor)[0], key=lambda need: need.total)
                yield math.log(max(case.measured("memory") + rank.outside - rank.sure, 1.0) / (rank.total - rank.sure))


def likeliest_uncertainty(outcomes: Sequence[MemoryOutcome], figures: Sequence[float] = ()) -> MemoryUncertainty:
    """Return the maximum-likelihood uncertainty of the outcomes and figures of one source."""
    from scipy.optimize import minimize

    if not (outcomes or figures):
        raise InputError("cases: none says whether it ran out of memory; give the runs that failed too (--out-of-memory)")
    headrooms, held = np.array([outcome.log_headroom for outcome in outcomes]), np.array(figures)
    signs = np.where([outcome.ran for outcome in outcomes], -1.0, 1.0)

    def loss(at: NDArray[np.float64]) -> float:
        centre, scale = float(at[0]), math.exp(float(at[1]))
        distance = (held - centre) / scale
        of_figures = float((distance + 2.0 * np.logaddexp(0.0, -distance) + math.log(scale)).sum())
        return of_figures + float(np.logaddexp(0.0, signs * (headrooms - centre) / scale).sum())

    starts = [(0.0, math.log(scale)) for scale in (0.05, 0.2)]
    optimum = min((minimize(loss, start, method="Nelder-Mead") for start in starts), key=lambda candidate: float(candidate.fun))
    return MemoryUncertainty(centre=float(optimum.x[0]), scale=max(math.exp(float(optimum.x[1])), _LEAST_SCALE))


def uncertainty_over(sources: Sequence[MemoryUncertainty], *, rests_on: str) -> MemoryUncertainty:
    """Combine several sources, each weighing one: the mean variance plus the variance of their centres."""
    centres = [source.centre for source in sources]
    variance = float(np.mean([source.scale**2 for source in sources]) + np.var(centres) / _VARIANCE)
    return MemoryUncertainty(centre=round(float(np.mean(centres)), 4), scale=round(math.sqrt(variance), 4), rests_on=rests_on)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReliabilityBin:
    """Runs with a predicted probability from `low` to `high`. stated: mean prediction. happened: share that ran."""

    low: float
    high: float
    num_runs: int
    stated: float
    happened: float

    @property
    def error(self) -> float:
        return abs(self.stated - self.happened)

    @property
    def band(self) -> tuple[float, float]:
        """95 % confidence interval of the share that ran."""
        return wilson_band(self.happened, self.num_runs)

    @property
    def agrees(self) -> bool:
        low, high = self.band
        return low <= self.stated <= high


_TWO_SIDED_95 = 1.96


def wilson_band(share: float, num_runs: int) -> tuple[float, float]:
    """Return the 95 % confidence interval of a share observed in `num_runs` runs.

    Source: Wilson, Journal of the American Statistical Association 22, 1927.
    """
    z, n = _TWO_SIDED_95, num_runs
    centre, half = share + z * z / (2 * n), z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return (max(centre - half, 0.0) / (1 + z * z / n), min((centre + half) / (1 + z * z / n), 1.0))


def reliability(outcomes: Sequence[MemoryOutcome]) -> tuple[ReliabilityBin, ...]:
    """Compare predicted probabilities of fitting with outcomes, each model by the uncertainty fitted to the other models."""

    def probabilities(split: Split) -> list[float]:
        uncertainty = likeliest_uncertainty([outcomes[index] for index in split.seen] or outcomes)
        return [uncertainty.probability_below(outcomes[index].log_headroom) for index in split.held_out]

    stated = cross_validated([outcome.model for outcome in outcomes], probabilities)
    ran, bin_of = np.array([outcome.ran for outcome in outcomes]), np.minimum((stated * NUM_BINS).astype(int), NUM_BINS - 1)
    return tuple(
        ReliabilityBin(
            low=number / NUM_BINS,
            high=(number + 1) / NUM_BINS,
            num_runs=int(np.count_nonzero(bin_of == number)),
            stated=float(stated[bin_of == number].mean()),
            happened=float(ran[bin_of == number].mean()),
        )
        for number in range(NUM_BINS)
        if np.any(bin_of == number)
    )


def reliability_values(bins: Sequence[ReliabilityBin]) -> dict[str, object]:
    """Return the values of the section of docs/accuracy.md: a line for each bin, and the calibration error."""
    headers = ("predicted", "runs", "mean", "ran", "error", "95 % interval")
    rows = [
        (
            f"{entry.low:.0%} to {entry.high:.0%}",
            f"{entry.num_runs:,}",
            f"{entry.stated:.0%}",
            f"{entry.happened:.0%}",
            f"{100 * entry.error:.0f}",
            _shares(entry.band),
        )
        for entry in bins
    ]
    every = sum(entry.num_runs for entry in bins)
    between = _together([entry for entry in bins if _OPEN[0] <= entry.low < _OPEN[1]])
    undecided = (
        f". Of the {between.num_runs} runs with a probability of {between.low:.0%} to {between.high:.0%} ({between.stated:.0%} on "
        f"average), {between.happened:.0%} ran (95 % interval: {_shares(between.band)})"
        if between
        else ""
    )
    return {
        "table": table(headers, rows, headers),
        "reliability_mean": f"{100 * sum(entry.num_runs * entry.error for entry in bins) / max(1, every):.1f}",
        "reliability_worst": f"{100 * max((entry.error for entry in bins if entry.num_runs >= _ENOUGH), default=0.0):.0f}",
        "reliability_sure": f"{sum(entry.num_runs for entry in bins if entry.high <= 0.1 or entry.low >= 0.9):,}",
        "reliability_runs": f"{every:,}",
        "enough": _ENOUGH,
        "agreeing": sum(entry.agrees for entry in bins),
        "bins": len(bins),
        "undecided": undecided,
    }


def _shares(band: tuple[float, float]) -> str:
    return f"{band[0]:.0%} to {band[1]:.0%}"


_OPEN = (0.3, 0.7)
"""Probabilities of an undecided fit."""


def _together(bins: Sequence[ReliabilityBin]) -> ReliabilityBin | None:
    """Merge the bins into one."""
    count = sum(entry.num_runs for entry in bins)
    if not count:
        return None
    return ReliabilityBin(
        low=bins[0].low,
        high=bins[-1].high,
        num_runs=count,
        stated=sum(entry.num_runs * entry.stated for entry in bins) / count,
        happened=sum(entry.num_runs * entry.happened for entry in bins) / count,
    )
