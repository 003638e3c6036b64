"""Tables of `perfmodel fit`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from perfmodel.fitting.result import FittedBehaviour, FittedMemory, FittedPeak, FittedProfile, FittedRun
from perfmodel.foundation.text import percent
from perfmodel.foundation.units import format_step, format_time
from perfmodel.report.predictions import degrees_line
from perfmodel.report.table import Table, bytes_like, table_of, times_like

_MOST_SHOWN = 20
"""Runs in a table; `--json` has all."""


def headline(profile: FittedProfile) -> list[tuple[str, str]]:
    """Return the summary lines: (name, value)."""
    memory_lines = []
    if profile.memory:
        memory, number = profile.memory, len(profile.memory.runs)
        left_out = f", {percent(memory.error_left_out)} of each run by a fit to the others" if number > 1 else ""
        error = f"mean error {percent(memory.error_before)} before, {percent(memory.error_after)} after{left_out}"
        memory_lines = [("peak memory", f"of {number} run{'s' * (number > 1)}: {error}")]
    if not profile.runs:
        return memory_lines
    left_out = (
        f"{percent(profile.error_left_out)}: mean error of each run by a fit to the others"
        if len(profile.runs) > 1
        else "not known from one run"
    )
    lines = [
        ("left out", left_out),
        ("further runs", f"expected error {percent(profile.noise)}, plus what the runs leave open of the plan (`predict --interval`)"),
    ]
    for index, run in enumerate(profile.outliers):
        lines.append(("outlier" if not index else "", f"{run.id}: {run.outlier} (counts {run.weight:.2f} of a run)"))
    for following in profile.next_runs:
        near = f"the uncertainty of similar plans falls from {percent(following.spread_before)} to {percent(following.spread_after)}"
        what = f"{following.differs} ({degrees_line(following.plan)}; about {format_step(following.step_time)})"
        lines.append(("next run", f"{what} is the most informative: {near}"))
    return lines + memory_lines


def behaviours_table(profile: FittedProfile) -> Table:
    behaviours = [*(profile.behaviours if profile.runs else ()), *([profile.memory.behaviour] if profile.memory else [])]
    rows = (
        (
            behaviour.says,
            _written(behaviour, behaviour.value),
            _spread(behaviour, behaviour.spread),
            _written(behaviour, behaviour.prior),
            _spread(behaviour, behaviour.prior_spread),
            behaviour.determined,
        )
        for behaviour in behaviours
    )
    title = "Fitted parameters, with one standard deviation"
    return table_of(title, "~parameter | >value | >+- | >before | >+- | determined", rows)


def _written(behaviour: FittedBehaviour, value: float) -> str:
    if behaviour.unit == "s":
        return format_time(value) if value > 1e-7 else "0"
    return f"{value:.2f}"


def _spread(behaviour: FittedBehaviour, spread: float) -> str:
    return percent(spread) if behaviour.is_ratio else _written(behaviour, spread)


def runs_table(profile: FittedProfile) -> Table:
    """Return the runs, the largest leave-one-out errors first."""
    return _worst_first("Runs", profile.runs, times_like)


def peaks_table(memory: FittedMemory) -> Table:
    """Return the measured peaks of memory and their predictions, the largest leave-one-out errors first."""
    return _worst_first("Peak memory", memory.runs, bytes_like)


def _worst_first(title: str, runs: Sequence[FittedRun | FittedPeak], like: Callable[[float], Callable[[float], str]]) -> Table:
    """Return a table of measured and predicted figures. like: unit of all cells, by the largest figure."""
    ordered = sorted(runs, key=lambda run: -abs(run.left_out / run.measured - 1.0))
    text = like(max(run.measured for run in runs))
    limit = f" ({_MOST_SHOWN} of {len(ordered)}, the worst first)" if len(ordered) > _MOST_SHOWN else ""
    figures = ("measured", "before", "fitted", "left out", "error left out")
    return Table(
        title=f"{title}: measured, and predicted before the fit, after it, and by a fit to the other runs{limit}",
        headers=("run", *(["counts"] if isinstance(ordered[0], FittedPeak) else []), *figures),
        rows=tuple(
            (
                run.id,
                *([run.kind] if isinstance(run, FittedPeak) else []),
                *map(text, (run.measured, run.before, run.after, run.left_out)),
                f"{run.left_out / run.measured - 1.0:+.1%}",
            )
            for run in ordered[:_MOST_SHOWN]
        ),
        right=figures,
    )
