"""The recurrence of one LSTM layer; the input projection and the biases are operators before it."""

from __future__ import annotations

from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.workload.graph import DimRoles, Operand, Operator
from perfmodel.workload.work import Extent, OwnTraffic, Pass, Product, Stream, passes


def lstm(name: str, gates: str, weight: str, output: str, *, batch: int, seq_len: int, hidden: int, layer: str = "") -> Operator:
    """Return gates[b,s,4,e] and W[4,e,k] -> h[b,s,e], step by step in s: gates + W h, then i, f, g, o, the cell and h; zero initial state.

    The time steps, the four gates and k are unsplit. Where e is sharded, a step needs all of the previous h: an all-gather of h[b,e] per
    step in forward, and in backward a reduce-scatter of its gradient, to which each shard of the gates adds. The first step needs neither.

    Backward has a product per step for the gradient of h, and one over all steps for that of W. Saved: the four gates, the cell and the
    gathered h of each step.

    Source: sharding algebra, section 4 (recurrent operator).
    """
    b: Extent = ((batch, "b"),)
    s: Extent = ((seq_len, "s"),)
    e: Extent = ((hidden, "e"),)
    gathered: Extent = ((hidden, ""),)
    four: Extent = ((4, ""),)
    step: Extent = (*b, *e)
    step_gates: Extent = (*four, *step)
    return Operator(
        name=name,
        kind="lstm",
        dims={"b": batch, "s": seq_len, "e": hidden},
        inputs=(Operand(tensor=gates, dims=("b", "s", "", "e")), Operand(tensor=weight, dims=("", "e", ""))),
        output=Operand(tensor=output, dims=("b", "s", "e")),
        forward=(
            Product(m=b, n=(*four, *e), k=gathered, repeats=seq_len),
            # reads both parts of the gates and the cell, writes the gates, the cell and h
            Stream(kernel="lstm_cell", elements=step_gates, accesses=passes(*(step_gates,) * 3, *(step,) * 3), repeats=seq_len),
        ),
        backward=(
            # reads the gates, two cells, two gradients; writes the gradients of the gates and of the cell
            Stream(kernel="lstm_cell", elements=step_gates, accesses=passes(*(step_gates,) * 2, *(step,) * 5), repeats=seq_len),
            Product(m=b, n=gathered, k=(*four, *e), repeats=seq_len),
            Product(m=(*four, *e), n=gathered, k=(*b, *s)),
        ),
        traffic=tuple(
            OwnTraffic(kind=kind, over=("e",), extent=(*b, *gathered), phase=phase, repeats=seq_len - 1)
            for kind, phase in ((CollectiveKind.ALL_GATHER, Pass.FORWARD), (CollectiveKind.REDUCE_SCATTER, Pass.BACKWARD))
            if seq_len > 1
        ),
        roles=DimRoles(unsplit=("s",)),
        saved=passes((*four, *b, *s, *e), (*b, *s, *e), (*b, *s, *gathered)),
        layer=layer,
    )
