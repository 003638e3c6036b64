"""Smallest changes that make a plan fit, as text and as `--json` objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from perfmodel.foundation.units import format_bytes, format_step
from perfmodel.parallel.prediction import PROBABILITY, Prediction, probability_cell
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
    return " ".join(_flag(knob.replace("_", "-"), value) for knob, value in changes.items())


def _flag(name: str, value: int | str | bool) -> str:
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    return f"--{name} {value}"


def result_cells(prediction: Prediction) -> tuple[str, str, str]:
    """Return step time, memory and probability of fitting as cells of a table."""
    time, memory = format_step(prediction.step_time), format_bytes(prediction.memory["total"])
    return time, memory, probability_cell(prediction.fits_probability)


def result_object(prediction: Prediction) -> dict[str, Any]:
    """Return step time, memory and probability of fitting for a `--json` object."""
    return {
        "step_time": prediction.step_time,
        "memory": prediction.memory["total"],
        "fits_probability": prediction.fits_probability,
    }


def fitting_changes_table(remedies: Sequence[FittingChange]) -> Table:
    return Table(
        title="Smallest changes that fit: flags to add or to replace",
        headers=("flags", "step time", "memory", PROBABILITY),
        rows=tuple((flags_text(change.changes), *result_cells(change.prediction)) for change in remedies),
        right=("step time", "memory", PROBABILITY),
        fold=("flags",),
    )


def remedies_objects(remedies: Sequence[FittingChange]) -> list[dict[str, Any]]:
    return [
        {"flags": flags_text(change.changes), "changes": dict(change.changes), **result_object(change.prediction)} for change in remedies
    ]
