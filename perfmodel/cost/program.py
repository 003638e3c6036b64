"""A sharded graph compiled into arrays: one row per operator pass, redistribution, saved tensor and parameter.

Derived once per (graph, rule set, profile), symbolically (`cost/rows.py`); evaluated on columns of plans (`cost/microbatch.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.launches import added_gradients, kernels_of, score_matrices
from perfmodel.cost.memory.backward_walk import backward_moments
from perfmodel.cost.memory.forward_walk import forward_moments
from perfmodel.cost.memory.kept import kept_tensors
from perfmodel.cost.memory.live import Kept, LiveBytes, Terms
from perfmodel.cost.rows import BATCH_AXES, DATA_AXES, Amounts, RowCompiler, Rows, TimedRows, plain_rows
from perfmodel.cost.stages import inner_regions
from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.frameworks.profile import ExecutionProfile
from perfmodel.frameworks.rewrites import with_habits
from perfmodel.frameworks.tiles import logit_share
from perfmodel.parallel.algebra.derive import Amount, ExchangePosition, ParameterLayout, ShardedGraph, Traffic, amount_of
from perfmodel.parallel.algebra.traffic_classes import COMM, comm_class
from perfmodel.parallel.layout import Recompute
from perfmodel.workload.graph import Graph, Operator, Pass, Product, Region, TensorRole

#: Parts of one microbatch's work in a region. `core`: what selective recomputation runs again; `tail`: what torch's
#: recomputation leaves out at the end of a layer, since no saved tensor comes after it.
PHASES = ("core", "rest", "tail", "backward")
#: `entering`: what full recomputation alone keeps of a block, since nothing in it does.
SAVED = ("kept", "dropped_by_selective", "boundary", "entering")
NOTHING = Amount(base=0.0)


def segment(region: int, phase: str) -> int:
    """Of the region with that place among the graph's."""
    return region * len(PHASES) + PHASES.index(phase)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Peaks:
    """Moments of passes as sparse sums: one row for each term, `starts` where a moment begins, `of` where a peak does.

    value of a row: factor * amount, where its group (mask) is none or has more than one rank
    backward  (region, recomputation) -> its peak with weight gradients that leave at once; that with those that stay is the next
    delayed   of `backward` where weight gradients of blocks that exchange are delayed
    forward   (region, recomputation) -> the peak of its first forward pass; of blocks. Of what comes before them: of its backward pass
              beside a buffer (`ActivationTerms.forward`)
    """

    amount: NDArray[np.int64]
    factor: NDArray[np.float64]
    group: NDArray[np.int64]
    starts: NDArray[np.int64]
    of: NDArray[np.int64]
    backward: dict[tuple[int, Recompute], int]
    forward: dict[tuple[int, Recompute], int]
    delayed: dict[tuple[int, Recompute], int]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Program:
    """What one microbatch costs on one chip, by rows.

    beside      of operators that may run beside exchanges, the same once more; None where the framework runs none so
    weight_gradients   of products of blocks, the same once more, where the framework computes them apart; segment = region * 2, of those
                before dispatch (attention's), and the next, of the others (experts')
    rows        what takes time; segment = region * len(PHASES) + phase, of traffic * len(COMM) + class
    saved       columns amount; segment = region * len(SAVED) + class
    launches    [segments, 1] kernels that the host launches, of operators
    softmaxes   forward and backward segment of those that launch more where their matrices are no multiple; the amount of these
    peaks       moments of the backward passes (`cost/memory/backward_walk.py`) and of a block's forward passes
                (`cost/memory/forward_walk.py`)
    boundary    amount of what blocks hand on, or of each of `handed_on`; logits: of what the loss reads at once. Of a graph without
                them: nothing
    """

    derivation: ShardedGraph
    regions: tuple[Region, ...]
    rows: TimedRows
    saved: Rows
    launches: NDArray[np.float64]
    softmaxes: tuple[tuple[int, int, int], ...]
    boundary: tuple[int, ...]
    handed_on: tuple[str, ...]
    logits: int
    peaks: Peaks
    parameters: tuple[ParameterLayout, ...]
    beside: TimedRows | None = None
    weight_gradients: TimedRows | None = None

    @property
    def amounts(self) -> Amounts:
        return self.rows.amounts


def _is_core(operator: Operator, recompute_operators: Iterable[str]) -> bool:
    return (bool(operator.group) and operator.group in recompute_operators) or operator.name_in_layer in recompute_operators


def compile_program(
    derivation: ShardedGraph,
    profile: ExecutionProfile,
    *,
    recompute_operators: tuple[str, ...],
    attention_kernel: str,
    handed_on: tuple[str, ...] = (),
    recomputes: Collection[Recompute] = tuple(Recompute),
) -> Program:
    """Arrays for `derivation` as the framework of `profile` runs it.

    handed_on    tensors between stages; none: what blocks hand on
    recomputes   the kinds of recomputation that it is asked for
    """
    run = with_habits(derivation, profile)
    graph, shardings = run.graph, run.shardings
    compiler = _row_compiler(run, profile)
    place = {region.name: i for i, region in enumerate(graph.regions)}
    phases = _forward_phases(graph, recompute_operators, profile)
    for op in graph.operators:
        _add_work(op, run, phases, place, compiler)
        readers = graph.consumers(op.output.tensor)
        if len(readers) > 1 and graph.tensors[op.output.tensor].has_gradient:
            # gradients of several readers are added: two reads and a write for each after the first
            for reader, i in readers[1:]:
                compiler.added_gradient(reader, shardings[reader.name], i, segment=segment(place[reader.layer], "backward"))

    regathers = _add_traffic(run, profile, phases, place, compiler)
    core = {op.name for op in graph.operators if _is_core(op, recompute_operators)}
    tensors = kept_tensors(run, regathers, core, alone={op.name for op in graph.operators if op.name_in_layer in recompute_operators})
    saved = _saved_rows(run, tensors, place, compiler)
    peaks = _peaks(run, profile, tensors, core, regathers, compiler, recomputes)
    makers = [graph.producer(tensor) for tensor in handed_on or (graph.boundary,)]
    boundary = [amount_of(op, shardings[op.name], op.output.dims, scale=graph.activation_bytes) for op in makers if op is not None]
    logits = NOTHING
    if graph.loss:
        loss = graph.operator(graph.loss)
        logits = amount_of(loss, shardings[loss.name], loss.inputs[0].dims).scaled(logit_share(derivation.graph, profile))
    softmaxes = tuple(
        (segment(place[op.layer], phases[op.name]), segment(place[op.layer], "backward"), compiler.amount(matrices))
        for op in graph.operators
        if (matrices := score_matrices(op, shardings[op.name], profile)) is not None
    )
    boundary_amounts, logits_amount = tuple(map(compiler.amount, boundary or [NOTHING])), compiler.amount(logits)
    num_segments = len(graph.regions) * len(PHASES)
    return Program(
        derivation=derivation,
        regions=graph.regions,
        rows=compiler.rows(
            attention_kernel=attention_kernel,
            num_segments=num_segments,
            num_traffic_segments=num_segments * len(COMM),
        ),
        saved=saved,
        launches=_launches(graph, profile, phases, place),
        softmaxes=softmaxes,
        boundary=boundary_amounts,
        handed_on=handed_on,
        logits=logits_amount,
        peaks=peaks,
        parameters=run.parameters,
        beside=_rows_beside_exchanges(run, profile, phases, place, attention_kernel)
        if profile.communication.hides_shared_experts
        else None,
        weight_gradients=_rows_of_weight_gradients(run, profile, place, attention_kernel)
        if profile.communication.delays_weight_gradients
        else None,
    )


def _row_compiler(run: ShardedGraph, profile: ExecutionProfile) -> RowCompiler:
    cuts = (run.shardings[op.name].get(dim, ()) for op in run.graph.operators for dim in op.per_sample)
    data_axes = frozenset(axis for axes in cuts for axis in axes)
    return RowCompiler(run.graph, profile, run.graph.activation_bytes, data_axes & BATCH_AXES | DATA_AXES)


def _add_work(op: Operator, run: ShardedGraph, phases: Mapping[str, str], place: Mapping[str, int], compiler: RowCompiler) -> None:
    """Work of both passes of an operator."""
    for number, work in enumerate((*op.forward, *op.backward)):
        is_backward, name = number >= len(op.forward), op.name
        if is_backward:
            name += f".grad{number - len(op.forward) if len(op.backward) > 1 else ''}"
        at = segment(place[op.layer], "backward" if is_backward else phases[op.name])
        compiler.work(op, run.shardings[op.name], work, segment=at, name=name, is_backward=is_backward)


def _rows_of_weight_gradients(run: ShardedGraph, profile: ExecutionProfile, place: Mapping[str, int], attention_kernel: str) -> TimedRows:
    """Products that make gradients of weights, in blocks that exchange."""
    compiler = _row_compiler(run, profile)
    for op in run.graph.operators:
        position = run.exchange_position.get(op.name)
        for work in op.backward if position else ():
            if isinstance(work, Product) and work.gradient_of is not None and run.graph.is_trained(op.inputs[work.gradient_of]):
                at = 2 * place[op.layer] + (position is not ExchangePosition.BEFORE)
                compiler.work(op, run.shardings[op.name], work, segment=at, name=op.name, is_backward=True)
    num_segments = 2 * len(run.graph.regions)
    return compiler.rows(attention_kernel=attention_kernel, num_segments=num_segments, num_traffic_segments=num_segments * len(COMM))


def _rows_beside_exchanges(
    run: ShardedGraph, profile: ExecutionProfile, phases: Mapping[str, str], place: Mapping[str, int], attention_kernel: str
) -> TimedRows:
    """Of the operators of blocks that neither lead to rows which are exchanged nor come of them, though both are in their block."""
    compiler = _row_compiler(run, profile)
    for op in run.graph.operators:
        if run.exchange_position.get(op.name) is ExchangePosition.BESIDE:
            _add_work(op, run, phases, place, compiler)
    num_segments = len(run.graph.regions) * len(PHASES)
    return compiler.rows(attention_kernel=attention_kernel, num_segments=num_segments, num_traffic_segments=num_segments * len(COMM))


def _launches(graph: Graph, profile: ExecutionProfile, phases: Mapping[str, str], place: Mapping[str, int]) -> NDArray[np.float64]:
    found = np.zeros((len(graph.regions) * len(PHASES), 1))
    for op in graph.operators:
        forward, backward = kernels_of(op, graph, profile)
        found[segment(place[op.layer], phases[op.name])] += forward
        found[segment(place[op.layer], "backward")] += backward
    for region, number in added_gradients(graph).items():
        found[segment(place[region], "backward")] += number
    return found


def _forward_phases(graph: Graph, recompute_operators: Iterable[str], profile: ExecutionProfile) -> dict[str, str]:
    """core, rest or tail for each forward operator: the tail begins at the last operator of a block that saves something.

    A group of operators is recomputed as a function of its own: where recomputation stops early, its last operator is left out, if
    that saves nothing but what it reads.
    """
    tail: set[str] = set()
    for operators in _of_blocks(graph):
        last = max((i for i, op in enumerate(operators) if op.saved), default=0)
        tail.update(op.name for op in operators[last:])
    names = {op.name for op in graph.operators if _is_core(op, recompute_operators)}
    if profile.activations.recompute_stops_early:
        ends = {(op.layer, op.group): op for op in graph.operators if op.group and op.group in recompute_operators}
        names -= {op.name for op in ends.values() if all(saved.of is not None and saved.of < len(op.inputs) for saved in op.saved)}
    return {op.name: "core" if op.name in names else "tail" if op.name in tail else "rest" for op in graph.operators}


def _of_blocks(graph: Graph) -> list[list[Operator]]:
    """The operators of each block."""
    return [graph.operators_of(region.name) for region in graph.regions if region.is_block]


def _is_input_gradient(graph: Graph, traffic: Traffic) -> bool:
    """A tensor-parallel reduction, in backward, of the gradient of a linear operator's input."""
    if traffic.phase is not Pass.BACKWARD or traffic.kind not in (CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER):
        return False
    if comm_class(traffic.axes) != "tensor_parallel":
        return False
    products = [op for op, _ in graph.consumers(traffic.tensor) if op.is_product]
    # of a frozen weight no gradient is made meanwhile
    return bool(products) and not any(_reads_frozen(op, graph) for op in products)


def _reads_frozen(op: Operator, graph: Graph) -> bool:
    tensors = (graph.tensors[operand.tensor] for operand in op.inputs)
    return any(tensor.role is TensorRole.PARAMETER and not tensor.has_gradient for tensor in tensors)


def _add_traffic(
    derivation: ShardedGraph, profile: ExecutionProfile, phases: dict[str, str], place: Mapping[str, int], compiler: RowCompiler
) -> set[tuple[str, str]]:
    """Adds redistributions; returns the (tensor, operator) pairs whose saved input is the producer's shard, gathered again (R17)."""
    graph = derivation.graph

    def add(region: str, phase: str, whose: str, row: Traffic) -> None:
        where = segment(place[region], phase) * len(COMM) + COMM.index(whose)
        compiler.collective(
            row.kind,
            row.axes,
            row.amount,
            segment=where,
            name=row.tensor,
            repeats=row.repeats,
            copies=row.copies,
            is_counted=row.is_counted,
        )

    # what the first operator of a tail reads is still needed
    first_tails = {next((op.name for op in operators if phases[op.name] == "tail"), "") for operators in _of_blocks(graph)}
    for traffic in derivation.traffic:
        phase = "backward"
        if traffic.phase is Pass.FORWARD:
            phase = "rest" if traffic.operator in first_tails else phases[traffic.operator]
            producer = graph.producer(traffic.tensor)
            if phase == "core" and producer is not None and phases[producer.name] != "core":
                phase = "rest"
        name = "input_gradient" if _is_input_gradient(graph, traffic) else comm_class(traffic.axes)
        add(traffic.region, phase, name, traffic)
    regathers: set[tuple[str, str]] = set()
    if profile.activations.saved_input_layout == "producer":
        seen: set[tuple[str, object]] = set()
        for op in graph.operators:
            if not (op.is_product or op.is_attention):
                continue
            for i, operand in enumerate(op.inputs):
                if not any(saved.of == i for saved in op.saved):
                    continue
                source = derivation.left.get(operand.tensor)
                target = derivation.needed[op.name, i]
                if source is None or source.partial or not source.cut_axes - target.cut_axes:
                    continue
                regathers.add((operand.tensor, op.name))
                if (operand.tensor, target) in seen:
                    continue
                seen.add((operand.tensor, target))
                for traffic in derivation.traffic_of(operand.tensor, Pass.FORWARD):
                    if traffic.kind is CollectiveKind.ALL_GATHER:
                        # keys and values come again before anything of attention's backward pass can run: nothing hides that
                        again = "regather" if op.is_product else comm_class(traffic.axes)
                        add(op.layer, "backward", again, traffic)
    return regathers


def _saved_rows(derivation: ShardedGraph, kept: list[Kept], place: Mapping[str, int], compiler: RowCompiler) -> Rows:
    """By region and by what recomputation does to it."""
    graph, rows = derivation.graph, []
    given = {region.name: derivation.entering[region.name] if region.is_block else frozenset[str]() for region in graph.regions}
    for k in kept:
        region = place[k.region]
        name = "boundary" if k.tensor in given[k.region] else "dropped_by_selective" if k.is_dropped else "kept"
        rows.append((region * len(SAVED) + SAVED.index(name), k.tensor, {"amount": compiler.amount(k.amount)}))
    # what repeated layers hand on is kept, but where no gradient comes back to it
    seen = {tensor for region in graph.regions if region.is_repeated for tensor in given[region.name] if graph.tensors[tensor].has_gradient}
    seen |= {k.tensor for k in kept if k.tensor in given[k.region]}
    for op in graph.operators:
        for operand in op.inputs:
            if operand.tensor in given[op.layer] and operand.tensor not in seen:
                seen.add(operand.tensor)
                amount = compiler.amount(derivation.operand_bytes(op, operand))
                rows.append((place[op.layer] * len(SAVED) + SAVED.index("entering"), operand.tensor, {"amount": amount}))
    return plain_rows(rows, ("amount",))


def _peaks(
    derivation: ShardedGraph,
    profile: ExecutionProfile,
    kept: list[Kept],
    core: set[str],
    regathers: set[tuple[str, str]],
    compiler: RowCompiler,
    recomputes: Collection[Recompute],
) -> Peaks:
    """Of backward passes, of a block under each recomputation, and of the forward passes of blocks."""
    terms = Terms(derivation)
    cases: list[list[LiveBytes]] = []
    backward: dict[tuple[int, Recompute], int] = {}
    forward: dict[tuple[int, Recompute], int] = {}
    delayed: dict[tuple[int, Recompute], int] = {}
    backward_of = partial(backward_moments, derivation, profile, kept, core=core, regathers=regathers, terms=terms)
    before_blocks = inner_regions(derivation.graph.regions).start - 1
    for i, region in enumerate(derivation.graph.regions):
        for recompute in recomputes if region.is_block else (Recompute.NONE,):
            backward[i, recompute] = len(cases)
            cases += [backward_of(region=region, recompute=recompute, keeps_weight_gradients=keeps) for keeps in (False, True)]
            if i == before_blocks and profile.stages.pipeline_keeps_boundaries:
                forward[i, recompute] = len(cases)
                cases.append(backward_of(region=region, recompute=recompute, keeps_weight_gradients=False, is_in_buffer=True))
            if region.is_block:
                forward[i, recompute] = len(cases)
                cases.append(forward_moments(derivation, profile, kept, region=region, recompute=recompute, terms=terms))
            exchanges = any(op.name in derivation.exchange_position for op in derivation.graph.operators_of(region.name))
            if profile.communication.delays_weight_gradients and exchanges:
                late = partial(backward_of, region=region, recompute=recompute, delays_weight_gradients=True)
                delayed[i, recompute] = len(cases)
                cases += [late(keeps_weight_gradients=keeps) for keeps in (False, True)]
    amount: list[int] = []
    factor: list[list[float]] = []
    group: list[int] = []
    starts: list[int] = []
    of: list[int] = []
    for moments in cases:
        of.append(len(starts))
        for moment in moments or [{}]:
            starts.append(len(amount))
            for term, times in moment.items() or {terms.number(NOTHING): 0.0}.items():
                size, axes = terms.amounts[term]
                amount.append(compiler.amount(size))
                factor.append([times])
                group.append(compiler.mask(axes))
    return Peaks(
        amount=np.array(amount, dtype=np.int64),
        factor=np.array(factor),
        group=np.array(group, dtype=np.int64),
        starts=np.array(starts, dtype=np.int64),
        of=np.array(of, dtype=np.int64),
        backward=backward,
        forward=forward,
        delayed=delayed,
    )


__all__ = [
    "PHASES",
    "SAVED",
    "Peaks",
    "Program",
    "compile_program",
    "segment",
]
