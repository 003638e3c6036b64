"""`perfmodel predict` of a plan that `perfmodel shard` saved: every operator by itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from perfmodel.cli.options import only_one
from perfmodel.cli.output import Output, show
from perfmodel.foundation.values import optional_share
from perfmodel.report.document import Block, Document, Facts, Notes

if TYPE_CHECKING:
    from perfmodel.parallel.plan import Plan
    from perfmodel.parallel.prediction import Prediction
    from perfmodel.parallel.request import Request
    from perfmodel.workload.graph import Graph


def predict_network_file(plan: Plan, asked: Request, *, network: str, output: Output) -> None:
    """A prediction for each cluster, or for the plan's own. A profile and a calibration that are asked for stand in for the plan's."""
    from perfmodel.parallel.rows import table_rows
    from perfmodel.report.predictions import prediction_object
    from perfmodel.verbs.networks import network_of_plan, predict_network_plan

    own = network_of_plan(plan, named=network or None)
    headroom = optional_share(asked.memory_headroom, "memory_headroom")
    given: dict[str, Any] = {"profile": only_one(asked.profile, "profile"), "settings": asked.settings, "calibration": asked.calibration}
    every: list[str | None] = [*asked.cluster] or [None]
    found = [predict_network_plan(plan, network=own, cluster=cluster, memory_headroom=headroom, **given) for cluster in every]

    def content() -> dict[str, Any]:
        objects = [prediction_object(each) for each in found]
        return objects[0] if len(objects) == 1 else {"predictions": objects}

    blocks = (block for prediction in found for block in _blocks(own, prediction, verbose=output.verbose))
    show(Document(content=content, blocks=lambda: blocks, rows=lambda: table_rows(found)), output)


def _blocks(network: Graph, prediction: Prediction, *, verbose: bool) -> Iterator[Block]:
    from perfmodel.parallel.prediction import notes
    from perfmodel.report.networks import operators_table
    from perfmodel.report.predictions import headline, memory_table, parts_table, verdict_line

    yield Facts(verdict_line(prediction), headline(prediction, verbose=verbose))
    yield from (parts_table(prediction), memory_table(prediction), operators_table(network, prediction.plan))
    yield Notes(notes(prediction))
