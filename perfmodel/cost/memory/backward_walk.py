"""What lives when in the backward pass of a region: from the operators, the moments at which memory may be largest.

The backward pass runs the operators in reverse. Each needs the gradient of its output and what autograd kept for it, and makes the
gradients of its inputs; then what it needed is freed, unless an operator before it needs the same. A *moment* is what lives while
one of them runs, relative to what the region keeps when its backward begins. Every moment is a sum of amounts (`LiveBytes`), evaluated
on columns of plans like any other row of a program; the largest of them is the region's peak.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from perfmodel.cost.memory.forward_walk import walk_forward
from perfmodel.cost.memory.live import Kept, LiveBytes, Term, always, entering, operand_bytes, streamed_terms, undominated
from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.frameworks.profile import ExecutionProfile
from perfmodel.parallel.algebra.derive import Amount, Derivation, extent_amount
from perfmodel.parallel.layout import Recompute
from perfmodel.workload.graph import Operand, Operator, Pass, Region


@dataclass(slots=True)
class _Storage:
    """Bytes that several gradients may share: an addition hands its output's gradient to all its inputs.

    whole        what the gradient of a piece of a tensor is made into before anything else reads it
    is_arrived   it lies in the layout of the maker of its tensor
    """

    terms: tuple[Term, ...]
    whole: tuple[Term, ...] = ()
    is_arrived: bool = False
    references: int = 1


@dataclass(slots=True)
class _Backward:
    """Walks one region backward and notes its moments."""

    derivation: Derivation
    profile: ExecutionProfile
    region: Region
    regathers: set[tuple[str, str]]
    keeps_weight_gradients: bool
    sizes: dict[tuple[str, Operand], Amount]
    is_in_buffer: bool = False
    before_dispatch: frozenset[str] | None = None
    waiting: list[tuple[Operator, list[Term], _Storage | None]] = field(default_factory=list)
    live: LiveBytes = field(default_factory=dict)
    moments: list[LiveBytes] = field(default_factory=list)
    gradients: dict[str, _Storage] = field(default_factory=dict)

    def add(self, terms: Iterable[Term], factor: float = 1.0) -> None:
        for term in terms:
            value = self.live.get(term, 0.0) + factor
            if abs(value) < 1e-12:
                self.live.pop(term, None)
            else:
                self.live[term] = value

    def note(self, *temporary: Iterable[Term]) -> None:
        moment = dict(self.live)
        for terms in temporary:
            for term in terms:
                moment[term] = moment.get(term, 0.0) + 1.0
        self.moments.append({term: factor for term, factor in moment.items() if factor})

    def free(self, storage: _Storage) -> None:
        storage.references -= 1
        if storage.references == 0:
            self.add(storage.terms, -1.0)

    # ------------------------------------------------------------------------------------------------------------

    def run(self, kept: list[Kept], core: set[str], recompute: Recompute) -> None:
        graph = self.derivation.graph
        region = self.region
        operators = graph.operators_of(region.name)
        remaining = {op.name for op in operators}
        held = [k for k in kept if k.region == region.name]
        for op in operators:
            is_read_later = any(reader.layer != region.name for reader, _ in graph.consumers(op.output.tensor))
            if graph.tensors[op.output.tensor].has_gradient and (is_read_later or (op is operators[-1] and op.name != graph.loss)):
                self.start(op)
        is_made = recompute is Recompute.NONE
        lives = self.lives(held, operators, core if recompute is Recompute.SELECTIVE else set())
        # torch runs forward again when backward first asks for what it saved, others before backward begins
        lazily = self.profile.activations.recompute_stops_early

        def freed_after(name: str) -> list[Amount]:
            freed = [amount for amount, holders in lives if name in holders and holders & remaining == {name}]
            remaining.discard(name)
            return freed

        is_past = False
        for op in reversed(operators):
            if self.before_dispatch is not None and op.name in self.before_dispatch and not is_past:
                is_past = True
                self.make_weight_gradients(freed_after)
            incoming = self.arrived(op) if lazily else None
            if not is_made and recompute is Recompute.FULL and not (lazily and op.passes_gradient):
                is_made = True
                given = entering(graph, region)
                self.add(always(k.amount for k in held if k.tensor not in given))
                self.run_again(operators, held, keeps_handed=False)
            elif not is_made and (op.name in core or any(k.is_dropped and op.name in k.holders for k in held)):
                is_made = True
                made = [k for k in held if k.is_dropped or k.is_made_twice]
                self.add(always(k.amount for k in made))
                self.run_again([op for op in operators if op.name in core], made, keeps_handed=True)
            is_delayed = self.before_dispatch is not None and op.is_product and any(map(graph.is_trained, op.inputs))
            self.step(op, incoming if lazily else self.arrived(op), [] if is_delayed else freed_after(op.name), is_delayed=is_delayed)
        self.make_weight_gradients(freed_after)

    def make_weight_gradients(self, freed_after: Callable[[str], list[Amount]]) -> None:
        """Those that were delayed, one after another: until its turn each keeps its input and the gradient of its output."""
        for op, weight_terms, incoming in self.waiting:
            self.note(weight_terms)
            self.add(weight_terms)
            if incoming is not None:
                self.free(incoming)
            self.add(always(freed_after(op.name)), -1.0)
            if not self.keeps_weight_gradients:
                self.add(weight_terms, -1.0)
        self.waiting.clear()

    def lives(self, held: list[Kept], operators: list[Operator], core: set[str]) -> list[tuple[Amount, set[str]]]:
        """What is kept or made again, and the operators whose backward passes it lives for.

        Of what a recomputed function hands out and keeps itself, the first lives for its readers, the second for the function. What the
        function is handed lives for all of it, beside copies that it makes.
        """
        inside = [op for op in operators if op.name in core]
        made = {op.output.tensor for op in inside}
        found: list[tuple[Amount, set[str]]] = []
        for k in held:
            within = core.intersection(k.holders)
            holders = set(k.holders)
            if k.is_made_twice and core:
                found.append((k.amount, within))
                holders -= within
            if within and not k.is_dropped and k.tensor not in made and self.derivation.graph.producer(k.tensor) is not None:
                holders |= {inside[0].name}
            found.append((k.amount, holders))
        return found

    def run_again(self, operators: list[Operator], made: list[Kept], *, keeps_handed: bool) -> None:
        """Forward, from what is kept: `made` is what it is run for, and lives already."""
        if self.profile.activations.recompute_stops_early:
            last = max((place for place, op in enumerate(operators) if op.saved), default=-1)
            # what keeps nothing but its inputs need not run for them
            runs = last >= 0 and any(saved.of is None or saved.of == len(operators[last].inputs) for saved in operators[last].saved)
            operators = operators[: last + runs]
        for moment in walk_forward(self.derivation, self.profile, operators, made, keeps_handed=keeps_handed, sizes=self.sizes):
            self.moments.append({term: self.live.get(term, 0.0) + moment.get(term, 0.0) for term in {**self.live, **moment}})

    def start(self, op: Operator) -> None:
        """What the operator hands to later regions has its gradient when the region's backward begins."""
        storage = _Storage(tuple(always([] if self.is_in_buffer else [self.size(op, op.output)])))
        self.gradients[op.output.tensor] = storage
        self.add(storage.terms)
        self.note()

    def size(self, op: Operator, operand: Operand) -> Amount:
        key = op.name, operand
        if key not in self.sizes:
            self.sizes[key] = operand_bytes(self.derivation, op, operand)
        return self.sizes[key]

    def whole(self, op: Operator, operand: Operand) -> tuple[Term, ...]:
        """The gradient of a tensor of which the operator reads a piece."""
        if operand.tensor not in op.parts:
            return ()
        itemsize = self.derivation.graph.tensors[operand.tensor].itemsize * op.parts[operand.tensor]
        return tuple(always([operand_bytes(self.derivation, op, operand, itemsize=itemsize, is_expanded=False)]))

    def step(self, op: Operator, incoming: _Storage | None, freed: list[Amount], *, is_delayed: bool) -> None:
        graph = self.derivation.graph
        if not graph.tensors[op.output.tensor].has_gradient:
            self.add(always(freed), -1.0)
            return
        inputs = [operand for operand in op.inputs if graph.makes_gradient(operand)]
        weights = [operand for operand in op.inputs if graph.is_trained(operand)]
        made: list[tuple[Operand, _Storage]] = []
        weight_terms: list[Term] = []
        if op.makes_weight_gradients:
            weight_terms = always(self.size(op, o) for o in weights)
        if is_delayed:
            self.waiting.append((op, weight_terms, incoming))
            weight_terms = []
        if op.passes_gradient:
            for operand in inputs:
                if incoming is not None:
                    incoming.references += 1
                    made.append((operand, incoming))
        else:
            again = [(self.size(op, o), self.gathered_axes(o.tensor)) for o in op.inputs if (o.tensor, op.name) in self.regathers]
            for operand in inputs:
                terms = tuple(always([self.size(op, operand)])) if graph.tensors[operand.tensor].is_stored else ()
                made.append((operand, _Storage(terms, whole=self.whole(op, operand))))
            sharding = self.derivation.shardings[op.name]
            extra = always(extent_amount(op, sharding, data.extent, scale=graph.itemsize(op, data)) for data in op.scratch)
            if op.kind == "embedding":
                # of tokens whose rows other ranks hold the gradient is masked, in a copy
                extra.append((self.size(op, op.output), self.derivation.left[op.output.tensor].partial))
            if op.streamed:
                blocks = streamed_terms(self.derivation, op)
                extra += [*blocks, *blocks]  # keys and values, and their gradients
            if op.name != graph.loss:  # the loss is a moment of its own: the execution profile knows its copies
                self.note(weight_terms, again, extra, *(storage.terms for _, storage in made))
            for _, storage in made:
                self.add(storage.terms)
        self.add(weight_terms)
        if incoming is not None and not is_delayed:
            self.free(incoming)
        self.add(always(freed), -1.0)
        for operand, storage in made:
            self.arrive(operand, storage)
        if not self.keeps_weight_gradients:
            self.add(weight_terms, -1.0)

    def arrive(self, operand: Operand, storage: _Storage) -> None:
        """A gradient of a tensor: added to what other readers of it have sent."""
        before = self.gradients.get(operand.tensor)
        if before is None:
            self.gradients[operand.tensor] = storage
            return
        total = _Storage(storage.terms or before.terms, whole=storage.whole)
        self.add(total.terms)
        self.note()
        self.free(before)
        self.free(storage)
        self.gradients[operand.tensor] = total

    def arrived(self, op: Operator) -> _Storage | None:
        """The gradient of the operator's output, in the layout that the operator left it in."""
        tensor = op.output.tensor
        storage = self.gradients.pop(tensor, None)
        if storage is None:
            return None
        if storage.whole:
            whole = _Storage(storage.whole)
            self.add(whole.terms)
            self.note()
            self.free(storage)
            storage = whole
        together = self.reduced_together(tensor)
        traffic = [t for each in together for t in self.derivation.traffic_of(each, Pass.BACKWARD)]
        if storage.is_arrived or not traffic or not self.derivation.graph.tensors[tensor].is_stored:
            return storage
        axes = frozenset(axis for t in traffic for axis in t.axes)
        own = self.size(op, op.output)
        result = _Storage(((own, frozenset()),), is_arrived=True)
        copies: list[Term] = []
        is_streamed = any(i in reader.streamed for reader, i in self.derivation.graph.consumers(tensor))
        if self.profile.kernels.redistribution_copies and not is_streamed:
            copies = [(t.amount, t.axes) for t in traffic if t.kind in (CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_GATHER)]
        # one copy of it where no axis has more than one rank: then nothing is redistributed
        self.note([(own, axes)], copies)
        self.add(result.terms)
        self.free(storage)
        for other in together:
            if other in self.gradients:
                self.free(self.gradients[other])
                self.gradients[other] = result
                result.references += 1
        return result

    def reduced_together(self, tensor: str) -> list[str]:
        """A tensor, and those that are added up with it before they are reduced: their gradients are one."""
        joined = self.derivation.joined
        first = joined.get(tensor, tensor)
        return [first, *(other for other, lead in joined.items() if lead == first)]

    def gathered_axes(self, tensor: str) -> frozenset[str]:
        return frozenset(a for t in self.derivation.traffic_of(tensor, Pass.FORWARD) for a in t.axes)


def backward_moments(
    derivation: Derivation,
    profile: ExecutionProfile,
    kept: list[Kept],
    *,
    region: Region,
    recompute: Recompute,
    core: set[str],
    regathers: set[tuple[str, str]],
    keeps_weight_gradients: bool,
    sizes: dict[tuple[str, Operand], Amount],
    is_in_buffer: bool = False,
    before_dispatch: frozenset[str] | None = None,
) -> list[LiveBytes]:
    """Bytes that live while each operator of `region` runs backward, over what the region keeps of a microbatch.

    keeps_weight_gradients   they stay until the unit is reduced (fully_shard), else each leaves for its accumulator at once
    sizes                    bytes of operands that are known already, for all walks over one graph
    is_in_buffer             the gradient of what the region hands on is counted elsewhere
    before_dispatch         weight gradients of products are delayed: until these operators' turn, which lead to what is exchanged, and
                             theirs until the region's end (Megatron-Core, `TransformerLayerSchedulePlan.run`; TransformerEngine's
                             WeightGradStore keeps inputs and gradients of outputs); None: none is
    """
    walk = _Backward(
        derivation=derivation,
        profile=profile,
        region=region,
        regathers=regathers,
        keeps_weight_gradients=keeps_weight_gradients,
        sizes=sizes,
        is_in_buffer=is_in_buffer,
        before_dispatch=before_dispatch,
    )
    walk.run(kept, core, recompute)
    return undominated(walk.moments)
