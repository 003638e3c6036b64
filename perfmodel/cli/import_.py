"""`perfmodel import`: any torch module as a graph of operators over named dims."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from perfmodel.cli import options
from perfmodel.cli.output import Output, Progress, show
from perfmodel.cli.words import argument, command, option
from perfmodel.foundation.errors import bad_field, first_of
from perfmodel.foundation.plain import picked
from perfmodel.report.document import Block, Document, Facts, Text
from perfmodel.report.table import Table

if TYPE_CHECKING:
    from perfmodel.planner.pase.search import PaseRun
    from perfmodel.workload.imported.graph import ImportedGraph

CONVENTION = "a multiply-add is 2; products only, attention on the full square (torch's convention); one forward pass"


@command(output=options.PLAIN_OUTPUT)
def import_(
    module: Annotated[str, argument("MODULE:FACTORY", "What makes the module; plain arguments may follow, as in mynets:ResNet(50).")],
    *,
    inputs: Annotated[
        list[str] | None, option("NAME=TYPE[SIZES]", "An argument of forward: tokens=int64[1,2048]; may be given several times.")
    ] = None,
    search: Annotated[int | None, option("P", "Also the best split of each operator on P devices, by PaSE's cost.")] = None,
    save: Annotated[Path | None, option("GRAPH.json", "Write the whole graph to a file.")] = None,
    output: Output,
) -> None:
    """Read any torch.nn.Module as a graph of operators through torch.export, under fake tensors: no memory, no GPU.

    Operators are recognised by name as iteration spaces over named dims; what is not recognised is listed, and counts as replicated.
    """
    import json

    from perfmodel.foundation.resources import check_can_be_written, write_atomically
    from perfmodel.verbs.importing import import_graph
    from perfmodel.workload.imported.graph import graph_to_dict

    if search is not None and search < 1:
        raise bad_field("search", search, "must be a whole number of at least 1", "write --search 32")
    if save is not None:
        check_can_be_written(save, "save")
    start = time.monotonic()
    with Progress("import") as progress:
        progress.note("torch.export")
        graph = import_graph(module, inputs or ())
    took = time.monotonic() - start
    if save is not None:
        write_atomically(save, json.dumps(graph_to_dict(graph), indent=1, allow_nan=False) + "\n")
    blocks = [*_blocks(graph, took)]
    content: dict[str, Any] = {
        **picked(graph, "name source"),
        "convention": CONVENTION,
        "import_time": took,
        "num_vertices": len(graph.vertices),
        **picked(graph, "num_edges flops num_parameters parameter_bytes buffer_bytes activation_bytes"),
        "operators": graph.totals(),
        "unrecognised": graph.unrecognised(),
        "unused_parameters": graph.unused_parameters,
    }
    if search is not None:
        from perfmodel.planner.pase.imported import search_imported

        with Progress("search") as progress:
            progress.share(0.0)
            run = search_imported(graph, search)
        content["search"] = strategy_object(graph, run)
        blocks += strategy_blocks(graph, run)
    if save is not None:
        blocks.append(Text(f"saved to {save}", apart=True))
    show(Document(content=lambda: content, blocks=lambda: blocks), output)


def strategy_object(graph: ImportedGraph, run: PaseRun) -> dict[str, Any]:
    return {
        "num_devices": run.tables.num_devices,
        "cost_flops": run.solution.cost,
        "data_parallel_cost_flops": run.data_parallel_cost,
        "data_parallel_devices": run.data_parallel_devices,
        "times_data_parallel": run.gain,
        **picked(run.solution, "is_proved gap"),
        **picked(run, "table_time search_time"),
        "strategy": [
            {"name": vertex.name, "kind": vertex.kind, "parts": parts} for vertex, parts in zip(graph.vertices, run.strategy, strict=True)
        ],
    }


def _blocks(graph: ImportedGraph, took: float) -> Iterator[Block]:
    from perfmodel.foundation.units import format_bytes, format_count, format_time

    facts = [
        ("imported by", f"{graph.source}; took {format_time(took)}"),
        ("graph", f"{len(graph.vertices):,} vertices, {graph.num_edges:,} edges; neighbouring elementwise operators are one vertex"),
        ("work", f"{graph.flops:,.0f} FLOP: {CONVENTION}"),
        ("parameters", f"{graph.num_parameters:,} ({format_bytes(graph.parameter_bytes)}); buffers {format_bytes(graph.buffer_bytes)}"),
    ]
    if graph.unused_parameters:
        facts.append(("never read", ", ".join(graph.unused_parameters[:8]) + (" and more" if len(graph.unused_parameters) > 8 else "")))
    yield Facts(graph.name, facts)
    headers = ("operators", "number", "FLOP", "share", "parameters", "activations")
    rows = [
        (
            str(row.kind),
            f"{row.num_operators:,}",
            format_count(row.flops) if row.flops else "-",
            f"{row.flops / graph.flops:.1%}" if row.flops else "-",
            f"{row.num_parameters:,}" if row.num_parameters else "-",
            format_bytes(row.activation_bytes) if row.activation_bytes else "-",
        )
        for row in graph.totals()
    ]
    unread = sum(parameter.num_elements for parameter in graph.parameters if parameter.name in set(graph.unused_parameters))
    if unread:
        rows.append(("never read", "-", "-", "-", f"{unread:,}", "-"))
    total = sum(row.num_operators for row in graph.totals())
    rows.append(
        ("total", f"{total:,}", format_count(graph.flops), "100.0%", f"{graph.num_parameters:,}", format_bytes(graph.activation_bytes))
    )
    yield Table(title="What it computes", headers=headers, rows=tuple(rows), right=headers[1:])
    unrecognised = graph.unrecognised()
    if not unrecognised:
        yield Text("Every operator was recognised.", apart=True)
        return
    listed = []
    for entry in unrecognised:
        where = first_of([module or "the module itself" for module in entry.modules], 3)
        listed.append((entry.operator, f"{entry.num_operators:,}", where, entry.treatment))
    columns = ("operator", "number", "where", "treated as")
    yield Table(title="Not recognised", headers=columns, rows=tuple(listed), right=("number",), fold=("where",))


def strategy_blocks(graph: ImportedGraph, run: PaseRun) -> Iterator[Block]:
    from collections import Counter

    from perfmodel.foundation.units import format_time

    counted: Counter[tuple[str, str, str]] = Counter()
    for vertex, parts in zip(graph.vertices, run.strategy, strict=True):
        if vertex.flops or vertex.kind in ("embedding", "cross-entropy"):
            sizes = " ".join(f"{name}={size}" for name, size in vertex.dims.items())
            cut = " ".join(f"{name}:{part}" for name, part in parts.items() if part > 1)
            counted[str(vertex.kind), sizes, cut or "whole"] += 1
    gain = f"{run.gain:.3g} times less than data parallelism" if run.solution.cost else "nothing that costs"
    if run.solution.cost and run.data_parallel_devices < run.tables.num_devices:
        gain += f" on {run.data_parallel_devices} of them (it has no more samples)"
    proof = "proved best" if run.solution.is_proved else f"within {run.solution.gap:.2%} of the best"
    yield Text(
        f"Best split on {run.tables.num_devices} devices by PaSE's cost function (no memory, latency or overlap): "
        f"{gain}, {proof}; tables {format_time(run.table_time)}, search {format_time(run.search_time)}",
        apart=True,
    )
    rows = tuple((kind, f"{number:,}", sizes, cut) for (kind, sizes, cut), number in counted.items())
    yield Table(title="", headers=("operators", "number", "dims", "parts"), rows=rows, right=("number",))
