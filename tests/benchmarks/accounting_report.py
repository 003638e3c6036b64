"""The accuracy of the accounts and their targets: `python -m tests.benchmarks.accounting_report [CASES.jsonl ...] [--plans N]`.

Torch's counts of real plans of every form (`tests/execute/real_plans.py`), first and last pipeline stage; with files of published
runs, the errors of peak memory and the fit / no-fit record as well.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from perfmodel.cost.audit import Audit, AuditRow
from perfmodel.validation.validate import ValidationResult, validate_cases
from perfmodel.verbs import api
from tests.execute.real_plans import PLANS, real_plan

NOT_YET = "not yet"
#: Rows of an audit that must be equal, by what they are called in the report.
EQUAL = {
    "FLOPs of matrix operators": lambda row: row.group == "FLOPs",
    "collectives: kind, axis, count, bytes": lambda row: row.group == "collectives",
    "parameters, gradients, optimizer state": lambda row: row.name in ("parameters", "gradients", "optimizer"),
}
#: Rows of memory: what they are called in an audit, what they must reach and aim at.
CLOSE = {
    "saved activations": (("saved activations",), "1 %", "equal"),
    "peak memory of a step": (("peak memory", "peak"), "3 %", "1 %"),
}
SIXTY_FOUR = "Llama 3 8B, FSDP and TP"


def rows_of(audits: Iterable[Audit]) -> list[AuditRow]:
    return [row for audit in audits for rank in audit.ranks for row in rank.rows]


def equality(rows: Sequence[AuditRow]) -> str:
    wrong = sum(row.difference != 0.0 for row in rows)
    return f"NO: {wrong} of {len(rows):,} differ" if wrong else f"equal, {len(rows):,} rows"


def closeness(rows: Sequence[AuditRow]) -> str:
    if not rows:
        return NOT_YET
    shares = [abs(row.difference) / row.counted for row in rows]
    return f"largest {max(shares):.2%}, mean {statistics.fmean(shares):.2%}"


def account_lines(names: Sequence[str]) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
    """Lines of the table over all plans, and one line for each plan."""
    audits: list[Audit] = []
    counts: list[tuple[str, ...]] = []
    for name in names:
        start = time.perf_counter()
        audits.append(api.audit_plan(real_plan(name)))
        elapsed = time.perf_counter() - start
        rows = rows_of(audits[-1:])
        clean = "yes" if all(row.difference == 0.0 for row in rows if any(chosen(row) for chosen in EQUAL.values())) else "NO"
        close = [
            closeness([row for row in rows if row.name in called]).removeprefix("largest ").partition(",")[0]
            for called, *_ in CLOSE.values()
        ]
        counts.append((name, f"{audits[-1].plan.num_chips:,}", clean, *close, f"{elapsed:.0f} s"))
    rows = rows_of(audits)
    lines = [(what, equality([row for row in rows if chosen(row)]), "equal", "equal") for what, chosen in EQUAL.items()]
    lines += [
        (f"{what}, per rank", closeness([row for row in rows if row.name in called]), least, aim)
        for what, (called, least, aim) in CLOSE.items()
    ]
    return lines, counts


def audit_line() -> tuple[str, ...]:
    start = time.perf_counter()
    audited = api.audit_plan(real_plan(SIXTY_FOUR))
    elapsed = time.perf_counter() - start
    memory = max(rank.memory for rank in audited.ranks)
    return (f"one audit: {SIXTY_FOUR} on 64 ranks", f"{elapsed:.1f} s, {memory / 1e9:.2f} GB", "60 s, 2 GB", "15 s")


def published_lines(result: ValidationResult) -> list[tuple[str, ...]]:
    lines = []
    for memory in result.memories:
        what = f"peak memory, published: {memory.name} ({memory.errors.count} runs, {memory.kind}, {memory.rank} rank)"
        lines.append((what, f"mean {memory.errors.mean:.1%}, bias {memory.errors.bias:+.1%}", "", ""))
    others = [row for row in result.rows if row.tier == "primary" and row.group != "mcore" and row.counts("memory")]
    if others:
        mean = statistics.fmean(abs(row.error("memory")) for row in others)
        lines.append((f"peak memory, published, primary without mcore ({len(others)} runs)", f"mean {mean:.1%}", "mean 6 %", "mean 3 %"))
    fits = result.fits
    if fits.num_out:
        share = f"{fits.false_fit_fraction:.1%} of {fits.num_out:,}"
        lines.append(("ran out of memory, but predicted to fit", share, "2 %", "0.5 %"))
    if fits.num_ran:
        share = f"{fits.false_out_fraction:.1%} of {fits.num_ran:,}"
        lines.append(("ran, but predicted not to fit", share, "5 %", "2 %"))
    return lines


def show(lines: Sequence[tuple[str, ...]]) -> None:
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", type=Path)
    parser.add_argument("--plans", type=int, default=len(PLANS), help="audit the first so many plans only")
    arguments = parser.parse_args()
    lines, counts = account_lines(list(PLANS)[: arguments.plans])
    lines.append(audit_line())
    if arguments.cases:
        lines += published_lines(validate_cases(arguments.cases))
    show([("plan, first and last stage", "ranks", "counts equal", "saved", "peak", "took"), *counts])
    print()
    show([("what", "measured", "at least", "aim"), *lines])


if __name__ == "__main__":
    main()
