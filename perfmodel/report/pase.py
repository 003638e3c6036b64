"""Tables I and II of the PaSE paper: published values and results of our search.

Source: Elango, PaSE: Parallelization Strategies for Efficient DNN Training, IPDPS 2021 (arXiv 2407.04001), Tables I and II.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from perfmodel.foundation.plain import picked
from perfmodel.foundation.units import format_time
from perfmodel.planner.pase.layer import text_of
from perfmodel.planner.pase.search import PaseRun
from perfmodel.report.table import Table

SOURCE = "Elango, PaSE, IPDPS 2021 (arXiv 2407.04001)"
#: Devices of Table II.
TABLE_2_DEVICES = 32

#: Table I: search time [s] of FlexFlow (nan: not available) and of PaSE, for p = 4, 8, 16, 32, 64, on a Sandy-Bridge Xeon.
PUBLISHED_TIMES: Mapping[str, Mapping[int, tuple[float, float]]] = {
    "alexnet": {4: (2.54, 0.226), 8: (2.77, 0.253), 16: (6.98, 0.295), 32: (7.92, 0.361), 64: (257.3, 0.475)},
    "inception3": {4: (69.2, 14.4), 8: (146.5, 20.0), 16: (365.8, 39.8), 32: (938.0, 86.0), 64: (2237.0, 196.3)},
    "rnnlm": {4: (107.1, 0.057), 8: (164.3, 0.086), 16: (432.2, 0.069), 32: (668.2, 0.131), 64: (1042.0, 0.215)},
    "transformer": {4: (math.nan, 9.75), 8: (math.nan, 28.8), 16: (math.nan, 130.9), 32: (math.nan, 553.0), 64: (math.nan, 1883.2)},
}

#: Table II: layers, dims, configuration, for p = 32.
PUBLISHED_STRATEGIES: Mapping[str, Sequence[tuple[str, str, str]]] = {
    "alexnet": (
        ("conv 1-4", "b c h w n r s", "32 1 1 1 1 1 1"),
        ("conv 5", "b c h w n r s", "16 2 1 1 1 1 1"),
        ("FC 1, FC 3", "b n c", "1 4 8"),
        ("FC 2", "b n c", "1 8 4"),
        ("softmax", "b n", "1 4"),
    ),
    "inception3": (
        ("modules A-D", "b c h w n r s", "32 1 1 1 1 1 1"),
        ("module E", "b c h w n r s", "16 1 1 1 2 1 1"),
        ("FC", "b n c", "1 2 16"),
        ("softmax", "b n", "1 2"),
    ),
    "rnnlm": (
        ("embedding", "b s d v", "1 1 1 32"),
        ("LSTM", "l b s d e", "2 4 1 2 2"),
        ("FC", "b s v d", "1 1 32 1"),
        ("softmax", "b s v", "1 1 32"),
    ),
    "transformer": (
        ("embedding", "b s d v", "1 1 1 16"),
        ("multi-head attention", "b s h c k", "16 1 2 1 1"),
        ("feed forward", "b s d e", "16 1 1 2"),
        ("FC", "b s v d", "1 1 16 1"),
        ("softmax", "b s v", "1 1 16"),
    ),
}


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
    headers = ("network", "p", "tables", "search", "PaSE", "FlexFlow", "cost, FLOP", "optimum", "data parallel / cost")
    return Table(
        title="Table I: search time, CPU time here and published times",
        headers=headers,
        rows=tuple(rows),
        right=("p", "tables", "search", "PaSE", "FlexFlow", "cost, FLOP", "data parallel / cost"),
    )


def strategies_table(runs: Sequence[PaseRun]) -> Table:
    """Return Table II: layers grouped by kind and configuration, without layers that split nothing or cost nothing."""
    rows = []
    for run in runs:
        groups: Counter[tuple[str, str, str]] = Counter()
        for layer, split in zip(run.tables.graph.layers, run.tables.strategy(run.solution.choice), strict=True):
            groups[f"{layer.kind} {text_of(layer, 'equation')}".strip(), " ".join(split), " ".join(map(str, split.values()))] += 1
        rows += [
            (run.tables.graph.name, f"{count} x {kind}" if count > 1 else kind, dims, configuration, "found")
            for (kind, dims, configuration), count in groups.items()
        ]
        rows += [(run.tables.graph.name, *printed, "published") for printed in PUBLISHED_STRATEGIES.get(run.tables.graph.name, ())]
    return Table(
        title=f"Table II: best strategies at p = {runs[0].tables.num_devices if runs else TABLE_2_DEVICES}, found here and published",
        headers=("network", "layers", "dims", "configuration", "from"),
        rows=tuple(rows),
    )


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
