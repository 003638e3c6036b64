"""`perfmodel audit`: torch's own counts of a plan's program against the predicted ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from perfmodel.commands import options
from perfmodel.commands.output import Progress, print_facts, print_json, print_table
from perfmodel.errors import bad_field

if TYPE_CHECKING:
    from perfmodel.cost.counts import Audit, AuditRow, RankAudit

CONVENTION = "attention counts the full square of queries and keys, causal or not (torch's convention)"
EXIT_DIFFERENT = 1


def audit(
    plan: Annotated[str, typer.Argument(metavar="PLAN.yaml", help="A plan file, or an expert plan by name.")],
    rank: Annotated[int | None, typer.Option("--rank", metavar="N", help="Audit this rank only.")] = None,
    all_stages: Annotated[bool, typer.Option("--all-stages", help="Every pipeline stage, not only the first and the last.")] = False,
    every_microbatch: Annotated[
        bool, typer.Option("--every-microbatch", help="Count the whole step, not two shorter ones from which it follows.")
    ] = False,
    dropout: Annotated[bool, typer.Option("--dropout", help="Count the step with the model's dropout, which a run leaves out.")] = False,
    tolerance: Annotated[float, typer.Option("--tolerance", metavar="SHARE", help="Largest difference that passes.")] = 0.0,
    json: options.Json = False,
) -> None:
    """Build a plan's program under fake tensors at full size, without a GPU: FLOPs, collectives and bytes as torch counts them.

    Exit code 1 where a count differs.
    """
    from perfmodel.api import audit_plan
    from perfmodel.cost.counts import PEAK_TOLERANCE, SAVED_TOLERANCE

    if not 0.0 <= tolerance < 1.0:
        raise bad_field("tolerance", tolerance, "must be a share from 0 to 1", "leave it out for equality")
    with Progress("audit") as progress:
        result = audit_plan(
            plan, rank=rank, all_stages=all_stages, every_microbatch=every_microbatch, dropout=dropout, progress=progress.step
        )
    differences = result.differences(tolerance)
    if json:
        print_json(_as_object(result, len(differences), tolerance))
    else:
        _show(result, tolerance)
        if differences:
            print(f"\n{len(differences)} of torch's counts differ from the predicted ones.")
        else:
            counts = "equal" if tolerance == 0.0 else f"within {tolerance:g} of the predicted one"
            print(
                f"\nEvery count is {counts}; saved activations are within {SAVED_TOLERANCE:.0%} and the peak within {PEAK_TOLERANCE:.0%}."
            )
    if differences:
        raise typer.Exit(EXIT_DIFFERENT)


def _as_object(result: Audit, num_differences: int, tolerance: float) -> dict[str, Any]:
    from perfmodel.parallel.plan import plan_to_dict

    return {
        "is_clean": num_differences == 0,
        "num_differences": num_differences,
        "tolerance": tolerance,
        "convention": CONVENTION,
        "torch": result.torch,
        "profile": result.profile,
        "counted_microbatches": list(result.counted_microbatches),
        "plan": plan_to_dict(result.plan),
        "ranks": [
            {
                "rank": audited.rank,
                "place": audited.place,
                "elapsed": audited.elapsed,
                "memory": audited.memory,
                "peak_moment": audited.peak_moment,
                "peak_by_class": dict(audited.peak_by_class),
                "rows": [
                    {
                        "group": row.group,
                        "name": row.name,
                        "unit": row.unit,
                        "predicted": row.predicted,
                        "counted": row.counted,
                        "difference": row.difference,
                        "tolerance": row.tolerance,
                    }
                    for row in audited.rows
                ],
            }
            for audited in result.ranks
        ],
    }


def _show(result: Audit, tolerance: float) -> None:
    from perfmodel.report.predictions import job_line, plan_line
    from perfmodel.units import format_bytes, format_time

    took = ", ".join(f"rank {audited.rank} {format_time(audited.elapsed)}" for audited in result.ranks)
    memory = max(audited.memory for audited in result.ranks)
    facts = [
        ("plan", plan_line(result.plan)),
        ("counted by", f"torch {result.torch}, one step of the executor's program under fake tensors; profile {result.profile}"),
        ("microbatches", _microbatches(result)),
        ("convention", CONVENTION),
        ("took", f"{took}; {format_bytes(memory)} of this machine's memory"),
    ]
    print_facts(job_line(result.plan), facts)
    for audited in result.ranks:
        print()
        headers = ("", "", "predicted", "torch", "difference")
        rows = [_cells(row, tolerance) for row in audited.rows]
        print_table(headers, rows, title=_title(audited, result), right=headers[2:], fold=("",))
        classes = ", ".join(f"{name.replace('_', ' ')} {format_bytes(size)}" for name, size in audited.peak_by_class.items())
        print(f"The peak is predicted at the {audited.peak_moment}: {classes}.")


def _microbatches(result: Audit) -> str:
    counted, whole = result.counted_microbatches, result.plan.num_microbatches
    if counted == (whole,):
        return f"counted with all {whole}"
    numbers = " and ".join(f"{number:,}" for number in counted)
    return f"counted with {numbers} of {whole:,}, which is exact as every further one repeats the last"


def _title(audited: RankAudit, result: Audit) -> str:
    place = ", ".join(f"{axis} {index}" for axis, index in audited.place.items() if result.plan.layout.degree(axis) > 1)
    return f"Rank {audited.rank}" + (f" ({place})" if place else "")


def _cells(row: AuditRow, tolerance: float) -> tuple[str, ...]:
    def shown(value: float) -> str:
        return f"{value:,.0f} {row.unit}".strip()

    same = row.passes(tolerance)
    kind, _, axes = row.name.partition(" ")
    name = f"{kind.replace('_', '-')} over {axes}" if row.group == "collectives" else row.name
    return row.group, name, shown(row.predicted), shown(row.counted), "0" if same and not row.difference else shown(row.difference)
