"""Sources of uncertainty of a step time, and the cheapest measurements that reduce it.

The sources are constants of the framework and of the chip. The variance of each is its spread times the sensitivity of the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from statistics import median

from perfmodel.cost.estimate import Estimator
from perfmodel.frameworks.profile import ExecutionProfile
from perfmodel.hardware.calibration import SCALE_OUT, SCALE_UP, Provenance
from perfmodel.parallel.interval import StepInterval
from perfmodel.parallel.plan import Plan
from perfmodel.uncertainty.open_defaults import behaviour_changes, open_variance
from perfmodel.uncertainty.priors import BEHAVIOURS, ELEMENTWISE, SCATTER, Behaviour, noise_of
from perfmodel.uncertainty.residuals import Residuals, interval, shape_of
from perfmodel.uncertainty.run_features import features_of
from perfmodel.uncertainty.sensitivity import STEP, fitted_slopes, log_change, sensitivities
from perfmodel.uncertainty.sources import Remedy, TrustAccount, VarianceSource, remedy, uncertainty_sources, variance_of, with_rest

_MEDIAN_OF_NORMAL = 0.6745
"""Median of |x| of a standard normal distribution: the errors of calibrations are medians."""

_SHAPES_OF_A_LAYER = 4
"""Matrix multiplies of a layer (q, k and v; output; up; down): their errors are independent and average out."""

_RUNS = 3

_WORTH_STATING = 0.02
"""Share of the variance from which setting a framework option counts as a remedy."""

_NO_EFFECT = 0.98
"""Share of the variance left, from which a remedy has no effect and is left out."""

_SETTINGS: Mapping[str, tuple[str, str]] = {
    ELEMENTWISE: ("whether it is compiled, or has fused norms", "compile, or --setting fused_rmsnorm=false"),
    "attention_rate_fraction": ("the attention kernel", "attention_kernel=flash2"),
    "tp_backward_overlap_fraction": ("whether communication of tensor parallelism hides in backward", "tp_async=false"),
}
"""Parameter -> (description, setting that determines it)."""

_CALIBRATION_ERRORS: Mapping[str, tuple[str, int]] = {
    "matmul": ("matmul.", _SHAPES_OF_A_LAYER),
    "attention": ("attention.", 1),
    "streaming": ("streaming.default", 1),
    SCALE_UP: (f"{SCALE_UP}.", 1),
    SCALE_OUT: (f"{SCALE_OUT}.", 1),
}
"""Part of a calibration -> (prefix of its error names, number of independent errors that a step averages)."""


def trust_account(
    estimator: Estimator,
    plan: Plan,
    step_interval: StepInterval,
    *,
    residuals: Residuals,
    is_known: bool,
    stated: Collection[str] = (),
) -> TrustAccount:
    """Return the sources of uncertainty of a plan with the interval `step_interval`.

    is_known   whether the framework has published runs
    stated     profile fields that settings determine
    """
    fitted = estimator.profile.fitted
    if fitted.num_runs:
        variance_sources = [*_after_runs(estimator, plan, residuals)]
        rest = "how far one more run lies from the best of constants"
    else:
        behaviours = [] if is_known else [behaviour for behaviour in BEHAVIOURS if behaviour.name not in stated]
        variance_sources = [*_without_runs(estimator, plan, behaviours, residuals)]
        rest = f"how far runs of {'it' if is_known else 'frameworks'} lie from predictions: models, clusters, releases"
    every = with_rest(variance_sources, step_interval, rests_on=rest)
    return TrustAccount(
        interval=step_interval,
        uncertainties=uncertainty_sources(every),
        remedies=tuple(
            option
            for option in _remedies(estimator, plan, step_interval, every, residuals=residuals, is_known=is_known)
            if option.share_left < _NO_EFFECT
        ),
    )


def _log_change_of(estimator: Estimator, plan: Plan) -> Callable[[Mapping[str, float]], float]:
    return lambda fields: log_change(estimator, plan, estimator.profile.having(**fields))  # type: ignore[arg-type]


def open_in(estimator: Estimator, plan: Plan, *, stated: Collection[str] = ()) -> tuple[float, float]:
    """Return the variance of log(step time), below and above, from framework options that are not set."""
    behaviours = [behaviour for behaviour in BEHAVIOURS if behaviour.name not in stated]
    below, above = open_variance(estimator.profile, behaviours, _log_change_of(estimator, plan))
    return float(below), float(above)


def _name_of(behaviour: Behaviour) -> str:
    return f"framework: {behaviour.says}"


def _after_runs(estimator: Estimator, plan: Plan, residuals: Residuals) -> Iterator[VarianceSource]:
    """Yield the variance that each fitted constant contributes after the user's runs, and that of a chip or model without any."""
    fitted, chip = estimator.profile.fitted, estimator.cluster.chip.name
    behaviour_of = {name: behaviour for behaviour in BEHAVIOURS for name in behaviour.fields}
    slopes = fitted_slopes(estimator, plan)
    for i, constant in enumerate(fitted.constants):
        shared = slopes[i] * sum(value * slope for value, slope in zip(fitted.covariance[i], slopes, strict=True))
        name = constant.fields[0]
        known = f"your runs took away {constant.share_known:.0%} of what was open"
        yield VarianceSource(name=_name_of(behaviour_of[name]) if name in behaviour_of else name, variance=shared, rests_on=known)
    if chip not in fitted.chips:
        yield VarianceSource(name=f"chip: none of your runs is on {chip}", variance=residuals.between_chips**2, rests_on="published runs")
    if shape_of(plan.job.transformer) not in fitted.models:
        yield VarianceSource(name="model: your runs are of others", variance=residuals.between_models**2, rests_on="published runs")


def _without_runs(estimator: Estimator, plan: Plan, behaviours: Sequence[Behaviour], residuals: Residuals) -> Iterator[VarianceSource]:
    """Yield the variance of the framework's behaviours, and of the rates of the chip and its links.

    A calibrated rate has the error of its calibration; any other has the variance between calibrations of chips.
    """
    for behaviour, changes in behaviour_changes(estimator.profile, behaviours, _log_change_of(estimator, plan)):
        if behaviour.is_ratio:
            width = f"a factor of {math.exp(behaviour.spread):.2g}"
        else:
            width = f"{behaviour.spread * 1e3:g} ms" if behaviour.unit == "s" else f"{behaviour.spread:g}"
        rests_on = f"{estimator.profile.name}: frameworks differ by {width}"
        yield VarianceSource(name=_name_of(behaviour), variance=float((changes**2).mean()), rests_on=rests_on)
    for parameter in sensitivities(estimator, plan, most=100):
        if parameter.part not in _CALIBRATION_ERRORS:
            continue
        prefix, averaged = _CALIBRATION_ERRORS[parameter.part]
        errors = [error for name, error in estimator.machine.basis.errors.items() if name.startswith(prefix)]
        spread = residuals.between_calibrations
        if errors and parameter.rests_on.startswith(Provenance.CALIBRATED):
            spread = median(errors) / _MEDIAN_OF_NORMAL / math.sqrt(averaged)
        slope = math.log1p(parameter.change) / math.log1p(STEP)
        name = f"{estimator.cluster.chip.name}: {parameter.parameter}"
        yield VarianceSource(name=name, variance=(slope * spread) ** 2, rests_on=parameter.rests_on)


def _remedies(
    estimator: Estimator,
    plan: Plan,
    step_interval: StepInterval,
    variance_sources: Sequence[VarianceSource],
    *,
    residuals: Residuals,
    is_known: bool,
) -> Iterator[Remedy]:
    """Yield the remedies, cheapest first: a setting, a calibration on one chip, runs on all chips."""
    profile, chip = estimator.profile, estimator.cluster.chip.name
    total = sum(source.variance for source in variance_sources)
    shared = sum(source.variance for source in variance_sources if source.is_shared)

    def remedied(says: str, how: str, left: float, *, is_measured: bool = True) -> Remedy:
        return remedy(says, how, left=left, total=total, interval=step_interval, is_measured=is_measured)

    if profile.fitted.num_runs:
        noise = profile.fitted.noise
        left = noise**2 + shared / (1.0 + shared / max(noise, 1e-6) ** 2)
        yield remedied("one more run of your own: of this plan", "its step time as one more row for `perfmodel fit`", left)
        return
    by_name = {source.name: source for source in variance_sources}
    if not is_known:
        for behaviour in BEHAVIOURS:
            setting = next((_SETTINGS[name] for name in behaviour.fields if name in _SETTINGS), None)
            source = by_name.get(_name_of(behaviour))
            if setting and source and source.variance >= _WORTH_STATING * total:
                what, how = setting
                yield remedied(f"state {what}", f"--setting {how}", total - source.variance)
        # as the median over the frameworks with runs
        features, families = features_of(plan, chip), sorted({model.family for model in residuals.models})
        left = median(variance_of(interval(residuals, features, family=family)) for family in families)
        yield remedied("name the framework", "--profile NAME, if it is one of `perfmodel profiles`", left, is_measured=False)
    borrowed = [
        source
        for source in variance_sources
        if source.name.startswith(f"{chip}: ") and not source.rests_on.startswith(Provenance.CALIBRATED)
    ]
    if borrowed:
        left = total - sum(source.variance for source in borrowed)
        yield remedied(f"calibrate {chip}", "`perfmodel calibrate` on one of them, two minutes", left)
    noise = noise_of(_RUNS)
    left = shared / (1.0 + _RUNS * shared / noise**2) + SCATTER**2
    yield remedied(f"measure {_RUNS} runs of this plan and its neighbours", "`perfmodel fit RUNS`", left)


def given_fields(profile: ExecutionProfile, base: ExecutionProfile) -> frozenset[str]:
    """Return the profile fields that settings change from the base profile."""
    return frozenset(name for behaviour in BEHAVIOURS for name in behaviour.fields if profile.option(name) != base.option(name))
