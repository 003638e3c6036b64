"""Strategies that people use, as limits of what each operator may be; what a strategy leaves open, the search fills in.

    data parallel       every operator cuts the batch, into as many parts as divide it, up to all chips
    one weird trick     convolutions (whatever has a height) cut the batch; fully connected layers cut their output features
    mesh-tensorflow     everything cuts the batch into `batch_parts`; heads, feed-forward and vocabulary are cut by the other chips

Sources: Krizhevsky, One weird trick for parallelizing convolutional neural networks, arXiv 1404.5997; Shazeer et al., Mesh-TensorFlow,
NeurIPS 2018, section 5.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from perfmodel.foundation.errors import bad_field
from perfmodel.planner.per_operator.search import Filter
from perfmodel.planner.per_operator.space import Configurations, dim_classes
from perfmodel.workload.graph import Graph, Operator, Product, TensorRole

Rows = NDArray[np.bool_]


def data_parallel(network: Graph) -> Filter:
    """Only the batch is cut, as far as it goes."""

    samples = sample_dims(network)

    def keep(operator: Operator, rows: Configurations) -> Rows:
        return _only(rows, samples.get(operator.name, ""))

    return keep


def one_weird_trick(network: Graph) -> Filter:
    """Cut the batch, but the output features of fully connected layers, and the classes of the loss."""
    heads, samples = _after_flattening(network), sample_dims(network)

    def keep(operator: Operator, rows: Configurations) -> Rows:
        batch = samples.get(operator.name, "")
        if operator.name not in heads:
            return _only(rows, batch)
        if _reads_weights(network, operator):
            return _only(rows, _features(network, operator) or batch)
        return np.ones(len(rows), dtype=bool)

    return keep


def mesh_tensorflow(network: Graph, *, batch_parts: int, model_dims: Mapping[str, tuple[str, ...]]) -> Filter:
    """The batch into `batch_parts`; `model_dims`: operator -> those of its dims that the other chips cut, the first that divides."""

    samples = sample_dims(network)

    def keep(operator: Operator, rows: Configurations) -> Rows:
        batch = samples.get(operator.name, "")
        allowed = {batch, *model_dims.get(operator.name, ())}
        others = [d for d, dim in enumerate(rows.dims) if dim not in allowed]
        found = (rows.parts[:, others] == 1).all(axis=1)
        if batch in rows.dims:
            parts = rows.parts[:, rows.dims.index(batch)]
            possible = parts[parts <= batch_parts].max()
            found &= parts == possible
        wanted = model_dims.get(operator.name, ())
        for dim in wanted:
            if dim in rows.dims:
                column = rows.parts[:, rows.dims.index(dim)]
                best = column[found].max() if found.any() else 1
                found &= column == best
                break
        return np.asarray(found)

    if batch_parts < 1:
        raise bad_field("batch_parts", batch_parts, "must be at least 1", "use a divisor of the number of chips")
    return keep


def sample_dims(network: Graph) -> Mapping[str, str]:
    """Operator -> its dim that counts samples, where it has one: the first dim of the first operator that has as many entries there as the
    batch, and whatever dim is that one at the same position of a tensor."""
    classes, _ = dim_classes(network)
    firsts = ((index, next(iter(operator.dims), "")) for index, operator in enumerate(network.operators))
    found = next((classes[each] for each in firsts if each[1] and network.operators[each[0]].dims[each[1]] == network.batch), None)
    return {network.operators[index].name: dim for (index, dim), number in classes.items() if number == found}


def _only(rows: Configurations, dim: str) -> Rows:
    """Nothing cut but `dim`, that into as many parts as it can be."""
    others = [d for d, name in enumerate(rows.dims) if name != dim]
    only = (rows.parts[:, others] == 1).all(axis=1)
    if dim in rows.dims:
        parts = rows.parts[:, rows.dims.index(dim)]
        only &= parts == parts[only].max()
    return np.asarray(only)


def _reads_weights(network: Graph, operator: Operator) -> bool:
    has_product = any(isinstance(work, Product) for work in operator.forward)
    return has_product and any(network.tensors[operand.tensor].role is TensorRole.PARAMETER for operand in operator.inputs)


def _features(network: Graph, operator: Operator) -> str:
    """The dim of the output that a weight has and no activation: the output features; "" for none."""
    weights = [operand for operand in operator.inputs if network.tensors[operand.tensor].role is TensorRole.PARAMETER]
    others = {
        dim for operand in operator.inputs if network.tensors[operand.tensor].role is not TensorRole.PARAMETER for dim in operand.dims
    }
    found = [dim for operand in weights for dim in operand.dims if dim and dim in operator.output.dims and dim not in others]
    return found[0] if found else ""


def _after_flattening(network: Graph) -> set[str]:
    """Operators from the first one on whose output has no height any more."""
    spatial = {operator.output.tensor for operator in network.operators if len(network.tensors[operator.output.tensor].shape) > 3}
    if not spatial:
        return set()
    found: set[str] = set()
    tensors: set[str] = set()
    for operator in network.operators:
        from_flat = any(operand.tensor in tensors for operand in operator.inputs)
        if operator.output.tensor not in spatial and (from_flat or any(operand.tensor in spatial for operand in operator.inputs)):
            found.add(operator.name)
            tensors.add(operator.output.tensor)
    return found
