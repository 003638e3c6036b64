"""`perfmodel explore`: axes of hardware, model, job or plan; elasticities; waterfalls from one system to another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perfmodel.cli import options
from perfmodel.cli.output import Output, Progress
from perfmodel.cli.words import command
from perfmodel.foundation.errors import InputError
from perfmodel.foundation.values import read_integer
from perfmodel.foundation.words import Words, given_words, word
from perfmodel.parallel.knobs import Knobs
from perfmodel.parallel.request import Request, Service
from perfmodel.report.document import Document, Notes, Text

if TYPE_CHECKING:
    from perfmodel.planner.exploration import Exploration, Sensitivities, Waterfall


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class AxisWords:
    """Options of axes and of waterfalls from one system to another."""

    vary: Any = word(
        "An axis: chip.memory.bandwidth=1..8TB/s, technology.logic=n7,n5,n3, plan.tp=1,2,4; again for more", metavar="AXIS=VALUES",
        repeats=True,
    )  # fmt: skip
    points: int | None = word("Values of a range", otherwise="8 if left out, and whole numbers double", kind=int)
    start: str = word("With --to: the first cluster or chip", metavar="NAME|PATH", option="from", default="")
    to: str = word("The last cluster or chip, reached one change at a time", metavar="NAME|PATH", default="")
    to_precision: str | None = word("With --to: the precision (of a service: quantization) there", metavar="NAME")
    metric: str | None = word(
        "Of a service: tpot, ttft, latency or throughput", otherwise="tpot, with --to throughput, if left out", metavar="NAME"
    )


#: Options of serving without a counterpart in training, so that no option occurs twice.
_SERVED = Words(
    Service,
    only="input_len output_len concurrency rate prefix_hit engine quantization kv_precision attention_dp dcp pcp replicas max_batch "
    "max_tokens",
)
_FILES = Words(
    options.Files,
    only="csv plot",
    helps={"csv": "Also write one line for each point; - for standard output alone.", "plot": "Also draw: curves, a tornado, a waterfall."},
)


@command(wanted=AxisWords, asked=Request, chip=options.ChipWords, knobs=Knobs, served=_SERVED, files=_FILES, output=options.OUTPUT)
def explore(
    *,
    wanted: AxisWords,
    search: Annotated[bool, typer.Option("--search", help="Search the best plan at each point; given knobs are held.")] = False,
    shares: Annotated[bool, typer.Option("--shares", help="Also the shares of the time that compute, memory and network bound.")] = False,
    sensitivity: Annotated[
        bool, typer.Option("--sensitivity", help="Elasticity of the time to every hardware number, in place of axes.")
    ] = False,
    asked: Request,
    chip: options.ChipWords,
    knobs: Knobs,
    served: Service,
    output: Output,
    files: options.Files,
) -> None:
    """Predict along axes of hardware, technology, model, job or plan; rank the hardware numbers; or go from one system to another.

    Training, or with --input-len and --output-len a service. One of --vary, --sensitivity, or --from with --to.
    """
    from perfmodel.report import explorations as report
    from perfmodel.verbs import explore as verb

    output = files.check(output)
    if sum(map(bool, (wanted.vary, sensitivity, wanted.to))) != 1:
        raise InputError("--vary, --sensitivity, --to: give one of them; --vary chip.memory.bandwidth=1..8TB/s is an axis")
    if bool(wanted.start) != bool(wanted.to):
        raise InputError(f"{'--to' if wanted.start else '--from'}: is missing; a waterfall goes from one cluster or chip to another")
    if wanted.to_precision and not wanted.to:
        raise InputError("--to-precision: goes with --to; leave it out")
    named = wanted.start or asked.cluster
    clusters = options.with_chip([named] if named else [], chip)
    if len(clusters) > 1:
        raise InputError("--cluster: takes one cluster here; vary chip=NAME,NAME compares chips")
    words = {**given_words(asked), **given_words(knobs), **given_words(served), "cluster": clusters[0] if clusters else None}
    if wanted.metric:
        words["metric"] = wanted.metric
    with Progress("explore") as progress:
        if wanted.to:
            waterfall = verb.explore_waterfall(**words, to=wanted.to, to_precision=wanted.to_precision, progress=progress.share)
            _draw(waterfall, files)
            document = Document(content=lambda: report.waterfall_object(waterfall), blocks=lambda: [report.waterfall_table(waterfall)])
        elif sensitivity:
            sensitivities = verb.explore_sensitivity(**words, search=search)
            _draw(sensitivities, files)
            document = Document(
                content=lambda: report.sensitivities_object(sensitivities), blocks=lambda: [report.sensitivities_table(sensitivities)]
            )
        else:
            points = None if wanted.points is None else read_integer(wanted.points, "points")
            exploration = verb.explore(**words, vary=wanted.vary, points=points, search=search, shares=shares, progress=progress.share)
            _draw(exploration, files)
            document = Document(
                content=lambda: report.exploration_object(exploration),
                blocks=lambda: [
                    report.exploration_table(exploration),
                    *(Text(line, apart=True) for line in report.saturation_lines(exploration)),
                    Notes(exploration.notes),
                ],
                rows=lambda: report.exploration_rows(exploration),
            )
    files.finish(document, output)


def _draw(result: Exploration | Sensitivities | Waterfall, files: options.Files) -> None:
    if files.plot is not None:
        from perfmodel.report.exploration_figures import figure_of
        from perfmodel.report.figures import write_figure

        write_figure(figure_of(result), files.plot)
