"""Layer graphs of PaSE by name.

Source: Elango, PaSE: Parallelization Strategies for Efficient DNN Training, IPDPS 2021. The files `graphs/*.json` of this folder were
extracted by running its released code; DenseNet-121 is built in `densenet.py`.
"""

from __future__ import annotations

import json
from pathlib import Path

from perfmodel.foundation.errors import InputError, suggest
from perfmodel.planner.pase.densenet import densenet121
from perfmodel.planner.pase.layer import LayerKind, PaseGraph, einsum_layer, graph_of, layer

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
    layers = []
    for record in content["layers"]:
        dims, pointwise = record["dims"], record.get("pointwise", 0)
        if "einsum" in record:
            layers.append(einsum_layer(dims, record["einsum"], pointwise=pointwise))
            continue
        kind, (height, width) = LayerKind(record["kind"]), record.get("window", (1, 1))
        reads = tuple(record["inputs"][0]) if kind is LayerKind.POOLING else ()
        axes, writes = record.get("axes", ""), tuple(record["outputs"][0])
        layers.append(layer(kind, dims, writes=writes, reads=reads, axes=axes, window=(height, width), pointwise=pointwise))
    return graph_of(
        name,
        [layers[index] for index in content["vertices"]],
        [(producer, consumer) for producer, consumer in content["edges"]],
        batch=content["batch"],
        smallest_share=content["smallest_share"],
        source=content["source"],
    )
