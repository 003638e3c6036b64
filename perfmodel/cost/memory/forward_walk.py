"""Forward walk: candidate memory peaks of a forward pass, from its operators.

A tensor is alive from the operator that produces it to its last consumer; saved tensors stay for backward. A *moment* is the set of tensors
alive while one operator runs, relative to all saved tensors at the end of the pass. Saved tensors that are not yet produced count negative.

The peak is usually in the backward pass. It is in the forward pass in three cases:

- The weights of a unit stay in the all-gather buffer in addition to their copy as long as the unit runs.
- Keys of other ranks and attention scores are alive together in forward only.
- A layer is recomputed while the gradient of its output is alive.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from perfmodel.cost.memory.live import LiveBytes, SavedTensor, Term, Terms
from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.frameworks.profile import ExecutionProfile
from perfmodel.parallel.algebra.derive import Amount, ShardedGraph
from perfmodel.parallel.choices import Recompute
from perfmodel.workload.graph import Operator, Region
from perfmodel.workload.work import Pass


@dataclass(slots=True, kw_only=True)
class _Forward:
    """Walks operators forward and records their moments.

    summed, gathered   reduction axes of a tensor; the all-gather buffer of an operator's input
    partial_sums  partial sums that are added to others before they are reduced
    storage       tensors that share a storage, by the name of the first
    positions     positions of operators; outputs, ends: of the producer of a tensor, and of the last operator of a group
    readers       each tensor in the layouts of its consumers
    live          tensors that are not saved, with the number of reads that remain
    awaited       saved tensors not yet produced, with the position at which they are
    group_terms   tensors alive throughout a group of operators that neither saves nor frees them
    """

    sharded: ShardedGraph
    profile: ExecutionProfile
    operators: Sequence[Operator]
    terms: Terms
    summed: dict[str, frozenset[str]] = field(default_factory=dict)
    gathered: dict[tuple[str, str], Term] = field(default_factory=dict)
    partial_sums: set[str] = field(default_factory=set)
    storage: dict[str, str] = field(default_factory=dict)
    positions: dict[str, int] = field(default_factory=dict)
    outputs: dict[str, int] = field(default_factory=dict)
    ends: dict[str, int] = field(default_factory=dict)
    readers: dict[str, list[Term]] = field(default_factory=dict)
    live: dict[str, tuple[Term, int]] = field(default_factory=dict)
    awaited: list[tuple[float, Term]] = field(default_factory=list)
    group_terms: dict[str, list[Term]] = field(default_factory=dict)
    moments: list[LiveBytes] = field(default_factory=list)

    def as_made(self, tensor: str) -> Amount:
        """Return the amount of a tensor in the layout of its producer."""
        maker = self.sharded.graph.producer(tensor)
        assert maker is not None
        return self.terms.size(maker, maker.output)

    def note(self, *more: Term) -> None:
        moment: LiveBytes = {}
        for term, _ in self.live.values():
            moment[term] = moment.get(term, 0.0) + 1.0
        for term in more:
            moment[term] = moment.get(term, 0.0) + 1.0
        for _, term in self.awaited:
            moment[term] = moment.get(term, 0.0) - 1.0
        self.moments.append(moment)

    def advance(self, position: float) -> None:
        self.awaited = [(available_at, term) for available_at, term in self.awaited if available_at > position]

    def schedule_saved(self, stays: Sequence[SavedTensor]) -> None:
        """Set when gathered tensors and copies are ready: before their first consumer runs."""
        positions = self.positions
        for saved in stays:
            before_first = min([positions[name] for name in saved.holders if name in positions], default=0) - 0.5
            is_gathered = not self.gathered.keys().isdisjoint([(name, saved.tensor) for name in saved.holders])
            available_at = before_first if is_gathered else self.outputs.get(saved.tensor, positions.get(saved.tensor, before_first))
            self.awaited.append((available_at, self.terms.number(saved.amount)))

    def set_edges(self) -> None:
        """Set the reductions and gathers of each tensor, the storages that tensors share, and the layout of each consumer."""
        sharded, number = self.sharded, self.terms.number
        self.partial_sums = {*sharded.joined, *sharded.joined.values()}
        for position, op in enumerate(self.operators):
            self.positions[op.name] = self.outputs[op.output.tensor] = self.ends[op.group] = position
            for operand in op.operands:
                for row in sharded.traffic_of(operand.tensor, Pass.FORWARD):
                    if row.kind in (CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER):
                        self.summed[operand.tensor] = row.axes
                    elif row.kind is CollectiveKind.ALL_GATHER:
                        self.gathered[row.operator, operand.tensor] = number(row.amount, row.axes)
            inputs, handed = sharded.activations[op.name], sharded.handed[op.name]
            for operand in inputs:
                read = self.as_made(operand.tensor) if operand.tensor in self.partial_sums else self.terms.size(op, operand)
                if operand in handed:
                    read = self.terms.size(op, operand, is_expanded=False)
                self.readers.setdefault(operand.tensor, []).append(number(read.scaled(op.parts.get(operand.tensor, 1.0))))
            first = inputs[0].tensor if op.passes_gradient and len(inputs) == 1 else op.output.tensor
            self.storage[op.output.tensor] = self.storage.get(first, first)

    def set_group_terms(self, stays: Sequence[SavedTensor], *, keeps_handed: bool) -> None:
        twice, copies = set[str](), set[str]()
        for saved in stays:
            if saved.is_made_twice and not keeps_handed and saved.tensor in self.storage:
                twice.add(saved.tensor)
            if saved.is_dropped:
                copies.add(saved.tensor)
        for op in self.operators:
            group_terms = self.group_terms.setdefault(op.group, [])
            for operand in self.sharded.handed[op.name]:
                single, read = self.terms.size(op, operand, is_expanded=False), self.terms.size(op, operand)
                if operand.tensor in twice:
                    # copies are saved, and the originals are alive with them
                    group_terms.append(self.terms.number(single))
                elif op.is_product and read.base > single.base and copies.isdisjoint((op.name, operand.tensor)):
                    # copies for each query head, which are not saved
                    group_terms.append(self.terms.number(read))

    def run(self, stays: Sequence[SavedTensor], *, keeps_handed: bool) -> None:
        self.set_edges()
        self.schedule_saved(stays)
        self.set_group_terms(stays, keeps_handed=keeps_handed)
        sharded, number, storage = self.sharded, self.terms.number, self.storage
        staying = {storage.get(saved.tensor, saved.tensor) for saved in stays}
        ending: dict[int, list[str]] = {}
        for position, op in enumerate(self.operators):
            tensor, inputs, handed = op.output.tensor, sharded.activations[op.name], sharded.handed[op.name]
            source, reading, size = storage[tensor], self.readers.get(tensor, []), self.terms.size(op, op.output)
            self.advance(position - 0.5)
            if self.profile.kernels.redistribution_copies:
                for operand in inputs:
                    if (op.name, operand.tensor) in self.gathered and not op.streams(operand):
                        self.note(self.gathered[op.name, operand.tensor])
            self.advance(position)
            if tensor in self.summed and tensor not in self.partial_sums:
                self.note(number(size), number(size, self.summed[tensor]))
            for operand in inputs:
                if operand.tensor in sharded.joined:
                    self.note(number(self.as_made(operand.tensor), self.summed[sharded.joined[operand.tensor]]))
            if source not in staying:
                # a view replaces the tensor that it views
                times = len(reading) + (self.live[source][1] - 1 if source in self.live else 0)
                self.live[source] = reading[0] if reading else number(size), times
            self.note(*self.group_terms[op.group], *self.terms.streamed(op))
            for operand in inputs:
                name = storage.get(operand.tensor, operand.tensor)
                if name != source:
                    ending.setdefault(self.ends[op.group] if operand in handed else position, []).append(name)
            for name in ending.pop(position, []):
                if name in self.live:
                    term, left = self.live.pop(name)
                    if left > 1:
                        self.live[name] = term, left - 1


def walk_forward(
    sharded: ShardedGraph,
    profile: ExecutionProfile,
    operators: Sequence[Operator],
    stays: Sequence[SavedTensor],
    *,
    keeps_handed: bool,
    terms: Terms,
) -> list[LiveBytes]:
    """Return the live bytes while each operator runs forward, relative to all of `stays`, the saved tensors that they produce or receive.

    keeps_handed   of the inputs of a group of operators the tensors themselves are saved, not the copies that the group makes of them
    terms          shared by all walks over one graph
    """
    walk = _Forward(sharded=sharded, profile=profile, operators=operators, terms=terms)
    walk.run(stays, keeps_handed=keeps_handed)
    return walk.moments


def forward_moments(
    sharded: ShardedGraph, profile: ExecutionProfile, kept: Iterable[SavedTensor], *, region: Region, recompute: Recompute, terms: Terms
) -> list[LiveBytes]:
    """Return the live bytes while each operator of `region` runs forward for the first time, relative to its saved tensors."""
    stays = [saved for saved in kept if saved.region == region.name]
    match recompute:
        case Recompute.SELECTIVE:
            stays = [saved for saved in stays if not saved.is_dropped]
        case Recompute.FULL:
            stays = [saved for saved in stays if saved.tensor in sharded.entering[region.name]]
    operators = sharded.graph.operators_of(region.name)
    is_selective = recompute is Recompute.SELECTIVE
    return terms.undominated(walk_forward(sharded, profile, operators, stays, keeps_handed=is_selective, terms=terms))
