"""Resolution of names to an estimator: the calibration and the execution profile of a prediction that names none.

calibration  the user's own (`perfmodel calibrate` keeps one for each chip), else a shipped one of the chip, else that of a related chip,
             else the prior of its vendor's neighbouring generations, else typical fractions of the data sheet
profile      `torch-gloo` for the processes of a CPU, `megatron-rocm` for AMD's accelerators, `xla` for chips whose software compiles a step
             as one program (TPUs, Trainium, Gaudi), `generic` for NVIDIA's and all others: the framework is unknown
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from perfmodel.cost.estimate import Estimator, make_estimator, with_kept_programs
from perfmodel.cost.machine import Machine, resolve_machine
from perfmodel.foundation.dtypes import Dtype
from perfmodel.foundation.errors import InputError, bad_field
from perfmodel.foundation.session import session_cache
from perfmodel.frameworks.profile import GENERIC, ExecutionProfile
from perfmodel.hardware.calibration import PRIOR_NAME, SPEC_SHEET, SPEC_SHEET_NAME, Calibration, Provenance, default_calibration
from perfmodel.hardware.chip import Chip
from perfmodel.hardware.cluster import Cluster
from perfmodel.hardware.cluster_text import check_equal_chips, joined_pools
from perfmodel.hardware.reader import calibrations_for, load_calibration, prior_for, user_calibrations_dir
from perfmodel.workload.graph import Graph
from perfmodel.workload.job import PRECISION_POLICIES, TrainingJob
from perfmodel.workload.network_model import NetworkModel
from perfmodel.workload.networks import is_language_model

ACCELERATOR_PROFILE, CPU_PROFILE = GENERIC, "torch-gloo"
_MOST_ESTIMATORS = 16
"""Estimators kept for later predictions, with up to 4096 costs each."""
_PROFILE_OF_VENDOR = {"amd": "megatron-rocm", "google": "xla", "aws": "xla", "intel": "xla"}


def choose_calibration(chip: Chip, name: Calibration | str | Path | None = None) -> Calibration:
    """Return the given calibration, or that of a name or path; without one, the best available of the chip.

    `spec-sheet` is no calibration, `prior` that of the vendor's other chips.
    """
    if isinstance(name, Calibration):
        return name
    if str(name) == SPEC_SHEET_NAME:
        return SPEC_SHEET
    if str(name) == PRIOR_NAME:
        prior = prior_for(chip)
        if prior is None:
            raise bad_field("calibration", name, f"no chip like {chip.name} of its maker is measured", f"use {SPEC_SHEET_NAME}")
        return prior
    if name:
        return load_calibration(name, user_folders())
    return default_calibration(chip.name, calibrations_for(chip, user_folders()))


def calibration_reference(chosen: Calibration) -> str:
    """Return the name of a calibration in plan files: its own; `prior` if made from other chips' calibrations; `spec-sheet` for none."""
    if chosen.provenance is Provenance.PRIOR and not chosen.chips:
        return PRIOR_NAME
    return chosen.name or SPEC_SHEET_NAME


def default_profile(chip: Chip) -> str:
    """Return the default execution profile of a chip."""
    return CPU_PROFILE if chip.units.unit_kind == "core" else _PROFILE_OF_VENDOR.get(chip.vendor.lower(), ACCELERATOR_PROFILE)


def resolve_estimator(
    job: TrainingJob,
    cluster: Cluster,
    *,
    calibration: Calibration,
    profile: ExecutionProfile,
    network_at: Callable[[int], Graph] | None = None,
) -> Estimator:
    """Return the estimator of the job on the cluster. network_at: for a job that trains a network, returns its graph at a micro-batch."""
    if cluster.pools:
        return _mixed_estimator(job, cluster, calibration, profile, network_at)
    if network_at is not None:  # the function may return other graphs for equal jobs
        return _make_estimator(job, cluster, calibration, profile, network_at)
    depends_on: tuple[Any, ...] = (job.model, job.precision, job.optimizer, job.train, job.routing)
    if profile.release:  # its recipes differ with the batch
        depends_on += (job.global_batch, job.seq_len)
    return kept_estimator(_KeptJob(depends_on, job), cluster, calibration, profile).for_job(job)


@dataclass(frozen=True, slots=True)
class _KeptJob:
    """Job as a cache key: jobs that agree in the fields that an estimator depends on are equal."""

    depends_on: tuple[Any, ...]
    job: TrainingJob = field(compare=False)


def _mixed_estimator(
    job: TrainingJob,
    cluster: Cluster,
    calibration: Calibration,
    profile: ExecutionProfile,
    network_at: Callable[[int], Graph] | None,
) -> Estimator:
    """Return the estimator of several kinds of chips. calibration: the first kind's; the others use their best one, or none likewise."""
    from perfmodel.cost.mixed import MixedEstimator

    if network_at is not None:
        check_equal_chips(cluster)

    def estimators_of(pools: tuple[Cluster, ...]) -> tuple[Estimator, ...]:
        estimators = []
        for pool in pools:
            is_given = calibration is SPEC_SHEET or pool.chip.name == cluster.chip.name
            of_pool = calibration if is_given else choose_calibration(pool.chip)
            estimators.append(resolve_estimator(job, pool, calibration=of_pool, profile=profile))
        return tuple(estimators)

    pool_estimators = estimators_of(cluster.pools)
    first, joined = pool_estimators[0], estimators_of(joined_pools(cluster.pools))
    return MixedEstimator(
        job=job,
        cluster=cluster,
        machine=first.machine,
        profile=first.profile,
        programs=first.programs,
        pools=pool_estimators,
        joined=joined,
    )


@session_cache(maxsize=_MOST_ESTIMATORS)
def kept_estimator(kept: _KeptJob, cluster: Cluster, calibration: Calibration, profile: ExecutionProfile) -> Estimator:
    """Return the cached estimator of equal arguments. Files are read before: an edited file makes another estimator."""
    return with_kept_programs(_make_estimator(kept.job, cluster, calibration, profile, machine_of=kept_machine))


@session_cache(maxsize=_MOST_ESTIMATORS)
def kept_machine(cluster: Cluster, calibration: Calibration, dtype: Dtype) -> Machine:
    """Return the cached machine of equal arguments: all jobs on a cluster share it."""
    return resolve_machine(cluster, calibration, dtype)


def fresh_estimator(job: TrainingJob, cluster: Cluster, calibration: Calibration, profile: ExecutionProfile) -> Estimator:
    """Return `kept_estimator` without the caches, for a cluster with columns, which equals no other cluster."""
    return with_kept_programs(_make_estimator(job, cluster, calibration, profile))


def _make_estimator(
    job: TrainingJob,
    cluster: Cluster,
    calibration: Calibration,
    profile: ExecutionProfile,
    network_at: Callable[[int], Graph] | None = None,
    *,
    machine_of: Callable[[Cluster, Calibration, Dtype], Machine] = resolve_machine,
) -> Estimator:
    machine, recipe = machine_of(cluster, calibration, job.policy.compute), job.policy.recipe
    if recipe is not None:
        if recipe.needs not in cluster.chip.peak_flop_rate:
            has, policies = cluster.chip.peak_flop_rate, PRECISION_POLICIES.items()
            runs = [str(name) for name, of in policies if of.compute in has and (of.recipe is None or of.recipe.needs in has)]
            rule = f"{cluster.chip.name} has no units for it ({recipe.needs})"
            raise bad_field("precision", job.precision, rule, f"use {', '.join(runs)} or another chip")
        low = replace(machine_of(cluster, calibration, recipe.product), row_multiple=recipe.row_multiple)
        machine = replace(machine, low=low)
    if isinstance(job.model, NetworkModel) and (job.model.is_imported or not is_language_model(job.model.name)):
        # the constant of a step was measured in the training loops of language models; others have the launches of their kernels alone
        profile = profile.having(step_time_constant=0.0)
    return make_estimator(job, cluster, machine, profile, network_at)


def user_folders() -> tuple[Path, ...]:
    """Return the folder of the user's own calibrations; none for a user without a home."""
    try:
        return (user_calibrations_dir(),)
    except InputError:
        return ()


def is_calibrated(machine: Machine) -> bool:
    """Return whether the matrix multiplies, most of a step, were measured on this chip."""
    return machine.basis.parts["matmul"].startswith(Provenance.CALIBRATED)


def uncalibrated(machine: Machine) -> str:
    """Return in words what the chip has instead of a full calibration of its own; empty if it has one."""
    if is_calibrated(machine):
        return ""
    is_partial = machine.basis.parts["matmul"].startswith(Provenance.PARTIAL)
    return f"a {Provenance.PARTIAL} only" if is_partial else "no calibration of its own"
