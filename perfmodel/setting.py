"""What the verbs start from: a job, a cluster, its calibration and a profile, the knobs that a person set, and the plan that they name."""

from __future__ import annotations

from collections.abc import Sequence
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
    from perfmodel.cost.estimate import Estimator
    from perfmodel.hardware.calibration import Calibration
    from perfmodel.parallel.prediction import Prediction
    from perfmodel.parallel.profile import ExecutionProfile
    from perfmodel.parallel.residuals import StepInterval
    from perfmodel.report.sensitivity import Sensitivity

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
        calibration=file_reference(calibration) if isinstance(calibration, Name) else calibration_reference(chosen),
        estimator=resolve_estimator(job, found, calibration=chosen, profile=habits),
    )


def find_cluster(cluster: Name | Cluster, chips: int | None) -> tuple[str, Cluster]:
    """How a plan file refers to the cluster, and the cluster with that many chips."""
    from perfmodel.hardware.reader import LOCALHOST, load_cluster

    if isinstance(cluster, Cluster):
        return cluster.name, cluster if chips is None else cluster.with_chips(chips)
    reference = file_reference(cluster)
    if chips is None and reference != LOCALHOST:
        raise InputError("chips: is missing; say how many chips the job runs on, for example 64")
    return reference, load_cluster(cluster, num_chips=chips)


def file_reference(name: Name) -> str:
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
        precision=choice_of(Precision, precision, "precision"),
        optimizer=choice_of(Optimizer, optimizer, "optimizer"),
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
    check_headroom(memory_headroom)
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


_Member = TypeVar("_Member", bound=StrEnum)


def choice_of(kind: type[_Member], value: str, field: str) -> _Member:
    try:
        return kind(value)
    except ValueError:
        raise bad_field(field, value, f"not known{suggest(value, kind)}") from None


def missing(field: str, meaning: str) -> NoReturn:
    raise InputError(f"{field}: is missing; give {meaning}")


def check_headroom(memory_headroom: float) -> None:
    if not 0.0 <= memory_headroom < 1.0:
        raise InputError(f"memory_headroom={memory_headroom}: must be a share from 0 to below 1; write 0.1 for a tenth")
