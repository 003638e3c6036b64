"""Repeat PaSE's experiment (Elango, IPDPS 2021): search times (Table I), strategies (Table II), speedups (figure 6).

    python -m lab.pase [--graph NAME] [--devices N[,N...]] [--figure] [--plot FILE] [--json]

Space and cost are those of the paper: configurations without placement, costs in FLOP without memory, latency or overlap. Networks:
alexnet, inception3, rnnlm, transformer; resnet101 and densenet121 are supported too. Figure 6 is predicted by the cost model of the
package, in seconds, for the paper's two clusters.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lab.command import command_parser, exits_on_errors
from lab.pase.figure import figure_points, num_points
from lab.pase.plot import Bar, figure_bars, figure_object, figure_table, plot_figure, printed_table, score_table
from perfmodel.cli.options import check_figure
from perfmodel.cli.output import Form, Output, Progress, show
from perfmodel.foundation.errors import bad_field
from perfmodel.foundation.values import read_integer, several
from perfmodel.planner.pase.graph import load_pase_graph
from perfmodel.planner.pase.search import run_pase
from perfmodel.report.document import Block, Document, Text
from perfmodel.report.pase import PUBLISHED_TIMES, SOURCE, TABLE_2_DEVICES, run_object, search_times_table, strategies_table


@exits_on_errors
def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_parser("pase", __doc__, cases=False)
    parser.add_argument("--graph", action="append", metavar="NAME", help="a network; the paper's four if left out; repeatable")
    parser.add_argument("--devices", default="4,8,16,32,64", metavar="N[,N...]", help="numbers of devices p")
    parser.add_argument("--figure", action="store_true", help="also figure 6: predicted and measured speedups")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw figure 6 (.png, .svg or .pdf)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)

    if options.plot is not None:
        check_figure(options.plot)
    counts = [read_integer(number, "devices", most=10**7) for number in several(options.devices)]
    if not counts:
        raise bad_field("devices", "", "must name at least one number", "write 32 or 4,8,16,32,64")
    names = options.graph or list(PUBLISHED_TIMES)
    bars = _figure_bars(names, counts) if options.figure or options.plot is not None else []
    jobs = [(graph, count) for graph in map(load_pase_graph, names) for count in counts]
    runs = []
    with Progress("pase") as progress:
        for index, (graph, count) in enumerate(jobs):
            progress.step(index / len(jobs), f"{graph.name}, {count} devices")
            runs.append(run_pase(graph, count))
    if options.plot is not None:
        plot_figure(bars, options.plot)
    content: dict[str, Any] = {"source": SOURCE, "runs": [run_object(run) for run in runs]}
    content |= {"figure": figure_object(bars, SOURCE)} if bars else {}
    shown = TABLE_2_DEVICES if TABLE_2_DEVICES in counts else max(counts)
    blocks: list[Block] = [search_times_table(runs), strategies_table([run for run in runs if run.tables.num_devices == shown])]
    if bars:
        blocks += [figure_table(bars), score_table(bars)]
        if TABLE_2_DEVICES in counts:
            blocks.append(printed_table(bars))
    note = f"Published: {SOURCE}; search times on a Sandy-Bridge Xeon. A cost in FLOP over 1e13 is seconds on its devices of 10 TFLOP/s."
    blocks.append(Text(note, apart=True))
    if options.plot is not None:
        blocks.append(Text(f"figure: {options.plot}"))
    show(Document(content=lambda: content, blocks=lambda: blocks), Output(form=Form.JSON if options.json else Form.TABLE))


def _figure_bars(graphs: Sequence[str], counts: Sequence[int]) -> tuple[Bar, ...]:
    points = []
    with Progress("pase") as progress:
        for point in figure_points(networks=graphs, devices=counts):
            points.append(point)
            progress.step(len(points) / num_points(graphs, counts), f"figure 6: {point.network}, {point.num_devices} devices")
    return figure_bars(points)
