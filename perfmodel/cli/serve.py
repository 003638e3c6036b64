"""`perfmodel serve`: how fast a service answers, how many at once, what bounds it, and which plan is best."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from perfmodel.cli import options
from perfmodel.cli.output import Progress, print_facts, print_json, print_tables
from perfmodel.cli.words import command, flag
from perfmodel.foundation.errors import InputError
from perfmodel.foundation.words import word
from perfmodel.parallel.serving.request import ServingRequest


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
        "With --search: throughput (tokens/s a chip), latency, or cost",
        otherwise="throughput if left out",
        metavar="NAME",
        default="throughput",
    )
    allow: str = word("With --search: formats of weights that may be used, such as bf16,fp8", metavar="NAMES", default="")
    top: int = word("With --search: plans to show", otherwise="10 if left out", kind=int, default=10)

    def limits(self) -> dict[str, str]:
        """Time -> its limit as it was written, those that were given."""
        times = {"ttft": self.ttft, "tpot": self.tpot, "request_latency": self.latency}
        return {name: limit for name, limit in times.items() if limit}


@command(asked=ServingRequest, chip=options.ChipWords, wanted=WantedWords)
def serve(
    *,
    asked: ServingRequest,
    chip: options.ChipWords,
    wanted: WantedWords,
    operators: Annotated[
        bool, typer.Option("--operators", help="Every operator of a decode step and of a prefill: work, time, and what bounds it.")
    ] = False,
    simulated: Annotated[
        bool,
        typer.Option(
            "--simulate",
            help="Run the engine step by step: p50, p90 and p99 over requests, and goodput under the limits.",
        ),
    ] = False,
    search: Annotated[bool, typer.Option("--search", help="The best plans under the limits; knobs that are given are held.")] = False,
    p99: Annotated[
        bool, typer.Option("--p99", help="With --search: limits of the 99th percentile over requests, not of the mean.")
    ] = False,
    disaggregated: Annotated[
        bool, typer.Option("--disaggregated", help="With --search: also workers for prompts and others for answers.")
    ] = False,
    run: Annotated[
        bool, typer.Option("--run", help="Run steps of the model (a small one of its make) here with torch, beside their prediction.")
    ] = False,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="With --simulate: of the requests that are drawn.")] = 0,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE.png", help="Also draw: with --operators the roofline, with --search the front."),
    ] = None,
    json: options.Json = False,
) -> None:
    """Time to the first token and of each token, throughput, and how many requests fit, of one plan of serving.

    What is left out: tp is the smallest whose replicas have room for the requests, replicas fill the chips, the format is that in which the
    model is published. Without --concurrency and --rate as many requests run as fit. Limits (--ttft, --tpot, --latency) are compared
    with what is predicted.
    """
    from perfmodel.verbs.serving import NEEDED

    options.check_figure(plot)
    _check_together(wanted, search=search, operators=operators, simulated=simulated, p99=p99, disaggregated=disaggregated)
    if run:
        if search or operators or simulated or disaggregated or plot is not None or wanted.limits():
            raise InputError("--run: measures steps on this machine and nothing else; leave out what predicts a service")
        _run(asked, json=json)
        return
    asked = replace(asked, cluster=options.only_one(options.with_chip([asked.cluster] if asked.cluster else [], chip), "cluster"))
    is_sized = search and (asked.concurrency is not None or asked.rate is not None)
    absent = {name: meaning for name, meaning in NEEDED.items() if not (is_sized and name == "chips")}
    options.needed(*((flag(name), _given(getattr(asked, name)), meaning) for name, meaning in absent.items()))
    if search:
        _search(asked, wanted, p99=p99, disaggregated=disaggregated, plot=plot, json=json)
    elif operators:
        _operators(asked, plot=plot, json=json)
    elif plot is not None:
        raise InputError("--plot: goes with --operators, whose roofline it draws, or with --search; add one of them")
    else:
        _predict(asked, wanted, simulated=simulated, seed=seed, json=json)


def _check_together(wanted: WantedWords, *, search: bool, operators: bool, simulated: bool, p99: bool, disaggregated: bool) -> None:
    """An option that would be passed over in silence is refused."""
    for_search = {
        "p99": p99,
        "disaggregated": disaggregated,
        "limit_headroom": wanted.limit_headroom is not None,
        "allow": wanted.allow,
    }
    for name in [name for name, given in for_search.items() if given and not search]:
        raise InputError(f"{flag(name)}: goes with --search; add it, or leave {flag(name)} out")
    for_one_plan = [name for name, given in (("--operators", operators), ("--simulate", simulated), ("--search", search)) if given]
    if len(for_one_plan) > 1:
        raise InputError(f"{for_one_plan[0]}: does not go with {for_one_plan[1]}; ask for one after the other")
    limited = next((flag(name) for name in ("ttft", "tpot", "latency") if getattr(wanted, name)), "")
    if limited and operators:
        raise InputError(f"{limited}: --operators knows no limits; leave one of them out")


def _predict(asked: ServingRequest, wanted: WantedWords, *, simulated: bool, seed: int, json: bool) -> None:
    from perfmodel.report.serving import (
        headline,
        launch_facts,
        launch_object,
        limits_facts,
        limits_object,
        memory_table,
        parts_table,
        service_line,
        serving_object,
    )
    from perfmodel.verbs.serving import launch_of, limits_of, serve_asked, simulated_in

    setting, prediction = serve_asked(asked)
    if simulated:
        prediction = simulated_in(setting, prediction, limits=wanted.limits(), seed=seed)
    launch, limits = launch_of(setting, prediction), limits_of(wanted.limits())
    if json:
        print_json({**serving_object(prediction), "limits": limits_object(prediction, limits), "launch": launch_object(launch)})
        return
    print_facts(service_line(prediction), [*headline(prediction), *limits_facts(prediction, limits), *launch_facts(launch)])
    print_tables([parts_table(prediction), memory_table(prediction)])


def _operators(asked: ServingRequest, *, plot: Path | None, json: bool) -> None:
    from perfmodel.report.serving import headline, operator_object, operators_table, service_line, serving_object
    from perfmodel.verbs.serving import operators_asked

    _, prediction, rows = operators_asked(asked)
    if plot is not None:
        from perfmodel.report.serving_figures import plot_roofline

        plot_roofline(rows, service_line(prediction), plot)
    if json:
        print_json({**serving_object(prediction), "operators": [operator_object(row) for row in rows]})
        return
    print_facts(service_line(prediction), headline(prediction))
    print_tables([operators_table(rows, "decode"), operators_table(rows, "prefill")])
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


def _search(asked: ServingRequest, wanted: WantedWords, *, p99: bool, disaggregated: bool, plot: Path | None, json: bool) -> None:
    from perfmodel.report.serving import launch_facts, launch_object
    from perfmodel.report.serving_searches import (
        baselines_table,
        front_table,
        plans_table,
        pools_table,
        search_facts,
        search_line,
        search_object,
    )
    from perfmodel.verbs.serving import launch_of, search_asked

    setting, found = search_asked(
        asked,
        limits=wanted.limits(),
        p99=p99,
        limit_headroom=wanted.limit_headroom,
        objective=wanted.objective,
        top=wanted.top,
        quantizations=[name.strip() for name in wanted.allow.split(",") if name.strip()],
        disaggregated=disaggregated,
    )
    line, launch = search_line(setting.job, found, setting.reference), launch_of(setting, found.best.prediction)
    if plot is not None:
        from perfmodel.report.serving_figures import plot_front

        plot_front(found, line, plot)
    if json:
        print_json({**search_object(found), "launch": launch_object(launch)})
        return
    print_facts(line, [*search_facts(found), *(("note", note) for note in setting.notes)])
    apart = [pools_table(found)] if disaggregated and found.num_feasible else []
    print_tables([plans_table(found), *apart, baselines_table(found), front_table(found)])
    print()
    print_facts("The best of them", [("plan", found.best.plan.label()), *launch_facts(launch)])
    if plot is not None:
        print(f"\nfigure: {plot}")


def _given(value: object) -> str | None:
    return None if value is None else str(value)
