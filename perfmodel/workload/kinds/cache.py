"""Operators of a serving step on a cache: attention to cached tokens, recurrent state updates, and sampling.

Their sizes are columns of a step: decoding sequences, prompts, and the cached tokens of each (`Operator.per_sample`).
"""

from __future__ import annotations

from dataclasses import replace

from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.workload.graph import CacheAttention, Data, FusedAttention, Operand, Operator, OwnTraffic, Pass, Stream

#: Dim that counts the decoding sequences of a step.
SEQUENCES = "sequences"


def cached_attention(op: Operator, work: CacheAttention) -> Operator:
    """Return fused attention `op` as attention to a cache, into which it writes the keys and values of new tokens.

    work   the cache attention, whose heads are replaced by those of `op`
    """
    (fused,) = (work for work in op.forward if isinstance(work, FusedAttention))
    work = replace(
        work,
        heads=fused.heads,
        kv_heads=fused.kv_heads,
        head_dim=fused.head_dim,
        value_head_dim=fused.value_head_dim or fused.head_dim,
    )
    return replace(op, kind="cached_attention", forward=(work,), backward=(), saved=())


def state_update(
    name: str, read: Operand, written: Operand, *, groups: int, state: int, convolved: int, kernel: str, products: float, layer: str
) -> Operator:
    """Return the update of the states [sequences, m] of decoding sequences by one token: a read and a write.

    state, convolved   elements of each group's state, in float32, and inputs of its convolution, in 16 bits
    products           products with the state per token
    """
    dims = {SEQUENCES: 1, "m": groups}
    rows = ((1, SEQUENCES), (groups, "m"))
    states = Data(extent=(*rows, (state, "")), itemsize=4.0)
    inputs = Data(extent=(*rows, (convolved, "")), itemsize=2.0)
    accesses = (states, states, inputs, inputs)
    return Operator(
        name=name,
        kind="state_update",
        dims=dims,
        inputs=(read,),
        output=written,
        forward=(Stream(kernel=kernel, elements=states.extent, accesses=accesses, element_flops=2.0 * products),),
        logical={SEQUENCES: "batch", "m": "state_groups"},
        per_sample=(SEQUENCES,),
        group="attention_core",
        layer=layer,
    )


def sample(op: Operator, *, itemsize: float) -> Operator:
    """Return the sampling of a token per row of logits, in place of the loss `op`: a pass over the rank's shard, and an all-gather."""
    logits = op.inputs[0]
    entries = tuple((size, dim if dim not in op.padded else "") for size, dim in op.extent(logits.dims))
    gathered = OwnTraffic(kind=CollectiveKind.ALL_GATHER, over=op.padded, extent=entries, phase=Pass.FORWARD, itemsize=itemsize)
    return replace(op, kind="sample", inputs=(logits,), backward=(), saved=(), traffic=(gathered,))
