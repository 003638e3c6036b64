"""What a rule set asks for that no operator can do: found by applying it to models of every form, whatever the job is."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from perfmodel.errors import InputError
from perfmodel.files import listed
from perfmodel.parallel.derive import derive
from perfmodel.parallel.rules import RuleSet, apply_rules
from perfmodel.parallel.sharding import AXIS_PARTS, whole_dims
from perfmodel.workload.models import load_model
from perfmodel.workload.operator import Graph, Operator
from perfmodel.workload.transformer import build_graph

#: Between them they have every operator: learned positions, biases and dropout; grouped heads; norms of q and k; a parallel block.
_MODELS = ("gpt2", "llama-3-8b", "qwen3-8b", "falcon-7b")
_BATCH = ("dp_replicate", "dp_shard")


def check_rule_set(rules: RuleSet, *, where: str) -> RuleSet:
    """The rule set, if every model can follow it; else InputError with everything that stands against it."""
    faults = list(dict.fromkeys(_faults(rules)))
    if faults:
        raise InputError(f"{where}: {listed(faults)}")
    return rules


@lru_cache(maxsize=1)
def _graphs() -> tuple[Graph, ...]:
    sizes = {"seq_len": 1024, "dropout": True, "activation_bytes": 2.0, "parameter_bytes": 2.0}
    return tuple(
        build_graph(load_model(name), attention=attention, **sizes)  # type: ignore[arg-type]
        for name in _MODELS
        for attention in ("flash", "unfused")
    )


def _faults(rules: RuleSet) -> Iterator[str]:
    if sorted(rules.rules.get("batch", ())) != sorted(_BATCH):
        # every operator has it: the microbatch is counted for each data-parallel rank
        yield "batch: must be cut by the two data axes and by nothing else; write batch: [dp_replicate, dp_shard]"
    graphs = _graphs()
    of_operators = list(dict.fromkeys(fault for graph in graphs for operator in graph.operators for fault in _of_operator(rules, operator)))
    yield from of_operators
    if of_operators:
        return
    for graph in graphs:
        try:
            derive(graph, apply_rules(graph, rules))
        except InputError as error:
            yield str(error)


def _of_operator(rules: RuleSet, operator: Operator) -> Iterator[str]:
    cut: dict[str, list[str]] = {}
    whole = whole_dims(operator)
    for dim in operator.dims:
        axes = rules.rules.get(dim.logical, ())
        for axis in axes:
            cut.setdefault(axis, []).append(dim.logical)
        if axes and dim.name in whole:
            why = "a part of it leaves partial scores" if dim.logical == "head_dim" else "a softmax needs all of them"
            yield f"{dim.logical}: cannot be cut ({why}); leave it out"
    for axis, dims in cut.items():
        if len(dims) > 1:
            spoken = "tp" if axis in AXIS_PARTS["tp"] else axis
            yield f"{spoken}: cuts {' and '.join(dims)}, which one operator has: an axis may cut one of its dims; leave the others whole"
