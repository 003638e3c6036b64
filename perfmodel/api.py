"""The verbs, for Python: they take names, paths or objects, and return frozen results.

    import perfmodel

    prediction = perfmodel.predict(model="llama-3-8b", cluster="dgx-h100", chips=64, global_batch=512, seq_len=8192, tp=2)
    result = perfmodel.find_plans(model="llama-3-8b", cluster="dgx-h100", chips=64, global_batch=512, seq_len=8192)

A knob that is left out (None) takes its documented default in `predict` and is searched in `find_plans`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, TypeVar

from perfmodel.errors import InputError, bad_field, suggest
from perfmodel.hardware.cluster import Cluster
from perfmodel.parallel.plan import Plan, make_plan
from perfmodel.workload.config import TransformerConfig
from perfmodel.workload.job import Optimizer, Precision, TrainingJob

if TYPE_CHECKING:
    from perfmodel.cost.counts import Audit
    from perfmodel.cost.estimate import Estimator
    from perfmodel.hardware.calibration import Calibration
    from perfmodel.parallel.layout import AttentionKernel
    from perfmodel.parallel.prediction import Prediction
    from perfmodel.parallel.profile import ExecutionProfile
    from perfmodel.parallel.residuals import StepInterval
    from perfmodel.planner.explain import Explanation
    from perfmodel.planner.result import SearchResult
    from perfmodel.planner.space import Space
    from perfmodel.report.judgement import ValidationResult
    from perfmodel.report.sensitivity import Sensitivity
    from perfmodel.results import Comparison, Measurement
    from perfmodel.workload.imported_graph import ImportedGraph

Name: TypeAlias = str | Path
Confidence: TypeAlias = "tuple[StepInterval, tuple[Sensitivity, ...]]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    """What a person may say of a plan; None leaves it to the default, or to the search."""

    pp: int | None = None
    dp_replicate: int | None = None
    dp_shard: int | None = None
    cp: int | None = None
    tp: int | None = None
    zero: int | None = None
    micro_batch: int | None = None
    virtual_stages: int | None = None
    schedule: str | None = None
    recompute: str | None = None
    sequence_parallel: bool | None = None
    order: Sequence[str] | None = None
    attention: str | None = None

    def given(self) -> dict[str, Any]:
        """The knobs that are not left out."""
        return {field.name: getattr(self, field.name) for field in fields(self) if getattr(self, field.name) is not None}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Setting:
    """A job on a cluster, with everything that predicts its plans.

    reference     what a plan file calls the cluster: its name, or the path of its file
    calibration   what a plan file calls the calibration; `prior` where it is that of other chips, `spec-sheet` where there is none
    """

    reference: str
    cluster: Cluster
    calibration: str
    estimator: Estimator

    @property
    def job(self) -> TrainingJob:
        return self.estimator.job


def make_setting(
    job: TrainingJob,
    cluster: Name | Cluster,
    *,
    chips: int | None = None,
    calibration: Name | Calibration | None = None,
    profile: Name | ExecutionProfile | None = None,
) -> Setting:
    """Find cluster, calibration and profile, and compile what predicts the job's plans there.

    chips         None: as many as the cluster object or this machine has; a named cluster needs the number
    calibration   None: the best that is known for the chip (perfmodel/cost/resolve.py)
    profile       None: `megatron` on accelerators, `torch-gloo` on this machine
    """
    from perfmodel.cost.resolve import calibration_reference, choose_calibration, choose_profile, resolve_estimator

    reference, found = find_cluster(cluster, chips)
    chosen = choose_calibration(found.chip, calibration or "") if calibration is None or isinstance(calibration, Name) else calibration
    habits = choose_profile(found.chip, profile or "") if profile is None or isinstance(profile, Name) else profile
    return Setting(
        reference=reference,
        cluster=found,
        calibration=_file_reference(calibration) if isinstance(calibration, Name) else calibration_reference(chosen),
        estimator=resolve_estimator(job, found, calibration=chosen, profile=habits),
    )


def find_cluster(cluster: Name | Cluster, chips: int | None) -> tuple[str, Cluster]:
    """How a plan file refers to the cluster, and the cluster with that many chips."""
    from perfmodel.hardware.reader import LOCALHOST, load_cluster

    if isinstance(cluster, Cluster):
        return cluster.name, cluster if chips is None else cluster.with_chips(chips)
    reference = _file_reference(cluster)
    if chips is None and reference != LOCALHOST:
        raise InputError("chips: is missing; say how many chips the job runs on, for example 64")
    return reference, load_cluster(cluster, num_chips=chips)


def _file_reference(name: Name) -> str:
    """A name as it is; the path of a file in full, so that a saved plan finds it from any folder."""
    text = str(name)
    return str(Path(text).resolve()) if "/" in text or text.endswith((".yaml", ".yml")) else text


def make_job(
    model: Name | TransformerConfig,
    *,
    global_batch: int,
    seq_len: int,
    precision: str = Precision.BF16_MIXED,
    optimizer: str = Optimizer.ADAMW,
) -> TrainingJob:
    """A training job; `model` is a shipped model's name, the path of a config.json, or a configuration."""
    from perfmodel.workload.models import load_model

    return TrainingJob(
        model=model if isinstance(model, TransformerConfig) else load_model(model),
        global_batch=global_batch,
        seq_len=seq_len,
        precision=_choice(Precision, precision, "precision"),
        optimizer=_choice(Optimizer, optimizer, "optimizer"),
    )


def plan_in(setting: Setting, knobs: Knobs) -> Plan:
    """The plan that the knobs describe: what is left out is 1, and the rest of the chips go to dp_replicate (to dp_shard under ZeRO)."""
    profile = setting.estimator.profile
    given = {"attention": profile.default_attention} | knobs.given()
    if "order" in given:
        given["order"] = tuple(given["order"])
    return make_plan(
        setting.job,
        cluster=setting.reference,
        num_chips=setting.cluster.num_chips,
        profile=profile.name,
        calibration=setting.calibration,
        **given,
    )


def placed(plan: Plan, setting: Setting) -> Plan:
    """The plan with the names of the cluster, calibration and profile that predict it."""
    return replace(plan, cluster=setting.reference, calibration=setting.calibration, profile=setting.estimator.profile.name)


def predict_in(setting: Setting, plan: Plan, *, memory_headroom: float = 0.0) -> Prediction:
    _check_headroom(memory_headroom)
    return setting.estimator.predict(plan, memory_headroom=memory_headroom)


def confidence_in(setting: Setting, plan: Plan) -> Confidence:
    """An 80 % interval of the plan's step time, and the parameters that it hangs on most."""
    from perfmodel.cost.resolve import choose_calibration
    from perfmodel.parallel.residuals import interval, load_residuals, scale_of
    from perfmodel.report.calibrated import is_calibrated
    from perfmodel.report.sensitivity import sensitivities

    estimator = setting.estimator
    found = interval(
        load_residuals(),
        family=estimator.profile.name,
        chip=setting.cluster.chip.name,
        scale=scale_of(plan.num_chips),
        is_calibrated=is_calibrated(estimator.machine),
        is_usual=estimator.machine.calibration == choose_calibration(setting.cluster.chip).name,
    )
    return found, sensitivities(estimator, plan)


def setting_of_plan(
    plan: Plan,
    *,
    cluster: Name | Cluster | None = None,
    calibration: Name | Calibration | None = None,
    profile: Name | ExecutionProfile | None = None,
) -> Setting:
    """Where a plan file says that its plan runs, or on another cluster with as many chips."""
    return make_setting(
        plan.job,
        plan.cluster if cluster is None else cluster,
        chips=plan.num_chips,
        calibration=plan.calibration or None if calibration is None else calibration,
        profile=plan.profile if profile is None else profile,
    )


def load_plan(plan: Plan | Name) -> Plan:
    """A plan as it is, or from its file, or a shipped expert plan by its name."""
    from perfmodel.parallel.plan_file import read_plan

    return plan if isinstance(plan, Plan) else read_plan(plan)


# ---------------------------------------------------------------------------------------------------------------------------------
# The verbs
# ---------------------------------------------------------------------------------------------------------------------------------


def predict(
    plan: Plan | Name | None = None,
    *,
    model: Name | TransformerConfig | None = None,
    cluster: Name | Cluster | None = None,
    chips: int | None = None,
    global_batch: int | None = None,
    seq_len: int | None = None,
    pp: int | None = None,
    dp_replicate: int | None = None,
    dp_shard: int | None = None,
    cp: int | None = None,
    tp: int | None = None,
    zero: int | None = None,
    micro_batch: int | None = None,
    virtual_stages: int | None = None,
    schedule: str | None = None,
    recompute: str | None = None,
    sequence_parallel: bool | None = None,
    order: Sequence[str] | None = None,
    attention: str | None = None,
    precision: str = Precision.BF16_MIXED,
    optimizer: str = Optimizer.ADAMW,
    profile: Name | ExecutionProfile | None = None,
    calibration: Name | Calibration | None = None,
    memory_headroom: float = 0.0,
) -> Prediction:
    """Step time and memory of one plan: of a plan (file), or of the one that the knobs describe.

    A plan that does not fit is predicted all the same; `fits` says so. memory_headroom: share of the memory to keep free.
    """
    if plan is not None:
        return predict_plan(plan, cluster=cluster, calibration=calibration, profile=profile, memory_headroom=memory_headroom)
    job = make_job(
        model if model is not None else _missing("model", "a name from `perfmodel models` or the path of a config.json"),
        global_batch=global_batch if global_batch is not None else _missing("global_batch", "the sequences of a step"),
        seq_len=seq_len if seq_len is not None else _missing("seq_len", "the tokens of a sequence"),
        precision=precision,
        optimizer=optimizer,
    )
    place = cluster if cluster is not None else _missing("cluster", "a name from `perfmodel clusters` or the path of a cluster file")
    setting = make_setting(job, place, chips=chips, calibration=calibration, profile=profile)
    knobs = Knobs(
        pp=pp,
        dp_replicate=dp_replicate,
        dp_shard=dp_shard,
        cp=cp,
        tp=tp,
        zero=zero,
        micro_batch=micro_batch,
        virtual_stages=virtual_stages,
        schedule=schedule,
        recompute=recompute,
        sequence_parallel=sequence_parallel,
        order=order,
        attention=attention,
    )
    return predict_in(setting, plan_in(setting, knobs), memory_headroom=memory_headroom)


def predict_plan(
    plan: Plan | Name,
    *,
    cluster: Name | Cluster | None = None,
    calibration: Name | Calibration | None = None,
    profile: Name | ExecutionProfile | None = None,
    memory_headroom: float = 0.0,
) -> Prediction:
    """Step time and memory of a plan, where it says that it runs or on another cluster, calibration or profile."""
    found = load_plan(plan)
    setting = setting_of_plan(found, cluster=cluster, calibration=calibration, profile=profile)
    return predict_in(setting, placed(found, setting), memory_headroom=memory_headroom)


def find_plans(
    *,
    model: Name | TransformerConfig,
    cluster: Name | Cluster,
    global_batch: int,
    seq_len: int,
    chips: int | None = None,
    pp: int | None = None,
    dp_replicate: int | None = None,
    dp_shard: int | None = None,
    cp: int | None = None,
    tp: int | None = None,
    zero: int | None = None,
    micro_batch: int | None = None,
    virtual_stages: int | None = None,
    schedule: str | None = None,
    recompute: str | None = None,
    sequence_parallel: bool | None = None,
    order: Sequence[str] | None = None,
    attention: str | None = None,
    maximum: Mapping[str, int] | None = None,
    objective: str = "time",
    top: int = 10,
    precision: str = Precision.BF16_MIXED,
    optimizer: str = Optimizer.ADAMW,
    profile: Name | ExecutionProfile | None = None,
    calibration: Name | Calibration | None = None,
    memory_headroom: float = 0.0,
    progress: Callable[[float], None] | None = None,
) -> SearchResult:
    """The best plans of a job on a cluster. A knob that is given is fixed; `maximum` bounds others, such as {"tp": 8}.

    objective   time, memory or chip-time
    top         how many plans the result holds
    progress    called with the share of the space that has been evaluated
    """
    job = make_job(model, global_batch=global_batch, seq_len=seq_len, precision=precision, optimizer=optimizer)
    setting = make_setting(job, cluster, chips=chips, calibration=calibration, profile=profile)
    knobs = Knobs(
        pp=pp,
        dp_replicate=dp_replicate,
        dp_shard=dp_shard,
        cp=cp,
        tp=tp,
        zero=zero,
        micro_batch=micro_batch,
        virtual_stages=virtual_stages,
        schedule=schedule,
        recompute=recompute,
        sequence_parallel=sequence_parallel,
        order=order,
        attention=attention,
    )
    return search_in(setting, knobs, maximum or {}, objective=objective, top=top, memory_headroom=memory_headroom, progress=progress)


def search_in(
    setting: Setting,
    knobs: Knobs,
    maximum: Mapping[str, int],
    *,
    objective: str = "time",
    top: int = 10,
    memory_headroom: float = 0.0,
    progress: Callable[[float], None] | None = None,
) -> SearchResult:
    """Search a setting; see `find_plans`."""
    from perfmodel.planner.search import search_plans

    _check_headroom(memory_headroom)
    space, attention = space_in(setting, knobs, maximum)
    result = search_plans(
        setting.estimator,
        space,
        objective=objective,
        top=top,
        memory_headroom=memory_headroom,
        attention=attention,
        progress=progress,
    )
    if not (result.num_evaluated or result.interrupted):
        raise InputError(_why_empty(setting, knobs, result))

    def named(predictions: tuple[Prediction, ...]) -> tuple[Prediction, ...]:
        return tuple(replace(each, plan=placed(each.plan, setting)) for each in predictions)

    return replace(
        result,
        plans=named(result.plans),
        pareto=named(result.pareto),
        least_memory=named(result.least_memory),
        baselines=tuple(replace(each, prediction=named(each.prediction)) for each in result.baselines),
    )


def space_in(setting: Setting, knobs: Knobs, maximum: Mapping[str, int]) -> tuple[Space, AttentionKernel]:
    """The part of the space that the knobs leave, and the attention kernel."""
    from perfmodel.parallel.layout import AttentionKernel, PipelineSchedule, Recompute, check_order
    from perfmodel.planner.space import SEARCHED_ORDERS, Space

    fixed = knobs.given()
    attention = _choice(AttentionKernel, fixed.pop("attention", setting.estimator.profile.default_attention), "attention")
    order = fixed.pop("order", None)
    if "recompute" in fixed:
        fixed["recompute"] = str(_choice(Recompute, fixed["recompute"], "recompute"))
    if "schedule" in fixed:
        fixed["schedule"] = str(_choice(PipelineSchedule, fixed["schedule"], "schedule"))
    for name, value in (*fixed.items(), *maximum.items()):
        if isinstance(value, int) and not isinstance(value, bool) and value < (0 if name == "zero" else 1):
            raise InputError(f"{name}={value}: must be a whole number of at least {0 if name == 'zero' else 1}; give one")
    if fixed.get("zero", 0) not in (0, 1, 2, 3):
        raise InputError(f"zero={fixed['zero']}: must be 0, 1, 2 or 3; use 3 for FSDP")
    orders = SEARCHED_ORDERS if order is None else (check_order(tuple(order)),)
    return Space(fixed=fixed, maximum=dict(maximum), orders=orders), attention


def _why_empty(setting: Setting, knobs: Knobs, result: SearchResult) -> str:
    """The rule that leaves no plan at all: the one that the given knobs break by themselves, else what left the layouts out."""
    try:
        plan_in(setting, knobs)
    except InputError as error:
        return f"no plan with these knobs: {error}"
    rules = [reason for reason in result.left_out if reason != "excluded by a given flag"]
    return f"no plan with these knobs: {'; '.join(rules[:3]) or 'the bounds exclude every layout'}; free a knob or change the chips"


def least_chips_that_fit(setting: Setting, knobs: Knobs, maximum: Mapping[str, int], *, memory_headroom: float = 0.0) -> int:
    """The chips that would be enough, doubling them up to eight times; 0 where no such number is."""
    from perfmodel.planner.search import sweep

    degrees = (knobs.dp_replicate, knobs.dp_shard)
    chips = setting.cluster.num_chips
    for _ in range(8):
        chips *= 2
        if chips > setting.cluster.tiers[-1].size or all(degrees):
            return 0
        larger = make_setting(
            setting.job,
            setting.cluster.with_chips(chips),
            calibration=setting.calibration,
            profile=setting.estimator.profile,
        )
        space, attention = space_in(larger, knobs, maximum)
        first = replace(space, orders=space.orders[:1])  # memory does not depend on where the axes lie
        if sweep(larger.estimator, first, top=1, memory_headroom=memory_headroom, attention=attention).num_feasible:
            return chips
    return 0


def explain_plan(
    plan: Plan | Name,
    *,
    why_not: Mapping[str, int | str | bool] | None = None,
    cluster: Name | Cluster | None = None,
    calibration: Name | Calibration | None = None,
    profile: Name | ExecutionProfile | None = None,
    memory_headroom: float = 0.0,
) -> Explanation:
    """Where a plan's time and memory go; with `why_not` (such as {"tp": 16}) what those knobs would change, in numbers."""
    from perfmodel.planner.explain import explain

    found = load_plan(plan)
    setting = setting_of_plan(found, cluster=cluster, calibration=calibration, profile=profile)
    return explain(setting.estimator, placed(found, setting), why_not=why_not, memory_headroom=memory_headroom)


def compare_plans(
    plans: Sequence[Plan | Name],
    *,
    calibration: Name | Calibration | None = None,
    profile: Name | ExecutionProfile | None = None,
    memory_headroom: float = 0.0,
) -> tuple[Prediction, ...]:
    """Predictions of several plans (files), in the order in which they are given."""
    return tuple(predict_plan(plan, calibration=calibration, profile=profile, memory_headroom=memory_headroom) for plan in plans)


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

    shrink   run the same form of plan with fewer ranks, layers and narrower ones where this machine is too small for it
    """
    require_torch("run a plan")
    from perfmodel.execute.runner import num_devices, num_gpus
    from perfmodel.execute.runner import run_plan as run

    wanted = load_plan(plan)
    if shrink:
        from perfmodel.execute.shrink import shrink as smaller
        from perfmodel.execute.shrink import smallest_ranks
        from perfmodel.hardware.local import local_cluster

        on_gpus = device == "cuda" or (device == "auto" and num_gpus() > 1)
        # on CPUs no more processes than cores, but for two ranks on each axis of the plan: times of shared cores mean little
        on_cpus = min(num_devices("cpu"), max(local_cluster().num_chips, smallest_ranks(wanted)))
        wanted = smaller(wanted, num_gpus() if on_gpus else min(wanted.num_chips, on_cpus))
    measurement = run(wanted, steps=steps, warmup=warmup, device=device, on_progress=progress)
    return compare_measurement(measurement, calibration=calibration)


def audit_plan(
    plan: Plan | Name,
    *,
    rank: int | None = None,
    all_stages: bool = False,
    every_microbatch: bool = False,
    dropout: bool = False,
    progress: Callable[[float, str], None] | None = None,
) -> Audit:
    """Torch's own counts of a plan's program, built at full size under fake tensors, beside the predicted ones.

    rank               audit that rank; None: one rank of the first and of the last pipeline stage, or with `all_stages` of each
    every_microbatch   count the step whole, not two shorter ones from which it follows exactly
    dropout            the model drops what its configuration says; a run drops nothing
    progress           called with the share that is done and what is being counted
    """
    require_torch("audit a plan")
    from perfmodel.cost.counts import executor_profile
    from perfmodel.execute.audit import audit_plan as audit
    from perfmodel.execute.audit import ranks_to_audit

    found = load_plan(plan)
    setting = setting_of_plan(found, profile=replace(executor_profile(found.job.policy), dropout=dropout))
    ranks = ranks_to_audit(found, rank=rank, every_stage=all_stages)
    return audit(setting.estimator, found, ranks, every_microbatch=every_microbatch, progress=progress)


def compare_measurement(measurement: Measurement, *, calibration: Name | Calibration | None = None) -> Comparison:
    """The prediction of what was measured beside it. On a CPU that is this machine, with the habits of our own executor."""
    from perfmodel.cost.resolve import CPU_PROFILE
    from perfmodel.hardware.reader import LOCALHOST
    from perfmodel.results import Comparison

    plan = measurement.plan
    on_cpu = measurement.device == "cpu"
    setting = make_setting(
        plan.job,
        LOCALHOST if on_cpu else plan.cluster,
        chips=plan.num_chips,
        calibration=calibration,
        profile=CPU_PROFILE if on_cpu else plan.profile,
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
    """Microbenchmarks of this machine, fitted to a calibration that predictions of `localhost` then use.

    save       where to write it; None: the user's own folder, ~/.local/share/perfmodel/calibrations
    ranks      processes that compute and communicate together; None: two, where there are two cores
    brief      fewer shapes, in half the time
    progress   called with the share that is done and what is being measured
    """
    require_torch("calibrate this machine")
    from perfmodel.calibrate.fit_host import fit_measurement
    from perfmodel.execute.measure_machine import measure_machine
    from perfmodel.hardware.local import local_cluster
    from perfmodel.hardware.writer import save_calibration

    ranks = min(2, local_cluster().num_chips) if ranks is None else ranks
    calibration = fit_measurement(measure_machine(ranks, brief=brief, device=device, progress=progress))
    path = user_calibration_path(calibration) if save is None else Path(save)
    if save is None:
        make_folder(path.parent)
    save_calibration(calibration, path)
    return calibration


def import_graph(module: str | Callable[[], Any], inputs: str | Sequence[str] = ()) -> ImportedGraph:
    """The operators of any `torch.nn.Module` as named iteration spaces, found by `torch.export` under fake tensors.

    module   `package.module:factory`, with literal arguments if need be (`torch.nn:Linear(8, 8)`), or a callable that makes the module;
             a module that exists is taken as it is
    inputs   what `forward` is called with: `tokens=int64[1,2048]`; without a name the next argument by position
    """
    require_torch("import a module")
    from perfmodel.execute.import_graph import find_factory, import_module
    from perfmodel.workload.input_spec import parse_inputs

    specs = parse_inputs([inputs] if isinstance(inputs, str) else inputs)
    if isinstance(module, str):
        return import_module(find_factory(module), specs, name=module)
    if hasattr(module, "named_parameters") and not isinstance(module, type):
        return import_module(lambda: module, specs, name=type(module).__name__)
    if not callable(module):
        raise bad_field("module", module, "must be module:factory, a torch.nn.Module or a callable that makes one")
    return import_module(module, specs, name=getattr(module, "__name__", type(module).__name__))


def validate_cases(
    path: Name | Sequence[Name],
    *,
    out: Name | None = None,
    calibration: Name | None = None,
    by: Sequence[str] = (),
    tier: str = "",
    skip_broken_nvlink: bool = False,
    plots: Name | None = None,
    progress: Callable[[int], None] | None = None,
) -> ValidationResult:
    """Predict every published run in a file, or in several (one JSON object a line), from its inputs; write the table to `out` if given.

    by      errors by these fields too: source, chip, framework, model, size, chips, form, tier, precision, profile
    tier    only runs of this tier
    plots   a folder for figures
    skip_broken_nvlink   leave runs whose notes tell of broken NVLink out of the judged choice of plans; no prediction sees it
    """
    from perfmodel.report.validate import validate_cases as validate

    return validate(
        path,
        out=out,
        calibration=calibration,
        by=by,
        tier=tier,
        skip_broken_nvlink=skip_broken_nvlink,
        plots=plots,
        progress=progress,
    )


# ---------------------------------------------------------------------------------------------------------------------------------
# Small print
# ---------------------------------------------------------------------------------------------------------------------------------

_Member = TypeVar("_Member", bound=StrEnum)


def _choice(kind: type[_Member], value: str, field: str) -> _Member:
    try:
        return kind(value)
    except ValueError:
        raise bad_field(field, value, f"not known{suggest(value, kind)}") from None


def _missing(field: str, meaning: str) -> NoReturn:
    raise InputError(f"{field}: is missing; give {meaning}")


def _check_headroom(memory_headroom: float) -> None:
    if not 0.0 <= memory_headroom < 1.0:
        raise InputError(f"memory_headroom={memory_headroom}: must be a share from 0 to below 1; write 0.1 for a tenth")


def user_calibration_path(calibration: Calibration) -> Path:
    """The file of the user's own calibration of that name: one for each chip, replaced by the next."""
    from perfmodel.resources import user_calibrations_dir

    return user_calibrations_dir() / f"{calibration.name}.yaml"


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder}: cannot be made ({error.strerror}); choose a file with --save") from error


def require_torch(purpose: str) -> None:
    from importlib.util import find_spec

    if find_spec("torch") is None:
        raise InputError(f"torch: is needed to {purpose}; install perfmodel[torch]")
