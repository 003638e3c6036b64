"""Operators of a serving step that read and write a cache: attention to cached tokens, states taken one token further, and sampling.

Their sizes are columns of a step: sequences that decode, prompts, and the tokens that the cache holds of each (`Operator.per_sample`).
"""

from __future__ import annotations

from dataclasses import replace

from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.workload.graph import CacheAttention, Data, FusedAttention, Operand, Operator, OwnTraffic, Pass, Stream

#: Dim that counts the sequences of a step that decode.
SEQUENCES = "sequences"


def cached_attention(op: Operator, work: CacheAttention) -> Operator:
    """Fused attention `op` to a cache, in which the keys and values of new tokens come to lie.

    work   with the heads of the fused attention, whatever it has
    """
    (fused,) = (each for each in op.forward if isinstance(each, FusedAttention))
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
    """States [sequences, m] of sequences that decode, taken one token further: read and written.

    state, convolved   elements of each group's state, in float32, and inputs of its convolution, in 16 bits
    products           with the state, of a token
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
    """A token for each row of logits, in the place of the loss `op`: a pass over the part of a rank, and all of them gathered."""
    logits = op.inputs[0]
    entries = tuple((size, dim if dim not in op.padded else "") for size, dim in op.extent(logits.dims))
    gathered = OwnTraffic(kind=CollectiveKind.ALL_GATHER, over=op.padded, extent=entries, phase=Pass.FORWARD, itemsize=itemsize)
    return replace(op, kind="sample", inputs=(logits,), backward=(), saved=(), traffic=(gathered,))
