"""Searches for training plans and plans of a service: spaces of open knobs, reasons of empty ones, and the smallest changes that fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

from perfmodel.foundation.errors import InputError, bad_field, shown
from perfmodel.foundation.memory_headroom import check_headroom
from perfmodel.foundation.values import check_progress, choice_of, read_integer, several, share, text_of
from perfmodel.foundation.words import Words, read_words, takes, words_of
from perfmodel.frameworks.profile import load_profile
from perfmodel.frameworks.runnable import not_runnable_reason
from perfmodel.frameworks.settings import with_stated
from perfmodel.parallel.algebra.rules import check_agrees
from perfmodel.parallel.compression import NO_COMPRESSION, check_compression, compression_of
from perfmodel.parallel.framework_ref import FrameworkRef, framework_named
from perfmodel.parallel.knobs import Knobs, bounded_knobs, choices_of
from perfmodel.parallel.request import Service
from perfmodel.parallel.schedule_table import FILE, ScheduleTable
from perfmodel.parallel.serving_plan import COLUMNS
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
    from perfmodel.planner.result import FittingChange, RankedPlan, ServingSearch, TrainingSearch
    from perfmodel.planner.serving.search import NothingFoundError, ServingPlans
    from perfmodel.planner.serving.space import Format, ServingSpace
    from perfmodel.planner.uniform.space import Space
    from perfmodel.verbs.serving_setting import ServingSetting
    from perfmodel.verbs.training import AskedRun
    from perfmodel.workload.serving import ServingJob

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
) -> TrainingSearch:
    """Search a setting; see `find_plans`.

    run    the training run, which some objectives are of
    also   remedies: the smallest changes that fit, if no plan does; beyond: the best plan that the framework cannot run; baselines and
           front of `UniformPlans`; exhaustive: every plan is evaluated, also those that cannot win
    """
    from perfmodel.frameworks.ensemble import framework_ensemble
    from perfmodel.planner.result import Objective
    from perfmodel.planner.search import search
    from perfmodel.planner.uniform.search import UniformPlans
    from perfmodel.planner.uniform.tables import KeptTables

    check_headroom(memory_headroom)
    objective = choice_of(Objective, text_of(objective, "objective", ", ".join(Objective)), "objective")
    check_progress(progress)
    check_objective(objective, setting, run)
    top = read_integer(top, "top")
    space, attention = space_in(setting, knobs, maximum, any_framework=any_framework)
    wanted = {*also} - ({"beyond"} if any_framework else set())
    plans = UniformPlans(
        estimator=setting.estimator,
        space=replace(space, is_pruned="exhaustive" not in also),
        objective=objective,
        memory_headroom=memory_headroom,
        risk=risk,
        ties=ties,
        attention=attention,
        also=wanted | {"baselines"} if ties else wanted,  # a baseline may be the best among the ties
        ensemble=framework_ensemble(setting.estimator.profile) if ties and not setting.cluster.pools else (),
        progress=progress,
        kept_tables=KeptTables(keeps_microbatches=True, spaces=setting.kept_spaces),
    )
    if setting.cluster.pools:
        from perfmodel.planner.mixed import MixedPlans

        result = search(MixedPlans(uniform=plans), top=top)
    else:
        result = search(plans, top=top)
    if not (result.num_evaluated or result.interrupted):
        raise InputError(_why_empty(setting, knobs, result, any_framework=any_framework))
    if "remedies" in also and not (result.plans or result.interrupted):
        from perfmodel.planner.remedies import remedies_of_search

        remedies = remedies_of_search(_asked(setting, memory_headroom, risk, any_framework), space, attention)
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
        baselines=tuple(replace(baseline, plans=named(baseline.plans)) for baseline in result.baselines),
        any_framework=named(result.any_framework),
        certainty=tuple(replace(alternative, prediction=named(alternative.prediction)) for alternative in result.certainty),
        remedies=tuple(replace(change, prediction=annotated(change.prediction, setting)) for change in result.remedies),
    )
    return with_run_values(result, setting, run)


def space_in(setting: Setting, knobs: Knobs, maximum: Mapping[str, int], *, any_framework: bool = False) -> tuple[Space, AttentionKernel]:
    """Return the part of the space that the knobs leave and the framework can run, and the attention kernel.

    any_framework   include plans that the framework cannot run
    """
    from perfmodel.parallel.choices import ZERO_STAGES, AttentionKernel, module_operators, useful_modules
    from perfmodel.parallel.plan import DEFAULT_RECOMPUTE_OPERATORS, check_expert_knobs
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
    table = fixed.pop("schedule", None) if isinstance(fixed.get("schedule"), ScheduleTable) else None
    fixed |= {name: str(choice_of(kind, fixed[name], name)) for name, kind in choices_of().items() if name in fixed}
    if table is not None:  # the order of one number of ranks and of stages on each
        for name, value in (("pp", table.num_ranks), ("virtual_stages", table.num_chunks)):
            if fixed.setdefault(name, value) != value:
                raise bad_field(name, fixed[name], f"schedule={table} has {name}={value}", f"leave out {name}, or use schedules by name")
        fixed["schedule"] = FILE
    if fixed.get("zero", 0) not in ZERO_STAGES:
        raise InputError(f"zero={fixed['zero']}: must be 0, 1, 2 or 3; use 3 for FSDP")
    compression = compression_of(profile.communication.gradient_compression)
    if compression != NO_COMPRESSION:
        check_compression(compression, zero=int(fixed.get("zero", 0)), has_experts=setting.job.transformer.parts.experts is not None)
        reason = "" if any_framework else profile.runs.no_compression_reason(compression, framework_named(profile.name))
        if reason:
            raise InputError(f"{reason}; leave it out, name another --framework, or add --any-framework")
        fixed["zero"] = 0
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
        table=table,
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


def _why_empty(setting: Setting, knobs: Knobs, result: TrainingSearch, *, any_framework: bool) -> str:
    """Return the reason of an empty space: the rule that the given knobs violate by themselves, else the rules that exclude all layouts."""
    if knobs.dp_replicate and not (knobs.dp_shard or knobs.zero or knobs.dp or knobs.fsdp):
        # a search leaves the remaining degrees open; a single plan must assign them
        given = knobs.dp_replicate * (knobs.pp or 1) * (knobs.cp or 1) * (knobs.tp or 1)
        knobs = replace(knobs, dp_shard=max(setting.cluster.num_chips // given, 1))
    if knobs.rules:
        knobs = replace(knobs, rules=knobs.rules[:1])
    if isinstance(knobs.schedule, ScheduleTable):
        knobs = replace(knobs, pp=knobs.schedule.num_ranks, virtual_stages=knobs.schedule.num_chunks)
    try:
        plan = plan_in(setting, knobs)
    except InputError as error:
        return f"no plan with these knobs: {error}"
    from perfmodel.planner.reasons import NOT_RUN

    profile = setting.estimator.profile
    reason = "" if any_framework else not_runnable_reason(plan, profile)
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


# --- plans of a service ----------------------------------------------------------------------------------------------


@takes(service=Words(Service, needed="model cluster input_len output_len"))
def find_serving(
    *,
    service: Service,
    ttft: float | str | None = None,
    tpot: float | str | None = None,
    request_latency: float | str | None = None,
    p99: bool = False,
    limit_headroom: float | str | None = None,
    objective: str = "throughput",
    top: int = 10,
    quantizations: Sequence[str] = (),
    disaggregated: bool = False,
) -> ServingSearch:
    """Find the best plans of a service on these chips under limits, reasons of others, and the front of tokens/s a chip against a user's.

    ttft, tpot, request_latency   limits: seconds, or `500ms`; p99: of the 99th percentile over requests, not of the mean
    limit_headroom  share of each limit that a plan is predicted to stay below it; None: 1.5 %
    objective       throughput (output tokens/s a chip), latency, or cost (of a million output tokens)
    quantizations   formats of weights that may be used; none: the model's own
    disaggregated   also plans with separate prefill and decode workers
    Knobs that are given are fixed. Without concurrency and rate each plan runs at its best load; with one of them and without chips the
    search uses the fewest chips that sustain it.
    """
    return search_service(
        service,
        limits={"ttft": ttft, "tpot": tpot, "request_latency": request_latency},
        p99=p99,
        limit_headroom=limit_headroom,
        objective=objective,
        top=top,
        quantizations=quantizations,
        disaggregated=disaggregated,
    )[1]


def search_service(
    service: Service,
    *,
    limits: Mapping[str, Any],
    p99: bool,
    limit_headroom: float | str | None = None,
    objective: str,
    top: int,
    quantizations: Sequence[str] = (),
    disaggregated: bool = False,
) -> tuple[ServingSetting, ServingSearch]:
    """Return the result of `find_serving` with its setting."""
    from perfmodel.planner.result import LIMIT_HEADROOM, ServingLimits, ServingObjective
    from perfmodel.planner.search import search
    from perfmodel.planner.serving.search import NothingFoundError, find_fewest_chips, serving_plans
    from perfmodel.planner.serving.space import ServingSpace
    from perfmodel.verbs.serving_predict import limits_of, priced
    from perfmodel.verbs.serving_setting import serving_setting

    asked, knobs = service.request, service.knobs
    if knobs.workers is not None:
        raise bad_field("workers", knobs.workers, "is what a search finds", "leave it out and give --disaggregated")
    is_sized = asked.chips is None and (asked.concurrency is not None or asked.rate is not None)
    setting = serving_setting(service.having({"chips": 1}) if is_sized else service)
    setting, formats = _formats_allowed(setting, several(quantizations))
    headroom = LIMIT_HEADROOM if limit_headroom is None else share(limit_headroom, "limit_headroom")
    of, space = setting.estimator, ServingSpace(fixed=read_words(knobs, *COLUMNS), formats=formats)
    plans_of = partial(
        serving_plans,
        calibration=of.calibration,
        engine=of.engine,
        limits=ServingLimits(**limits_of(limits), is_p99=p99, headroom=headroom),
        objective=choice_of(ServingObjective, objective, "objective"),
        price_per_hour=setting.price,
    )
    top = read_integer(top, "top")
    if is_sized:
        chips = find_fewest_chips(setting.job, of.cluster, lambda cluster: plans_of(setting.job, cluster, space=space))
        setting, _ = _formats_allowed(serving_setting(service.having({"chips": chips})), several(quantizations))
        note = f"chips: not given; {chips:,} are the fewest that hold the load"
        setting = replace(setting, notes=(*setting.notes, note))
    also = ("baselines", "front", "remedies", *(["disaggregated"] if disaggregated else []))
    try:
        result = search(plans_of(setting.job, setting.estimator.cluster, space=space, also=also), top=top)
    except NothingFoundError as error:
        would = _changes_that_fit(setting, service, formats) if not error.fits else _changes_within_limits(setting, space, plans_of, error)
        raise (NothingFoundError(f"{error.summary}; would {'meet them' if error.fits else 'fit'}", would) if would else error) from error

    def all_priced(plans: tuple[RankedPlan, ...]) -> tuple[RankedPlan, ...]:
        return tuple(replace(ranked, prediction=priced(setting, ranked.prediction)) for ranked in plans)

    baselines = tuple(replace(baseline, plans=all_priced(baseline.plans)) for baseline in result.baselines)
    return setting, replace(result, plans=all_priced(result.plans), disaggregated=all_priced(result.disaggregated), baselines=baselines)


def _changes_that_fit(setting: ServingSetting, service: Service, formats: Sequence[Format]) -> str:
    """Return the smallest changes after which a search finds a plan that fits, as flags; empty if there are none."""
    from perfmodel.parallel.framework_ref import flags_text
    from perfmodel.verbs.serving_predict import serve_asked

    narrowest = min((quantization for quantization, _ in formats), key=lambda quantization: quantization.weight_bytes, default=None)
    narrowed = {"quantization": narrowest.name} if narrowest else {}
    try:
        remedies = serve_asked(service.having({"chips": setting.num_chips, **narrowed}))[1].remedies
    except InputError:
        remedies = ()
    renamed = {"quantization": "allow"} if formats else {}
    changes = (
        {renamed.get(name, name): value for name, value in change.items() if name != "tp" or service.knobs.tp is not None}
        for change in remedies
    )
    return " or ".join(map(flags_text, changes))


def _changes_within_limits(
    setting: ServingSetting, space: ServingSpace, plans_of: Callable[..., ServingPlans], error: NothingFoundError
) -> str:
    """Return the smallest changes with which the same search finds a plan within limits and load, as flags; empty if there are none.

    plans_of   returns the plans for a job, a cluster and a space
    """
    from perfmodel.planner.remedies import MOST, narrower_formats
    from perfmodel.planner.search import search

    of, job = setting.estimator, setting.job
    formats = space.formats or ((job.quantization, job.kv_precision),)

    def is_found(job: ServingJob, chips: int, space: ServingSpace) -> bool:
        try:
            search(plans_of(job, of.cluster.with_chips(chips), space=space, also=()), top=1)
        except InputError:
            return False
        return True

    chips = setting.num_chips
    least = min(quantization.weight_bytes for quantization, _ in formats)
    allowed = ",".join(quantization.name for quantization, _ in formats)
    kinds: list[Iterator[str]] = [
        (
            f"--allow {allowed},{quantization.name}"
            for quantization in narrower_formats(of.engine, of.cluster.chip, 0.75 * least)
            if is_found(job, chips, replace(space, formats=(*formats, (quantization, job.kv_precision))))
        ),
        (
            f"--chips {chips * times}"
            for times in (2, 4, 8)
            if chips * times <= of.cluster.max_chips and is_found(job, chips * times, space)
        ),
        (
            f"--concurrency {job.concurrency // times}"
            for times in (2, 4, 8, 16)
            if job.concurrency is not None
            if job.concurrency >= times and is_found(replace(job, concurrency=job.concurrency // times), chips, space)
        ),
        (f"--rate {job.rate / times:g}" for times in (2, 4, 8) if job.rate if is_found(replace(job, rate=job.rate / times), chips, space)),
    ]
    changes = [*error.remedies, *(change for kind in kinds for change in islice(kind, 1))]
    return " or ".join(changes[:MOST])


def _formats_allowed(setting: ServingSetting, names: Sequence[str]) -> tuple[ServingSetting, tuple[Format, ...]]:
    """Return the allowed formats of a search as they run; those that do not run are noted. Raises InputError if none runs."""
    from perfmodel.frameworks.engine_formats import format_on, require_format
    from perfmodel.workload.quantization import quantization_named

    engine, chip = setting.estimator.engine, setting.estimator.cluster.chip
    allowed = [quantization_named(name) for name in names]
    runs = [format_on(engine.kernels.formats, chip, quantization) for quantization in allowed]
    names_that_run = tuple(dict.fromkeys(quantization.name for quantization in runs if quantization is not None))
    if allowed and not names_that_run:
        require_format(engine.name, engine.kernels.formats, chip, allowed[0])
    left = [quantization.name for quantization, ran in zip(allowed, runs, strict=True) if ran is None]
    notes = (f"allow: {engine.name} does not run {', '.join(left)} on {chip.name}; left out",) if left else ()
    cache = setting.job.kv_precision
    return replace(setting, notes=(*setting.notes, *notes)), tuple((quantization_named(name), cache) for name in names_that_run)
