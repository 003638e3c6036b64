"""`run_demo`: the complete pipeline on this machine, at small scale. Calibrate, search, run, compare.

It compares plans of a small GPT-2 on two processes: fully sharded against plain data parallelism, and the communication of tensor and
pipeline parallelism. This is the study of arXiv 2405.15628 (DDP against FSDP for GPT-2) in one command.
The predictions are based on microbenchmarks alone: nothing is fitted to the plans that are run.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfmodel.calibrate.fit_host import fit_measurement
from perfmodel.cost.estimate import Estimator
from perfmodel.cost.resolve import resolve_estimator
from perfmodel.execute.launch.launch import WorkerGroup
from perfmodel.execute.measure.machine import CPU_PROFILE, measure_machine
from perfmodel.execute.measure.rounds import ROUNDS, Measured, Progress, anchor_on_rank, measure_rounds
from perfmodel.execute.runner import executable_reason
from perfmodel.foundation.errors import InputError
from perfmodel.frameworks.profile import load_profile
from perfmodel.hardware.calibration import Calibration
from perfmodel.hardware.local import local_cluster
from perfmodel.hardware.writer import save_calibration
from perfmodel.parallel.plan import Plan
from perfmodel.parallel.results import Comparison
from perfmodel.planner.result import TrainingSearch
from perfmodel.planner.search import search
from perfmodel.planner.uniform.search import UniformPlans
from perfmodel.planner.uniform.space import Space
from perfmodel.workload.config import TransformerConfig
from perfmodel.workload.job import Precision, TrainingJob
from perfmodel.workload.models import load_model

if TYPE_CHECKING:
    from perfmodel.parallel.prediction import Prediction

NUM_RANKS = 2

#: A round starts only if it ends within this time after the start. [s]
TIME_LIMIT = 240.0
#: Measured times that differ by less are a tie: their order may change in a repeated measurement.
TIE = 0.15


def demo_model() -> TransformerConfig:
    """Return GPT-2's architecture at the size of nanoGPT's character model (6 layers, 384 wide, 6 heads), with 4096 tokens."""
    return load_model("gpt2").having(
        name="gpt2-small-demo",
        num_hidden_layers=6,
        hidden_size=384,
        num_attention_heads=6,
        num_key_value_heads=6,
        head_dim=64,
        intermediate_size=1536,
        vocab_size=4096,
        max_position_embeddings=256,
    )


def demo_job() -> TrainingJob:
    return TrainingJob(model=demo_model(), global_batch=8, seq_len=128, precision=Precision.FP32)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoRow:
    """A plan, predicted and measured.

    predicted_place, measured_place   (first, last) possible rank, 1 for the fastest: plans within `TIE` share ranks
    """

    name: str
    comparison: Comparison
    predicted_place: tuple[int, int]
    measured_place: tuple[int, int]

    @property
    def plan(self) -> Plan:
        return self.comparison.measurement.plan


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """Result of the demo.

    rows               in the order of their predicted times, fastest first
    pairs_apart        pairs of plans whose measured times differ by more than `TIE`
    pairs_right        those in the predicted order
    drift              time of a fixed workload in the counted steps, over that in the calibration (1 = equally fast)
    others             largest share of the processors used by other processes in a counted turn
    turns, discarded   counted turns of a few steps of one plan, and those discarded because of other load
    elapsed            seconds by phase
    """

    job: TrainingJob
    calibration: Calibration
    search: TrainingSearch
    rows: tuple[DemoRow, ...]
    pairs_apart: int
    pairs_right: int
    drift: float
    others: float
    turns: int
    discarded: int
    elapsed: dict[str, float]

    @property
    def worst_error(self) -> float:
        return max(abs(row.comparison.time_error) for row in self.rows)


def demo_plans(estimator: Estimator) -> tuple[TrainingSearch, list[tuple[str, Prediction]]]:
    """Return the search over the full space, and the best plan of each well-known form; a plan of two forms has both names."""
    no_recompute: dict[str, Any] = {"recompute": "none"}
    flat = {"pp": 1, "tp": 1, "cp": 1, **no_recompute}
    tensor = {"tp": NUM_RANKS, **no_recompute}
    forms: list[tuple[str, dict[str, Any]]] = [
        ("best found", {}),
        ("data parallel", {**flat, "dp_replicate": NUM_RANKS}),
        ("ZeRO-1", {**flat, "dp_shard": NUM_RANKS, "zero": 1}),
        ("ZeRO-2", {**flat, "dp_shard": NUM_RANKS, "zero": 2}),
        ("FSDP", {**flat, "dp_shard": NUM_RANKS, "zero": 3}),
        ("tensor parallel", {**tensor, "sequence_parallel": False}),
        ("tensor + sequence parallel", {**tensor, "sequence_parallel": True}),
        ("pipeline parallel", {"pp": NUM_RANKS, **no_recompute}),
        ("data parallel, recomputing", {**flat, "dp_replicate": NUM_RANKS, "recompute": "full"}),
    ]
    full: TrainingSearch | None = None
    plans: list[tuple[str, Prediction]] = []
    for name, fixed in forms:
        also = ("front",) if fixed else ("baselines", "front")
        result = search(UniformPlans(estimator=estimator, space=Space(fixed=fixed), also=also), top=20)
        full = full or result
        runnable = [prediction for prediction in result.plans if not executable_reason(prediction.plan, NUM_RANKS)]
        if not runnable:
            continue
        best = runnable[0]
        same = next((i for i, (_, other) in enumerate(plans) if other.plan == best.plan), None)
        if same is None:
            plans.append((name, best))
        else:
            plans[same] = (f"{plans[same][0]} = {name}", plans[same][1])
    assert full is not None
    return full, plans


def run_demo(
    progress: Progress | None = None, *, calibration_path: str | Path | None = None, job: TrainingJob | None = None, rounds: int = ROUNDS
) -> DemoResult:
    """Calibrate briefly, search, run the plans in turn, compare. Under five minutes on two cores.

    calibration_path   file to write the calibration to; None: it is used for this demo only
    job                another job for two ranks
    rounds             number of rounds through all plans
    """
    report = progress or (lambda share, what: None)
    if local_cluster().num_chips < NUM_RANKS:
        raise InputError(f"cores={local_cluster().num_chips}: the demo times {NUM_RANKS} processes, each on a core; use a larger machine")
    job = job or demo_job()
    begin = time.monotonic()
    elapsed: dict[str, float] = {}
    share = [0.0]

    def note(what: str) -> None:
        report(share[0], what)

    def calibrated(done: float, what: str) -> None:
        share[0] = 0.25 * done
        note(f"calibrating: {what}")

    def ran(done: float, what: str) -> None:
        share[0] = 0.25 + 0.75 * done
        note(what)

    with WorkerGroup(NUM_RANKS, device="cpu", hang_timeout=60.0, on_progress=note) as group:
        before = max(group.call(anchor_on_rank, job))
        machine = measure_machine(NUM_RANKS, brief=True, group=group, progress=calibrated)
        calibration = fit_measurement(machine)
        if calibration_path is not None:
            save_calibration(calibration, calibration_path)
        elapsed["calibrate"] = time.monotonic() - begin
        share[0] = 0.25
        note("searching")
        cluster = local_cluster(num_chips=NUM_RANKS)
        estimator = resolve_estimator(job, cluster, calibration=calibration, profile=load_profile(CPU_PROFILE))
        search, plans = demo_plans(estimator)
        elapsed["search"] = time.monotonic() - begin - elapsed["calibrate"]
        measured = measure_rounds(
            group,
            job,
            [(name, prediction.plan) for name, prediction in plans],
            expected_time=sum(prediction.step_time for _, prediction in plans),
            rounds=rounds,
            deadline=begin + TIME_LIMIT,
            progress=ran,
        )
        elapsed["run"] = time.monotonic() - begin - sum(elapsed.values())
    comparisons = [
        Comparison(prediction=prediction, measurement=measurement)
        for (_, prediction), measurement in zip(plans, measured.measurements, strict=True)
    ]
    return summarise(
        job, calibration, search, [name for name, _ in plans], comparisons, measured, drift=measured.anchor / before, elapsed=elapsed
    )


def places(times: Sequence[float], tie: float = TIE) -> list[tuple[int, int]]:
    """Return the first and last possible rank of each time: times that differ by at most `tie` of the shorter one share ranks."""

    def is_clearly_faster(a: float, b: float) -> bool:
        return b > a * (1.0 + tie)

    return [
        (
            1 + sum(is_clearly_faster(other, own_time) for other in times),
            len(times) - sum(is_clearly_faster(own_time, other) for other in times),
        )
        for own_time in times
    ]


def ordered_pairs(predicted: Sequence[float], measured: Sequence[float], tie: float = TIE) -> tuple[int, int]:
    """Return the number of pairs whose measured times differ by more than `tie`, and of those with the predicted order."""
    apart = [(a, b) for a in range(len(measured)) for b in range(len(measured)) if measured[b] > measured[a] * (1.0 + tie)]
    return len(apart), sum(predicted[a] < predicted[b] for a, b in apart)


def summarise(
    job: TrainingJob,
    calibration: Calibration,
    search: TrainingSearch,
    names: Sequence[str],
    comparisons: Sequence[Comparison],
    measured: Measured,
    *,
    drift: float,
    elapsed: dict[str, float],
) -> DemoResult:
    predicted_times = [comparison.prediction.step_time for comparison in comparisons]
    measured_times = [comparison.measurement.step_time for comparison in comparisons]
    apart, right = ordered_pairs(predicted_times, measured_times)
    rows = [
        DemoRow(name=name, comparison=comparison, predicted_place=expected, measured_place=came)
        for name, comparison, expected, came in zip(names, comparisons, places(predicted_times), places(measured_times), strict=True)
    ]
    return DemoResult(
        job=job,
        calibration=calibration,
        search=search,
        rows=tuple(sorted(rows, key=lambda row: row.comparison.prediction.step_time)),
        pairs_apart=apart,
        pairs_right=right,
        drift=drift,
        others=measured.others,
        turns=measured.turns,
        discarded=measured.discarded,
        elapsed=elapsed,
    )
