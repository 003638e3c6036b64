"""Real training steps on one GPU, as JSON: `python -m lab.gpu_checks [--limit SECONDS] [--steps N] [--serving]`.

Each case is a shipped configuration (with fewer layers where it must fit) with one attention kernel, recomputation and
precision. The records are Measurements that include the plan, so that the same plans can be predicted later.
One GPU has no communication: only compute and memory are measured. `--serving` measures decode and prefill steps of real layers
in bf16, with typical batch sizes and lengths of servers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

from perfmodel.execute.launch.launch import WorkerGroup
from perfmodel.execute.run import run_plan
from perfmodel.execute.runner import num_gpus
from perfmodel.execute.serving.run import run_serving
from perfmodel.execute.shrink import runnable_model
from perfmodel.foundation.dtypes import Dtype
from perfmodel.foundation.errors import PerfModelError
from perfmodel.parallel.plan import Plan, make_plan
from perfmodel.parallel.results import StepShape
from perfmodel.workload.job import Precision, TrainingJob
from perfmodel.workload.models import load_model


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuCase:
    """One training step to measure. layers=0 keeps the model's number of layers."""

    model: str
    seq_len: int
    micro_batch: int
    num_microbatches: int = 1
    layers: int = 0
    precision: Precision = Precision.BF16_MIXED
    attention: str = "flash"
    recompute: str = "none"
    checks: bool = False

    def plan(self) -> Plan:
        config = load_model(self.model)
        if self.layers:
            config = config.with_layers(self.layers)
        job = TrainingJob(
            model=config, global_batch=self.micro_batch * self.num_microbatches, seq_len=self.seq_len, precision=self.precision
        )
        return make_plan(
            job,
            cluster="localhost",
            num_chips=1,
            micro_batch=self.micro_batch,
            attention=self.attention,
            recompute=self.recompute,
            profile="torch-fsdp2",
        )


#: Ordered by usefulness, so that a short run covers the most informative cases. All fit an 80 GB chip.
CASES = (
    GpuCase(model="gpt2", seq_len=1024, micro_batch=2, precision=Precision.FP32, checks=True),
    GpuCase(model="gpt2", seq_len=1024, micro_batch=16),
    GpuCase(model="llama-3-8b", layers=8, seq_len=4096, micro_batch=1),
    GpuCase(model="llama-3-8b", layers=8, seq_len=4096, micro_batch=1, recompute="full"),
    GpuCase(model="gpt2-xl", seq_len=1024, micro_batch=4),
    GpuCase(model="gpt2-xl", seq_len=1024, micro_batch=4, recompute="full"),
    GpuCase(model="gpt2-xl", seq_len=1024, micro_batch=4, attention="unfused"),
    GpuCase(model="gpt2-xl", seq_len=1024, micro_batch=4, attention="unfused", recompute="selective"),
    GpuCase(model="llama-2-7b", layers=8, seq_len=4096, micro_batch=2),
    GpuCase(model="llama-3-8b", layers=4, seq_len=8192, micro_batch=2, num_microbatches=2),
    GpuCase(model="llama-3-8b", layers=4, seq_len=16384, micro_batch=1, recompute="full"),
    GpuCase(model="llama-3-70b", layers=2, seq_len=4096, micro_batch=1),
    GpuCase(model="gpt2-medium", seq_len=1024, micro_batch=8, num_microbatches=4),
    GpuCase(model="gpt2-medium", seq_len=512, micro_batch=8, precision=Precision.FP32),
    GpuCase(model="gpt2-large", seq_len=1024, micro_batch=8, precision=Precision.BF16),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingCase:
    """Layers of a model whose steps are measured. checks: also compare logits of a small model of the family with those without cache."""

    model: str
    layers: int
    shapes: tuple[StepShape, ...]
    checks: bool = False


#: Typical steps of a server: one sequence, growing batches, a batch with long contexts, a prompt, and a chunk of a prompt.
_SERVED = (
    *(StepShape(sequences=number, cached=1023, new=1) for number in (1, 8, 64, 256)),
    StepShape(sequences=32, cached=8191, new=1),
    StepShape(sequences=1, cached=0, new=2048),
    StepShape(sequences=1, cached=2048, new=2048),
)
#: All fit an 80 GB chip.
SERVING_CASES = (
    ServingCase(model="llama-3-8b", layers=8, shapes=_SERVED, checks=True),
    ServingCase(model="llama-3-70b", layers=4, shapes=_SERVED),
    ServingCase(model="mixtral-8x7b", layers=2, shapes=_SERVED, checks=True),
    ServingCase(model="deepseek-v3", layers=4, shapes=_SERVED, checks=True),
    ServingCase(model="gpt-oss-20b", layers=4, shapes=_SERVED),
)


def run_serving_cases(cases: tuple[ServingCase, ...], *, rounds: int, time_limit: float) -> list[dict[str, Any]]:
    """Return the steps or the error of each case. Cases that do not start within `time_limit` seconds are recorded as skipped."""
    start, records = time.monotonic(), []
    for case in cases:
        record: dict[str, Any] = {"case": f"{case.model} {case.layers} layers, serving"}
        records.append(record)
        if time.monotonic() - start > time_limit:
            record["error"] = "skipped: the time limit had passed"
            continue
        try:
            with WorkerGroup(1, device="cuda", hang_timeout=120.0) as group:
                if case.checks:
                    small = runnable_model(load_model(case.model))
                    shape = StepShape(sequences=2, cached=64, new=1)
                    record["logit_error"] = run_serving(small, [shape], group=group, rounds=1, repeats=1).logit_error
                config = load_model(case.model).with_layers(case.layers)
                measured = run_serving(config, case.shapes, dtype=Dtype.BF16, rounds=rounds, checks=False, group=group)
            record["measurement"] = {
                "chip": measured.chip,
                "software": dict(measured.software),
                "steps": [{**asdict(step.shape), "times": step.times, **asdict(step.counts)} for step in measured.steps],
            }
        except PerfModelError as error:
            record["error"] = str(error)
        for step in record.get("measurement", {}).get("steps", ()):
            shape = StepShape(sequences=step["sequences"], cached=step["cached"], new=step["new"])
            print(f"{record['case']:40s} {shape!s:24s} {statistics.median(step['times']) * 1e3:9.3f} ms", file=sys.stderr, flush=True)
        if "error" in record:
            print(f"{record['case']:40s} {record['error']}", file=sys.stderr, flush=True)
    return records


def run_cases(cases: tuple[GpuCase, ...], *, steps: int, time_limit: float) -> list[dict[str, Any]]:
    """Return the measurement or the error of each case. Cases that do not start within `time_limit` seconds are recorded as skipped."""
    start, records = time.monotonic(), []
    group: WorkerGroup | None = None
    try:
        for case in cases:
            plan = case.plan()
            sizes = f"{plan.job.model.name} s={case.seq_len} b={case.micro_batch}x{case.num_microbatches}"
            label = f"{sizes} {case.precision} {case.attention} recompute={case.recompute}"
            record: dict[str, Any] = {"case": label}
            records.append(record)
            if time.monotonic() - start > time_limit:
                record["error"] = "skipped: the time limit had passed"
                continue
            try:
                if group is None:
                    group = WorkerGroup(1, device="cuda", hang_timeout=60.0).__enter__()
                record["measurement"] = run_plan(plan, steps=steps, warmup=3, check_gradients=case.checks, group=group).to_dict()
            except PerfModelError as error:
                record["error"] = str(error)
                record["notes"] = getattr(error, "__notes__", [])[-1:]
                group = None  # the error closed the group; the next case starts a new one
            measured = record.get("measurement", {})
            summary = f"{measured['step_time'] * 1e3:9.2f} ms {measured['peak_memory'] / 2**30:7.2f} GiB" if measured else record["error"]
            print(f"{label:80s} {summary}", file=sys.stderr, flush=True)
    finally:
        if group is not None:
            group.close()
    return records


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure training steps of real models on one GPU; prints JSON.")
    parser.add_argument("--limit", type=float, default=420.0, help="start no case later than this many seconds")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each case")
    parser.add_argument("--first", type=int, default=len(CASES), help="number of cases to run")
    parser.add_argument("--serving", action="store_true", help="decode steps and prefills in place of training steps")
    options = parser.parse_args()
    if num_gpus() < 1:
        print("gpus=0: this needs one NVIDIA GPU; run it where nvidia-smi lists one", file=sys.stderr)
        return 2
    if options.serving:
        records = run_serving_cases(SERVING_CASES[: options.first], rounds=options.steps, time_limit=options.limit)
    else:
        records = run_cases(CASES[: options.first], steps=options.steps, time_limit=options.limit)
    print(json.dumps({"schema_version": 1, "records": records}))
    return 0 if all("measurement" in record for record in records) else 1


if __name__ == "__main__":
    sys.exit(main())
