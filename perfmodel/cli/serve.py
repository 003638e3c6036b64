"""`perfmodel serve`: latency, concurrency, throughput and bottlenecks of a service, and its best plan."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perfmodel.cli import options
from perfmodel.cli.exit_codes import EXIT_NOTHING_FITS
from perfmodel.cli.output import Output, Progress, show
from perfmodel.cli.words import argument, command, flag
from perfmodel.foundation.errors import InputError
from perfmodel.foundation.words import Words, check_none_missing, given_words, missing_words, word
from perfmodel.parallel.request import Service
from perfmodel.report.document import Block, Command, Document, Facts, Notes, Text

if TYPE_CHECKING:
    from perfmodel.frameworks.engine_launch import LaunchLine


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class WantedWords:
    """Options of the latency limits and the search objective of a service."""

    ttft: str = word("Limit of the time to the first token, such as 500ms", metavar="TIME", default="")
    tpot: str = word("Limit of the time of each token, such as 30ms", metavar="TIME", default="")
    latency: str = word("Limit of a whole request, such as 10s", metavar="TIME", default="")
    limit_headroom: object = word(
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
        """Return the given limits as text, by latency."""
        times = {"ttft": self.ttft, "tpot": self.tpot, "request_latency": self.latency}
        return {name: limit for name, limit in times.items() if limit}

    def of_search(self, *, p99: bool, disaggregated: bool) -> dict[str, Any]:
        """Return the arguments of a search in addition to its request."""
        return {
            "limits": self.limits(),
            "p99": p99,
            "limit_headroom": self.limit_headroom,
            "objective": self.objective or "throughput",
            "top": 10 if self.top is None else self.top,
            "quantizations": [name.strip() for name in self.allow.split(",") if name.strip()],
            "disaggregated": disaggregated,
        }


#: Files that `serve` writes in addition to its output.
_FILES = Words(
    options.Files,
    only="csv plot save report",
    helps={
        "csv": "Also write one line for each plan; - for standard output alone.",
        "plot": "Also draw: with --operators the roofline, with --search the front.",
        "report": "Also write one HTML page: the numbers, the operators, of a search its plans and the front, and the start command.",
    },
)


@command(service=Service, chip=options.ChipWords, wanted=WantedWords, files=_FILES, output=options.OUTPUT)
def serve(
    config: Annotated[
        str,
        argument(
            "[PLAN|CONFIG]", "A saved plan (--save), or a launch line of vLLM, SGLang or TensorRT-LLM in a file; flags override its values."
        ),
    ] = "",
    *,
    service: Service,
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
    output: Output,
) -> int:
    """Predict TTFT, TPOT, throughput and memory of a service, or search its best plan.

    Defaults: the smallest tp whose replicas hold the requests, replicas on all chips, the format in which the model is published, and all
    requests in flight that fit. Limits (--ttft, --tpot, --latency) are compared with the prediction. --cluster, --chips, --tp,
    --concurrency and --rate take several values (16,64,256): a row for each combination.
    """
    from perfmodel.foundation.values import several
    from perfmodel.verbs.serving_predict import services_in
    from perfmodel.verbs.serving_setting import with_workers_chips

    line = _command(config, service, chip, wanted, simulate=simulated, search=search, p99=p99, disaggregated=disaggregated)
    output, service = files.check(output), service.having({"assume": service.request.assume or None})
    plot = files.plot
    for option, path in (("--csv", files.csv), ("--save", files.save)):
        if path is not None and (run or operators):
            raise InputError(f"{option}: writes predictions of services; leave out --run and --operators")
    _check_together(wanted, search=search, operators=operators, simulated=simulated, p99=p99, disaggregated=disaggregated)
    if wanted.seed is not None and not simulated:
        raise InputError("--seed: goes with --simulate; add it, or leave --seed out")
    if run:
        if search or operators or simulated or disaggregated or plot is not None or files.report is not None or wanted.limits():
            raise InputError("--run: measures steps on this machine and nothing else; leave out what predicts a service")
        _run(service, output)
        return 0
    clusters = options.with_chip(several(service.request.cluster), chip)
    service = with_workers_chips(service.having({"cluster": clusters[0] if len(clusters) == 1 else clusters or None}))
    read: Sequence[str] = ()
    if config:
        from perfmodel.verbs.configs import served_from

        service, setup = served_from(config, service, is_searched=search)
        read = () if setup is None else tuple(setup.described(verbose=output.verbose))
    asked = service.request
    is_sized = search and (asked.concurrency is not None or asked.rate is not None)
    given = [name for name, value in service.given().items() if str(value)]
    check_none_missing(missing_words(Service, [*given, "chips"] if is_sized else given), spelled=flag)
    services = services_in(service)
    if len(services) > 1:
        others = {"--operators": operators, "--simulate": simulated, "--plot": plot, "--report": files.report, "--save": files.save}
        if other := next((name for name, value in others.items() if value), ""):
            raise InputError(f"{other}: takes one cluster, one load and one of each degree; give one value of everything")
        if search:
            _searches(services, wanted.of_search(p99=p99, disaggregated=disaggregated), files, output)
            return 0
        return _several(services, wanted, files, output)
    service = services[0]
    if search:
        _search(service, wanted.of_search(p99=p99, disaggregated=disaggregated), line, files, output)
    elif operators:
        if files.report is not None:
            raise InputError("--report: has the operators already; leave --operators out")
        _operators(service, files, output)
    elif plot is not None:
        raise InputError("--plot: goes with --operators, whose roofline it draws, or with --search; add one of them")
    else:
        return _predict(service, wanted, line, simulated=simulated, seed=wanted.seed or 0, files=files, output=output, read=read)
    return 0


def _check_together(wanted: WantedWords, *, search: bool, operators: bool, simulated: bool, p99: bool, disaggregated: bool) -> None:
    """Raise InputError for options that would be silently ignored."""
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


def _several(services: list[Service], wanted: WantedWords, files: options.Files, output: Output) -> int:
    from perfmodel.hardware.cluster_text import short_name
    from perfmodel.parallel.rows import serving_row
    from perfmodel.parallel.serving_prediction import lengths_line
    from perfmodel.report.serving import limits_object, predicted_line, services_table, serving_object, verdict_text
    from perfmodel.verbs.serving_predict import limits_of, served_several

    answers, limits = served_several(services), limits_of(wanted.limits())
    predicted = [answer.prediction for answer in answers if answer.prediction is not None]

    def content() -> dict[str, Any]:
        objects = [
            {"verdict": verdict_text(prediction, limits), **serving_object(prediction), "limits": limits_object(prediction, limits)}
            for prediction in predicted
        ]
        failures = [{**answer.asked, "reason": answer.reason} for answer in answers if answer.prediction is None]
        return {"predictions": objects, "not_predicted": failures}

    def blocks() -> Iterator[Block]:
        job = predicted[0].job
        yield Text(f"{job.model.name} in {job.quantization.name}, {lengths_line(job)}, {short_name(predicted[0].plan.engine)}")
        yield services_table([predicted_line(answer.asked, answer.prediction, limits) for answer in answers])
        for reason in dict.fromkeys(answer.reason for answer in answers if answer.reason):
            yield Text(f"not predicted: {reason}", apart=True)

    rows = [serving_row(answer.prediction) if answer.prediction else {**answer.asked, "reason": answer.reason} for answer in answers]
    files.finish(Document(content=content, blocks=blocks, rows=lambda: rows), output)
    return 0 if any(prediction.fits for prediction in predicted) else EXIT_NOTHING_FITS


def _predict(
    service: Service,
    wanted: WantedWords,
    command_line: str,
    *,
    simulated: bool,
    seed: int,
    files: options.Files,
    output: Output,
    read: Sequence[str],
) -> int:
    from perfmodel.cost.serving.simulated import is_simulated
    from perfmodel.parallel.rows import serving_row
    from perfmodel.report.serving import (
        launch_object,
        limits_object,
        memory_table,
        parts_table,
        service_facts,
        serving_object,
        shown_notes,
        verdict_line,
        verdict_text,
    )
    from perfmodel.verbs.serving_predict import launch_of, limits_of, serve_asked, simulated_in

    setting, prediction = serve_asked(service)
    if (simulated and prediction.fits) or (wanted.limits() and is_simulated(prediction)):
        prediction = simulated_in(setting, prediction, limits=wanted.limits(), seed=seed)
    files.save_plan(prediction.plan)
    launch, limits = launch_of(setting, prediction), limits_of(wanted.limits())
    if files.report is not None:
        from perfmodel.verbs.reporting import write_service_report

        write_service_report(setting, prediction, out=files.report, limits=limits, start=list(_launch_blocks(launch)), command=command_line)

    def content() -> dict[str, Any]:
        verdict = {"verdict": verdict_text(prediction, limits)}
        return {**verdict, **serving_object(prediction), "limits": limits_object(prediction, limits), "launch": launch_object(launch)}

    def blocks() -> Iterator[Block]:
        yield Facts(verdict_line(prediction, limits), service_facts(prediction, limits, verbose=output.verbose))
        if prediction.fits:
            yield parts_table(prediction)
        yield memory_table(prediction)
        if prediction.fits:
            yield from _launch_blocks(launch)
        yield Notes([*shown_notes(prediction), *read])

    files.finish(Document(content=content, blocks=blocks, rows=lambda: [serving_row(prediction)]), output)
    return 0 if prediction.fits else EXIT_NOTHING_FITS


def _launch_blocks(lines: Sequence[LaunchLine]) -> Iterator[Block]:
    """Yield the launch commands of a plan; MODEL stands for the name or folder of the checkpoint."""
    roles = (" prefill workers", " decode workers") if len(lines) == 2 else ("",) * len(lines)
    for line, role in zip(lines, roles, strict=True):
        copies = f" ({line.copies} times, each on its own chips)" if line.copies > 1 else ""
        yield Text(f"Start{role}{copies}", apart=True)
        yield Command(line.command)
        if line.config:
            yield Text(f"{line.config_name}:\n{line.config.rstrip()}", wraps=False)
        yield from map(Text, line.notes)


def _operators(service: Service, files: options.Files, output: Output) -> None:
    from perfmodel.parallel.serving_prediction import service_line
    from perfmodel.report.serving import headline, operator_object, operators_table, serving_object, shown_notes, verdict_line
    from perfmodel.verbs.serving_predict import operators_asked

    _, prediction, operators = operators_asked(service)
    files.draw(lambda figures: figures.roofline_figure(operators, service_line(prediction)))

    def rows() -> list[dict[str, Any]]:
        return [operator_object(row) for row in operators]

    def blocks() -> Iterator[Block]:
        yield Facts(verdict_line(prediction, {}), [("job", service_line(prediction)), *headline(prediction, verbose=output.verbose)])
        yield from (operators_table(operators, phase) for phase in ("decode", "prefill"))
        yield Notes(shown_notes(prediction))

    document = Document(content=lambda: {**serving_object(prediction), "operators": rows()}, blocks=blocks, rows=rows)
    files.finish(document, output)


def _run(service: Service, output: Output) -> None:
    from perfmodel.report.runs import busy_sentence, run_facts, run_line, run_object, run_table
    from perfmodel.verbs.served_run import run_served_asked

    with Progress("serve") as progress:
        comparison = run_served_asked(service, progress.note)

    def blocks() -> Iterator[Block]:
        yield Facts(run_line(comparison), run_facts(comparison))
        yield run_table(comparison)
        if sentence := busy_sentence(comparison.measurement.busy_fraction, "run it"):
            yield Text(sentence, apart=True)

    show(Document(content=lambda: run_object(comparison), blocks=blocks), output)


def _search(service: Service, arguments: Mapping[str, Any], command_line: str, files: options.Files, output: Output) -> None:
    from perfmodel.planner.rows import service_rows
    from perfmodel.report.search_tables import service_tables
    from perfmodel.report.searches import (
        best_line,
        service_search_details,
        service_search_facts,
        service_search_line,
        service_search_notes,
        service_search_object,
    )
    from perfmodel.report.serving import launch_object
    from perfmodel.verbs.searching import search_service
    from perfmodel.verbs.serving_predict import launch_of, limits_of

    setting, result = search_service(service, **arguments)
    line, launch = service_search_line(setting.job, result, setting.reference), launch_of(setting, result.best.prediction)
    files.save_plan(result.best.plan)
    files.draw(lambda figures: figures.front_figure(result, line))
    if files.report is not None:
        from perfmodel.verbs.reporting import write_service_report

        start, limits = list(_launch_blocks(launch)), limits_of(arguments["limits"])
        write_service_report(
            setting, result.best.prediction, out=files.report, limits=limits, start=start, command=command_line, search=result
        )

    def blocks() -> Iterator[Block]:
        yield Facts(best_line(result), [("job", line), *service_search_facts(result)])
        yield from service_tables(result, with_pools=arguments["disaggregated"])
        yield from _launch_blocks(launch)
        yield Notes([*service_search_notes(result), *setting.notes], service_search_details(result))

    document = Document(
        content=lambda: {**service_search_object(result), "launch": launch_object(launch)}, blocks=blocks, rows=lambda: service_rows(result)
    )
    files.finish(document, output)


def _command(config: str, *records: Any, **flags: bool) -> str:
    """Return the command line of these options. A value of None or "" was not given."""
    words = ["perfmodel", "serve", *([config] if config else [])]
    for name, value in [item for record in records for item in given_words(record).items()]:
        for item in value if isinstance(value, (list, tuple)) else [value]:
            words += [flag(name), str(item)] if item not in (None, "") else []
    return shlex.join([*words, *(flag(name) for name, is_given in flags.items() if is_given)])


def _searches(services: list[Service], arguments: Mapping[str, Any], files: options.Files, output: Output) -> None:
    """Print the best plan of each of several searches."""
    from perfmodel.parallel.serving_prediction import lengths_line
    from perfmodel.planner.rows import ranked_row
    from perfmodel.report.searches import service_search_object
    from perfmodel.report.serving import ServiceLine, services_table
    from perfmodel.verbs.searching import search_service
    from perfmodel.verbs.serving_predict import answered_each

    results = answered_each(services, lambda service: search_service(service, **arguments)[1])
    none = [{**asked, "reason": reason} for asked, result, reason in results if result is None]

    def rows() -> list[dict[str, Any]]:
        best = [result.best for _, result, _ in results if result is not None]
        return [*(ranked_row(ranked, 1) for ranked in best), *none]

    def content() -> dict[str, Any]:
        return {
            "searches": [{**asked, **service_search_object(result)} for asked, result, _ in results if result is not None],
            "not_found": none,
        }

    def blocks() -> Iterator[Block]:
        first = next(result for _, result, _ in results if result is not None)
        job = first.best.prediction.job
        under = f", under {first.conditions.limits}" if str(first.conditions.limits) else ""
        yield Text(f"{job.model.name}, {lengths_line(job)}, the best plan of each{under}")
        fits = "meets" if first.conditions.limits.given() else "fits"
        lines = [
            ServiceLine(asked=asked, verdict="no plan") if result is None else ServiceLine(asked=asked, verdict=fits, result=result.best)
            for asked, result, _ in results
        ]
        yield services_table(lines, shows_load=first.conditions.is_load_searched, shows_chips=services[0].request.chips is None)
        for reason in dict.fromkeys(reason for _, _, reason in results if reason):
            yield Text(f"no plan: {reason}", apart=True)

    files.finish(Document(content=content, blocks=blocks, rows=rows), output)
