"""Default placement of layers on pipeline stages by frameworks: even, or by the cost of layers and the head."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from perfmodel.foundation.columns import Column
from perfmodel.foundation.errors import InputError
from perfmodel.foundation.session import session_cache
from perfmodel.workload.config import TransformerConfig


@session_cache(maxsize=4096)
def stage_layers_by_cost(model: TransformerConfig, num_stages: int) -> tuple[int, ...]:
    """Return the layers of each stage with blocks placed by their cumulative cost, as in nanotron.

    A block starts the next stage once the running sum of costs has reached k / p of the total; the head is a block too, on the last
    stage. Costs: a layer 4 h^2 + 3 h f, the head V h, all else 0.

    Source: nanotron v0.5, `get_block_compute_costs` and the placement in `models/base.py`.
    """
    if num_stages > model.num_hidden_layers:
        raise InputError(f"pp={num_stages}: must not exceed num_hidden_layers={model.num_hidden_layers}; use fewer stages")
    h, f = model.hidden_size, model.intermediate_size
    if model.is_plain:
        layer = 4 * h * model.num_attention_heads * model.head_dim + 3 * h * f
    else:  # mean active parameters of a layer
        outside = sum(shape.num_elements for shape in (*model.embedding_shapes(), *model.head_shapes()))
        layer = (model.num_active_parameters - outside) // model.num_hidden_layers
    total = model.num_hidden_layers * layer + model.vocab_size * h
    layers, stage, running = [0] * num_stages, 0, 0
    for _ in range(model.num_hidden_layers):
        if stage < num_stages - 1 and running * num_stages >= total * (stage + 1):
            stage += 1
        layers[stage] += 1
        running += layer
    return tuple(layers)


def imbalance(model: TransformerConfig, num_stages: int, held: Sequence[Column]) -> tuple[Column, ...]:
    """Return the ratio of layers under placement by cost to layers held, for each distinct rank; at least 1.

    held   layers of each distinct rank: the first, inner ones, the last
    """
    if num_stages > model.num_hidden_layers:
        return (1.0,) * len(held)
    first, *between, last = stage_layers_by_cost(model, num_stages)
    by_cost = (first, *[max(between, default=0)] * (len(held) - 2), last)
    return tuple(
        np.where(layers == 0.0, 1.0, np.maximum(count / np.maximum(layers, 1.0), 1.0))[()]
        for count, layers in zip(by_cost, held, strict=True)
    )
