"""Candidate memory peaks of the forward and the backward pass of a region, from its operators.

A *moment* is the set of tensors alive while one operator runs, a sum of amounts (`LiveBytes`). It is evaluated on columns of plans like any
other row of a program. The largest is the region's peak.

Forward: a tensor is alive from the operator that produces it to its last consumer; saved tensors stay for backward. A moment is relative to
all saved tensors at the end of the pass: those that are not yet produced count negative. The peak is usually in the backward pass. It is in
the forward pass in three cases:

- The weights of a unit stay in the all-gather buffer in addition to their copy as long as the unit runs.
- Keys of other ranks and attention scores are alive together in forward only.
- A layer is recomputed while the gradient of its output is alive.

Backward runs the operators in reverse. Each reads the gradient of its output and its saved tensors, and writes the gradients of its inputs.
Its saved tensors are then freed, unless an operator that runs later in backward reads them too. A moment is relative to the saved tensors
of the region when its backward begins. Weight gradients either are accumulated at once, or stay until the unit is reduced (fully_shard).
One walk records the moments of both.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import repeat

from perfmodel.cost.memory.live import LiveBytes, SavedTensor, Term, Terms
from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.frameworks.profile import ExecutionProfile
from perfmodel.parallel.algebra.derive import Amount, ExchangePosition, ShardedGraph, Traffic, extent_amount
from perfmodel.parallel.choices import Recompute
from perfmodel.workload.graph import Operand, Operator, Region
from perfmodel.workload.work import Pass

# --- forward ------------------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class _Forward:
    """Walks operators forward and records their moments.

    summed, gathered   reduction axes of a tensor; the all-gather buffer of an operator's input
    partial_sums  partial sums that are added to others before they are reduced
    storage       tensors that share a storage, by the name of the first
    positions     positions of operators; outputs, ends: of the producer of a tensor, and of the last operator of a group
    readers       each tensor in the layouts of its consumers
    staying       storages of saved tensors
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
    staying: set[str] = field(default_factory=set)
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
        """Record a moment: the tensors that are alive, and these terms."""
        moment: LiveBytes = {}
        for term, _ in self.live.values():
            moment[term] = moment.get(term, 0.0) + 1.0
        for term in more:
            moment[term] = moment.get(term, 0.0) + 1.0
        for _, term in self.awaited:
            moment[term] = moment.get(term, 0.0) - 1.0
        self.moments.append(moment)

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

    def set_saved(self, stays: Sequence[SavedTensor], *, keeps_handed: bool) -> None:
        """Set when saved tensors are ready, gathered ones and copies before their first consumer runs, and the terms of groups."""
        positions, twice, copies = self.positions, set[str](), set[str]()
        for saved in stays:
            first, is_gathered = float(len(positions)), False
            for name in saved.holders:
                first = min(first, positions.get(name, first))
                is_gathered |= (name, saved.tensor) in self.gathered
            before_first = (first if first < len(positions) else 0.0) - 0.5
            available_at = before_first if is_gathered else self.outputs.get(saved.tensor, positions.get(saved.tensor, before_first))
            self.awaited.append((available_at, self.terms.number(saved.amount)))
            self.staying.add(self.storage.get(saved.tensor, saved.tensor))
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

    def walk(self, stays: Sequence[SavedTensor], *, keeps_handed: bool) -> list[LiveBytes]:
        """Return the live bytes while each operator runs, relative to all of `stays`, the saved tensors that they produce or receive.

        keeps_handed   of the inputs of a group of operators the tensors themselves are saved, not the copies that the group makes of them
        """
        self.set_edges()
        self.set_saved(stays, keeps_handed=keeps_handed)
        sharded, number, storage = self.sharded, self.terms.number, self.storage
        ending: dict[int, list[str]] = {}
        for position, op in enumerate(self.operators):
            tensor, inputs, handed = op.output.tensor, sharded.activations[op.name], sharded.handed[op.name]
            source, reading, size = storage[tensor], self.readers.get(tensor, []), self.terms.size(op, op.output)
            self.awaited = [entry for entry in self.awaited if entry[0] > position - 0.5]
            if self.profile.kernels.redistribution_copies:
                for operand in inputs:
                    if (op.name, operand.tensor) in self.gathered and not op.streams(operand):
                        self.note(self.gathered[op.name, operand.tensor])
            self.awaited = [entry for entry in self.awaited if entry[0] > position]
            if tensor in self.summed and tensor not in self.partial_sums:
                self.note(number(size), number(size, self.summed[tensor]))
            for operand in inputs:
                if operand.tensor in sharded.joined:
                    self.note(number(self.as_made(operand.tensor), self.summed[sharded.joined[operand.tensor]]))
            if source not in self.staying:
                # a view replaces the tensor that it views
                times = len(reading) + (self.live[source][1] - 1 if source in self.live else 0)
                self.live[source] = reading[0] if reading else number(size), times
            self.note(*self.group_terms[op.group], *(self.terms.streamed(op) if op.streamed else ()))
            for operand in inputs:
                name = storage.get(operand.tensor, operand.tensor)
                if name != source:
                    ending.setdefault(self.ends[op.group] if operand in handed else position, []).append(name)
            for name in ending.pop(position, []):
                if name in self.live:
                    term, left = self.live.pop(name)
                    if left > 1:
                        self.live[name] = term, left - 1
        return self.moments


def forward_moments(
    sharded: ShardedGraph, profile: ExecutionProfile, saved: Sequence[SavedTensor], *, region: Region, recompute: Recompute, terms: Terms
) -> list[LiveBytes]:
    """Return the live bytes while each operator of `region` runs forward for the first time, relative to its saved tensors.

    saved   of the region, without recomputation
    terms   shared by all walks over one graph
    """
    is_selective = recompute is Recompute.SELECTIVE
    if is_selective:
        saved = [tensor for tensor in saved if not tensor.is_dropped]
    elif recompute is Recompute.FULL:
        saved = [tensor for tensor in saved if tensor.tensor in sharded.entering[region.name]]
    walk = _Forward(sharded=sharded, profile=profile, operators=sharded.graph.operators_of(region.name), terms=terms)
    return terms.undominated(walk.walk(saved, keeps_handed=is_selective))


# --- backward -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Storage:
    """Bytes that several gradients may share: the backward of an addition passes the gradient of its output to all inputs.

    full_gradient   full-size gradient to which the gradient of a slice is padded before it is read
    is_arrived      it has the layout in which the tensor's producer left it
    """

    terms: tuple[Term, ...]
    full_gradient: tuple[Term, ...] = ()
    is_arrived: bool = False
    references: int = 1


@dataclass(slots=True, kw_only=True)
class _Backward:
    """Walks one region backward and records its moments.

    saved, core    saved tensors of the region, and the operators that selective recomputation runs again
    lives          saved or recomputed tensors, with the operators in whose remaining backward passes they are read
    is_recomputed  recomputation has run, or there is none
    delayed        products whose weight gradients are delayed, with their weight gradients and output gradients
    live           tensors alive now, if weight gradients are accumulated at once; live_if_kept: if they stay
    gradients      storages of tensors whose gradient has been produced
    moments, moments_if_kept   moments of both cases
    """

    sharded: ShardedGraph
    profile: ExecutionProfile
    region: Region
    operators: Sequence[Operator]
    terms: Terms
    saved: Sequence[SavedTensor]
    core: Collection[str]
    recompute: Recompute
    regathers: Collection[tuple[str, str]]
    is_in_buffer: bool
    delays_weight_gradients: bool
    lives: list[tuple[Term, set[str]]] = field(default_factory=list)
    is_recomputed: bool = False
    delayed: list[tuple[Operator, list[Term], _Storage | None]] = field(default_factory=list)
    live: LiveBytes = field(default_factory=dict)
    live_if_kept: LiveBytes = field(default_factory=dict)
    moments: list[LiveBytes] = field(default_factory=list)
    moments_if_kept: list[LiveBytes] = field(default_factory=list)
    gradients: dict[str, _Storage] = field(default_factory=dict)

    def add(self, terms: Sequence[Term], factor: float = 1.0, *, only_at_once: bool = False) -> None:
        """Add terms to the live bytes of both cases, or only of weight gradients that are accumulated at once."""
        for live in (self.live,) if only_at_once else (self.live, self.live_if_kept):
            for term in terms:
                value = live.get(term, 0.0) + factor
                if abs(value) < 1e-12:
                    live.pop(term, None)
                else:
                    live[term] = value

    def note(self, *temporary: Term) -> None:
        for live, moments in ((self.live, self.moments), (self.live_if_kept, self.moments_if_kept)):
            moment = dict(live)
            for term in temporary:
                moment[term] = moment.get(term, 0.0) + 1.0
            moments.append(moment)

    def free(self, storage: _Storage) -> None:
        storage.references -= 1
        if storage.references == 0:
            self.add(storage.terms, -1.0)

    def freed_after(self, op: Operator) -> list[Term]:
        """Return the terms that no later backward pass reads."""
        freed = []
        for term, readers in self.lives:
            if op.name in readers:
                readers.remove(op.name)
                if not readers:
                    freed.append(term)
        return freed

    def run(self) -> None:
        graph, operators = self.sharded.graph, self.operators
        self.is_recomputed = self.recompute is Recompute.NONE
        self.set_lives(self.core if self.recompute is Recompute.SELECTIVE else ())
        for op in operators:
            is_read_later = False
            for reader, _ in graph.consumers(op.output.tensor):
                is_read_later |= reader.layer != self.region.name
            if graph.tensors[op.output.tensor].has_gradient and (is_read_later or (op is operators[-1] and op.name != graph.loss)):
                # the gradient of a tensor that later regions read exists when the region's backward begins
                storage = _Storage(() if self.is_in_buffer else (self.terms.number(self.terms.size(op, op.output)),))
                self.gradients[op.output.tensor] = storage
                self.add(storage.terms)
                self.note()
        position = self.sharded.exchange_position
        # torch recomputes when backward first reads a saved tensor, other frameworks before backward begins
        lazily = self.profile.activations.recompute_stops_early
        is_past_experts = not self.delays_weight_gradients
        for op in reversed(operators):
            if not is_past_experts and position.get(op.name) is ExchangePosition.BEFORE:
                is_past_experts = True
                self.make_weight_gradients()
            incoming = self.arrived(op) if lazily else None
            if not self.is_recomputed:
                self.run_again_for(op, lazily=lazily)
            self.step(op, incoming if lazily else self.arrived(op))
        if self.delayed:
            self.make_weight_gradients()

    def set_lives(self, core: Collection[str]) -> None:
        """Set the lifetimes of saved tensors.

        The output of a recomputed function is read by its consumers, and its saved tensors by its own operators. Its inputs stay alive for
        all of it, in addition to any copies that it makes.
        """
        inside, outputs, names = list[Operator](), set[str](), set[str]()
        for op in self.operators:
            names.add(op.name)
            if op.name in core:
                inside.append(op)
                outputs.add(op.output.tensor)
        for kept in self.saved:
            term, holders = self.terms.number(kept.amount), names.intersection(kept.holders)
            within = holders.intersection(core)
            if kept.is_made_twice and core:
                self.lives.append((term, within))
                holders -= within
            if within and not kept.is_dropped and kept.tensor not in outputs and self.sharded.graph.producer(kept.tensor) is not None:
                holders |= {inside[0].name}
            self.lives.append((term, holders))

    def run_again_for(self, op: Operator, *, lazily: bool) -> None:
        """Run the recomputation, if the operator is the first in backward that reads a recomputed tensor."""
        if self.recompute is Recompute.FULL and not (lazily and op.passes_gradient):
            given = self.sharded.entering[self.region.name]
            lives, recomputed, operators = [kept for kept in self.saved if kept.tensor not in given], self.saved, self.operators
            keeps_handed = False
        elif op.name in self.core or any(kept.is_dropped and op.name in kept.holders for kept in self.saved):
            lives = recomputed = [kept for kept in self.saved if kept.is_dropped or kept.is_made_twice]
            operators = [operator for operator in self.operators if operator.name in self.core]
            keeps_handed = True
        else:
            return
        self.is_recomputed = True
        self.add([self.terms.number(kept.amount) for kept in lives])
        if lazily:
            last = max((index for index, operator in enumerate(operators) if operator.saved), default=-1)
            # an operator that saves only its inputs need not run again
            runs = last >= 0 and any(saved.of is None or saved.of == len(operators[last].inputs) for saved in operators[last].saved)
            operators = operators[: last + runs]
        walk = _Forward(sharded=self.sharded, profile=self.profile, operators=operators, terms=self.terms)
        for moment in walk.walk(recomputed, keeps_handed=keeps_handed):
            for live, moments in ((self.live, self.moments), (self.live_if_kept, self.moments_if_kept)):
                moments.append({term: live.get(term, 0.0) + moment.get(term, 0.0) for term in {**live, **moment}})

    def make_weight_gradients(self) -> None:
        """Compute delayed weight gradients one after another. Each keeps its input and the gradient of its output until then."""
        for op, weight_terms, incoming in self.delayed:
            self.note(*weight_terms)
            self.add(weight_terms)
            if incoming is not None:
                self.free(incoming)
            self.add(self.freed_after(op), -1.0)
            self.add(weight_terms, -1.0, only_at_once=True)
        self.delayed.clear()

    def step(self, op: Operator, incoming: _Storage | None) -> None:
        """Run the backward pass of an operator, from the gradient of its output to those of its inputs."""
        graph, terms = self.sharded.graph, self.terms
        weights, inputs = list[Operand](), list[Operand]()
        for operand in op.inputs:
            if operand.tensor in graph.trained:
                weights.append(operand)
            elif operand.tensor in graph.activations_with_gradient:
                inputs.append(operand)
        is_delayed = self.delays_weight_gradients and op.is_product and bool(weights)
        freed = [] if is_delayed else self.freed_after(op)
        if not graph.tensors[op.output.tensor].has_gradient:
            self.add(freed, -1.0)
            return
        weight_terms: list[Term] = []
        for operand in weights if op.makes_weight_gradients else ():
            weight_terms.append(terms.number(terms.size(op, operand)))
        if is_delayed:
            self.delayed.append((op, weight_terms, incoming))
            weight_terms = []
        input_gradients: list[tuple[Operand, _Storage]] = []
        arriving: list[Term] = []
        if op.passes_gradient:
            if incoming is not None:
                incoming.references += len(inputs)
                input_gradients += zip(inputs, repeat(incoming))
        else:
            for operand in inputs:
                tensor = graph.tensors[operand.tensor]
                storage = _Storage((terms.number(terms.size(op, operand)),) if tensor.is_stored else ())
                if operand.tensor in op.parts:
                    itemsize = tensor.itemsize * op.parts[operand.tensor]
                    full = self.sharded.operand_bytes(op, operand, itemsize=itemsize, is_expanded=False)
                    storage.full_gradient = (terms.number(full),)
                arriving += storage.terms
                input_gradients.append((operand, storage))
            if op.name != graph.loss:  # the loss is a moment of its own: its copies are in the execution profile
                self.note(*weight_terms, *self.temporary_terms(op), *arriving)
            self.add(arriving)
        self.add(weight_terms)
        if incoming is not None and not is_delayed:
            self.free(incoming)
        self.add(freed, -1.0)
        for operand, storage in input_gradients:
            self.arrive(operand, storage)
        self.add(weight_terms, -1.0, only_at_once=True)

    def temporary_terms(self, op: Operator) -> list[Term]:
        """Return the terms that are alive only during the operator's backward pass: inputs gathered again, and workspaces."""
        sharded, number, terms = self.sharded, self.terms.number, list[Term]()
        for operand in op.inputs:
            if (operand.tensor, op.name) in self.regathers:
                terms.append(number(self.terms.size(op, operand), sharded.axes_of(operand.tensor, Pass.FORWARD)))
        for data in op.scratch:
            scratch = extent_amount(op, sharded.shardings[op.name], data.extent, scale=sharded.graph.itemsize(op, data))
            terms.append(number(scratch))
        if op.kind == "embedding":
            # the gradient of tokens whose rows are on other ranks is masked, in a copy
            terms.append(number(self.terms.size(op, op.output), sharded.left[op.output.tensor].partial))
        return [*terms, *2 * self.terms.streamed(op)] if op.streamed else terms  # keys and values, and their gradients

    def arrive(self, operand: Operand, storage: _Storage) -> None:
        """Accumulate a gradient of a tensor into those of its other consumers."""
        before = self.gradients.get(operand.tensor)
        if before is None:
            self.gradients[operand.tensor] = storage
            return
        total = _Storage(storage.terms or before.terms, full_gradient=storage.full_gradient)
        self.add(total.terms)
        self.note()
        self.free(before)
        self.free(storage)
        self.gradients[operand.tensor] = total

    def arrived(self, op: Operator) -> _Storage | None:
        """Return the gradient of the operator's output, in the layout in which the operator left the output."""
        sharded, number, tensor = self.sharded, self.terms.number, op.output.tensor
        storage = self.gradients.pop(tensor, None)
        if storage is None:
            return None
        if storage.full_gradient:
            full = _Storage(storage.full_gradient)
            self.add(full.terms)
            self.note()
            self.free(storage)
            storage = full
        # tensors that are added before they are reduced share one gradient
        together, traffic = [sharded.joined.get(tensor, tensor)], list[Traffic]()
        for other, lead in sharded.joined.items():
            if lead == together[0]:
                together.append(other)
        for name in together:
            traffic += sharded.traffic_of(name, Pass.BACKWARD)
        if storage.is_arrived or not traffic or not sharded.graph.tensors[tensor].is_stored:
            return storage
        size = self.terms.size(op, op.output)
        result = _Storage((number(size),), is_arrived=True)
        has_copies, axes, copies = self.profile.kernels.redistribution_copies, frozenset[str](), list[Term]()
        for reader, i in sharded.graph.consumers(tensor):
            has_copies &= i not in reader.streamed
        for row in traffic:
            axes |= row.axes
            if has_copies and row.kind in (CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_GATHER):
                copies.append(number(row.amount, row.axes))
        # a single copy if no axis has more than one rank: then nothing is redistributed
        self.note(number(size, axes), *copies)
        self.add(result.terms)
        self.free(storage)
        for other in together:
            if other in self.gradients:
                self.free(self.gradients[other])
                self.gradients[other] = result
                result.references += 1
        return result


def backward_moments(
    sharded: ShardedGraph,
    profile: ExecutionProfile,
    saved: Sequence[SavedTensor],
    *,
    region: Region,
    recompute: Recompute,
    core: Collection[str],
    regathers: Collection[tuple[str, str]],
    terms: Terms,
    is_in_buffer: bool = False,
    delays_weight_gradients: bool = False,
) -> list[list[LiveBytes]]:
    """Return the live bytes while each operator of `region` runs backward, relative to the region's saved tensors of one micro-batch.

    The first list is for weight gradients that are accumulated at once, the second for those that stay until the unit is reduced.

    saved                    of the region, without recomputation
    terms                    shared by all walks over one graph
    is_in_buffer             the gradient of the region's output is counted elsewhere
    delays_weight_gradients  of products: until the backward of the operators before the exchange, and of those operators until the region's
                             end (Megatron-Core, `TransformerLayerSchedulePlan.run`; TransformerEngine's WeightGradStore keeps inputs and
                             output gradients)
    """
    walk = _Backward(
        sharded=sharded,
        profile=profile,
        region=region,
        operators=sharded.graph.operators_of(region.name),
        terms=terms,
        saved=saved,
        core=core,
        recompute=recompute,
        regathers=regathers,
        is_in_buffer=is_in_buffer,
        delays_weight_gradients=delays_weight_gradients,
    )
    walk.run()
    return [terms.undominated(walk.moments), terms.undominated(walk.moments_if_kept)]
