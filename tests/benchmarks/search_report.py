"""The search kernel beside what it must reach: `python -m tests.benchmarks.search_report`.

Each row is measured in a process of its own, three times: CPU time of the first search in that process (best of three), and peak memory of
the whole process, Python and tables included. "Copied": every edge has a matrix of its own, as if no two blocks were equal.
"""

from __future__ import annotations

import json
import subprocess
import sys

REPEATS = 3

#: graph, devices, copied: what it must reach, what PaSE took (re-measured on 2 cores, or published), and the known optimum.
ROWS = (
    ("alexnet", 64, False, "", "", "0.16 CPU-s", 41120456048),
    ("rnnlm", 64, False, "", "", "0.12 CPU-s", 935818633216),
    ("inception3", 64, False, "0.3 s", "0.05 s", "97 CPU-s, 2.6 GB", 553203648656),
    ("inception3", 64, True, "0.3 s", "0.05 s", "97 CPU-s, 2.6 GB", 553203648656),
    ("resnet101", 64, False, "0.3 s", "0.05 s", "over 300 s", 881764728352),
    ("resnet101", 64, True, "0.3 s", "0.05 s", "over 300 s", 881764728352),
    ("transformer", 16, False, "0.4 s, 150 MB", "0.05 s", "177 CPU-s, 9.4 GB", 1004992614400),
    ("transformer", 16, True, "0.4 s, 150 MB", "0.05 s", "177 CPU-s, 9.4 GB", 1004992614400),
    ("transformer", 64, False, "12 s, 1 GB", "0.5 s, 200 MB", "1,883 s (paper)", 521017024512),
    ("transformer", 64, True, "12 s, 1 GB", "0.5 s, 200 MB", "1,883 s (paper)", 521017024512),
    ("densenet121", 16, False, "", "", "out of reach", 722760493120),
    ("densenet121", 64, False, "gap under 1 %", "10 s, proof", "out of reach", 675670401312),
)


def measure(graph: str, num_devices: int, is_copied: bool) -> dict[str, object]:
    """One cold search in this process."""
    import resource
    import time

    from perfmodel.planner.pase import pase_tables
    from perfmodel.search import eliminate
    from perfmodel.workload.pase_graph import load_pase_graph

    layers = load_pase_graph(graph)
    start = time.process_time()
    tables = pase_tables(layers, num_devices)
    table_time = time.process_time() - start
    edges = [(u, v, matrix.copy() if is_copied else matrix) for u, v, matrix in tables.edges]
    start = time.process_time()
    solution = eliminate(tables.vertex_costs, edges)
    search_time = time.process_time() - start
    return {
        "table_time": table_time,
        "search_time": search_time,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "cost": solution.cost,
        "gap": solution.gap,
        "is_proved": solution.is_proved,
        "method": solution.method,
        "width": solution.width,
        "table_entries": solution.table_entries,
    }


def measured_apart(graph: str, num_devices: int, is_copied: bool) -> dict[str, object]:
    """The best of several processes."""
    command = [sys.executable, "-m", "tests.benchmarks.search_report", graph, str(num_devices), str(int(is_copied))]
    runs = [json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout) for _ in range(REPEATS)]
    return min(runs, key=lambda run: run["search_time"])


def main() -> None:
    header = (
        "graph",
        "p",
        "matrices",
        "tables",
        "search",
        "peak",
        "at least",
        "aim",
        "PaSE",
        "optimum",
        "proof",
        "width",
        "whole tables",
        "how",
    )
    lines = [header]
    is_right = True
    for graph, num_devices, is_copied, least, aim, reference, optimum in ROWS:
        run = measured_apart(graph, num_devices, is_copied)
        is_right &= run["cost"] == optimum
        lines.append(
            (
                graph,
                str(num_devices),
                "copied" if is_copied else "shared",
                f"{run['table_time']:.3f} s",
                f"{run['search_time']:.3f} s",
                f"{run['peak'] / 1e6:.0f} MB",
                least,
                aim,
                reference,
                f"{run['cost']:.0f}" + ("" if run["cost"] == optimum else " WRONG"),
                "proved" if run["is_proved"] else f"gap {run['gap']:.2%}",
                str(run["width"]),
                f"{8 * run['table_entries'] / 1e6:.3g} MB",
                str(run["method"]),
            )
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    sys.exit(0 if is_right else 1)


if __name__ == "__main__":
    if len(sys.argv) == 4:
        print(json.dumps(measure(sys.argv[1], int(sys.argv[2]), sys.argv[3] == "1")))
    else:
        main()
