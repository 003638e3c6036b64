"""Ensembles of frameworks: weighted profiles over which the step time of an unknown framework is averaged.

A plan may need features that only some frameworks have. Such a plan may be the fastest for the mean options of the frameworks, but not on
average over the frameworks. So plans for an unknown framework are ranked by their mean time over the known families, each with weight 1.
Plans for a profile fitted to the user's runs are ranked by their expected time over the posterior of its parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.frameworks.options import bounds_of
from perfmodel.frameworks.profile import GENERIC, ExecutionProfile, list_profiles, load_profile
from perfmodel.frameworks.runnable import Runs
from perfmodel.frameworks.settings import with_settings
from perfmodel.parallel.framework_ref import FrameworkRef

Array = NDArray[np.float64]


#: Capability of a framework (an axis, or ZeRO stages with or without a pipeline) -> options that only matter with it. Parameters that
#: pipelines keep gathered under ZeRO are part of the memory uncertainty instead (`uncertainty_of_memory`): only one family runs
#: such plans.
_CONCERNS: Sequence[tuple[Callable[[Runs], bool], tuple[str, ...]]] = (
    (
        lambda runs: "tp" in runs.axes,
        (
            "saved_input_layout", "tp_overlap_fraction", "tp_backward_overlap_fraction", "reduces_tp_gradients_first",
            "gathers_row_bias_gradients", "redistribution_copies",
        ),
    ),
    (lambda runs: "cp" in runs.axes, ("context_chunks", "context_attention_rate_fraction")),
    (lambda runs: "pp" in runs.axes, ("pp_overlap", "scatters_pipeline_sends", "pipeline_keeps_boundaries", "uneven_stage_weight")),
    (lambda runs: not {2, 3}.isdisjoint(runs.sharding.zero), ("reduces_each_microbatch",)),
    (lambda runs: 2 in runs.sharding.zero, ("zero2_stores_shards",)),
    (lambda runs: 0 in runs.sharding.zero_in_pipeline, ("pipeline_reduces_each_microbatch",)),
)  # fmt: skip

_LEAST = 1e-6
"""Smallest variance of a constant, in units of its prior variance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedProfile:
    """A profile with its weight in the expected step time. The weights add up to 1; the centre of a fit may have a negative weight."""

    weight: float
    profile: ExecutionProfile


def framework_ensemble(profile: ExecutionProfile) -> tuple[WeightedProfile, ...]:
    """Return the profiles over which a step time is averaged; none for a named framework.

    For an unknown framework these are the known ones with the stated settings, for a fitted profile points one standard deviation around
    it.
    """
    if profile.fitted.num_runs:
        members = []
        for weight, point in points_about(np.array(profile.fitted.covariance, dtype=np.float64)):
            moved: dict[str, Any] = {}
            for constant, spreads in zip(profile.fitted.constants, point.tolist(), strict=True):
                step = spreads * constant.prior_spread
                for name in constant.fields:
                    value, (least, most) = float(profile.option(name)), bounds_of(name)
                    moved[name] = min(max(value * math.exp(step) if constant.is_ratio else value + step, least), most)
            members.append(WeightedProfile(weight=weight, profile=profile.having(**moved)))
        return tuple(members)
    if profile.known_as != GENERIC:
        return ()
    settings, families = FrameworkRef.parse(profile.name).settings, family_weights(known_families(), load_profile(GENERIC))
    return tuple(replace(member, profile=with_settings(member.profile, settings)) for member in families)


def known_families(*, without: Iterable[str] = ()) -> dict[str, list[ExecutionProfile]]:
    """Return family -> its profiles, without those left out."""
    left_out, families = set(without), dict[str, list[ExecutionProfile]]()
    for name in list_profiles():
        if name == GENERIC or name in left_out:  # generic is derived from the others
            continue
        profile = load_profile(name)
        if profile.family:
            families.setdefault(profile.family, []).append(profile)
    return families


def can_have(profile: ExecutionProfile, name: str) -> bool:
    """Return whether the framework can run the plans to which this option applies."""
    return all(holds(profile.runs) for holds, names in _CONCERNS if name in names)


def family_weights(families: dict[str, list[ExecutionProfile]], generic: ExecutionProfile) -> Iterator[WeightedProfile]:
    """Yield the profiles of all families; each family has the same weight, divided evenly among its profiles.

    Options that are unknown, or that concern plans which the framework cannot run, have the values of `generic`: a framework without
    tensor parallelism has no information about its overlap.
    """
    for profiles in families.values():
        for profile in profiles:
            open_ = {*profile.unknown, *(name for _, names in _CONCERNS for name in names if not can_have(profile, name))}
            filled: dict[str, Any] = {name: generic.option(name) for name in open_}
            yield WeightedProfile(weight=1.0 / (len(families) * len(profiles)), profile=profile.having(**filled))


def points_about(covariance: Array) -> Iterator[tuple[float, Array]]:
    """Yield (weight, point) whose weighted sum is the expectation of f(x) to second order in f, for normal x with covariance L L':

    E f = f(0) + sum_j (f(L_j) + f(-L_j) - 2 f(0)) / 2,   L_j the columns of L.

    Source: Julier and Uhlmann, Proceedings of the IEEE 92 (2004), the unscented transformation with n + kappa = 1.
    """
    variances, axes = np.linalg.eigh(covariance)
    # a profile's file has rounded numbers: an eigenvalue near zero may be negative
    columns = np.linalg.cholesky((axes * np.maximum(variances, _LEAST)) @ axes.T).T
    yield 1.0 - len(columns), np.zeros(len(columns))
    for column in columns:
        yield 0.5, column
        yield 0.5, -column
