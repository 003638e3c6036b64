"""Compilation of a sharded graph into arrays: one row per operator pass, redistribution, saved tensor and parameter.

Derived symbolically once per (graph, rule set, profile) (`cost/rows.py`); evaluated on columns of plans (`cost/evaluate.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.memory.live import LiveBytes, SavedTensor, Terms, kept_tensors
from perfmodel.cost.memory.walks import backward_moments, forward_moments
from perfmodel.cost.rows import BATCH_AXES, DATA_AXES, RowCompiler, Rows, TimedRows, plain_rows
from perfmodel.cost.stages import block_rows, inner_regions
from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.frameworks.profile import ExecutionProfile
from perfmodel.frameworks.rewrites import ENTRYWISE, with_behaviour
from perfmodel.frameworks.settings import GRAPH_LAUNCH
from perfmodel.frameworks.tiles import logit_share, tokens_at_once
from perfmodel.parallel.algebra.derive import Amount, ExchangePosition, ParameterLayout, ShardedGraph, Traffic, amount_of, extent_amount
from perfmodel.parallel.algebra.sharding import COMM, Sharding, comm_class
from perfmodel.parallel.choices import Recompute
from perfmodel.parallel.eager import KERNELS
from perfmodel.workload.graph import Graph, Operator, Region, TensorRole
from perfmodel.workload.work import CacheAttention, FusedAttention, Pass, Product, RoutedExperts, Stream, Work

#: Phases of one micro-batch's work in a region. `core`: operators that selective recomputation repeats. `tail`: operators at the end
#: of a layer that torch's recomputation skips, because no saved tensor follows them.
PHASES = ("core", "rest", "tail", "backward")
#: Classes of saved tensors. `entering`: inputs of a block that only full recomputation keeps, because no operator of the block saves them.
#: `postponed`: what a pass between the gradients of its inputs and those of its weights holds, of blocks in addition to saved tensors.
SAVED = ("kept", "dropped_by_selective", "boundary", "entering", "postponed")
NOTHING = Amount(base=0.0)


def segment(region: int, phase: str) -> int:
    """Return the segment of a phase of a region."""
    return region * len(PHASES) + PHASES.index(phase)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Peaks:
    """Memory moments of passes as sparse sums: one row a term. `starts`: first row of each moment; `of`: first moment of each peak.

    value of a row: factor * amount, if its group (mask) is empty or has more than one rank
    backward  (region, recomputation) -> peak if weight gradients are freed at once; the next one is the peak if they are kept
    delayed   as `backward`, with delayed weight gradients of blocks that exchange
    forward   (region, recomputation) -> peak of a block's first forward pass; of the region before the blocks, peak of its backward pass
              with a boundary buffer (`ActivationTerms.forward`)
    """

    amount: NDArray[np.int64]
    factor: NDArray[np.float64]
    group: NDArray[np.int64]
    starts: NDArray[np.intp]
    of: NDArray[np.intp]
    backward: dict[tuple[int, Recompute], int]
    forward: dict[tuple[int, Recompute], int]
    delayed: dict[tuple[int, Recompute], int]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Program:
    """Rows of the cost of one micro-batch on one chip.

    inner, is_block   regions from the first block to the last, and [regions, 1] which are blocks
    rows        timed rows; segment = region * len(PHASES) + phase, for traffic * len(COMM) + class
    concurrent  timed rows of operators that may overlap with exchanges (also in `rows`); None: the framework overlaps none
    weight_gradients   matrix products of weight gradients (also in `rows`), if they are computed separately. segment = region * 2:
                operators before dispatch (attention); region * 2 + 1: the others (experts, and all of a region without exchanges)
    splits_backward   a pipeline schedule postpones the gradients of weights
    saved       columns amount; segment = region * len(SAVED) + class
    launches    [segments, 1] kernel launches of operators
    launches_across   (segment, group mask, number) of launches that happen only if the group has more than one rank
    softmaxes   (forward segment, backward segment, amount of score matrices): softmaxes with more launches if that amount is no multiple of
                `FUSED_MATRICES`
    peaks       moments of the backward passes and of a block's forward passes (`cost/memory/walks.py`)
    boundary    amount of the boundary tensor of blocks, or of each of `boundary_tensors`
    logits      amount that the loss reads at once; nothing without a loss
    """

    derivation: ShardedGraph
    regions: tuple[Region, ...]
    inner: range
    is_block: NDArray[np.bool_]
    rows: TimedRows
    saved: Rows
    launches: NDArray[np.float64]
    launches_across: tuple[tuple[int, int, float], ...]
    softmaxes: tuple[tuple[int, int, int], ...]
    boundary: tuple[int, ...]
    boundary_tensors: tuple[str, ...]
    logits: int
    peaks: Peaks
    parameters: tuple[ParameterLayout, ...]
    concurrent: TimedRows | None = None
    weight_gradients: TimedRows | None = None
    splits_backward: bool = False


def compile_program(
    derivation: ShardedGraph,
    profile: ExecutionProfile,
    *,
    recompute_operators: tuple[str, ...],
    attention_kernel: str,
    boundary_tensors: tuple[str, ...] = (),
    recomputes: Collection[Recompute] = tuple(Recompute),
    splits_backward: bool = False,
) -> Program:
    """Compile `derivation` into arrays, as the framework of `profile` runs it.

    boundary_tensors    boundary tensors between stages; none: the boundary of blocks
    recomputes   kinds of recomputation to compile
    splits_backward   the pipeline schedule computes weight gradients separately
    """
    run = with_behaviour(derivation, profile)
    graph, shardings = run.graph, run.shardings
    compilation = _Compilation(run, profile, recompute_operators, attention_kernel)
    amount = compilation.rows.amount
    launches = compilation.add_operators()
    regathers = compilation.add_traffic()
    kept = kept_tensors(run, regathers, compilation.core, alone=compilation.alone)
    saved = compilation.saved_rows(kept, splits_backward=splits_backward)
    peaks = compilation.peaks(kept, regathers, recomputes)
    producers = [graph.producer(tensor) for tensor in boundary_tensors or (graph.boundary,)]
    boundary = [amount_of(op, shardings[op.name], op.output.dims, scale=graph.activation_bytes) for op in producers if op is not None]
    logits = NOTHING
    if graph.loss:
        loss = graph.operator(graph.loss)
        logits = amount_of(loss, shardings[loss.name], loss.inputs[0].dims)
        tokens = tokens_at_once(loss, profile)
        logits = logits.at_once(tokens) if tokens else logits.scaled(logit_share(derivation.graph, profile))
    softmaxes = [
        (compilation.forward[op.name], compilation.backward[op.name], amount(matrices))
        for op in graph.operators
        if op.kind == "softmax" and (matrices := score_matrices(op, shardings[op.name], profile)) is not None
    ]
    boundary_amounts, logits_amount = tuple(map(amount, boundary or [NOTHING])), amount(logits)
    return Program(
        derivation=derivation,
        regions=graph.regions,
        inner=inner_regions(graph.regions),
        is_block=block_rows(graph.regions),
        rows=compilation.timed(compilation.rows),
        saved=saved,
        launches=launches,
        launches_across=tuple(compilation.launches_across),
        softmaxes=tuple(softmaxes),
        boundary=boundary_amounts,
        boundary_tensors=boundary_tensors,
        logits=logits_amount,
        peaks=peaks,
        parameters=run.parameters,
        concurrent=compilation.rows_between_exchanges() if profile.exchanges.hides_shared_experts else None,
        weight_gradients=compilation.rows_of_weight_gradients() if splits_backward or profile.exchanges.delays_weight_gradients else None,
        splits_backward=splits_backward,
    )


def _named_backward(op: Operator) -> Iterator[tuple[str, Work]]:
    """Yield the backward work of an operator with the names of its rows."""
    for number, work in enumerate(op.backward):
        yield f"{op.name}.grad{number if len(op.backward) > 1 else ''}", work


class _Compilation:
    """Sharded graph as a framework runs it, and the rows collected from it so far.

    region_index   position of each region in the graph
    core, alone    operators that selective recomputation repeats, and those of them that it repeats one by one
    phases         core, rest or tail for each forward operator; first_tails: the first of each tail
    forward, backward   segment of each operator's passes
    launches_across   as in `Program`
    """

    def __init__(self, run: ShardedGraph, profile: ExecutionProfile, recompute_operators: Collection[str], attention_kernel: str) -> None:
        self.run, self.graph, self.profile, self.attention_kernel = run, run.graph, profile, attention_kernel
        self.region_index: dict[str, int] = {}
        self.core, self.alone, self.first_tails = set[str](), set[str](), set[str]()
        self.phases, self.forward, self.backward = dict[str, str](), dict[str, int](), dict[str, int]()
        for index, region in enumerate(run.graph.regions):
            self.region_index[region.name] = index
            self._set_phases(index, region, recompute_operators)
        data_axes = set(DATA_AXES)
        for op in run.graph.operators:
            for dim in op.roles.per_sample:
                data_axes |= BATCH_AXES.intersection(run.shardings[op.name].get(dim, ()))
        self.make_rows = partial(RowCompiler, run.graph, profile, run.graph.activation_bytes, frozenset(data_axes))
        self.rows = self.make_rows()
        self.launches_across: list[tuple[int, int, float]] = []

    def _set_phases(self, index: int, region: Region, recompute_operators: Collection[str]) -> None:
        """Set the phases of a region's operators. The tail of a block begins at its last operator that saves a tensor.

        A group of operators is recomputed as one function. If recomputation stops early, it skips the group's last operator, provided that
        this one saves only its inputs.
        """
        stops_early, is_tail, first_tail, ended = self.profile.activations.recompute_stops_early, region.is_block, "", set[str]()
        for op in reversed(self.graph.operators_of(region.name)):
            if op.name_in_layer in recompute_operators:
                self.alone.add(op.name)
            is_group = bool(op.group) and op.group in recompute_operators
            is_core = is_group or op.name in self.alone
            if is_core:
                self.core.add(op.name)
            if is_group and op.group not in ended:
                ended.add(op.group)
                is_core = not (stops_early and all(saved.of is not None and saved.of < len(op.inputs) for saved in op.saved))
            phase = "core" if is_core else "tail" if is_tail else "rest"
            first_tail = op.name if phase == "tail" else first_tail
            is_tail = is_tail and not op.saved
            self.phases[op.name] = phase
            self.forward[op.name], self.backward[op.name] = segment(index, phase), segment(index, "backward")
        self.first_tails.add(first_tail)

    def timed(self, rows: RowCompiler, num_phases: int = len(PHASES)) -> TimedRows:
        num_segments = len(self.graph.regions) * num_phases
        return rows.rows(attention_kernel=self.attention_kernel, num_segments=num_segments, num_traffic_segments=num_segments * len(COMM))

    # --- work -------------------------------------------------------------------------------------------------------------------------

    def add_operators(self) -> NDArray[np.float64]:
        """Add the work of both passes. Return [segments, 1] kernel launches."""
        launches, added = np.zeros((2, len(self.graph.regions) * len(PHASES), 1))
        kernels = kernels_of(self.graph, self.profile)
        for op in self.graph.operators:
            self._add_work(op, self.rows)
            forward, backward = kernels[op.name]
            across = frozenset[str]()
            for work in op.forward:
                across |= work.only_across if isinstance(work, Stream) else frozenset()
            if across:
                self.launches_across.append((self.forward[op.name], self.rows.mask(across), forward))
            else:
                launches[self.forward[op.name]] += forward
            launches[self.backward[op.name]] += backward
            if self.graph.tensors[op.output.tensor].has_gradient:
                # gradients from several readers are added: two reads and a write for each after the first
                for reader, i in self.graph.consumers(op.output.tensor)[1:]:
                    self.rows.added_gradient(reader, self.run.shardings[reader.name], i, segment=self.backward[reader.name])
                    added[self.backward[reader.name]] += 1.0
        return np.asarray(launches + added)

    def _add_work(self, op: Operator, rows: RowCompiler) -> None:
        sharding, backward = self.run.shardings[op.name], self.backward[op.name]
        for work in op.forward:
            rows.work(op, sharding, work, segment=self.forward[op.name], name=op.name, is_backward=False)
        for name, work in _named_backward(op):
            rows.work(op, sharding, work, segment=backward, name=name, is_backward=True)

    def rows_of_weight_gradients(self) -> TimedRows:
        """Return the products of weight gradients, in two segments of each region."""
        rows = self.make_rows()
        for op in self.graph.operators:
            at = 2 * self.region_index[op.layer] + (self.run.exchange_position.get(op.name) is not ExchangePosition.BEFORE)
            for name, work in _named_backward(op):
                if isinstance(work, Product) and work.gradient_of is not None and op.inputs[work.gradient_of].tensor in self.graph.trained:
                    rows.work(op, self.run.shardings[op.name], work, segment=at, name=name, is_backward=True)
        return self.timed(rows, num_phases=2)

    def rows_between_exchanges(self) -> TimedRows:
        """Rows of operators that are independent of the exchanged rows of their block."""
        rows = self.make_rows()
        for op in self.graph.operators:
            if self.run.exchange_position.get(op.name) is ExchangePosition.CONCURRENT:
                self._add_work(op, rows)
        return self.timed(rows)

    # --- traffic ----------------------------------------------------------------------------------------------------------------------

    def add_traffic(self) -> set[tuple[str, str]]:
        """Add redistributions. Return the (tensor, operator) pairs with a saved input shard that backward gathers again (R17)."""
        phases = self.phases
        for traffic in self.run.traffic:
            phase = "backward"
            if traffic.phase is Pass.FORWARD:
                # inputs of the first operator of a tail are still needed
                phase = "rest" if traffic.operator in self.first_tails else phases[traffic.operator]
                producer = self.graph.producer(traffic.tensor)
                if phase == "core" and producer is not None and phases[producer.name] != "core":
                    phase = "rest"
            name = "input_gradient" if self._is_input_gradient(traffic) else comm_class(traffic.axes)
            self._add_collective(traffic.region, phase, name, traffic)
        regathers: set[tuple[str, str]] = set()
        seen: set[tuple[str, object]] = set()
        is_sharded = self.profile.activations.saved_input_layout == "producer"
        for op in self.graph.operators if is_sharded else ():
            saved_operands = set(map(attrgetter("of"), op.saved))
            for i in range(len(op.inputs)) if op.is_product or op.is_attention else ():
                if i not in saved_operands:
                    continue
                tensor, target = op.inputs[i].tensor, self.run.needed[op.name, i]
                source = self.run.left.get(tensor)
                if source is None or source.partial or not source.cut_axes - target.cut_axes:
                    continue
                regathers.add((tensor, op.name))
                if (tensor, target) in seen:
                    continue
                seen.add((tensor, target))
                for traffic in self.run.traffic_of(tensor, Pass.FORWARD):
                    if traffic.kind is CollectiveKind.ALL_GATHER:
                        # attention's backward pass depends on gathered keys and values: this all-gather is exposed
                        name = "regather" if op.is_product else comm_class(traffic.axes)
                        self._add_collective(op.layer, "backward", name, traffic)
        return regathers

    def _add_collective(self, region: str, phase: str, whose: str, row: Traffic) -> None:
        self.rows.collective(
            row.kind,
            row.axes,
            row.amount,
            segment=segment(self.region_index[region], phase) * len(COMM) + COMM.index(whose),
            name=row.tensor,
            repeats=row.repeats,
            copies=row.copies,
            is_counted=row.is_counted,
        )

    def _is_input_gradient(self, traffic: Traffic) -> bool:
        """Return whether this is a tensor-parallel reduction of the input gradient of a linear operator."""
        if traffic.phase is not Pass.BACKWARD or traffic.kind not in (CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER):
            return False
        if comm_class(traffic.axes) != "tensor_parallel":
            return False
        has_products = False
        for op, _ in self.graph.consumers(traffic.tensor):
            if op.is_product:
                has_products = True
                for operand in op.inputs:
                    tensor = self.graph.tensors[operand.tensor]
                    if tensor.role is TensorRole.PARAMETER and not tensor.has_gradient:
                        return False  # a frozen weight has no gradient to compute at the same time
        return has_products

    # --- memory -----------------------------------------------------------------------------------------------------------------------

    def saved_rows(self, kept: list[SavedTensor], *, splits_backward: bool) -> Rows:
        """Return the rows of saved tensors, by region and class (`SAVED`)."""
        given, seen = dict[str, Collection[str]](), set[str]()
        for region in self.graph.regions:
            if region.is_block:
                given[region.name] = self.run.entering[region.name]
            # tensors between repeated layers are kept already, unless they have no gradient
            if region.carried and self.graph.tensors[region.carried].has_gradient:
                seen.add(region.carried)
        tensors = []
        for saved in kept:
            name = "dropped_by_selective" if saved.is_dropped else "kept"
            if saved.tensor in given.get(saved.region, ()):
                name = "boundary"
                seen.add(saved.tensor)
            tensors.append((saved.region, name, saved.tensor, saved.amount))
        for op in self.graph.operators:
            for operand in op.inputs:
                if operand.tensor in given.get(op.layer, ()) and operand.tensor not in seen:
                    seen.add(operand.tensor)
                    tensors.append((op.layer, "entering", operand.tensor, self.run.operand_bytes(op, operand)))
        if splits_backward:
            # torch keeps the graph of a block until its last weight has its gradient: output gradients, and saved inputs unless the whole
            # block stays; what follows the last weight (the loss) is freed
            weighted = [op for op in self.graph.operators if any(operand.tensor in self.graph.trained for operand in op.inputs)]
            inputs = {(op.layer, operand.tensor) for op in weighted for operand in op.inputs}
            ends = {region.name for region in self.graph.regions if not region.is_block}
            held = [saved for saved in kept if saved.region in ends and (saved.region, saved.tensor) in inputs]
            tensors += [(saved.region, "postponed", saved.tensor, saved.amount) for saved in held]
            tensors += [(op.layer, "postponed", op.output.tensor, self.run.operand_bytes(op, op.output)) for op in weighted]
        rows = []
        for region_name, name, tensor, amount in tensors:
            number = self.region_index[region_name] * len(SAVED) + SAVED.index(name)
            rows.append((number, tensor, {"amount": self.rows.amount(amount)}))
        return plain_rows(rows, ("amount",))

    def peaks(self, kept: list[SavedTensor], regathers: set[tuple[str, str]], recomputes: Collection[Recompute]) -> Peaks:
        """Return the peaks of backward passes, of blocks under each recomputation, and of the forward passes of blocks."""
        run, profile, terms = self.run, self.profile, Terms(self.run)
        cases: list[list[LiveBytes]] = []
        backward: dict[tuple[int, Recompute], int] = {}
        forward: dict[tuple[int, Recompute], int] = {}
        delayed: dict[tuple[int, Recompute], int] = {}
        before_blocks = inner_regions(self.graph.regions).start - 1
        for i, region in enumerate(self.graph.regions):
            of_region = [saved for saved in kept if saved.region == region.name]
            for recompute in recomputes if region.is_block else (Recompute.NONE,):
                walk = partial(
                    backward_moments,
                    run,
                    profile,
                    of_region,
                    region=region,
                    recompute=recompute,
                    core=self.core,
                    regathers=regathers,
                    terms=terms,
                )
                backward[i, recompute] = len(cases)
                cases += walk()
                if i == before_blocks and profile.stages.pipeline_keeps_boundaries:
                    forward[i, recompute] = len(cases)
                    cases.append(walk(is_in_buffer=True)[0])
                if region.is_block:
                    forward[i, recompute] = len(cases)
                    cases.append(forward_moments(run, profile, of_region, region=region, recompute=recompute, terms=terms))
                delays = profile.exchanges.delays_weight_gradients
                if delays and any(op.name in run.exchange_position for op in self.graph.operators_of(region.name)):
                    delayed[i, recompute] = len(cases)
                    cases += walk(delays_weight_gradients=True)
        moments = [moment or {terms.number(NOTHING): 0.0} for case in cases for moment in case or [{}]]
        row_terms, factors = [*chain(*moments)], [*chain(*map(dict.values, moments))]
        # index of the amount and mask of the axes of each term
        amount, group = np.zeros((2, len(terms.amounts)), dtype=np.int64)
        for term in dict.fromkeys(row_terms):
            of_term, axes = terms.amounts[term]
            amount[term], group[term] = self.rows.amount(of_term), self.rows.mask(axes)
        return Peaks(
            amount=amount[row_terms],
            factor=np.array(factors)[:, None],
            group=group[row_terms],
            starts=np.array([0, *accumulate(map(len, moments))][:-1], dtype=np.intp),
            of=np.array([0, *accumulate([len(case) or 1 for case in cases])][:-1], dtype=np.intp),
            backward=backward,
            forward=forward,
            delayed=delayed,
        )


# --- host launches ------------------------------------------------------------------------------------------------------
#
# The host runs ahead of the chip, so a pass takes the longer of its device time and its launch time (`cost/step.py`).

FORWARD = 2.0
"""Host time of a forward kernel, launched by Python modules, over that of a backward kernel, launched by autograd's engine: 22 against
11 us with torch 2.13 on empty tensors, eight layers of GPT-2 on a core of an EPYC.
"""

ATTENTION_BACKWARD = 3.0
"""Kernels of fused attention's backward pass: row sums, the pass itself, the cast of the query gradient (flash-attn)."""


def kernels_of(graph: Graph, profile: ExecutionProfile) -> dict[str, tuple[float, float]]:
    """Return the kernels of each operator's forward and backward pass, for a graph as the framework runs it (`with_behaviour`).

    Views launch no kernel. A fused chain counts with its last operator. Each weight gradient counts one more: a kernel adds it to the
    accumulator, or, if the matrix product has accumulated it already, its hook runs.
    """
    scope = profile.kernels.graph_scope
    parts = graph_parts(graph) if scope else {}
    kernels: dict[str, tuple[float, float]] = {}
    for op in graph.operators:
        if op.kind in ENTRYWISE and not graph.tensors[op.output.tensor].is_stored:
            kernels[op.name] = 0.0, 0.0
            continue
        forward, backward = float(sum(map(_kernels, op.forward))), float(sum(map(_kernels, op.backward)))
        if op.is_attention:
            backward += (ATTENTION_BACKWARD - 1.0) * sum(isinstance(work, FusedAttention) for work in op.backward)
        if op.kind in KERNELS:
            # the profile's traffic lies between that of one fused kernel and that of separate kernels
            kind = KERNELS[op.kind]
            share = max(0.0, (getattr(profile.kernels, kind.traffic) - 1.0) / (kind.eager_traffic - 1.0))
            forward, backward = forward * (1.0 + (kind.forward - 1) * share), backward * (1.0 + (kind.backward - 1) * share)
        if op.backward:
            for operand in op.inputs:
                backward += operand.tensor in graph.trained
        if parts.get(op.name) in scope:
            share = min(GRAPH_LAUNCH / profile.timing.host_launch_time, 1.0)
            forward, backward = share * forward, share * backward
        kernels[op.name] = forward, backward
    return kernels


def graph_parts(graph: Graph) -> dict[str, str]:
    """Return the part of Megatron-LM's --cuda-graph-scope that launches each operator.

    `attn` reaches up to the norm of the feed-forward, `moe_router` from there to the choice of experts; `mlp` is that of a dense layer.
    Operators outside of blocks, and those from the token exchange on, have no part.
    """
    parts: dict[str, str] = {}
    for region in graph.regions:
        operators = graph.operators_of(region.name) if region.is_block else []
        has_experts, part = any(op.kind == "route" for op in operators), "attn"
        for op in operators:
            if op.name_in_layer == "mlp_norm":
                part = "moe_router" if has_experts else "mlp"
            parts[op.name] = part
            if op.kind == "route":
                break
    return parts


def _kernels(work: Work) -> int:
    match work:
        case FusedAttention() | CacheAttention() | RoutedExperts():
            return 1
        case Stream() if not work.accesses or work.is_launched_along:
            return 0
    return work.repeats


FUSED_MATRICES, BY_HAND = 4.0, 4.0
"""Megatron's fused softmax requires a multiple of 4 score matrices (sequences times heads of a rank). Other numbers take 4 more kernels
in each pass: scaling, masking, and casts to float32 and back (NVIDIA/Megatron-LM, megatron/model/fused_softmax.py).
"""


def score_matrices(op: Operator, sharding: Sharding, profile: ExecutionProfile) -> Amount | None:
    """Return the number of score matrices of Megatron's fused causal softmax, a multiple of `FUSED_MATRICES`; None for another softmax."""
    if not op.settings.get("causal_queries") or profile.activations.softmax_keeps_float32:
        return None
    rows = {op.settings["over"], op.settings["causal_queries"]}
    return extent_amount(op, sharding, tuple((op.dims[dim], dim) for dim in op.output.dims if dim and dim not in rows))


def graph_launches(graph: Graph, profile: ExecutionProfile) -> float:
    """Return the kernels of a micro-batch over all regions; a forward kernel counts as `FORWARD`."""
    counts = {region.name: region.count for region in graph.regions}
    readers = [graph.consumers(op.output.tensor) for op in graph.operators if graph.tensors[op.output.tensor].has_gradient]
    # gradients from several readers are added: one kernel for each reader after the first
    total = float(sum(counts[reader.layer] for tensor_readers in readers for reader, _ in tensor_readers[1:]))
    kernels = kernels_of(graph, profile)
    for op in graph.operators:
        forward, backward = kernels[op.name]
        total += counts[op.layer] * (FORWARD * forward + backward)
    return total
