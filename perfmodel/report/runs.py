"""Predicted and measured runs of a plan, and steps of a service, side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from perfmodel.foundation.plain import picked
from perfmodel.foundation.units import format_bytes, format_count, format_time, format_traffic
from perfmodel.hardware.calibration import MEASURED_NOW, MOST_BUSY
from perfmodel.parallel.results import Comparison, Measurement, ServedComparison, ServingMeasurement
from perfmodel.report.predictions import prediction_object
from perfmodel.report.table import Table, table_of, times_like, words


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
        ("ran on", f"{ranks} of {measured.chip} ({measured.device}); {_software(measured)}"),
        ("gradients", gradients),
        ("steps", f"{measured.steps} timed after {measured.warmup}; interquartile range {format_time(measured.step_time_spread)}"),
        ("prediction", f"based on {sources[0]}"),
    ]


def _software(measured: Measurement | ServingMeasurement) -> str:
    return ", ".join(f"{name} {version}" for name, version in measured.software.items())


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
    return table_of("Predicted against measured", " | >predicted | >measured | >error", rows)


def _row(name: str, predicted: float, measured: float, form: Any) -> tuple[str, str, str, str]:
    return (name, form(predicted), form(measured), f"{predicted / measured - 1:+.1%}" if measured else "")


def collectives_table(measurement: Measurement) -> Table:
    rows = [
        (collective.kind.replace("_", " "), collective.axis, f"{collective.count:,}", format_traffic(collective.num_bytes))
        for collective in measurement.collectives
    ]
    title = "Collectives that one rank issued in a step (full buffers)"
    return table_of(title, "kind | axis | >count | >bytes", rows or [("none", "", "", "")])


def demo_table(rows: Sequence[tuple[str, Comparison, tuple[int, int], tuple[int, int]]]) -> Table:
    """Return the plans in predicted order, with their predicted and measured ranks."""

    def rank_text(range_: tuple[int, int]) -> str:
        first, last = range_
        return str(first) if first == last else f"{first}-{last}"

    cells = (
        (
            name,
            format_time(comparison.prediction.step_time),
            format_time(comparison.measurement.step_time),
            f"{comparison.time_error:+.1%}",
            rank_text(predicted_place),
            rank_text(measured_place),
            format_bytes(comparison.prediction.memory["total"]),
            format_bytes(comparison.measurement.peak_memory),
            f"{comparison.memory_error:+.1%}",
        )
        for name, comparison, predicted_place, measured_place in rows
    )
    columns = "~plan | >predicted | >measured | >error | >rank | >measured rank | >memory | >measured | >memory error"
    return table_of("Predicted against measured", columns, cells)


# --- steps of a service -----------------------------------------------------------------------------------------------


def run_line(comparison: ServedComparison) -> str:
    measured = comparison.measurement
    ranks = "1 process" if measured.tp == 1 else f"{measured.tp} processes (tp {measured.tp})"
    size = format_count(measured.model.num_parameters)
    return f"{measured.model.name}, {size} parameters in {measured.dtype}, on {ranks} of this machine"


def run_facts(comparison: ServedComparison) -> list[tuple[str, str]]:
    measured = comparison.measurement
    checked = "not checked: the model is too large to run uncached as well"
    if measured.logit_error == measured.logit_error:
        checked = f"logits of prefill, chunks and decode equal the uncached forward pass to {measured.logit_error:.1e} of the largest"
    facts = [("ran on", f"{measured.chip} ({measured.device}); {_software(measured)}"), ("checked", checked)]
    facts.append(("steps", f"{len(measured.steps[0].times)} of each shape, in turn"))
    basis = "none: steps of one rank on a CPU are predicted here; `perfmodel serve` predicts those of a cluster"
    if comparison.parts:
        basis = f"based on calibrated: {comparison.calibration}; is of processor time, what a step takes where nothing else runs"
    facts.append(("prediction", basis))
    if comparison.parts:
        slowdowns = " and ".join(f"{drift:.2f} (as in {name})" for name, drift in comparison.drifts.items())
        facts.append(("machine", f"between the steps, fixed products took {slowdowns} times their calibrated time"))
    return facts


def run_table(comparison: ServedComparison) -> Table:
    """Return one row per step shape."""
    shown = times_like(max(step.time for step in comparison.measurement.steps))
    rows: list[tuple[str, ...]] = []
    for step in comparison.measurement.steps:
        shape, parts = step.shape, comparison.parts.get(step.shape)
        name = f"decode {shape.sequences:,} over {shape.cached + 1:,} tokens"
        if not shape.is_decode:
            name = f"prefill {shape.sequences:,} x {shape.new:,} tokens" + (f" after {shape.cached:,}" if shape.cached else "")
        largest = max(parts, key=parts.__getitem__) if parts else ""
        expected = (shown(comparison.predicted(step)), f"{comparison.error(step):+.1%}") if parts else ("", "")
        times = map(shown, (step.time, step.undisturbed, step.undisturbed_spread))
        rows.append((name, *times, *expected, words(largest), format_bytes(step.counts.peak_memory)))
    columns = "step | >time | >processor time | >quartiles apart | >predicted | >error | most of it | >peak memory"
    return table_of("Steps, measured and predicted", columns, rows)


def run_object(comparison: ServedComparison) -> dict[str, Any]:
    measured, parts = comparison.measurement, comparison.parts
    return {
        "model": measured.model.name,
        "num_parameters": measured.model.num_parameters,
        **picked(measured, "tp dtype chip device"),
        "software": dict(measured.software),
        **picked(measured, "logit_error busy_fraction"),
        "calibration": comparison.calibration,
        "drift": comparison.drifts.get("decode", 1.0),
        "prefill_drift": comparison.drifts.get("prefill", 1.0),
        "steps": [
            {
                "sequences": step.shape.sequences,
                "cached_tokens": step.shape.cached,
                "new_tokens": step.shape.new,
                "time": step.time,
                "time_spread": step.spread,
                "processor_time": step.undisturbed if step.processor_times else None,
                "predicted": comparison.predicted(step) if parts else None,
                "error": comparison.error(step) if parts else None,
                "parts": dict(parts.get(step.shape, {})),
                **picked(step.counts, "flops parameter_bytes cache_bytes peak_memory"),
                "collectives": {collective.kind: collective.count for collective in step.counts.collectives},
            }
            for step in measured.steps
        ],
    }
