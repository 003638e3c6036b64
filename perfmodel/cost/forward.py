"""What lives at the end of a region's forward pass, over what it keeps: what its last operators hand on.

Backward passes need more, but where a unit's weights lie in the buffer in which they came, beside their copy, as long as it runs forward.
"""

from __future__ import annotations

from perfmodel.cost.lifetimes import Kept, Moment, Term, operand_bytes, undominated
from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.parallel.algebra.derive import Amount, Derivation
from perfmodel.workload.graph import Operand, Operator, Pass, TensorRole


def forward_moments(derivation: Derivation, kept: list[Kept], *, region: str, sizes: dict[tuple[str, Operand], Amount]) -> list[Moment]:
    """Bytes that live while each operator of `region` runs forward, from the one on that makes the last of what is kept.

    sizes   bytes of operands that are known already, for all walks over one graph
    """
    graph = derivation.graph
    operators = [op for op in graph.operators if op.layer == region]
    moved = {
        t.tensor: t.axes
        for t in derivation.traffic
        if t.phase is Pass.FORWARD and t.kind in (CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER)
    }

    def inputs(op: Operator) -> list[Operand]:
        return [o for o in op.inputs if graph.tensors[o.tensor].role is TensorRole.ACTIVATION]

    def size(op: Operator, operand: Operand) -> Amount:
        key = op.name, operand
        if key not in sizes:
            sizes[key] = operand_bytes(derivation, op, operand)
        return sizes[key]

    readers: dict[str, list[Amount]] = {}
    places: dict[str, int] = {}
    #: tensors that share a storage go by the name of the first
    storage: dict[str, str] = {}
    for place, op in enumerate(operators):
        places |= {op.name: place, op.output.tensor: place}
        for operand in inputs(op):
            readers.setdefault(operand.tensor, []).append(size(op, operand))
        is_view = op.passes_gradient and len(inputs(op)) == 1
        first = inputs(op)[0].tensor if is_view else op.output.tensor
        storage[op.output.tensor] = storage.get(first, first)
    stays = {storage.get(each.tensor, each.tensor) for each in kept} - {operators[-1].output.tensor}
    begins = max((places[each.tensor] for each in kept if each.tensor in places), default=0)
    live: dict[str, tuple[Term, int]] = {}
    moments: list[Moment] = []

    def note(*more: Term) -> None:
        moment: Moment = {}
        for term in (*(term for term, _ in live.values()), *more):
            if term[0].base:
                moment[term] = moment.get(term, 0.0) + 1.0
        moments.append(moment)

    for place, op in enumerate(operators):
        tensor = op.output.tensor
        source, reading, own = storage[tensor], readers.get(tensor, []), size(op, op.output)
        if tensor in moved and place >= begins:
            note((own, frozenset()), (own, frozenset(moved[tensor])))
        if source not in stays:
            # a view takes the place of what it views
            times = len(reading) + (live[source][1] - 1 if source in live else 0)
            live[source] = (reading[0] if reading else own, frozenset()), times
        if place >= begins:
            note()
        for operand in inputs(op):
            name = storage.get(operand.tensor, operand.tensor)
            if name in live and name != source:
                term, left = live.pop(name)
                if left > 1:
                    live[name] = term, left - 1
    return undominated(moments)
