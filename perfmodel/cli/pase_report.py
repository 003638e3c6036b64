"""`perfmodel pase-report`: the experiment of the PaSE paper, searched here."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from perfmodel.cli import options
from perfmodel.cli.output import Progress, print_json, print_paragraph, print_tables
from perfmodel.cli.words import command
from perfmodel.foundation.errors import bad_field
from perfmodel.foundation.values import several, whole
from perfmodel.foundation.words import Words


@command(files=Words(options.Files, only="plot"))
def pase_report(
    *,
    graph: Annotated[list[str] | None, typer.Option("--graph", metavar="NAME", help="Networks; the paper's if left out.")] = None,
    devices: Annotated[str, typer.Option("--devices", metavar="N[,N...]", help="Numbers of devices p.")] = "4,8,16,32,64",
    figure: Annotated[bool, typer.Option("--figure", help="Also figure 6: predicted and measured speedups.")] = False,
    json: options.Json = False,
    files: options.Files,
) -> None:
    """Repeat PaSE's experiment (Elango, IPDPS 2021): search times (Table I), strategies (Table II), speedups (figure 6).

    Space and cost are those of the paper: configurations without a place, costs in FLOP without memory, latency or overlap.
    Networks: alexnet, inception3, rnnlm, transformer; resnet101 and densenet121 are known too. Figure 6 is predicted by the cost model of
    this package, in seconds, for the paper's two clusters; --plot draws it.
    """
    from perfmodel.papers.pase.graph import load_pase_graph
    from perfmodel.papers.pase.search import run_pase
    from perfmodel.papers.pase.tables import PUBLISHED_TIMES, SOURCE, TABLE_2_DEVICES, search_times_table, strategies_table

    files.check(json=json)
    counts = [whole(each, "devices", most=10**7) for each in several(devices)]
    if not counts:
        raise bad_field("devices", "", "must name at least one number", "write 32 or 4,8,16,32,64")
    bars = _figure_bars(graph or list(PUBLISHED_TIMES), counts) if figure or files.plot is not None else []
    graphs = [load_pase_graph(name) for name in graph or PUBLISHED_TIMES]
    jobs = [(each, count) for each in graphs for count in counts]
    runs = []
    with Progress("pase-report") as progress:
        for index, (each, count) in enumerate(jobs):
            progress.step(index / len(jobs), f"{each.name}, {count} devices")
            runs.append(run_pase(each, count))
    shown = TABLE_2_DEVICES if TABLE_2_DEVICES in counts else max(counts)
    if files.plot is not None:
        from perfmodel.papers.pase.plot import plot_figure

        plot_figure(bars, files.plot)
    if json:
        content: dict[str, Any] = {"source": SOURCE, "runs": [run_object(run) for run in runs]}
        if bars:
            from perfmodel.papers.pase.plot import figure_object

            content["figure"] = figure_object(bars, SOURCE)
        print_json(content)
        return
    print_tables([search_times_table(runs), strategies_table([run for run in runs if run.tables.num_devices == shown])])
    if bars:
        from perfmodel.papers.pase.plot import figure_table, printed_table, score_table

        print()
        print_tables([figure_table(bars), score_table(bars)])
        if TABLE_2_DEVICES in counts:
            print_tables([printed_table(bars)])
    print_paragraph(
        f"\nPublished: {SOURCE}; search times on a Sandy-Bridge Xeon. A cost in FLOP over 1e13 is seconds on its devices of 10 TFLOP/s."
    )
    if files.plot is not None:
        print(f"figure: {files.plot}")


def _figure_bars(graphs: list[str], counts: list[int]) -> Any:
    from perfmodel.papers.pase.figure import figure_points, num_points
    from perfmodel.papers.pase.plot import figure_bars

    points = []
    with Progress("pase-report") as progress:
        for point in figure_points(networks=graphs, devices=counts):
            points.append(point)
            progress.step(len(points) / num_points(graphs, counts), f"figure 6: {point.network}, {point.num_devices} devices")
    return figure_bars(points)


def run_object(run: Any) -> dict[str, Any]:
    return {
        "graph": run.tables.graph.name,
        "num_devices": run.tables.num_devices,
        "table_time": run.table_time,
        "search_time": run.search_time,
        "cost_flops": run.solution.cost,
        "is_proved": run.solution.is_proved,
        "gap": run.solution.gap,
        "method": run.solution.method,
        "times_data_parallel": run.times_data_parallel,
        "strategy": [
            {"kind": layer.kind, "parts": split}
            for layer, split in zip(run.tables.graph.layers, run.tables.strategy(run.solution.choice), strict=True)
        ],
    }
