"""Result of a fit to the user's runs: constants, runs, errors, and the most informative next run."""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from perfmodel.fitting.fit import UserFit, UserRun, mean_error
from perfmodel.frameworks.fitted import FittedConstant, FittedTo
from perfmodel.frameworks.profile import ExecutionProfile
from perfmodel.parallel.plan import Plan
from perfmodel.uncertainty.priors import Behaviour
from perfmodel.uncertainty.residuals import shape_of
from perfmodel.uncertainty.run_features import features_of
from perfmodel.validation.run_machine import cluster_of_run

_DETERMINED, _PARTLY = 0.5, 0.1
"""Share of the prior's variance removed by the runs, from which a parameter is determined, or determined in part."""

_OUTLIER = 3.0
"""Standard deviations between a run and its prediction from the others, from which it is reported as an outlier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedBehaviour:
    """Fitted parameter of the framework.

    says, unit            description
    value, spread         posterior mean and standard deviation: of the logarithm where `is_ratio`
    prior, prior_spread   the same before the fit
    determined            "by the runs", "in part" or "still prior"
    """

    name: str
    says: str
    unit: str
    is_ratio: bool
    value: float
    spread: float
    prior: float
    prior_spread: float
    determined: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedRun:
    """Measured and predicted times of a run. [s]

    left_out   predicted by a fit to the other runs
    weight     in the fit, at most 1
    outlier    the reason why it is reported; empty if it is not
    """

    id: str
    plan: Plan
    measured: float
    before: float
    after: float
    left_out: float
    weight: float
    outlier: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedPeak:
    """Measured and predicted peaks of memory. [byte]

    kind       reserved (held by the allocator) or allocated (in tensors)
    left_out   predicted by a fit to the other runs
    """

    id: str
    plan: Plan
    kind: str
    measured: float
    before: float
    after: float
    left_out: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedMemory:
    """Allocator factor fitted to measured peaks of memory. Errors are those of `FittedProfile`, of peaks."""

    behaviour: FittedBehaviour
    runs: tuple[FittedPeak, ...]
    error_before: float
    error_after: float
    error_left_out: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NextRun:
    """The most informative plan to measure.

    spread   |log(measured / predicted)| of plans near the runs, before and after its measurement
    """

    plan: Plan
    differs: str
    step_time: float
    spread_before: float
    spread_after: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedProfile:
    """A profile fitted to the user's runs. Errors are means of |predicted / measured - 1|: before and after the fit, and leave-one-out.

    memory   fit to measured peaks; None: none was measured
    """

    profile: ExecutionProfile
    base: str
    behaviours: tuple[FittedBehaviour, ...]
    runs: tuple[FittedRun, ...]
    error_before: float
    error_after: float
    error_left_out: float
    noise: float
    next_runs: tuple[NextRun, ...]
    notes: tuple[str, ...]
    memory: FittedMemory | None = None

    @property
    def outliers(self) -> tuple[FittedRun, ...]:
        return tuple(run for run in self.runs if run.outlier)


def result_of(fit: UserFit, runs: Sequence[UserRun], *, name: str, next_runs: tuple[NextRun, ...], notes: tuple[str, ...]) -> FittedProfile:
    """Return the profile, called `name`, with the result of its fit."""
    expected = fit.spread(fit.posterior.slopes)
    return FittedProfile(
        profile=_profile(fit, runs, name),
        base=fit.base.name,
        behaviours=tuple(_behaviour(fit, index, behaviour) for index, behaviour in enumerate(fit.behaviours)),
        runs=tuple(
            FittedRun(
                id=run.id,
                plan=run.planned.plan,
                measured=run.measured,
                before=run.measured * math.exp(fit.before[i]),
                after=run.measured * math.exp(fit.after[i]),
                left_out=run.measured * math.exp(fit.left_out[i]),
                weight=float(fit.posterior.weights[i]),
                outlier=_outlier(run, float(fit.left_out[i]), float(expected[i]), runs) if len(runs) > 2 else "",
            )
            for i, run in enumerate(runs)
        ),
        error_before=mean_error(fit.before),
        error_after=mean_error(fit.after),
        error_left_out=mean_error(fit.left_out),
        noise=fit.noise,
        next_runs=next_runs,
        notes=notes,
    )


def with_memory(fitted_profile: FittedProfile, fit: UserFit, runs: Sequence[UserRun]) -> FittedProfile:
    """Return the profile with the allocator factor fitted to the runs' peaks."""
    (behaviour,) = (_behaviour(fit, index, behaviour) for index, behaviour in enumerate(fit.behaviours))
    share = round(1.0 - float(fit.posterior.covariance[0, 0]), 4)
    fitted = replace(fitted_profile.profile.fitted, num_memory_runs=len(runs), memory_known=share)
    peaks = tuple(
        FittedPeak(
            id=run.id,
            plan=run.planned.plan,
            kind=run.memory_kind or run.planned.framework.figures.memory_kind,
            measured=run.memory,
            before=run.memory * math.exp(fit.before[i]),
            after=run.memory * math.exp(fit.after[i]),
            left_out=run.memory * math.exp(fit.left_out[i]),
        )
        for i, run in enumerate(runs)
    )
    memory = FittedMemory(
        behaviour=behaviour,
        runs=peaks,
        error_before=mean_error(fit.before),
        error_after=mean_error(fit.after),
        error_left_out=mean_error(fit.left_out),
    )
    date, colon, rest = fitted_profile.profile.source.partition(": ")
    source = f"{date}{colon}peaks of memory of {len(runs)} run{'s' * (len(runs) > 1)}, {rest}"
    return replace(
        fitted_profile, profile=replace(fitted_profile.profile.having(**fit.values), source=source, fitted=fitted), memory=memory
    )


def _behaviour(fit: UserFit, index: int, behaviour: Behaviour) -> FittedBehaviour:
    constant = fit.constants[index]
    share = 1.0 - float(fit.posterior.covariance[index, index])
    return FittedBehaviour(
        name=behaviour.name,
        says=behaviour.says,
        unit=behaviour.unit,
        is_ratio=constant.is_ratio,
        value=float(fit.values[behaviour.name]),
        spread=constant.spread * math.sqrt(max(1.0 - share, 0.0)),
        prior=constant.prior,
        prior_spread=constant.spread,
        determined="by the runs" if share >= _DETERMINED else "in part" if share >= _PARTLY else "still prior",
    )


def _outlier(run: UserRun, error: float, expected: float, runs: Sequence[UserRun]) -> str:
    """Return the reason why a run is an outlier among the others; empty if it is none."""
    if abs(error) < _OUTLIER * expected:
        return ""
    off = math.expm1(abs(error))
    if error > 0:
        return f"{off:.0%} faster than the other runs let expect: fewer sequences or layers than its plan says, or no recomputation"
    several = run.planned.plan.num_chips > cluster_of_run(run.planned.hardware).chips_per_node
    reach = "a slow link between nodes, " if several else ""
    inside = "a broken link in the node, " if run.planned.plan.num_chips > 1 else ""
    return f"{off:.0%} slower than the other runs let expect: {reach}{inside}warm-up steps among those timed, or other load on its chips"


def _profile(fit: UserFit, runs: Sequence[UserRun], name: str) -> ExecutionProfile:
    today = datetime.date.today().isoformat()
    covariance = fit.posterior.covariance
    fitted = FittedTo(
        base=fit.base.name,
        date=today,
        num_runs=len(runs),
        noise=round(fit.noise, 4),
        left_out_error=round(mean_error(fit.left_out), 4) if runs else 0.0,
        models=tuple(sorted({shape_of(run.planned.plan.job.transformer) for run in runs})),
        chips=tuple(sorted({run.planned.hardware.chip for run in runs})),
        features=tuple(sorted({name for run in runs for name in features_of(run.planned.plan, run.planned.hardware.chip).named()})),
        constants=tuple(
            FittedConstant(
                fields=behaviour.fields,
                prior=constant.prior,
                prior_spread=constant.spread,
                is_ratio=constant.is_ratio,
                share_known=round(1.0 - float(covariance[i, i]), 4),
            )
            for i, (behaviour, constant) in enumerate(zip(fit.behaviours, fit.constants, strict=True))
        ),
        covariance=tuple(tuple(round(float(value), 5) for value in row) for row in covariance),
    )
    runs_text = f"{len(runs)} run{'s' if len(runs) > 1 else ''} of your own on {', '.join(fitted.chips)}; " if runs else ""
    source = f"`perfmodel fit`, {today}: {runs_text}what they do not determine is {fit.base.name}. {fit.base.source}"
    return replace(fit.profile, name=name, source=source, fitted=fitted)
