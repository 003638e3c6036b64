"""Sources of uncertainty of a step time: constants of the framework and of the chip, by their spread and the sensitivity of the step,
and the variance that the cheapest measurements of them would leave."""

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
from perfmodel.uncertainty.sensitivity import STEP, Sensitivity, fitted_slopes, log_change, sensitivities
from perfmodel.uncertainty.sources import Remedy, TrustAccount, VarianceSource, remedy, uncertainty_sources, variance_of, with_rest

_OF_NORMAL = 0.6745
"""Median of |x| of a normal distribution of standard deviation 1: errors of calibrations are medians."""

_SHAPES_OF_A_LAYER = 4
"""Products (q, k and v; output; up; down) whose errors are independent of each other and average out."""

_RUNS = 3

_WORTH_STATING = 0.02
"""Share of the variance from which it is worth saying that a setting would tell a habit."""

_TELLS = 0.98
"""Share of the variance that a remedy leaves, from which it is none."""

_GIVEN_BY: Mapping[str, tuple[str, str]] = {
    ELEMENTWISE: ("whether it is compiled, or has fused norms", "compile, or --setting fused_rmsnorm=false"),
    "attention_rate_fraction": ("the attention kernel", "attention_kernel=flash2"),
    "tp_backward_overlap_fraction": ("whether communication of tensor parallelism hides in backward", "tp_async=false"),
}
"""Of a habit: what tells it, and how that is stated beside a profile's name."""

_ERRORS: Mapping[str, tuple[str, int]] = {
    "matmul": ("matmul.", _SHAPES_OF_A_LAYER),
    "attention": ("attention.", 1),
    "streaming": ("streaming.default", 1),
    SCALE_UP: (f"{SCALE_UP}.", 1),
    SCALE_OUT: (f"{SCALE_OUT}.", 1),
}
"""Of a part of a calibration: how its errors are called, and how many independent ones a step averages."""


def trust_account(
    estimator: Estimator,
    plan: Plan,
    found: StepInterval,
    *,
    residuals: Residuals,
    is_known: bool,
    stated: Collection[str] = (),
) -> TrustAccount:
    """Sources of uncertainty of a plan whose interval is `found`.

    is_known   the framework has published runs of its own
    stated     fields of the profile that settings tell
    """
    fitted = estimator.profile.fitted
    if fitted.num_runs:
        variance_sources = [*_open_constants(estimator, plan), *_of_others(estimator, plan, residuals)]
        rest = "how far one more run lies from the best of constants"
    else:
        behaviours = [] if is_known else [behaviour for behaviour in BEHAVIOURS if behaviour.name not in stated]
        variance_sources = [*_behaviours(estimator, plan, behaviours), *_kernels(estimator, plan, residuals)]
        rest = f"how far runs of {'it' if is_known else 'frameworks'} lie from predictions: models, clusters, releases"
    every = with_rest(variance_sources, found, rests_on=rest)
    return TrustAccount(
        interval=found,
        uncertainties=uncertainty_sources(every),
        remedies=tuple(
            each for each in _remedies(estimator, plan, found, every, residuals=residuals, is_known=is_known) if each.share_left < _TELLS
        ),
    )


def _behaviours(estimator: Estimator, plan: Plan, behaviours: Sequence[Behaviour]) -> Iterator[VarianceSource]:
    for behaviour, changes in behaviour_changes(estimator.profile, behaviours, _moves(estimator, plan)):
        rests_on = f"{estimator.profile.name}: frameworks differ by {_width(behaviour)}"
        yield VarianceSource(name=_name_of(behaviour), variance=float((changes**2).mean()), rests_on=rests_on)


def _moves(estimator: Estimator, plan: Plan) -> Callable[[Mapping[str, float]], float]:
    return lambda fields: log_change(estimator, plan, estimator.profile.having(**fields))  # type: ignore[arg-type]


def open_in(estimator: Estimator, plan: Plan, *, stated: Collection[str] = ()) -> tuple[float, float]:
    """Variance of log(step time), below and above, that habits which nobody stated leave open in a plan."""
    behaviours = [behaviour for behaviour in BEHAVIOURS if behaviour.name not in stated]
    below, above = open_variance(estimator.profile, behaviours, _moves(estimator, plan))
    return float(below), float(above)


def _name_of(behaviour: Behaviour) -> str:
    return f"framework: {behaviour.says}"


def _width(behaviour: Behaviour) -> str:
    if behaviour.is_ratio:
        return f"a factor of {math.exp(behaviour.spread):.2g}"
    return f"{behaviour.spread * 1e3:g} ms" if behaviour.unit == "s" else f"{behaviour.spread:g}"


def _open_constants(estimator: Estimator, plan: Plan) -> Iterator[VarianceSource]:
    """Variance that the user's runs leave in each fitted constant."""
    fitted, says = estimator.profile.fitted, {name: behaviour for behaviour in BEHAVIOURS for name in behaviour.fields}
    slopes = fitted_slopes(estimator, plan)
    for i, constant in enumerate(fitted.constants):
        shared = slopes[i] * sum(value * slope for value, slope in zip(fitted.covariance[i], slopes, strict=True))
        name = constant.fields[0]
        known = f"your runs took away {constant.share_known:.0%} of what was open"
        yield VarianceSource(name=_name_of(says[name]) if name in says else name, variance=shared, rests_on=known)


def _of_others(estimator: Estimator, plan: Plan, residuals: Residuals) -> Iterator[VarianceSource]:
    fitted, chip = estimator.profile.fitted, estimator.cluster.chip.name
    if chip not in fitted.chips:
        yield VarianceSource(name=f"chip: none of your runs is on {chip}", variance=residuals.between_chips**2, rests_on="published runs")
    if shape_of(plan.job.transformer) not in fitted.models:
        yield VarianceSource(name="model: your runs are of others", variance=residuals.between_models**2, rests_on="published runs")


def _kernels(estimator: Estimator, plan: Plan, residuals: Residuals) -> Iterator[VarianceSource]:
    """Rates of the chip and its links: measured ones by the errors of their calibration, others by how far chips of a maker differ."""
    for each in sensitivities(estimator, plan, most=100):
        if each.part in _ERRORS:
            slope = math.log1p(each.change) / math.log1p(STEP)
            yield VarianceSource(
                name=f"{estimator.cluster.chip.name}: {each.parameter}",
                variance=(slope * _spread_of(each, estimator.machine.errors, residuals)) ** 2,
                rests_on=each.rests_on,
            )


def _spread_of(each: Sensitivity, errors: Mapping[str, float], residuals: Residuals) -> float:
    prefix, averaged = _ERRORS[each.part]
    own = [error for name, error in errors.items() if name.startswith(prefix)]
    if not own or not each.rests_on.startswith(Provenance.CALIBRATED):
        return residuals.between_calibrations
    return median(own) / _OF_NORMAL / math.sqrt(averaged)


def _remedies(
    estimator: Estimator,
    plan: Plan,
    found: StepInterval,
    variance_sources: Sequence[VarianceSource],
    *,
    residuals: Residuals,
    is_known: bool,
) -> Iterator[Remedy]:
    """Cheapest first: what only has to be said, then what one chip measures, then what all of them do."""
    profile, chip = estimator.profile, estimator.cluster.chip.name
    total = sum(each.variance for each in variance_sources)
    shared = sum(each.variance for each in variance_sources if each.is_shared)

    def remedied(says: str, how: str, left: float, *, is_measured: bool = True) -> Remedy:
        return remedy(says, how, left=left, total=total, interval=found, is_measured=is_measured)

    if profile.fitted.num_runs:
        noise = profile.fitted.noise
        left = noise**2 + shared / (1.0 + shared / max(noise, 1e-6) ** 2)
        yield remedied("one more run of your own: of this plan", "its step time as one more row for `perfmodel fit`", left)
        return
    by_name = {each.name: each for each in variance_sources}
    if not is_known:
        for behaviour in BEHAVIOURS:
            told = next((_GIVEN_BY[name] for name in behaviour.fields if name in _GIVEN_BY), None)
            own = by_name.get(_name_of(behaviour))
            if told and own and own.variance >= _WORTH_STATING * total:
                what, how = told
                yield remedied(f"state {what}", f"--setting {how}", total - own.variance)
        left = _of_the_known(estimator, plan, residuals)
        yield remedied("name the framework", "--profile NAME, if it is one of `perfmodel profiles`", left, is_measured=False)
    borrowed = [
        each for each in variance_sources if each.name.startswith(f"{chip}: ") and not each.rests_on.startswith(Provenance.CALIBRATED)
    ]
    if borrowed:
        left = total - sum(each.variance for each in borrowed)
        yield remedied(f"calibrate {chip}", "`perfmodel calibrate` on one of them, two minutes", left)
    noise = noise_of(_RUNS)
    left = shared / (1.0 + _RUNS * shared / noise**2) + SCATTER**2
    yield remedied(f"measure {_RUNS} runs of this plan and its neighbours", "`perfmodel fit RUNS`", left)


def _of_the_known(estimator: Estimator, plan: Plan, residuals: Residuals) -> float:
    """Variance of a prediction whose framework is known: the median over those that have runs."""
    features = features_of(plan, estimator.cluster.chip.name)
    return median(
        variance_of(interval(residuals, features, family=family)) for family in sorted({each.family for each in residuals.models})
    )


def stated_fields(profile: ExecutionProfile, base: ExecutionProfile) -> frozenset[str]:
    """Numbers that settings stated beside the name of the base tell."""
    return frozenset(name for behaviour in BEHAVIOURS for name in behaviour.fields if profile.option(name) != base.option(name))
