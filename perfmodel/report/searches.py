"""What a search found, as people read it and as `--json` has it."""

from __future__ import annotations

from typing import Any

from perfmodel.parallel.executable import not_executable_reason
from perfmodel.parallel.layout import DEFAULT_ORDER
from perfmodel.parallel.prediction import Prediction
from perfmodel.planner.explain import Alternative, Explanation
from perfmodel.planner.result import Baseline, SearchResult
from perfmodel.report.predictions import PLAN_HEADERS, PLAN_LEGEND, fits_cell, plan_cells, prediction_object, step_text
from perfmodel.report.table import Table, percent
from perfmodel.units import format_bytes, format_time

#: Columns before this one are results; the others are knobs.
_FIRST_KNOB = 6
#: Beside the name of a plan that `perfmodel run` refuses.
_NOT_EXECUTABLE = "*"


def search_object(result: SearchResult, *, tokens: float = 0.0) -> dict[str, Any]:
    """The result as `--json` has it (DESIGN.md section 7); SI units."""

    def described(predictions: tuple[Prediction, ...]) -> list[dict[str, Any]]:
        return [prediction_object(each, tokens=tokens) for each in predictions]

    return {
        "objective": str(result.objective),
        "num_evaluated": result.num_evaluated,
        "num_feasible": result.num_feasible,
        "num_tight": result.num_tight,
        "rejected": dict(result.rejected),
        "left_out": dict(result.left_out),
        "search_time": result.search_time,
        "interrupted": result.interrupted,
        "memory_capacity": result.memory_capacity,
        "memory_usable": result.memory_usable,
        "memory_headroom": result.memory_headroom,
        "plans": described(result.plans),
        "baselines": {each.name: _baseline_object(each, tokens) for each in result.baselines},
        "pareto": described(result.pareto),
        "least_memory": described(result.least_memory)[0] if result.least_memory else {},
    }


def _baseline_object(baseline: Baseline, tokens: float) -> dict[str, Any]:
    if not baseline.prediction:
        return {"fits": False, "reason": baseline.reason}
    return prediction_object(baseline.prediction[0], tokens=tokens)


def search_line(result: SearchResult) -> str:
    rate = f", {result.num_evaluated / result.search_time / 1e6:.1f} million a second" if result.search_time > 0.05 else ""
    room = f"{format_bytes(result.memory_usable)} usable"
    if result.memory_headroom:
        room += f" less {percent(result.memory_headroom)} kept free"
    return (
        f"{result.num_evaluated:,} plans evaluated in {format_time(result.search_time)}{rate}; "
        f"{result.num_feasible:,} fit in {room}; ranked by {result.objective}"
    )


def plans_table(result: SearchResult) -> tuple[Table, tuple[str, ...]]:
    """The best plans, then the baselines even where they lose or do not fit; and the knobs that all of them share."""
    best = result.plans[0].step_time if result.plans else 0.0
    shown = _named_plans(result)
    with_order = any(each.plan.order != DEFAULT_ORDER for _, each in shown)
    rows = [
        (
            f"{name}{_NOT_EXECUTABLE}" if not_executable_reason(each.plan) else name,
            step_text(each.step_time),
            _against(each.step_time, best),
            percent(each.mfu_palm),
            format_bytes(each.memory["total"]),
            fits_cell(each.verdict),
            *plan_cells(each.plan),
            *(("" if each.plan.order == DEFAULT_ORDER else "-".join(each.plan.order),) if with_order else ()),
        )
        for name, each in shown
    ]
    headers = ("plan", "step time", "vs 1", "MFU", "memory", "fits", *PLAN_HEADERS, *(("axis order",) if with_order else ()))
    shared = [i for i in range(_FIRST_KNOB, len(headers)) if len({row[i] for row in rows}) == 1] if len(rows) > 1 else []
    kept = [i for i in range(len(headers)) if i not in shared]
    table = Table(
        title="Best plans, and what one would use without a search",
        headers=tuple(headers[i] for i in kept),
        rows=tuple(tuple(row[i] for i in kept) for row in rows),
        right=("step time", "vs 1", "MFU", "memory", "tp", "cp", "pp", "dp", "zero", "micro"),
        fold=("axis order",),
    )
    return table, tuple(f"{headers[i]} {rows[0][i]}" for i in shared if rows[0][i] not in ("-", ""))


def _named_plans(result: SearchResult) -> list[tuple[str, Prediction]]:
    """The best by their place, then the baselines by their name."""
    best = [(str(place), each) for place, each in enumerate(result.plans, 1)]
    return best + [(each.name, each.prediction[0]) for each in result.baselines if each.prediction]


def not_executable_lines(result: SearchResult) -> list[str]:
    """The footnotes of the plans that `perfmodel run` and `perfmodel audit` refuse, one for each reason."""
    names: dict[str, list[str]] = {}
    for name, each in _named_plans(result):
        reason = not_executable_reason(each.plan)
        if reason:
            names.setdefault(reason, []).append(name)
    return [f"{_NOT_EXECUTABLE} {', '.join(those)}: cannot be run or audited with torch: {reason}" for reason, those in names.items()]


def plans_legend(table: Table, shared: tuple[str, ...]) -> list[str]:
    """What the short headers mean, and the knobs that have one value in every row."""
    meanings = [f"{header}: {meaning}" for header, meaning in PLAN_LEGEND.items() if header in table.headers]
    return [*(["in every row: " + ", ".join(shared)] if shared else []), *(["; ".join(meanings)] if meanings else [])]


def _against(time: float, best: float) -> str:
    if not best or time == best:
        return "-"
    change = time / best - 1.0
    return f"{'+' if change > 0 else '-'}{percent(abs(change))}"


def missing_baselines(result: SearchResult) -> list[str]:
    return [f"{each.name}: no such plan ({each.reason})" for each in result.baselines if not each.prediction]


def rejected_table(result: SearchResult) -> Table:
    rows = [(f"{count:,}", "plans", reason) for reason, count in result.rejected.items()]
    rows += [(f"{count:,}", "layouts", reason) for reason, count in result.left_out.items()]
    return Table(
        title="Rejected, and degrees that were never plans",
        headers=("count", "of", "reason"),
        rows=tuple(rows),
        right=("count",),
        fold=("reason",),
    )


def explanation_object(explanation: Explanation) -> dict[str, Any]:
    def described(alternative: Alternative) -> dict[str, Any]:
        return {
            "knobs": dict(alternative.knobs),
            "reason": alternative.reason,
            "slower_by": alternative.slower_by,
            "parts": dict(alternative.parts),
            "prediction": prediction_object(alternative.prediction[0]) if alternative.prediction else {},
        }

    return {
        **prediction_object(explanation.prediction),
        "bottleneck": explanation.bottleneck,
        "neighbours": [described(each) for each in explanation.neighbours],
        "why_not": [described(each) for each in explanation.why_not],
    }


def neighbours_table(explanation: Explanation) -> Table:
    """The same plan with one knob turned, the fastest first; what does not fit or cannot be, last."""
    own = explanation.prediction.step_time

    def rank(alternative: Alternative) -> tuple[int, float]:
        if not alternative.prediction:
            return (2, 0.0)
        return (0 if alternative.prediction[0].fits else 1, alternative.prediction[0].step_time)

    rows = []
    for each in sorted(explanation.neighbours, key=rank):
        named = ", ".join(f"{knob}={str(value).lower()}" for knob, value in each.knobs.items())
        if not each.prediction:
            rows.append((named, "-", "-", "-", "-", each.reason.partition(": ")[2]))
            continue
        found = each.prediction[0]
        rows.append(
            (
                named,
                step_text(found.step_time),
                _against(found.step_time, own),
                format_bytes(found.memory["total"]),
                fits_cell(found.verdict),
                _cause(each) if found.fits else "",
            )
        )
    return Table(
        title="The same plan with one knob turned (other knobs kept where they can be)",
        headers=("knob", "step time", "change", "memory", "fits", "mostly"),
        rows=tuple(rows),
        right=("step time", "change", "memory"),
        fold=("mostly",),
    )


def _cause(alternative: Alternative) -> str:
    """The part that changes most in the direction of the whole."""
    if not alternative.slower_by:
        return ""
    sign = 1.0 if alternative.slower_by > 0 else -1.0
    part, change = max(alternative.parts.items(), key=lambda item: sign * item[1])
    return f"{part.replace('_', ' ')} {'+' if change > 0 else '-'}{format_time(abs(change))}"
