"""The per-operator search and its targets: `python -m tests.benchmarks.search_report [--quick]`.

Each row is measured in a separate process, three times: CPU time of the first search in that process (best of three), and peak memory of
the whole process, Python and tables included. "Copied": every edge has a matrix of its own, as if no two blocks were equal.
Then, on our own cost model: tables and search of whole networks, Llama-3 70B with memory limit and pipeline, figure 6 of the PaSE paper;
and, unless `--quick`, plans measured on two processes of this machine (`network_report`), which takes some minutes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence

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


#: Networks that are searched on our own costs.
OWN_ROWS = (
    ("alexnet", 64),
    ("rnnlm", 64),
    ("transformer", 16),
    ("transformer", 64),
    ("inception3", 64),
    ("resnet101", 64),
    ("densenet121", 64),
)


def measure(graph: str, num_devices: int, is_copied: bool) -> dict[str, object]:
    """One cold search in this process."""
    import resource
    import time

    from perfmodel.planner.pase.graph import load_pase_graph
    from perfmodel.planner.pase.search import pase_tables
    from perfmodel.search import eliminate

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
    print_columns(lines)
    own_costs()
    figure_6()
    if "--quick" not in sys.argv:
        print("\nMeasured on two processes here", flush=True)
        code = subprocess.run([sys.executable, "-m", "tests.benchmarks.network_report"], check=False).returncode
        is_right &= code == 0
    sys.exit(0 if is_right else 1)


def print_columns(lines: Sequence[Sequence[str]]) -> None:
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip(), flush=True)


def measure_own(network: str, num_chips: int) -> dict[str, object]:
    """Tables and search of one network on our own costs, in this process. CPU time [s]."""
    import resource
    import time

    from perfmodel.parallel.request import Request
    from perfmodel.verbs.networks import make_planner, network_setting

    setting, built, _ = network_setting(network, Request(cluster="pase-1080ti", chips=num_chips, optimizer="momentum"))
    start = time.process_time()
    planner = make_planner(setting)
    middle = time.process_time()
    result = planner.search()
    end = time.process_time()
    return {
        "operators": len(built.operators),
        "largest": max(result.num_configurations),
        "mean": sum(result.num_configurations) / len(result.num_configurations),
        "most_dims": result.most_dims,
        "table_time": middle - start,
        "search_time": end - middle,
        "is_proved": result.is_proved,
        "gap": 1.0 - result.lower_bound / result.best.step_time,
        "step_time": result.best.step_time,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def measure_pipeline() -> dict[str, object]:
    """Llama-3 70B at operator level on 512 H100, with memory limit and pipeline."""
    import resource
    import time

    from perfmodel.verbs.networks import shard_pipeline

    start, wall = time.process_time(), time.perf_counter()
    result = shard_pipeline("llama-3-70b", cluster="dgx-h100", chips=512, global_batch=512, sizes={"seq_len": 8192})
    return {
        "cpu": time.process_time() - start,
        "wall": time.perf_counter() - wall,
        "zero": int(result.best.plan.zero),
        "stages": len(result.stages),
        "microbatches": result.best.plan.num_microbatches,
        "step_time": result.step_time,
        "gap": result.gap,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def in_own_process(*arguments: str) -> dict[str, object]:
    command = [sys.executable, "-m", "tests.benchmarks.search_report", *arguments]
    result: dict[str, object] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return result


def own_costs() -> None:
    print("\nOur own cost model on 8 nodes of 8 GTX 1080 Ti: CPU time of tables and search together (Transformer: at least 15 s, aim 2 s)")
    lines = [("network", "p", "operators", "configurations", "tables", "search", "peak", "bound of the step", "step")]
    for network, num_chips in OWN_ROWS:
        run = in_own_process("own", network, str(num_chips))
        lines.append(
            (
                network,
                str(num_chips),
                str(run["operators"]),
                f"{run['mean']:.0f} ({run['largest']})" + (f", {run['most_dims']} dims a node" if run["most_dims"] else ""),
                f"{run['table_time']:.2f} s",
                f"{run['search_time']:.2f} s",
                f"{run['peak'] / 1e6:.0f} MB",
                ("proved" if run["is_proved"] else "searched") + f", gap {run['gap']:.2%}",
                f"{1e3 * run['step_time']:.1f} ms",
            )
        )
    print_columns(lines)
    run = in_own_process("pipeline")
    print(
        f"\nLlama-3 70B, 512 H100, batch 512 x 8192 (at least 60 s, aim 10 s): {run['wall']:.1f} s ({run['cpu']:.1f} CPU-s), "
        f"{run['peak'] / 1e6:.0f} MB; {run['stages']} stages, {run['microbatches']} microbatches, ZeRO {run['zero']}: "
        f"{run['step_time']:.2f} s a step, gap {run['gap']:.1%}"
    )


def figure_6() -> None:
    from lab.pase.figure import figure_points
    from lab.pase.plot import figure_bars, score_table

    print("\nFigure 6 of the PaSE paper (at least: expert signs 90 %, PaSE median error 25 %; aim 15 % for each)")
    table = score_table(figure_bars(figure_points()))
    print_columns([table.headers, *table.rows])


if __name__ == "__main__":
    if len(sys.argv) == 4 and sys.argv[1] == "own":
        print(json.dumps(measure_own(sys.argv[2], int(sys.argv[3]))))
    elif len(sys.argv) == 4:
        print(json.dumps(measure(sys.argv[1], int(sys.argv[2]), sys.argv[3] == "1")))
    elif sys.argv[1:] == ["pipeline"]:
        print(json.dumps(measure_pipeline()))
    else:
        main()
