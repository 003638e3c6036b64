"""`perfmodel fit`: an execution profile fitted to the user's measured runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from perfmodel.cli import options
from perfmodel.cli.output import Output, show
from perfmodel.cli.words import argument, command, option
from perfmodel.foundation.plain import picked
from perfmodel.parallel.knobs import Knobs
from perfmodel.parallel.request import Request
from perfmodel.report.document import Block, Document, Facts, Notes, Text
from perfmodel.verbs.fitting import ASKED, KNOBS

if TYPE_CHECKING:
    from perfmodel.fitting.result import FittedProfile


@command(asked=ASKED, knobs=KNOBS, output=options.PLAIN_OUTPUT)
def fit(
    runs: Annotated[
        list[str], argument("RUNS...", "Measured runs: CSV, JSON lines, training logs, torch profiler traces, memory snapshots.")
    ],
    *,
    plan: Annotated[
        list[str] | None, option("PLAN.yaml", "Of logs, traces, snapshots: the plan that ran; one for all, or one for each.")
    ] = None,
    save: Annotated[Path | None, option("MINE.yaml", "Write the profile; every verb takes it.")] = None,
    asked: Request,
    knobs: Knobs,
    output: Output,
) -> None:
    """Fit an execution profile to one to a hundred measured runs of your training loop.

    Options of job, cluster and plan apply to every run whose row leaves them out (docs/fitting.md).
    """
    from perfmodel.foundation.words import given_words
    from perfmodel.parallel.plan import plan_to_dict
    from perfmodel.verbs.fitting import fit_runs

    given = {**given_words(asked), **knobs.given()}
    given.pop("memory_headroom", None)
    fitted = fit_runs(runs, plan=plan or None, save=save, **given)
    memory = fitted.memory

    def run_object(run: Any) -> dict[str, Any]:
        return {name: plan_to_dict(run.plan) if name == "plan" else getattr(run, name) for name in run.__dataclass_fields__}

    def content() -> dict[str, Any]:
        return {
            **picked(fitted, "profile base"),
            "num_runs": len(fitted.runs),
            **picked(fitted, "error_before error_after error_left_out noise"),
            "habits": [asdict(behaviour) for behaviour in fitted.behaviours],
            "runs": [run_object(run) for run in fitted.runs],
            "outliers": [run.id for run in fitted.outliers],
            "next_run": next(map(run_object, fitted.next_runs), None),
            "memory": None
            if memory is None
            else {
                **picked(memory, "error_before error_after error_left_out"),
                "habit": asdict(memory.behaviour),
                "runs": list(map(run_object, memory.runs)),
            },
            "notes": fitted.notes,
            "saved": save,
        }

    show(Document(content=content, blocks=lambda: _blocks(fitted, save)), output)


def _blocks(fitted: FittedProfile, save: Path | None) -> Iterator[Block]:
    from perfmodel.fitting.tables import behaviours_table, headline, peaks_table, runs_table
    from perfmodel.foundation.text import percent

    count, errors = (
        (len(fitted.runs), fitted) if fitted.runs else (len(fitted.memory.runs), fitted.memory) if fitted.memory else (0, fitted)
    )
    what = "" if fitted.runs else "the peak memory of "
    error = f"mean error {percent(errors.error_before)} before, {percent(errors.error_after)} after"
    yield Facts(f"fitted to {what}{count} run{'s' * (count > 1)}: {error}", [("base", fitted.base), *headline(fitted)])
    yield behaviours_table(fitted)
    if fitted.runs:
        yield runs_table(fitted)
    if fitted.memory is not None:
        yield peaks_table(fitted.memory)
    yield Notes(fitted.notes)
    if save is not None:
        yield Text(f"profile: {save}\nuse it with: perfmodel predict ... --profile {save}", apart=True)
