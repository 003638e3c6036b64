"""The speed of perfmodel and its targets: `python -m tests.benchmarks.report [CASES.jsonl]`.

With a file of published runs, the Megatron times of Korthikanti et al. are predicted as well.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from tests.benchmarks.jobs import gpt3_estimator, three_d_plans
from tests.benchmarks.processes import best_run
from tests.benchmarks.test_process_start import PREDICT, SEARCH
from tests.planner.searches import search_plans


def prediction_time() -> float:
    """Median of 200 predictions of plans not seen before. [s]"""
    estimator = gpt3_estimator(num_chips=1024)
    plans = three_d_plans(estimator)
    seen = {(p.rule_set, p.attention, p.zero, p.layout.pp > 1): p for p in plans}
    for plan in seen.values():
        estimator.predict(plan)
    times = []
    for plan in [p for p in plans if p not in seen.values()][:200]:
        start = time.perf_counter()
        estimator.predict(plan)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def korthikanti(cases: Path) -> tuple[float, float, int]:
    from perfmodel.validation.validate import validate_cases

    rows = [line for line in cases.read_text(encoding="utf-8").splitlines() if json.loads(line)["id"].startswith("korthikanti")]
    wanted = [line for line in rows if json.loads(line).get("model", {}).get("kind") == "decoder" and json.loads(line)["dp"] == 1]
    with tempfile.TemporaryDirectory() as folder:
        chosen = Path(folder, "korthikanti.jsonl")
        chosen.write_text("\n".join(wanted) + "\n", encoding="utf-8")
        result = validate_cases(chosen)
    errors = [abs(row.predicted_step_time / row.measured_step_time - 1) for row in result.rows if row.predicted_step_time]
    return statistics.mean(errors), max(errors), len(errors)


def main() -> None:
    lines = [("what", "measured", "at least", "aim")]
    lines.append(("one prediction, median of 200", f"{prediction_time() * 1e3:.2f} ms", "1.65 ms", "0.8 ms"))
    wall, peak = best_run(PREDICT)
    lines.append(("predict, whole process, warm", f"{wall:.2f} s, {peak / 1e6:.0f} MB", "0.45 s, 120 MB", "0.30 s, 80 MB"))
    estimator = gpt3_estimator()
    runs = [search_plans(estimator, also=("front",)) for _ in range(3)]
    rate = statistics.median(run.num_evaluated / run.search_time for run in runs)
    lines.append((f"search, {runs[0].num_evaluated:,} plans", f"{rate / 1e6:.1f} million/s of CPU", "2 million/s", "8 million/s"))
    wall, peak = best_run(SEARCH, repeats=3)
    lines.append(("full search, whole process", f"{wall:.2f} s, {peak / 1e6:.0f} MB", "5 s, 1 GB", "1.5 s, 300 MB"))
    if len(sys.argv) > 1:
        mean, worst, count = korthikanti(Path(sys.argv[1]))
        lines.append((f"Korthikanti et al., {count} rows", f"mean {mean:.1%}, largest {worst:.1%}", "mean 6 %", "mean 3.6 %"))
    widths = [max(len(line[i]) for line in lines) for i in range(4)]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


if __name__ == "__main__":
    main()
