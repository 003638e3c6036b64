"""Strategies of PaSE's figure 6 on our networks: its layers mapped to our operators.

    data parallel   the batch, as far as it divides (`network_strategies.data_parallel`)
    expert          AlexNet, InceptionV3: one weird trick. Transformer: Mesh-TensorFlow's hybrid of batch and model dims. RNNLM: data
                    parallel pairs of devices, one LSTM layer on each, the vocabulary tables split in two as in GNMT's softmax
    PaSE            the configurations that the search in PaSE's own space finds, layer by layer

A strategy fixes the number of parts of each dim of the named operators. The search chooses the placement of the parts. It also chooses the
splits of the operators between (biases, activations, pooling, norms, sums), which split the batch and features only.

Sources: Elango, PaSE, IPDPS 2021, section V; its released programs (github.com/baidu-research/PaSE, benchmarks/): `transformer.py` has
2 x 4 (batch x model) for 8 devices. Krizhevsky, arXiv 1404.5997; Shazeer et al., Mesh-TensorFlow, NeurIPS 2018; Wu et al., Google's Neural
Machine Translation System, arXiv 1609.08144, section 3.3.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import log2

import numpy as np
from numpy.typing import NDArray

from perfmodel.foundation.errors import InputError
from perfmodel.parallel.per_operator.mesh import MeshAxis
from perfmodel.planner.pase.layer import LayerKind, text_of
from perfmodel.planner.pase.search import PaseRun
from perfmodel.planner.per_operator.search import Filter, fixed_parts
from perfmodel.planner.per_operator.space import Configurations
from perfmodel.planner.per_operator.strategies import mesh_tensorflow, one_weird_trick
from perfmodel.workload.graph import Graph, Operator
from perfmodel.workload.work import Product

Rows = NDArray[np.bool_]
Parts = Mapping[str, int]

#: Dims that operators without a strategy may split: samples, and features by any of their names.
_FREE_DIMS = frozenset("bncdve")
#: Dims that Mesh-TensorFlow's hybrid splits in addition to the batch: heads, feed-forward layer, vocabulary.
_MODEL_DIMS = ("h", "e", "v")


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """A filter of configurations.

    allowed   configurations of each operator
    apart     LSTM layers that run concurrently, each on its own share of the devices
    unused    mesh axis that such layers do not use: the work that the plan repeats along it is divided by layers
    """

    allowed: Filter
    apart: int = 1
    unused: str = ""


def with_one_hot_embeddings(network: Graph) -> Graph:
    """Replace lookups by products with a one-hot matrix, as Mesh-TensorFlow gathers rows (forward and table gradient)."""
    operators = []
    for operator in network.operators:
        if operator.kind == "embedding":
            tokens = tuple((operator.dims[dim], dim) for dim in ("b", "s"))
            rows, features = ((operator.dims["v"], "v"),), ((operator.dims["d"], "d"),)
            lookup, gradient = Product(m=tokens, n=features, k=rows), Product(m=rows, n=features, k=tokens)
            operator = replace(operator, forward=(lookup,), backward=(gradient,))
        operators.append(operator)
    return replace(network, operators=tuple(operators))


def expert_strategy(network: Graph, axes: Sequence[MeshAxis]) -> Strategy:
    """Return the expert strategy, the paper's choice for each network."""
    if network.name == "transformer":
        num_devices = int(np.prod([axis.size for axis in axes]))
        model = {operator.name: tuple(dim for dim in _MODEL_DIMS if dim in operator.dims) for operator in network.operators}
        # as square as possible, the longer side to the model
        return Strategy(allowed=mesh_tensorflow(network, batch_parts=2 ** int(log2(num_devices) / 2), model_dims=model))
    if network.name == "rnnlm":
        return _layers_apart(network, axes)
    trick = one_weird_trick(network)

    def keep(operator: Operator, rows: Configurations) -> Rows:
        kept = trick(operator, rows)
        # operators between fully connected layers, and the loss, keep the sharding of these layers
        return kept & _most(rows, "n") if "n" in operator.dims and operator.kind != "convolution" else kept

    return Strategy(allowed=keep)


def _layers_apart(network: Graph, axes: Sequence[MeshAxis]) -> Strategy:
    unused = last_axes(axes)[-1]
    bit = 1 << [axis.name for axis in axes].index(unused)

    def keep(operator: Operator, rows: Configurations) -> Rows:
        tables = [d for d, dim in enumerate(rows.dims) if dim == "v"]
        undivided = [d for d, dim in enumerate(rows.dims) if dim not in ("b", "v")]
        kept = np.asarray((rows.parts[:, undivided] == 1).all(axis=1) & ((rows.masks[:, rows.dims.index("b")] & bit) == 0))
        if tables:
            kept &= rows.masks[:, tables[0]] == bit
        batch = rows.parts[:, rows.dims.index("b")]
        return kept & (batch == batch[kept].max())

    return Strategy(allowed=keep, apart=2, unused=unused)


def last_axes(axes: Sequence[MeshAxis]) -> tuple[str, ...]:
    """Return the axis of each tier that is assigned last, innermost tier first."""
    last: dict[int, str] = {}
    for axis in axes:
        last[axis.tier] = axis.name
    return tuple(last[tier] for tier in sorted(last))


def _most(rows: Configurations, dim: str) -> Rows:
    """Return the rows that split `dim` only, into the largest number of parts."""
    others = [d for d, name in enumerate(rows.dims) if name != dim]
    only = np.asarray((rows.parts[:, others] == 1).all(axis=1))
    parts = rows.parts[:, rows.dims.index(dim)]
    return only & (parts == parts[only].max())


def pase_strategies(network: Graph, run: PaseRun, axes: Sequence[MeshAxis]) -> tuple[Strategy, ...]:
    """Return the strategies of PaSE's search, for our operators."""
    apart = max((split.get("l", 1) for layer, split in _splits(run) if layer.kind == LayerKind.LSTM), default=1)
    return fixed_strategies(pase_parts(network, run), axes, apart=apart)


def fixed_strategies(parts: Mapping[str, Parts], axes: Sequence[MeshAxis], *, apart: int = 1) -> tuple[Strategy, ...]:
    """Return the strategies with the given parts by operator name: one, or with separate LSTM layers one for each tier."""
    fixed = _fixed(parts)
    if apart == 1:
        return (Strategy(allowed=fixed),)
    return tuple(
        Strategy(allowed=_without(fixed, 1 << [axis.name for axis in axes].index(name)), apart=apart, unused=name)
        for name in last_axes(axes)
    )


def _fixed(parts: Mapping[str, Parts]) -> Filter:
    fixed = fixed_parts(parts)

    def keep(operator: Operator, rows: Configurations) -> Rows:
        if operator.name in parts:
            return fixed(operator, rows)
        undivided = [d for d, dim in enumerate(rows.dims) if dim not in _FREE_DIMS]
        return np.asarray((rows.parts[:, undivided] == 1).all(axis=1))

    return keep


def _without(allowed: Filter, bit: int) -> Filter:
    """Return the filter in which LSTM layers do not use an axis."""

    def keep(operator: Operator, rows: Configurations) -> Rows:
        kept = allowed(operator, rows)
        return kept & ((rows.masks & bit) == 0).all(axis=1) if is_recurrent(operator) else kept

    return keep


def is_recurrent(operator: Operator) -> bool:
    """Return whether an operator belongs to an LSTM layer: the recurrence, or the product and bias before it."""
    return operator.layer.startswith("lstm")


def _splits(run: PaseRun) -> list[tuple[Operator, dict[str, int]]]:
    return list(zip(run.tables.graph.layers, run.tables.strategy(run.solution.choice), strict=True))


def pase_parts(network: Graph, run: PaseRun) -> dict[str, dict[str, int]]:
    """Return operator -> dim -> parts, for the operators of PaSE's layers."""
    if run.tables.graph.name != network.name:
        raise InputError(f"graph={run.tables.graph.name}: the strategy is not for {network.name}; search that graph")
    layers: defaultdict[object, deque[Parts]] = defaultdict(deque)
    for layer, split in _splits(run):
        layers[_layer_key(layer)].append(split)
    build = {"rnnlm": _rnnlm_parts, "transformer": _transformer_parts}.get(network.name, _image_parts)
    return build(network, lambda key: layers[key].popleft())


def _layer_key(layer: Operator) -> object:
    """Return the key of a layer; layers with one key are in the order of the network."""
    if layer.kind == LayerKind.CONVOLUTION:
        return tuple(layer.dims[dim] for dim in "cnhwrs")
    return (layer.kind, text_of(layer, "equation"))


Take = Callable[[object], Parts]


def _image_parts(network: Graph, take: Take) -> dict[str, dict[str, int]]:
    parts = {}
    for operator in network.operators:
        if operator.kind == "convolution":
            window = network.tensors[operator.inputs[1].tensor].shape[2:]
            parts[operator.name] = _only(take((*(operator.dims[dim] for dim in "cnhw"), *window)), "bhwnc")
        elif operator.kind == "einsum":
            parts[operator.name] = _only(take((LayerKind.FULLY_CONNECTED, "")), "bnc")
        elif operator.kind == "cross_entropy":
            parts[operator.name] = _only(take((LayerKind.CROSS_ENTROPY, "")), "bn")
    return parts


def _rnnlm_parts(network: Graph, take: Take) -> dict[str, dict[str, int]]:
    parts = {
        "embedding": _only(take((LayerKind.EINSUM, "bsv,vd->bsd")), "bsdv"),
        "projection": _only(take((LayerKind.FULLY_CONNECTED, "")), "bsvd"),
        "loss": _only(take((LayerKind.CROSS_ENTROPY, "")), "bsv"),
    }
    return parts | recurrent_parts(network, take((LayerKind.LSTM, "")))


def recurrent_parts(network: Graph, split: Parts) -> dict[str, dict[str, int]]:
    """Return the parts b, d and e of an LSTM for each operator of its layers.

    Our recurrence does not split its contraction: devices that would split it split the hidden units instead.
    """
    recurrence = {"b": split["b"], "e": split["e"] * split["d"]}
    return {
        operator.name: _only(split, "bed") if operator.kind == "einsum" else recurrence
        for operator in network.operators
        if is_recurrent(operator)
    }


def _transformer_parts(network: Graph, take: Take) -> dict[str, dict[str, int]]:
    einsums = {
        "scores": ("bhsc,bhtc->bhst", "bhstc"),
        "context": ("bhst,bhtc->bhsc", "bhsct"),
        "o_proj": ("bhsc,hdc->bsd", "bsdh"),
        "up_proj": ("bsd,de->bse", "bsed"),
        "down_proj": ("bse,ed->bsd", "bsde"),
        "projection": ("bsd,dv->bsv", "bsvd"),
        "embedding": ("bsv,vd->bsd", "bsdv"),
    }
    parts: dict[str, dict[str, int]] = {}
    query: Parts = {}
    hidden: Parts = {}
    for operator in network.operators:
        name = operator.name
        last = name.rpartition(".")[2]
        if last in einsums:
            equation, dims = einsums[last]
            split = take((LayerKind.EINSUM, equation))
            parts[name] = _only(split, dims)
            hidden = split if last == "up_proj" else hidden
        elif last == "q_proj":  # PaSE has one layer for the three products of queries, keys and values
            query = take((LayerKind.EINSUM, "ibsd,ihdc->ibhsc" if "cross" in name else "bsd,ihdc->ibhsc"))
            parts[name] = _only(query, "bhsd")
        elif last in ("k_proj", "v_proj"):
            parts[name] = {"b": query["b"], "h": query["h"], "t": query["s"], "d": query["d"]}
        elif last in ("up_proj_bias", "relu"):
            parts[name] = _only(hidden, "bse")
        elif operator.kind == "softmax":
            parts[name] = _only(take((LayerKind.SOFTMAX, "")), "bhst")
        elif operator.kind == "cross_entropy":
            parts[name] = _only(take((LayerKind.CROSS_ENTROPY, "")), "bsv")
        elif operator.kind == "layer_norm":
            parts[name] = _only(take((LayerKind.NORM, "")), "bsd")
    return parts


def _only(split: Parts, dims: str) -> dict[str, int]:
    return {dim: split[dim] for dim in dims}
