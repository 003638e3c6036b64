"""Tensors that autograd saves in the forward pass for backward."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace
from functools import partial

from perfmodel.cost.memory.live import SavedTensor
from perfmodel.parallel.algebra.derive import ShardedGraph, amount_of, extent_amount
from perfmodel.parallel.algebra.sharding import gradient_layout


def kept_tensors(sharded: ShardedGraph, regathers: Set[tuple[str, str]], core: Set[str], *, alone: Set[str]) -> list[SavedTensor]:
    """Return the saved tensors, each once in each layout.

    A recomputed group is a function under a checkpoint: its outputs are saved, because they are read outside. Operators that are recomputed
    one by one (`alone`, by name: torch's selective checkpointing) run again for every consumer of their outputs.
    """
    graph, shardings = sharded.graph, sharded.shardings
    saved_tensors: dict[tuple[str, object], SavedTensor] = {}
    for op, number, saved in ((operator, number, saved) for operator in graph.operators for number, saved in enumerate(operator.saved)):
        in_core, itemsize = op.name in core, graph.itemsize(op, saved)
        new = partial(SavedTensor, region=op.layer, holders=(op.name,))
        if saved.of is None:
            amount = extent_amount(op, shardings[op.name], saved.extent, scale=itemsize)
            saved_tensors[op.name, number] = new(tensor=op.name, amount=amount, is_dropped=in_core, is_made_twice=False)
            continue
        operand = op.operands[saved.of]
        tensor, maker = operand.tensor, graph.producer(operand.tensor)
        itemsize *= op.parts.get(tensor, 1.0)
        if maker is not None and (tensor, op.name) in regathers:
            amount = amount_of(maker, shardings[maker.name], maker.output.dims, scale=itemsize)
            layout = sharded.left[tensor].cuts
        else:
            amount = sharded.operand_bytes(op, operand, itemsize=itemsize, is_expanded=tensor not in op.parts)
            layout = gradient_layout(shardings[op.name], operand).cuts
        made_in_core = maker is not None and maker.name in core
        is_dropped = made_in_core and (in_core or (maker is not None and maker.name in alone))
        before = saved_tensors.get((tensor, layout))
        if before is not None:
            is_dropped = before.is_dropped and is_dropped
            is_made_twice = made_in_core and not is_dropped and (in_core or not core.isdisjoint(before.holders))
            holders, is_made_twice = (*before.holders, op.name), before.is_made_twice or is_made_twice
            saved_tensors[tensor, layout] = replace(before, holders=holders, is_dropped=is_dropped, is_made_twice=is_made_twice)
            continue
        is_made_twice = made_in_core and in_core and not is_dropped
        if in_core and not made_in_core and op.is_product:
            # the copy for each query head is recomputed from the one for each key-value head, which stays saved
            single = sharded.operand_bytes(op, operand, itemsize=itemsize, is_expanded=False)
            if single.base < amount.base:
                more = amount.scaled((amount.base - single.base) / amount.base)
                saved_tensors[tensor, layout] = new(tensor=tensor, amount=single, is_dropped=is_dropped, is_made_twice=True)
                saved_tensors[op.name, number] = new(tensor=tensor, amount=more, is_dropped=True, is_made_twice=False)
                continue
        saved_tensors[tensor, layout] = new(tensor=tensor, amount=amount, is_dropped=is_dropped, is_made_twice=is_made_twice)
    return list(saved_tensors.values())
