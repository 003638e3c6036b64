"""Accuracy of models with experts and low-precision products, and targets: `python -m tests.benchmarks.experts_report [CASES ...]`.

Nothing is fitted to runs with experts, so that a model or a chip that is left out changes nothing. Times are of whole processes.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from perfmodel.validation.validate import validate_cases
from perfmodel.workload.models import load_model
from tests.benchmarks.accounting_report import show
from tests.benchmarks.processes import best_run
from tests.golden import test_published_experts as golden
from tests.oracles import test_dispatch as dispatch

GOLDEN = Path(__file__).parent.parent / "golden"
SEARCH = "search --model qwen3-235b-a22b --cluster dgx-h100 --chips 1024 --global-batch 2048 --seq-len 4096 --profile megatron"
AUDITS = {
    "DeepSeek-V3, 2,048 ranks (pp 16, ep 64)": "--model deepseek-v3 --chips 2048 --global-batch 15360 --pp 16 --ep 64",
    "Qwen3-235B, 256 ranks": "--model qwen3-235b-a22b --chips 256 --global-batch 1024 --tp 2 --pp 8 --ep 32",
}
_AUDITED = "predict --cluster dgx-h100 --seq-len 4096 --zero 1 --recompute full --profile megatron --save"

Line = tuple[str, str, str, str]


def counted_lines() -> list[Line]:
    """Return the lines of quantities that are counted, not timed."""
    rows = list(csv.DictReader((GOLDEN / "model_parameters.csv").read_text(encoding="utf-8").splitlines()))
    models = [(load_model(row["model"]), row) for row in rows]
    models = [(model, row) for model, row in models if model.parts.experts is not None]
    wrong = sum(abs(model.num_parameters - int(row["num_parameters"])) > int(row["tolerance"]) for model, row in models)
    lines = [("parameters of models with experts", f"{len(models) - wrong} of {len(models)} equal", "equal", "equal")]
    for name, (published, excluded) in golden.KEPT.items():
        kept = golden.kept_bytes(name, "layer") - excluded
        lines.append((f"bytes that a layer of {name} keeps of a token", f"{kept:,.0f} of {published:,}", "2 %", "equal"))
    for what, predicted, stated in zip(
        ("activations", "weights and gradients", "optimizer"), golden.memory_of_deepseek_v3_on_256_chips(), golden.BREAKDOWN, strict=True
    ):
        lines.append(
            (f"DeepSeek-V3 on 256 chips: {what}", f"{predicted:.1f} of {stated} GB, {predicted / stated - 1:+.1%}", "2 %", "equal")
        )
    return lines


def timed_lines() -> list[Line]:
    """Single published times."""
    errors = [error for chip in dispatch.REPORT for error in dispatch.errors_of_the_report(chip)]
    both = [*errors, *dispatch.errors_of_deep_ep()]
    step = golden.step_of_deepseek_v3_on_2048_h800()
    return [
        ("dispatch and combine of Megatron-Core's report", f"median {_median(errors)}, {len(errors)} figures", "12 %", "7 %"),
        ("the same with DeepEP's normal kernels", f"median {_median(both)}, {len(both)} figures", "12 %", "7 %"),
        ("DeepSeek-V3 on 2,048 H800", f"{step:.1f} of {golden.H800_STEP} s, {step / golden.H800_STEP - 1:+.1%}", "12 %", "6 %"),
    ]


def published_lines(cases: Sequence[Path]) -> list[Line]:
    result = validate_cases(cases)
    experts = {source.name: source for source in result.experts.by["source"]}
    timed = [row for row in result.rows if row.has_time]
    low = [row for row in timed if not row.case.is_apart]

    def dense(holds: Callable[[str], bool]) -> str:
        errors = [row.time_error for row in low if holds(row.labels.precision)]
        return f"mean {_mean(errors)}, {len(errors)} runs"

    simumax, both = experts["simumax"], [experts[name] for name in ("bridge", "dgxc")]
    mean = sum(source.times.mean * source.times.count for source in both) / sum(source.times.count for source in both)
    mcore = experts["mcore"]
    return [
        ("SimuMax, DeepSeek-V2 on B200: time", f"mean {simumax.times.mean:.1%}, {simumax.times.count} runs", "8 %", "5 %"),
        ("SimuMax, DeepSeek-V2 on B200: memory", f"mean {simumax.memories.mean:.1%}", "4 %", "2 %"),
        ("Megatron-Core's golden memories with experts", f"mean {mcore.memories.mean:.1%}, {mcore.memories.count} runs", "6 %", "3 %"),
        *(
            (f"{source.name}, with experts", f"mean {source.times.mean:.1%}, {source.times.count} settings", "20 %", "12 %")
            for source in both
        ),
        ("both", f"mean {mean:.1%}", "20 %", "12 %"),
        ("fp8, dense", dense(lambda name: name.startswith("fp8")), "", ""),
        ("mxfp8, dense", dense(lambda name: name == "mxfp8"), "", ""),
        ("fp8 and mxfp8, dense", dense(lambda name: name.startswith(("fp8", "mxfp8"))), "9 %", "6 %"),
    ]


def process_lines(folder: Path) -> list[Line]:
    command = ["-m", "perfmodel", *SEARCH.split()]
    process = subprocess.run([sys.executable, *command, "--json"], check=True, capture_output=True, text=True)
    time, memory = best_run(command, repeats=2)
    what = f"search of Qwen3-235B on 1,024 H100, {json.loads(process.stdout)['num_evaluated'] / 1e6:.1f} M plans"
    lines = [(what, f"{time:.1f} s, {memory / 1e6:.0f} MB", "8 s, 1 GB", "2 s, 400 MB")]
    for name, words in AUDITS.items():
        plan = folder / "plan.yaml"
        subprocess.run([sys.executable, "-m", "perfmodel", *_AUDITED.split(), str(plan), *words.split()], check=True, capture_output=True)
        time, memory = best_run(["-m", "perfmodel", "audit", str(plan)], repeats=1)
        lines.append((f"audit of {name}", f"{time:.1f} s, {memory / 1e6:.0f} MB", "120 s, 4 GB", ""))
    return lines


def _median(errors: Sequence[float]) -> str:
    return f"{statistics.median(map(abs, errors)):.1%}"


def _mean(errors: Sequence[float]) -> str:
    return f"{statistics.fmean(map(abs, errors)):.1%}" if errors else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", type=Path, default=[GOLDEN / "published_training.jsonl.gz"])
    arguments = parser.parse_args()
    show([("", "reached", "at least", "aim"), *counted_lines(), *timed_lines(), *published_lines(arguments.cases)])
    with tempfile.TemporaryDirectory() as folder:
        show(process_lines(Path(folder)))


if __name__ == "__main__":
    main()
