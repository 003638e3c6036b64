"""`perfmodel predict` of a plan that `perfmodel shard` saved: every operator by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from perfmodel.cli.options import only_one
from perfmodel.cli.output import print_facts, print_json, print_tables
from perfmodel.foundation.values import share
from perfmodel.hardware.chip_cluster import short_name

if TYPE_CHECKING:
    from perfmodel.cost.per_operator.predict import NetworkPrediction
    from perfmodel.parallel.request import Request
    from perfmodel.planner.per_operator.pipeline import PipelinePrediction
    from perfmodel.workload.graph import Graph


def predict_file(path: str, asked: Request, *, network: str, json: bool) -> None:
    """A prediction for each cluster, or for the plan's own. A profile and a calibration that are asked for stand in for the plan's."""
    from perfmodel.planner.per_operator.pipeline import PipelinePrediction
    from perfmodel.report.networks import network_prediction_object, pipeline_object
    from perfmodel.verbs.networks import load_network_plan, network_of_plan, predict_network_plan

    plan = load_network_plan(path)
    own = network_of_plan(plan, named=network or None)
    headroom = share(asked.memory_headroom, "memory_headroom")
    given: dict[str, Any] = {"profile": only_one(asked.profile, "profile"), "calibration": asked.calibration}
    every: list[str | None] = [*asked.cluster] or [None]
    found = [predict_network_plan(plan, network=own, cluster=cluster, memory_headroom=headroom, **given) for cluster in every]
    if json:
        objects = [pipeline_object(each) if isinstance(each, PipelinePrediction) else network_prediction_object(each) for each in found]
        print_json(objects[0] if len(objects) == 1 else {"predictions": objects})
        return
    for number, prediction in enumerate(found):
        if number:
            print()
        _show(own, prediction, headroom)


def _show(network: Graph, prediction: NetworkPrediction | PipelinePrediction, headroom: float) -> None:
    from perfmodel.foundation.memory_room import verdict
    from perfmodel.foundation.units import format_time
    from perfmodel.planner.per_operator.pipeline import PipelinePrediction
    from perfmodel.report.networks import memory_line, mesh_line, operators_table, parts_table, rests_on_line, stages_table

    plan, usable = prediction.plan, prediction.memory_usable
    batch = plan.batch * plan.num_microbatches
    times = f" in {plan.num_microbatches} microbatches" if plan.num_microbatches > 1 else ""
    tables = [parts_table(prediction.parts, prediction.step_time), operators_table(network, plan)]
    if isinstance(prediction, PipelinePrediction):
        fullest = max((stage.memory for stage in prediction.stages), key=lambda memory: memory["total"])
        more = [("memory", f"fullest chip {memory_line(fullest, usable, verdict(fullest['total'], usable, headroom))}")]
        tables.insert(0, stages_table(prediction))
    else:
        more = [("memory", memory_line(prediction.memory, usable, prediction.verdict)), ("rests on", rests_on_line(prediction.rests_on))]
    facts = [
        ("cluster", f"{short_name(plan.cluster)}, {mesh_line(plan)}"),
        ("assumes", f"{plan.profile} as the framework, {plan.precision}, {plan.optimizer}, ZeRO {plan.zero}"),
        ("step time", f"{format_time(prediction.step_time)} for a batch of {batch:,}{times}"),
        *more,
    ]
    print_facts(f"{network.name}, batch {batch:,}", facts)
    print_tables(tables)
