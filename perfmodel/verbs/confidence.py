"""Confidence in a predicted step time: interval, grade, sources of uncertainty and most sensitive parameters."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from perfmodel.foundation.errors import bad_field
from perfmodel.parallel.framework_ref import SEPARATOR, framework_named
from perfmodel.parallel.plan import Plan
from perfmodel.verbs.setting import Setting
from perfmodel.workload.config import TransformerConfig

if TYPE_CHECKING:
    from perfmodel.frameworks.profile import ExecutionProfile
    from perfmodel.parallel.interval import StepInterval
    from perfmodel.uncertainty.sensitivity import Sensitivity
    from perfmodel.uncertainty.sources import TrustAccount

Confidence: TypeAlias = "tuple[StepInterval, tuple[Sensitivity, ...]]"


def need_intervals(settings: Iterable[Setting]) -> bool:
    """Return whether step times are shown with their interval by default: the kernels of a chip were not measured on it."""
    from perfmodel.cost.resolve import is_calibrated

    return not all(is_calibrated(setting.estimator.machine) for setting in settings)


def confidence_in(setting: Setting, plan: Plan) -> Confidence:
    """Return the 80 % interval of the plan's step time with its grade, and the most sensitive parameters."""
    from perfmodel.uncertainty.sensitivity import sensitivities

    return interval_in(setting, plan), sensitivities(setting.estimator, plan)


def interval_in(setting: Setting, plan: Plan) -> StepInterval:
    """Return the 80 % interval of the plan's step time, with its grade."""
    from perfmodel.cost.resolve import choose_calibration, is_calibrated, uncalibrated
    from perfmodel.uncertainty.account import open_in
    from perfmodel.uncertainty.fitted_interval import fitted_interval
    from perfmodel.uncertainty.grade import trust_in
    from perfmodel.uncertainty.residuals import interval, load_residuals, shape_of, with_experts
    from perfmodel.uncertainty.run_features import features_of
    from perfmodel.uncertainty.sensitivity import fitted_slopes

    estimator, residuals = setting.estimator, load_residuals()
    chip, fitted, family = setting.cluster.chip.name, estimator.profile.fitted, estimator.profile.known_as
    calibrated = is_calibrated(estimator.machine)
    if fitted.num_runs:
        slopes, model = fitted_slopes(estimator, plan), shape_of(plan.job.transformer)
        step_interval = fitted_interval(fitted, slopes, features_of(plan, chip), residuals=residuals, model=model)
    else:
        is_known = residuals.has_family(family)
        step_interval = interval(
            residuals,
            features_of(plan, chip),
            family=family,
            uncalibrated=uncalibrated(estimator.machine),
            is_usual=estimator.machine.basis.calibration == choose_calibration(setting.cluster.chip).name,
            open_behaviours=(0.0, 0.0) if is_known else open_in(estimator, plan, stated=_given_in(estimator.profile)),
        )
    if plan.has_experts:
        step_interval = with_experts(step_interval, residuals.experts)
    trust = trust_in(
        residuals,
        family=family,
        chip=chip,
        model=plan.job.transformer,
        is_calibrated=calibrated,
        fitted=fitted,
        trains_all=plan.job.train.is_full,
    )
    return replace(step_interval, trust=str(trust))


def trust_in_plan(setting: Setting, plan: Plan) -> TrustAccount:
    """Return the sources of uncertainty of the plan's step time, and the cheapest measurements that reduce it."""
    from perfmodel.uncertainty.account import trust_account
    from perfmodel.uncertainty.residuals import load_residuals

    if not isinstance(plan.job.model, TransformerConfig):
        rule = "is for language models: no run of another network was held against its prediction"
        raise bad_field("trust", plan.job.model.name, rule, "leave it out")
    residuals, profile = load_residuals(), setting.estimator.profile
    family = profile.known_as
    return trust_account(
        setting.estimator,
        plan,
        interval_in(setting, plan),
        residuals=residuals,
        is_known=residuals.has_family(family),
        stated=_given_in(profile),
    )


def _given_in(profile: ExecutionProfile) -> Collection[str]:
    """Return the profile fields that settings next to the framework's name determine."""
    from perfmodel.frameworks.profile import list_profiles, load_profile
    from perfmodel.uncertainty.account import given_fields

    family = framework_named(profile.name)
    return given_fields(profile, load_profile(family)) if SEPARATOR in profile.name and family in list_profiles() else ()
