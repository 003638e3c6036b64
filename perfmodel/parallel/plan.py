"""The plan: the complete decision how a job runs on a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

from perfmodel.foundation.errors import InputError, bad_field, shown
from perfmodel.foundation.values import read_integer, text_of
from perfmodel.foundation.words import takes, words_of
from perfmodel.parallel.algebra.degrees import broken, fine_sizes, unused_axis
from perfmodel.parallel.algebra.folding import data_axis, folding_fault, takes_replicas
from perfmodel.parallel.algebra.rules import RuleSet, check_agrees, default_rule_sets, is_shipped
from perfmodel.parallel.algebra.sharding import AXIS_PARTS
from perfmodel.parallel.choices import (
    ZERO_STAGES,
    AttentionKernel,
    Dispatcher,
    PipelineSchedule,
    Recompute,
    ZeroStage,
    missing_module,
    rounds_rule,
)
from perfmodel.parallel.compression import NO_COMPRESSION, Compression, check_compression, compression_of
from perfmodel.parallel.framework_ref import FrameworkRef, settings_text
from perfmodel.parallel.knobs import EXPERT_KNOBS, Knobs, plan_keys
from perfmodel.parallel.layout import DEFAULT_ORDER, ParallelLayout, check_order, divisors, stages_of_rank
from perfmodel.parallel.model_fields import model_to_dict
from perfmodel.parallel.per_operator.assignment import Assignment
from perfmodel.parallel.schedule_table import FILE, AnySchedule, ScheduleTable
from perfmodel.parallel.stage_cuts import default_stage_layers
from perfmodel.workload.config import TransformerConfig
from perfmodel.workload.job import TrainingJob
from perfmodel.workload.routing import BALANCED
from perfmodel.workload.training import FULL_TRAINING

#: Operators that selective recomputation recomputes: the core of attention (Korthikanti et al. 2022, section 5).
DEFAULT_RECOMPUTE_OPERATORS = ("attention_core",)

SCHEMA_VERSION = 1
"""Version of the form of plan files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One complete row of the space of plans; nothing is decided later.

    stage_layers[k] is the number of layers of virtual stage k, in model order; `schedule.placement` states its rank.

    sharding     rules: axes of the layout that shard each dim of the operators; or an assignment: a sharding per operator, over a mesh of
                 the chips of each of `pp` stages. The other axes are then 1, and a micro-batch is that of all chips of a stage
    ep, etp, dispatcher   of a model with experts: expert-parallel ranks, tensor-parallel ranks inside an expert (`algebra/folding.py`),
                 and the dispatch of tokens
    profile      the assumed framework with its stated settings (`parallel/framework_ref.py`)
    """

    job: TrainingJob
    cluster: str
    num_chips: int
    layout: ParallelLayout
    order: tuple[str, ...]
    sharding: RuleSet | Assignment
    zero: ZeroStage
    micro_batch: int
    recompute: Recompute
    recompute_operators: tuple[str, ...]
    schedule: AnySchedule
    virtual_stages: int
    stage_layers: tuple[int, ...]
    attention: AttentionKernel
    profile: str
    calibration: str = ""
    ep: int = 1
    etp: int = 1
    dispatcher: Dispatcher = Dispatcher.ALL_TO_ALL

    def __post_init__(self) -> None:
        layout, job = self.layout, self.job
        check_order(self.order)
        if (compression := self.compression) != NO_COMPRESSION:
            check_compression(compression, zero=self.zero, has_experts=self.has_experts, has_rules=self.assignment is None)
        if self.assignment is not None:
            _check_assigned(self, self.assignment)
            return
        model = job.transformer
        if layout.num_chips != self.num_chips:
            raise InputError(
                f"pp*dp_replicate*dp_shard*cp*tp={layout.num_chips}: must equal chips={self.num_chips}; change a degree or --chips"
            )
        for field in ("micro_batch", "virtual_stages"):
            if getattr(self, field) < 1:
                raise InputError(f"{field}={getattr(self, field)}: must be at least 1; use 1")
        _check_degrees(self)
        per_step = layout.data_parallel * self.micro_batch
        if job.global_batch % per_step and job.global_batch % layout.data_parallel == 0:
            share = job.global_batch // layout.data_parallel
            rule = f"must divide the {share} sequences of each data-parallel rank"
            raise bad_field("micro_batch", self.micro_batch, rule, f"use {_choices(share)}")
        if job.global_batch % per_step:
            raise InputError(
                f"dp_replicate*dp_shard*micro_batch={per_step}: must divide global_batch={job.global_batch}; "
                f"use a global batch that is a multiple of {per_step}, or smaller degrees"
            )
        stages = layout.pp * self.virtual_stages
        if len(self.stage_layers) != stages:
            raise InputError(
                f"stage_layers has {len(self.stage_layers)} entries: must be pp*virtual_stages={stages}; leave it out for even stages"
            )
        if sum(self.stage_layers) != model.num_hidden_layers or min(self.stage_layers) < 0:
            raise InputError(
                f"stage_layers={list(self.stage_layers)}: must add up to num_hidden_layers={model.num_hidden_layers}, none negative; "
                "leave it out for even stages"
            )
        _check_schedule(self)
        # fully_shard on one chip stores float32 weights and casts them layer by layer
        if self.zero not in (ZeroStage.NONE, ZeroStage.PARAMETERS) and layout.dp_shard * layout.cp == 1:
            raise InputError(f"zero={int(self.zero)}: needs dp_shard*cp of at least 2; use --dp-shard or --zero 0")
        if self.zero is ZeroStage.NONE and layout.dp_shard > 1:
            raise InputError(
                f"dp_shard={layout.dp_shard}: shards nothing with zero=0; use dp_replicate={layout.dp_shard}, or --zero 1, 2 or 3"
            )
        if job.seq_len > model.positions.max_position_embeddings and model.positions.position == "learned":
            raise InputError(
                f"seq_len={job.seq_len}: {model.name} has learned positions for {model.positions.max_position_embeddings} tokens only; "
                "use a shorter sequence"
            )

    @property
    def rules(self) -> RuleSet:
        """The rules that shard all operators. Raises InputError for a plan with an assignment."""
        if isinstance(self.sharding, Assignment):
            raise bad_field("rules", self.rule_set, "the plan gives the sharding of each operator", "use a plan with rules")
        return self.sharding

    @property
    def rule_set(self) -> str:
        """The name of the rules."""
        return "assignment" if isinstance(self.sharding, Assignment) else self.sharding.name

    @property
    def sequence_parallel(self) -> bool:
        """Whether rules shard the residual stream over tp."""
        return isinstance(self.sharding, RuleSet) and self.layout.tp > 1 and self.sharding.scatters_residual

    @property
    def framework(self) -> FrameworkRef:
        """The framework with its stated settings."""
        return FrameworkRef.parse(self.profile)

    @property
    def compression(self) -> Compression:
        """The stated compression of gradients."""
        word = self.framework.settings.get("gradient_compression")
        return NO_COMPRESSION if word is None else compression_of(word)

    @property
    def folding(self) -> tuple[int, int] | None:
        """(ep, etp), of a model with experts."""
        return (self.ep, self.etp) if self.has_experts else None

    @property
    def has_experts(self) -> bool:
        return isinstance(self.job.model, TransformerConfig) and self.job.model.parts.experts is not None

    def stages_of_rank(self, rank: int) -> tuple[int, ...]:
        """Return the virtual stages of a pipeline rank, in model order."""
        pp = self.layout.pp
        return stages_of_rank(rank, pp, pp * self.virtual_stages, self.schedule.placement)

    @property
    def num_microbatches(self) -> int:
        return self.job.global_batch // (self.layout.data_parallel * self.micro_batch)

    @property
    def assignment(self) -> Assignment | None:
        """The sharding of each operator; None for a plan with rules."""
        return self.sharding if isinstance(self.sharding, Assignment) else None

    @property
    def cuts(self) -> Assignment:
        """The sharding of each operator. Raises InputError for a plan with rules."""
        if isinstance(self.sharding, RuleSet):
            raise bad_field("rules", self.rule_set, "shard all operators; this plan gives the sharding of each", "use one of those")
        return self.sharding

    def hash(self) -> str:
        """Return twelve hex digits that identify the plan, the same on every machine."""
        import hashlib
        import json

        content = plan_to_dict(self)
        if isinstance(self.sharding, RuleSet) and is_shipped(self.sharding):
            del content["rules"]  # the name, which `rule_set` holds too
        if self.job.train == FULL_TRAINING:
            del content["job"]["train"]  # keeps the hashes of plans from before this field existed
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """Return the plan as plain values, in an order for readers."""
    job, layout, sharding = plan.job, plan.layout, plan.sharding
    cuts: dict[str, Any]
    without: tuple[str, ...] = DEFAULT_ORDER
    if isinstance(sharding, Assignment):
        cuts, without = {"assignment": sharding.to_dict()}, (*DEFAULT_ORDER, "rules", "sequence_parallel", "order")
    else:
        cuts = {"rules": sharding.name if is_shipped(sharding) else sharding.to_dict(), "rule_set": sharding.name}
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "plan",
        "job": {
            "model": model_to_dict(job.model),
            "global_batch": job.global_batch,
            "seq_len": job.seq_len,
            "precision": str(job.precision),
            "optimizer": str(job.optimizer),
            "train": str(job.train),
            **({} if job.routing == BALANCED else {"routing": job.routing.plain, "capacity_factor": job.routing.capacity_factor}),
        },
        "cluster": plan.cluster,
        "num_chips": plan.num_chips,
        "layout": {axis: layout.degree(axis) for axis in reversed(DEFAULT_ORDER)},
        **{name: list(value) if isinstance(value, tuple) else value for name, value in _knobs_of(plan).items() if name not in without},
        **cuts,
        "recompute_operators": list(plan.recompute_operators),
        "stage_layers": list(plan.stage_layers),
        "profile": plan.framework.name,
        **({"settings": dict(plan.framework.settings)} if plan.framework.settings else {}),
        **({"schedule": FILE, "schedule_table": plan.schedule.to_dict()} if isinstance(plan.schedule, ScheduleTable) else {}),
        "calibration": plan.calibration,
    }


def _knobs_of(plan: Plan) -> dict[str, Any]:
    """Return the plain value of every knob by name."""
    knobs: dict[str, Any] = {}
    for name in plan_keys():
        if name in EXPERT_KNOBS and not plan.has_experts:
            continue
        value = plan.layout.degree(name) if name in DEFAULT_ORDER else getattr(plan, "rule_set" if name == "rules" else name)
        knobs[name] = str(value) if isinstance(value, (str, ScheduleTable)) else value
    return knobs | {"zero": int(plan.zero)}


def expert_words(plan: Plan) -> list[str]:
    """Return the expert parallelism of a plan as words: "ep 8", "etp 2", "allgather"; none for a model without experts."""
    if not plan.has_experts:
        return []
    degrees = [f"ep {plan.ep}", f"etp {plan.etp}" if plan.etp > 1 else ""]
    return [*filter(None, degrees), *([] if plan.dispatcher is Dispatcher.ALL_TO_ALL else [str(plan.dispatcher)])]


def plan_facts(plan: Plan) -> dict[str, Any]:
    """Return the plain values of a job, its cluster and its plan, under the names of their flags."""
    job = plan.job
    return {
        "model": job.model.name,
        "cluster": plan.cluster,
        "chips": plan.num_chips,
        "global_batch": job.global_batch,
        "seq_len": job.seq_len,
        "precision": str(job.precision),
        "optimizer": str(job.optimizer),
        "train": str(job.train),
        "profile": plan.framework.name,
        "settings": settings_text(plan.framework.settings),
        **_knobs_of(plan),
        "calibration": plan.calibration,
    }


def tokens_of_rank(plan: Plan) -> int:
    """Return the tokens of a micro-batch that one rank sends to experts."""
    return plan.micro_batch * plan.job.seq_len // (plan.layout.cp * plan.layout.tp)


def place_of(plan: Plan, rank: int) -> dict[str, int]:
    """Return the rank's index on each axis; ranks are numbered with the first axis of `order` innermost."""
    indices = {}
    for axis in plan.order:
        rank, indices[axis] = divmod(rank, plan.layout.degree(axis))
    return indices


def rank_at(plan: Plan, indices: Mapping[str, int]) -> int:
    """Return the rank with these indices on the axes; a missing index is 0."""
    return sum(indices.get(axis, 0) * plan.layout.stride(axis, plan.order) for axis in plan.order)


def _choices(number: int) -> str:
    values = [str(d) for d in divisors(number)]
    if len(values) > 12:
        values = [*values[:8], "...", values[-1]]
    return ", ".join(values[:-1]) + (" or " if len(values) > 1 else "") + values[-1]


def _check_schedule(plan: Plan) -> None:
    pp, virtual, schedule = plan.layout.pp, plan.virtual_stages, plan.schedule
    if isinstance(schedule, ScheduleTable) and pp != schedule.num_ranks:
        raise bad_field("pp", pp, f"schedule={schedule} has the orders of {schedule.num_ranks} ranks", f"use pp={schedule.num_ranks}")
    if schedule.num_chunks and virtual != schedule.num_chunks:
        rule = f"schedule={schedule} has {schedule.num_chunks} stages on a rank"
        raise bad_field("virtual_stages", virtual, rule, f"use {schedule.num_chunks}, or schedule=interleaved")
    if virtual > 1 and not schedule.takes_chunks:
        raise InputError(f"virtual_stages={virtual}: needs schedule=interleaved, not {schedule}; add --schedule interleaved")
    if schedule.needs_chunks and (virtual < 2 or pp < 2):
        raise InputError(
            f"schedule={schedule}: needs pp and virtual_stages of at least 2, not pp={pp} and virtual_stages={virtual}; use 1f1b"
        )
    if schedule.splits_backward and plan.recompute is not Recompute.NONE:
        raise InputError(
            f"recompute={plan.recompute}: with schedule={schedule} torch recomputes a layer for each of its weights; use recompute=none"
        )
    if schedule.splits_backward and pp < 2:
        raise InputError(f"schedule={schedule}: needs pp of at least 2, not pp={pp}; use 1f1b")
    if schedule.groups and not schedule.admits(plan.num_microbatches, pp, virtual):
        rule = f"pp={pp}" if schedule.groups == "ranks" else rounds_rule(plan.num_microbatches, pp)
        raise InputError(
            f"schedule={schedule}: the number of microbatches {plan.num_microbatches} must be a multiple of {rule}; "
            "change micro_batch or use 1f1b"
        )
    if isinstance(schedule, ScheduleTable) and plan.num_microbatches != schedule.num_microbatches:
        wanted = schedule.num_microbatches * plan.layout.data_parallel * plan.micro_batch
        rule = f"with micro_batch={plan.micro_batch} it is {plan.num_microbatches} microbatches, and schedule={schedule} has the orders of"
        raise bad_field("global_batch", plan.job.global_batch, f"{rule} {schedule.num_microbatches}", f"use global_batch={wanted}")
    if plan.num_microbatches < schedule.microbatches_per_rank * pp:
        rule = f"schedule={schedule} needs at least {2 * pp} microbatches with pp={pp}, not {plan.num_microbatches}"
        raise bad_field("micro_batch", plan.micro_batch, rule, "use a smaller micro_batch, a larger global batch, or schedule=zbv")


def _check_assigned(plan: Plan, assignment: Assignment) -> None:
    """Check the mesh of each stage and the batch of a plan with an assignment; `check_assignment` checks the shardings of the graph."""
    layout, batch, virtual = plan.layout, plan.job.global_batch, plan.virtual_stages
    if virtual < 1 or assignment.num_stages % virtual:
        raise bad_field("virtual_stages", virtual, f"must divide the {assignment.num_stages} stages of the assignment", "use 1")
    pp = assignment.num_stages // virtual
    chips = pp * assignment.num_chips
    if chips != plan.num_chips:
        raise bad_field("num_chips", plan.num_chips, f"the assignment is for {chips} (stages times the mesh of one)", "correct one of them")
    if layout != ParallelLayout(pp=pp):
        degrees = "*".join(str(layout.degree(axis)) for axis in DEFAULT_ORDER)
        raise bad_field("layout", degrees, "operators are cut over the mesh of the assignment", f"use pp={pp} alone")
    if plan.micro_batch < 1 or batch % plan.micro_batch:
        raise bad_field("micro_batch", plan.micro_batch, f"must divide global_batch={batch}", "use a divisor")
    if plan.schedule.is_simulated:
        rule = "a plan with a sharding per operator has a closed form of its schedule"
        raise bad_field("schedule", str(plan.schedule), rule, "use 1f1b, or a plan with rules")
    _check_schedule(plan)


def assigned_plan(
    job: TrainingJob,
    *,
    cluster: str,
    assignment: Assignment,
    micro_batch: int,
    zero: int = 0,
    recompute: Recompute = Recompute.NONE,
    recompute_operators: tuple[str, ...] = DEFAULT_RECOMPUTE_OPERATORS,
    schedule: AnySchedule = PipelineSchedule.ONE_F_ONE_B,
    virtual_stages: int = 1,
    attention: AttentionKernel = AttentionKernel.FLASH,
    profile: str = "megatron",
    calibration: str = "",
) -> Plan:
    """Make a plan with a sharding per operator. Stage k is on the chips with index k % pp, which hold `virtual_stages` stages."""
    virtual_stages = read_integer(virtual_stages, "virtual_stages")
    for name, value, most in (("zero", zero, 3), ("micro_batch", micro_batch, job.global_batch)):
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
            raise bad_field(name, shown(value), f"must be a whole number of {most} at most", "correct it")
    return Plan(
        job=job,
        cluster=text_of(cluster, "cluster", "its name"),
        num_chips=assignment.num_stages // virtual_stages * assignment.num_chips,
        layout=ParallelLayout(pp=max(1, assignment.num_stages // virtual_stages)),
        order=DEFAULT_ORDER,
        sharding=assignment,
        zero=ZeroStage(zero),
        micro_batch=micro_batch,
        recompute=_chosen(Recompute, "recompute", recompute),
        recompute_operators=_names(recompute_operators, "recompute_operators"),
        schedule=_chosen(PipelineSchedule, "schedule", schedule),
        virtual_stages=virtual_stages,
        stage_layers=(),
        attention=_chosen(AttentionKernel, "attention", attention),
        profile=text_of(profile, "profile", "its name"),
        calibration=text_of(calibration, "calibration", "its name, or nothing"),
    )


def _check_degrees(plan: Plan) -> None:
    """Check that degrees divide the dims that the rules shard, and that every axis shards some dim."""
    rules, layout, model, seq_len = plan.rules, plan.layout, plan.job.transformer, plan.job.seq_len
    degrees = {"cp": layout.cp, "tp": layout.tp}
    axis = unused_axis(rules, model, **degrees)
    if axis and not rules.axes & set(AXIS_PARTS[axis]):
        raise InputError(
            f"{axis}={degrees[axis]}: the rule set {rules.name} cuts nothing by {axis}: its ranks would all do the same; use {axis}=1 or "
            "other rules"
        )
    if axis:
        heads = model.num_key_value_heads
        raise InputError(
            f"tp={layout.tp}: the rule set {rules.name} speaks of one part of it, tp_kv or tp_q: tp must "
            + (f"divide num_key_value_heads={heads}; use {_choices(heads)}" if "tp_kv" in rules.axes else "have no other; use tp=1")
        )
    if plan.has_experts:
        _check_experts(plan)
    else:
        check_expert_knobs({"ep": plan.ep, "etp": plan.etp, "dispatcher": plan.dispatcher}, plan.job)
    condition = broken(rules, model, seq_len, **degrees)
    if condition is None:
        return
    ways = condition.ways(fine_sizes(model, **degrees))
    if condition.is_multiple:
        raise InputError(
            f"tp={ways}: must divide {condition.field}={condition.size} or be a multiple of it; use {_choices(condition.size)}"
        )
    if condition.is_sequence:
        raise InputError(f"cp*tp={ways}: must divide seq_len={seq_len} (tp counts under sequence parallelism); use smaller degrees")
    raise InputError(f"{condition.named}={ways}: must divide {condition.field}={condition.size}; use {_choices(condition.size)}")


def check_expert_knobs(knobs: Mapping[str, Any], job: TrainingJob) -> None:
    """Refuse knobs of experts other than their defaults for a model without experts."""
    if isinstance(job.model, TransformerConfig) and job.model.parts.experts is None:
        for name in EXPERT_KNOBS:
            if knobs.get(name) not in (None, 1, Dispatcher.ALL_TO_ALL):
                raise bad_field(name, knobs[name], f"{job.model.name} has no experts", f"leave out {name}")


def _check_experts(plan: Plan) -> None:
    """Check that experts are sharded evenly, and that their mesh folds over that of attention."""
    layout, experts = plan.layout, plan.job.transformer.parts.experts
    assert experts is not None
    if plan.ep > 1 and "ep" not in plan.rules.axes:
        raise bad_field("ep", plan.ep, f"the rule set {plan.rule_set} does not cut experts", "use ep=1 or other rules")
    if experts.num_experts % plan.ep:
        raise bad_field("ep", plan.ep, f"must divide the {experts.num_experts} experts", f"use {_choices(experts.num_experts)}")
    if experts.width % plan.etp:
        raise bad_field("etp", plan.etp, f"must divide the width of an expert, {experts.width}", "use etp=1")
    fine = fine_sizes(plan.job.transformer, cp=layout.cp, tp=layout.tp)
    data = layout.degree(data_axis(layout.dp_shard))
    fault = folding_fault(tp_kv=fine["tp_kv"], tp_q=fine["tp_q"], cp=layout.cp, data=data, ep=plan.ep, etp=plan.etp)
    if fault:
        raise InputError(fault)
    if plan.zero and takes_replicas(dp_shard=layout.dp_shard, cp=layout.cp, tp=layout.tp, ep=plan.ep, etp=plan.etp):
        rule = f"reaches into dp_replicate={layout.dp_replicate}, over which zero={int(plan.zero)} shards nothing"
        raise bad_field("ep", plan.ep, rule, f"use dp_shard={layout.dp_replicate} in its place, or zero=0")
    if (counts := plan.job.routing.counts) is None:
        return
    if layout.tp > 1 and not plan.sequence_parallel:
        rule = f"with tp={layout.tp}, each of its ranks must have its own tokens"
        raise bad_field("routing", str(plan.job.routing), rule, "use sequence_parallel=true, or skew: in place of counts")
    counts.check(ranks=plan.ep, num_experts=experts.num_experts, tokens=tokens_of_rank(plan), top_k=experts.top_k)


@takes(knobs=Knobs)
def make_plan(
    job: TrainingJob,
    *,
    cluster: str,
    num_chips: int,
    knobs: Knobs,
    recompute_operators: tuple[str, ...] = DEFAULT_RECOMPUTE_OPERATORS,
    stage_layers: tuple[int, ...] | None = None,
    profile: str = "megatron",
    calibration: str = "",
) -> Plan:
    """Make a complete plan from the given knobs and the documented defaults.

    Degrees that are left out are 1. Remaining chips go to dp_replicate, or to dp_shard if a ZeRO stage is given. dp_shard without a ZeRO
    stage means stage 3 (FSDP). The default rules are Megatron's, with sequence parallelism if tp > 1, unless the switch is given.
    """
    return plan_of_knobs(
        job,
        knobs.planned(),
        cluster=text_of(cluster, "cluster", "its name"),
        num_chips=read_integer(num_chips, "chips"),
        recompute_operators=_names(recompute_operators, "recompute_operators"),
        stage_layers=stage_layers,
        profile=text_of(profile, "profile", "its name"),
        calibration=text_of(calibration, "calibration", "its name, or nothing"),
    )


def plan_of_knobs(
    job: TrainingJob,
    knobs: Mapping[str, Any],
    *,
    cluster: str,
    num_chips: int,
    profile: str,
    calibration: str,
    recompute_operators: tuple[str, ...] = DEFAULT_RECOMPUTE_OPERATORS,
    stage_layers: tuple[int, ...] | None = None,
) -> Plan:
    """Return the plan of checked knobs (`Knobs.planned`), as `make_plan`."""
    chosen = dict(knobs)
    pp, cp, tp = chosen.get("pp", 1), chosen.get("cp", 1), chosen.get("tp", 1)
    dp_replicate, dp_shard, zero = chosen.get("dp_replicate"), chosen.get("dp_shard"), chosen.get("zero")
    degrees = {"pp": pp, "dp_replicate": dp_replicate, "dp_shard": dp_shard, "cp": cp, "tp": tp}
    given = pp * cp * tp * (dp_replicate or 1) * (dp_shard or 1)
    if num_chips % given:
        named = "*".join(name for name, value in degrees.items() if (value or 1) > 1)
        raise InputError(f"{named}={given}: must divide chips={num_chips}; use degrees that do, or other --chips")
    rest = num_chips // given
    if dp_shard is None and (zero or 0) > 0 and dp_replicate is None:
        dp_shard, dp_replicate = rest, 1
    elif dp_replicate is None:
        dp_replicate, dp_shard = rest, dp_shard or 1
    elif dp_shard is None:
        if rest > 1 and not zero:
            raise InputError(
                f"dp_replicate={dp_replicate}: with the other degrees it takes {given} of chips={num_chips}; leave it out for "
                f"{dp_replicate * rest} replicas, or say where the other factor of {rest} goes: dp_shard={rest} (FSDP), tp, pp or cp"
            )
        dp_shard = rest
    if zero is None:
        zero = 3 if dp_shard > 1 else 0
    if zero not in ZERO_STAGES:
        raise InputError(f"zero={zero}: must be 0, 1, 2 or 3; use 3 for FSDP")
    if zero == 0:
        # dp_shard without ZeRO is plain data parallelism: one plan, one row
        dp_replicate, dp_shard = dp_replicate * dp_shard, 1
    elif dp_shard * cp == 1:
        if dp_replicate > 1:
            raise InputError(
                f"zero={zero}: shards over dp_shard (and cp), which is 1 with dp_replicate={dp_replicate}; "
                f"give dp_shard={dp_replicate} in place of dp_replicate={dp_replicate}, or zero=0"
            )
        zero = 0  # one data rank holds everything at any stage: one plan, one row
    layout = ParallelLayout(pp=pp, dp_replicate=dp_replicate, dp_shard=dp_shard, cp=cp, tp=tp)
    operators = chosen.get("recompute_operators", recompute_operators)
    if operators != DEFAULT_RECOMPUTE_OPERATORS and (without := missing_module(operators, job.transformer)):
        raise bad_field("recompute_modules", without, f"no layer of {job.transformer.name} has it", "leave it out")
    if chosen.get("virtual_stages", 1) > 1:
        chosen = {"schedule": "interleaved"} | chosen
    schedule: AnySchedule = _chosen(PipelineSchedule, "schedule", chosen.get("schedule", PipelineSchedule.ONE_F_ONE_B))
    if schedule.num_chunks:
        chosen = {"virtual_stages": schedule.num_chunks} | chosen
    if stage_layers is not None:
        if not isinstance(stage_layers, (list, tuple)):
            raise bad_field("stage_layers", shown(stage_layers), "must be the layers of each stage", "leave it out for even stages")
        stage_layers = tuple(read_integer(layers, "stage_layers", least=0) for layers in stage_layers)
    else:
        stage_layers = default_stage_layers(job, pp, chosen.get("virtual_stages", 1), schedule.placement)
    if chosen.get("etp") is None:
        chosen["etp"] = tp if chosen.get("ep", 1) == 1 and job.transformer.parts.experts is not None else 1
    as_given: dict[str, Any] = {}
    for name, knob in _AS_GIVEN.items():
        as_given[name] = _chosen(knob.choices, name, chosen.get(name, knob.in_files))
    return Plan(
        job=job,
        cluster=cluster,
        num_chips=num_chips,
        layout=layout,
        sharding=_rules(chosen.get("rules"), chosen.get("sequence_parallel"), tp),
        zero=ZeroStage(zero),
        recompute_operators=operators,
        stage_layers=stage_layers,
        profile=profile,
        calibration=calibration,
        **as_given,
    )


#: Knobs that a plan holds unchanged.
_AS_GIVEN = {
    name: knob for name, knob in words_of(Knobs).items() if name in {field.name for field in fields(Plan)} - {"zero"}
}  # fmt: skip


def _rules(rules: RuleSet | None, sequence_parallel: bool | None, tp: int) -> RuleSet:
    """Return the given rules, or those of the sequence-parallel switch."""
    if sequence_parallel and tp == 1:
        raise InputError("sequence_parallel=true: rides on tp, which is 1; use --tp 2 or more, or --no-sequence-parallel")
    if rules is None:
        return default_rule_sets()[tp > 1 if sequence_parallel is None else sequence_parallel]
    if sequence_parallel is not None:
        check_agrees(rules, sequence_parallel)
    return rules


def _chosen(kind: type[StrEnum] | None, name: str, value: Any) -> Any:
    """Return the member of a closed choice; a value of another kind, and a schedule from a file, unchanged."""
    if kind is None or isinstance(value, ScheduleTable):
        return value
    try:
        return kind(value)
    except ValueError:
        raise bad_field(name, value, "not known", f"use {', '.join(kind)}") from None


def _names(value: object, field: str) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(name, str) for name in value):
        raise bad_field(field, shown(value), "must be a list of names", "leave it out for the default")
    return tuple(value)
