"""Layouts that are usual without a search, with the engine's own limits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from perfmodel.frameworks.engine import Engine
from perfmodel.hardware.cluster import Cluster
from perfmodel.parallel.serving.columns import COLUMNS, ServingColumns
from perfmodel.planner.serving.evaluate import Evaluator
from perfmodel.planner.serving.space import degrees, replicas_that_fit, scale_up_size, why_not

NODE = "tp over a node"
SMALLEST = "smallest tp that fits"
DEFAULT = "engine's default"
EXPERTS = "attention dp with ep"

MEANINGS = {
    NODE: "tp over all chips of a node, replicas on all nodes",
    SMALLEST: "the smallest tp that the model fits into, replicas on all chips",
    DEFAULT: "as the engine starts by itself: one chip a replica",
    EXPERTS: "the vendors' recipe: attention dp and ep over all chips of a node, tp 1",
}


def baseline_layouts(evaluator: Evaluator, cluster: Cluster, engine: Engine) -> Iterator[tuple[str, str, ServingColumns, str]]:
    """Yield (name, description, its one layout or none, why there is none)."""
    model, node = evaluator.job.model, scale_up_size(cluster)
    admitted = [tp for tp in degrees(node) if not why_not(model, engine, tp=tp, pp=1, attention_dp=1, ep=1)]
    yield _named(NODE, _layout(engine, cluster, tp=admitted[-1])) if admitted else _none(NODE, "no tp divides the model")
    fitting = [tp for tp in admitted if _fits(evaluator, _layout(engine, cluster, tp=tp))]
    yield _named(SMALLEST, _layout(engine, cluster, tp=fitting[0])) if fitting else _none(SMALLEST, "no tp of a node fits")
    if fitting and fitting[0] == 1:
        yield _named(DEFAULT, _layout(engine, cluster, tp=1))
    else:
        yield _none(DEFAULT, "does not fit on one chip")
    if model.experts is None:
        return
    for size in reversed(degrees(node)):
        if size > 1 and not why_not(model, engine, tp=1, pp=1, attention_dp=size, ep=size):
            layout = _layout(engine, cluster, attention_dp=size, ep=size)
            yield _named(EXPERTS, layout) if _fits(evaluator, layout) else _none(EXPERTS, "does not fit")
            return
    yield _none(EXPERTS, f"{engine.name} does not run it")


def _named(name: str, layout: ServingColumns) -> tuple[str, str, ServingColumns, str]:
    return name, MEANINGS[name], layout, ""


def _none(name: str, reason: str) -> tuple[str, str, ServingColumns, str]:
    nothing = np.zeros(0, dtype=np.int64)
    empty = ServingColumns(engine="", **dict.fromkeys(COLUMNS, nothing))
    return name, MEANINGS[name], empty, reason


def _layout(engine: Engine, cluster: Cluster, **sizes: int) -> ServingColumns:
    values: dict[str, Any] = {"tp": 1, "pp": 1, "attention_dp": 1, "ep": 1, "dcp": 1, "pcp": 1, "max_batch": 0, "max_tokens": 0} | sizes
    values["replicas"] = replicas_that_fit(values["tp"] * values["attention_dp"], cluster)
    return ServingColumns(engine=engine.name, **{name: np.array([value], dtype=np.int64) for name, value in values.items()})


def _fits(evaluator: Evaluator, layout: ServingColumns) -> bool:
    """Whether the layout fits, in the first format."""
    _, has_capacity = evaluator.capacity(0, layout)
    return bool(has_capacity[0])
