"""Plans that a framework can run, as data of its profile. Other plans are predicted too, with the reason that they cannot run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from perfmodel.foundation.grouped import Grouped, group_of, without_groups
from perfmodel.foundation.records import INLINE
from perfmodel.frameworks.options import HEAD_TAIL
from perfmodel.parallel.algebra.degrees import present_axes
from perfmodel.parallel.algebra.rules import MEGATRON, MEGATRON_SP, RuleSet
from perfmodel.parallel.assignment import cuts_as
from perfmodel.parallel.choices import (
    CONTEXT_FORMS,
    OFFLOADS,
    USUAL_DISPATCHERS,
    ZERO_STAGES,
    Dispatcher,
    PipelineSchedule,
    Recompute,
    num_rounds,
    rounds_rule,
)
from perfmodel.parallel.compression import NO_COMPRESSION, Compression, Compressor
from perfmodel.parallel.framework_ref import FrameworkRef
from perfmodel.parallel.plan import Plan
from perfmodel.parallel.schedule_table import FILE
from perfmodel.workload.base_formats import BASE_FORMATS
from perfmodel.workload.config import TransformerConfig
from perfmodel.workload.training import Training

if TYPE_CHECKING:
    from perfmodel.frameworks.profile import ExecutionProfile

#: ZeRO stages that do not shard parameters.
_WHOLE_BASE = (0, 1)

#: Axes that a framework may lack; all have data parallelism.
AXES = ("tp", "cp", "pp", "ep")


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroRuns:
    """ZeRO stages that a framework can run.

    zero                     ZeRO stages
    zero_in_pipeline         ZeRO stages with a pipeline
    zero_of_replicas         ZeRO stages that may shard over a part of the data ranks, with replicas over the rest (HSDP)
    zero_beside_axes         ZeRO stages with tp, cp, pp or ep, if the state could be sharded over data ranks or cp; without 0 (DDP),
                             replicas with such an axis need dp_shard above 1
    zero_of_split_backward   the same with a schedule that splits the backward pass
    zero_of_offload          ZeRO stages of several chips with parameters in the host's memory
    zero_of_ranks            ZeRO stages of several chips; those of `zero_of_offload` if parameters are offloaded
    """

    zero: tuple[int, ...]
    zero_in_pipeline: tuple[int, ...]
    zero_of_replicas: tuple[int, ...]
    zero_beside_axes: tuple[int, ...] = ZERO_STAGES
    zero_of_split_backward: tuple[int, ...] = ZERO_STAGES
    zero_of_offload: tuple[int, ...] = (2, 3)
    zero_of_ranks: tuple[int, ...] = ZERO_STAGES

    def admits(self, zero: int, *, pipelined: bool, replicated: bool) -> bool:
        stages = set(self.zero) & set(self.zero_in_pipeline if pipelined else self.zero)
        return zero in stages and (zero == 0 or not replicated or zero in self.zero_of_replicas)

    def admits_axes(self, zero: int, *, replicas_alone: bool) -> bool:
        """Return whether a ZeRO stage is combined with tp, cp, pp or ep. replicas_alone: dp_replicate is above 1 and dp_shard is not."""
        return zero in self.zero_beside_axes and (0 in self.zero_beside_axes or not replicas_alone)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRuns:
    """Pipelines that a framework can run.

    schedules          pipeline schedules
    uneven_stages      pipelines with different numbers of layers per rank
    few_microbatches   fewer micro-batches than pipeline ranks
    full_rounds        schedules whose number of micro-batches must be a multiple of the number of rounds, max(1, micro-batches // pp), even
                       with one virtual stage a rank
    """

    schedules: tuple[str, ...]
    uneven_stages: bool
    few_microbatches: bool
    full_rounds: tuple[str, ...] = ()


RUNS_GROUPS: Mapping[str, Any] = {"sharding": ZeroRuns, "pipelines": PipelineRuns}


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs(Grouped):
    """Features of the plans that a framework can run.

    axes                 axes among tp, cp, pp, ep
    context_forms        forms of context parallelism that it has if they are stated, in addition to its axes
    recompute            kinds of recomputation
    sequence_parallel    sequence parallelism with tp
    rules                names of shipped rule sets; none: any rules
    hybrid_rules         those with which state may be sharded over a part of the data ranks (HSDP); none: all of `rules`
    recompute_modules    parts of a layer may be recomputed by name
    exchanges            dispatchers of tokens to experts that need no library of their own
    flex                 prefixes of names of chips with a library that sends rows once to each node and rank (DeepEP, HybridEP)
    sharded_bases        formats of a quantised base that ZeRO 2 and 3 can shard; others are replicated on every data rank
    axes_of_bases        axes among tp, cp, pp, ep with a quantised base
    offloads             state that may be offloaded to host memory, as values of `--offload`; suggested if a plan does not fit
    compressions         methods of gradient compression (`--gradient-compression`)
    default_recompute    documented default of the trainer for a plan that names none; empty: none
    source               source of these features
    """

    GROUP_OF: ClassVar[Mapping[str, str]] = group_of(RUNS_GROUPS)

    sharding: ZeroRuns = field(metadata=INLINE)
    axes: tuple[str, ...]
    pipelines: PipelineRuns = field(metadata=INLINE)
    recompute: tuple[str, ...]
    sequence_parallel: bool
    source: str
    rules: tuple[str, ...] = (MEGATRON, MEGATRON_SP)
    exchanges: tuple[str, ...] = tuple(map(str, USUAL_DISPATCHERS))
    flex: tuple[str, ...] = ()
    recompute_modules: bool = False
    sharded_bases: tuple[str, ...] = tuple(BASE_FORMATS)
    axes_of_bases: tuple[str, ...] = AXES
    offloads: tuple[str, ...] = ()
    default_recompute: str = ""
    context_forms: tuple[str, ...] = ()
    hybrid_rules: tuple[str, ...] = ()
    compressions: tuple[str, ...] = ()

    @property
    def features(self) -> dict[str, Any]:
        """Every feature by name, without groups, as in files."""
        return without_groups(asdict(self), RUNS_GROUPS)

    def rules_for(self, *, hybrid: bool) -> tuple[str, ...]:
        """Return the names of its rule sets, for plans with both data-parallel degrees above 1 or others; none: any."""
        return (hybrid and self.hybrid_rules) or self.rules

    def cuts_alike(self, rules: RuleSet, model: TransformerConfig, attention: str, axes: frozenset[str], *, hybrid: bool) -> bool:
        """Return whether one of its rule sets shards this model alike, where only these fine axes have more than one rank."""
        names = self.rules_for(hybrid=hybrid)
        return not names or bool(cuts_as(names, rules, model, attention, axes))

    def no_compression_reason(self, compression: Compression, framework: str) -> str:
        """Return why the framework cannot compress gradients so; "" if it can."""
        if compression.method in self.compressions:
            return ""
        has = f"compresses them by {_listed(self.compressions)} only" if self.compressions else "compresses none"
        return f"gradient_compression={compression}: {framework} {has}"

    def for_training(self, train: Training) -> Runs:
        """Return the features for a job with this kind of training: a quantised base limits ZeRO and the axes."""
        if not train.quantizes_base:
            return self
        stages = self.sharding.zero
        if train.base not in self.sharded_bases:
            stages = tuple(stage for stage in stages if stage in _WHOLE_BASE)
        return self.having(zero=stages, axes=tuple(axis for axis in self.axes if axis in self.axes_of_bases))

    def for_schedule(self, *, splits_backward: bool) -> Runs:
        """Return the features with a pipeline schedule of this kind."""
        if not splits_backward:
            return self
        stages = self.sharding
        return self.having(zero_beside_axes=tuple(stage for stage in stages.zero_beside_axes if stage in stages.zero_of_split_backward))

    @property
    def has_flex(self) -> bool:
        return bool(self.flex) or self == ANYTHING

    def dispatchers(self, chip: str) -> tuple[Dispatcher, ...]:
        """Return the dispatchers of tokens to experts on this chip."""
        has_flex = chip.startswith(self.flex or ("/",))
        return tuple(name for name in Dispatcher if str(name) in self.exchanges or (has_flex and name is Dispatcher.FLEX))


#: Default of a profile: all plans.
ANYTHING = Runs(
    sharding=ZeroRuns(zero=ZERO_STAGES, zero_in_pipeline=ZERO_STAGES, zero_of_replicas=(1, 2, 3)),
    axes=AXES,
    pipelines=PipelineRuns(schedules=(*PipelineSchedule, FILE), uneven_stages=True, few_microbatches=True),
    recompute=tuple(Recompute),
    sequence_parallel=True,
    source="",
    rules=(),
    compressions=tuple(Compressor),
)


RUNS_CHOICES: dict[str, tuple[int | str, ...]] = {
    "zero": ZERO_STAGES,
    "zero_in_pipeline": ZERO_STAGES,
    "zero_of_replicas": (1, 2, 3),
    "axes": AXES,
    "schedules": (*PipelineSchedule, FILE),
    "full_rounds": tuple(PipelineSchedule),
    "recompute": tuple(Recompute),
    "sharded_bases": tuple(BASE_FORMATS),
    "axes_of_bases": AXES,
    "zero_beside_axes": ZERO_STAGES,
    "zero_of_split_backward": ZERO_STAGES,
    "zero_of_offload": ZERO_STAGES,
    "zero_of_ranks": ZERO_STAGES,
    "context_forms": CONTEXT_FORMS,
    "exchanges": tuple(map(str, USUAL_DISPATCHERS)),
    "offloads": (*OFFLOADS, "optimizer,parameters"),
    "compressions": tuple(Compressor)[1:],
}


def combines_axes(*, tp: Any, cp: Any, pp: Any, ep: Any, data: Any) -> Any:
    """Return whether tp, cp, pp or ep is above 1 and state could be sharded over data ranks or cp, for numbers or columns."""
    return (tp * cp * pp * ep > 1) & (data * cp > 1)


def _listed(values: Sequence[int | str]) -> str:
    *first, last = map(str, values) if values else ("none",)
    return f"{', '.join(first)} and {last}" if first else last


def not_runnable_reason(plan: Plan, profile: ExecutionProfile) -> str:
    """Return why the framework cannot run a plan of this form; "" if it can."""
    layout, framework, runs = plan.layout, FrameworkRef.parse(profile.name).name, profile.runs
    if plan.assignment is not None:
        return ""  # only its options are assumed: no framework runs such plans, only the executor of this package
    splits = plan.schedule.splits_backward
    every = runs
    if plan.job.train.quantizes_base or splits:
        runs = runs.for_training(plan.job.train).for_schedule(splits_backward=splits)
    degrees = {"tp": layout.tp, "cp": layout.cp, "pp": layout.pp, "ep": plan.ep}
    for axis, degree in degrees.items():
        if degree > 1 and axis not in runs.axes:
            condition = f" with a base in {plan.job.train.base}" if axis in every.axes else ""
            return f"{axis}={degree}: {framework} has no {axis}{condition}"
    zero, pipelined = int(plan.zero), layout.pp > 1
    stages = runs.sharding
    if zero in every.sharding.zero and zero not in stages.zero:
        return f"zero={zero}: {framework} cannot shard a base in {plan.job.train.base}, of which every data rank has a whole copy"
    if combines_axes(**degrees, data=layout.data_parallel) and not stages.admits_axes(
        zero, replicas_alone=layout.dp_replicate > 1 and layout.dp_shard == 1
    ):
        other = f"schedule={plan.schedule}" if splits else next(f"{axis}={degree}" for axis, degree in degrees.items() if degree > 1)
        if zero in stages.zero_beside_axes:
            return f"dp_replicate={layout.dp_replicate}: {framework} combines replicas with {other} only if dp_shard is above 1"
        return f"zero={zero}: {framework} has ZeRO {_listed(stages.zero_beside_axes)} only with {other}"
    if not stages.admits(zero, pipelined=pipelined, replicated=False):
        condition, others = (" with a pipeline", stages.zero_in_pipeline) if zero in stages.zero else ("", stages.zero)
        return f"zero={zero}: {framework} has ZeRO {_listed(others)} only{condition}"
    if plan.num_chips > 1 and zero not in stages.zero_of_ranks:
        return f"zero={zero}: {framework} offloads parameters with ZeRO {_listed(stages.zero_of_ranks)} only"
    replicated = layout.dp_replicate > 1 and layout.dp_shard > 1
    if not stages.admits(zero, pipelined=pipelined, replicated=replicated):
        return f"dp_replicate={layout.dp_replicate}, dp_shard={layout.dp_shard}: {framework} shards ZeRO {zero} over all data ranks only"
    compression = plan.compression
    if compression != NO_COMPRESSION and (reason := runs.no_compression_reason(compression, framework)):
        return reason
    if not runs.sequence_parallel and plan.sequence_parallel:
        return f"sequence_parallel=true: {framework} has no sequence parallelism"
    model = plan.job.transformer
    names = runs.rules_for(hybrid=replicated)
    if names and not cuts_as(names, plan.rules, model, str(plan.attention), present_axes(model, cp=layout.cp, tp=layout.tp)):
        condition = "" if names == runs.rules else " if dp_replicate and dp_shard are above 1"
        return f"rules={plan.rule_set}: {framework} cuts operators as one of {', '.join(names)} does{condition}"
    if str(plan.recompute) not in runs.recompute:
        return f"recompute={plan.recompute}: {framework} has recompute {_listed(runs.recompute)} only"
    splits_twice = profile.communication.context_chunks == HEAD_TAIL
    if layout.cp > 1 and splits_twice and plan.job.seq_len % (2 * layout.cp):
        return f"cp={layout.cp}: {framework} cuts a sequence in 2 cp equal chunks, and {2 * layout.cp} does not divide {plan.job.seq_len}"
    if plan.dispatcher is Dispatcher.FLEX and plan.ep > 1 and not runs.has_flex:
        return f"dispatcher=flex: {framework} has no library that sends rows once to each place"
    if plan.dispatcher is not Dispatcher.FLEX and plan.ep > 1 and str(plan.dispatcher) not in runs.exchanges:
        return f"dispatcher={plan.dispatcher}: {framework} has {_listed(runs.exchanges + (str(Dispatcher.FLEX),) * runs.has_flex)} only"
    if not pipelined:
        return ""
    if plan.schedule.listed_as not in runs.pipelines.schedules:
        return f"schedule={plan.schedule}: {framework} has {_listed(runs.pipelines.schedules)} only"
    if not runs.pipelines.uneven_stages and len(set(plan.stage_layers)) > 1:
        return f"pp={layout.pp}: {framework} needs the same number of layers in every stage"
    if not runs.pipelines.few_microbatches and plan.num_microbatches < layout.pp:
        return f"pp={layout.pp}: {framework} needs at least pp={layout.pp} microbatches, not {plan.num_microbatches}"
    if plan.schedule.listed_as in runs.pipelines.full_rounds and plan.num_microbatches % num_rounds(plan.num_microbatches, layout.pp):
        rule = f"needs a multiple of {rounds_rule(plan.num_microbatches, layout.pp)} as microbatches"
        return f"schedule={plan.schedule}: {framework} {rule}, not {plan.num_microbatches}"
    return ""
