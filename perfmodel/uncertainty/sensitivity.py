"""Most sensitive parameters of a prediction: the change of the step time with each parameter ten percent larger."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType

import numpy as np

from perfmodel.cost.assemble import step_columns
from perfmodel.cost.estimate import Estimator, with_long_attention, with_rates_of
from perfmodel.cost.link_rates import LINK_ROWS, LinkRates, tier_kind
from perfmodel.cost.machine import Machine
from perfmodel.cost.mixed import MixedEstimator, mixed_step_time
from perfmodel.cost.programs import Compiled
from perfmodel.cost.update import element_bytes
from perfmodel.frameworks.options import RateOptions
from perfmodel.frameworks.profile import ExecutionProfile
from perfmodel.hardware.calibration import SCALE_OUT, SCALE_UP
from perfmodel.hardware.cluster import Cluster
from perfmodel.parallel.plan import Plan

STEP = 0.1
"""Relative increase of a parameter."""

NUM_NAMED = 3

_BANDWIDTHS = ("inverse_bandwidth", "in_switch")
_LATENCIES = ("base", "hop", "tree", "one_shot", "inner_hop")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """Relative change of the step time with a parameter `STEP` larger. part: of the calibration, or `profile`."""

    parameter: str
    change: float
    rests_on: str
    part: str = ""


def sensitivities(estimator: Estimator, plan: Plan, *, most: int = NUM_NAMED) -> tuple[Sensitivity, ...]:
    """Return the parameters that change the step time most, the largest change first; one without an effect is left out."""
    base = _step_time(estimator, plan)
    sensitivities_found = []
    for name, (source, change) in _PARAMETERS.items():
        changed = _of_each_pool(estimator, change)
        if changed is not None:
            share, parts = _step_time(changed, plan) / base - 1.0, estimator.machine.basis.parts
            rests_on = f"profile: {estimator.profile.name}" if source == "profile" else parts.get(source, "spec sheet")
            sensitivities_found.append(Sensitivity(parameter=name, change=share, rests_on=rests_on, part=source))
    ordered = sorted(sensitivities_found, key=lambda sensitivity: -abs(sensitivity.change))
    return tuple(sensitivity for sensitivity in ordered[:most] if abs(sensitivity.change) > _NOTHING)


_NOTHING = 1e-6


def log_change(estimator: Estimator, plan: Plan, profile: ExecutionProfile) -> float:
    """Return the change of log(step time) with another profile in place of the estimator's."""
    changed = _of_each_pool(estimator, lambda of_pool: at_profile(of_pool, profile))
    assert changed is not None
    return math.log(_step_time(changed, plan) / _step_time(estimator, plan))


def _step_time(estimator: Estimator, plan: Plan) -> float:
    """Return the step time of the plan's prediction, without computing its memory. [s]"""
    if isinstance(estimator, MixedEstimator):
        return mixed_step_time(estimator, plan)
    return float(step_columns(estimator, [plan]).step_time[0])


def _of_each_pool(estimator: Estimator, change: Callable[[Estimator], Estimator | None]) -> Estimator | None:
    """Return the estimator with a change, of several kinds of chips with the change of each kind; None if there is nothing to change."""
    if not isinstance(estimator, MixedEstimator):
        return change(estimator)
    pools, joined = ([changed for of in group if (changed := change(of)) is not None] for group in (estimator.pools, estimator.joined))
    if len(pools) < len(estimator.pools):
        return None
    of = pools[0]
    return replace(estimator, machine=of.machine, profile=of.profile, programs=of.programs, pools=tuple(pools), joined=tuple(joined))


def fitted_slopes(estimator: Estimator, plan: Plan) -> tuple[float, ...]:
    """Return the derivative of log(step time) by each fitted constant, per standard deviation of its prior; empty for shipped profiles."""
    profile, slopes = estimator.profile, []
    for constant in profile.fitted.constants:
        spreads, step = _DIFFERENCE, _DIFFERENCE * constant.prior_spread
        if constant.is_ratio:
            moved = {name: profile.option(name) * math.exp(step) for name in constant.fields}
        else:
            name = constant.fields[0]
            if name in _SHARES and profile.option(name) + step > 1.0:
                spreads, step = -spreads, -step
            moved = {name: float(profile.option(name)) + step}
        slopes.append(log_change(estimator, plan, profile.having(**moved)) / spreads)
    return tuple(slopes)


_DIFFERENCE = 0.2
"""Step of a difference quotient, in standard deviations of the constant."""


def at_profile(estimator: Estimator, profile: ExecutionProfile) -> Estimator:
    """Return the estimator with another profile: the rates of its machine are scaled by the ratio of the two profiles. For times alone."""
    base_profile, fused_attention = estimator.profile, estimator.machine.fused_attention
    generations = fused_attention.generations
    ratios = {rate.name: getattr(profile.rates, rate.name) / getattr(base_profile.rates, rate.name) for rate in fields(RateOptions)}
    ratios["attention_rate_fraction"] *= generations.get(profile.kernels.attention_kernel, 1.0) / generations.get(
        base_profile.kernels.attention_kernel, 1.0
    )
    of_one_generation = replace(estimator.machine, fused_attention=replace(fused_attention, generations={}))
    machine = with_rates_of(profile.having(**ratios), of_one_generation)
    return _with_profile(replace(estimator, machine=with_long_attention(profile, machine)), profile)


def _machine_change(change: Callable[[Machine, Cluster], Machine]) -> Callable[[Estimator], Estimator | None]:
    """Return the change of an estimator to the same programs on another machine."""
    return lambda estimator: replace(estimator, machine=change(estimator.machine, estimator.cluster))


def _profile_change(*names: str) -> Callable[[Estimator], Estimator | None]:
    """Return the change of an estimator to larger profile fields, shares at most 1; None if all of them are 0."""

    def change(estimator: Estimator) -> Estimator | None:
        profile = estimator.profile
        values = {name: profile.option(name) for name in names}
        if not any(values.values()):
            return None
        larger = {name: min(value * (1.0 + STEP), 1.0) if name in _SHARES else value * (1.0 + STEP) for name, value in values.items()}
        return _with_profile(estimator, profile.having(**larger))

    return change


#: Fields that are shares, at most 1.
_SHARES = frozenset({
    "exposed_gradient_fraction", "exposed_scatter_fraction", "tp_overlap_fraction", "tp_backward_overlap_fraction", "uneven_stage_weight",
})  # fmt: skip


def _with_profile(estimator: Estimator, profile: ExecutionProfile) -> Estimator:
    """Return the estimator with the profile, for times alone.

    Programs depend on the profile: they are compiled again if its compiled options change. Their graphs do not depend on it.
    """
    sizes = element_bytes(estimator.job.policy, estimator.job.optimizer, profile, estimator.programs.sizes.optimizer.projection)
    programs = replace(estimator.programs, profile=profile, sizes=sizes)
    if profile.compiled != estimator.profile.compiled:
        programs = replace(programs, recomputes=(), compiled=Compiled(graphs=programs.compiled.graphs))
    return replace(estimator, profile=profile, programs=programs)


def _faster_matmul(machine: Machine, _: Cluster) -> Machine:
    matmul = replace(machine.matmul, flop_rate=machine.matmul.flop_rate * (1.0 + STEP))
    convolution = machine.convolution
    if convolution is not None:
        convolution = replace(convolution, flop_rate=convolution.flop_rate * (1.0 + STEP))
    return replace(machine, matmul=matmul, convolution=convolution)


def _faster_attention(machine: Machine, _: Cluster) -> Machine:
    kernels = {name: replace(rates, flop_rate=rates.flop_rate * (1.0 + STEP)) for name, rates in machine.attention.items()}
    return replace(machine, attention=MappingProxyType(kernels))


def _faster_memory(machine: Machine, _: Cluster) -> Machine:
    """Raise the memory bandwidth of every kernel: streaming, and operands of matrix multiplies and of attention."""
    kernels = {name: replace(rates, bandwidth=rates.bandwidth * (1.0 + STEP)) for name, rates in machine.attention.items()}
    table = machine.streaming.table * np.array([[1.0], [1.0 / (1.0 + STEP)], [1.0]])
    caches = tuple(cache * np.array([[1.0], [1.0 / (1.0 + STEP)]]) for cache in machine.streaming.caches)
    return replace(
        machine,
        memory=replace(machine.memory, bandwidth=machine.memory.bandwidth * (1.0 + STEP)),
        streaming=replace(machine.streaming, table=table, caches=caches),
        matmul=replace(machine.matmul, bandwidth=machine.matmul.bandwidth * (1.0 + STEP)),
        attention=MappingProxyType(kernels),
    )


def _links(kind: str, rows: tuple[str, ...], factor: float) -> Callable[[Machine, Cluster], Machine]:
    """Scale rows of the link table by `factor`, on the tiers of one kind."""

    def change(machine: Machine, cluster: Cluster) -> Machine:
        table = machine.links.table.copy()
        tiers = [index for index, tier in enumerate(cluster.tiers) if tier_kind(cluster, tier) == kind]
        for row in rows:
            table[LINK_ROWS.index(row), tiers] *= factor
        links: LinkRates = replace(machine.links, table=table)
        return replace(machine, links=links)

    return change


def _slower_host(machine: Machine, _: Cluster) -> Machine:
    times = {name: time * (1.0 + STEP) for name, time in machine.host.times.items()}
    return replace(machine, host=replace(machine.host, launch_time=machine.host.launch_time * (1.0 + STEP), times=MappingProxyType(times)))


#: Name -> (basis: a part of the calibration, or the profile; change of the estimator to a parameter `STEP` larger).
_PARAMETERS: Mapping[str, tuple[str, Callable[[Estimator], Estimator | None]]] = {
    "rate of matrix multiplies (sustained clock)": ("matmul", _machine_change(_faster_matmul)),
    "rate of attention": ("attention", _machine_change(_faster_attention)),
    "memory bandwidth": ("streaming", _machine_change(_faster_memory)),
    "link bandwidth inside the node": (SCALE_UP, _machine_change(_links(SCALE_UP, _BANDWIDTHS, 1.0 / (1.0 + STEP)))),
    "link bandwidth between nodes": (SCALE_OUT, _machine_change(_links(SCALE_OUT, _BANDWIDTHS, 1.0 / (1.0 + STEP)))),
    "link latency inside the node": (SCALE_UP, _machine_change(_links(SCALE_UP, _LATENCIES, 1.0 + STEP))),
    "link latency between nodes": (SCALE_OUT, _machine_change(_links(SCALE_OUT, _LATENCIES, 1.0 + STEP))),
    "launch and host times of operators": ("streaming", _machine_change(_slower_host)),
    "host time of launches": ("profile", _profile_change("host_launch_time", "host_layer_time_per_tp_across_nodes")),
    "step constant": ("profile", _profile_change("step_time_constant")),
    "traffic of norms and rotary embeddings": ("profile", _profile_change("rms_norm_traffic", "rotary_traffic")),
    "share of the gradient reduction that shows": ("profile", _profile_change("exposed_gradient_fraction", "exposed_scatter_fraction")),
    "time of parameters' gathers after the step": ("profile", _profile_change("publish_factor")),
    "tensor-parallel communication that hides": ("profile", _profile_change("tp_overlap_fraction", "tp_backward_overlap_fraction")),
    "slow-down of compute during communication": ("profile", _profile_change("compute_slowdown_under_communication")),
    "weight of the slowest stage": ("profile", _profile_change("uneven_stage_weight")),
}
"""Equivalent parameters (tiles, ramps, offsets) are left out: these are the ones that a user can measure or buy."""
