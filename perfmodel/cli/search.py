"""`perfmodel search`: the best plans of a job on a cluster, the baselines beside them, and why the others are not."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perfmodel.cli import options
from perfmodel.cli.output import Progress, first_interrupt, print_facts, print_json, print_tables
from perfmodel.cli.words import command, flag, largest_of
from perfmodel.foundation.errors import InputError
from perfmodel.foundation.words import Words
from perfmodel.hardware.chip_cluster import short_name
from perfmodel.parallel.knobs import Knobs, bounded_knobs
from perfmodel.parallel.request import Request
from perfmodel.planner.ties import TIES

if TYPE_CHECKING:
    from perfmodel.parallel.prediction import NotPredicted
    from perfmodel.planner.result import SearchResult
    from perfmodel.verbs.setting import Setting

EXIT_NOTHING_FITS = 2
EXIT_INTERRUPTED = 130


_COUNTED = {"chips": "chips", "global_batch": "sequences", "seq_len": "tokens"}


@command(
    asked=Words(Request, several=True),
    chip=options.ChipWords,
    knobs=Words(Knobs, several=True),
    maximum=largest_of(bounded_knobs()),
    files=options.Files,
    after={"maximum": "order"},
)
def search(
    *,
    asked: Request,
    chip: options.ChipWords,
    objective: Annotated[str, typer.Option("--objective", metavar="NAME", help="time, memory or chip-time.")] = "time",
    top: Annotated[int, typer.Option("--top", metavar="N", help="How many plans to show.")] = 10,
    knobs: Knobs,
    maximum: dict[str, int],
    ties: Annotated[
        str, typer.Option("--ties", metavar="SHARE", help="Plans so near the best are as good: the simplest, then the smallest first.")
    ] = f"{100 * TIES:g}%",
    only_runnable: Annotated[
        bool, typer.Option("--only-runnable", help="Search only what the assumed framework can run (`perfmodel profiles NAME`).")
    ] = False,
    tokens: options.Tokens = "",
    json: options.Json = False,
    files: options.Files,
) -> int:
    """The best plans of a job on a cluster: every plan that divides is evaluated (docs/space.md).

    A knob that is given is fixed; --max-tp and the like bound the others. Flags marked [*] take several values, as --seq-len 4k,8k or again
    and again. Exit code 2 when nothing fits; Ctrl-C shows the best so far.
    """
    from perfmodel.parallel.prediction import NotPredicted, first_reasons
    from perfmodel.verbs.requests import check_names, make_requests, setting_of_request

    files.check(json=json)
    asked = replace(asked, cluster=options.with_chip(asked.cluster, chip))
    near = options.parse_fraction(ties, "ties")
    num_tokens = options.parse_tokens(tokens)
    requests = make_requests(asked, spelled=flag)
    headroom, allowed = requests[0].memory_headroom, requests[0].risk
    if files.save is not None and len(requests) > 1:
        raise InputError("--save: can write one plan only; give one value of everything")
    found: list[tuple[Setting, SearchResult]] = []
    if len(requests) > 1:
        check_names(requests)
    failures: list[NotPredicted] = []
    was_interrupted = False
    for request in requests:
        try:
            setting = setting_of_request(request)
            result, was_interrupted = _search_once(
                setting,
                knobs,
                maximum,
                objective=objective,
                top=top,
                headroom=headroom,
                risk=allowed,
                ties=near,
                only_runnable=only_runnable,
            )
        except InputError as error:
            failures.append(NotPredicted(asked=request.described(), reason=str(error)))
            continue
        found.append((setting, result))
        if was_interrupted:
            break
    if not found:
        raise InputError(first_reasons(failures))
    written = _write(found, files.save, files.plot)
    if files.csv is not None:
        _write_csv(found, files.csv, tokens=num_tokens)
        written.append(f"table: {files.csv}")
    if str(files.csv) != "-":
        _show(found, failures, json=json, tokens=num_tokens)
    for line in written if not json and str(files.csv) != "-" else ():
        print(f"\n{line}")
    if was_interrupted:
        return EXIT_INTERRUPTED
    if any(result.num_feasible for _, result in found):
        return 0
    sys.stdout.flush()
    setting, result = min(found, key=lambda pair: pair[1].least_memory[0].memory["total"])
    print(f"perfmodel: {_nothing_fits(setting, result, knobs, maximum, headroom, allowed)}", file=sys.stderr)
    return EXIT_NOTHING_FITS


def _search_once(
    setting: Setting,
    knobs: Knobs,
    maximum: dict[str, int],
    *,
    objective: str,
    top: int,
    headroom: float,
    risk: float | None,
    ties: float,
    only_runnable: bool,
) -> tuple[SearchResult, bool]:
    """The result, and whether Ctrl-C came meanwhile: the search then ends with what it has."""
    from perfmodel.verbs.searching import search_in

    place = f"{setting.cluster.num_chips} chips of {short_name(setting.reference)}"
    with Progress(f"search on {place}") as progress, first_interrupt() as was_interrupted:

        def report(done: float) -> bool:
            progress.share(done)
            return was_interrupted()

        result = search_in(
            setting,
            knobs,
            maximum,
            objective=objective,
            top=top,
            memory_headroom=headroom,
            risk=risk,
            ties=ties,
            only_runnable=only_runnable,
            progress=report,
        )
        return result, was_interrupted()


def _write(found: list[tuple[Setting, SearchResult]], save: Path | None, plot: Path | None) -> list[str]:
    """What was written and where; nothing where no plan fits."""
    with_plans = [result for _, result in found if result.plans]
    written = []
    if save is not None and with_plans:
        from perfmodel.parallel.plan_file import write_plan

        write_plan(with_plans[0].plans[0].plan, save)
        written.append(f"best plan: {save}")
    if plot is not None and with_plans:
        from perfmodel.report.figures import plot_scaling, plot_search

        if len(found) > 1:
            plot_scaling([result.plans[0] for result in with_plans], plot)
        else:
            plot_search(with_plans[0], plot)
        written.insert(0, f"figure: {plot}")
    return written


def _write_csv(found: list[tuple[Setting, SearchResult]], path: Path, *, tokens: float) -> None:
    from perfmodel.report.rows import csv_text, prediction_row

    rows = []
    for _, result in found:
        named = [(str(place), each) for place, each in zip(result.places, result.plans, strict=True)]
        named += [(baseline.name, each) for baseline in result.baselines for each in baseline.prediction]
        rows += [{"place": place, **prediction_row(each, tokens=tokens)} for place, each in named]
    options.write_csv(csv_text(rows), path)


def _show(found: list[tuple[Setting, SearchResult]], failures: list[NotPredicted], *, json: bool, tokens: float) -> None:
    from perfmodel.report.searches import search_object

    if json:
        objects = [search_object(result, tokens=tokens) for _, result in found]
        for place, (setting, _) in zip(objects, found, strict=True):
            place |= setting.described()
        not_searched = [{**each.asked, "reason": each.reason} for each in failures]
        print_json({"searches": objects, "not_searched": not_searched} if len(found) + len(failures) > 1 else objects[0])
    elif len(found) + len(failures) > 1:
        from perfmodel.report.predictions import convention_lines, settings_table, settings_title
        from perfmodel.report.searches import search_line
        from perfmodel.verbs.footing import column_of, common_footing, footing_line

        best = [result.plans[0] for _, result in found if result.plans]
        if best:
            footing = common_footing([(setting, result.plans[0]) for setting, result in found if result.plans])
            common = (column_of(footing), footing.step_times) if footing else None
            print(f"{settings_title(best)}: the best plan of each")
            print_tables([settings_table(best, tokens=tokens, footing=common)])
            print("\n".join(["", *([footing_line(footing, best)] if footing else []), *convention_lines(best)]))
        shared = [name for name, _ in setting_words(found[0][0]).items() if len({setting_words(each)[name] for each, _ in found}) == 1]
        for setting, result in found:
            told = [text for name, text in setting_words(setting).items() if name not in shared or name in ("cluster", "chips")]
            print(f"{', '.join(told)}: {search_line(result)}")
        for failure in failures:
            print(f"not searched: {failure}")
    else:
        _show_one(found[0][1], tokens=tokens)


def setting_words(setting: Setting) -> dict[str, str]:
    """What tells one search of a table from another."""
    return {name: f"{value:,} {_COUNTED[name]}" if name in _COUNTED else value for name, value in setting.described().items()}


def _show_one(result: SearchResult, *, tokens: float) -> None:
    from perfmodel.report.predictions import headline, job_line, parts_table, rests_on_lines
    from perfmodel.report.searches import (
        baselines_lines,
        beside_lines,
        certainty_table,
        marked_lines,
        plans_legend,
        plans_table,
        rejected_table,
        search_line,
        ties_line,
    )

    some = [*result.plans, *result.least_memory]
    if some:
        print(job_line(some[0].plan))
        print(f"assumes {some[0].plan.profile} as the framework (--profile); rests on {rests_on_lines(some[0])[0]}")
    print(("interrupted; the best so far: " if result.interrupted else "") + search_line(result))
    plans, shared = plans_table(result)
    print_tables([plans])
    for line in plans_legend(plans, shared):
        print(line)
    for line in [*beside_lines(result), ties_line(result), *marked_lines(result), *baselines_lines(result)]:
        if line:
            print(line)
    if result.plans:
        print()
        print_facts(
            "The best plan" if str(result.objective) != "memory" else "The plan that needs the least memory",
            headline(result.plans[0], tokens=tokens),
        )
        print_tables([parts_table(result.plans[0])])
    print_tables([*([certainty_table(result)] if any(each.prediction for each in result.certainty) else []), rejected_table(result)])


def _nothing_fits(
    setting: Setting, result: SearchResult, knobs: Knobs, maximum: dict[str, int], headroom: float, risk: float | None
) -> str:
    """One sentence: how much is missing, and what would make it fit."""
    from perfmodel.foundation.units import format_bytes
    from perfmodel.report.predictions import plan_line
    from perfmodel.report.table import percent
    from perfmodel.verbs.searching import least_chips_that_fit

    least = result.least_memory[0]
    with Progress("looking for what would fit") as progress:
        progress.share(0.0)
        chips = least_chips_that_fit(setting, knobs, maximum, memory_headroom=headroom, risk=risk)
    remedy = f"{chips:,} chips would be enough" if chips else "use chips with more memory, a smaller model or shorter sequences"
    if knobs.given() or maximum:
        remedy += ", or free some of the knobs that were given"
    free = f" at a risk of {percent(risk)}" if risk else f" less {percent(headroom)} kept free" if headroom else ""
    ranks = "a larger --risk" if risk else "--memory-headroom 0"
    tight = f" ({result.num_tight:,} plans are tight: they fit into all of it, {ranks} ranks them)" if result.num_tight else ""
    return (
        f"no plan fits: the least that any of {result.num_evaluated:,} plans needs is {format_bytes(least.memory['total'])} a chip, of "
        f"{format_bytes(result.memory_usable)} usable{free}{tight} ({plan_line(least.plan)}); {remedy}"
    )
