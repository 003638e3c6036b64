"""Measured and predicted serving steps, side by side."""

from __future__ import annotations

from typing import Any

from perfmodel.foundation.plain import picked
from perfmodel.foundation.units import format_bytes, format_count
from perfmodel.parallel.serving.measurement import ServedComparison
from perfmodel.report.table import Table, table_of_rows, times_like, words


def run_line(comparison: ServedComparison) -> str:
    measured = comparison.measurement
    ranks = "1 process" if measured.tp == 1 else f"{measured.tp} processes (tp {measured.tp})"
    size = format_count(measured.model.num_parameters)
    return f"{measured.model.name}, {size} parameters in {measured.dtype}, on {ranks} of this machine"


def run_facts(comparison: ServedComparison) -> list[tuple[str, str]]:
    measured = comparison.measurement
    software = ", ".join(f"{name} {version}" for name, version in measured.software.items())
    checked = "not checked: the model is too large to run uncached as well"
    if measured.logit_error == measured.logit_error:
        checked = f"logits of prefill, chunks and decode equal the uncached forward pass to {measured.logit_error:.1e} of the largest"
    facts = [("ran on", f"{measured.chip} ({measured.device}); {software}"), ("checked", checked)]
    facts.append(("steps", f"{len(measured.steps[0].times)} of each shape, in turn"))
    basis = "none: steps of one rank on a CPU are predicted here; `perfmodel serve` predicts those of a cluster"
    if comparison.steps:
        basis = f"based on calibrated: {comparison.calibration}; is of processor time, what a step takes where nothing else runs"
    facts.append(("prediction", basis))
    if comparison.steps:
        slowdowns = " and ".join(f"{drift:.2f} (as in {name})" for name, drift in comparison.drifts.items())
        facts.append(("machine", f"between the steps, fixed products took {slowdowns} times their calibrated time"))
    return facts


def run_table(comparison: ServedComparison) -> Table:
    """Return one row per step shape."""
    shown = times_like(max(step.time for step in comparison.measurement.steps))
    predicted = {step.measured.shape: step for step in comparison.steps}
    rows = []
    for step in comparison.measurement.steps:
        shape, prediction = step.shape, predicted.get(step.shape)
        name = f"decode {shape.sequences:,} over {shape.cached + 1:,} tokens"
        if not shape.is_decode:
            name = f"prefill {shape.sequences:,} x {shape.new:,} tokens" + (f" after {shape.cached:,}" if shape.cached else "")
        largest = max(prediction.parts, key=lambda name: prediction.parts[name]) if prediction is not None else ""
        rows.append(
            {
                "step": name,
                "time": shown(step.time),
                "processor time": shown(step.undisturbed),
                "quartiles apart": shown(step.undisturbed_spread),
                "predicted": shown(prediction.predicted) if prediction is not None else "",
                "error": f"{prediction.error:+.1%}" if prediction is not None else "",
                "most of it": words(largest),
                "peak memory": format_bytes(step.counts.peak_memory),
            }
        )
    return table_of_rows("Steps, measured and predicted", rows, right=tuple(name for name in rows[0] if name not in ("step", "most of it")))


def run_object(comparison: ServedComparison) -> dict[str, Any]:
    measured = comparison.measurement
    predicted = {step.measured.shape: step for step in comparison.steps}
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
                "predicted": predicted[step.shape].predicted if step.shape in predicted else None,
                "error": predicted[step.shape].error if step.shape in predicted else None,
                "parts": dict(predicted[step.shape].parts) if step.shape in predicted else {},
                **picked(step.counts, "flops parameter_bytes cache_bytes peak_memory"),
                "collectives": {collective.kind: collective.count for collective in step.counts.collectives},
            }
            for step in measured.steps
        ],
    }
