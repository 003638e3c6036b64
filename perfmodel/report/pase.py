"""Tables I and II of the PaSE paper: published values and results of our search.

Source: Elango, PaSE: Parallelization Strategies for Efficient DNN Training, IPDPS 2021 (arXiv 2407.04001), Tables I and II.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from perfmodel.foundation.files import read_yaml
from perfmodel.foundation.plain import picked
from perfmodel.foundation.units import format_time
from perfmodel.planner.pase.layer import text_of
from perfmodel.planner.pase.search import PaseRun
from perfmodel.report.table import Table, table_of

SOURCE = "Elango, PaSE, IPDPS 2021 (arXiv 2407.04001)"
#: Devices of Table II.
TABLE_2_DEVICES = 32

_PUBLISHED = read_yaml(Path(__file__).with_name("pase.yaml"))
PUBLISHED_TIMES: Mapping[str, Mapping[int, Sequence[float]]] = _PUBLISHED["times"]
PUBLISHED_STRATEGIES: Mapping[str, Sequence[Sequence[str]]] = _PUBLISHED["strategies"]


def search_times_table(runs: Sequence[PaseRun]) -> Table:
    """Return Table I, one row per search."""
    rows = []
    for run in runs:
        graph, num_devices = run.tables.graph, run.tables.num_devices
        flexflow, pase = PUBLISHED_TIMES.get(graph.name, {}).get(num_devices, (math.nan, math.nan))
        rows.append(
            (
                graph.name,
                str(num_devices),
                format_time(run.table_time),
                format_time(run.search_time),
                _seconds(pase),
                _seconds(flexflow),
                f"{run.solution.cost:.9g}",
                "proved" if run.solution.is_proved else f"gap {run.solution.gap:.2%}",
                "-" if math.isnan(run.times_data_parallel) else f"{run.times_data_parallel:.3f}",
            )
        )
    columns = "network | >p | >tables | >search | >PaSE | >FlexFlow | >cost, FLOP | optimum | >data parallel / cost"
    return table_of("Table I: search time, CPU time here and published times", columns, rows)


def strategies_table(runs: Sequence[PaseRun]) -> Table:
    """Return Table II: layers grouped by kind and configuration, without layers that split nothing or cost nothing."""
    rows: list[tuple[str, ...]] = []
    for run in runs:
        groups: Counter[tuple[str, str, str]] = Counter()
        for layer, split in zip(run.tables.graph.layers, run.tables.strategy(run.solution.choice), strict=True):
            groups[f"{layer.kind} {text_of(layer, 'equation')}".strip(), " ".join(split), " ".join(map(str, split.values()))] += 1
        rows += [
            (run.tables.graph.name, f"{count} x {kind}" if count > 1 else kind, dims, configuration, "found")
            for (kind, dims, configuration), count in groups.items()
        ]
        rows += [(run.tables.graph.name, *printed, "published") for printed in PUBLISHED_STRATEGIES.get(run.tables.graph.name, ())]
    devices = runs[0].tables.num_devices if runs else TABLE_2_DEVICES
    title = f"Table II: best strategies at p = {devices}, found here and published"
    return table_of(title, "network | layers | dims | configuration | from", rows)


def _seconds(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:g} s"


def run_object(run: Any) -> dict[str, Any]:
    return {
        "graph": run.tables.graph.name,
        "num_devices": run.tables.num_devices,
        **picked(run, "table_time search_time"),
        "cost_flops": run.solution.cost,
        **picked(run.solution, "is_proved gap method"),
        "times_data_parallel": run.times_data_parallel,
        "strategy": [
            {"kind": layer.kind, "parts": split}
            for layer, split in zip(run.tables.graph.layers, run.tables.strategy(run.solution.choice), strict=True)
        ],
    }
