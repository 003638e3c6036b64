"""`perfmodel run | calibrate | demo`: measurements with torch on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perfmodel.cli import options
from perfmodel.cli.output import Output, Progress, show
from perfmodel.cli.words import argument, command, option
from perfmodel.foundation.errors import bad_field
from perfmodel.foundation.plain import picked
from perfmodel.foundation.resources import check_can_be_written
from perfmodel.foundation.words import Words
from perfmodel.parallel.request import Request
from perfmodel.report.document import Block, Document, Facts, Text

if TYPE_CHECKING:
    from perfmodel.parallel.plan import Plan
    from perfmodel.verbs.demo import DemoResult


@command(assumed=Words(Request, only="calibration"), output=options.PLAIN_OUTPUT)
def run(
    plan: Annotated[str, argument("PLAN.yaml", "A plan file, or an expert plan by name.")],
    *,
    steps: Annotated[int, option("N", "Steps that are timed.")] = 20,
    warmup: Annotated[int, option("N", "Steps before them.")] = 3,
    shrink: Annotated[
        bool, typer.Option("--shrink", help="The same form of plan with fewer ranks and layers, so that it fits here.")
    ] = False,
    device: Annotated[str, option("NAME", "auto, cpu or cuda.")] = "auto",
    strategies: Annotated[
        bool, typer.Option("--strategies", help="Of a network's plan: also measure data parallelism and one weird trick, in the same run.")
    ] = False,
    network: Annotated[str, option("MODULE:FACTORY", "For a plan of `shard` of a torch module: the module to run.")] = "",
    assumed: Request,
    save: Annotated[Path | None, option("FILE.jsonl", "Append the measurement to a file of JSON lines.")] = None,
    output: Output,
) -> None:
    """Run a plan with torch on this machine, check its gradients, and compare time and memory with the prediction.

    Takes plans of `search` (models) and of `shard` (networks, every operator by itself, with or without stages). Without a
    calibration of this machine's CPUs, one is measured with the run (about a minute); `perfmodel calibrate` keeps one.
    """
    from perfmodel.report.predictions import job_line, plan_line
    from perfmodel.report.runs import collectives_table, comparison_object, measurement_facts, predicted_and_measured, run_verdict
    from perfmodel.verbs.api import run_plan
    from perfmodel.verbs.setting import load_plan

    if save is not None:
        check_can_be_written(save, "save")
    loaded = load_plan(plan)
    if loaded.assignment is not None:
        if shrink or save is not None:
            flag = "shrink" if shrink else "save"
            raise bad_field(flag, save or "yes", "is for plans of a model", "leave it out for a plan of `perfmodel shard`")
        _run_network(
            loaded,
            network,
            steps=steps,
            warmup=warmup,
            strategies=strategies,
            device=device,
            calibration=assumed.calibration,
            output=output,
        )
        return
    if network:
        raise bad_field("network", network, "is for plans of `perfmodel shard`", "leave it out for a plan of a model")
    if strategies:
        raise bad_field("strategies", "yes", "is for plans of `perfmodel shard`", "leave it out for a plan of a model")
    with Progress("run") as progress:
        comparison = run_plan(
            loaded, steps=steps, warmup=warmup, shrink=shrink, device=device, calibration=assumed.calibration, progress=progress.note
        )
    measured = comparison.measurement

    def blocks() -> Iterator[Block]:
        facts = [("job", job_line(measured.plan)), ("plan", plan_line(measured.plan)), *measurement_facts(comparison)]
        yield Facts(run_verdict(comparison), facts)
        yield from (predicted_and_measured(comparison), collectives_table(measured))
        yield from _busy(measured.busy_fraction, "run it")

    try:
        show(Document(content=lambda: comparison_object(comparison), blocks=blocks), output)
    finally:  # a measurement is shown if it cannot be saved, and saved if it cannot be shown
        if save is not None:
            from perfmodel.parallel.results import append_measurement

            append_measurement(measured, save)
    if save is not None and output.is_text:
        print(f"\nmeasurement: {save}")


def _run_network(
    plan: Plan, network: str, *, steps: int, warmup: int, strategies: bool, device: str, calibration: str | None, output: Output
) -> None:
    from perfmodel.report.networks import measured_table, trained_line
    from perfmodel.report.predictions import basis_lines, prediction_object
    from perfmodel.verbs.networks import run_network_plan

    with Progress("run") as progress:
        result = run_network_plan(
            plan,
            network=network or None,
            steps=steps,
            warmup=warmup,
            with_strategies=strategies,
            device=device,
            calibration=calibration,
            progress=progress.note,
        )

    def rows() -> list[dict[str, Any]]:
        return [
            {
                "name": name,
                "time_error": result.error(index),
                "prediction": prediction_object(result.predictions[index]),
                **picked(measured, "step_time step_time_spread gradient_error memory_by_rank traffic"),
            }
            for index, (name, measured) in enumerate(zip(result.names, result.measurements, strict=True))
        ]

    def blocks() -> Iterator[Block]:
        measured = result.measurements[0]
        software = ", ".join(f"{name} {version}" for name, version in measured.software.items())
        facts = [
            ("ran on", f"{measured.plan.cuts.described()}, {measured.chip} ({measured.device}); {software}"),
            ("checked", "gradients against one process; collectives (kind, axes, bytes) equal to the plan's"),
            ("steps", f"{len(measured.step_times)} of each plan, in turn, after {measured.warmup}"),
            ("trained", trained_line(measured.plan)),
            ("prediction", f"based on {'; '.join(basis_lines(result.predictions[0]))}"),
        ]
        yield Facts(f"{result.network.name}, batch {result.network.batch * measured.plan.num_microbatches}", facts)
        yield measured_table(result.names, result.predictions, result.measurements)
        yield from _busy(measured.busy_fraction, "run it")

    show(Document(content=lambda: {"network": result.network.name, "plans": rows()}, blocks=blocks), output)


def _busy(busy_fraction: float, what: str) -> Iterator[Block]:
    from perfmodel.report.runs import busy_sentence

    if sentence := busy_sentence(busy_fraction, what):
        yield Text(sentence, apart=True)


@command(output=options.PLAIN_OUTPUT)
def calibrate(
    *,
    save: Annotated[Path | None, option("FILE.yaml", "Where to write it; left out: where predictions of localhost look.")] = None,
    brief: Annotated[bool, typer.Option("--brief", help="Fewer shapes, in half the time.")] = False,
    ranks: Annotated[int | None, option("N", "Processes that compute and communicate together.")] = None,
    device: Annotated[str, option("NAME", "auto, cpu or cuda.")] = "auto",
    output: Output,
) -> None:
    """Measure this machine in under two minutes; predictions of localhost are then based on it."""
    from perfmodel.cli.known import calibration_facts
    from perfmodel.verbs.api import check_calibration_place, keep_calibration, measure_calibration, user_calibration_path

    if save is not None and save.suffix.lower() not in (".yaml", ".yml"):
        raise bad_field("save", save, "must end in .yaml", "write --save this-machine.yaml")
    check_calibration_place(save)
    with Progress("calibrate") as progress:
        calibration = measure_calibration(ranks=ranks, brief=brief, device=device, progress=progress.step)
    path = user_calibration_path(calibration) if save is None else save
    try:
        facts = Facts(f"calibration {calibration.name}", calibration_facts(calibration))
        blocks = lambda: chain([facts], _busy(calibration.fit.busy_fraction, "calibrate"))  # noqa: E731
        show(Document(content=lambda: {"calibration": calibration, "path": path}, blocks=blocks), output)
    finally:  # as in `run`
        keep_calibration(calibration, save)
    if not output.is_text:
        return
    print(f"\ncalibration: {path}")
    if save is not None:
        print(f"use it with: perfmodel predict --cluster localhost --calibration {path} ...")


@command(output=options.PLAIN_OUTPUT)
def demo(*, output: Output) -> None:
    """Calibrate this machine, search, run the plans and compare, with a small model: five minutes on two cores."""
    from perfmodel.foundation.resources import require_torch

    require_torch("run the demo")
    from perfmodel.report.runs import comparison_object
    from perfmodel.verbs.demo import run_demo

    if output.is_text:
        print("perfmodel demo: microbenchmarks, then plans of a small GPT-2 on two processes. It takes three to five minutes.", flush=True)
    with Progress("demo") as progress:
        result = run_demo(progress.step)

    def content() -> dict[str, Any]:
        rows = [
            {"name": row.name, "predicted_place": row.predicted_place, "measured_place": row.measured_place}
            | comparison_object(row.comparison)
            for row in result.rows
        ]
        return {
            "rows": rows,
            "largest_error": result.worst_error,
            **picked(result, "pairs_apart pairs_right drift others turns discarded elapsed"),
        }

    show(Document(content=content, blocks=lambda: _demo_blocks(result)), output)


def _demo_blocks(result: DemoResult) -> Iterator[Block]:
    from perfmodel.foundation.units import format_time
    from perfmodel.report.predictions import job_line
    from perfmodel.report.runs import demo_table

    phases = ", ".join(f"{phase} {format_time(time)}" for phase, time in result.elapsed.items())
    measured = result.rows[0].comparison.measurement
    software = ", ".join(f"{name} {version}" for name, version in measured.software.items())
    facts = [
        ("took", phases),
        ("searched", f"{result.search.num_evaluated:,} plans, {result.search.num_feasible:,} fit"),
        ("ran on", f"{measured.num_ranks} processes of {measured.chip}; {software}"),
        ("based on", "microbenchmarks of this machine alone; nothing is fitted to the plans"),
        (
            "measured",
            f"{result.turns} turns of a few steps" + (f", {result.discarded} more discarded (busy machine)" if result.discarded else ""),
        ),
        (
            "machine",
            f"other processes took up to {result.others:.0%} of the cores meanwhile; a fixed piece of work took {result.drift:.2f} times "
            "as long as before the calibration",
        ),
    ]
    yield Facts(job_line(result.rows[0].plan), facts)
    yield demo_table([(row.name, row.comparison, row.predicted_place, row.measured_place) for row in result.rows])
    yield Text(
        f"{result.pairs_right} of {result.pairs_apart} pairs of plans whose measured times differ clearly came in the predicted order; "
        f"closer ones are ties and share places. Largest error of a step time: {result.worst_error:.1%}.",
        apart=True,
    )
    yield from _busy(result.others, "run the demo")
    yield Text("Next: perfmodel calibrate, then perfmodel search --cluster localhost ...")
