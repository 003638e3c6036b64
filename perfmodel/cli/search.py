"""`perfmodel search`: best plans of a job on a cluster, baselines, and reasons of rejected plans."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perfmodel.cli import options
from perfmodel.cli.exit_codes import EXIT_INTERRUPTED, EXIT_NOTHING_FITS
from perfmodel.cli.output import Form, Output, Progress, first_interrupt, print_error
from perfmodel.cli.words import argument, command, flag, largest_of
from perfmodel.foundation.error_objects import ErrorCode
from perfmodel.foundation.errors import InputError
from perfmodel.foundation.plain import picked
from perfmodel.foundation.words import Words, word
from perfmodel.hardware.cluster_text import short_name
from perfmodel.parallel.knobs import Knobs, bounded_knobs
from perfmodel.parallel.request import Request
from perfmodel.planner.ties import TIES
from perfmodel.report.document import Block, Document, Facts, Notes, Text

if TYPE_CHECKING:
    from perfmodel.parallel.prediction import NotPredicted
    from perfmodel.planner.result import TrainingSearch
    from perfmodel.verbs.searching import Also
    from perfmodel.verbs.setting import Setting
    from perfmodel.verbs.training import AskedRun


_COUNTED = {"chips": "chips", "global_batch": "sequences", "seq_len": "tokens"}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Ranking:
    """Options of the ranking and the number of printed plans.

    by, budget   deadline and budget for which clusters and chip counts are compared
    """

    by: str | None = word("With --tokens: size the cluster, to train by a deadline such as 30d", metavar="TIME")
    budget: str | None = word("With --tokens: size the cluster, to train within a budget such as 2M", metavar="USD")
    objective: str = word("time, memory or chip-time; with --tokens also cost, energy or goodput-time", metavar="NAME", default_text="time")
    top: str = word("How many plans to show", kind=int, default_text="10")
    ties: str = word(
        "Plans so near the best are as good: the likeliest to fit, then the simplest first",
        metavar="SHARE",
        default_text=f"{100 * TIES:g}%",
    )
    exhaustive: bool = word("Evaluate also the plans that cannot win: the same result, as a check", kind=bool, default=False)


@command(
    asked=Words(Request, several=True),
    chip=Words(options.ChipWords, several=True),
    ranking=Ranking,
    knobs=Words(Knobs, several=True),
    maximum=largest_of(bounded_knobs()),
    run=options.WholeRun,
    files=options.Files,
    output=options.OUTPUT,
    after={"maximum": "order"},
)
def search(
    config: Annotated[str, argument("[PLAN|CONFIG]", "The job of a plan, or of a framework's config or launch script.")] = "",
    *,
    asked: Request,
    chip: options.ChipWords,
    ranking: Ranking,
    knobs: Knobs,
    maximum: dict[str, int],
    only_runnable: Annotated[
        bool, typer.Option("--only-runnable", help="Search only what the framework can run (`perfmodel profiles NAME`): the default.")
    ] = False,
    any_framework: options.AnyFramework = False,
    interval: Annotated[bool, typer.Option("--interval", help="Print the 80 % prediction interval of the step time of each plan.")] = False,
    run: options.WholeRun,
    output: Output,
    files: options.Files,
) -> int:
    """Search the fastest parallel plans of a training job: every plan of the space is evaluated (docs/space.md).

    A knob that is given is fixed; --max-tp and the like bound the others. Flags marked [*] take several values, as --seq-len 4k,8k or
    --chips 64..1024 (doubled). --by and --budget size the cluster: the front of time and cost over clusters, chips (left out: powers of
    two) and plans. Exit code 2 when nothing fits or meets them; Ctrl-C shows the best so far.
    """
    from perfmodel.foundation.values import read_integer
    from perfmodel.parallel.prediction import NotPredicted, first_reasons
    from perfmodel.planner.rows import training_rows
    from perfmodel.verbs.confidence import interval_in
    from perfmodel.verbs.configs import start_from, with_attention
    from perfmodel.verbs.objects import searches_object
    from perfmodel.verbs.requests import check_names, make_requests, setting_of_request
    from perfmodel.verbs.searching import ALSO, check_frameworks

    output = files.check(output)
    asked = replace(asked, cluster=options.with_chip(asked.cluster, chip))
    check_frameworks(only_runnable=only_runnable, any_framework=any_framework)
    near = options.parse_fraction(ranking.ties, "ties")
    asked_run = run.read()
    num_tokens = asked_run.tokens if asked_run else 0.0
    start = start_from(config, asked, spelled=flag) if config else None
    knobs = with_attention(knobs, start.plan) if start is not None else knobs
    if ranking.by is not None or ranking.budget is not None:
        from perfmodel.cli.sizing import size

        given = "--by" if ranking.by is not None else "--budget"
        others = {
            "--objective": ranking.objective != "time",
            "--top": ranking.top != "10",
            "--interval": interval,
            "--exhaustive": ranking.exhaustive,
        }
        for name in [name for name, is_given in others.items() if is_given]:
            raise InputError(f"{name}: does not go with {given}, which compares clusters by time and cost; leave it out")
        sized, is_met = size(
            ranking, asked, knobs, maximum, run=asked_run, ties=near, any_framework=any_framework, start=start, files=files, output=output
        )
        return EXIT_INTERRUPTED if sized.interrupted else 0 if is_met else EXIT_NOTHING_FITS
    job = start.plan if start is not None else None
    requests = make_requests(asked, of_plan=start is not None, spelled=flag)
    if files.save is not None and len(requests) > 1:
        raise InputError("--save: can write one plan only; give one value of everything")
    results: list[tuple[Setting, TrainingSearch]] = []
    if len(requests) > 1:
        check_names(requests)
    failures: list[NotPredicted] = []
    was_interrupted = False
    also: tuple[Also, ...] = tuple(part for part in ALSO if part != "remedies" or len(requests) == 1)
    rule = {
        "objective": ranking.objective,
        "run": asked_run,
        **picked(requests[0], "memory_headroom risk"),
        "ties": near,
        "any_framework": any_framework,
        "also": (*also, "exhaustive") if ranking.exhaustive else also,
    }
    for request in requests:
        try:
            setting = setting_of_request(request, plan=job)
            result, was_interrupted = _search_once(setting, knobs, maximum, top=read_integer(ranking.top, "top"), **rule)
        except InputError as error:
            failures.append(NotPredicted(asked=request.described(), reason=str(error)))
            continue
        results.append((setting, result))
        if was_interrupted:
            break
    if not results:
        raise InputError(first_reasons(failures))
    # by the objective of the whole training run, else in the given order
    results.sort(key=lambda pair: pair[1].ranking.values[:1] or (math.inf,))
    with_plans = [result for _, result in results if result.plans]
    if with_plans:
        best = [result.plans[0] for result in with_plans]
        files.save_plan(best[0].plan)
        files.write_page(with_plans[0] if len(results) == 1 else [prediction.plan for prediction in best])
        files.draw(lambda figures: figures.search_figure(with_plans[0]) if len(results) == 1 else figures.scaling_figure(best))
    else:
        files = replace(files, save=None, plot=None, report=None)
    read = start.notes(verbose=output.verbose) if start is not None else []
    document = Document(
        content=lambda: (
            searches_object(results, failures, run=asked_run, interval=interval) | (start.object() if start is not None else {})
        ),
        blocks=lambda: chain(
            _blocks(results, failures, run=asked_run, interval=interval, output=output),
            [Notes(read)] if read else (),
        ),
        rows=lambda: chain.from_iterable(
            training_rows(result, tokens=num_tokens, interval_of=partial(interval_in, setting) if interval else None)
            for setting, result in results
        ),
    )
    files.finish(document, output, {"plan": None, "best plan": files.save})
    if was_interrupted:
        return EXIT_INTERRUPTED
    if any(result.num_feasible for _, result in results):
        return 0
    sys.stdout.flush()
    from perfmodel.report.searches import nothing_fits_line

    _, result = min(results, key=lambda pair: pair[1].least_memory[0].memory["total"])
    print_error(
        nothing_fits_line(result, given=bool(knobs.given() or maximum)), code=ErrorCode.NOTHING_FITS, as_json=output.form is Form.JSON
    )
    return EXIT_NOTHING_FITS


def _search_once(setting: Setting, knobs: Knobs, maximum: dict[str, int], **rule: Any) -> tuple[TrainingSearch, bool]:
    """Return the result, and whether Ctrl-C ended the search early with the best plans so far."""
    from perfmodel.verbs.searching import search_in

    chips = f"{setting.cluster.num_chips} chip{'s' * (setting.cluster.num_chips > 1)} of {short_name(setting.reference)}"
    with Progress(f"search on {chips}") as progress, first_interrupt() as was_interrupted:

        def report(done: float) -> bool:
            progress.share(done)
            return was_interrupted()

        return search_in(setting, knobs, maximum, progress=report, **rule), was_interrupted()


def _blocks(
    results: list[tuple[Setting, TrainingSearch]],
    failures: list[NotPredicted],
    *,
    run: AskedRun | None,
    interval: bool,
    output: Output,
) -> Iterator[Block]:
    if len(results) + len(failures) == 1:
        yield from _one_blocks(*results[0], run=run, interval=interval, output=output)
        return
    from perfmodel.report.predictions import convention_lines, settings_table, settings_title
    from perfmodel.report.search_tables import value_cells
    from perfmodel.report.searches import search_line
    from perfmodel.verbs.confidence import interval_in, need_intervals

    best = [result.plans[0] for _, result in results if result.plans]
    if best:
        settings = [setting for setting, result in results if result.plans]
        shows = interval or need_intervals(settings)
        intervals = [interval_in(setting, prediction.plan) for setting, prediction in zip(settings, best, strict=True)] if shows else []
        yield Text(f"{settings_title(best)}: the best plan of each")
        of_run = value_cells(results[0][1].objective, [value for _, result in results for value in result.ranking.values[:1]])
        yield settings_table(best, tokens=run.tokens if run else 0.0, intervals=intervals, of_run=of_run)
        yield Notes(convention_lines(best))
    shared = [name for name, _ in setting_words(results[0][0]).items() if len({setting_words(other)[name] for other, _ in results}) == 1]
    for number, (setting, result) in enumerate(results):
        facts = [text for name, text in setting_words(setting).items() if name not in shared or name in ("cluster", "chips")]
        yield Text(f"{', '.join(facts)}: {search_line(result)}", apart=bool(best) and number == 0)
    yield from (Text(f"not searched: {failure}") for failure in failures)


def setting_words(setting: Setting) -> dict[str, str]:
    """Return the values that distinguish the searches of a table, as text."""
    return {name: f"{value:,} {_COUNTED[name]}" if name in _COUNTED else value for name, value in setting.described().items()}


#: Facts of the best plan printed without `--verbose`.
_SHOWN = ("job", "layers", "plan", "framework", "runs in", "based on")


def _one_blocks(setting: Setting, result: TrainingSearch, *, run: AskedRun | None, interval: bool, output: Output) -> Iterator[Block]:
    from perfmodel.parallel.prediction import notes
    from perfmodel.report.predictions import confidence_lines, headline, job_line, parts_table, verdict_line
    from perfmodel.report.search_tables import baselines_table, certainty_table, plans_table, rejected_table
    from perfmodel.report.searches import search_details, search_line, search_notes
    from perfmodel.report.training_run import run_facts
    from perfmodel.verbs.confidence import interval_in, need_intervals
    from perfmodel.verbs.exporting import runs_in
    from perfmodel.verbs.training import run_in

    searched = ("search", ("interrupted; the best so far: " if result.interrupted else "") + search_line(result))
    if result.plans:
        best = result.plans[0]
        facts = headline(best, verbose=output.verbose, runs_in=runs_in(setting, best.plan))
        if not output.verbose:
            facts = [fact for fact in facts if fact[0] in _SHOWN]
        if interval or need_intervals([setting]):
            facts += confidence_lines(best, interval_in(setting, best.plan))
        title = "The best plan" if str(result.objective) != "memory" else "The plan that needs the least memory"
        yield Facts(f"{title} {verdict_line(best)}", [*facts, searched])
        if run is not None:
            yield run_facts(run_in(setting, best, run))
        yield plans_table(result)
    else:
        yield Facts("No plan fits", [*([("job", job_line(result.least_memory[0].plan))] if result.least_memory else []), searched])
    if result.baselines:
        yield baselines_table(result)
    if result.plans:
        yield parts_table(result.plans[0])
    if output.verbose and any(certainty.prediction for certainty in result.certainty):
        yield certainty_table(result)
    if output.verbose or not result.plans:
        yield rejected_table(result)
    warned = notes((result.plans or result.least_memory)[0]) if result.plans or result.least_memory else setting.notes
    yield Notes([*warned, *search_notes(result)], search_details(result))
