"""Measurement of a training program on one rank: timed steps, then one counted and one memory-tracked step."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from perfmodel.execute.launch.launch import Worker
from perfmodel.execute.launch.rank_results import CollectiveTally, IssuedTraffic, RankMeasurement
from perfmodel.execute.measure.instrument import CollectiveCounter, Label, StorageTracker, timed_pipeline_waits
from perfmodel.execute.uniform.parallelize import TrainingProgram
from perfmodel.parallel.plan import Plan

_Result = TypeVar("_Result")


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def timed(worker: Worker, step: Callable[[], _Result]) -> tuple[float, _Result]:
    """Return the time of a step that all ranks begin together [s], and its result."""
    dist.barrier()
    synchronize(worker.device)
    start = time.perf_counter()
    result = step()
    synchronize(worker.device)
    return time.perf_counter() - start, result


def count_step(step: Callable[[], object], label: Label, device: str) -> CollectiveTally:
    """Count the collectives of one step, and the time that each axis blocked this rank."""
    counter = CollectiveCounter(label, times_them=True, synchronize=lambda: synchronize(device))
    with timed_pipeline_waits(counter.tally), counter:
        step()
    return counter.tally


def peak_bytes(program: TrainingProgram) -> float:
    """Return the peak of live storages during a step, for devices without allocator statistics."""
    with StorageTracker() as tracker:
        program.step()
    return float(tracker.peak)


def measure_on_rank(worker: Worker, plan: Plan, steps: int, warmup: int, *, inspects: bool = True) -> RankMeasurement:
    """Build and run the plan's program on this rank, and measure it."""
    on_gpu = worker.device == "cuda"
    program = TrainingProgram(worker, plan)
    times, parts, first_loss = [], [], 0.0
    for index in range(warmup + steps):
        worker.beat(f"step {index}")
        if on_gpu and index == warmup:
            torch.cuda.reset_peak_memory_stats()
        duration, _ = timed(worker, program.step)
        phases = program.clock.durations()
        if index == 0:
            first_loss = program.loss_share()
        if index >= warmup:
            times.append(duration)
            parts.append(phases)
    memory = float(torch.cuda.max_memory_allocated()) if on_gpu else 0.0
    tally = CollectiveTally()
    if inspects:
        worker.beat("counted step")
        dist.barrier()
        tally = count_step(program.step, program.mesh.axis_of, worker.device)
    if inspects and not on_gpu:
        worker.beat("tracked step")
        dist.barrier()
        memory = peak_bytes(program)
    return RankMeasurement(times, parts, first_loss, memory, IssuedTraffic(tally))


def software_versions(worker: Worker) -> dict[str, Any]:
    import platform

    versions = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "backend": "nccl" if worker.device == "cuda" else "gloo",
    }
    if worker.device == "cuda":
        versions["cuda"] = str(torch.version.cuda)
        versions["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())
    return versions


def device_name(worker: Worker) -> str:
    if worker.device == "cuda":
        return str(torch.cuda.get_device_name())
    import platform

    with contextlib.suppress(OSError):
        for line in open("/proc/cpuinfo", encoding="utf-8"):  # noqa: SIM115
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def describe_on_rank(worker: Worker) -> tuple[str, dict[str, Any]]:
    return device_name(worker), software_versions(worker)
