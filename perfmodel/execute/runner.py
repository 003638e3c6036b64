"""Execution and measurement of a plan with torch's modules. Imports torch in the workers only."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from perfmodel.execute.launch.launch import Worker
from perfmodel.execute.launch.rank_results import TOLERANCE, RankMeasurement, communication_times, slowest_times, worst_error
from perfmodel.foundation.dtypes import itemsize
from perfmodel.foundation.errors import InputError
from perfmodel.hardware.local import gpu_names
from perfmodel.parallel.choices import ZeroStage
from perfmodel.parallel.compression import Compressor
from perfmodel.parallel.executable import not_executable_reason
from perfmodel.parallel.plan import Plan
from perfmodel.parallel.results import CollectiveCount, Measurement, interquartile_range

#: Result of one rank: gradient errors by name, measurement, device name, software versions.
RankResult: TypeAlias = tuple[dict[str, float], RankMeasurement, str, dict[str, str]]

#: Processes that may share a core. With more than one per core, times are dominated by the scheduler: fine for checks only.
RANKS_PER_CORE = 4
#: Models up to this size are checked against a single process before they are timed.
CHECKED_PARAMETERS = 300_000_000
DEVICES = ("auto", "cpu", "cuda")
ADDENDS = 4.0
"""Ratio of the gradients of single ranks to their mean, in the tolerance of cast gradients."""


def num_gpus() -> int:
    """Return the number of NVIDIA GPUs visible to torch, determined without torch."""
    present = len(gpu_names())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not present:
        return present
    named = 0
    for entry in (entry.strip() for entry in visible.split(",")):
        if not (entry.startswith(("GPU-", "MIG-")) or (entry.isascii() and entry.isdigit() and int(entry[:9]) < present)):
            break  # CUDA ignores all entries from the first invalid one
        named += 1
    return min(named, present)


def num_devices(device: str) -> int:
    """Return the number of ranks that may run on this machine with that kind of device."""
    return num_gpus() if device == "cuda" else max(8, RANKS_PER_CORE * len(os.sched_getaffinity(0)))


def pick_device(device: str, num_ranks: int) -> str:
    """Return cpu or cuda; `auto` selects GPUs if there is one per rank."""
    if device not in DEVICES:
        raise InputError(f"device={device}: not known; use {', '.join(DEVICES)}")
    if device == "auto":
        return "cuda" if num_gpus() >= num_ranks else "cpu"
    if device == "cuda" and not num_gpus():
        raise InputError("device=cuda: torch would see no GPU on this machine; use --device cpu")
    return device


def executable_reason(plan: Plan, world_devices: int) -> str:
    """Return why this plan cannot run with `world_devices` devices; empty if it can."""
    if plan.num_chips > world_devices:
        return (
            f"chips={plan.num_chips}: this machine has room for {world_devices} ranks; "
            "use --shrink for the same form of plan with fewer ranks and layers"
        )
    return not_executable_reason(plan)


def least_state_bytes(plan: Plan) -> float:
    """Return the bytes of weights, gradients and optimizer state over all ranks, the minimum for a plan to start."""
    job, layout = plan.job, plan.layout
    policy = job.policy
    stored = float(itemsize(policy.parameter))
    gradient = float(itemsize(policy.gradient_reduce))
    state = policy.state_bytes_per_parameter(job.optimizer)
    copies, shards = layout.dp_replicate * layout.cp, layout.dp_shard
    # experts have fewer replicas, as each is held by fewer ranks
    routed = job.transformer.num_routed_parameters
    held = job.transformer.num_parameters - routed + routed * layout.tp / (plan.ep * plan.etp)
    if plan.zero is ZeroStage.NONE:
        return held * (stored + gradient + state) * copies * shards
    ways = layout.dp_shard * layout.cp
    if plan.zero is ZeroStage.OPTIMIZER:
        return held * layout.dp_replicate * ((stored + gradient) * ways) + job.transformer.num_parameters * layout.dp_replicate * state
    return job.transformer.num_parameters * layout.dp_replicate * (stored + gradient + state)


def check_memory(plan: Plan, device: str) -> None:
    """Raise InputError for a plan that exceeds this machine's ranks or memory, before any process starts."""
    reason = executable_reason(plan, num_devices(device))
    if reason:
        raise InputError(reason)
    if device == "cpu" and hasattr(os, "sysconf"):
        capacity = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        need = least_state_bytes(plan)
        if need > capacity:
            raise InputError(
                f"model={plan.job.model.name}: its weights, gradients and optimizer state take {need / 2**30:.0f} GiB over all ranks, "
                f"this machine has {capacity / 2**30:.0f} GiB; use --shrink for the same form of plan with a smaller model"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Options of a run: timed and warm-up steps, gradient check, counted and memory-tracked steps."""

    steps: int
    warmup: int
    checks: bool
    inspects: bool


def run_on_rank(worker: Worker, plan: Plan, options: RunOptions) -> RankResult:
    """Check and measure the plan on this rank."""
    import gc

    from perfmodel.execute.measure.measure import describe_on_rank, measure_on_rank
    from perfmodel.execute.uniform.gradient_check import check_gradients_on_rank

    errors = check_gradients_on_rank(worker, plan) if options.checks else {}
    gc.collect()
    measured = measure_on_rank(worker, plan, options.steps, options.warmup, inspects=options.inspects)
    gc.collect()
    return errors, measured, *describe_on_rank(worker)


def gathered_results(worker: Worker, plan: Plan, options: RunOptions) -> list[RankResult]:
    """Run the plan on this rank of a launcher's, and return the results of all ranks."""
    import torch.distributed as dist

    results: list[RankResult] = [({}, None, "", {})] * worker.world_size  # type: ignore[list-item]
    dist.all_gather_object(results, run_on_rank(worker, plan, options))
    return results


def gradient_tolerance(plan: Plan) -> float:
    """Return the largest relative error of a correct gradient of the plan in fp32.

    The reduction of cast gradients over n ranks rounds n times: by n u |g|, u half the last digit and |g| the mean size of the addends,
    which are up to `ADDENDS` times as large as their mean. What low-rank factors leave out is kept, and checked with them.
    """
    rounding = {Compressor.FP16: 2.0**-11, Compressor.BF16: 2.0**-8}.get(plan.compression.method, 0.0)
    return TOLERANCE + ADDENDS * plan.layout.data_parallel * plan.layout.cp * rounding


def gradient_error(errors: Sequence[dict[str, float]], tolerance: float = TOLERANCE) -> float:
    """Return the largest error on any rank; nan if nothing was checked. Raise RunError if it exceeds the tolerance."""

    def sentence(name: str, error: float, others: int) -> str:
        return (
            f"gradient check: {name} differs from one process by {error:.1e} of its size (allowed {tolerance:.0e}), "
            f"and {others} more; the plan's times would mean nothing"
        )

    return worst_error(errors, tolerance, sentence)


def assemble(
    plan: Plan,
    results: Sequence[RankResult],
    *,
    device: str,
    warmup: int,
    busy_fraction: float = 0.0,
) -> Measurement:
    """Combine the results of the ranks into one measurement."""
    error = gradient_error([result[0] for result in results], gradient_tolerance(plan))
    ranks = [result[1] for result in results]
    times = slowest_times(ranks)
    slowest = [max(ranks, key=lambda rank, i=i: rank.step_times[i]).parts[i] for i in range(len(times))]  # type: ignore[misc]
    names = dict.fromkeys(name for parts in slowest for name in parts)
    parts = {name: statistics.median(parts.get(name, 0.0) for parts in slowest) for name in names}
    parts |= communication_times(ranks)
    tallies = [rank.issued.tally for rank in ranks]
    keys = dict.fromkeys(key for tally in tallies for key in tally.counts)
    collectives = tuple(
        CollectiveCount(
            kind=kind,
            axis=axis,
            count=max(tally.counts.get((kind, axis), 0) for tally in tallies),
            num_bytes=max(tally.num_bytes.get((kind, axis), 0.0) for tally in tallies),
        )
        for kind, axis in keys
    )
    memory = tuple(rank.peak_memory for rank in ranks)
    return Measurement(
        plan=plan,
        plan_hash=plan.hash(),
        chip=results[0][2],
        software=results[0][3],
        num_ranks=len(ranks),
        device=device,
        warmup=warmup,
        steps=len(times),
        step_times=times,
        step_time=statistics.median(times),
        step_time_spread=interquartile_range(times),
        parts=parts,
        peak_memory=max(memory),
        memory_by_rank=memory,
        collectives=collectives,
        loss=sum(rank.first_loss_share for rank in ranks),
        gradient_error=error,
        busy_fraction=busy_fraction,
    )
