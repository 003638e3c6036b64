"""What lives when in a forward pass: from the operators, the moments at which memory may be largest.

A tensor lives from the operator that makes it to the last that reads it; what is kept for backward stays. A *moment* is what lives while
one of the operators runs, over all that is kept in the end: of what is kept, less is there while it is still being made.

Backward passes mostly need more. But where a unit's weights lie in the buffer in which they came, beside their copy, as long as it runs
forward, or where keys of other ranks and scores live together only forward, the peak is here; so it is where a layer runs forward
again, with the gradient of its output beside it.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from perfmodel.cost.memory.live import Kept, LiveBytes, Term, always, entering, is_streamed, operand_bytes, streamed_terms, undominated
from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.frameworks.profile import ExecutionProfile
from perfmodel.parallel.algebra.derive import Amount, Derivation
from perfmodel.parallel.layout import Recompute
from perfmodel.workload.graph import Operand, Operator, Pass, Region, TensorRole


@dataclass(slots=True)
class _Forward:
    """Walks operators forward and notes their moments."""

    derivation: Derivation
    profile: ExecutionProfile
    operators: Sequence[Operator]
    sizes: dict[tuple[str, Operand], Amount]
    live: dict[str, tuple[Term, int]] = field(default_factory=dict)
    """Tensors that do not stay, and how many reads are left."""
    awaited: list[tuple[float, Term]] = field(default_factory=list)
    """What stays and is not there yet, with the place of the operator that it comes with, or before."""
    beside: dict[str, list[Term]] = field(default_factory=dict)
    """What a group of operators is handed and neither keeps nor frees before it ends."""
    moments: list[LiveBytes] = field(default_factory=list)

    def size(self, op: Operator, operand: Operand) -> Amount:
        key = op.name, operand
        if key not in self.sizes:
            self.sizes[key] = operand_bytes(self.derivation, op, operand)
        return self.sizes[key]

    def as_made(self, tensor: str) -> Amount:
        """A tensor as its maker leaves it."""
        maker = self.derivation.graph.producer(tensor)
        assert maker is not None
        return self.size(maker, maker.output)

    def inputs(self, op: Operator) -> list[Operand]:
        return [o for o in op.inputs if self.derivation.graph.tensors[o.tensor].role is TensorRole.ACTIVATION]

    def note(self, *more: Term) -> None:
        moment: LiveBytes = {}
        for term in (*(term for term, _ in self.live.values()), *more):
            moment[term] = moment.get(term, 0.0) + 1.0
        for _, term in self.awaited:
            moment[term] = moment.get(term, 0.0) - 1.0
        self.moments.append(moment)

    def reach(self, place: float) -> None:
        self.awaited = [(comes, term) for comes, term in self.awaited if comes > place]

    def await_all(self, stays: Sequence[Kept], gathered: Container[tuple[str, str]]) -> None:
        """Of a gathered tensor, and of copies, a reader has what it needs before it runs."""
        made = {op.output.tensor: place for place, op in enumerate(self.operators)}
        places = {op.name: place for place, op in enumerate(self.operators)}
        for each in stays:
            before_first = min((places[name] for name in each.holders if name in places), default=0) - 0.5
            is_gathered = any((name, each.tensor) in gathered for name in each.holders)
            comes = before_first if is_gathered else made.get(each.tensor, places.get(each.tensor, before_first))
            self.awaited.append((comes, (each.amount, frozenset())))

    def handed(self, op: Operator) -> list[Operand]:
        """Inputs of the group that the operator is of, which is one function: it holds them until it ends."""
        graph = self.derivation.graph
        makers = [(operand, graph.producer(operand.tensor)) for operand in self.inputs(op)]
        return [operand for operand, maker in makers if op.group and (maker is None or maker.group != op.group)]

    def as_handed(self, op: Operator, operand: Operand) -> Amount:
        return operand_bytes(self.derivation, op, operand, is_expanded=False)

    def run(self, stays: Sequence[Kept], *, keeps_handed: bool) -> None:
        joined = self.derivation.joined
        tensors = dict.fromkeys(operand.tensor for op in self.operators for operand in op.operands)
        traffic = [t for tensor in tensors for t in self.derivation.traffic_of(tensor, Pass.FORWARD)]
        summed = {t.tensor: t.axes for t in traffic if t.kind in (CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER)}
        gathered = {(t.operator, t.tensor): (t.amount, t.axes) for t in traffic if t.kind is CollectiveKind.ALL_GATHER}
        self.await_all(stays, gathered)
        readers: dict[str, list[Amount]] = {}
        #: partial sums that wait to be added up before they are reduced
        apart = {*joined, *joined.values()}
        #: tensors that share a storage go by the name of the first
        storage: dict[str, str] = {}
        for op in self.operators:
            handed = self.handed(op)
            for operand in self.inputs(op):
                read = self.as_made(operand.tensor) if operand.tensor in apart else self.size(op, operand)
                if operand in handed:
                    read = self.as_handed(op, operand)
                readers.setdefault(operand.tensor, []).append(read.scaled(op.parts.get(operand.tensor, 1.0)))
            is_view = op.passes_gradient and len(self.inputs(op)) == 1
            first = self.inputs(op)[0].tensor if is_view else op.output.tensor
            storage[op.output.tensor] = storage.get(first, first)
        staying = {storage.get(each.tensor, each.tensor) for each in stays}
        ends = {op.group: place for place, op in enumerate(self.operators) if op.group}
        ending: dict[int, list[str]] = {}
        twice = set() if keeps_handed else {each.tensor for each in stays if each.is_made_twice} & storage.keys()
        copies = {each.tensor for each in stays if each.is_dropped}
        for op in self.operators:
            beside = self.beside.setdefault(op.group, [])
            for operand in self.handed(op):
                single, read = self.as_handed(op, operand), self.size(op, operand)
                if operand.tensor in twice:
                    # copies are kept, beside which lies what they are made of
                    beside.extend(always([single]))
                elif op.is_product and read.base > single.base and copies.isdisjoint((op.name, operand.tensor)):
                    # copies for each query head, which nothing keeps
                    beside.extend(always([read]))
        for place, op in enumerate(self.operators):
            tensor = op.output.tensor
            source, reading, own = storage[tensor], readers.get(tensor, []), self.size(op, op.output)
            self.reach(place - 0.5)
            if self.profile.kernels.redistribution_copies:
                for operand in self.inputs(op):
                    if (op.name, operand.tensor) in gathered and not is_streamed(op, operand):
                        self.note(gathered[op.name, operand.tensor])
            self.reach(place)
            if tensor in summed and tensor not in apart:
                self.note((own, frozenset()), (own, summed[tensor]))
            for operand in self.inputs(op):
                if operand.tensor in joined:
                    self.note((self.as_made(operand.tensor), summed[joined[operand.tensor]]))
            if source not in staying:
                # a view takes the place of what it views
                times = len(reading) + (self.live[source][1] - 1 if source in self.live else 0)
                self.live[source] = (reading[0] if reading else own, frozenset()), times
            self.note(*self.beside[op.group], *streamed_terms(self.derivation, op))
            handed = self.handed(op)
            for operand in self.inputs(op):
                name = storage.get(operand.tensor, operand.tensor)
                if name != source:
                    ending.setdefault(ends[op.group] if operand in handed else place, []).append(name)
            for name in ending.pop(place, []):
                if name in self.live:
                    term, left = self.live.pop(name)
                    if left > 1:
                        self.live[name] = term, left - 1


def walk_forward(
    derivation: Derivation,
    profile: ExecutionProfile,
    operators: Sequence[Operator],
    stays: Sequence[Kept],
    *,
    keeps_handed: bool,
    sizes: dict[tuple[str, Operand], Amount],
) -> list[LiveBytes]:
    """Bytes that live while each of the operators runs forward, over `stays`, which they make or get, when all of it is there.

    keeps_handed   of what a group of operators is handed the tensors themselves are kept, not copies that it makes of them
    sizes          bytes of operands that are known already, for all walks over one graph
    """
    walk = _Forward(derivation=derivation, profile=profile, operators=operators, sizes=sizes)
    walk.run(stays, keeps_handed=keeps_handed)
    return walk.moments


def forward_moments(
    derivation: Derivation,
    profile: ExecutionProfile,
    kept: Sequence[Kept],
    *,
    region: Region,
    recompute: Recompute,
    sizes: dict[tuple[str, Operand], Amount],
) -> list[LiveBytes]:
    """Bytes that live while each operator of `region` runs forward for the first time, over what is kept of it."""
    operators = derivation.graph.operators_of(region.name)
    stays = [each for each in kept if each.region == region.name]
    match recompute:
        case Recompute.SELECTIVE:
            stays = [each for each in stays if not each.is_dropped]
        case Recompute.FULL:
            given = entering(derivation.graph, region)
            stays = [each for each in stays if each.tensor in given]
    keeps_handed = recompute is Recompute.SELECTIVE
    return undominated(walk_forward(derivation, profile, operators, stays, keeps_handed=keeps_handed, sizes=sizes))
