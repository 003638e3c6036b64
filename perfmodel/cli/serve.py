"""`perfmodel serve`: how fast a service answers, how many at once, what bounds it, and which plan is best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perfmodel.cli import options
from perfmodel.cli.output import Progress, print_command, print_facts, print_json, print_notes, print_paragraph, print_tables
from perfmodel.cli.words import command, flag
from perfmodel.foundation.errors import InputError
from perfmodel.foundation.words import Words, word
from perfmodel.parallel.serving.request import ServingRequest

if TYPE_CHECKING:
    from perfmodel.planner.serving.launch import LaunchLine

EXIT_NOTHING_FITS = 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class WantedWords:
    """What is wanted of a service: limits, and what a search makes best."""

    ttft: str = word("Limit of the time to the first token, such as 500ms", metavar="TIME", default="")
    tpot: str = word("Limit of the time of each token, such as 30ms", metavar="TIME", default="")
    latency: str = word("Limit of a whole request, such as 10s", metavar="TIME", default="")
    limit_headroom: Any = word(
        "With --search: share of each limit that a plan is predicted to stay below it, such as 5%; 0: none",
        metavar="SHARE", otherwise="1.5 % if left out", takes="float | str",
    )  # fmt: skip
    objective: str = word(
        "With --search: throughput (tokens/s a chip), latency, or cost", otherwise="throughput if left out", metavar="NAME", default=""
    )
    allow: str = word("With --search: formats of weights that may be used, such as bf16,fp8", metavar="NAMES", default="")
    top: int | None = word("With --search: plans to show", otherwise="10 if left out", kind=int)
    seed: int | None = word("With --simulate: seed of the drawn requests", otherwise="0 if left out", metavar="N", kind=int)

    def limits(self) -> dict[str, str]:
        """Time -> its limit as it was written, those that were given."""
        times = {"ttft": self.ttft, "tpot": self.tpot, "request_latency": self.latency}
        return {name: limit for name, limit in times.items() if limit}


#: What `serve` writes beside what it prints.
_FILES = Words(
    options.Files,
    only="csv plot",
    helps={
        "csv": "Also write one line for each plan; - for standard output alone.",
        "plot": "Also draw: with --operators the roofline, with --search the front.",
    },
)


@command(asked=ServingRequest, chip=options.ChipWords, wanted=WantedWords, files=_FILES, display=options.DISPLAY)
def serve(
    *,
    asked: ServingRequest,
    chip: options.ChipWords,
    wanted: WantedWords,
    files: options.Files,
    operators: Annotated[
        bool,
        typer.Option("--operators", help="Show every operator of a decode step and of a prefill: FLOPs, bytes, time and bottleneck."),
    ] = False,
    simulated: Annotated[
        bool,
        typer.Option(
            "--simulate",
            help="Run the engine step by step, as --concurrency always does: p50, p90 and p99 over requests, and goodput under the limits.",
        ),
    ] = False,
    search: Annotated[bool, typer.Option("--search", help="Search the best plans under the limits; given knobs are fixed.")] = False,
    p99: Annotated[
        bool, typer.Option("--p99", help="With --search: apply the limits to the 99th percentile over requests, not to the mean.")
    ] = False,
    disaggregated: Annotated[
        bool, typer.Option("--disaggregated", help="With --search: also try separate prefill and decode workers.")
    ] = False,
    run: Annotated[
        bool,
        typer.Option("--run", help="Run steps of a small model of this kind here with torch, and compare with the prediction."),
    ] = False,
    display: options.Display,
    json: options.Json = False,
) -> int:
    """Predict TTFT, TPOT, throughput and memory of a service, or search its best plan.

    Defaults: the smallest tp whose replicas hold the requests, replicas on all chips, the format in which the model is published, and all
    requests in flight that fit. Limits (--ttft, --tpot, --latency) are compared with the prediction. --cluster, --chips, --tp,
    --concurrency and --rate take several values (16,64,256): a row for each combination.
    """
    from perfmodel.foundation.values import several
    from perfmodel.verbs.serving import NEEDED
    from perfmodel.verbs.serving_requests import serving_requests

    files.check(json=json)
    csv, plot = files.csv, files.plot
    if csv is not None and (run or operators):
        raise InputError("--csv: writes predictions of services; leave out --run and --operators")
    _check_together(wanted, search=search, operators=operators, simulated=simulated, p99=p99, disaggregated=disaggregated)
    if wanted.seed is not None and not simulated:
        raise InputError("--seed: goes with --simulate; add it, or leave --seed out")
    if run:
        if search or operators or simulated or disaggregated or plot is not None or wanted.limits():
            raise InputError("--run: measures steps on this machine and nothing else; leave out what predicts a service")
        _run(asked, json=json)
        return 0
    clusters = options.with_chip(several(asked.cluster), chip)
    asked = replace(asked, cluster=clusters[0] if len(clusters) == 1 else clusters or None)
    is_sized = search and (asked.concurrency is not None or asked.rate is not None)
    absent = {name: meaning for name, meaning in NEEDED.items() if not (is_sized and name == "chips")}
    options.needed(*((flag(name), _given(getattr(asked, name)), meaning) for name, meaning in absent.items()))
    requests = serving_requests(asked)
    if len(requests) > 1:
        if operators or simulated or plot is not None:
            other = "--operators" if operators else "--simulate" if simulated else "--plot"
            raise InputError(f"{other}: takes one cluster, one load and one of each degree; give one value of everything")
        if search:
            return _searches(requests, wanted, p99=p99, disaggregated=disaggregated, csv=csv, json=json)
        return _several(requests, wanted, csv=csv, json=json)
    asked = requests[0]
    if search:
        _search(asked, wanted, p99=p99, disaggregated=disaggregated, plot=plot, csv=csv, display=display, json=json)
    elif operators:
        _operators(asked, plot=plot, display=display, json=json)
    elif plot is not None:
        raise InputError("--plot: goes with --operators, whose roofline it draws, or with --search; add one of them")
    else:
        return _predict(asked, wanted, simulated=simulated, seed=wanted.seed or 0, csv=csv, verbose=display.verbose, json=json)
    return 0


def _check_together(wanted: WantedWords, *, search: bool, operators: bool, simulated: bool, p99: bool, disaggregated: bool) -> None:
    """An option that would be passed over in silence is refused."""
    for_search = {
        "p99": p99,
        "disaggregated": disaggregated,
        "limit_headroom": wanted.limit_headroom is not None,
        "allow": wanted.allow,
        "objective": wanted.objective,
        "top": wanted.top is not None,
    }
    for name in [name for name, given in for_search.items() if given and not search]:
        raise InputError(f"{flag(name)}: goes with --search; add it, or leave {flag(name)} out")
    for_one_plan = [name for name, given in (("--operators", operators), ("--simulate", simulated), ("--search", search)) if given]
    if len(for_one_plan) > 1:
        raise InputError(f"{for_one_plan[0]}: does not go with {for_one_plan[1]}; ask for one after the other")
    limited = next((flag(name) for name in ("ttft", "tpot", "latency") if getattr(wanted, name)), "")
    if limited and operators:
        raise InputError(f"{limited}: --operators knows no limits; leave one of them out")


def _several(requests: list[ServingRequest], wanted: WantedWords, *, csv: Path | None, json: bool) -> int:
    from perfmodel.report.serving import lengths_line, limits_object, serving_object, verdict_text
    from perfmodel.report.serving_rows import predicted_line, services_table, serving_row
    from perfmodel.verbs.serving import limits_of
    from perfmodel.verbs.serving_requests import served_several

    found, limits = served_several(requests), limits_of(wanted.limits())
    predicted = [each.prediction for each in found if each.prediction is not None]
    code = 0 if any(each.fits for each in predicted) else EXIT_NOTHING_FITS
    if csv is not None:
        _write_csv([serving_row(each.prediction) if each.prediction else {**each.asked, "reason": each.reason} for each in found], csv)
        if str(csv) == "-":
            return code
    if json:
        print_json(
            {
                "predictions": [
                    {"verdict": verdict_text(each, limits), **serving_object(each), "limits": limits_object(each, limits)}
                    for each in predicted
                ],
                "not_predicted": [{**each.asked, "reason": each.reason} for each in found if each.prediction is None],
            }
        )
        return code
    job = predicted[0].job
    print_paragraph(f"{job.model.name} in {job.quantization.name}, {lengths_line(job)}, {predicted[0].plan.engine}")
    print_tables([services_table([predicted_line(each.asked, each.prediction, limits) for each in found])])
    for reason in dict.fromkeys(each.reason for each in found if each.reason):
        print()
        print_paragraph(f"not predicted: {reason}")
    _named(csv)
    return code


def _write_csv(rows: list[dict[str, Any]], path: Path) -> None:
    from perfmodel.report.rows import csv_text

    options.write_csv(csv_text(rows), path)


def _named(csv: Path | None) -> None:
    if csv is not None:
        print(f"\ntable: {csv}")


def _predict(asked: ServingRequest, wanted: WantedWords, *, simulated: bool, seed: int, csv: Path | None, verbose: bool, json: bool) -> int:
    from perfmodel.cost.serving.simulated import is_simulated
    from perfmodel.report.serving import (
        headline,
        launch_object,
        limits_facts,
        limits_object,
        memory_table,
        parts_table,
        remedy_facts,
        service_line,
        serving_object,
        shown_notes,
        verdict_line,
        verdict_text,
    )
    from perfmodel.verbs.serving import launch_of, limits_of, serve_asked, simulated_in

    setting, prediction = serve_asked(asked)
    if (simulated and prediction.fits) or (wanted.limits() and is_simulated(prediction)):
        prediction = simulated_in(setting, prediction, limits=wanted.limits(), seed=seed)
    launch, limits = launch_of(setting, prediction), limits_of(wanted.limits())
    code = 0 if prediction.fits else EXIT_NOTHING_FITS
    if csv is not None:
        from perfmodel.report.serving_rows import serving_row

        _write_csv([serving_row(prediction)], csv)
        if str(csv) == "-":
            return code
    if json:
        verdict = {"verdict": verdict_text(prediction, limits)}
        print_json({**verdict, **serving_object(prediction), "limits": limits_object(prediction, limits), "launch": launch_object(launch)})
        return code
    facts = [("job", service_line(prediction)), *remedy_facts(prediction), *headline(prediction, verbose=verbose)]
    print_facts(verdict_line(prediction, limits), facts + (limits_facts(prediction, limits) if prediction.fits else []))
    print_tables([*([parts_table(prediction)] if prediction.fits else []), memory_table(prediction)])
    if prediction.fits:
        _print_launch(launch)
    print_notes(shown_notes(prediction), verbose=verbose)
    _named(csv)
    return code


def _print_launch(lines: Sequence[LaunchLine]) -> None:
    """The commands that start a plan; MODEL is the checkpoint's name or folder."""
    for line in lines:
        copies = f" ({line.copies} times, each on its own chips)" if line.copies > 1 else ""
        print(f"\nStart{copies}")
        print_command(line.command)
        if line.config:
            print_paragraph(f"{line.config_name}: {' | '.join(line.config.splitlines())}")
        for note in line.notes:
            print_paragraph(note)


def _operators(asked: ServingRequest, *, plot: Path | None, display: options.Display, json: bool) -> None:
    from perfmodel.report.serving import (
        headline,
        operator_object,
        operators_table,
        service_line,
        serving_object,
        shown_notes,
        verdict_line,
    )
    from perfmodel.verbs.serving import operators_asked

    _, prediction, rows = operators_asked(asked)
    if plot is not None:
        from perfmodel.report.serving_figures import plot_roofline

        plot_roofline(rows, service_line(prediction), plot)
    if json:
        print_json({**serving_object(prediction), "operators": [operator_object(row) for row in rows]})
        return
    print_facts(verdict_line(prediction, {}), [("job", service_line(prediction)), *headline(prediction, verbose=display.verbose)])
    print_tables([operators_table(rows, "decode"), operators_table(rows, "prefill")], wide=display.wide)
    print_notes(shown_notes(prediction), verbose=display.verbose)
    if plot is not None:
        print(f"\nfigure: {plot}")


def _run(asked: ServingRequest, *, json: bool) -> None:
    from perfmodel.report.runs import busy_sentence
    from perfmodel.report.serving_runs import run_facts, run_line, run_object, run_table
    from perfmodel.verbs.served_run import run_served_asked

    with Progress("serve") as progress:
        found = run_served_asked(asked, progress.note)
    if json:
        print_json(run_object(found))
        return
    print_facts(run_line(found), run_facts(found))
    print_tables([run_table(found)])
    sentence = busy_sentence(found.measurement.busy_fraction, "run it")
    if sentence:
        print(f"\n{sentence}")


def _search(
    asked: ServingRequest,
    wanted: WantedWords,
    *,
    p99: bool,
    disaggregated: bool,
    plot: Path | None,
    csv: Path | None,
    display: options.Display,
    json: bool,
) -> None:
    from perfmodel.report.serving import launch_object
    from perfmodel.report.serving_searches import (
        baselines_table,
        best_line,
        front_table,
        plans_table,
        pools_tables,
        search_details,
        search_facts,
        search_line,
        search_notes,
        search_object,
    )
    from perfmodel.verbs.serving import launch_of, search_asked

    setting, found = search_asked(asked, **_how(wanted, p99=p99, disaggregated=disaggregated))
    line, launch = search_line(setting.job, found, setting.reference), launch_of(setting, found.best.prediction)
    if plot is not None:
        from perfmodel.report.serving_figures import plot_front

        plot_front(found, line, plot)
    if csv is not None:
        from perfmodel.report.serving_rows import search_rows

        _write_csv(search_rows(found), csv)
        if str(csv) == "-":
            return
    if json:
        print_json({**search_object(found), "launch": launch_object(launch)})
        return
    print_facts(best_line(found), [("job", line), *search_facts(found)])
    apart = pools_tables(found) if disaggregated and found.num_feasible else []
    print_tables([plans_table(found), *apart, baselines_table(found), front_table(found)], wide=display.wide)
    _print_launch(launch)
    print_notes([*search_notes(found), *setting.notes], details=search_details(found), verbose=display.verbose)
    if plot is not None:
        print(f"\nfigure: {plot}")
    _named(csv)


def _how(wanted: WantedWords, *, p99: bool, disaggregated: bool) -> dict[str, Any]:
    """What a search is asked for beside its request."""
    return {
        "limits": wanted.limits(),
        "p99": p99,
        "limit_headroom": wanted.limit_headroom,
        "objective": wanted.objective or "throughput",
        "top": 10 if wanted.top is None else wanted.top,
        "quantizations": [name.strip() for name in wanted.allow.split(",") if name.strip()],
        "disaggregated": disaggregated,
    }


def _searches(requests: list[ServingRequest], wanted: WantedWords, *, p99: bool, disaggregated: bool, csv: Path | None, json: bool) -> int:
    """The best plan of each of several searches."""
    from perfmodel.report.serving import lengths_line
    from perfmodel.report.serving_rows import ranked_row, searched_line, services_table
    from perfmodel.report.serving_searches import search_object
    from perfmodel.verbs.serving import search_asked
    from perfmodel.verbs.serving_requests import searched_several

    how = _how(wanted, p99=p99, disaggregated=disaggregated)
    found = searched_several(requests, lambda each: search_asked(each, **how)[1])
    if csv is not None:
        none = [{**asked, "reason": reason} for asked, result, reason in found if result is None]
        best = [result.best for _, result, _ in found if result is not None]
        kinds = ["aggregated" if each.plan.pools is None else "disaggregated" for each in best]
        _write_csv([*(ranked_row(each, place=1, kind=kind) for each, kind in zip(best, kinds, strict=True)), *none], csv)
        if str(csv) == "-":
            return 0
    if json:
        results = [{**asked, **search_object(result)} for asked, result, _ in found if result is not None]
        print_json({"searches": results, "not_found": [{**asked, "reason": reason} for asked, result, reason in found if result is None]})
        return 0
    first = next(result for _, result, _ in found if result is not None)
    job = first.best.prediction.job
    under = f", under {first.limits}" if str(first.limits) else ""
    print_paragraph(f"{job.model.name}, {lengths_line(job)}, the best plan of each{under}")
    lines = [searched_line(asked, result) for asked, result, _ in found]
    has_load = first.is_load_searched
    print_tables([services_table(lines, shows_load=has_load, shows_chips=requests[0].chips is None)])
    for reason in dict.fromkeys(reason for _, _, reason in found if reason):
        print()
        print_paragraph(f"no plan: {reason}")
    _named(csv)
    return 0


def _given(value: object) -> str | None:
    return None if value is None else str(value)
