"""`perfmodel explain | compare`: why this plan, why not another, and plans side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from perfmodel.cli import options
from perfmodel.cli.output import print_facts, print_json, print_notes, print_paragraph, print_tables
from perfmodel.cli.words import command
from perfmodel.foundation.errors import InputError
from perfmodel.foundation.words import Words, given_words
from perfmodel.parallel.request import Request

PlanPath = Annotated[str, typer.Argument(metavar="PLAN.yaml", help="A plan file, or an expert plan by name.")]


@command(assumed=options.ASSUMED, display=options.DISPLAY)
def explain(
    plan: PlanPath,
    *,
    why_not: Annotated[
        list[str], typer.Option("--why-not", metavar="KNOB=VALUE[,...]", help="Knobs that you would have chosen, such as tp=16,pp=2.")
    ] = [],  # noqa: B006  # typer wants a list; nobody changes it
    trust: Annotated[
        bool, typer.Option("--trust", help="Show the sources of uncertainty of the step time, and the cheapest measurement that halves it.")
    ] = False,
    assumed: Request,
    any_framework: options.AnyFramework = False,
    display: options.Display,
    json: options.Json = False,
) -> None:
    """Explain where a plan's time and memory go, what each knob would change, and why not another plan."""
    from perfmodel.parallel.prediction import notes
    from perfmodel.planner.explain import parse_knobs
    from perfmodel.report.predictions import headline, job_line, memory_table, parts_table, plan_line, verdict_line
    from perfmodel.report.searches import explanation_object, neighbours_table
    from perfmodel.verbs.api import explain_plan
    from perfmodel.verbs.setting import load_plan

    found = load_plan(plan)
    asked = [parse_knobs(text) for text in why_not] or [{}]
    first, *others = (
        explain_plan(found, why_not=knobs or None, trust=trust and knobs is asked[0], any_framework=any_framework, **given_words(assumed))
        for knobs in asked
    )
    answers = [*first.why_not, *(answer for other in others for answer in other.why_not)]
    if json:
        content = explanation_object(first)
        for other in others:
            content["why_not"] += explanation_object(other)["why_not"]
        print_json(content)
        return
    if answers:
        for answer in answers:
            print_paragraph(f"Why not {answer.reason}.")
        print()
    if first.trust is not None:
        from perfmodel.report.trust import doubts_table, remedies_table, trust_lines

        step = first.prediction.step_time
        print_facts(job_line(first.prediction.plan), [("plan", plan_line(first.prediction.plan)), *trust_lines(first.trust, step)])
        print_tables([doubts_table(first.trust), *([remedies_table(first.trust, step)] if first.trust.remedies else [])], wide=display.wide)
        return
    print_facts(verdict_line(first.prediction), headline(first.prediction, verbose=display.verbose))
    turned = [neighbours_table(first)] if first.neighbours else []
    print_tables([parts_table(first.prediction), memory_table(first.prediction), *turned], wide=display.wide)
    if first.remedies:
        from perfmodel.report.remedies import fitting_changes_table

        print_tables([fitting_changes_table(first.remedies)])
    print_notes(notes(first.prediction), verbose=display.verbose)


@command(assumed=options.ASSUMED, files=Words(options.Files, only="plot"))
def compare(
    plans: Annotated[list[str], typer.Argument(metavar="PLAN.yaml PLAN.yaml...", help="Plan files, or expert plans by name.")],
    *,
    assumed: Request,
    json: options.Json = False,
    files: options.Files,
) -> None:
    """Compare plans side by side: time, its parts, memory, and the knobs that differ."""
    from perfmodel.report.predictions import comparison_tables, comparison_verdict, is_one_job, prediction_object
    from perfmodel.verbs.api import compare_plans

    files.check(json=json)
    if len(plans) < 2:
        raise InputError("compare: needs at least two plans; give their files, or use perfmodel predict for one")
    predictions = compare_plans(plans, **given_words(assumed))
    names = _short_names(plans)
    if files.plot is not None:
        from perfmodel.report.figures import plot_predictions

        plot_predictions(predictions, files.plot, names=names)
    if json:
        print_json(
            {
                "same_job": is_one_job(predictions),
                "plans": [{"file": name, **prediction_object(each)} for name, each in zip(plans, predictions, strict=True)],
            }
        )
        return
    print_paragraph(comparison_verdict(names, predictions))
    print_tables(comparison_tables(names, predictions))
    if not is_one_job(predictions):
        print_notes(["these plans run different jobs: compare tokens/s a chip, not step times"], verbose=False)
    if files.plot is not None:
        print(f"\nfigure: {files.plot}")


def _short_names(plans: list[str]) -> list[str]:
    """File names without folder and ending; as they were given where that is not unique."""
    names = [Path(plan).name.removesuffix(".yaml").removesuffix(".yml") for plan in plans]
    if len(set(names)) == len(names):
        return names
    return [f"{number}: {name}" for number, name in enumerate(names, 1)]
