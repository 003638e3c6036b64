"""Space of plans: every knob, its range and the canonical form, in which one plan is one row (docs/space.md)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.memory.chip import live_of_table, live_table
from perfmodel.cost.memory.moments import At
from perfmodel.cost.stages import Stages, stage_columns, stages_of
from perfmodel.foundation.errors import InputError, suggest
from perfmodel.foundation.session import session_cache
from perfmodel.frameworks.options import HEAD_TAIL
from perfmodel.frameworks.profile import ExecutionProfile
from perfmodel.frameworks.runnable import ANYTHING, Runs
from perfmodel.parallel.algebra.degrees import admits, fine_sizes, present_axes
from perfmodel.parallel.algebra.folding import foldings
from perfmodel.parallel.algebra.rules import RuleSet, default_rule_sets, load_rule_set
from perfmodel.parallel.assignment import cuts_alike
from perfmodel.parallel.choices import ULYSSES, ULYSSES_RULES, USUAL_DISPATCHERS, AttentionKernel, Dispatcher, PipelineSchedule, Recompute
from perfmodel.parallel.knobs import searched_knobs
from perfmodel.parallel.layout import (
    DEFAULT_ORDER,
    STAGES_WITHOUT_LAYERS,
    Placement,
    divisors,
    even_stage_layers,
    shorter_ends_stage_layers,
    stages_of_ranks,
)
from perfmodel.parallel.plan import DEFAULT_RECOMPUTE_OPERATORS
from perfmodel.parallel.schedule_table import FILE, AnySchedule, ScheduleTable
from perfmodel.parallel.stage_cuts import are_alike, default_stage_layers
from perfmodel.workload.adapters import regions_in_training
from perfmodel.workload.job import TrainingJob

#: Orders of the axes on the network that a search tries, innermost first. Megatron's default; pipeline inside the data axes
#: (its tp-cp-pp-dp mapping); pipeline between the two data axes; replicas inside shards; context innermost; data inside context.
SEARCHED_ORDERS: tuple[tuple[str, ...], ...] = (
    DEFAULT_ORDER,
    ("tp", "cp", "pp", "dp_shard", "dp_replicate"),
    ("tp", "cp", "dp_shard", "pp", "dp_replicate"),
    ("tp", "cp", "dp_replicate", "dp_shard", "pp"),
    ("cp", "tp", "dp_shard", "dp_replicate", "pp"),
    ("tp", "dp_shard", "dp_replicate", "cp", "pp"),
)

#: Knobs that a search fixes, bounds and tries.
KNOBS = searched_knobs()

#: Tokens of a sequence from which a search tries Ulysses as well as a framework's other form of context parallelism.
LONG_SEQUENCE = 16384

#: Bits of `LayoutRows.rules`, for two dispatchers.
MOST_RULE_SETS = 31


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Part of the space that is searched.

    fixed          knob -> its only value; `dp` is the product of both data-parallel degrees
    maximum        knob -> its largest value (whole-number knobs)
    orders         orders of the axes on the network
    rules          rule sets, such as `searched_rules` of a framework; empty: `default_rule_sets`, which differ in `sequence_parallel`
    runs           limits of a framework; balanced_context: 2 cp must divide its sequences
    recompute_operators   operators that selective recomputation runs again
    lists          further lists of them, tried for layouts that may be as fast as the best plans
    dispatchers    dispatchers of tokens to experts that are tried, if none is fixed
    stage_layers   layers of each virtual stage, for pipelines with that number of them; empty: those of `stage_layouts`
    table          schedule from a file, of the schedule `file`
    is_pruned      plans whose state alone exceeds the memory, and those that cannot be shown, are not evaluated
    """

    fixed: Mapping[str, int | str | bool] = field(default_factory=dict)
    maximum: Mapping[str, int] = field(default_factory=dict)
    orders: tuple[tuple[str, ...], ...] = SEARCHED_ORDERS
    rules: tuple[RuleSet, ...] = ()
    dispatchers: tuple[Dispatcher, ...] = USUAL_DISPATCHERS
    stage_layers: tuple[int, ...] = ()
    recompute_operators: tuple[str, ...] = DEFAULT_RECOMPUTE_OPERATORS
    lists: tuple[tuple[str, ...], ...] = ()
    runs: Runs = ANYTHING
    balanced_context: bool = False
    table: ScheduleTable | None = None
    is_pruned: bool = True

    def __post_init__(self) -> None:
        for knob in (*self.fixed, *self.maximum):
            if knob not in (*KNOBS, "dp"):
                raise InputError(f"knob={knob}: not in the space{suggest(knob, KNOBS)}; use {', '.join(KNOBS)}")
        names = [rules.name for rules in self.rules]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise InputError(f"rules={twice}: two rule sets have this name; give each a name of its own")
        if len(names) > MOST_RULE_SETS:
            raise InputError(f"rules: {len(names)} rule sets are too many for one search; give at most {MOST_RULE_SETS}")

    @property
    def rule_sets(self) -> tuple[RuleSet, ...]:
        return self.rules or default_rule_sets()

    def cuts(self, job: TrainingJob) -> tuple[tuple[RuleSet, Dispatcher], ...]:
        """Return the rule sets for sharding operators, each with every dispatcher of tokens to experts."""
        dispatchers: tuple[Dispatcher, ...] = (Dispatcher.ALL_TO_ALL,)
        if job.transformer.parts.experts is not None:
            among = Dispatcher if "dispatcher" in self.fixed else self.dispatchers
            dispatchers = tuple(dispatcher for dispatcher in among if self.admits("dispatcher", str(dispatcher)))
        if not self.runs.has_flex:
            dispatchers = tuple(dispatcher for dispatcher in dispatchers if dispatcher is not Dispatcher.FLEX)
        return tuple((rules, dispatcher) for dispatcher in dispatchers for rules in self.rule_sets)

    def admits(self, knob: str, value: int | str | bool) -> bool:
        if knob in self.fixed and self.fixed[knob] != value:
            return False
        return knob not in self.maximum or int(value) <= self.maximum[knob]

    @property
    def schedules(self) -> tuple[AnySchedule, ...]:
        """Schedules that are searched: those that split the backward pass only if fixed, as few frameworks have them."""
        if self.table is not None and self.fixed.get("schedule") == FILE:
            return (self.table,)
        admitted = [schedule for schedule in PipelineSchedule if self.admits("schedule", str(schedule))]
        return tuple(schedule for schedule in admitted if not schedule.splits_backward or "schedule" in self.fixed)

    @property
    def splits_backward(self) -> bool:
        return any(schedule.splits_backward for schedule in self.schedules)

    def least_microbatches(self, pp: int) -> int:
        """Return the least number of microbatches of a pipeline."""
        return 1 if self.runs.pipelines.few_microbatches else pp

    def runs_degrees(self, seq_len: int, *, pp: int, cp: int, tp: int) -> bool:
        """Whether the framework supports these axes."""
        has = all(degree == 1 or axis in self.runs.axes for axis, degree in (("pp", pp), ("cp", cp), ("tp", tp)))
        return has and (cp == 1 or not self.balanced_context or seq_len % (2 * cp) == 0)


def searched_rules(profile: ExecutionProfile, seq_len: int) -> tuple[RuleSet, ...]:
    """Return the rule sets that are searched if none are given.

    They are those of the stated form of context parallelism, else the default ones, or the framework's if it has none of these (such as
    Ulysses alone). For `LONG_SEQUENCE` and more, both forms of context parallelism of a framework that has two are searched.
    """
    form, names = profile.communication.context_form, profile.runs.rules
    usual = default_rule_sets()
    if form == ULYSSES:
        return tuple(map(load_rule_set, ULYSSES_RULES))
    if names and not {rules.name for rules in usual} & {*names}:
        return tuple(map(load_rule_set, names))
    if form or seq_len < LONG_SEQUENCE:
        return usual
    return (*usual, *(load_rule_set(name) for name in ULYSSES_RULES if name in names))


def runnable_space(space: Space, profile: ExecutionProfile, job: TrainingJob) -> Space:
    """Return the part of the space that the framework of this profile can run for the job."""
    runs = profile.runs.for_training(job.train).for_schedule(splits_backward=space.splits_backward)
    return replace(space, runs=runs, balanced_context=profile.communication.context_chunks == HEAD_TAIL)


def unlimited_space(space: Space) -> Space:
    """Return the space without any framework's limits."""
    return replace(space, runs=ANYTHING, balanced_context=False)


class RuleChoices:
    """Rule sets of a space that a layout may have, with each plan under one of them only."""

    def __init__(self, job: TrainingJob, space: Space, attention: AttentionKernel) -> None:
        self.job, self.space, self.attention = job, space, str(attention)
        self.known: dict[tuple[int, int, bool], int] = {}
        self.folded: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
        self.cuts = space.cuts(job)

    def mask(self, cp: int, tp: int, *, hybrid: bool) -> int:
        """Return bits of rule sets that admit these degrees; a bit is not set if an earlier set gives the same plan without unused axes.

        hybrid   both data-parallel degrees are above 1
        """
        key = (cp, tp, hybrid and bool(self.space.runs.hybrid_rules))
        if key in self.known:
            return self.known[key]
        model, space = self.job.transformer, self.space
        axes = present_axes(model, cp=cp, tp=tp)
        mask, seen = 0, list[RuleSet]()
        for i, rules in enumerate(space.rule_sets):
            if not admits(rules, model, self.job.seq_len, cp=cp, tp=tp):
                continue
            if not space.runs.cuts_alike(rules, model, self.attention, axes, hybrid=key[2]):
                continue
            scatters = tp > 1 and rules.scatters_residual
            is_new = not any(cuts_alike(rules, other, model, self.attention, axes) for other in seen)
            if is_new and space.admits("sequence_parallel", scatters) and (space.runs.sequence_parallel or not scatters):
                mask |= 1 << i
            seen.append(rules)
        self.known[key] = mask
        return mask

    def foldings(self, tp: int, cp: int, data: int) -> list[tuple[int, int]]:
        """Return (ep, etp) of layouts with these degrees and an axis of `data` ranks for experts; (1, 1) for a model without experts."""
        experts = self.job.transformer.parts.experts
        if experts is None:
            return [(1, 1)]
        key = (tp, cp, data)
        if key not in self.folded:
            fine = fine_sizes(self.job.transformer, cp=cp, tp=tp)
            kv, q = fine["tp_kv"], fine["tp_q"]
            pairs = foldings(num_experts=experts.num_experts, width=experts.width, tp_kv=kv, tp_q=q, cp=cp, data=data)
            pairs = [(ep, etp) for ep, etp in pairs if self.space.admits("ep", ep) and self.space.admits("etp", etp)]
            self.folded[key] = [(ep, etp) for ep, etp in pairs if ep == 1 or "ep" in self.space.runs.axes]
        return self.folded[key]

    def with_dispatchers(self, mask: int, ep: int) -> int:
        """Return bits of `Space.cuts` for each dispatcher that is worth trying.

        With ep=1 all experts are local and one dispatcher is enough. Otherwise flex replaces all-to-alls, which send no less between nodes
        and need additional copies.
        """
        bits, count = 0, len(self.space.rule_sets)
        dispatchers = [dispatcher for _, dispatcher in self.cuts[::count]]
        for i, dispatcher in enumerate(dispatchers):
            is_better = ep > 1 and not (dispatcher is Dispatcher.ALL_TO_ALL and Dispatcher.FLEX in dispatchers)
            if is_better or (ep == 1 and i == 0):
                bits |= mask << (i * count)
        return bits


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineChoice:
    """Schedule of a pipeline, and the layers of each virtual stage.

    unequal, live   `Stages.unequal` and the `live_table` of these layers
    """

    schedule: AnySchedule
    virtual_stages: int
    stage_layers: tuple[int, ...]
    unequal: float
    live: NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PipelineGroup:
    """Pipeline choices that are evaluated side by side.

    stages          distinct stages, as columns; choices that differ only in the schedule share one, since their ranks hold the same
    stage_index     index into `stages` of each choice
    fuller_middle   whether a middle rank has more layers than the first, or more of their passes in flight
    apart           moments at which a schedule has fewer passes in flight than while a layer runs
    """

    stages: Stages
    choices: tuple[PipelineChoice, ...]
    stage_index: NDArray[np.int64]
    fuller_middle: bool
    apart: frozenset[At]

    @classmethod
    def side_by_side(cls, group: Sequence[tuple[Stages, list[PipelineChoice], set[At]]], *, fuller_middle: bool) -> PipelineGroup:
        """Return all choices by schedule. Inner ranks are repeated if other choices have more distinct ones."""
        most = max(stages.num_ranks for stages, _, _ in group)
        runs = [(*it.runs[:-1], *[it.runs[-2]] * (most - it.num_ranks), it.runs[-1]) for it, _, _ in group]
        pairs = [(choice, index) for index, (_, choices, _) in enumerate(group) for choice in choices]
        names = list(PipelineSchedule)
        pairs.sort(key=lambda pair: names.index(pair[0].schedule) if pair[0].schedule in names else 0)  # a file is alone
        return cls(
            stages=stage_columns([replace(stages, runs=ranks) for (stages, _, _), ranks in zip(group, runs, strict=True)]),
            choices=tuple(choice for choice, _ in pairs),
            stage_index=np.array([index for _, index in pairs]),
            fuller_middle=fuller_middle,
            apart=frozenset[At]().union(*(apart for _, _, apart in group)),
        )

    def take(self, some: NDArray[np.int64]) -> PipelineGroup:
        """Return the group of some of the choices."""
        distinct, stage_index = np.unique(self.stage_index[some], return_inverse=True)
        return replace(self, stages=self.stages.take(distinct), choices=tuple(self.choices[i] for i in some), stage_index=stage_index)

    def of_choices(self, values: Any, some: slice | Sequence[int] = slice(None)) -> Any:
        """Return values by stage [..., stages], or of all stages [..., 1], as values by choice for some of the choices."""
        return values if values.shape[-1] == 1 else values[..., self.stage_index[some]]

    def stages_of(self, some: slice | Sequence[int] = slice(None)) -> Stages:
        """Return the stages of some of the choices, one per choice."""
        return replace(self.stages.take(self.stage_index[some]), unequal=np.array([choice.unequal for choice in self.choices])[some])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayoutRows:
    """Layouts of one (pp, data-parallel degree), as columns.

    order: index into the space's orders; rules: one bit per entry of `Space.cuts`.
    """

    pp: int
    data_parallel: int
    pipelines: tuple[PipelineGroup, ...]
    dp_replicate: NDArray[np.int64]
    dp_shard: NDArray[np.int64]
    cp: NDArray[np.int64]
    tp: NDArray[np.int64]
    ep: NDArray[np.int64]
    etp: NDArray[np.int64]
    order: NDArray[np.int64]
    rules: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.tp)

    @property
    def num_chips(self) -> NDArray[np.int64]:
        return np.asarray(self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp)

    def select(self, rows: NDArray[np.bool_] | NDArray[np.int64] | slice) -> LayoutRows:
        columns: dict[str, Any] = {name: getattr(self, name)[rows] for name in LAYOUT_COLUMNS}
        return replace(self, **columns)


#: Fields of `LayoutRows` with an entry for each layout.
LAYOUT_COLUMNS = ("dp_replicate", "dp_shard", "cp", "tp", "ep", "etp", "order", "rules")


def tensor_degrees(job: TrainingJob, num_chips: int, space: Space) -> list[int]:
    """Return the values of tp that some rule set admits: divisors of the dims that it shards (key-value heads may be replicated)."""
    degrees = [t for t in divisors(num_chips) if space.admits("tp", t)]
    return [t for t in degrees if any(admits(rules, job.transformer, job.seq_len, cp=1, tp=t) for rules in space.rule_sets)]


def stage_layouts(job: TrainingJob, num_ranks: int, virtual_stages: int, placement: Placement = Placement.LOOP) -> list[tuple[int, ...]]:
    """Return the layers of each virtual stage: even, and with shorter ends where that may help.

    Layers of different kinds are balanced by time, and also split evenly by number. Shorter ends may help in two cases: an end gets fewer
    layers and no other rank more, or the head costs more than a layer.
    """
    model, num_stages = job.transformer, num_ranks * virtual_stages
    layers = model.num_hidden_layers
    if num_stages > layers + STAGES_WITHOUT_LAYERS:
        return []
    even = even_stage_layers(layers, num_stages)
    if not are_alike(model):
        return list(dict.fromkeys((default_stage_layers(job, num_ranks, virtual_stages, placement), even)))
    shorter = shorter_ends_stage_layers(layers, num_stages)
    if shorter == even:
        return [even]
    by_rank = stages_of_ranks(num_ranks, num_stages, placement)
    a, b = ([sum(layers[stage] for stage in stages) for stages in by_rank] for layers in (even, shorter))
    fewer = b[0] < a[0] or b[-1] < a[-1]
    no_more = max(b) <= max(a)
    return [even, shorter] if fewer and (no_more or model.vocab_size * model.hidden_size > model.num_layer_parameters) else [even]


@session_cache(maxsize=4096)
def _moments_apart(schedule: AnySchedule, stage_layers: tuple[int, ...], pp: int, of_first: float) -> tuple[bool, frozenset[At]]:
    """Return whether a middle rank has more layers in flight than the first, and the moments with fewer in flight than while blocks run."""
    of = live_of_table(live_table(schedule, stage_layers, pp))
    most = map(np.asarray, (of.most, of.present, of.fewer, of.ended))
    fuller = any(bool((layers[:, 1] > layers[:, 0]).any()) for layers in most)
    first, last = (np.asarray(of.fewer_at_first)[:, 0] != of_first).any(), np.asarray(of.fewer_at_last)[:, 2].any()
    return fuller, frozenset(at for at, is_apart in ((At.FIRST, first), (At.LAST, last)) if is_apart)


def pipeline_groups(job: TrainingJob, pp: int, space: Space) -> tuple[PipelineGroup, ...]:
    """Return schedules, virtual stages and layers of a pipeline degree. Without a pipeline: 1f1b only."""
    most = job.transformer.num_hidden_layers + STAGES_WITHOUT_LAYERS
    pairs: list[tuple[AnySchedule, int]] = [(PipelineSchedule.ONE_F_ONE_B, 1)]
    if pp > 1:
        chunks = {schedule: range(1, most // pp + 1) if schedule.takes_chunks else (1,) for schedule in space.schedules}
        pairs = [(schedule, v) for schedule in chunks for v in chunks[schedule] if v > 1 or not schedule.needs_chunks]
        pairs = [(schedule, v) for schedule, v in pairs if schedule.num_chunks in (None, v)]
    by_runs: dict[tuple[tuple[float, ...], ...], tuple[Stages, list[PipelineChoice]]] = {}
    regions = regions_in_training(job.transformer, job.train)
    for schedule, virtual in pairs:
        if schedule not in space.schedules or not space.admits("virtual_stages", virtual):
            continue
        if pp > 1 and schedule.listed_as not in space.runs.pipelines.schedules:
            continue
        given = [space.stage_layers] if len(space.stage_layers) == pp * virtual else stage_layouts(job, pp, virtual, schedule.placement)
        for layers in given:
            if pp > 1 and not space.runs.pipelines.uneven_stages and len(set(layers)) > 1:
                continue
            stages = stages_of(regions, layers, pp, schedule.placement, schedule.is_simulated)
            _, choices = by_runs.setdefault(stages.runs, (stages, []))
            live = live_table(schedule, layers, pp)
            choices.append(
                PipelineChoice(schedule=schedule, virtual_stages=virtual, stage_layers=layers, unequal=float(stages.unequal), live=live)
            )
    groups: dict[bool, list[tuple[Stages, list[PipelineChoice], set[At]]]] = {}
    for stages, choices in by_runs.values():
        first, *between, _ = stages.runs
        fuller = any(runs[i] > first[i] for runs in between for i in stages.inner)
        apart = {At.BLOCKS}
        for choice in choices:
            has_fuller, moments = _moments_apart(choice.schedule, choice.stage_layers, pp, float(stages.blocks[0]))
            fuller |= has_fuller
            apart |= moments
        groups.setdefault(fuller, []).append((stages, choices, apart))
    return tuple(PipelineGroup.side_by_side(group, fuller_middle=fuller) for fuller, group in groups.items())


def micro_batches(job: TrainingJob, data_parallel: int, space: Space) -> list[int]:
    return [m for m in divisors(job.global_batch // data_parallel) if space.admits("micro_batch", m)]


def recompute_choices(space: Space, attention: AttentionKernel, operators: tuple[str, ...]) -> list[Recompute]:
    """Return the kinds of recomputation of the space. Selective is left out with a fused kernel, which keeps no scores, unless fixed."""
    needless = attention is AttentionKernel.FLASH and operators == DEFAULT_RECOMPUTE_OPERATORS and "recompute" not in space.fixed
    kinds = [r for r in Recompute if r is Recompute.NONE or not space.splits_backward]
    admitted = [r for r in kinds if space.admits("recompute", str(r)) and str(r) in space.runs.recompute]
    return [r for r in admitted if not (needless and r is Recompute.SELECTIVE)]


def is_canonical_order(orders: tuple[tuple[str, ...], ...], index: int, degrees: Mapping[str, int]) -> bool:
    """Whether no earlier order has the axes in use in the same sequence."""
    used = [axis for axis in orders[index] if degrees[axis] > 1]
    return all([axis for axis in order if degrees[axis] > 1] != used for order in orders[:index])


def layout_blocks(job: TrainingJob, num_chips: int, space: Space, attention: AttentionKernel) -> Iterator[LayoutRows]:
    """Yield all layouts, grouped by pipeline and data-parallel degree."""
    choices = RuleChoices(job, space, attention)
    tensor = [t for t in divisors(num_chips) if space.admits("tp", t)]
    canonical: dict[tuple[bool, ...], list[int]] = {}
    for pp in divisors(num_chips):
        pipelines = pipeline_groups(job, pp, space) if space.admits("pp", pp) else ()
        if not pipelines:
            continue
        inner = num_chips // pp
        for data in divisors(inner):
            if job.global_batch % data or not space.admits("dp", data) or not micro_batches(job, data, space):
                continue
            rows: list[tuple[int, ...]] = []
            rest = inner // data
            for tp in tensor:
                if rest % tp:
                    continue
                cp = rest // tp
                if not space.admits("cp", cp) or not space.runs_degrees(job.seq_len, pp=pp, cp=cp, tp=tp):
                    continue
                if not choices.mask(cp, tp, hybrid=False):
                    continue
                for shard in divisors(data):
                    replicate = data // shard
                    if not (space.admits("dp_shard", shard) and space.admits("dp_replicate", replicate)):
                        continue
                    if shard > 1 and replicate > 1 and not space.runs.sharding.zero_of_replicas:
                        continue
                    present = (tp > 1, cp > 1, shard > 1, replicate > 1, pp > 1)
                    if present not in canonical:
                        degrees = dict(zip(DEFAULT_ORDER, (2 if p else 1 for p in present), strict=True))
                        canonical[present] = [i for i in range(len(space.orders)) if is_canonical_order(space.orders, i, degrees)]
                    mask = choices.mask(cp, tp, hybrid=shard > 1 and replicate > 1)
                    for ep, etp in choices.foldings(tp, cp, shard if shard > 1 else replicate):
                        ways = choices.with_dispatchers(mask, ep)
                        rows += [(replicate, shard, cp, tp, ep, etp, order, ways) for order in canonical[present] if ways]
            if rows:
                columns = np.array(rows, dtype=np.int64).T
                yield LayoutRows(
                    pp=pp,
                    data_parallel=data,
                    pipelines=pipelines,
                    dp_replicate=columns[0],
                    dp_shard=columns[1],
                    cp=columns[2],
                    tp=columns[3],
                    ep=columns[4],
                    etp=columns[5],
                    order=columns[6],
                    rules=columns[7],
                )
