"""Settings of the verbs: job, cluster, calibration, profile, given knobs, and their plan."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from perfmodel.foundation.errors import InputError, bad_field
from perfmodel.foundation.memory_headroom import MOST_HOST_MEMORY, Verdict
from perfmodel.foundation.units import format_bytes
from perfmodel.foundation.values import check_name, choice_of, is_path, read_integer
from perfmodel.frameworks.releases import unlike_recipe
from perfmodel.frameworks.settings import with_stated
from perfmodel.hardware.cluster import Cluster
from perfmodel.hardware.cluster_text import short_name
from perfmodel.parallel.algebra.rules import rule_set_of
from perfmodel.parallel.choices import ULYSSES, WHOLE_LOSS, AttentionKernel, Recompute, rules_of_form
from perfmodel.parallel.compression import NO_COMPRESSION, compression_note
from perfmodel.parallel.framework_ref import SEPARATOR, FrameworkRef, SettingValues, framework_named, read_settings, settings_text, stated
from perfmodel.parallel.knobs import Knobs
from perfmodel.parallel.plan import DEFAULT_RECOMPUTE_OPERATORS, Plan, plan_of_knobs
from perfmodel.parallel.prediction import LOSS_MOMENT
from perfmodel.verbs.settable import attention_note, small_loss
from perfmodel.workload.config import TransformerConfig
from perfmodel.workload.job import Optimizer, Precision, TrainingJob
from perfmodel.workload.network_model import NetworkModel
from perfmodel.workload.routing import BALANCED, Routing
from perfmodel.workload.training import FULL_TRAINING, Training, training_of

if TYPE_CHECKING:
    from perfmodel.cost.estimate import Estimator
    from perfmodel.frameworks.profile import ExecutionProfile
    from perfmodel.hardware.calibration import Calibration
    from perfmodel.hardware.chip import Chip
    from perfmodel.parallel.prediction import Prediction
    from perfmodel.planner.uniform.kept import KeptSpaces
    from perfmodel.workload.graph import Graph

Name: TypeAlias = str | Path

_MOSTLY_ATTENTION = 0.5
"""Share of attention in the FLOP of a step from which its kernel is noted."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Setting:
    """A job on a cluster, with the estimator of its plans.

    reference     the cluster's name in a plan file, or the path of its file
    calibration   a requested calibration's name in a plan file; empty for the default, the best available one
    profile       the execution profile's name in a plan, or the path of its file, with its stated settings
    rests_on      the calibration in use; `prior` if it is that of other chips, `spec-sheet` if there is none
    notes         notes for the user on how it was assembled, as sentences
    kept_spaces   shared by searches of settings that differ in rates; None: nothing is shared
    """

    reference: str
    cluster: Cluster
    calibration: str
    profile: str
    rests_on: str
    estimator: Estimator
    notes: tuple[str, ...] = ()
    kept_spaces: KeptSpaces | None = None

    @property
    def job(self) -> TrainingJob:
        return self.estimator.job

    def described(self) -> dict[str, Any]:
        """Return job, cluster and profile as plain values."""
        job = self.job
        return {
            "cluster": self.reference,
            "chips": self.cluster.num_chips,
            "model": job.model.name,
            "global_batch": job.global_batch,
            "seq_len": job.seq_len,
            "precision": str(job.precision),
            "optimizer": str(job.optimizer),
            **({} if job.train == FULL_TRAINING else {"train": str(job.train)}),
            "profile": self.estimator.profile.name,
        }


def make_setting(
    job: TrainingJob,
    cluster: Name | Cluster,
    *,
    chips: int | str | None = None,
    calibration: Name | Calibration | None = None,
    profile: Name | ExecutionProfile | None = None,
    settings: SettingValues = None,
    of_plan: Collection[str] = (),
    notes: tuple[str, ...] = (),
    network_at: Callable[[int], Graph] | None = None,
) -> Setting:
    """Find cluster, calibration and profile, and compile the estimator of the job's plans there.

    chips         None: the number of the cluster object, your own cluster file or this machine; a shipped cluster needs the number
    calibration   None: the best available one for the chip (perfmodel/cost/resolve.py)
    profile       None: by the chip's vendor, `generic` on NVIDIA's (perfmodel/cost/resolve.py)
    settings      known settings of the framework (docs/settings.md)
    of_plan       settings that a plan or configuration has: no note if they change nothing
    network_at    of a job that trains a network: its graph at a micro-batch; None: that of the built-in network
    """
    from perfmodel.cost.resolve import ACCELERATOR_PROFILE, CPU_PROFILE, calibration_reference, default_profile, resolve_estimator
    from perfmodel.hardware.calibration import MOST_BUSY
    from perfmodel.hardware.reader import LOCALHOST

    if network_at is None and isinstance(job.model, NetworkModel):
        network_at = _network_at(job.model)
    reference, found_cluster = find_cluster(cluster, chips)
    chosen, behaviours = constants_of(found_cluster, calibration, profile, settings)
    sentences = [*notes]
    if chips is None and not isinstance(cluster, Cluster) and reference != LOCALHOST and not found_cluster.pools:
        sentences.insert(0, f"chips={found_cluster.num_chips}: not given, so taken from the file of {found_cluster.name}")
    if chosen.fit.busy_fraction > MOST_BUSY:
        busy = f"was measured while other processes took {chosen.fit.busy_fraction:.0%} of the processors"
        sentences.append(f"calibration={chosen.name}: {busy}; calibrate again when the machine is quiet")
    if calibration is not None and chosen.chips and found_cluster.chip.name not in chosen.chips:
        elsewhere = f"was measured on {', '.join(chosen.chips[:3])}, not on {found_cluster.chip.name}"
        sentences.append(f"calibration={chosen.name}: {elsewhere}: its shares of the data sheet's rates are taken over")
    if profile is None and default_profile(found_cluster.chip) not in (ACCELERATOR_PROFILE, CPU_PROFILE):
        sentences.append(f"profile={default_profile(found_cluster.chip)}: not given, so assumed for {found_cluster.chip.name}")
    file = framework_named(str(profile)) if isinstance(profile, Name) else ""
    named = stated(file_reference(file), FrameworkRef.parse(behaviours.name).settings) if is_path(file) else behaviours.name
    if SEPARATOR in named and (profile is None or isinstance(profile, Name)):
        sentences += _without_effect(named, of_plan)
    measured = "" if not calibration else file_reference(calibration) if isinstance(calibration, Name) else calibration_reference(chosen)
    return Setting(
        reference=reference,
        cluster=found_cluster,
        calibration=measured,
        profile=named,
        rests_on=measured or calibration_reference(chosen),
        estimator=resolve_estimator(job, found_cluster, calibration=chosen, profile=behaviours, network_at=network_at),
        notes=tuple(sentences),
    )


def _without_effect(profile: str, of_plan: Collection[str]) -> list[str]:
    """Return notes on settings that do not change their profile, except those of a plan."""
    from perfmodel.frameworks.profile import load_profile
    from perfmodel.frameworks.settings import with_settings

    ref = FrameworkRef.parse(profile)
    base = load_profile(ref.name)
    idle = {}
    for setting, value in ref.settings.items():  # one by one, since one may need another
        changed = with_settings(base, {setting: value})
        if changed == base and setting not in of_plan:
            idle[setting] = value
        base = changed
    rule = f"changes nothing about {short_name(ref.name)}, which has it so already or does not depend on it"
    return [f"setting {setting}: {rule}" for setting in settings_text(idle).split(SEPARATOR) if setting]


def _network_at(model: NetworkModel) -> Callable[[int], Graph]:
    """Return the graph at each batch of a built-in network."""
    if model.is_imported:
        raise own_code(model)
    from perfmodel.workload.networks import load_network

    check_sizes(model.sizes, "micro_batch")
    return lambda batch: load_network(model.name, batch=batch, **model.sizes)  # type: ignore[arg-type]


def own_code(model: NetworkModel, verb: str = "predict") -> InputError:
    """Return the error for a plan whose network is user code, which is not imported without a request. `verb`: of the command."""
    rule = "is Python code of your own, which a plan alone does not start"
    return bad_field(
        "network", model.name, rule, f"if you trust it, `perfmodel {verb} PLAN --network {shlex.quote(model.name)}` {verb}s it"
    )


def check_sizes(sizes: Mapping[str, object], batch: str) -> None:
    """Raise InputError if the sizes contain the batch. `batch`: the name of its own argument."""
    if "batch" in sizes:
        raise bad_field("size", f"batch={sizes['batch']}", "the batch is no size of a network", f"give it as {batch}")


def constants_of(
    cluster: Cluster, calibration: Name | Calibration | None, profile: Name | ExecutionProfile | None, settings: SettingValues = None
) -> tuple[Calibration, ExecutionProfile]:
    """Return calibration and profile: objects unchanged, names and paths loaded, None by the cluster's chip. settings: of the framework."""
    from perfmodel.cost.resolve import choose_calibration, default_profile
    from perfmodel.frameworks.profile import ExecutionProfile, load_profile
    from perfmodel.hardware.calibration import Calibration

    for value, field, kind in ((calibration, "calibration", Calibration), (profile, "profile", ExecutionProfile)):
        if value is not None:
            check_name(value, field, kind, f"see `perfmodel {field}s`")
    given = read_settings(settings) if settings else {}
    if profile is None or isinstance(profile, Name):
        name = str(profile or default_profile(cluster.chip))
        profile = load_profile(stated(name, given) if given else name)
    return choose_calibration(cluster.chip, calibration), with_stated(profile, given) if given else profile


def find_cluster(cluster: Name | Cluster, chips: int | str | None) -> tuple[str, Cluster]:
    """Return the reference of the cluster in a plan file, and the cluster with that number of chips."""
    from perfmodel.hardware.cluster_text import chip_cluster, is_mixed
    from perfmodel.hardware.reader import LOCALHOST, load_cluster

    check_name(cluster, "cluster", Cluster, "see `perfmodel clusters`")
    chips = None if chips is None else read_integer(chips, "chips")
    if isinstance(cluster, Cluster):
        return cluster.name, cluster if chips is None else cluster.with_chips(chips)
    is_file = is_path(cluster) and not is_mixed(str(cluster)) and chip_cluster(str(cluster)) is None
    if chips is None and not is_file and str(cluster) != LOCALHOST and not is_mixed(str(cluster)):
        raise InputError("chips: is missing; say how many chips the job runs on, for example 64")
    found_cluster = load_cluster(cluster, num_chips=chips)
    return file_reference(cluster) if is_file else found_cluster.name, found_cluster


def file_reference(name: Name) -> str:
    """Return a name unchanged, and the absolute path of a file, so that a saved plan finds it from any folder."""
    try:
        return str(Path(name).resolve()) if is_path(name) else str(name)
    except (OSError, RuntimeError, ValueError):  # no working folder, circular links, a null byte: the reader reports the fault
        return str(name)


def make_job(
    model: Name | TransformerConfig,
    *,
    global_batch: int | str,
    seq_len: int | str,
    precision: str = Precision.BF16_MIXED,
    optimizer: str = Optimizer.ADAMW,
    train: str | Training = FULL_TRAINING,
    routing: Routing = BALANCED,
) -> TrainingJob:
    """Return a training job; `model` is a shipped model's name, the path of a config.json, or a configuration."""
    from perfmodel.workload.models import load_model

    check_name(model, "model", TransformerConfig, "see `perfmodel models`")
    return TrainingJob(
        model=model if isinstance(model, TransformerConfig) else load_model(model),
        global_batch=read_integer(global_batch, "global_batch"),
        seq_len=read_integer(seq_len, "seq_len"),
        precision=choice_of(Precision, precision, "precision"),
        optimizer=choice_of(Optimizer, optimizer, "optimizer"),
        train=training_of(train),
        routing=routing,
    )


def plan_in(setting: Setting, knobs: Knobs) -> Plan:
    """Return the plan that the knobs describe: missing degrees are 1, the remaining chips go to dp_replicate, under ZeRO to dp_shard.

    The default ZeRO stage is 0 under every profile, because a table over profiles compares one plan. Recomputation is the documented
    default of the trainer.
    """
    estimator = setting.estimator
    given = {"attention": estimator.profile.kernels.default_attention} | with_context_form(knobs.planned(), setting)
    if default := default_recompute(setting, knobs):
        given["recompute"] = default
    plan = plan_of_knobs(
        estimator.job,
        given,
        cluster=setting.reference,
        num_chips=setting.cluster.num_chips,
        profile=setting.profile,
        calibration=setting.calibration,
    )
    if not setting.cluster.pools:
        return plan
    from perfmodel.cost.mixed import balanced_plan, mixed_estimator

    return balanced_plan(mixed_estimator(estimator), plan)


def default_recompute(setting: Setting, knobs: Knobs) -> str:
    """Return the documented default of the trainer for recomputation; empty if it has none, or if the knobs state it."""
    is_given = knobs.recompute or knobs.recompute_modules
    return "" if is_given else setting.estimator.profile.runs.default_recompute


def with_context_form(given: dict[str, Any], setting: Setting, **before: int) -> dict[str, Any]:
    """Return the knobs with the rules of the stated form of context parallelism. before: degrees of a plan that they change."""
    form = setting.estimator.profile.communication.context_form
    if form != ULYSSES or "rules" in given:
        return given
    rules = rules_of_form(form, cp=given.get("cp", before.get("cp", 1)), tp=given.get("tp", before.get("tp", 1)))
    if rules is None:
        return given
    given = {**given, "rules": rule_set_of(rules)}
    given.pop("sequence_parallel", None)
    return given


def placed(plan: Plan, setting: Setting) -> Plan:
    """Return the plan with the names of the cluster, calibration and profile that predict it."""
    if (plan.cluster, plan.calibration, plan.profile) == (setting.reference, setting.calibration, setting.profile):
        return plan
    return replace(plan, cluster=setting.reference, calibration=setting.calibration, profile=setting.profile)


def predict_in(setting: Setting, plan: Plan, *, memory_headroom: float | None = None, risk: float | None = None) -> Prediction:
    return predict_in_columns([(setting, plan)], memory_headroom=memory_headroom, risk=risk)[0]


def predict_in_columns(
    placed: Sequence[tuple[Setting, Plan]], *, memory_headroom: float | None = None, risk: float | None = None
) -> list[Prediction]:
    """Return the predictions of plans that agree in `Estimator.shared_by_columns`, each in its setting."""
    settings, plans = zip(*placed, strict=True)
    return list(map(annotated, settings[0].estimator.predict_columns(plans, memory_headroom=memory_headroom, risk=risk), settings))


def annotated(prediction: Prediction, setting: Setting) -> Prediction:
    """Return the prediction with the names of its setting, and with the warnings of its plan, model and cluster."""
    job, profile = prediction.plan.job, setting.estimator.profile
    model = job.model if isinstance(job.model, TransformerConfig) else None
    warnings = [*prediction.warnings, *setting.notes]
    if model is not None and job.seq_len > model.positions.max_position_embeddings:
        positions = f"is beyond the {model.positions.max_position_embeddings} positions of {model.name} (max_position_embeddings)"
        warnings.append(f"seq_len={job.seq_len} {positions}: time and memory are predicted as if it took them")
    if model is not None and model.origin.left_out:
        warnings.append(tower_note(model))
    loss = profile.kernels.loss_form
    if loss != WHOLE_LOSS and "loss" not in profile.unknown and "loss" not in FrameworkRef.parse(profile.name).settings:
        warnings.append(f"loss={loss}: not given, so the default of {setting.profile} (--setting loss=whole keeps all logits)")
    if profile.release and (unlike := unlike_recipe(profile, prediction.plan, setting.cluster.chip.name)):
        warnings.append(unlike)
    if 0 < setting.cluster.largest_job < prediction.plan.num_chips:
        warnings.append(
            f"chips={prediction.plan.num_chips}: the largest job of {setting.cluster.name} is {setting.cluster.largest_job} chips; "
            "more are assumed to have the same bandwidth and latency between nodes"
        )
    if setting.cluster.pools:
        from perfmodel.cost.mixed import mixed_estimator, placement_text

        warnings.append(placement_text(mixed_estimator(setting.estimator), prediction.plan))
    if held := prediction.conditions.host_memory:
        excess = ": more than a server with 2 TB has for each of eight" if held > MOST_HOST_MEMORY else ""
        warnings.append(f"{format_bytes(held)} for each chip lie in the host's memory{excess}")
    compression = prediction.plan.compression
    if compression != NO_COMPRESSION and (note := compression_note(compression)):
        warnings.append(note)
    core = (Recompute.SELECTIVE, DEFAULT_RECOMPUTE_OPERATORS, AttentionKernel.FLASH)
    if (prediction.plan.recompute, prediction.plan.recompute_operators, prediction.plan.attention) == core:
        warnings.append("recompute=selective saves next to nothing with flash attention, which keeps no scores: it costs time")
    if prediction.mfu_palm > 1.0:
        warnings.append(
            "MFU as PaLM counts it is above 100 %: it counts the full square of attention, of which causal attention computes half"
        )
    extra_mfu = prediction.mfu_palm - prediction.mfu_causal  # PaLM's MFU counts the full square of scores, the causal one half of it
    is_attention = model is not None and prediction.mfu_causal and extra_mfu / prediction.mfu_causal >= _MOSTLY_ATTENTION
    if is_attention and (kernel := attention_note(prediction.plan, profile, setting.estimator.machine)):
        warnings.append(kernel)
    at_loss = prediction.verdict is Verdict.DOES_NOT_FIT and prediction.memory_moment == LOSS_MOMENT
    loss = small_loss(profile) if at_loss else ""
    conditions = replace(prediction.conditions, calibration=setting.rests_on, small_loss=loss)
    return replace(prediction, plan=placed(prediction.plan, setting), conditions=conditions, warnings=tuple(dict.fromkeys(warnings)))


def tower_note(model: TransformerConfig) -> str:
    """Return a note on a part of the model that is not predicted; empty if there is none."""
    if not model.origin.left_out:
        return ""
    counted = f"only the {model.num_parameters:,} parameters of its language model are counted"
    return f"{model.name}: {model.origin.left_out} is left out; {counted}"


def setting_of_plan(
    plan: Plan,
    *,
    job: TrainingJob | None = None,
    chips: int | None = None,
    cluster: Name | Cluster | None = None,
    calibration: Name | Calibration | None = None,
    profile: Name | ExecutionProfile | None = None,
    settings: SettingValues = None,
    network_at: Callable[[int], Graph] | None = None,
) -> Setting:
    """Return the setting of a plan: for its own job or another, on its own cluster or another, with its number of chips by default.

    The calibration and the framework of the plan are those of its own chips: on other chips they are replaced by these chips' defaults.
    Settings of the plan hold unless they are given again; a profile that is given as an object has its own.
    """
    from perfmodel.cost.resolve import default_profile

    behaviours: Name | None = plan.framework.name
    given = read_settings(settings)
    if isinstance(profile, Name):
        profile, given = framework_named(str(profile)), dict(FrameworkRef.parse(stated(str(profile), given)).settings)
    if profile is None or isinstance(profile, Name):
        given = {**plan.framework.settings, **given}
    measured: Name | None = plan.calibration or None
    notes: list[str] = []
    if cluster is not None:
        chip = find_cluster(cluster, chips or plan.num_chips)[1].chip
        plan_chip: Chip | None = None
        with suppress(InputError):  # the plan's cluster may be unknown
            plan_chip = find_cluster(plan.cluster, plan.num_chips)[1].chip
        if calibration is None and measured and not (plan_chip and plan_chip.name == chip.name) and not _names_chip(measured, chip.name):
            notes.append(f"calibration={measured} of the plan is not of {chip.name}: the best that is known of {chip.name} is used")
            measured = None
        if profile is None and plan_chip and behaviours == default_profile(plan_chip) != default_profile(chip):
            behaviours = None
    return make_setting(
        plan.job if job is None else job,
        plan.cluster if cluster is None else cluster,
        chips=plan.num_chips if chips is None else chips,
        calibration=measured if calibration is None else calibration,
        profile=behaviours if profile is None else profile,
        settings=given,
        of_plan=plan.framework.settings.keys() - read_settings(settings).keys(),
        notes=tuple(notes),
        network_at=network_at,
    )


def _names_chip(calibration: Name, chip: str) -> bool:
    from perfmodel.cost.resolve import user_folders
    from perfmodel.hardware.calibration import PRIOR_NAME, SPEC_SHEET_NAME
    from perfmodel.hardware.reader import load_calibration

    if str(calibration) in (PRIOR_NAME, SPEC_SHEET_NAME):
        return False
    try:
        loaded = load_calibration(calibration, user_folders())
    except InputError:
        return False
    return chip in (*loaded.chips, *loaded.relatives)


def load_plan(plan: Plan | Name) -> Plan:
    """Return a plan: an object unchanged, or loaded from its file, or a shipped expert plan by its name."""
    from perfmodel.parallel.plan_file import read_plan

    check_name(plan, "plan", Plan, "see strategies/plans for examples")
    return plan if isinstance(plan, Plan) else read_plan(plan)
