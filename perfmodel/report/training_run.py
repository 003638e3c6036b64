"""A whole training run as text."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from perfmodel.foundation.text import percent
from perfmodel.foundation.units import format_bytes, format_count, format_time
from perfmodel.report.document import Facts

if TYPE_CHECKING:
    from perfmodel.cost.training_run import TrainingRun

#: Shortest run that is printed in days; shorter ones in hours.
_FEW_DAYS = 3.0
JOULES_OF_A_KILOWATT_HOUR, JOULES_OF_A_MEGAWATT_HOUR, _KILOGRAMS_OF_A_TONNE = 3.6e6, 3.6e9, 1e3


def run_facts(run: TrainingRun) -> Facts:
    """Return the block "The whole run"."""
    failures = f"one in {_duration_text(run.mtbf)}; {_duration_text(run.restart_time)} to restart"
    title, basis = f"The whole run, {format_count(run.tokens)} tokens", "`perfmodel assumptions`; --assume NAME=VALUE replaces one"
    checkpoint = (
        "checkpoint",
        f"{format_bytes(run.checkpoint_bytes)} every {_duration_text(run.checkpoint_interval)}; training pauses for "
        f"{format_time(run.checkpoint_stall)} while each chip copies its part to the host; written behind it in "
        f"{_duration_text(run.checkpoint_write)} ({run.checkpoint_bytes / max(run.checkpoint_write, 1e-9) / 1e9:,.3g} GB/s of storage)",
    )
    if not math.isfinite(run.wall_days):
        never = f"{_days_text(run.days)} of steps, but the run never ends: it loses more to failures than it trains between two of them"
        return Facts(title, [("time", never), ("failures", failures), checkpoint, ("based on", basis)])
    lines = [
        (
            "time",
            f"{_days_text(run.days)} of steps, {_days_text(run.wall_days)} with failures and checkpoints (goodput {percent(run.goodput)})",
        ),
        (
            "chips",
            f"{format_count(run.chip_hours)} chip-hours; "
            f"{run.spare_nodes:,} spare node{'' if run.spare_nodes == 1 else 's'} for a week of failures",
        ),
        ("failures", f"{run.failures:,.0f} expected, {failures}"),
        checkpoint,
    ]
    if run.energy:
        energy, carbon = run.energy / JOULES_OF_A_MEGAWATT_HOUR, run.carbon / _KILOGRAMS_OF_A_TONNE
        lines.append(("energy", f"{_amount(energy)} MWh, {_amount(carbon)} t CO2e"))
    if run.cost:
        lines.append(("cost", f"{run.cost:,.0f} USD at {run.cost / run.chip_hours:.2f} USD a chip-hour"))
    return Facts(title, [*lines, ("based on", basis)])


def _duration_text(seconds: float) -> str:
    """Return a duration in the largest unit of which it has at least two; below two minutes in seconds."""
    for size, unit in ((86400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2.0 * size:
            return f"{seconds / size:,.1f} {unit}"
    return format_time(seconds)


def _amount(value: float) -> str:
    """Return an amount without decimals from 10 on, with two significant digits below."""
    return f"{value:,.0f}" if value >= 10.0 or value == 0.0 else f"{value:.2g}"


def _days_text(days: float) -> str:
    return f"{days:,.1f} days" if days >= _FEW_DAYS else f"{days * 24:,.1f} hours"
