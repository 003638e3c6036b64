"""A sharded graph compiled into arrays: one row per operator pass, redistribution, saved tensor and parameter.

Derived once per (graph, rule set, profile), symbolically; evaluated on columns of plans (`cost/microbatch.py`). Every row's
size is an *amount*: base * microbatch^e * ceil(padded / |padded axes|) / |axes|.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.context import AttentionHabits, attention_habits
from perfmodel.cost.forward import forward_moments
from perfmodel.cost.kept import kept_tensors
from perfmodel.cost.lifetimes import Kept, Moment, backward_moments
from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.foundation.errors import InputError
from perfmodel.hardware.calibration import COLLECTIVE_CODE, KERNEL_CODE, KernelClass
from perfmodel.parallel.algebra.derive import Amount, Derivation, ParameterLayout, Traffic, amount_of, extent_amount
from perfmodel.parallel.algebra.sharding import TENSOR_AXES
from perfmodel.parallel.habits import with_habits
from perfmodel.parallel.layout import Recompute
from perfmodel.parallel.profile import ExecutionProfile
from perfmodel.workload.graph import (
    REGIONS,
    Extent,
    FusedAttention,
    Graph,
    Operand,
    Operator,
    Pass,
    Product,
    Stream,
    TensorRole,
    Work,
)

DATA_AXES = frozenset(("dp_replicate", "dp_shard"))

#: Parts of one microbatch's work in a region. `core`: what selective recomputation runs again; `tail`: what torch's
#: recomputation leaves out at the end of a layer, since no saved tensor comes after it.
PHASES = ("core", "rest", "tail", "backward")
#: Communication of activations. Tensor-parallel collectives of backward that have a matrix product beside them on which nothing waits
#: are kept apart: gathering a saved input again (the input's gradient is computed meanwhile) and reducing an input's gradient (the
#: weight's gradient is).
COMM = ("tensor_parallel", "context_parallel", "regather", "input_gradient")
SAVED = ("kept", "dropped_by_selective", "boundary")
#: Regions and recomputations whose backward passes have a peak each, with weight gradients that leave at once and with those that stay.
PEAK_CASES = (
    ("embedding", Recompute.NONE),
    ("layer", Recompute.NONE),
    ("layer", Recompute.SELECTIVE),
    ("layer", Recompute.FULL),
    ("head", Recompute.NONE),
)
#: Which of the peaks is that of a layer's forward pass: behind those of backward passes.
FORWARD_PEAK = 2 * len(PEAK_CASES)
NOTHING = Amount(base=0.0)


def segment(region: str, phase: str) -> int:
    return REGIONS.index(region) * len(PHASES) + PHASES.index(phase)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Amounts:
    """[amounts, 1] arrays; axes as indices into `masks`."""

    base: NDArray[np.float64]
    per_sample: NDArray[np.bool_]
    axes: NDArray[np.int64]
    padded_size: NDArray[np.float64]
    padded_axes: NDArray[np.int64]
    masks: tuple[frozenset[str], ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """Rows of one kind, sorted by segment; `starts` and `segments` are for reduceat."""

    names: tuple[str, ...]
    segments: NDArray[np.int64]
    starts: NDArray[np.int64]
    present: NDArray[np.int64]
    columns: dict[str, NDArray[np.int64]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Peaks:
    """Moments of passes as sparse sums: one row for each term, `starts` where a moment begins, `of` where a peak does.

    value of a row: factor * amount, where its group (mask) is none or has more than one rank
    """

    amount: NDArray[np.int64]
    factor: NDArray[np.float64]
    group: NDArray[np.int64]
    starts: NDArray[np.int64]
    of: NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Program:
    """What one microbatch costs on one chip, by rows.

    matmul      columns batch, m, n, k (amounts), mesh
    attention   columns batch, heads, kv_heads, queries, keys (amounts), head_dim, habits (which of `attention_habits`), backward (0/1)
    streaming   columns kernel (code), elements (amount), mesh, backward (0/1: the class's own backward kernel); bytes from `accesses`
                mesh: mask of the tensor axes over which an operator with parameters is cut; a framework that keeps such
                tensors as distributed objects spends host time on each
    traffic     columns kind (code), group (mask), amount
    saved       columns amount; segment = region * len(SAVED) + class
    peaks       moments of the backward passes (`cost/lifetimes.py`) and of a layer's forward pass (`cost/forward.py`)
    """

    derivation: Derivation
    amounts: Amounts
    matmul: Rows
    attention: Rows
    streaming: Rows
    access_amounts: NDArray[np.int64]
    access_starts: NDArray[np.int64]
    traffic: Rows
    saved: Rows
    boundary: int
    logits: int
    peaks: Peaks
    activation_bytes: float
    attention_habits: tuple[AttentionHabits, ...]
    attention_kernel: str
    parameters: tuple[ParameterLayout, ...]


@dataclass(slots=True)
class _Compiler:
    masks: dict[frozenset[str], int] = field(default_factory=lambda: {frozenset(): 0})
    amounts: dict[Amount, int] = field(default_factory=dict)
    known: dict[Amount, int] = field(default_factory=dict)
    """Amounts as they were asked for."""

    def mask(self, axes: frozenset[str]) -> int:
        return self.masks.setdefault(axes, len(self.masks))

    def amount(self, amount: Amount) -> int:
        index = self.known.get(amount)
        if index is None:
            index = self.known[amount] = self._amount(amount)
        return index

    def _amount(self, amount: Amount) -> int:
        if amount.per_sample:
            if not amount.axes >= DATA_AXES:
                raise InputError("rules: batch must be cut by dp_replicate and dp_shard, both; add `batch: [dp_replicate, dp_shard]`")
            # the microbatch is counted per data-parallel rank, so these axes cancel
            amount = Amount(
                base=amount.base,
                per_sample=True,
                axes=amount.axes - DATA_AXES,
                padded_size=amount.padded_size,
                padded_axes=amount.padded_axes,
            )
        return self.amounts.setdefault(amount, len(self.amounts))

    def arrays(self) -> Amounts:
        amounts = list(self.amounts)
        axes = np.array([self.mask(a.axes) for a in amounts])
        padded_axes = np.array([self.mask(a.padded_axes) for a in amounts])
        return Amounts(
            base=np.array([[a.base] for a in amounts]),
            per_sample=np.array([[a.per_sample] for a in amounts]),
            axes=axes,
            padded_size=np.array([[a.padded_size] for a in amounts]),
            padded_axes=padded_axes,
            masks=tuple(self.masks),
        )


def _rows(entries: list[tuple[int, str, dict[str, int]]], columns: Sequence[str]) -> tuple[Rows, list[int]]:
    """Rows sorted by segment (stable), and the order in which the entries now stand."""
    order = sorted(range(len(entries)), key=lambda i: entries[i][0])
    segments = np.array([entries[i][0] for i in order], dtype=np.int64)
    present, starts = np.unique(segments, return_index=True) if len(order) else (np.empty(0, np.int64), np.empty(0, np.int64))
    return (
        Rows(
            names=tuple(entries[i][1] for i in order),
            segments=segments,
            starts=starts,
            present=present,
            columns={name: np.array([entries[i][2][name] for i in order], dtype=np.int64) for name in columns},
        ),
        order,
    )


def _is_core(operator: Operator, recompute_operators: Iterable[str]) -> bool:
    return (bool(operator.group) and operator.group in recompute_operators) or operator.name in recompute_operators


def compile_program(
    derivation: Derivation,
    profile: ExecutionProfile,
    *,
    recompute_operators: tuple[str, ...],
    attention_kernel: str,
) -> Program:
    """Arrays for `derivation` as the framework of `profile` runs it."""
    run = with_habits(derivation, profile)
    graph, shardings = run.graph, run.shardings
    compiler = _Compiler()
    phases = _forward_phases(graph, recompute_operators, profile)
    matmul: list[tuple[int, str, dict[str, int]]] = []
    attention: list[tuple[int, str, dict[str, int]]] = []
    habits: dict[AttentionHabits, int] = {}
    streaming: list[tuple[int, str, dict[str, int], list[Amount]]] = []

    def amount(op: Operator, extent: Extent) -> int:
        return compiler.amount(extent_amount(op, shardings[op.name], extent))

    def mesh(op: Operator) -> int:
        reads_parameter = any(graph.tensors[o.tensor].role is TensorRole.PARAMETER for o in op.inputs)
        cuts = shardings[op.name].values() if reads_parameter else ()
        return compiler.mask(frozenset(axis for axes in cuts for axis in axes) & TENSOR_AXES)

    def stream(op: Operator, phase: str, kernel: str, elements: Amount, accesses: list[Amount]) -> None:
        columns = {
            "kernel": KERNEL_CODE[KernelClass(kernel)],
            "elements": compiler.amount(elements),
            "mesh": mesh(op),
            "backward": int(phase == "backward"),
        }
        streaming.append((segment(op.layer, phase), op.name, columns, accesses))

    def add_work(op: Operator, phase: str, work: Work, name: str) -> None:
        match work:
            case Product():
                sizes = {dim: amount(op, extent) for dim, extent in (("batch", work.batch), ("m", work.m), ("n", work.n), ("k", work.k))}
                matmul.append((segment(op.layer, phase), name, {**sizes, "mesh": mesh(op)}))
            case FusedAttention():
                sizes = {size: amount(op, getattr(work, size)) for size in ("batch", "heads", "kv_heads", "queries", "keys")}
                which = habits.setdefault(attention_habits(work.mask, profile), len(habits))
                others = {"head_dim": work.head_dim, "habits": which, "backward": int(phase == "backward")}
                attention.append((segment(op.layer, phase), name, {**sizes, **others}))
            case Stream() if work.accesses:
                accesses = [extent_amount(op, shardings[op.name], data.extent).scaled(graph.itemsize(op, data)) for data in work.accesses]
                stream(op, phase, work.kernel, extent_amount(op, shardings[op.name], work.elements), accesses)

    for op in graph.operators:
        for work in op.forward:
            add_work(op, phases[op.name], work, op.name)
        for number, work in enumerate(op.backward):
            add_work(op, "backward", work, f"{op.name}.grad{number if len(op.backward) > 1 else ''}")
        readers = graph.consumers(op.output.tensor)
        if len(readers) > 1:
            # gradients of several readers are added: two reads and a write for each after the first
            for reader, i in readers[1:]:
                gradient = amount_of(reader, shardings[reader.name], reader.inputs[i].dims)
                num_bytes = gradient.scaled(graph.tensors[op.output.tensor].itemsize)
                stream(reader, "backward", "add", gradient, [num_bytes] * 3)

    traffic, regathers = _traffic_rows(run, profile, phases, compiler)
    core = {op.name for op in graph.operators if _is_core(op, recompute_operators)}
    tensors = kept_tensors(run, regathers, core, alone=set(recompute_operators))
    saved = _saved_rows(tensors, graph.boundary, compiler)
    sizes: dict[tuple[str, Operand], Amount] = {}
    peaks = _peaks(
        [
            backward_moments(
                run,
                profile,
                tensors,
                region=region,
                recompute=recompute,
                core=core,
                regathers=regathers,
                keeps_weight_gradients=keeps,
                sizes=sizes,
            )
            for region, recompute in PEAK_CASES
            for keeps in (False, True)
        ]
        + [forward_moments(run, tensors, region="layer", sizes=sizes)],
        compiler,
    )
    matmul_rows, _ = _rows(matmul, ("batch", "m", "n", "k", "mesh"))
    attention_rows, _ = _rows(attention, ("batch", "heads", "kv_heads", "queries", "keys", "head_dim", "habits", "backward"))
    streaming_rows, order = _rows([entry[:3] for entry in streaming], ("kernel", "elements", "mesh", "backward"))
    accesses = [[compiler.amount(a) for a in streaming[i][3]] for i in order]
    starts = np.cumsum([0, *(len(a) for a in accesses[:-1])])
    traffic_rows, _ = _rows(traffic, ("kind", "group", "amount"))
    saved_rows, _ = _rows(saved, ("amount",))
    boundary_op = graph.producer(graph.boundary)
    loss = graph.operator(graph.loss)
    if boundary_op is None:
        raise AssertionError("the graph has no block boundary")
    boundary = amount_of(boundary_op, shardings[boundary_op.name], boundary_op.output.dims, scale=graph.activation_bytes)
    return Program(
        derivation=derivation,
        amounts=compiler.arrays(),
        matmul=matmul_rows,
        attention=attention_rows,
        streaming=streaming_rows,
        access_amounts=np.array([a for group in accesses for a in group], dtype=np.int64),
        access_starts=starts,
        traffic=traffic_rows,
        saved=saved_rows,
        boundary=compiler.amount(boundary),
        logits=amount(loss, loss.extent(loss.inputs[0].dims)),
        peaks=peaks,
        activation_bytes=graph.activation_bytes,
        attention_habits=tuple(habits),
        attention_kernel=attention_kernel,
        parameters=run.parameters,
    )


def _forward_phases(graph: Graph, recompute_operators: Iterable[str], profile: ExecutionProfile) -> dict[str, str]:
    """core, rest or tail for each forward operator: the tail begins at the last operator of a layer that saves something.

    A group of operators is recomputed as a function of its own: where recomputation stops early, its last operator is left out, if
    that saves nothing but what it reads.
    """
    layer = [op for op in graph.operators if op.layer == "layer"]
    last = max(i for i, op in enumerate(layer) if op.saved)
    tail = {op.name for op in layer[last:]}
    names = {op.name for op in graph.operators if _is_core(op, recompute_operators)}
    if profile.recompute_stops_early:
        ends = {op.group: op for op in graph.operators if op.group and op.group in recompute_operators}
        names -= {op.name for op in ends.values() if all(saved.of is not None and saved.of < len(op.inputs) for saved in op.saved)}
    return {op.name: "core" if op.name in names else "tail" if op.name in tail else "rest" for op in graph.operators}


def comm_class(axes: frozenset[str]) -> str:
    """Whose communication a collective of activations is: what rides on any tp axis is tensor-parallel."""
    return "tensor_parallel" if axes & TENSOR_AXES else "context_parallel"


def _is_input_gradient(graph: Graph, traffic: Traffic) -> bool:
    """A tensor-parallel reduction, in backward, of the gradient of a linear operator's input."""
    if traffic.phase is not Pass.BACKWARD or traffic.kind not in (CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER):
        return False
    is_tensor_parallel = bool(traffic.axes & TENSOR_AXES)
    return is_tensor_parallel and any(op.is_product for op, _ in graph.consumers(traffic.tensor))


def _traffic_rows(
    derivation: Derivation, profile: ExecutionProfile, phases: dict[str, str], compiler: _Compiler
) -> tuple[list[tuple[int, str, dict[str, int]]], set[tuple[str, str]]]:
    """Redistributions, and the (tensor, operator) pairs whose saved input is the producer's shard, gathered again (R17)."""
    graph = derivation.graph
    entries: list[tuple[int, str, dict[str, int]]] = []

    def add(region: str, phase: str, kind: str, name: str, code: CollectiveKind, axes: frozenset[str], amount: Amount) -> None:
        columns = {"kind": COLLECTIVE_CODE[code], "group": compiler.mask(axes), "amount": compiler.amount(amount)}
        entries.append((segment(region, phase) * len(COMM) + COMM.index(kind), name, columns))

    for traffic in derivation.traffic:
        phase = "backward"
        if traffic.phase is Pass.FORWARD:
            phase = phases[traffic.operator]
            first_tail = next((name for name, p in phases.items() if p == "tail"), "")
            if phase == "tail" and traffic.operator == first_tail:
                phase = "rest"  # the input of the first operator of the tail is still needed
            producer = graph.producer(traffic.tensor)
            if phase == "core" and producer is not None and phases[producer.name] != "core":
                phase = "rest"
        name = "input_gradient" if _is_input_gradient(graph, traffic) else comm_class(traffic.axes)
        add(traffic.region, phase, name, traffic.tensor, traffic.kind, traffic.axes, traffic.amount)
    regathers: set[tuple[str, str]] = set()
    if profile.saved_input_layout == "producer":
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
                for traffic in derivation.traffic:
                    if traffic.tensor == operand.tensor and traffic.phase is Pass.FORWARD and traffic.kind is CollectiveKind.ALL_GATHER:
                        # keys and values come again before anything of attention's backward pass can run: nothing hides that
                        again = "regather" if op.is_product else comm_class(traffic.axes)
                        add(op.layer, "backward", again, operand.tensor, traffic.kind, traffic.axes, traffic.amount)
    return entries, regathers


def _saved_rows(kept: list[Kept], boundary: str, compiler: _Compiler) -> list[tuple[int, str, dict[str, int]]]:
    """By region and by what recomputation does to it."""
    rows = []
    for k in kept:
        name = "boundary" if k.tensor == boundary else "dropped_by_selective" if k.is_dropped else "kept"
        rows.append((REGIONS.index(k.region) * len(SAVED) + SAVED.index(name), k.tensor, {"amount": compiler.amount(k.amount)}))
    return rows


def peak_index(region: str, recompute: Recompute, *, keeps_weight_gradients: bool) -> int:
    """Which row of the peaks. Only a layer is recomputed."""
    case = PEAK_CASES.index((region, recompute if region == "layer" else Recompute.NONE))
    return case * 2 + int(keeps_weight_gradients)


def _peaks(cases: list[list[Moment]], compiler: _Compiler) -> Peaks:
    amount: list[int] = []
    factor: list[list[float]] = []
    group: list[int] = []
    starts: list[int] = []
    of: list[int] = []
    for moments in cases:
        of.append(len(starts))
        for moment in moments or [{}]:
            starts.append(len(amount))
            for (size, axes), times in moment.items() or {(NOTHING, frozenset[str]()): 0.0}.items():
                amount.append(compiler.amount(size))
                factor.append([times])
                group.append(compiler.mask(axes))
    return Peaks(
        amount=np.array(amount, dtype=np.int64),
        factor=np.array(factor),
        group=np.array(group, dtype=np.int64),
        starts=np.array(starts, dtype=np.int64),
        of=np.array(of, dtype=np.int64),
    )


__all__ = [
    "COMM",
    "FORWARD_PEAK",
    "PHASES",
    "SAVED",
    "Amounts",
    "Peaks",
    "Program",
    "Rows",
    "comm_class",
    "compile_program",
    "peak_index",
    "segment",
]
