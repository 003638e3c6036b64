"""`perfmodel predict` of a per-operator plan saved by `perfmodel shard`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from perfmodel.cli.output import Output, show
from perfmodel.report.document import Block, Document, Facts, Notes

if TYPE_CHECKING:
    from perfmodel.parallel.plan import Plan
    from perfmodel.parallel.request import Request


def predict_network_file(plan: Plan, asked: Request, *, network: str, output: Output, **others: object) -> None:
    """Print the result of `predict_requested`.

    others   flags that a per-operator plan fixes
    """
    from perfmodel.parallel.prediction import notes
    from perfmodel.parallel.rows import table_rows
    from perfmodel.report.networks import operators_table
    from perfmodel.report.predictions import headline, memory_table, parts_table, prediction_object, verdict_line
    from perfmodel.verbs.networks import network_of_plan, predict_requested

    graph = network_of_plan(plan, named=network or None)
    predictions = predict_requested(plan, asked, network=graph, **others)

    def content() -> dict[str, Any]:
        objects = [prediction_object(prediction) for prediction in predictions]
        return objects[0] if len(objects) == 1 else {"predictions": objects}

    def blocks() -> Iterator[Block]:
        for prediction in predictions:
            yield Facts(verdict_line(prediction), headline(prediction, verbose=output.verbose))
            yield from (parts_table(prediction), memory_table(prediction), operators_table(graph, prediction.plan))
            yield Notes(notes(prediction))

    show(Document(content=content, blocks=blocks, rows=lambda: table_rows(predictions)), output)
