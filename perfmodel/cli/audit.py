"""`perfmodel audit`: counts of a plan's program by torch against the predicted counts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perfmodel.cli import options
from perfmodel.cli.output import Output, Progress, show
from perfmodel.cli.words import argument, command, option
from perfmodel.foundation.errors import bad_field
from perfmodel.foundation.plain import picked
from perfmodel.report.document import Block, Document, Facts, Text
from perfmodel.report.table import Table

if TYPE_CHECKING:
    from perfmodel.cost.audit import Audit, RankAudit
    from perfmodel.parallel.prediction import Prediction

CONVENTION = "attention counts the full square of queries and keys, causal or not (torch's convention)"
EXIT_DIFFERENT = 1


@command(output=options.PLAIN_OUTPUT)
def audit(
    plan: Annotated[str, argument("PLAN.yaml", "A plan file, or an expert plan by name.")],
    *,
    rank: Annotated[int | None, option("N", "Audit this rank only.")] = None,
    all_stages: Annotated[bool, typer.Option("--all-stages", help="Every pipeline stage, not only the first and the last.")] = False,
    every_microbatch: Annotated[
        bool, typer.Option("--every-microbatch", help="Count the whole step, not two shorter ones from which it follows.")
    ] = False,
    dropout: Annotated[bool, typer.Option("--dropout", help="Count the step with the model's dropout, which a run leaves out.")] = False,
    routing: Annotated[str | None, option("FILE", "Tokens that each rank of ep sends to each expert: a row a rank, .csv or .json.")] = None,
    tolerance: Annotated[float, option("SHARE", "Largest difference that passes.")] = 0.0,
    output: Output,
) -> None:
    """Count a plan's FLOPs, collectives and bytes with torch, at full size under fake tensors, without a GPU.

    Exit code 1 where a count differs.
    """
    from perfmodel.verbs.api import audit_plan, predict_plan

    if not 0.0 <= tolerance < 1.0:
        raise bad_field("tolerance", tolerance, "must be a share from 0 to 1", "leave it out for equality")
    with Progress("audit") as progress:
        result = audit_plan(
            plan,
            rank=rank,
            all_stages=all_stages,
            every_microbatch=every_microbatch,
            dropout=dropout,
            routing=routing,
            progress=progress.step,
        )
    differences = result.differences(tolerance)
    prediction = predict_plan(plan)
    show(
        Document(
            content=lambda: _as_object(result, prediction, len(differences), tolerance),
            blocks=lambda: _blocks(result, prediction, len(differences), tolerance),
            rows=lambda: ({"rank": audited.rank, **asdict(row)} for audited in result.ranks for row in audited.rows),
        ),
        output,
    )
    if differences:
        raise typer.Exit(EXIT_DIFFERENT)


def _largest_peak(result: Audit) -> tuple[float, int]:
    """Return the largest peak memory counted by torch [byte], and its rank."""
    return max((row.counted, audited.rank) for audited in result.ranks for row in audited.rows if row.name == "peak")


def _as_object(result: Audit, prediction: Prediction, num_differences: int, tolerance: float) -> dict[str, Any]:
    from perfmodel.parallel.plan import plan_to_dict

    return {
        "is_clean": num_differences == 0,
        "num_differences": num_differences,
        "tolerance": tolerance,
        "convention": CONVENTION,
        **picked(result, "torch profile"),
        "plan_profile": prediction.plan.profile,
        "plan_memory": prediction.memory["total"],
        "memory_usable": prediction.memory_usable,
        "fits": _largest_peak(result)[0] <= prediction.memory_usable,
        "counted_microbatches": list(result.counted_microbatches),
        "skew": result.skew,
        "plan": plan_to_dict(result.plan),
        "ranks": [
            {
                "rank": audited.rank,
                "place": audited.coordinates,
                **picked(audited, "elapsed memory peak_moment"),
                "peak_by_class": dict(audited.peak_by_class),
                "rows": [picked(row, "group name unit predicted counted difference tolerance") for row in audited.rows],
            }
            for audited in result.ranks
        ],
    }


def _blocks(result: Audit, prediction: Prediction, num_differences: int, tolerance: float) -> Iterator[Block]:
    from perfmodel.cost.audit import PEAK_TOLERANCE, SAVED_TOLERANCE
    from perfmodel.foundation.units import format_bytes, format_time
    from perfmodel.report.predictions import job_line, plan_line

    counted, total = result.counted_microbatches, result.plan.num_microbatches
    microbatches = f"counted with all {total}"
    if counted != (total,):
        numbers = " and ".join(f"{number:,}" for number in counted)
        microbatches = f"counted with {numbers} of {total:,}, which is exact as every further one repeats the last"
    executed, stated = result.plan.job.precision, prediction.plan.job.precision
    took = ", ".join(f"rank {audited.rank} {format_time(audited.elapsed)}" for audited in result.ranks)
    memory = max(audited.memory for audited in result.ranks)
    facts = [
        ("plan", plan_line(result.plan)),
        ("counted by", f"torch {result.torch}, one step of the executor's program under fake tensors"),
        ("profile", _profile_line(result, prediction)),
        *([("precision", f"{executed}, as the executor computes; the plan's own is {stated}")] if executed is not stated else []),
        ("microbatches", microbatches),
        *([("tokens", f"unevenly many for experts: the fullest rank gets {result.skew:.4g} times the mean")] if result.skew else []),
        ("convention", CONVENTION),
        ("took", f"{took}; {format_bytes(memory)} of this machine's memory"),
    ]
    agreeing = [row.passes(tolerance) for audited in result.ranks for row in audited.rows]
    verdict = f"{'agrees' if all(agreeing) else 'DIFFERS'}: {sum(agreeing):,} of {len(agreeing):,} counts of torch are as predicted"
    yield Facts(verdict, [("job", job_line(result.plan)), *facts])
    for audited in result.ranks:
        yield _rank_table(audited, result)
        classes = ", ".join(f"{name.replace('_', ' ')} {format_bytes(size)}" for name, size in audited.peak_by_class.items())
        yield Text(f"The peak is predicted at the {audited.peak_moment}: {classes}.")
    peak, rank = _largest_peak(result)
    if peak > prediction.memory_usable:
        yield Text(
            f"This program does not fit: the tensors of rank {rank} alone take {format_bytes(peak)}, "
            f"a chip of {prediction.plan.cluster} offers {format_bytes(prediction.memory_usable)}.",
            apart=True,
        )
    if num_differences:
        yield Text(f"{num_differences} of torch's counts differ from the predicted ones.", apart=True)
    else:
        counts = "equal" if tolerance == 0.0 else f"within {tolerance:g} of the predicted one"
        yield Text(
            f"Every count is {counts}; saved activations are within {SAVED_TOLERANCE:.0%} and the peak within {PEAK_TOLERANCE:.0%}.",
            apart=True,
        )


def _profile_line(result: Audit, prediction: Prediction) -> str:
    """Return the profile of the audited program: that of the executor, whatever the framework of the plan."""
    from perfmodel.foundation.units import format_bytes

    if prediction.plan.profile == result.profile:
        return f"{result.profile}, the plan's own"
    return (
        f"{result.profile}, as the executor runs it; the plan's own is {prediction.plan.profile}, under which the fullest chip needs "
        f"{format_bytes(prediction.memory['total'])} (perfmodel predict PLAN; with --profile {result.profile} as audited)"
    )


def _rank_table(audited: RankAudit, result: Audit) -> Table:
    coordinates = ", ".join(f"{axis} {index}" for axis, index in audited.coordinates.items() if result.plan.layout.degree(axis) > 1)
    headers = ("", "", "unit", "predicted", "torch", "difference")
    rows = []
    for row in audited.rows:
        kind, _, axes = row.name.partition(" ")
        name = f"{kind.replace('_', '-')} over {axes}" if row.group == "collectives" else row.name
        rows.append((row.group, name, row.unit, f"{row.predicted:,.0f}", f"{row.counted:,.0f}", f"{row.difference:,.0f}"))
    title = f"Rank {audited.rank}" + (f" ({coordinates})" if coordinates else "")
    return Table(title=title, headers=headers, rows=tuple(rows), right=headers[3:], fold=("",))
