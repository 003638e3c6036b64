"""The verbs, for Python: they take names, paths or objects, and return frozen results.

    import perfmodel

    prediction = perfmodel.predict(model="llama-3-8b", cluster="dgx-h100", chips=64, global_batch=512, seq_len=8192, tp=2)
    result = perfmodel.find_plans(model="llama-3-8b", cluster="dgx-h100", chips=64, global_batch=512, seq_len=8192)

A knob that is left out (None) takes its documented default in `predict` and is searched in `find_plans`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from perfmodel.foundation.errors import InputError, bad_field, shown
from perfmodel.foundation.resources import require_torch as require_torch
from perfmodel.foundation.values import check_name, optional_share, read_integer, share
from perfmodel.foundation.words import Combinations, Words, takes
from perfmodel.hardware.cluster import Cluster
from perfmodel.parallel.knobs import Knobs
from perfmodel.parallel.plan import Plan
from perfmodel.parallel.prediction import Predictions
from perfmodel.parallel.request import Request
from perfmodel.planner.ties import TIES
from perfmodel.verbs.confidence import trust_in_plan
from perfmodel.verbs.configs import start_from
from perfmodel.verbs.requests import has_lists, make_requests, predict_requests, read_risk, setting_of_request
from perfmodel.verbs.searching import ALSO, check_frameworks, remedies_in, search_in
from perfmodel.verbs.setting import (
    Name,
    annotated,
    load_plan,
    make_setting,
    placed,
    predict_in,
    setting_of_plan,
)
from perfmodel.verbs.training import read_run

if TYPE_CHECKING:
    from perfmodel.cost.audit import Audit
    from perfmodel.frameworks.profile import ExecutionProfile
    from perfmodel.hardware.calibration import Calibration
    from perfmodel.parallel.framework_ref import SettingValues
    from perfmodel.parallel.prediction import Prediction
    from perfmodel.parallel.results import Comparison, Measurement
    from perfmodel.planner.explain import Explanation
    from perfmodel.planner.result import FittingChange, TrainingSearch
    from perfmodel.validation.judgement import ValidationResult
    from perfmodel.workload.routing import RoutingCounts


# ---------------------------------------------------------------------------------------------------------------------------------
# The verbs
# ---------------------------------------------------------------------------------------------------------------------------------


@takes(asked=Words(Request, several=True), knobs=Words(Knobs, varied=True))
def predict(plan: Plan | Name | None = None, *, asked: Request, knobs: Combinations) -> Prediction | Predictions:
    """Predict step time and memory of one plan: of a plan (file) or a configuration with the given changes, or of the one that the
    knobs describe.

    A plan that does not fit is predicted all the same; its `fits` is False. memory_headroom: share of the usable memory to keep free;
    risk: in its place, the probability that a plan that fits does not.
    Sizes may be texts (`seq_len="8k"`). Job, cluster, chips, profile and the knobs that a search tries may be lists: the result is then a
    `Predictions`, one prediction for each combination, also where the lists hold one value.

    nodes          in place of chips: times the chips of a node of the cluster
    batch_tokens   in place of global_batch: the tokens of a step
    settings       known settings of the framework: {"compile": True} (docs/settings.md)
    dp, fsdp       the total data-parallel degree; dp_shard with ZeRO stage 3
    rules          sharding of operators over the axes: a shipped rule set's name, or your own file (docs/rules.md)
    """
    given_plan = None if plan is None else start_from(plan, asked).plan
    if given_plan is not None and given_plan.assignment is not None:
        from perfmodel.verbs.networks import predict_requested

        predictions = predict_requested(given_plan, asked, **knobs[0].given())
        return Predictions(predictions=predictions, not_predicted=()) if has_lists(asked) else predictions[0]
    requests = make_requests(asked, of_plan=given_plan is not None)
    answers, failures = predict_requests(requests, knobs, plan=given_plan)
    if len(requests) * len(knobs) == 1 and not (has_lists(asked) or knobs.is_list):
        return answers[0].prediction
    return Predictions(predictions=tuple(answer.prediction for answer in answers), not_predicted=tuple(failures))


def predict_plan(
    plan: Plan | Name,
    *,
    cluster: Name | Cluster | None = None,
    calibration: Name | Calibration | None = None,
    profile: Name | ExecutionProfile | None = None,
    settings: SettingValues = None,
    memory_headroom: float | str | None = None,
    risk: float | str | None = None,
) -> Prediction:
    """Predict step time and memory of a plan, on its own cluster or on another cluster, calibration or profile, or with other settings."""
    loaded = load_plan(plan)
    setting = setting_of_plan(loaded, cluster=cluster, calibration=calibration, profile=profile, settings=settings)
    return predict_in(setting, placed(loaded, setting), **_memory_rule(memory_headroom, risk))


def _memory_rule(memory_headroom: float | str | None, risk: float | str | None) -> dict[str, float | None]:
    return {"memory_headroom": optional_share(memory_headroom, "memory_headroom"), "risk": read_risk(risk)}


@takes(asked=Words(Request, several=True), knobs=Words(Knobs, several=True))
def find_plans(
    *,
    asked: Request,
    knobs: Knobs,
    maximum: Mapping[str, int] | None = None,
    objective: str = "time",
    tokens: float | str | None = None,
    assume: Mapping[str, float | str] | None = None,
    top: int = 10,
    ties: float | str = TIES,
    only_runnable: bool = False,
    any_framework: bool = False,
    exhaustive: bool = False,
    progress: Callable[[float], bool | None] | None = None,
) -> TrainingSearch | tuple[TrainingSearch, ...]:
    """Find the best plans of a job on a cluster. A knob that is given is fixed; `maximum` bounds others, such as {"tp": 8}.

    Job, cluster, chips and profile may be lists: the result is then a tuple, one for each combination, the last named varying fastest.

    rules       rule sets that are tried, names or your own files (docs/rules.md)
    objective   time, memory or chip-time; with tokens a total of the whole run: cost, energy or goodput-time
    tokens      to train on, a number or a text such as "15T"
    assume      with tokens: values in place of those that `perfmodel assumptions` lists, as for `estimate_run`
    top         number of plans in the result
    ties        plans within this share of the best are ties: the likeliest to fit, then the simplest comes first; 0: the exact order
    risk        probability of not fitting that a plan may have, such as 5%, in place of memory_headroom; `certainty` has the cost of others
    any_framework   search also plans that the assumed framework cannot run (the group `runs` of its profile)
    only_runnable   search only what it can run: the default
    exhaustive  evaluate also the plans that cannot win: the same result, as a check
    progress    called with the share of the space that has been evaluated; if it returns True, the search ends with the results so far
    """
    check_frameworks(only_runnable=only_runnable, any_framework=any_framework)
    if assume and tokens is None:
        raise bad_field("assume", shown(assume), "is for the whole run", 'give its tokens, as tokens="15T"')
    run = None if tokens is None else read_run(tokens, assume)
    results = []
    for request in make_requests(asked):
        result = search_in(
            setting_of_request(request),
            knobs,
            {} if maximum is None else maximum,
            objective=objective,
            run=run,
            top=top,
            memory_headroom=request.memory_headroom,
            risk=request.risk,
            ties=share(ties, "ties"),
            any_framework=any_framework,
            also=(*ALSO, "exhaustive") if exhaustive else ALSO,
            progress=progress,
        )
        results.append(result)
    return tuple(results) if has_lists(asked) or len(results) > 1 else results[0]


def explain_plan(
    plan: Plan | Name,
    *,
    why_not: Mapping[str, int | str | bool] | None = None,
    trust: bool = False,
    cluster: Name | Cluster | None = None,
    calibration: Name | Calibration | None = None,
    profile: Name | ExecutionProfile | None = None,
    settings: SettingValues = None,
    memory_headroom: float | str | None = None,
    risk: float | str | None = None,
    any_framework: bool = False,
) -> Explanation:
    """Break down a plan's time and memory; with `why_not` (such as {"tp": 16}) the effect of those knobs, in numbers.

    any_framework   compare it with plans that the framework cannot run, too
    trust   also the sources of uncertainty of its time, and the cheapest measurement that halves its variance
    """
    from perfmodel.planner.explain import check_knobs, explain

    loaded = load_plan(plan)
    why_not = None if why_not is None else check_knobs(why_not)
    rule = _memory_rule(memory_headroom, risk)
    setting = setting_of_plan(loaded, cluster=cluster, calibration=calibration, profile=profile, settings=settings)
    answer = explain(setting.estimator, placed(loaded, setting), why_not=why_not, any_framework=any_framework, **rule)
    account = trust_in_plan(setting, answer.prediction.plan) if trust else None
    remedies: tuple[FittingChange, ...] = ()
    if not answer.prediction.fits:
        remedies = remedies_in(setting, answer.prediction.plan, any_framework=any_framework, **rule)
    return replace(answer, prediction=annotated(answer.prediction, setting), trust=account, remedies=remedies)


def compare_plans(
    plans: Sequence[Plan | Name],
    *,
    calibration: Name | Calibration | None = None,
    profile: Name | ExecutionProfile | None = None,
    settings: SettingValues = None,
    memory_headroom: float | str | None = None,
    risk: float | str | None = None,
) -> tuple[Prediction, ...]:
    """Predict several plans (files), in the given order."""
    if not isinstance(plans, (list, tuple)):
        raise bad_field("plans", shown(plans), "must be a list of plans or of their files", 'write ["a.yaml", "b.yaml"]')
    assumed = {"calibration": calibration, "profile": profile, "settings": settings, "memory_headroom": memory_headroom, "risk": risk}
    return tuple(predict_plan(plan, **assumed) for plan in plans)  # type: ignore[arg-type]


def run_plan(
    plan: Plan | Name,
    *,
    steps: int = 20,
    warmup: int = 3,
    shrink: bool = False,
    device: str = "auto",
    calibration: Name | Calibration | None = None,
    progress: Callable[[str], None] | None = None,
) -> Comparison:
    """Run a plan with torch on this machine, check its gradients against one process, measure it, and predict the same.

    shrink        run the same form of plan with fewer ranks, fewer layers and narrower ones where this machine is too small for it
    calibration   None: of the CPUs, this machine's own (`perfmodel calibrate`), else one that is measured now, in about a minute
    """
    require_torch("run a plan")
    steps, warmup = read_integer(steps, "steps"), read_integer(warmup, "warmup", least=0)
    from perfmodel.execute.run import run_plan as run
    from perfmodel.execute.runner import num_devices, num_gpus, pick_device
    from perfmodel.verbs.own_calibration import own_calibration

    wanted = load_plan(plan)
    pick_device(device, 1)
    if shrink:
        from perfmodel.execute.shrink import shrink as smaller
        from perfmodel.execute.shrink import smallest_ranks
        from perfmodel.hardware.local import local_cluster

        on_gpus = device == "cuda" or (device == "auto" and num_gpus() > 1)
        # on CPUs at most one process per core, but two ranks on each axis of the plan: times of shared cores are not meaningful
        on_cpus = min(num_devices("cpu"), max(local_cluster().num_chips, smallest_ranks(wanted)))
        wanted = smaller(wanted, num_gpus() if on_gpus else min(wanted.num_chips, on_cpus))
    measurement = run(wanted, steps=steps, warmup=warmup, device=device, on_progress=progress)
    if measurement.device == "cpu":
        calibration = own_calibration(calibration, ranks=measurement.num_ranks, progress=progress)
    return compare_measurement(measurement, calibration=calibration)


def audit_plan(
    plan: Plan | Name,
    *,
    rank: int | None = None,
    all_stages: bool = False,
    every_microbatch: bool = False,
    dropout: bool = False,
    routing: RoutingCounts | Sequence[Sequence[int]] | str | Path | None = None,
    progress: Callable[[float, str], None] | None = None,
) -> Audit:
    """Compare torch's own counts of a plan's program, built at full size under fake tensors, with the predicted ones.

    Both are of the precision in which the executor computes: bf16-mixed in place of 8-bit and 4-bit products and of fp16-mixed.

    rank               audit that rank; None: one rank of the first and of the last pipeline stage, or with `all_stages` of each
    every_microbatch   count every micro-batch of the step, not two shorter steps from which it follows exactly
    dropout            the model drops by its configuration; a run drops nothing
    routing            tokens that each rank of ep sends to each expert in a microbatch, or a file of them; None: evenly
    progress           called with the finished share and the current count
    """
    require_torch("audit a plan")
    rank = None if rank is None else read_integer(rank, "rank", least=0)
    from perfmodel.cost.counts import executor_profile
    from perfmodel.execute.audit.audit import audit_plan as audit
    from perfmodel.execute.audit.audit import ranks_to_audit
    from perfmodel.parallel.executable import executed_precision
    from perfmodel.workload.routing import routing_counts

    loaded = load_plan(plan)
    loaded = replace(loaded, job=replace(loaded.job, precision=executed_precision(loaded.job)))
    setting = setting_of_plan(loaded, profile=executor_profile(loaded.job.policy, loaded.compression).having(dropout=dropout))
    ranks = ranks_to_audit(loaded, rank=rank, every_stage=all_stages)
    counts = None if routing is None else routing_counts(routing)
    return audit(setting.estimator, loaded, ranks, routing=counts, every_microbatch=every_microbatch, progress=progress)


def compare_measurement(measurement: Measurement, *, calibration: Name | Calibration | None = None) -> Comparison:
    """Predict the plan of a measurement. On a CPU the prediction is for this machine, with the defaults of perfmodel's executor.

    On GPUs the defaults are those of the plan's framework, but for the chunks of a sequence: a run gives each context-parallel rank one.
    """
    from perfmodel.cost.resolve import CPU_PROFILE
    from perfmodel.frameworks.options import CONTIGUOUS
    from perfmodel.frameworks.profile import load_profile
    from perfmodel.hardware.reader import LOCALHOST
    from perfmodel.parallel.framework_ref import stated
    from perfmodel.parallel.results import Comparison

    plan = measurement.plan
    on_cpu = measurement.device == "cpu"
    compressed = {name: value for name, value in plan.framework.settings.items() if name == "gradient_compression"}
    setting = make_setting(
        plan.job,
        LOCALHOST if on_cpu else plan.cluster,
        chips=plan.num_chips,
        calibration=calibration,
        profile=stated(CPU_PROFILE, compressed) if on_cpu else load_profile(plan.profile).having(context_chunks=CONTIGUOUS),
    )
    return Comparison(prediction=predict_in(setting, placed(plan, setting)), measurement=measurement)


def calibrate_machine(
    *,
    save: Name | None = None,
    ranks: int | None = None,
    brief: bool = False,
    device: str = "auto",
    progress: Callable[[float, str], None] | None = None,
) -> Calibration:
    """Run microbenchmarks on this machine, and fit a calibration to them that predictions of `localhost` then use.

    save       where to write it; None: the user's own folder, ~/.local/share/perfmodel/calibrations (or below XDG_DATA_HOME)
    ranks      processes that compute and communicate together; None: two if this machine has two cores
    brief      fewer shapes, in half the time
    progress   called with the finished share and the current measurement
    """
    check_calibration_place(save)
    calibration = measure_calibration(ranks=ranks, brief=brief, device=device, progress=progress)
    keep_calibration(calibration, save)
    return calibration


def check_calibration_place(save: Name | None) -> None:
    """Raise InputError if the calibration could not be saved, before anything is measured."""
    from perfmodel.foundation.resources import check_can_be_made, check_can_be_written
    from perfmodel.hardware.reader import user_calibrations_dir

    if save is None:
        check_can_be_made(user_calibrations_dir())
    else:
        check_can_be_written(save, "save")


def measure_calibration(
    *, ranks: int | None, brief: bool, device: str, progress: Callable[[float, str], None] | None = None
) -> Calibration:
    """Measure the calibration that `calibrate_machine` saves."""
    require_torch("calibrate this machine")
    ranks = None if ranks is None else read_integer(ranks, "ranks")
    from perfmodel.calibrate.fit_host import fit_measurement
    from perfmodel.execute.measure.machine import measure_machine
    from perfmodel.hardware.local import local_cluster

    ranks = min(2, local_cluster().num_chips) if ranks is None else ranks
    return fit_measurement(measure_machine(ranks, brief=brief, device=device, progress=progress))


def keep_calibration(calibration: Calibration, save: Name | None) -> None:
    from perfmodel.hardware.writer import save_calibration

    path = user_calibration_path(calibration) if save is None else Path(save)
    if save is None:
        make_folder(path.parent)
    save_calibration(calibration, path)


def validate_cases(
    path: Name | Sequence[Name],
    *,
    out: Name | None = None,
    calibration: Name | None = None,
    by: Sequence[str] = (),
    tier: str = "",
    skip_broken_nvlink: bool = False,
    plots: Name | None = None,
    profile: Name | ExecutionProfile | None = None,
    hide_framework: bool = False,
    progress: Callable[[int], None] | None = None,
) -> ValidationResult:
    """Predict every published run in a file, or in several (one JSON object a line), from its inputs; write the table to `out` if given.

    by      errors by these fields too: source, chip, framework, model, size, chips, form, tier, precision, profile
    tier    only runs of this tier
    plots   a folder for figures
    skip_broken_nvlink   leave runs whose notes indicate broken NVLink out of the judged choice of plans; no prediction depends on it
    profile         the framework that predicts every training run, such as one of your own (`fit_runs`); None: the one that it names
    hide_framework  predict every training run without the name of its framework: `generic`, made from all others
    """
    from perfmodel.frameworks.profile import ExecutionProfile, load_profile
    from perfmodel.validation.assumed_framework import plan_as_stated, plan_hidden, plan_under
    from perfmodel.validation.validate import validate_cases as validate

    if profile is not None and hide_framework:
        raise InputError("profile: cannot be given with hide_framework, which assumes none; leave out one of them")
    plan_case = plan_hidden() if hide_framework else plan_as_stated
    if profile is not None:
        check_name(profile, "profile", ExecutionProfile, "see `perfmodel profiles`")
        plan_case = plan_under(profile if isinstance(profile, ExecutionProfile) else load_profile(profile))
    return validate(
        path,
        out=out,
        calibration=calibration,
        by=by,
        tier=tier,
        skip_broken_nvlink=skip_broken_nvlink,
        plots=plots,
        plan_case=plan_case,
        progress=progress,
    )


def user_calibration_path(calibration: Calibration) -> Path:
    """Return the file of the user's calibration of that name: one for each chip, replaced by the next."""
    from perfmodel.hardware.reader import user_calibrations_dir

    return user_calibrations_dir() / f"{calibration.name}.yaml"


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder}: cannot be made ({error.strerror}); choose a file with --save") from error
