"""`measure_machine`: microbenchmarks of this machine, on the number of ranks that its plans will use. Only the workers import torch."""

from __future__ import annotations

import platform
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

from perfmodel.execute.launch.launch import DESCRIBE, Worker, WorkerGroup, workers_of
from perfmodel.execute.launch.processor_use import processor_use
from perfmodel.execute.measure.overhead_programs import overhead_plans, processor_time_on_rank
from perfmodel.execute.measure.rounds import Progress
from perfmodel.execute.measure.scope import Scope, make_scope
from perfmodel.execute.runner import num_gpus, pick_device
from perfmodel.foundation.errors import InputError
from perfmodel.frameworks.profile import load_profile
from perfmodel.hardware.cluster import Cluster
from perfmodel.hardware.local import local_cluster
from perfmodel.hardware.samples import (
    AttentionSample,
    ContentionSample,
    ConvolutionSample,
    DecodeSample,
    MatmulSample,
    Sample,
    StreamingSample,
    WeightSample,
)
from perfmodel.parallel.results import MachineMeasurement

CPU_PROFILE, GPU_PROFILE = "torch-gloo", "torch-fsdp2"

#: Cumulative progress after each phase: start of the workers, kernels, contention, collectives, tiny programs. Empirical.
_PHASES = {False: (0.08, 0.45, 0.55, 0.7, 1.0), True: (0.15, 0.45, 0.55, 0.65, 1.0)}

_MICROBENCHMARKS = "perfmodel.execute.measure.microbenchmarks"

#: Steps of the tiny programs: warm-up and timed.
_WARMUP, _STEPS, _BRIEF_STEPS = 3, 25, 10


def kernels_on_rank(worker: Worker, scope: Scope) -> list[Sample]:
    from perfmodel.execute.measure.microbenchmarks import measure_kernels_on_rank, time_kernels
    from perfmodel.execute.per_operator.microbenchmarks import network_kernels

    of_networks = network_kernels(scope.dtype, worker.device) if worker.device == "cpu" else ()
    return [*measure_kernels_on_rank(worker, scope), *time_kernels(worker, of_networks, scope.budget)]


def measure_machine(
    ranks: int = 2,
    *,
    brief: bool = False,
    device: str = "auto",
    group: WorkerGroup | None = None,
    progress: Progress | None = None,
) -> MachineMeasurement:
    """Measure this machine for predictions; takes under two minutes on two cores, `brief` under one.

    ranks     number of ranks that the plans will use, at most the number of cores or GPUs
    device    cpu, cuda, or auto: GPUs if there are enough
    group     a running WorkerGroup of `ranks` to use
    """
    report = progress or (lambda share, what: None)
    if group is None:
        check_ranks(ranks, device)
    device = group.device if group is not None else pick_device(device, ranks)
    phases = _PHASES[brief]
    report(0.0, "starting workers")
    limits = [0.0, phases[0]]

    def on_progress(what: str) -> None:
        # within a phase, progress approaches the end and never reaches it: the remaining time is unknown
        limits[0] += 0.02 * (limits[1] - limits[0])
        report(limits[0], what)

    with workers_of(group, ranks, device=device, hang_timeout=60.0, on_progress=on_progress) as workers:
        before = workers.on_progress
        workers.on_progress = on_progress
        use = processor_use(workers.pids)
        try:
            measured = _measure(workers, brief, limits, phases, report)
        finally:
            workers.on_progress = before
        busy_fraction = processor_use(workers.pids).others_since(use)
    report(1.0, "done")
    return replace(measured, busy_fraction=busy_fraction)


def check_ranks(ranks: int, device: str) -> None:
    cores = local_cluster().num_chips
    if ranks < 1:
        raise InputError(f"ranks={ranks}: must be at least 1; use 2")
    if device == "cuda" and num_gpus() < ranks:
        raise InputError(f"ranks={ranks}: this machine has {num_gpus()} GPUs; use fewer ranks or --device cpu")
    if pick_device(device, ranks) == "cpu" and ranks > cores:
        raise InputError(
            f"ranks={ranks}: this machine has {cores} cores, and ranks that share a core measure the scheduler; use {cores} or fewer"
        )


def _measure(group: WorkerGroup, brief: bool, limits: list[float], phases: Sequence[float], report: Progress) -> MachineMeasurement:
    def begin(phase: int, what: str) -> None:
        limits[:] = [phases[phase - 1], phases[phase]]
        report(limits[0], what)

    profile = load_profile(GPU_PROFILE if group.device == "cuda" else CPU_PROFILE)
    scope = make_scope(group.device, brief=brief, logit_bytes=profile.kernels.logit_bytes)
    begin(1, "kernels")
    kernels = combine(group.call(kernels_on_rank, scope), slowest=False)
    begin(2, "contention")
    contention = group.call((_MICROBENCHMARKS, "measure_contention_on_rank"), scope)[0]
    begin(3, "collectives")
    collectives = combine(group.call((_MICROBENCHMARKS, "measure_collectives_on_rank"), scope), slowest=True)
    name, software = group.call(DESCRIBE)[0]
    cluster = machine_cluster(group, name)
    on_cpu = group.device == "cpu"
    if on_cpu:
        contention.append(ContentionSample(name="cores", factor=float(local_cluster().num_chips)))
    measured = MachineMeasurement(
        cluster=cluster,
        software=", ".join(f"{key} {value}" for key, value in software.items()),
        notes=f"measured with {group.num_ranks} processes at work on {name} ({platform.system()})",
        profile=profile.name,
        samples=(*(alone(sample, contention) if on_cpu else sample for sample in kernels), *contention, *collectives),
        programs=(),
    )
    if not on_cpu:
        return measured  # host overhead is overlapped by the kernels
    plans = overhead_plans(group.num_ranks, cluster=cluster.name, profile=profile.name, brief=brief)
    steps = _BRIEF_STEPS if brief else _STEPS
    programs = []
    for index, plan in enumerate(plans):
        limits[:] = [phases[3] + (phases[4] - phases[3]) * part / len(plans) for part in (index, index + 1)]
        report(limits[0], f"host overhead, program {index + 1} of {len(plans)}")
        programs.append((plan, max(group.call(processor_time_on_rank, plan, steps, _WARMUP))))
    return replace(measured, programs=tuple(programs))


def combine(by_rank: Sequence[Sequence[Sample]], *, slowest: bool) -> list[Sample]:
    """Return one sample per measurement: the mean over ranks, or the slowest. A rank that did not take part has fewer samples."""
    length = max(len(samples) for samples in by_rank)
    columns = zip(*(samples for samples in by_rank if len(samples) == length), strict=True)
    return [_joined(column, max if slowest else statistics.fmean) for column in columns]


def _joined(samples: Sequence[Sample], time_of: Callable[[list[float]], float]) -> Sample:
    """Return the samples of one measurement as one. time_of: its time from theirs; samples without times are alike."""
    first = samples[0]
    times = {name: time_of([getattr(sample, name) for sample in samples]) for name in ("time", "backward_time") if hasattr(first, name)}
    return replace(first, **times)  # type: ignore[arg-type]


_PART = {
    MatmulSample: "matmul",
    ConvolutionSample: "matmul",
    StreamingSample: "streaming",
    AttentionSample: "attention",
    DecodeSample: "attention",
    WeightSample: "matmul",
}


def alone(sample: Sample, contention: Sequence[Sample]) -> Sample:
    """Return the sample without contention by other ranks; `resolve_machine` applies the contention of the actual number of ranks."""
    factors = {item.name: item.factor for item in contention if isinstance(item, ContentionSample)}
    factor = factors.get(_PART.get(type(sample), ""), 1.0)
    return _joined([sample], lambda times: times[0] / factor)


def machine_cluster(group: WorkerGroup, device_name: str) -> Cluster:
    """Return this machine as a cluster of `group.num_ranks` chips; a GPU is looked up among the known chips."""
    if group.device == "cpu":
        return local_cluster(num_chips=group.num_ranks)
    from perfmodel.hardware.reader import list_chips, load_chip

    chip = load_chip(match_gpu(device_name, list_chips()))
    return replace(local_cluster(num_chips=group.num_ranks), name=f"local-{chip.name}", chip=chip)


def match_gpu(device_name: str, chips: Sequence[str]) -> str:
    """Return the known chip with the most words in common with the driver's name ("NVIDIA A100-SXM4-80GB" -> a100-sxm-80gb)."""
    joined = re.sub(r"tx (\d+)( ti)?", lambda match: f"tx{match[1]}{'ti' if match[2] else ''}", device_name.lower())
    words = set(re.findall(r"[a-z]+\d+[a-z]*|\d+gb|sxm|pcie|nvl", joined))
    best = max(chips, key=lambda chip: (len(words & set(chip.split("-"))), -len(chip)))
    if not words & {part for part in best.split("-") if not part.endswith("gb")}:
        raise InputError(f"device={device_name}: no known chip has that name; describe it in a chip file (see hardware_specs/chips)")
    return best
