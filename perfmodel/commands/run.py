"""`perfmodel run | calibrate | demo`: what needs torch and this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perfmodel.commands import options
from perfmodel.commands.output import Progress, print_facts, print_json, print_tables
from perfmodel.errors import bad_field

if TYPE_CHECKING:
    from perfmodel.results import Comparison


def run(
    plan: Annotated[str, typer.Argument(metavar="PLAN.yaml", help="A plan file, or an expert plan by name.")],
    steps: Annotated[int, typer.Option("--steps", metavar="N", help="Steps that are timed.")] = 20,
    warmup: Annotated[int, typer.Option("--warmup", metavar="N", help="Steps before them.")] = 3,
    shrink: Annotated[
        bool, typer.Option("--shrink", help="The same form of plan with fewer ranks and layers, so that it fits here.")
    ] = False,
    device: Annotated[str, typer.Option("--device", metavar="NAME", help="auto, cpu or cuda.")] = "auto",
    calibration: options.Calibration = None,
    save: Annotated[
        Path | None, typer.Option("--save", metavar="FILE.jsonl", help="Append the measurement to a file of JSON lines.")
    ] = None,
    json: options.Json = False,
) -> None:
    """Run a plan with torch on this machine: check its gradients against one process, time it, and compare with the prediction."""
    from perfmodel.api import run_plan

    if save is not None and not save.absolute().parent.is_dir():
        raise bad_field("save", save, "its folder does not exist", "make it or choose another path")
    with Progress("run") as progress:
        comparison = run_plan(
            plan, steps=steps, warmup=warmup, shrink=shrink, device=device, calibration=calibration, progress=progress.note
        )
    if save is not None:
        from perfmodel.results import append_measurement

        append_measurement(comparison.measurement, save)
    if json:
        from perfmodel.report.runs import comparison_object

        print_json(comparison_object(comparison))
        return
    _show(comparison)
    if save is not None:
        print(f"\nmeasurement: {save}")


def _show(comparison: Comparison) -> None:
    from perfmodel.report.predictions import job_line, plan_line
    from perfmodel.report.runs import collectives_table, measurement_facts, predicted_and_measured

    plan = comparison.measurement.plan
    print_facts(job_line(plan), [("plan", plan_line(plan)), *measurement_facts(comparison)])
    print_tables([predicted_and_measured(comparison), collectives_table(comparison.measurement)])


def calibrate(
    save: Annotated[
        Path | None, typer.Option("--save", metavar="FILE.yaml", help="Where to write it; left out: where predictions of localhost look.")
    ] = None,
    brief: Annotated[bool, typer.Option("--brief", help="Fewer shapes, in half the time.")] = False,
    ranks: Annotated[int | None, typer.Option("--ranks", metavar="N", help="Processes that compute and communicate together.")] = None,
    device: Annotated[str, typer.Option("--device", metavar="NAME", help="auto, cpu or cuda.")] = "auto",
    json: options.Json = False,
) -> None:
    """Measure this machine in under two minutes; predictions of localhost then rest on it."""
    from perfmodel.api import calibrate_machine, user_calibration_path
    from perfmodel.commands.known import calibration_facts

    if save is not None and save.suffix.lower() not in (".yaml", ".yml"):
        raise bad_field("save", save, "must end in .yaml", "write --save this-machine.yaml")
    if save is not None and not save.absolute().parent.is_dir():
        raise bad_field("save", save, "its folder does not exist", "make it or choose another path")
    with Progress("calibrate") as progress:
        calibration = calibrate_machine(save=save, ranks=ranks, brief=brief, device=device, progress=progress.step)
    path = user_calibration_path(calibration) if save is None else save
    if json:
        print_json({"calibration": calibration, "path": path})
        return
    print_facts(f"calibration {calibration.name}", calibration_facts(calibration))
    print(f"\ncalibration: {path}")
    if save is not None:
        print(f"use it with: perfmodel predict --cluster localhost --calibration {path} ...")


def demo() -> None:
    """The whole line on this machine, small: calibrate, search, run, compare. Under five minutes on two cores."""
    from perfmodel.api import require_torch

    require_torch("run the demo")
    from perfmodel.commands.demo import demo_facts, demo_table, demo_verdict
    from perfmodel.execute.demo import run_demo

    with Progress("demo") as progress:
        result = run_demo(progress.step)
    print_facts("GPT-2 on two processes of this machine: which plan is fastest?", demo_facts(result))
    print_tables([demo_table(result)])
    print(f"\n{demo_verdict(result)}")
