"""Known strategies as limits on the configurations of each operator; the search chooses what a strategy leaves open.

    data parallel       every operator shards the batch over all chips, or the largest number that divides it
    one weird trick     convolutions (anything with a height) shard the batch; fully connected layers shard their output features
    mesh-tensorflow     everything shards the batch over `batch_parts`; the other chips shard heads, feed-forward and vocabulary

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
from perfmodel.workload.graph import Graph, Operator, TensorRole
from perfmodel.workload.work import Product

Rows = NDArray[np.bool_]


def data_parallel(network: Graph) -> Filter:
    """Shard the batch only, over the largest possible number of chips."""

    samples = sample_dims(network)

    def keep(operator: Operator, rows: Configurations) -> Rows:
        return _only(rows, samples.get(operator.name, ""))

    return keep


def one_weird_trick(network: Graph) -> Filter:
    """Shard the batch; for fully connected layers the output features, for the loss the classes."""
    samples = sample_dims(network)
    spatial = {operator.output.tensor for operator in network.operators if len(network.tensors[operator.output.tensor].shape) > 3}
    # the operators from the first one on whose output has no height
    heads, flat = set[str](), set[str]()
    for operator in network.operators:
        if operator.output.tensor not in spatial and any(operand.tensor in spatial | flat for operand in operator.inputs):
            heads.add(operator.name)
            flat.add(operator.output.tensor)

    def keep(operator: Operator, rows: Configurations) -> Rows:
        batch = samples.get(operator.name, "")
        if operator.name not in heads:
            return _only(rows, batch)
        weights = [operand for operand in operator.inputs if network.tensors[operand.tensor].role is TensorRole.PARAMETER]
        if not weights or not any(isinstance(work, Product) for work in operator.forward):
            return np.ones(len(rows), dtype=bool)
        others = {dim for operand in operator.inputs if operand not in weights for dim in operand.dims}
        # the output features are the dims of the output that a weight has and no activation
        features = [dim for operand in weights for dim in operand.dims if dim and dim in operator.output.dims and dim not in others]
        return _only(rows, features[0] if features else batch)

    return keep


def mesh_tensorflow(network: Graph, *, batch_parts: int, model_dims: Mapping[str, tuple[str, ...]]) -> Filter:
    """Shard the batch over `batch_parts`; `model_dims`: operator -> dims for the other chips; the first divisible one is sharded."""

    samples = sample_dims(network)

    def keep(operator: Operator, rows: Configurations) -> Rows:
        batch = samples.get(operator.name, "")
        allowed = {batch, *model_dims.get(operator.name, ())}
        others = [d for d, dim in enumerate(rows.dims) if dim not in allowed]
        kept = (rows.parts[:, others] == 1).all(axis=1)
        if batch in rows.dims:
            parts = rows.parts[:, rows.dims.index(batch)]
            possible = parts[parts <= batch_parts].max()
            kept &= parts == possible
        wanted = model_dims.get(operator.name, ())
        for dim in wanted:
            if dim in rows.dims:
                column = rows.parts[:, rows.dims.index(dim)]
                best = column[kept].max() if kept.any() else 1
                kept &= column == best
                break
        return np.asarray(kept)

    if batch_parts < 1:
        raise bad_field("batch_parts", batch_parts, "must be at least 1", "use a divisor of the number of chips")
    return keep


def sample_dims(network: Graph) -> Mapping[str, str]:
    """Return operator -> its sample dim, if it has one.

    The first operator whose first dim has the size of the batch defines it. Other dims are joined to it by positions of tensors.
    """
    classes, _ = dim_classes(network)
    firsts = ((index, next(iter(operator.dims), "")) for index, operator in enumerate(network.operators))
    batch_class = next((classes[i, dim] for i, dim in firsts if dim and network.operators[i].dims[dim] == network.batch), None)
    return {network.operators[index].name: dim for (index, dim), number in classes.items() if number == batch_class}


def _only(rows: Configurations, dim: str) -> Rows:
    """Return the rows that shard only `dim`, over the largest possible number of parts."""
    others = [d for d, name in enumerate(rows.dims) if name != dim]
    only = (rows.parts[:, others] == 1).all(axis=1)
    if dim in rows.dims:
        parts = rows.parts[:, rows.dims.index(dim)]
        only &= parts == parts[only].max()
    return np.asarray(only)
