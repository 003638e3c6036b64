"""Bytes and counts of derived traffic on a mesh of given sizes; nothing here knows a form of parallelism."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from math import ceil, prod

from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.parallel.algebra.derive import Amount, ParameterLayout, ShardedGraph, Traffic, derive
from perfmodel.parallel.algebra.parameters import ParameterEvent, parameter_events, shard_axes, stored_rows
from perfmodel.parallel.algebra.rules import RuleSet, apply_rules, load_rule_set
from perfmodel.workload.models import load_model
from perfmodel.workload.transformer import build_graph
from perfmodel.workload.work import Pass

Sizes = Mapping[str, int]

#: Bytes that one chip sends, over the full buffer in the group (R11).
WIRE_FACTOR = {CollectiveKind.ALL_REDUCE: 2, CollectiveKind.REDUCE_SCATTER: 1, CollectiveKind.ALL_GATHER: 1, CollectiveKind.ALL_TO_ALL: 1}


def derivation_of(model: str, rules: str | RuleSet, *, seq_len: int = 2048, itemsize: float = 2.0, **changes) -> ShardedGraph:
    settings = {"attention": "flash", "dropout": False, "activation_bytes": itemsize, "parameter_bytes": itemsize}
    graph = build_graph(load_model(model), seq_len=seq_len, **{**settings, **changes})
    return derive(graph, apply_rules(graph, load_rule_set(rules) if isinstance(rules, str) else rules))


def group_size(axes: Iterable[str], sizes: Sizes) -> int:
    return prod(sizes.get(axis, 1) for axis in axes)


def amount_bytes(amount: Amount, sizes: Sizes, *, micro_batch: int = 1) -> float:
    """The batch dim counts a data rank's own sequences, so the data axes that cut it cancel."""
    axes = amount.axes - {"dp_replicate", "dp_shard"} if amount.batch_dim else amount.axes
    rows = ceil(amount.padded_size / group_size(amount.padded_axes, sizes))
    return amount.base * (micro_batch if amount.batch_dim else 1) * rows / group_size(axes, sizes)


def wire_bytes(kind: CollectiveKind, num_bytes: float, group: int) -> float:
    return WIRE_FACTOR[kind] * num_bytes * (group - 1) / group


def times(traffic: Traffic, derivation: ShardedGraph) -> int:
    return derivation.graph.count(traffic.region) * traffic.repeats


def totals(derivation: ShardedGraph, sizes: Sizes, keep: Callable[[Traffic], bool] = lambda t: True) -> dict[str, tuple[int, float]]:
    """kind -> (collectives, bytes of their full buffers) of one microbatch in the whole model; groups of one are none."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for t in derivation.traffic:
        if group_size(t.axes, sizes) > 1 and keep(t):
            sums[str(t.kind)][0] += times(t, derivation)
            sums[str(t.kind)][1] += times(t, derivation) * amount_bytes(t.amount, sizes)
    return {kind: (int(count), num_bytes) for kind, (count, num_bytes) in sums.items()}


def total_wire_bytes(derivation: ShardedGraph, sizes: Sizes) -> float:
    return sum(
        times(t, derivation) * wire_bytes(t.kind, amount_bytes(t.amount, sizes), group_size(t.axes, sizes)) for t in derivation.traffic
    )


def layer_traffic(derivation: ShardedGraph, phase: Pass, sizes: Sizes) -> list[tuple[str, str, float]]:
    """(kind, tensor, bytes) of one layer."""
    return [
        (str(t.kind), t.tensor, amount_bytes(t.amount, sizes))
        for t in derivation.traffic
        if t.region == "layer" and t.phase is phase and group_size(t.axes, sizes) > 1
        for _ in range(t.repeats)
    ]


# --- parameters -----------------------------------------------------------------------------------------------------


def event_elements(parameter: ParameterLayout, event: ParameterEvent, *, zero: int, sizes: Sizes) -> float:
    """Full buffer in the group: padded rows for what ZeRO cuts, the shard for what is reduced after the scattering."""
    rows = ceil(parameter.num_rows / group_size(parameter.row_axes, sizes))
    columns = parameter.num_columns / group_size(parameter.column_axes, sizes)
    cut = group_size(shard_axes(parameter.gradient_axes), sizes) if zero else 1
    shard = float(stored_rows(rows, cut)) * columns
    return shard if event.kind is CollectiveKind.ALL_REDUCE else shard * cut


def parameter_traffic(
    derivation: ShardedGraph, sizes: Sizes, *, zero: int, num_microbatches: int = 1, **settings
) -> dict[tuple[str, str], tuple[int, float, float]]:
    """(kind, what) -> (units, elements of full buffers, elements on the wire of one chip) of one step; a unit is a layer or the rest."""
    defaults = {"stores_shards_zero2": False, "reduces_each_microbatch": zero >= 2, "keeps_gathered": False}
    sums: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    units: dict[tuple[str, str], set[bool]] = defaultdict(set)
    for parameter in derivation.parameters:
        in_layer = "layer" in parameter.regions
        for event in parameter_events(parameter, zero=zero, **{**defaults, **settings}):
            group = group_size(event.axes, sizes)
            if group == 1:
                continue
            count = derivation.graph.count("layer" if in_layer else "") * (num_microbatches if event.times == "microbatch" else 1)
            elements = count * event_elements(parameter, event, zero=zero, sizes=sizes)
            key = (str(event.kind), event.what)
            units[key].add(in_layer)
            sums[key][0] += elements
            sums[key][1] += wire_bytes(event.kind, elements, group)
    layers = derivation.graph.count("layer")
    return {key: ((layers if True in units[key] else 0) + (False in units[key]), *sums[key]) for key in sums}
