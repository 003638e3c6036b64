"""The demo's result as a table and a few sentences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perfmodel.report.table import Table
from perfmodel.units import format_bytes, format_time

if TYPE_CHECKING:
    from perfmodel.execute.demo import DemoResult


def demo_facts(result: DemoResult) -> list[tuple[str, str]]:
    """What was trained where, and what the numbers rest on."""
    model, job, search = result.job.model, result.job, result.search
    rounds = f"{result.rounds} round{'s' if result.rounds != 1 else ''}" + (
        f", {result.discarded} more discarded: the machine was busy" if result.discarded else ""
    )
    facts = [
        (
            "job",
            f"GPT-2 with {model.num_hidden_layers} layers, {model.hidden_size} wide, {model.num_parameters / 1e6:.1f} M parameters; "
            f"{job.global_batch} sequences of {job.seq_len} tokens, {job.precision}",
        ),
        ("machine", f"{result.rows[0].comparison.measurement.num_ranks} processes of {result.rows[0].comparison.measurement.chip}"),
        ("calibration", f"{result.calibration.name}, {sum(result.calibration.points.values())} microbenchmarks"),
        ("searched", f"{search.num_evaluated:,} plans in {format_time(search.search_time)}"),
        ("measured", f"{result.rows[0].comparison.measurement.steps} steps of each plan in {rounds}"),
        ("took", ", ".join(f"{name} {seconds:.0f} s" for name, seconds in result.elapsed.items())),
    ]
    if abs(result.drift - 1.0) > 0.1:
        facts.append(
            (
                "machine load",
                f"a fixed piece of work took {result.drift - 1:+.0%} against before calibrating: times are off by as much",
            )
        )
    return facts


def place(first_last: tuple[int, int]) -> str:
    """`3`, or `2-4` where plans tie."""
    first, last = first_last
    return f"{first}" if first == last else f"{first}-{last}"


def demo_table(result: DemoResult) -> Table:
    """Predicted against measured, in the predicted order."""
    rows = []
    for row in result.rows:
        predicted, measured = row.comparison.prediction, row.comparison.measurement
        rows.append(
            (
                row.name,
                format_time(predicted.step_time),
                format_time(measured.step_time),
                f"{row.comparison.time_error:+.1%}",
                place(row.predicted_place),
                place(row.measured_place),
                format_bytes(predicted.memory["total"]),
                format_bytes(measured.peak_memory),
                f"{row.comparison.memory_error:+.1%}",
            )
        )
    headers = (
        "plan",
        "predicted",
        "measured",
        "error",
        "place predicted",
        "place measured",
        "memory predicted",
        "measured memory",
        "error ",
    )
    return Table(
        title="Predicted against measured; plans within 15 % of each other share their places",
        headers=headers,
        rows=tuple(rows),
        right=headers[1:],
        fold=("plan",),
    )


def demo_verdict(result: DemoResult) -> str:
    pairs = (
        f"of {result.pairs_apart} pairs of plans that are more than 15 % apart, {result.pairs_right} came in the predicted order"
        if result.pairs_apart
        else "no two plans are more than 15 % apart: all tie"
    )
    return f"Largest error of a step time {result.worst_error:.1%}; {pairs}."
