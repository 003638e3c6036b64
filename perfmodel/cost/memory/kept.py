"""What autograd keeps of a forward pass until the backward pass reads it."""

from __future__ import annotations

from dataclasses import replace

from perfmodel.cost.memory.live import Kept, operand_bytes
from perfmodel.parallel.algebra.derive import Derivation, amount_of, extent_amount
from perfmodel.parallel.algebra.sharding import gradient_layout
from perfmodel.workload.graph import Operand


def kept_tensors(
    derivation: Derivation,
    regathers: set[tuple[str, str]],
    core: set[str],
    *,
    alone: set[str],
) -> list[Kept]:
    """What autograd keeps, each tensor once in each layout.

    A recomputed group is a function under a checkpoint: what leaves it is kept, for it is read outside. Operators recomputed one by one
    (`alone`: those named by themselves, torch's selective checkpointing) are run again for whoever needs what they make.
    """
    graph, shardings = derivation.graph, derivation.shardings
    found: dict[tuple[str, object], Kept] = {}
    for op in graph.operators:
        sharding, in_core = shardings[op.name], op.name in core
        for number, saved in enumerate(op.saved):
            itemsize = graph.itemsize(op, saved)
            if saved.of is not None:
                operand: Operand = op.operands[saved.of]
                tensor = operand.tensor
                itemsize *= op.parts.get(tensor, 1.0)
                maker = graph.producer(tensor)
                made_in_core = maker is not None and maker.name in core
                droppable = made_in_core and (in_core or (maker is not None and maker.name in alone))
                amount = operand_bytes(derivation, op, operand, itemsize=itemsize, is_expanded=tensor not in op.parts)
                layout: object = gradient_layout(sharding, operand).cuts
                if (tensor, op.name) in regathers and maker is not None:
                    amount = amount_of(maker, shardings[maker.name], maker.output.dims, scale=itemsize)
                    layout = derivation.left[tensor].cuts
                before = found.get((tensor, layout))
                dropped, core_holds = droppable, in_core
                if before is not None:
                    dropped = before.is_dropped and droppable
                    core_holds = in_core or any(holder in core for holder in before.holders)
                found[tensor, layout] = Kept(
                    tensor=tensor,
                    region=op.layer if before is None else before.region,
                    amount=amount if before is None else before.amount,
                    holders=(op.name,) if before is None else (*before.holders, op.name),
                    is_dropped=dropped,
                    is_made_twice=(made_in_core and core_holds and not dropped) or (before is not None and before.is_made_twice),
                )
                if in_core and not made_in_core and op.is_product and before is None:
                    # a copy for each query head is made within the recomputed set, from the one for each key-value head, which stays
                    single = operand_bytes(derivation, op, operand, itemsize=itemsize, is_expanded=False)
                    if single.base < amount.base:
                        found[tensor, layout] = replace(found[tensor, layout], amount=single, is_made_twice=True)
                        more = amount.scaled((amount.base - single.base) / amount.base)
                        found[op.name, number] = Kept(
                            tensor=tensor, region=op.layer, amount=more, holders=(op.name,), is_dropped=True, is_made_twice=False
                        )
            else:
                found[op.name, number] = Kept(
                    tensor=op.name,
                    region=op.layer,
                    amount=extent_amount(op, sharding, saved.extent, scale=itemsize),
                    holders=(op.name,),
                    is_dropped=in_core,
                    is_made_twice=False,
                )
    return list(found.values())
