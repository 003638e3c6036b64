"""Timeline of the predicted step of a pipeline rank: its operators and collectives in order, with the parts of the prediction.

The order of passes is the schedule's (`cost/schedule_orders.py`), and the time of a pass is that of its operators (`cost/evaluate.py`).
The time of each part is the prediction's (`cost/estimate.py`): operators are scaled to the time of their part. Idle time between passes
is the predicted bubble. The spans of a rank therefore sum to the parts, and the parts to the step time.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import chain
from typing import Any

import numpy as np

from perfmodel.cost.assemble import StepColumns, step_columns
from perfmodel.cost.estimate import Estimator, rank_parts, reserved_on_rank
from perfmodel.cost.evaluate import amount_values, members_inside, traffic_times, work_times
from perfmodel.cost.memory.plan import scalar
from perfmodel.cost.mixed import MixedEstimator, pools_of_pipeline, steps_of_pipelines
from perfmodel.cost.overlap import exposed_each_microbatch
from perfmodel.cost.program import PHASES
from perfmodel.cost.rows import Rows
from perfmodel.cost.schedule_orders import BACKWARD, FORWARD, order_of, pass_starts
from perfmodel.cost.stages import order_on_pools, runs_of_ranks, runs_on_pools, stage_order
from perfmodel.cost.step import communication_time, exposed_fraction, recomputed_phases
from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.hardware.calibration import COLLECTIVE_CODE
from perfmodel.parallel.algebra.traffic_classes import COMM, EXCHANGED
from perfmodel.parallel.layout import Recompute
from perfmodel.parallel.plan import Plan, place_of

#: Maximum of spans in a trace. Beyond it, one span a part is drawn for the operators of a layer, then for those of a pass.
MOST_SPANS = 100_000


class Detail(StrEnum):
    """Level of detail: a span for each operator, for each part of a layer, or for each part of a pass."""

    OPERATORS = "operators"
    LAYERS = "layers"
    PASSES = "passes"


_COMPUTE, _IDLE = "compute", "idle"
#: Stream of each class of collectives, and of parts that are communication or idle time; the other parts are compute.
_STREAMS: Mapping[str, str] = {
    "tensor_parallel": "tp",
    "regather": "tp",
    "input_gradient": "tp",
    "context_parallel": "cp",
    "expert_parallel": "ep",
    "parameter_gather": "dp",
    "gradient_reduction": "dp",
    "pipeline": "pp",
    "pipeline_bubble": _IDLE,
    "host": _IDLE,
}
_KIND_OF_CODE = {code: kind for kind, code in COLLECTIVE_CODE.items()}


@dataclass(frozen=True, slots=True)
class Span:
    """Interval of a rank's time.

    stream   compute, idle, or the axis of a communicator
    kind     matmul, attention, streaming, or a collective
    hidden   communication that overlaps with compute: not in the step time
    """

    name: str
    part: str
    stream: str
    kind: str
    start: float
    time: float
    hidden: bool = False


@dataclass(frozen=True, slots=True)
class PassSpan:
    """Forward or backward pass of a micro-batch through a virtual stage."""

    name: str
    start: float
    time: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankTimeline:
    """Timeline of one rank's step.

    parts    exposed seconds by part; they sum to the step time
    memory   (time, bytes by class), in order of time
    stretch  idle time of the prediction over that of its simulated schedule
    """

    rank: int
    stage: int
    step_time: float
    parts: Mapping[str, float]
    spans: tuple[Span, ...]
    passes: tuple[PassSpan, ...]
    memory: tuple[tuple[float, Mapping[str, float]], ...]
    memory_moment: str
    stretch: float
    detail: Detail


@dataclass(frozen=True, slots=True)
class _Piece:
    """Work of a pass that has no start time yet. hidden: time that overlaps with compute. [s]"""

    name: str
    part: str
    stream: str
    kind: str
    time: float
    hidden: float = 0.0


def rank_timelines(estimator: Estimator, plan: Plan, ranks: Sequence[int], detail: Detail | None = None) -> list[RankTimeline]:
    """Return the timelines of ranks of a plan. detail None: the finest level with at most `MOST_SPANS` spans."""
    stages = {rank: place_of(plan, rank)["pp"] if plan.layout.pp > 1 else 0 for rank in ranks}
    pools = {rank: pools_of_pipeline(estimator, plan, rank) if isinstance(estimator, MixedEstimator) else () for rank in ranks}
    steps = _steps(estimator, plan)
    kinds = {rank: (pools[rank], stage) for rank, stage in stages.items()}
    if detail is None:
        numbers = {level: sum(steps[pipeline].num_spans(stage, level) for pipeline, stage in kinds.values()) for level in Detail}
        detail = next((level for level in Detail if numbers[level] <= MOST_SPANS), Detail.PASSES)
    timelines = {(pipeline, stage): steps[pipeline].timeline(stage, detail) for pipeline, stage in set(kinds.values())}
    return [replace(timelines[kind], rank=rank) for rank, kind in kinds.items()]


def _steps(estimator: Estimator, plan: Plan) -> dict[tuple[int, ...], _Step]:
    """Return the step of each kind of pipeline by the pools of its ranks; of chips of one kind there is one, by `()`."""
    layers, p = estimator.programs.stage_layers(plan), plan.layout.pp
    if not isinstance(estimator, MixedEstimator):
        columns = step_columns(estimator, [plan])
        regions = columns.plans.stages.regions
        pieces = region_pieces(estimator, plan, columns)
        order, runs = stage_order(regions, layers), runs_of_ranks(regions, layers, p)
        return {(): _Step(plan, columns, [estimator] * p, order=order, runs=runs, pieces=pieces)}
    alone = [step_columns(pool, [plan]) for pool in estimator.pools]
    by_pool = [region_pieces(pool, plan, columns) for pool, columns in zip(estimator.pools, alone, strict=True)]
    regions, steps = alone[0].plans.stages.regions, {}
    for pools, columns in steps_of_pipelines(estimator, plan).items():
        copies = [pool for rank, pool in enumerate(pools) if rank == 0 or pool != pools[rank - 1]]
        steps[pools] = _Step(
            plan,
            columns,
            [estimator.pools[pool] for pool in pools],
            order=order_on_pools(regions, layers, pools),
            runs=runs_on_pools(regions, layers, pools),
            pieces=list(chain(*(by_pool[pool] for pool in copies))),
        )
    return steps


class _Step:
    """Passes of virtual stages, and idle time between the passes of each rank: shared by all timelines of a step.

    estimators   of each pipeline rank
    order        regions of each virtual stage, in forward order
    runs         number of times that each pipeline rank runs each region
    pieces       of each region (`region_pieces`)
    """

    def __init__(
        self,
        plan: Plan,
        columns: StepColumns,
        estimators: Sequence[Estimator],
        *,
        order: list[list[int]],
        runs: Sequence[tuple[float, ...]],
        pieces: list[tuple[list[_Piece], list[_Piece]]],
    ) -> None:
        self.estimators, self.plan, self.columns, self.p = estimators, plan, columns, plan.layout.pp
        self.order, self.runs, self.regions = order, runs, pieces
        regions, p = columns.regions, self.p
        self.orders = [order_of(plan.schedule, rank, p, plan.num_microbatches, len(self.order) // p) for rank in range(p)]
        forward, backward = ([sum(scalar(times[i]) for i in run) for run in self.order] for times in (regions.forward, regions.backward))
        starts = pass_starts(self.orders, forward, backward, hop=scalar(columns.hop) if p > 1 else 0.0)
        lengths = {FORWARD: forward, BACKWARD: backward}
        ends: list[list[float]] = []
        for rank, passes in enumerate(self.orders):
            ends.append([start + lengths[kind][chunk * p + rank] for start, (kind, chunk, _) in zip(starts[rank], passes, strict=True)])
        self.counts = [Counter((kind, chunk) for kind, chunk, _ in passes) for passes in self.orders]
        last = max(rank[-1] for rank in ends)
        self.idle = [[max(b - a, 0.0) for a, b in zip([0.0, *ends[i]], [*starts[i], last], strict=True)] for i in range(p)]

    def num_spans(self, stage: int, detail: Detail) -> int:
        return sum(times * len(self.pieces(stage, *key, detail)) for key, times in self.counts[stage].items())

    def pieces(self, stage: int, kind: str, chunk: int, detail: Detail) -> list[_Piece]:
        """Return the pieces of a pass of a virtual stage."""
        run = self.order[chunk * self.p + stage]
        layers = [self.regions[i][0] for i in run] if kind == FORWARD else [self.regions[i][1] for i in reversed(run)]
        if detail is Detail.LAYERS:
            layers = list(map(_by_part, layers))
        pieces = list(chain(*layers))
        return _by_part(pieces) if detail is Detail.PASSES else pieces

    def timeline(self, stage: int, detail: Detail) -> RankTimeline:
        """Return the timeline of a pipeline stage."""
        parts = rank_parts(self.estimators[stage], self.plan, self.columns, self.runs[stage])
        templates = {key: self.pieces(stage, *key, detail) for key in self.counts[stage]}
        others, fixed = self.other_pieces(parts)
        natural = defaultdict[str, float](float)
        for key, pieces in templates.items():
            for piece in pieces:
                natural[piece.part] += self.counts[stage][key] * piece.time
        factor = {part: (parts[part] - fixed.get(part, 0.0)) / time for part, time in natural.items() if time > 0}
        others["after"] += [
            _Piece(part, part, _stream_of(part), "", left)
            for part, time in parts.items()
            if (left := time - fixed.get(part, 0.0)) > 0 and not natural.get(part) and part not in _BETWEEN
        ]
        idle, target = list(self.idle[stage]), sum(parts.get(part, 0.0) for part in _BETWEEN)
        if sum(idle) <= 0 < target:
            idle[-1] = target
        stretch = target / sum(idle) if sum(idle) > 0 else 1.0
        sends = parts.get("pipeline_communication", 0.0) / target if target else 0.0
        drawn, pass_spans = _Drawing(), list[PassSpan]()
        drawn.add(others["before"])
        for i, (kind, chunk, microbatch) in enumerate(self.orders[stage]):
            drawn.add(self.gap(idle[i] * stretch, sends))
            scaled = [replace(piece, time=piece.time * factor.get(piece.part, 1.0)) for piece in templates[kind, chunk]]
            gathers = [piece for piece in others[kind] if piece.part == "parameter_gather"]
            pieces = [*gathers, *scaled, *(piece for piece in others[kind] if piece not in gathers)]
            length = sum(piece.time for piece in pieces)
            name = f"{'forward' if kind == FORWARD else 'backward'} {microbatch}" + (f" chunk {chunk}" if len(self.order) > self.p else "")
            pass_spans.append(PassSpan(name, drawn.now, length))
            shown = [*others["before"], *others[kind], *others["after"]]
            drawn.hidden([*scaled, *self.under(stage, chunk, kind, is_last=i + 1 == len(self.orders[stage]), exposed=shown)], length)
            drawn.add(pieces)
        drawn.add([*self.gap(idle[-1] * stretch, sends), *others["after"]])
        step_time = float(self.columns.step_time[0])
        moment, memory = self.memory(stage, pass_spans, step_time)
        return RankTimeline(
            rank=stage,
            stage=stage,
            step_time=step_time,
            parts=parts,
            spans=tuple(drawn.spans),
            passes=tuple(pass_spans),
            memory=memory,
            memory_moment=moment,
            stretch=stretch,
            detail=detail,
        )

    def other_pieces(self, parts: Mapping[str, float]) -> tuple[dict[str, list[_Piece]], dict[str, float]]:
        """Return the pieces outside operators (before all passes, in each pass, after all passes), and their times by part. [s]"""
        columns, plan, plans, profile = self.columns, self.plan, self.columns.plans, self.estimators[0].profile
        waits = exposed_each_microbatch(
            plans.terms, columns.regions, plans.stages, schedule=plan.schedule, num_ranks=plans.grid.degree["pp"], profile=profile
        )
        times = {name: parts.get(name, 0.0) for name in ("weight_casts", *_DATA, "gradient_accumulation", "optimizer")}
        times |= {f"{EXCHANGED}_communication": scalar(columns.outside_pipeline.ends), "host": columns.outside_pipeline.constant}
        repeated = {name: plan.num_microbatches * scalar(wait) for name, wait in zip(_DATA, (waits.gather, waits.reduction), strict=True)}
        repeated["gradient_accumulation"] = times["gradient_accumulation"]
        pieces: dict[str, list[_Piece]] = {"before": [], FORWARD: [], BACKWARD: [], "after": []}
        for part, time in times.items():
            per_pass = min(repeated.get(part, 0.0), time)
            kinds = (FORWARD, BACKWARD) if part == _DATA[0] else (BACKWARD,)
            once = "before" if part in (_DATA[0], "weight_casts", f"{EXCHANGED}_communication") else "after"
            lengths = {once: time - per_pass} | dict.fromkeys(kinds, per_pass / (len(self.orders[0]) / 2 * len(kinds)))
            for where, length in lengths.items():
                if length > 0:
                    pieces[where].append(self.outside(part, length))
        return pieces, times

    def outside(self, part: str, time: float, hidden: float = 0.0) -> _Piece:
        """Return the piece of a part outside operators. [s]"""
        is_whole = part == "gradient_reduction" and not int(self.plan.zero)
        kind = CollectiveKind.ALL_REDUCE.value if is_whole else _KINDS.get(part, "streaming")
        return _Piece(part, part, _stream_of(part), kind, time, hidden)

    def gap(self, time: float, sends: float) -> list[_Piece]:
        """Return the time between two passes: the bubble, then a send. sends: share of sends. [s]"""
        both = zip(_BETWEEN, (time * (1.0 - sends), time * sends), strict=True)
        return [self.outside(part, length) for part, length in both if length > 0]

    def under(self, stage: int, chunk: int, kind: str, *, is_last: bool, exposed: Sequence[_Piece]) -> list[_Piece]:
        """Return the parameter collectives that overlap with the compute of a pass: their full time less the exposed part. [s]"""
        terms, run = self.columns.plans.terms, self.order[chunk * self.p + stage]

        def of_run(times: Mapping[str, tuple[Any, ...]], when: str) -> float:
            return sum(scalar(times[when][i]) for i in run) if when in times else 0.0

        is_forward = kind == FORWARD
        gathers = of_run(terms.gather_forward if is_forward else terms.gather_backward, "microbatch")
        reductions = 0.0 if is_forward else of_run(terms.reduce, "microbatch") + (of_run(terms.reduce, "step") if is_last else 0.0)
        shown = [sum(piece.time for piece in exposed if piece.part == part) for part in _DATA]
        hidden = dict(zip(_DATA, (gathers - shown[0], reductions - shown[1]), strict=True))
        return [self.outside(part, 0.0, time) for part, time in hidden.items() if time > 0]

    def memory(self, stage: int, passes: Sequence[PassSpan], step_time: float) -> tuple[str, tuple[tuple[float, dict[str, float]], ...]]:
        """Return the moment of the peak, and memory by class over the step: activations of the passes in flight, and the peak. [byte]

        Temporary buffers and gathered parameters are drawn at the peak only.
        """
        saved, moment, classes = reserved_on_rank(self.estimators[stage], self.plan, stage)
        order, in_flight = self.orders[stage], [0.0]
        for kind, chunk, _ in order:
            in_flight.append(in_flight[-1] + len(self.order[chunk * self.p + stage]) * (1.0 if kind == FORWARD else -1.0))
        backward = [i for i, (kind, _, _) in enumerate(order) if kind == BACKWARD]
        peak = max(backward, key=lambda i: in_flight[i])
        lasting = {name: size for name, size in classes.items() if name not in ("temporary", "gathered_parameters", "activations")}
        transient = sum(classes.values()) - sum(lasting.values())

        def holding(layers: float) -> dict[str, float]:
            return {**lasting, "activations": min(saved * layers / in_flight[backward[0]], transient)}

        at_optimizer = "optimizer" in moment
        points = [(0.0, holding(0.0))]
        for i, span in enumerate(passes):
            points.append((span.start, dict(classes) if i == peak and not at_optimizer else holding(max(in_flight[i : i + 2]))))
            points.append((span.start + span.time, holding(in_flight[i + 1])))
        if at_optimizer:
            points.append(((points[-1][0] + step_time) / 2.0, dict(classes)))
        return moment, (*points, (step_time, holding(0.0)))


_DATA = ("parameter_gather", "gradient_reduction")
_BETWEEN = ("pipeline_bubble", "pipeline_communication")
_KINDS = {
    "parameter_gather": CollectiveKind.ALL_GATHER.value,
    "gradient_reduction": CollectiveKind.REDUCE_SCATTER.value,
    "pipeline_communication": CollectiveKind.SEND_RECV.value,
    f"{EXCHANGED}_communication": CollectiveKind.ALL_TO_ALL.value,
    "host": "",
    "pipeline_bubble": "",
}


def _stream_of(part: str) -> str:
    return _STREAMS.get(part.removesuffix("_communication"), _COMPUTE)


class _Drawing:
    """Spans of a rank, in order."""

    def __init__(self) -> None:
        self.now, self.spans = 0.0, list[Span]()

    def add(self, pieces: Iterable[_Piece]) -> None:
        for piece in pieces:
            if piece.time > 0:
                self.spans.append(Span(piece.name, piece.part, piece.stream, piece.kind, self.now, piece.time))
                self.now += piece.time

    def hidden(self, pieces: Iterable[_Piece], available: float) -> None:
        """Add communication that overlaps with the pass that begins now: one span for each stream and part."""
        at: defaultdict[str, float] = defaultdict(float)
        for piece in _by_part(pieces):
            time = min(piece.hidden, available - at[piece.stream])
            if time > 0:
                self.spans.append(Span(piece.name, piece.part, piece.stream, piece.kind, self.now + at[piece.stream], time, hidden=True))
                at[piece.stream] += time


def _by_part(pieces: Iterable[_Piece]) -> list[_Piece]:
    """Return one piece for each part and kind."""
    times, hidden = defaultdict[tuple[str, str, str], float](float), defaultdict[tuple[str, str, str], float](float)
    for piece in pieces:
        key = piece.part, piece.stream, piece.kind
        times[key] += piece.time
        hidden[key] += piece.hidden
    return [_Piece(key[2] or key[0], *key, time, hidden[key]) for key, time in times.items()]


def region_pieces(estimator: Estimator, plan: Plan, columns: StepColumns) -> list[tuple[list[_Piece], list[_Piece]]]:
    """Return the pieces of each region's forward and backward pass (with recomputation), in order, host time last. [s]"""
    program, profile, micro = columns.plans.program, estimator.profile, columns.plans.micro
    graph, rows, machine, grid = program.derivation.graph, program.rows, estimator.machine, columns.plans.grid
    operator_index = {op.name: i for i, op in enumerate(graph.operators)}
    producers = {op.output.tensor: i for i, op in enumerate(graph.operators)}
    amount, sizes = amount_values(rows.amounts, grid, np.array([float(plan.micro_batch)]), float(plan.job.seq_len))
    by_region: list[dict[str, list[tuple[float, _Piece]]]] = [{phase: [] for phase in PHASES} for _ in program.regions]
    named_axes = plan.assignment is None or plan.assignment.has_named_axes
    for kind, work_rows, times in work_times(rows, machine, amount, sizes):
        for name, segment, time in zip(work_rows.names, work_rows.segments.tolist(), _repeated(times, work_rows), strict=True):
            region, phase = divmod(segment, len(PHASES))
            first = name.partition(" + ")[0].rpartition(".grad")[0] or name
            part = "backward" if PHASES[phase] == "backward" else "forward"
            by_region[region][PHASES[phase]].append((float(operator_index.get(first, 0)), _Piece(name, part, _COMPUTE, kind, time)))
    if rows.traffic.names:
        times, _, _ = traffic_times(rows, machine, members_inside(rows, grid), amount, sizes)
        traffic, codes = rows.traffic, rows.traffic.columns["kind"].tolist()
        for name, cell, code, time in zip(traffic.names, traffic.segments.tolist(), codes, _repeated(times, traffic), strict=True):
            segment, j = divmod(cell, len(COMM))
            region, phase = divmod(segment, len(PHASES))
            total = scalar(micro.communication[cell])
            share = scalar(communication_time(micro, profile, segment, j)) / total if total else 0.0
            share *= exposed_fraction(profile, COMM[j])
            if COMM[j] == EXCHANGED and profile.communication.hides_exchanges:
                share = 1.0  # `rank_parts` contains the exposed part
            if COMM[j] == "regather" and program.regions[region].is_block and plan.recompute is Recompute.FULL:
                continue
            shown = "tensor_parallel" if COMM[j] in ("regather", "input_gradient") else COMM[j]
            part = f"{shown}_communication" if named_axes or shown == EXCHANGED else "redistributions"
            piece = _Piece(name, part, _STREAMS[COMM[j]], _KIND_OF_CODE[code].value, time * share, time * (1.0 - share))
            by_region[region][PHASES[phase]].append((producers.get(name, -1) + 0.5, piece))
    both = []
    for region, phases in enumerate(by_region):
        forward = _ordered(entry for phase in PHASES if phase != "backward" for entry in phases[phase])
        again = recomputed_phases(plan.recompute, profile) if program.regions[region].is_block else ()
        repeated = [
            replace(piece, part="recompute") if piece.part == "forward" else piece
            for piece in _ordered(entry for phase in again for entry in phases[phase])
        ]
        backward = repeated + _ordered(phases["backward"])[::-1]
        for pieces, total in ((forward, scalar(columns.regions.forward[region])), (backward, scalar(columns.regions.backward[region]))):
            host = total - sum(piece.time for piece in pieces)
            if host > 1e-12 * total:
                pieces.append(_Piece("host", "host", _IDLE, "", host))
        both.append((forward, backward))
    return both


def _repeated(times: Any, rows: Rows) -> list[float]:
    """Return the time of each row, times its repeats. [s]"""
    column: list[float] = (times if rows.repeats is None else times * rows.repeats)[:, 0].tolist()
    return column


def _ordered(pieces: Iterable[tuple[float, _Piece]]) -> list[_Piece]:
    return [piece for _, piece in sorted(pieces, key=lambda entry: entry[0])]
