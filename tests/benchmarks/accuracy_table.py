"""Print the errors of `perfmodel validate` by source: python tests/benchmarks/accuracy_table.py CASES.jsonl [--tier primary]."""

import argparse
import math
import time

from perfmodel.validation.cases import read_cases
from perfmodel.validation.judgement import ErrorSummary, summarise
from perfmodel.validation.validate import CasePredictor


def percent(share: float) -> str:
    return "     -" if math.isnan(share) else f"{100 * share:6.1f}"


def line(summary: ErrorSummary) -> str:
    time, memory = summary.times, summary.memories
    times = " ".join(percent(x) for x in (time.mean, time.median, time.p90, time.bias))
    memories = " ".join(percent(x) for x in (memory.mean, memory.median, memory.bias))
    head = f"{summary.name:24} {summary.num_rows:5} {summary.num_predicted:5}"
    return f"{head} | {time.count:5} {times} | {memory.count:5} {memories}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases")
    parser.add_argument("--tier", default="", help="only cases of this tier")
    parser.add_argument("--only", default="", help="only sources whose name begins so")
    parser.add_argument("--calibration", default=None)
    parser.add_argument("--rows", action="store_true", help="print every row")
    parser.add_argument("--no-reasons", action="store_true")
    arguments = parser.parse_args()
    start = time.perf_counter()
    predictor = CasePredictor(calibration=arguments.calibration)
    cases = [c for c in read_cases(arguments.cases) if arguments.tier in ("", c.tier) and c.group.startswith(arguments.only)]
    result = summarise(predictor.row(case) for case in cases)
    seconds = time.perf_counter() - start
    print(f"{'source':24}  rows  pred | times  mean%   med%   p90%  bias% |  mems  mean%   med%  bias%")
    for summary in result.sources:
        print(line(summary))
    print(line(result.overall))
    means = sorted(s.times.mean for s in result.sources if s.times.count)
    if means:
        print(f"median over sources of the mean error: {100 * means[len(means) // 2]:.1f} %")
    print(result.fits)
    print(f"{result.num_rows} rows in {seconds:.2f} s")
    if not arguments.no_reasons:
        for reason, count in result.reasons.items():
            print(f"{count:6} {reason}")
    if arguments.rows:
        for row in result.rows:
            times = f"{row.predicted_step_time:10.4g} {row.measured_step_time:10.4g} {percent(row.time_error)}"
            predicted, measured = row.predicted.get("memory", math.nan), row.case.measured("memory")
            memories = f"{predicted / 2**30:7.1f} {measured / 2**30:7.1f} {percent(row.error('memory'))}"
            print(f"{row.id:70} {times} | {memories} {row.predicted_fits}")


if __name__ == "__main__":
    main()
