"""Layer graphs of PaSE by name.

Source: Elango, PaSE: Parallelization Strategies for Efficient DNN Training, IPDPS 2021. The files `graphs/*.json` of this folder were
extracted by running its released code; DenseNet-121 is built in `densenet.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perfmodel.foundation.errors import InputError, suggest
from perfmodel.planner.pase.densenet import densenet121
from perfmodel.planner.pase.layer import LayerKind, PaseGraph, einsum_layer, graph_of, layer
from perfmodel.workload.graph import Operator

_FOLDER = Path(__file__).parent / "graphs"


def list_pase_graphs() -> tuple[str, ...]:
    """Return the names for `load_pase_graph`."""
    return tuple(sorted([*(path.stem for path in _FOLDER.glob("*.json")), "densenet121"]))


def load_pase_graph(name: str) -> PaseGraph:
    """Return a network of the paper by its name, or `densenet121`."""
    if name == "densenet121":
        return densenet121()
    path = _FOLDER / f"{name}.json"
    if name not in list_pase_graphs():
        raise InputError(f"graph={str(name)[:80]}: no such layer graph is shipped{suggest(name, list_pase_graphs())}")
    content = json.loads(path.read_text(encoding="utf-8"))
    layers = [_read_layer(record) for record in content["layers"]]
    return graph_of(
        name,
        [layers[index] for index in content["vertices"]],
        [(producer, consumer) for producer, consumer in content["edges"]],
        batch=content["batch"],
        smallest_share=content["smallest_share"],
        source=content["source"],
    )


def _read_layer(record: Mapping[str, Any]) -> Operator:
    pointwise = record.get("pointwise", 0)
    if "einsum" in record:
        return einsum_layer(record["dims"], record["einsum"], pointwise=pointwise)
    window = record.get("window", (1, 1))
    kind = LayerKind(record["kind"])
    return layer(
        kind,
        record["dims"],
        writes=tuple(record["outputs"][0]),
        reads=tuple(record["inputs"][0]) if kind is LayerKind.POOLING else (),
        axes=record.get("axes", ""),
        window=(window[0], window[1]),
        pointwise=pointwise,
    )
