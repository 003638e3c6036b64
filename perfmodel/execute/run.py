"""Entry point for running plans: with torch's own modules if they support the plan, otherwise by interpreting its graph."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection

from perfmodel.execute.launch.launch import WorkerGroup, torchrun_worker, workers_of
from perfmodel.execute.launch.processor_use import processor_use
from perfmodel.execute.per_operator.run import measure_network_plans
from perfmodel.execute.runner import CHECKED_PARAMETERS, RunOptions, assemble, check_memory, gathered_results, pick_device, run_on_rank
from perfmodel.foundation.errors import InputError, bad_field
from perfmodel.parallel.algebra.sharding import FINE_AXES, TENSOR_AXES
from perfmodel.parallel.executable import not_modules_reason
from perfmodel.parallel.per_operator.by_rules import graph_of, plan_by_rules
from perfmodel.parallel.per_operator.measurement import NetworkMeasurement
from perfmodel.parallel.per_operator.mesh import STAGES
from perfmodel.parallel.plan import Plan
from perfmodel.parallel.results import CollectiveCount, Measurement


def run_plan(
    plan: Plan,
    *,
    steps: int = 20,
    warmup: int = 3,
    device: str = "auto",
    check_gradients: bool = True,
    inspects: bool = True,
    hang_timeout: float = 20.0,
    group: WorkerGroup | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> Measurement:
    """Run the plan with torch and measure it. Raise InputError if it cannot run here, RunError if the run fails.

    steps, warmup    timed steps, and steps before them
    check_gradients  first compare every gradient with one process (models of up to CHECKED_PARAMETERS parameters)
    inspects         also run a step that counts collectives and one that tracks memory, neither of them timed
    hang_timeout     seconds without a heartbeat after which the run is ended
    group            a running WorkerGroup of the right size to use; without one, processes are started for this run,
                     unless a launcher such as torchrun started them
    on_progress      called with the activity of rank 0
    """
    if steps < 1 or warmup < 0:
        raise InputError(f"steps={steps}, warmup={warmup}: steps must be at least 1 and warmup not negative; use --steps 20")
    is_interpreted = bool(not_modules_reason(plan))
    if is_interpreted and group is None and "WORLD_SIZE" in os.environ:
        raise bad_field(
            "rules", plan.rule_set, "are interpreted in processes of our own, not in those of a launcher", "run it without torchrun"
        )
    launched = torchrun_worker(hang_timeout + 5.0) if group is None and not is_interpreted else None
    if launched is not None:
        if launched.world_size != plan.num_chips:
            raise InputError(f"chips={plan.num_chips}: the launcher started {launched.world_size} processes; start {plan.num_chips}")
        device = launched.device
    elif group is not None:
        if group.num_ranks != plan.num_chips:
            raise InputError(f"chips={plan.num_chips}: the worker group has {group.num_ranks} ranks; use one of {plan.num_chips}")
        device = group.device
    else:
        device = pick_device(device, plan.num_chips)
    check_memory(plan, device)
    checks = check_gradients and plan.job.transformer.num_parameters <= CHECKED_PARAMETERS
    options = RunOptions(steps=steps, warmup=warmup, checks=checks, inspects=inspects)
    if launched is not None:
        return assemble(plan, gathered_results(launched, plan, options), device=device, warmup=warmup)
    with workers_of(group, plan.num_chips, device=device, hang_timeout=hang_timeout, on_progress=on_progress) as workers:
        if is_interpreted:
            graph = graph_of(plan)
            (measurement,) = measure_network_plans(
                graph, [plan_by_rules(plan, graph)], steps=steps, rounds=1, warmup=warmup, check_gradients=checks, group=workers
            )
            return measurement_of(plan, measurement)
        use = processor_use(workers.pids)
        results = workers.call(run_on_rank, plan, options)
        busy_fraction = processor_use(workers.pids).others_since(use)
    return assemble(plan, results, device=device, warmup=warmup, busy_fraction=busy_fraction)


def measurement_of(plan: Plan, measured: NetworkMeasurement) -> Measurement:
    """Convert the interpreter's measurement of a uniform plan. Collectives are grouped by axis, the parts of tp as one."""
    counts: dict[tuple[str, str], tuple[int, float]] = {}
    for row in measured.traffic:
        key = (str(row.kind), _axes_name(row.axes))
        count, num_bytes = counts.get(key, (0, 0.0))
        counts[key] = (count + row.repeats, num_bytes + row.repeats * row.num_elements * row.itemsize)
    parts = {}
    for name, time in measured.parts.items():
        kind, _, axes = name.partition(".")
        parts[f"{kind}.{_axes_name(axes.split('+')) or axes}"] = time
    return Measurement(
        plan=plan,
        plan_hash=plan.hash(),
        chip=measured.chip,
        software=dict(measured.software),
        num_ranks=measured.num_ranks,
        device=measured.device,
        warmup=measured.warmup,
        steps=len(measured.step_times),
        step_times=measured.step_times,
        step_time=measured.step_time,
        step_time_spread=measured.step_time_spread,
        parts=parts,
        peak_memory=measured.peak_memory,
        memory_by_rank=measured.memory_by_rank,
        collectives=tuple(
            CollectiveCount(kind=kind, axis=axis, count=count, num_bytes=num_bytes) for (kind, axis), (count, num_bytes) in counts.items()
        ),
        loss=measured.loss,
        gradient_error=measured.gradient_error,
        busy_fraction=measured.busy_fraction,
    )


def _axes_name(axes: Collection[str]) -> str:
    """Return the joined names of the axes, with the parts of tp as tp, and stages as pp."""
    if STAGES in axes:
        return "pp"
    return "+".join(dict.fromkeys("tp" if axis in TENSOR_AXES else axis for axis in FINE_AXES if axis in axes))
