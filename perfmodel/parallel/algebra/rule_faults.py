"""Faults of rule sets: shardings that no operator supports, found by applying a rule set to models of every architecture."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from perfmodel.foundation.errors import InputError, one_line, suggest
from perfmodel.foundation.session import session_cache
from perfmodel.parallel.algebra.derive import derive
from perfmodel.parallel.algebra.sharding import AXIS_PARTS
from perfmodel.workload.graph import Graph, Operator
from perfmodel.workload.models import load_model
from perfmodel.workload.transformer import build_graph

if TYPE_CHECKING:
    from perfmodel.parallel.algebra.rules import RuleSet

#: Models that together have every operator: learned positions, biases and dropout; grouped heads; norms of q and k; a parallel block.
#: Faults that depend on the model (tied embeddings have one rule) are reported when the job is known.
_MODELS = ("gpt2", "llama-3-8b", "qwen3-8b", "falcon-7b")
#: Models that together have the operators of all other layers.
_FURTHER = ("deepseek-v3.2", "nemotron-h-8b", "qwen3-next-80b-a3b")
_SIZES = {"seq_len": 1024, "dropout": True, "activation_bytes": 2.0, "parameter_bytes": 2.0}
_BATCH = ("dp_replicate", "dp_shard")


def faults_of(rules: RuleSet) -> list[str]:
    """Return the faults of a rule set, a sentence each; none if every model supports it."""
    faults: list[str] = []
    batch_cuts = (rules.rules.get("batch", ()), *(cut for name, cut in rules.cuts if name == "batch"))
    if any(sorted(axes) != sorted(_BATCH) for axes in batch_cuts):
        # every operator has a batch dim: the micro-batch is counted per data-parallel rank
        faults.append("batch: must be cut by the two data axes and by nothing else; write batch: [dp_replicate, dp_shard]")
    graphs, known = _graphs(), _known() if rules.operators else {}
    for name, cuts in rules.operators.items():
        if name not in known:
            faults.append(f"operators: {one_line(name, 80)}: no operator of a model{suggest(name, known)}")
        else:
            has = ", ".join(sorted(known[name]))
            faults += [f"{name}.{dim}: {name} has no such dim; it has {has}" for dim in cuts if dim not in known[name]]
    of_operators = [fault for graph in graphs for operator in graph.operators for fault in _operator_faults(rules, operator)]
    for graph in graphs if not of_operators else ():
        try:
            derive(graph, {operator.name: rules.sharding(operator) for operator in graph.operators})
        except InputError as error:
            faults.append(str(error))
    return list(dict.fromkeys([*faults, *of_operators]))


@session_cache(maxsize=1)
def _graphs() -> tuple[Graph, ...]:
    return tuple(
        build_graph(replace(load_model(name), tie_word_embeddings=False), attention=attention, **_SIZES)  # type: ignore[arg-type]
        for name in _MODELS
        for attention in ("flash", "unfused")
    )


@session_cache(maxsize=1)
def _known() -> dict[str, set[str]]:
    """Return the names of the dims of every operator that some model has."""
    dims: dict[str, set[str]] = {}
    others = (build_graph(load_model(name), attention="flash", **_SIZES) for name in _FURTHER)  # type: ignore[arg-type]
    for graph in (*_graphs(), *others):
        for operator in graph.operators:
            dims.setdefault(operator.name_in_layer, set()).update(map(operator.logical_name, operator.dims))
    return dims


def _operator_faults(rules: RuleSet, operator: Operator) -> Iterator[str]:
    cut: dict[str, list[str]] = {}
    for dim in operator.dims:
        name = operator.logical_name(dim)
        axes = rules.cut(operator.name, name)
        for axis in axes:
            cut.setdefault(axis, []).append(name)
        if axes and dim in operator.roles.unsplit:
            why = "a part of it leaves partial scores" if name == "head_dim" else "a softmax needs all of them"
            yield f"{name}: cannot be cut ({why}); leave it out"
    for axis, dims in cut.items():
        if len(dims) > 1:
            label = "tp" if axis in AXIS_PARTS["tp"] else axis
            yield f"{label}: cuts {' and '.join(dims)}, which one operator has: an axis may cut one of its dims; leave the others whole"
