"""Framework ensembles: weighted profiles that an unknown framework may be, over which a step time is averaged.

A plan that needs what some frameworks have and others lack is a bet: at the mean of their habits it may be the fastest, and on average over
them it is not. So of an unknown framework plans are chosen by their mean time over the known families, each weighing one; of a profile that
was fitted to runs of one's own by their expectation over what these leave open.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.frameworks.fitted import FittedConstant
from perfmodel.frameworks.options import bounds_of
from perfmodel.frameworks.profile import GENERIC, ExecutionProfile, list_profiles, load_profile
from perfmodel.frameworks.runnable import Runs
from perfmodel.frameworks.settings import with_settings
from perfmodel.parallel.framework_ref import FrameworkRef

Array = NDArray[np.float64]


#: What fields concern of what a framework can run: an axis, or ZeRO stages, of a plan with a pipeline or of any. What pipelines keep
#: whole of what ZeRO shards is a doubt about the memory instead (`frameworks/memory_uncertainty.py`): one family alone runs that.
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
    (lambda runs: not {2, 3}.isdisjoint(runs.zero), ("reduces_each_microbatch",)),
    (lambda runs: 2 in runs.zero, ("zero2_stores_shards",)),
    (lambda runs: 0 in runs.zero_in_pipeline, ("pipeline_reduces_each_microbatch",)),
)  # fmt: skip

_LEAST = 1e-6
"""Variance of what is known exactly, in spreads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Likely:
    """weight   of its time in the expectation; those of all together are 1, that of the middle of a fit is negative"""

    weight: float
    profile: ExecutionProfile


def likely_profiles(profile: ExecutionProfile) -> tuple[Likely, ...]:
    """Profiles over which a step time is averaged: the known frameworks for an unknown one, with the stated settings; points one standard
    deviation around a fitted profile; none for a named framework."""
    if profile.fitted.num_runs:
        return tuple(_about(profile))
    return tuple(_known(profile)) if profile.known_as == GENERIC else ()


def known_families(*, without: Iterable[str] = ()) -> dict[str, list[ExecutionProfile]]:
    """Family -> its profiles, all but those left out."""
    left_out, families = set(without), dict[str, list[ExecutionProfile]]()
    for name in list_profiles():
        if name == GENERIC or name in left_out:  # the first is made of the others
            continue
        profile = load_profile(name)
        if profile.family:
            families.setdefault(profile.family, []).append(profile)
    return families


def can_have(profile: ExecutionProfile, name: str) -> bool:
    """Whether the framework runs what this habit concerns."""
    return all(holds(profile.runs) for holds, names in _CONCERNS if name in names)


def family_weights(families: dict[str, list[ExecutionProfile]], generic: ExecutionProfile) -> Iterator[Likely]:
    """Every family weighs one, and its profiles alike. What is not known of one, or concerns what it cannot run, is as in `generic`:
    who has no tensor parallelism does not say that nothing hides of it."""
    for profiles in families.values():
        for profile in profiles:
            open_ = {*profile.unknown, *(name for _, names in _CONCERNS for name in names if not can_have(profile, name))}
            filled: dict[str, Any] = {name: generic.option(name) for name in open_}
            yield Likely(weight=1.0 / (len(families) * len(profiles)), profile=profile.having(**filled))


def points_about(covariance: Array) -> Iterator[tuple[float, Array]]:
    """(weight, point) whose sum is the expectation of f(x), x normal about 0 with this covariance L L', to second order in f:

    E f = f(0) + sum_j (f(L_j) + f(-L_j) - 2 f(0)) / 2,   L_j the columns of L.

    Source: Julier and Uhlmann, Proceedings of the IEEE 92 (2004), the unscented transformation with n + kappa = 1.
    """
    variances, axes = np.linalg.eigh(covariance)
    # a profile's file rounds: what is next to nothing may come out below it
    columns = np.linalg.cholesky((axes * np.maximum(variances, _LEAST)) @ axes.T).T
    yield 1.0 - len(columns), np.zeros(len(columns))
    for column in columns:
        yield 0.5, column
        yield 0.5, -column


def _known(profile: ExecutionProfile) -> Iterator[Likely]:
    settings = FrameworkRef.parse(profile.name).settings
    for member in family_weights(known_families(), load_profile(GENERIC)):
        yield replace(member, profile=with_settings(member.profile, settings))


def _about(profile: ExecutionProfile) -> Iterator[Likely]:
    constants = profile.fitted.constants
    for weight, point in points_about(np.array(profile.fitted.covariance, dtype=np.float64)):
        moved: dict[str, Any] = {}
        for constant, spreads in zip(constants, point.tolist(), strict=True):
            moved |= _moved(profile, constant, spreads)
        yield Likely(weight=weight, profile=profile.having(**moved))


def _moved(profile: ExecutionProfile, constant: FittedConstant, spreads: float) -> dict[str, float]:
    """Fields of the constant so many spreads of its prior from where they are, as far as they may go."""
    step, values = spreads * constant.prior_spread, {}
    for name in constant.fields:
        value, (least, most) = float(profile.option(name)), bounds_of(name)
        values[name] = min(max(value * math.exp(step) if constant.is_ratio else value + step, least), most)
    return values
