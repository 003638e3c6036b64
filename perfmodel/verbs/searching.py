"""Search of a setting: the space of open knobs, the reason of an empty space, and the smallest changes that fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from perfmodel.foundation.errors import InputError, bad_field, shown
from perfmodel.foundation.memory_headroom import check_headroom
from perfmodel.foundation.values import check_progress, choice_of, read_integer, text_of
from perfmodel.foundation.words import words_of
from perfmodel.frameworks.profile import load_profile
from perfmodel.frameworks.settings import with_stated
from perfmodel.parallel.algebra.rules import check_agrees
from perfmodel.parallel.framework_ref import FrameworkRef, framework_named
from perfmodel.parallel.knobs import Knobs, bounded_knobs, choices_of
from perfmodel.planner.ties import TIES
from perfmodel.verbs.settable import small_loss
from perfmodel.verbs.setting import (
    Setting,
    annotated,
    make_setting,
    plan_in,
)
from perfmodel.verbs.training import check_objective, with_run_values

if TYPE_CHECKING:
    from perfmodel.cost.estimate import Estimator
    from perfmodel.parallel.choices import AttentionKernel
    from perfmodel.parallel.plan import Plan
    from perfmodel.parallel.prediction import Prediction
    from perfmodel.planner.remedies import RemedyConditions
    from perfmodel.planner.result import FittingChange, SearchResult
    from perfmodel.planner.uniform.space import Space
    from perfmodel.verbs.training import AskedRun

Also = Literal["remedies", "beyond", "baselines", "front", "exhaustive"]
#: Additional results of an interactive search.
ALSO: tuple[Also, ...] = ("remedies", "beyond", "baselines", "front")


def search_in(
    setting: Setting,
    knobs: Knobs,
    maximum: Mapping[str, int],
    *,
    objective: str = "time",
    run: AskedRun | None = None,
    top: int = 10,
    memory_headroom: float | None = None,
    risk: float | None = None,
    ties: float = TIES,
    any_framework: bool = False,
    also: tuple[Also, ...] = ALSO,
    progress: Callable[[float], bool | None] | None = None,
) -> SearchResult:
    """Search a setting; see `find_plans`.

    run    the training run, which some objectives are of
    also   remedies: the smallest changes that fit, if no plan does; beyond: the best plan that the framework cannot run; baselines and
           front of `search_plans`; exhaustive: every plan is evaluated, also those that cannot win
    """
    from perfmodel.frameworks.ensemble import framework_ensemble
    from perfmodel.planner.beyond import beyond_framework
    from perfmodel.planner.result import Objective
    from perfmodel.planner.uniform.tables import KeptTables

    check_headroom(memory_headroom)
    objective = choice_of(Objective, text_of(objective, "objective", ", ".join(Objective)), "objective")
    check_progress(progress)
    check_objective(objective, setting, run)
    top = read_integer(top, "top")
    space, attention = space_in(setting, knobs, maximum, any_framework=any_framework)
    space = replace(space, is_pruned="exhaustive" not in also)
    asked: dict[str, Any] = {
        "objective": objective,
        "top": top,
        "memory_headroom": memory_headroom,
        "risk": risk,
        "ties": ties,
        "attention": attention,
        "progress": progress,
    }
    kept_tables = KeptTables(keeps_microbatches=True, spaces=setting.kept_spaces)
    if setting.cluster.pools:
        from perfmodel.cost.mixed import mixed_estimator
        from perfmodel.planner.mixed import search_mixed

        result = search_mixed(mixed_estimator(setting.estimator), space, **asked)
    else:
        from perfmodel.planner.search import search_plans

        ensemble = framework_ensemble(setting.estimator.profile) if ties else ()
        wanted = {"baselines", *also} if ties else {*also}  # a baseline may be the best among the ties
        result = search_plans(setting.estimator, space, ensemble=ensemble, kept_tables=kept_tables, also=wanted, **asked)
    if not (result.num_evaluated or result.interrupted):
        raise InputError(_why_empty(setting, knobs, result, any_framework=any_framework))
    if "beyond" in also and not (any_framework or result.interrupted or setting.cluster.pools):
        least = result.least_time
        if result.objective is Objective.MEMORY:  # a lower bound of the memory of every plan that fits [byte]
            least = result.plans[0].memory["total"] / (1.0 + result.ranking.ties) if result.plans else math.inf
        beyond = beyond_framework(
            setting.estimator,
            space,
            best=result.plans[:1],
            least=least,
            objective=result.objective,
            memory_headroom=memory_headroom,
            risk=risk,
            attention=attention,
            kept_tables=kept_tables,
        )
        result = replace(result, any_framework=beyond)

    if "remedies" in also and not (result.plans or result.interrupted):
        remedies = search_remedies(setting, knobs, maximum, memory_headroom=memory_headroom, risk=risk, any_framework=any_framework)
        result = replace(result, remedies=remedies)

    def named(predictions: tuple[Prediction, ...]) -> tuple[Prediction, ...]:
        return tuple(annotated(prediction, setting) for prediction in predictions)

    kinds = tuple(replace(kind, prediction=named((kind.prediction,))[0]) for kind in result.ranking.kinds)
    result = replace(
        result,
        plans=named(result.plans),
        ranking=replace(result.ranking, kinds=kinds),
        pareto=named(result.pareto),
        least_memory=named(result.least_memory),
        baselines=tuple(replace(baseline, prediction=named(baseline.prediction)) for baseline in result.baselines),
        any_framework=named(result.any_framework),
        certainty=tuple(replace(alternative, prediction=named(alternative.prediction)) for alternative in result.certainty),
    )
    return with_run_values(result, setting, run)


def space_in(setting: Setting, knobs: Knobs, maximum: Mapping[str, int], *, any_framework: bool = False) -> tuple[Space, AttentionKernel]:
    """Return the part of the space that the knobs leave and the framework can run, and the attention kernel.

    any_framework   include plans that the framework cannot run
    """
    from perfmodel.parallel.choices import ZERO_STAGES, AttentionKernel, module_operators, useful_modules
    from perfmodel.parallel.plan import DEFAULT_RECOMPUTE_OPERATORS, check_expert_knobs
    from perfmodel.parallel.schedule_table import ScheduleTable
    from perfmodel.planner.uniform.space import SEARCHED_ORDERS, Space, runnable_space, searched_rules

    if not isinstance(maximum, Mapping):
        raise bad_field("maximum", shown(maximum), "must name knobs and their largest values", 'write {"tp": 8}')
    fixed = knobs.searched()
    check_expert_knobs(fixed, setting.job)
    attention = choice_of(AttentionKernel, fixed.pop("attention", setting.estimator.profile.kernels.default_attention), "attention")
    order = fixed.pop("order", None)
    modules = fixed.pop("recompute_modules", None)
    profile = setting.estimator.profile
    rules = fixed.pop("rules", ())
    sequence_parallel = fixed.get("sequence_parallel")
    if sequence_parallel is not None and rules and all(rule_set.scatters_residual is not sequence_parallel for rule_set in rules):
        check_agrees(rules[0], sequence_parallel)
    if isinstance(fixed.get("schedule"), ScheduleTable):
        rule = f"is the order of {fixed['schedule'].num_ranks} ranks and {fixed['schedule'].num_microbatches} micro-batches only"
        raise bad_field("schedule", str(fixed["schedule"]), rule, "search with schedules by name, and give the file to `perfmodel predict`")
    fixed |= {name: str(choice_of(kind, fixed[name], name)) for name, kind in choices_of().items() if name in fixed}
    if fixed.get("zero", 0) not in ZERO_STAGES:
        raise InputError(f"zero={fixed['zero']}: must be 0, 1, 2 or 3; use 3 for FSDP")
    known = words_of(Knobs)
    words = [name for name in maximum if name in known and name not in bounded_knobs()]
    if words:
        raise bad_field("maximum", words[0], "has no largest value", f"fix it: {words[0]}=...")
    maximum = {
        name: known[name].value(value, f"max_{name}") if name in known else read_integer(value, f"max_{name}")
        for name, value in maximum.items()
    }
    orders = SEARCHED_ORDERS if order is None else (order,)
    operators = DEFAULT_RECOMPUTE_OPERATORS if modules is None else module_operators(modules)
    runs = profile.runs
    tries_lists = runs.recompute_modules and "recompute" not in fixed and attention is AttentionKernel.FLASH
    space = Space(
        fixed=fixed,
        maximum=dict(maximum),
        orders=orders,
        rules=rules or searched_rules(profile, setting.job.seq_len),
        recompute_operators=operators,
        lists=tuple(map(module_operators, useful_modules(setting.job.transformer))) if tries_lists else (),
        dispatchers=runs.dispatchers(setting.cluster.chip.name),
    )
    return space if any_framework else runnable_space(space, profile, setting.job), attention


def check_frameworks(*, only_runnable: bool, any_framework: bool) -> None:
    if only_runnable and any_framework:
        raise bad_field("any_framework", "true", "contradicts only_runnable=true", "leave one of them out")


def _why_empty(setting: Setting, knobs: Knobs, result: SearchResult, *, any_framework: bool) -> str:
    """Return the reason of an empty space: the rule that the given knobs violate by themselves, else the rules that exclude all layouts."""
    if knobs.dp_replicate and not (knobs.dp_shard or knobs.zero or knobs.dp or knobs.fsdp):
        # a search leaves the remaining degrees open; a single plan must assign them
        given = knobs.dp_replicate * (knobs.pp or 1) * (knobs.cp or 1) * (knobs.tp or 1)
        knobs = replace(knobs, dp_shard=max(setting.cluster.num_chips // given, 1))
    if knobs.rules:
        knobs = replace(knobs, rules=knobs.rules[:1])
    try:
        plan = plan_in(setting, knobs)
    except InputError as error:
        return f"no plan with these knobs: {error}"
    from perfmodel.planner.reasons import NOT_RUN

    profile = setting.estimator.profile
    reason = "" if any_framework else profile.not_runnable_reason(plan)
    if reason:
        return f"{reason}; free that knob, name another --framework, or add --any-framework"
    if NOT_RUN in result.left_out:
        return f"no plan with these knobs is one that {framework_named(profile.name)} can run; free a knob, or add --any-framework"
    rules = [reason for reason in result.left_out if reason != "excluded by a given flag"]
    return f"no plan with these knobs: {'; '.join(rules[:3]) or 'the bounds exclude every layout'}; free a knob or change the chips"


def remedies_in(
    setting: Setting,
    plan: Plan,
    *,
    memory_headroom: float | None = None,
    risk: float | None = None,
    any_framework: bool = False,
) -> tuple[FittingChange, ...]:
    """Return the smallest changes with which a plan that does not fit would fit."""
    from perfmodel.planner.remedies import remedies_of_plan

    changes = remedies_of_plan(_asked(setting, memory_headroom, risk, any_framework), plan)
    return tuple(replace(change, prediction=annotated(change.prediction, setting)) for change in changes)


def search_remedies(
    setting: Setting,
    knobs: Knobs,
    maximum: Mapping[str, int],
    *,
    memory_headroom: float | None = None,
    risk: float | None = None,
    any_framework: bool = False,
) -> tuple[FittingChange, ...]:
    """Return the smallest changes with which some plan of a search would fit, if none does."""
    from perfmodel.planner.remedies import remedies_of_search

    space, attention = space_in(setting, knobs, maximum, any_framework=any_framework)
    changes = remedies_of_search(_asked(setting, memory_headroom, risk, any_framework), space, attention)
    return tuple(replace(change, prediction=annotated(change.prediction, setting)) for change in changes)


def _asked(setting: Setting, memory_headroom: float | None, risk: float | None, any_framework: bool) -> RemedyConditions:
    from perfmodel.planner.remedies import RemedyConditions

    def make(seq_len: int, chips: int) -> Estimator:
        larger = make_setting(
            replace(setting.job, seq_len=seq_len),
            setting.cluster.with_chips(chips),
            calibration=setting.calibration or None,
            profile=setting.estimator.profile,
        )
        return larger.estimator

    def with_settings(settings: Mapping[str, bool | str]) -> RemedyConditions | None:
        ref = FrameworkRef.parse(setting.estimator.profile.name)
        if settings.keys() & ref.settings.keys():
            return None
        profile = with_stated(load_profile(ref.name), {**ref.settings, **settings})
        changed = make_setting(setting.job, setting.cluster, calibration=setting.calibration or None, profile=profile)
        return _asked(changed, memory_headroom, risk, any_framework)

    return RemedyConditions(
        estimator=setting.estimator,
        make=make,
        with_settings=with_settings,
        small_loss=small_loss(setting.estimator.profile),
        memory_headroom=memory_headroom,
        risk=risk,
        any_framework=any_framework,
    )
