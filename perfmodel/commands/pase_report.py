"""`perfmodel pase-report`: the experiment of the PaSE paper, searched here."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from perfmodel.commands import options
from perfmodel.commands.output import Progress, print_json, print_tables
from perfmodel.errors import bad_field


def pase_report(
    graph: Annotated[list[str] | None, typer.Option("--graph", metavar="NAME", help="Networks; the paper's if left out.")] = None,
    devices: Annotated[str, typer.Option("--devices", metavar="N[,N...]", help="Numbers of devices p.")] = "4,8,16,32,64",
    json: options.Json = False,
) -> None:
    """PaSE's experiment (Elango, IPDPS 2021): time of the search by p (Table I), and the best strategies (Table II).

    Space and cost are those of the paper: configurations without a place, costs in FLOP without memory, latency or overlap.
    Networks: alexnet, inception3, rnnlm, transformer; resnet101 and densenet121 are known too.
    """
    from perfmodel.planner.pase import run_pase
    from perfmodel.report.pase import PUBLISHED_TIMES, SOURCE, TABLE_2_DEVICES, search_times_table, strategies_table
    from perfmodel.workload.pase_graph import load_pase_graph

    counts = options.parse_chips(devices)
    if not counts:
        raise bad_field("devices", "", "must name at least one number", "write 32 or 4,8,16,32,64")
    graphs = [load_pase_graph(name) for name in graph or PUBLISHED_TIMES]
    jobs = [(each, count) for each in graphs for count in counts]
    runs = []
    with Progress("pase-report") as progress:
        for index, (each, count) in enumerate(jobs):
            progress.step(index / len(jobs), f"{each.name}, {count} devices")
            runs.append(run_pase(each, count))
    shown = TABLE_2_DEVICES if TABLE_2_DEVICES in counts else max(counts)
    if json:
        print_json({"source": SOURCE, "runs": [_as_object(run) for run in runs]})
        return
    print_tables([search_times_table(runs), strategies_table([run for run in runs if run.tables.num_devices == shown])])
    print(f"\nPublished: {SOURCE}; search times on a Sandy-Bridge Xeon. A cost in FLOP over 1e13 is seconds on its devices of 10 TFLOP/s.")


def _as_object(run: Any) -> dict[str, Any]:
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
