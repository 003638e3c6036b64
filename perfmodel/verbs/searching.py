"""Searching a setting: the space that the knobs leave, why it may be empty, and how many chips would be enough."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from perfmodel.foundation.errors import InputError, bad_field, shown
from perfmodel.foundation.memory_room import DEFAULT_HEADROOM, check_headroom
from perfmodel.foundation.values import choice_of, text_of, whole
from perfmodel.foundation.words import words_of
from perfmodel.parallel.algebra.rules import check_agrees
from perfmodel.parallel.knobs import Knobs, bounded_knobs, choices_of
from perfmodel.planner.ties import TIES
from perfmodel.verbs.setting import (
    Setting,
    make_setting,
    plan_in,
    told,
)

if TYPE_CHECKING:
    from perfmodel.parallel.algebra.rules import RuleSet
    from perfmodel.parallel.layout import AttentionKernel
    from perfmodel.parallel.prediction import Prediction
    from perfmodel.planner.result import SearchResult
    from perfmodel.planner.uniform.space import Space


def search_in(
    setting: Setting,
    knobs: Knobs,
    maximum: Mapping[str, int],
    *,
    objective: str = "time",
    top: int = 10,
    memory_headroom: float = DEFAULT_HEADROOM,
    risk: float | None = None,
    ties: float = TIES,
    only_runnable: bool = False,
    progress: Callable[[float], bool | None] | None = None,
) -> SearchResult:
    """Search a setting; see `find_plans`."""
    from perfmodel.parallel.likely import likely_profiles
    from perfmodel.planner.search import search_plans

    check_headroom(memory_headroom)
    text_of(objective, "objective", "time, memory or chip-time")
    if progress is not None and not callable(progress):
        raise bad_field("progress", shown(progress), "must be a function of the share that is done", "leave it out")
    top = whole(top, "top")
    space, attention = space_in(setting, knobs, maximum)
    if only_runnable:
        space = what_runs(space, setting)
    result = search_plans(
        setting.estimator,
        space,
        objective=objective,
        top=top,
        memory_headroom=memory_headroom,
        risk=risk,
        ties=ties,
        attention=attention,
        likely=likely_profiles(setting.estimator.profile) if ties else (),
        progress=progress,
    )
    if not (result.num_evaluated or result.interrupted):
        raise InputError(_why_empty(setting, knobs, result))

    def named(predictions: tuple[Prediction, ...]) -> tuple[Prediction, ...]:
        return tuple(told(each, setting) for each in predictions)

    return replace(
        result,
        plans=named(result.plans),
        kinds=tuple(replace(each, prediction=named((each.prediction,))[0]) for each in result.kinds),
        pareto=named(result.pareto),
        least_memory=named(result.least_memory),
        baselines=tuple(replace(each, prediction=named(each.prediction)) for each in result.baselines),
        certainty=tuple(replace(each, prediction=named(each.prediction)) for each in result.certainty),
    )


def space_in(setting: Setting, knobs: Knobs, maximum: Mapping[str, int]) -> tuple[Space, AttentionKernel]:
    """The part of the space that the knobs leave, and the attention kernel."""
    from perfmodel.parallel.layout import ZERO_STAGES, AttentionKernel
    from perfmodel.parallel.plan import DEFAULT_RECOMPUTE_OPERATORS
    from perfmodel.parallel.recompute_modules import operators_of, useful_lists
    from perfmodel.planner.uniform.space import SEARCHED_ORDERS, Space

    if not isinstance(maximum, Mapping):
        raise bad_field("maximum", shown(maximum), "must name knobs and their largest values", 'write {"tp": 8}')
    fixed = knobs.searched()
    attention = choice_of(AttentionKernel, fixed.pop("attention", setting.estimator.profile.default_attention), "attention")
    order = fixed.pop("order", None)
    modules = fixed.pop("recompute_modules", None)
    rules = fixed.pop("rules", ())
    _check_rules(rules, fixed.get("sequence_parallel"))
    fixed |= {name: str(choice_of(kind, fixed[name], name)) for name, kind in choices_of().items() if name in fixed}
    if fixed.get("zero", 0) not in ZERO_STAGES:
        raise InputError(f"zero={fixed['zero']}: must be 0, 1, 2 or 3; use 3 for FSDP")
    known = words_of(Knobs)
    words = [name for name in maximum if name in known and name not in bounded_knobs()]
    if words:
        raise bad_field("maximum", words[0], "has no largest value", f"fix it: {words[0]}=...")
    maximum = {name: known[name].value(value, name) if name in known else whole(value, name) for name, value in maximum.items()}
    orders = SEARCHED_ORDERS if order is None else (order,)
    operators = DEFAULT_RECOMPUTE_OPERATORS if modules is None else operators_of(modules)
    runs = setting.estimator.profile.runs
    tries_lists = runs.recompute_modules and "recompute" not in fixed and attention is AttentionKernel.FLASH
    space = Space(
        fixed=fixed,
        maximum=dict(maximum),
        orders=orders,
        rules=rules,
        recompute_operators=operators,
        lists=tuple(map(operators_of, useful_lists(setting.job.transformer))) if tries_lists else (),
        dispatchers=runs.dispatchers(setting.cluster.chip.name),
    )
    return space, attention


def _check_rules(rules: tuple[RuleSet, ...], sequence_parallel: bool | None) -> None:
    """Refuse a switch that none of the rule sets agrees with."""
    if sequence_parallel is not None and rules and all(each.scatters_residual is not sequence_parallel for each in rules):
        check_agrees(rules[0], sequence_parallel)


def what_runs(space: Space, setting: Setting) -> Space:
    """Of the space what the assumed framework can run."""
    from perfmodel.parallel.profile import HEAD_TAIL

    profile = setting.estimator.profile
    return replace(space, runs=profile.runs, balanced_context=profile.context_chunks == HEAD_TAIL)


def _why_empty(setting: Setting, knobs: Knobs, result: SearchResult) -> str:
    """The rule that leaves no plan at all: the one that the given knobs break by themselves, else what left the layouts out."""
    if knobs.dp_replicate and not (knobs.dp_shard or knobs.zero or knobs.dp or knobs.fsdp):
        # what the degrees leave is free in a search; a single plan would have to say where it goes
        given = knobs.dp_replicate * (knobs.pp or 1) * (knobs.cp or 1) * (knobs.tp or 1)
        knobs = replace(knobs, dp_shard=max(setting.cluster.num_chips // given, 1))
    if knobs.rules:
        knobs = replace(knobs, rules=knobs.rules[:1])
    try:
        plan_in(setting, knobs)
    except InputError as error:
        return f"no plan with these knobs: {error}"
    rules = [reason for reason in result.left_out if reason != "excluded by a given flag"]
    return f"no plan with these knobs: {'; '.join(rules[:3]) or 'the bounds exclude every layout'}; free a knob or change the chips"


def least_chips_that_fit(
    setting: Setting, knobs: Knobs, maximum: Mapping[str, int], *, memory_headroom: float = DEFAULT_HEADROOM, risk: float | None = None
) -> int:
    """The chips that would be enough, doubling them up to eight times; 0 where no such number is."""
    from perfmodel.planner.search import sweep

    fixed = knobs.searched()
    data = ("dp",) if "dp" in fixed else ("dp_replicate", "dp_shard")
    degrees = [fixed.get(axis) for axis in (*data, "cp", "tp", "pp")]
    given = math.prod(degree or 1 for degree in degrees)
    chips = setting.cluster.num_chips
    for _ in range(8):
        chips *= 2
        if chips % given:
            continue  # no plan has these degrees on so many chips
        if chips > setting.cluster.tiers[-1].size or all(degrees):  # all given: their product is the number of chips
            return 0
        larger = make_setting(
            setting.job,
            setting.cluster.with_chips(chips),
            calibration=setting.calibration or None,
            profile=setting.estimator.profile,
        )
        space, attention = space_in(larger, knobs, maximum)
        first = replace(space, orders=space.orders[:1])  # memory does not depend on where the axes lie
        if sweep(larger.estimator, first, top=1, memory_headroom=memory_headroom, risk=risk, attention=attention).num_feasible:
            return chips
    return 0
