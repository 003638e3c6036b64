"""Backward walk: candidate memory peaks of the backward pass of a region, from its operators.

The backward pass runs the operators in reverse. Each reads the gradient of its output and its saved tensors, and writes the gradients of
its inputs. Its saved tensors are then freed, unless an operator that runs later in backward reads them too.

Weight gradients either are accumulated at once, or stay until the unit is reduced (fully_shard). One walk records the moments of both.

A *moment* is the set of tensors alive while one operator runs, relative to the saved tensors of the region when its backward begins. Every
moment is a sum of amounts (`LiveBytes`), evaluated on columns of plans like any other row of a program. The largest is the region's peak.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from perfmodel.cost.memory.forward_walk import walk_forward
from perfmodel.cost.memory.live import LiveBytes, SavedTensor, Term, Terms
from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.frameworks.profile import ExecutionProfile
from perfmodel.parallel.algebra.derive import ExchangePosition, ShardedGraph, extent_amount
from perfmodel.parallel.choices import Recompute
from perfmodel.workload.graph import Operand, Operator, Region
from perfmodel.workload.work import Pass


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

    # ------------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        graph, operators = self.sharded.graph, self.operators
        self.is_recomputed = self.recompute is Recompute.NONE
        self.set_lives(self.core if self.recompute is Recompute.SELECTIVE else ())
        for op in operators:
            is_read_later = any(reader.layer != self.region.name for reader, _ in graph.consumers(op.output.tensor))
            if graph.tensors[op.output.tensor].has_gradient and (is_read_later or (op is operators[-1] and op.name != graph.loss)):
                # the gradient of a tensor that later regions read exists when the region's backward begins
                storage = _Storage(() if self.is_in_buffer else (self.terms.operand(op, op.output),))
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
        for moment in walk_forward(self.sharded, self.profile, operators, recomputed, keeps_handed=keeps_handed, terms=self.terms):
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
        weights = [operand for operand in op.inputs if operand.tensor in graph.trained]
        is_delayed = self.delays_weight_gradients and op.is_product and bool(weights)
        freed = [] if is_delayed else self.freed_after(op)
        if not graph.tensors[op.output.tensor].has_gradient:
            self.add(freed, -1.0)
            return
        weight_terms = [terms.operand(op, operand) for operand in weights] if op.makes_weight_gradients else []
        if is_delayed:
            self.delayed.append((op, weight_terms, incoming))
            weight_terms = []
        inputs = [operand for operand in op.inputs if operand.tensor in graph.activations_with_gradient]
        input_gradients: list[tuple[Operand, _Storage]] = []
        arriving: list[Term] = []
        if op.passes_gradient:
            if incoming is not None:
                incoming.references += len(inputs)
                input_gradients = [(operand, incoming) for operand in inputs]
        else:
            for operand in inputs:
                tensor = graph.tensors[operand.tensor]
                storage = _Storage((terms.operand(op, operand),) if tensor.is_stored else ())
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
        sharded, number = self.sharded, self.terms.number
        terms = [
            number(self.terms.size(op, operand), sharded.axes_of(operand.tensor, Pass.FORWARD))
            for operand in op.inputs
            if (operand.tensor, op.name) in self.regathers
        ]
        sharding = sharded.shardings[op.name]
        terms += [number(extent_amount(op, sharding, data.extent, scale=sharded.graph.itemsize(op, data))) for data in op.scratch]
        if op.kind == "embedding":
            # the gradient of tokens whose rows are on other ranks is masked, in a copy
            terms.append(number(self.terms.size(op, op.output), sharded.left[op.output.tensor].partial))
        return [*terms, *2 * self.terms.streamed(op)]  # keys and values, and their gradients

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
        first = sharded.joined.get(tensor, tensor)
        together = [first, *[other for other, lead in sharded.joined.items() if lead == first]]
        traffic = [t for name in together for t in sharded.traffic_of(name, Pass.BACKWARD)]
        if storage.is_arrived or not traffic or not sharded.graph.tensors[tensor].is_stored:
            return storage
        size = self.terms.size(op, op.output)
        result = _Storage((number(size),), is_arrived=True)
        copies: list[Term] = []
        streaming = [reader for reader, i in sharded.graph.consumers(tensor) if i in reader.streamed]
        if self.profile.kernels.redistribution_copies and not streaming:
            copies = [number(t.amount, t.axes) for t in traffic if t.kind in (CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_GATHER)]
        # a single copy if no axis has more than one rank: then nothing is redistributed
        self.note(number(size, frozenset([axis for t in traffic for axis in t.axes])), *copies)
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
    kept: Iterable[SavedTensor],
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
        saved=[saved for saved in kept if saved.region == region.name],
        core=core,
        recompute=recompute,
        regathers=regathers,
        is_in_buffer=is_in_buffer,
        delays_weight_gradients=delays_weight_gradients,
    )
    walk.run()
    return [terms.undominated(walk.moments), terms.undominated(walk.moments_if_kept)]
