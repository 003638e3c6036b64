"""What autograd keeps of a forward pass until the backward pass reads it."""

from __future__ import annotations

from dataclasses import replace

from perfmodel.cost.lifetimes import FLOAT32_BYTES, Kept, operand_bytes
from perfmodel.parallel.algebra.derive import Derivation, amount_of
from perfmodel.parallel.algebra.sharding import gradient_layout
from perfmodel.parallel.profile import ExecutionProfile
from perfmodel.workload.operator import Graph, Operand, Operator, OperatorKind


def kept_tensors(
    derivation: Derivation,
    profile: ExecutionProfile,
    regathers: set[tuple[str, str]],
    internal: set[str],
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
        if op.kernel_class == "rotary" and profile.keeps_unrotated_qk:
            amount = operand_bytes(derivation, op, op.inputs[0])
            found[op.name, "unrotated"] = Kept(
                tensor=op.inputs[0].tensor, region=op.region, amount=amount, holders=(op.name,), is_dropped=False, is_made_twice=False
            )
        for number, saved in enumerate(op.saved):
            in_core = op.name in core
            sharding = shardings[op.name]
            if saved.what == "output" and op.kernel_class == "softmax" and _keeps_float32(graph, op, profile):
                amount = amount_of(op, sharding, op.output.dims, scale=FLOAT32_BYTES)
                found[op.name, number] = Kept(
                    tensor=op.name, region=op.region, amount=amount, holders=(op.name,), is_dropped=in_core, is_made_twice=False
                )
            elif saved.what in ("input", "output"):
                operand: Operand = op.output if saved.what == "output" else op.inputs[saved.index]
                tensor = operand.tensor
                maker = graph.producer(tensor)
                if tensor in internal and maker is not None and maker.saved:
                    continue  # the fused kernel computes it again from what its maker saves
                made_in_core = maker is not None and maker.name in core
                droppable = made_in_core and (in_core or (maker is not None and maker.name in alone))
                amount = operand_bytes(derivation, op, operand)
                layout: object = gradient_layout(sharding, operand).cuts
                if (tensor, op.name) in regathers and maker is not None:
                    amount = amount_of(maker, shardings[maker.name], maker.output.dims, scale=graph.tensors[tensor].itemsize)
                    layout = derivation.left[tensor].cuts
                before = found.get((tensor, layout))
                dropped, core_holds = droppable, in_core
                if before is not None:
                    dropped = before.is_dropped and droppable
                    core_holds = in_core or any(holder in core for holder in before.holders)
                found[tensor, layout] = Kept(
                    tensor=tensor,
                    region=op.region if before is None else before.region,
                    amount=amount if before is None else before.amount,
                    holders=(op.name,) if before is None else (*before.holders, op.name),
                    is_dropped=dropped,
                    is_made_twice=made_in_core and core_holds and not dropped,
                )
                if in_core and not made_in_core and op.kind is OperatorKind.EINSUM and before is None:
                    # a copy for each query head is made within the recomputed set, from the one for each key-value head
                    single = operand_bytes(derivation, op, operand, is_expanded=False)
                    if single.base < amount.base:
                        found[tensor, layout] = replace(found[tensor, layout], amount=single)
                        more = amount.scaled((amount.base - single.base) / amount.base)
                        found[op.name, number] = Kept(
                            tensor=tensor, region=op.region, amount=more, holders=(op.name,), is_dropped=True, is_made_twice=False
                        )
            elif saved.what == "softmax":
                logits = op.inputs[0]
                # fused: the gradient overwrites the logits, which stay in the dtype of activations, and lives until the matrix reads it
                fused = profile.fused_cross_entropy
                scale = graph.tensors[logits.tensor].itemsize if fused else saved.itemsize
                maker = graph.producer(logits.tensor)
                holder = maker.name if fused and maker is not None else op.name
                amount = amount_of(op, sharding, logits.dims, scale=scale)
                found[op.name, number] = Kept(
                    tensor=op.name, region=op.region, amount=amount, holders=(holder,), is_dropped=False, is_made_twice=False
                )
            else:
                amount = amount_of(op, sharding, saved.dims or op.output.dims, scale=saved.itemsize)
                found[op.name, number] = Kept(
                    tensor=op.name, region=op.region, amount=amount, holders=(op.name,), is_dropped=in_core, is_made_twice=False
                )
    return list(found.values())


def _keeps_float32(graph: Graph, op: Operator, profile: ExecutionProfile) -> bool:
    """Whether a softmax keeps its result in float32, of which others read a cast."""
    return profile.softmax_keeps_float32 and graph.tensors[op.output.tensor].itemsize < FLOAT32_BYTES
