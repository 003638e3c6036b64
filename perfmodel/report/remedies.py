"""Smallest changes that make a plan fit, as text and as `--json` objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from perfmodel.foundation.units import format_bytes, format_step
from perfmodel.parallel.prediction import PROBABILITY, probability_cell
from perfmodel.report.table import Table

if TYPE_CHECKING:
    from perfmodel.parallel.plan import Plan
    from perfmodel.planner.result import FittingChange


def nothing_helps(plan: Plan) -> str:
    """Return the remedies for a job that fits neither with other plans on these chips nor with this plan on more chips."""
    train = plan.job.train
    lighter = "--train lora:16" if train.is_full else "" if train.quantizes_base else f"--train q{train}"
    others = ["chips with more memory", "a smaller model", "shorter sequences", *filter(None, [lighter])]
    chips = "No other plan of this job fits on these chips, nor this plan on more of them (`perfmodel limits` finds the fewest)"
    return f"{chips}: use {', '.join(others[:-1])} or {others[-1]}."


def flags_text(changes: Mapping[str, int | str | bool]) -> str:
    """Return the changes as flags of `perfmodel predict`."""
    return " ".join(_flag(knob, value) for knob, value in changes.items())


def _flag(knob: str, value: int | str | bool) -> str:
    name = knob.replace("_", "-")
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    return f"--{name} {value}"


def fitting_changes_table(remedies: Sequence[FittingChange]) -> Table:
    return Table(
        title="Smallest changes that fit: flags to add or to replace",
        headers=("flags", "step time", "memory", PROBABILITY),
        rows=tuple(
            (
                flags_text(change.changes),
                format_step(change.prediction.step_time),
                format_bytes(change.prediction.memory["total"]),
                probability_cell(change.prediction.fits_probability),
            )
            for change in remedies
        ),
        right=("step time", "memory", PROBABILITY),
        fold=("flags",),
    )


def remedies_objects(remedies: Sequence[FittingChange]) -> list[dict[str, Any]]:
    return [
        {
            "flags": flags_text(change.changes),
            "changes": dict(change.changes),
            "step_time": change.prediction.step_time,
            "memory": change.prediction.memory["total"],
            "fits_probability": change.prediction.fits_probability,
        }
        for change in remedies
    ]
