"""Entry point for running plans: with torch's own modules if they support the plan, otherwise by interpreting its graph."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection

from perfmodel.execute.launch.launch import WorkerGroup
from perfmodel.execute.per_operator.run import measure_network_plans
from perfmodel.execute.runner import CHECKED_PARAMETERS, check_memory, pick_device, run_modules, workers_of
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
    """Run the plan with torch and measure it (`run_modules`). Raise InputError if it cannot run here, RunError if the run fails."""
    if steps < 1 or warmup < 0:
        raise InputError(f"steps={steps}, warmup={warmup}: steps must be at least 1 and warmup not negative; use --steps 20")
    if not not_modules_reason(plan):
        return run_modules(
            plan,
            steps=steps,
            warmup=warmup,
            device=device,
            check_gradients=check_gradients,
            inspects=inspects,
            hang_timeout=hang_timeout,
            group=group,
            on_progress=on_progress,
        )
    if group is None and "WORLD_SIZE" in os.environ:
        raise bad_field(
            "rules", plan.rule_set, "are interpreted in processes of our own, not in those of a launcher", "run it without torchrun"
        )
    device = group.device if group is not None else pick_device(device, plan.num_chips)
    check_memory(plan, device)
    graph = graph_of(plan)
    checks = check_gradients and plan.job.transformer.num_parameters <= CHECKED_PARAMETERS
    with workers_of(plan, device, hang_timeout, group, on_progress) as workers:
        (measurement,) = measure_network_plans(
            graph, [plan_by_rules(plan, graph)], steps=steps, rounds=1, warmup=warmup, check_gradients=checks, group=workers
        )
    return measurement_of(plan, measurement)


def measurement_of(plan: Plan, measured: NetworkMeasurement) -> Measurement:
    """Convert the interpreter's measurement of a uniform plan. Collectives are grouped by axis, the parts of tp as one."""
    counts: dict[tuple[str, str], tuple[int, float]] = {}
    for row in measured.traffic:
        key = (str(row.kind), _axes_name(row.axes))
        count, num_bytes = counts.get(key, (0, 0.0))
        counts[key] = (count + row.repeats, num_bytes + row.repeats * row.num_elements * row.itemsize)
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
        parts={_part_name(name): time for name, time in measured.parts.items()},
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


def _part_name(name: str) -> str:
    kind, _, axes = name.partition(".")
    return f"{kind}.{_axes_name(axes.split('+')) or axes}"
