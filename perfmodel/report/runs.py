"""Predicted and measured runs of a plan, side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from perfmodel.foundation.plain import picked
from perfmodel.foundation.units import format_bytes, format_time, format_traffic
from perfmodel.hardware.calibration import MEASURED_NOW, MOST_BUSY
from perfmodel.parallel.results import Comparison, Measurement
from perfmodel.report.predictions import prediction_object
from perfmodel.report.table import Table, words


def comparison_object(comparison: Comparison) -> dict[str, Any]:
    return {
        **picked(comparison, "time_error memory_error"),
        "prediction": prediction_object(comparison.prediction),
        "measurement": comparison.measurement.to_dict(),
    }


def run_verdict(comparison: Comparison) -> str:
    """Return the predicted and the measured step time and memory in one line.

    Example: `step time 1.21 s predicted, 1.25 s measured (-3.2%); memory 2.1 GiB predicted, 2.2 GiB measured (-4.5%)`.
    """
    predicted, measured = comparison.prediction, comparison.measurement
    time = f"{format_time(predicted.step_time)} predicted, {format_time(measured.step_time)} measured ({comparison.time_error:+.1%})"
    sizes = f"{format_bytes(predicted.memory['total'])} predicted, {format_bytes(measured.peak_memory)} measured"
    return f"step time {time}; memory {sizes} ({comparison.memory_error:+.1%})"


def measurement_facts(comparison: Comparison) -> list[tuple[str, str]]:
    measured = comparison.measurement
    ranks = "1 process" if measured.num_ranks == 1 else f"{measured.num_ranks} processes"
    software = ", ".join(f"{name} {version}" for name, version in measured.software.items())
    gradients = (
        "not checked (the model is too large, or it was not asked for)"
        if math.isnan(measured.gradient_error)
        else f"equal to one process within {measured.gradient_error:.1e}"
    )
    sources = list(comparison.prediction.rests_on.values())
    advice = []  # to calibrate, if the prediction is based on no measurement of this machine or on an unsaved one
    if any(source.endswith(MEASURED_NOW) for source in sources):
        advice = [("calibration", f"{MEASURED_NOW}; `perfmodel calibrate` keeps one for this machine, and later runs start at once")]
    elif any(source.startswith("spec sheet") for source in sources):
        machine = f"no calibration of {measured.chip}: the prediction is based on a spec sheet and may be many times too fast"
        advice = [("not calibrated", machine), ("", "run `perfmodel calibrate` (under two minutes), then this again")]
    return [
        *advice,
        ("ran on", f"{ranks} of {measured.chip} ({measured.device}); {software}"),
        ("gradients", gradients),
        ("steps", f"{measured.steps} timed after {measured.warmup}; interquartile range {format_time(measured.step_time_spread)}"),
        ("prediction", f"based on {sources[0]}"),
    ]


def busy_sentence(busy_fraction: float, what: str) -> str:
    """Return a warning if other processes took too much processor time during the run.

    what   command to repeat
    """
    if busy_fraction <= MOST_BUSY:
        return ""
    return (
        f"The machine was busy: other processes took {busy_fraction:.0%} of its processors meanwhile; {what} again when it is quiet, "
        "for times that are of this work alone."
    )


def predicted_and_measured(comparison: Comparison) -> Table:
    """Return the table of step time, memory and the phases that both the prediction and the measurement have."""
    predicted, measured = comparison.prediction, comparison.measurement
    rows = [_row("step time", predicted.step_time, measured.step_time, format_time)]
    shares = predicted.parts
    phases = {
        "forward": shares["forward"],
        "backward": shares["backward"] + shares["recompute"],
        "optimizer": shares["optimizer"],
    }
    for name, time in measured.parts.items():
        if name in phases:
            rows.append(_row(f"  {name}", phases[name], time, format_time))
        else:
            rows.append((f"  {words(name).replace('.', ' ')}", "", format_time(time), ""))
    rows.append(_row("memory of the fullest rank", predicted.memory["total"], measured.peak_memory, format_bytes))
    return Table(
        title="Predicted against measured",
        headers=("", "predicted", "measured", "error"),
        rows=tuple(rows),
        right=("predicted", "measured", "error"),
    )


def _row(name: str, predicted: float, measured: float, form: Any) -> tuple[str, str, str, str]:
    return (name, form(predicted), form(measured), f"{predicted / measured - 1:+.1%}" if measured else "")


def collectives_table(measurement: Measurement) -> Table:
    rows = [
        (collective.kind.replace("_", " "), collective.axis, f"{collective.count:,}", format_traffic(collective.num_bytes))
        for collective in measurement.collectives
    ]
    return Table(
        title="Collectives that one rank issued in a step (full buffers)",
        headers=("kind", "axis", "count", "bytes"),
        rows=tuple(rows) or (("none", "", "", ""),),
        right=("count", "bytes"),
    )


def demo_table(rows: Sequence[tuple[str, Comparison, tuple[int, int], tuple[int, int]]]) -> Table:
    """Return the plans in predicted order, with their predicted and measured ranks."""

    def rank_text(range_: tuple[int, int]) -> str:
        first, last = range_
        return str(first) if first == last else f"{first}-{last}"

    cells = []
    for name, comparison, predicted_place, measured_place in rows:
        predicted, measured = comparison.prediction, comparison.measurement
        cells.append(
            (
                name,
                format_time(predicted.step_time),
                format_time(measured.step_time),
                f"{comparison.time_error:+.1%}",
                rank_text(predicted_place),
                rank_text(measured_place),
                format_bytes(predicted.memory["total"]),
                format_bytes(measured.peak_memory),
                f"{comparison.memory_error:+.1%}",
            )
        )
    times = ("predicted", "measured", "error", "rank", "measured rank")
    headers = ("plan", *times, "memory", "measured", "memory error")
    return Table(title="Predicted against measured", headers=headers, rows=tuple(cells), right=headers[1:], fold=("plan",))
