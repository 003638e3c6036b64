"""Timeline of the predicted step of a pipeline rank: its operators and collectives in order, with the parts of the prediction.

The order of passes is the schedule's (`cost/schedules.py`), and the time of a pass is that of its operators (`cost/evaluate.py`).
The time of each part is the prediction's (`cost/estimate.py`): operators are scaled to the time of their part. Idle time between passes
is the predicted bubble. The spans of a rank therefore sum to the parts, and the parts to the step time.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cache
from itertools import chain, groupby
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from perfmodel.cost.assemble import StepColumns, exposed_each_microbatch, step_columns
from perfmodel.cost.estimate import Estimator, rank_parts, reserved_on_rank
from perfmodel.cost.evaluate import amount_values, members_inside, traffic_times, work_times
from perfmodel.cost.memory.plan import adding_up, scalar
from perfmodel.cost.mixed import MixedEstimator, pools_of, pools_of_pipeline, steps_of_pipelines
from perfmodel.cost.program import PHASES
from perfmodel.cost.rows import Rows
from perfmodel.cost.schedules import schedule_of
from perfmodel.cost.stages import order_on_pools
from perfmodel.cost.step import RegionTimes, exposed_communication, recomputed_phases
from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.foundation.grouping import grouped
from perfmodel.hardware.calibration import COLLECTIVE_CODE
from perfmodel.parallel.algebra.sharding import COMM, EXCHANGED
from perfmodel.parallel.choices import Recompute
from perfmodel.parallel.layout import stages_of_ranks
from perfmodel.parallel.measured import TRACE_NAMES
from perfmodel.parallel.pass_orders import BACKWARD, FORWARD, INPUT_GRADIENT, PAIRED_BACKWARD, WEIGHT_GRADIENT, Pass, pass_times
from perfmodel.parallel.plan import Plan, place_of

#: Maximum of spans in a trace. Beyond it, one span a part is drawn for the operators of a layer, then for those of a pass.
MOST_SPANS = 100_000


class Detail(StrEnum):
    """Level of detail: a span for each operator, for each part of a layer, or for each part of a pass."""

    OPERATORS = "operators"
    LAYERS = "layers"
    PASSES = "passes"


_COMPUTE, _IDLE = "compute", "idle"
_STREAMS, _KINDS = TRACE_NAMES["streams"], TRACE_NAMES["kinds"]
_DATA = ("parameter_gather", "gradient_reduction")
_BETWEEN = ("pipeline_bubble", "pipeline_communication")
_WAIT = "replica_wait"
_KIND_OF_CODE = {code: kind for kind, code in COLLECTIVE_CODE.items()}


class Span(NamedTuple):
    """Interval of a rank's time. A tuple, because a trace has 100,000.

    stream   compute, idle, or the axis of a communicator
    kind     matmul, attention, streaming, or a collective
    hidden   communication that overlaps with compute: not in the step time
    start    0 until the span is drawn
    """

    name: str
    part: str
    stream: str
    kind: str
    time: float
    hidden: bool = False
    start: float = 0.0

    def at(self, start: float) -> Span:
        return Span(*self[:-1], start)


#: Spans of each kind of pass of each region, without start times.
RegionSpans = list[dict[str, list[Span]]]

_PASS_NAMES = {FORWARD: "forward", BACKWARD: "backward", INPUT_GRADIENT: "input gradients", WEIGHT_GRADIENT: "weight gradients"}
_PASS_PARTS = {FORWARD: "forward", BACKWARD: "backward", INPUT_GRADIENT: "backward", WEIGHT_GRADIENT: "weight_gradients"}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankTimeline:
    """Timeline of one rank's step.

    parts    exposed seconds by part; they sum to the step time
    pieces   (start, spans with their starts after it): spans of a pass, of a wait, before and after all passes
    passes   forward and backward passes of micro-batches through virtual stages
    memory   (time, bytes by class), in order of time
    stretch  idle time of the prediction over that of its simulated schedule
    """

    rank: int
    stage: int
    step_time: float
    parts: Mapping[str, float]
    pieces: tuple[tuple[float, list[Span]], ...] = field(repr=False)
    passes: tuple[Span, ...] = field(repr=False)
    memory: tuple[tuple[float, Mapping[str, float]], ...] = field(repr=False)
    memory_moment: str
    stretch: float
    detail: Detail

    @property
    def num_spans(self) -> int:
        return sum(len(spans) for _, spans in self.pieces)

    @property
    def spans(self) -> tuple[Span, ...]:
        return tuple(span.at(start + span.start) for start, spans in self.pieces for span in spans)


def rank_timelines(estimator: Estimator, plan: Plan, ranks: Sequence[int], detail: Detail | None = None) -> list[RankTimeline]:
    """Return the timelines of ranks of a plan. detail None: the finest level with at most `MOST_SPANS` spans."""
    pools = pools_of(estimator)
    alone = [step_columns(pool, [plan]) for pool in pools]
    regions, layers = alone[0].plans.stages.regions, estimator.programs.stage_layers(plan)
    spans = [region_spans(pool, plan, columns) for pool, columns in zip(pools, alone, strict=True)]
    pipelines = steps_of_pipelines(estimator, plan) if isinstance(estimator, MixedEstimator) else {(0,) * plan.layout.pp: alone[0]}
    slowest = max(scalar(columns.step_time) for columns in pipelines.values())
    steps = {}  # of each kind of pipeline, by the pools of its ranks; chips of one kind are one pool
    for on, columns in pipelines.items():
        of_regions = list(chain(*(spans[pool] for pool, _ in groupby(on))))
        steps[on] = _Step(
            plan, columns, [pools[pool] for pool in on], order_on_pools(regions, layers, on, plan.schedule.placement), of_regions, slowest
        )
    kinds = {rank: (steps[pools_of_pipeline(estimator, plan, rank)], place_of(plan, rank)["pp"]) for rank in ranks}
    numbers = ((level, sum(step.num_spans(stage, level) for step, stage in kinds.values())) for level in Detail)
    detail = detail or next((level for level, number in numbers if number <= MOST_SPANS), Detail.PASSES)
    timelines = {(step, stage): step.timeline(stage, detail) for step, stage in set(kinds.values())}
    return [replace(timelines[kinds[rank]], rank=rank) for rank in ranks]


class _Step:
    """Passes of virtual stages, and idle time between the passes of each rank: shared by all timelines of a step.

    estimators   of each pipeline rank
    order        regions of each virtual stage, in forward order
    step_time    of the slowest replicas: the others wait for them before the gradient reduction   [s]
    """

    def __init__(
        self,
        plan: Plan,
        columns: StepColumns,
        estimators: Sequence[Estimator],
        order: list[list[int]],
        spans: RegionSpans,
        step_time: float,
    ) -> None:
        self.plan, self.columns, self.estimators, self.order, self.spans = plan, columns, estimators, order, spans
        self.step_time, self.wait = step_time, step_time - scalar(columns.step_time)
        self.p = p = plan.layout.pp
        self.num_microbatches = m = round(scalar(columns.plans.num_microbatches))
        is_legal = plan.schedule.admits(m, p, len(order) // p)
        drawn = m if is_legal else -(-m // p) * p  # interleaved passes of pools come in groups of p
        orders = [schedule_of(plan.schedule).order(rank, p, drawn, len(order) // p) for rank in range(p)]
        times = _times_of_passes(columns.regions, splits=plan.schedule.splits_backward)
        self.kinds = tuple(times)
        lengths = {kind: [sum(by_region[i] for i in run) for run in order] for kind, by_region in times.items()}
        if plan.schedule.splits_backward:
            lengths[BACKWARD] = [sum(of_stage) for of_stage in zip(lengths[INPUT_GRADIENT], lengths[WEIGHT_GRADIENT], strict=True)]
        self.stages = stages_of_ranks(p, len(order), plan.schedule.placement)
        times_of_passes = pass_times(orders, lengths, placement=plan.schedule.placement, hop=scalar(columns.hop) if p > 1 else 0.0)
        last = max(of_rank[-1][1] for of_rank in times_of_passes)
        self.passes: list[list[Pass]] = [[] for _ in range(p)]
        self.idle: list[list[float]] = [[] for _ in range(p)]  # before each pass, and after the last one
        for passes, idle, order_of_rank, of_rank in zip(self.passes, self.idle, orders, times_of_passes, strict=True):
            now = 0.0
            for (kind, chunk, microbatch), (start, end) in zip(order_of_rank, of_rank, strict=True):
                is_whole = kind in (BACKWARD, PAIRED_BACKWARD)
                is_split = is_whole and plan.schedule.splits_backward
                parts = self.kinds[1:] if is_whole else (kind,)
                passes += [(part, chunk, microbatch) for part in parts]
                idle += [max(start - now, 0.0), *[0.0] * is_split]
                now = end
            idle.append(max(last - now, 0.0))
        self.counts = [Counter((kind, chunk) for kind, chunk, _ in passes) for passes in self.passes]

    def num_spans(self, stage: int, detail: Detail) -> int:
        return sum(n * sum(not span.hidden for span in self.of_pass(stage, *key, detail)) for key, n in self.counts[stage].items())

    def of_pass(self, stage: int, kind: str, chunk: int, detail: Detail) -> list[Span]:
        """Return the spans of a pass of a virtual stage, without start times."""
        run = self.order[self.stages[stage][chunk]]
        layers = [self.spans[i][kind] for i in (run if kind == FORWARD else reversed(run))]
        spans = list(chain(*(map(_by_part, layers) if detail is Detail.LAYERS else layers)))
        return _by_part(spans) if detail is Detail.PASSES else spans

    def timeline(self, stage: int, detail: Detail) -> RankTimeline:
        """Return the timeline of a pipeline stage."""
        runs = Counter(chain(*(self.order[k] for k in self.stages[stage])))
        parts = rank_parts(self.estimators[stage], self.plan, self.columns, [float(runs[i]) for i in range(len(self.spans))])
        of_pass, outside = self.scaled(stage, detail, parts)
        gaps, stretch = self.gaps(stage, parts)
        last = len(self.passes[stage]) - 1
        drawn: dict[tuple[str, int, bool], list[Span]] = {}  # passes of all micro-batches but the last are equal
        pieces, passes, now = list[tuple[float, list[Span]]](), list[Span](), 0.0

        def draw(spans: list[Span]) -> float:
            """Add a piece of the timeline that begins now, and return its length. [s]"""
            nonlocal now
            pieces.append((now, spans))
            length = spans[-1].start + spans[-1].time if spans else 0.0
            now += length
            return length

        draw(_in_order(outside["before"]))
        for i, (kind, chunk, microbatch) in enumerate(self.passes[stage]):
            draw(gaps[i])
            if (key := (kind, chunk, i == last)) not in drawn:
                drawn[key] = self.drawn(stage, *key, of_pass[kind, chunk], outside)
            part = _PASS_PARTS[kind]
            name = f"{_PASS_NAMES[kind]} {microbatch}" + (f" chunk {chunk}" if len(self.order) > self.p else "")
            passes.append(Span(name, part, _COMPUTE, "", draw(drawn[key]), start=pieces[-1][0]))
        draw(_in_order([*gaps[-1], *self.span(_WAIT, self.wait), *outside["after"]]))
        if self.wait:
            parts = adding_up({**parts, _WAIT: self.wait}, self.step_time)
        moment, memory = self.memory(stage, passes, self.step_time)
        return RankTimeline(
            rank=stage,
            stage=stage,
            step_time=self.step_time,
            parts=parts,
            pieces=tuple(pieces),
            passes=tuple(passes),
            memory=memory,
            memory_moment=moment,
            stretch=stretch,
            detail=detail,
        )

    def drawn(
        self, stage: int, kind: str, chunk: int, is_last: bool, spans: Sequence[Span], outside: Mapping[str, list[Span]]
    ) -> list[Span]:
        """Return the hidden and then the exposed spans of a pass, with their starts in it.

        is_last   last pass of the rank: its reduction of the step's gradients overlaps too
        """
        gathers = [span for span in outside[kind] if span.part == _DATA[0]]
        rest = [span for span in outside[kind] if span.part != _DATA[0]]
        exposed = _in_order([*gathers, *(span for span in spans if not span.hidden), *rest])
        length = exposed[-1].start + exposed[-1].time if exposed else 0.0
        shown = [*outside["before"], *outside[kind], *outside["after"]]
        at, hidden = defaultdict[str, float](float), list[Span]()
        for span in _by_part(span for span in (*spans, *self.under(stage, chunk, kind, is_last=is_last, exposed=shown)) if span.hidden):
            time = min(span.time, length - at[span.stream])
            if time > 0:
                hidden.append(span._replace(time=time, start=at[span.stream]))
                at[span.stream] += time
        return [*hidden, *exposed]

    def scaled(
        self, stage: int, detail: Detail, parts: Mapping[str, float]
    ) -> tuple[dict[tuple[str, int], list[Span]], dict[str, list[Span]]]:
        """Return the spans of each pass, scaled to the times of their parts, and the spans outside operators (`outside`)."""
        of_pass = {key: self.of_pass(stage, *key, detail) for key in self.counts[stage]}
        outside, fixed = self.outside(parts)
        natural = defaultdict[str, float](float)
        for key, span in ((key, span) for key, spans in of_pass.items() for span in spans if not span.hidden):
            natural[span.part] += self.counts[stage][key] * span.time
        lefts = {part: time - fixed.get(part, 0.0) for part, time in parts.items()}
        factor = {part: lefts[part] / time for part, time in natural.items() if time > 0}
        outside["after"] += [
            Span(part, part, _stream_of(part), "", left)
            for part, left in lefts.items()
            if left > 0 and not natural.get(part) and part not in _BETWEEN
        ]
        for key, spans in of_pass.items():
            of_pass[key] = [span if span.hidden else span._replace(time=span.time * factor.get(span.part, 1.0)) for span in spans]
        return of_pass, outside

    def outside(self, parts: Mapping[str, float]) -> tuple[dict[str, list[Span]], dict[str, float]]:
        """Return the spans outside operators (before all passes, in each pass, after all passes), and their times by part. [s]"""
        columns, plan, plans, profile = self.columns, self.plan, self.columns.plans, self.estimators[0].profile
        waits = exposed_each_microbatch(
            plans.terms, columns.regions, plans.stages, schedule=plan.schedule, num_ranks=plans.grid.degree["pp"], profile=profile
        )
        names = ("weight_casts", *_DATA, "gradient_accumulation", "gradient_compression", "optimizer")
        times = {name: parts.get(name, 0.0) for name in names}
        times |= {f"{EXCHANGED}_communication": scalar(columns.outside_pipeline.ends), "host": columns.outside_pipeline.constant}
        repeated = {name: self.num_microbatches * scalar(wait) for name, wait in zip(_DATA, (waits.gather, waits.reduction), strict=True)}
        repeated["gradient_accumulation"] = times["gradient_accumulation"]
        spans: dict[str, list[Span]] = {"before": [], **{kind: [] for kind in self.kinds}, "after": []}
        for part, time in times.items():
            per_pass = min(repeated.get(part, 0.0), time)
            kinds = self.kinds[:2] if part == _DATA[0] else self.kinds[-1:]
            once = "before" if part in (_DATA[0], "weight_casts", f"{EXCHANGED}_communication") else "after"
            lengths = {once: time - per_pass} | dict.fromkeys(kinds, per_pass / (len(self.passes[0]) / len(self.kinds) * len(kinds)))
            for where, length in lengths.items():
                spans[where] += self.span(part, length)
        return spans, times

    def span(self, part: str, time: float, *, hidden: bool = False) -> list[Span]:
        """Return the span of a part outside operators; none without a time. [s]"""
        is_whole = part == "gradient_reduction" and not int(self.plan.zero)
        kind = CollectiveKind.ALL_REDUCE.value if is_whole else _KINDS.get(part, "streaming")
        return [Span(part, part, _stream_of(part), kind, time, hidden)] if time > 0 else []

    def gaps(self, stage: int, parts: Mapping[str, float]) -> tuple[list[list[Span]], float]:
        """Return the spans before each pass and after the last one (the bubble, then a send), and the stretch of idle time."""
        idle, target = list(self.idle[stage]), sum(parts.get(part, 0.0) for part in _BETWEEN)
        if sum(idle) <= 0 < target:
            idle[-1] = target
        stretch = target / sum(idle) if sum(idle) > 0 else 1.0
        sends = parts.get("pipeline_communication", 0.0) / target if target else 0.0
        shares = dict(zip(_BETWEEN, (1.0 - sends, sends), strict=True))
        spans = [_in_order(chain(*(self.span(part, time * stretch * share) for part, share in shares.items()))) for time in idle]
        return spans, stretch

    def under(self, stage: int, chunk: int, kind: str, *, is_last: bool, exposed: Sequence[Span]) -> list[Span]:
        """Return the parameter collectives that overlap with the compute of a pass: their full time less the exposed part. [s]"""
        terms, run = self.columns.plans.terms, self.order[self.stages[stage][chunk]]

        def of_run(times: Mapping[str, tuple[Any, ...]], when: str) -> float:
            return sum(scalar(times[when][i]) for i in run) if when in times else 0.0

        is_forward = kind == FORWARD
        gathers = of_run(terms.gather_forward if is_forward else terms.gather_backward, "microbatch") if kind in self.kinds[:2] else 0.0
        reductions = of_run(terms.reduce, "microbatch") + (of_run(terms.reduce, "step") if is_last else 0.0)
        reductions *= kind == self.kinds[-1]
        shown = {part: sum(span.time for span in exposed if span.part == part) for part in _DATA}
        return [
            *self.span(_DATA[0], gathers - shown[_DATA[0]], hidden=True),
            *self.span(_DATA[1], reductions - shown[_DATA[1]], hidden=True),
        ]

    def memory(self, stage: int, passes: Sequence[Span], step_time: float) -> tuple[str, tuple[tuple[float, dict[str, float]], ...]]:
        """Return the moment of the peak, and memory by class over the step: activations of the passes in flight, and the peak. [byte]

        Temporary buffers and gathered parameters are drawn at the peak only.
        """
        saved, moment, classes = reserved_on_rank(self.estimators[stage], self.plan, stage)
        order, in_flight = self.passes[stage], [0.0]
        changes = {FORWARD: 1.0, self.kinds[-1]: -1.0}
        for kind, chunk, _ in order:
            in_flight.append(in_flight[-1] + len(self.order[self.stages[stage][chunk]]) * changes.get(kind, 0.0))
        backward = [i for i, (kind, _, _) in enumerate(order) if kind != FORWARD]
        peak = max(backward, key=lambda i: in_flight[i])
        lasting = {name: size for name, size in classes.items() if name not in ("temporary", "gathered_parameters", "activations")}
        transient = sum(classes.values()) - sum(lasting.values())

        @cache
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


def _stream_of(part: str) -> str:
    return str(_STREAMS.get(part.removesuffix("_communication"), _COMPUTE))


def _in_order(spans: Iterable[Span]) -> list[Span]:
    """Return the spans one after the other, from 0; none without a time."""
    placed, now = list[Span](), 0.0
    for span in spans:
        if span.time > 0:
            placed.append(span.at(now))
            now += span.time
    return placed


def _by_part(spans: Iterable[Span]) -> list[Span]:
    """Return one span for each part and kind, hidden or not."""
    times = defaultdict[tuple[str, str, str, bool], float](float)
    for span in spans:
        times[span.part, span.stream, span.kind, span.hidden] += span.time
    return [Span(kind or part, part, stream, kind, time, hidden) for (part, stream, kind, hidden), time in times.items()]


def region_spans(estimator: Estimator, plan: Plan, columns: StepColumns) -> RegionSpans:
    """Return the spans of each kind of pass of each region (backward with recomputation), in order, host time last. [s]"""
    program = columns.plans.program
    apart = set()
    if plan.schedule.splits_backward and (rows := program.weight_gradients) is not None:
        products = (rows.matmul, rows.grouped, rows.low, rows.low_grouped, rows.convolution)
        apart = {_first_name(name) for group in products for name in group.names}
    times = _times_of_passes(columns.regions, splits=plan.schedule.splits_backward)
    by_segment = grouped(_operator_spans(estimator, plan, columns), itemgetter(0))

    def ordered(region: int, phases: Iterable[str]) -> list[Span]:
        entries = (entry for phase in phases for entry in by_segment.get(region * len(PHASES) + PHASES.index(phase), ()))
        return [span for _, _, span in sorted(entries, key=itemgetter(1))]

    spans: RegionSpans = []
    for i, region in enumerate(program.regions):
        again = recomputed_phases(plan.recompute, estimator.profile) if region.is_block else ()
        repeated = [span._replace(part="recompute") if span.part == "forward" else span for span in ordered(i, again)]
        forward = ordered(i, (phase for phase in PHASES if phase != "backward"))
        backward = repeated + ordered(i, ("backward",))[::-1]
        weights = [span for span in backward if _first_name(span.name) in apart]
        backward = [span for span in backward if _first_name(span.name) not in apart]
        of_region = dict(zip(times, (forward, backward, weights), strict=False))
        for kind, by_region in times.items():
            host = by_region[i] - sum(span.time for span in of_region[kind] if not span.hidden)
            if host > 1e-12 * by_region[i]:
                of_region[kind].append(Span("host", "host", _IDLE, "", host))
        spans.append(of_region)
    return spans


def _times_of_passes(regions: RegionTimes, *, splits: bool) -> dict[str, list[float]]:
    """Return the time of each region in each kind of pass, in their order; activations stay until the last, which reduces gradients. [s]"""
    forward, backward = ([scalar(time) for time in times] for times in (regions.forward, regions.backward))
    if not splits:
        return {FORWARD: forward, BACKWARD: backward}
    weights = [scalar(time) for time in regions.weights]
    inputs = [time - later for time, later in zip(backward, weights, strict=True)]
    return {FORWARD: forward, INPUT_GRADIENT: inputs, WEIGHT_GRADIENT: weights}


def _first_name(name: str) -> str:
    """Return the first product of those that run as one kernel."""
    return name.partition(" + ")[0]


def _operator_spans(estimator: Estimator, plan: Plan, columns: StepColumns) -> Iterator[tuple[int, float, Span]]:
    """Yield each operator and collective with its segment of the program and its position in it; a collective also has a hidden span."""
    program, profile, micro, grid = columns.plans.program, estimator.profile, columns.plans.micro, columns.plans.grid
    operators, rows, machine = program.derivation.graph.operators, program.rows, estimator.machine
    operator_index = {op.name: i for i, op in enumerate(operators)}
    producers = {op.output.tensor: i for i, op in enumerate(operators)}
    amount, sizes = amount_values(rows.amounts, grid, np.array([float(plan.micro_batch)]), float(plan.job.seq_len))
    for kind, work_rows, times in work_times(rows, machine, amount, sizes):
        for name, segment, time in zip(work_rows.names, work_rows.segments.tolist(), _repeated(times, work_rows), strict=True):
            first = _first_name(name).rpartition(".grad")[0] or name
            part = "backward" if PHASES[segment % len(PHASES)] == "backward" else "forward"
            yield segment, operator_index.get(first, 0), Span(name, part, _COMPUTE, kind, time)
    if not rows.traffic.names:
        return
    named_axes = plan.assignment is None or plan.assignment.has_named_axes
    times, _, _ = traffic_times(rows, machine, members_inside(rows, grid), amount, sizes)
    traffic, codes, sent = rows.traffic, rows.traffic.columns["kind"].tolist(), exposed_communication(micro, profile)
    for name, cell, code, time in zip(traffic.names, traffic.segments.tolist(), codes, _repeated(times, traffic), strict=True):
        segment, j = divmod(cell, len(COMM))
        if COMM[j] == "regather" and program.regions[segment // len(PHASES)].is_block and plan.recompute is Recompute.FULL:
            continue
        total = scalar(micro.communication[cell])
        share = scalar(sent[cell]) / total if total else 0.0
        if COMM[j] == EXCHANGED and profile.exchanges.hides_exchanges:
            share = 1.0  # `rank_parts` contains the exposed part
        shown = "tensor_parallel" if COMM[j] in ("regather", "input_gradient") else COMM[j]
        part = f"{shown}_communication" if named_axes or shown == EXCHANGED else "redistributions"
        exposed = Span(name, part, _STREAMS[COMM[j]], _KIND_OF_CODE[code].value, time * share)
        yield from (
            (segment, producers.get(name, -1) + 0.5, span) for span in (exposed, exposed._replace(time=time * (1.0 - share), hidden=True))
        )


def _repeated(times: Any, rows: Rows) -> list[float]:
    """Return the time of each row, times its repeats. [s]"""
    column: list[float] = (times if rows.repeats is None else times * rows.repeats)[:, 0].tolist()
    return column
