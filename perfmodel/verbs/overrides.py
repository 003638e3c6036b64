"""Plans with changed knobs or loads: what is given holds, what depends on it follows, all else keeps its values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from perfmodel.foundation.words import words_of
from perfmodel.parallel.algebra.rules import default_rule_sets
from perfmodel.parallel.choices import PipelineSchedule
from perfmodel.parallel.knobs import Knobs, ServingKnobs, plan_keys
from perfmodel.parallel.layout import DEFAULT_ORDER
from perfmodel.parallel.plan import Plan, check_expert_knobs, make_plan, plan_facts
from perfmodel.parallel.request import Service
from perfmodel.parallel.schedule_table import ScheduleTable
from perfmodel.parallel.serving_plan import DEGREES
from perfmodel.verbs.setting import Setting, with_context_form


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One knob of a plan: its value in the file, its new value, and whether it was given or follows from a given one."""

    knob: str
    before: Any
    after: Any
    follows: bool


def overridden(plan: Plan, setting: Setting, knobs: Knobs) -> Plan:
    """Return the plan on the setting's job and cluster, with these knobs. Open data-parallel degrees use the remaining chips."""
    given = with_context_form(knobs.planned(), setting, cp=plan.layout.cp, tp=plan.layout.tp)
    check_expert_knobs(given, setting.job)
    same_chips = setting.cluster.num_chips == plan.num_chips
    same_layers = setting.job.transformer.num_hidden_layers == plan.job.transformer.num_hidden_layers
    before = {name: plan.layout.degree(name) if name in DEFAULT_ORDER else getattr(plan, name) for name in plan_keys()}
    before["recompute_operators"] = plan.recompute_operators
    inherited: dict[str, Any] = before | {"stage_layers": plan.stage_layers}
    del inherited["sequence_parallel"]  # determined by the rules
    changed = {name for name, value in given.items() if before[name] != value}
    if not same_chips or changed & {*DEFAULT_ORDER, "zero"}:
        inherited |= _open_data_degrees(plan, given)
    if changed & {"pp", "virtual_stages", "schedule"} or not same_layers:
        inherited["stage_layers"] = None
    toggles_tp = "tp" in changed and (given["tp"] == 1 or plan.layout.tp == 1)
    if plan.rules in default_rule_sets() and (toggles_tp or "sequence_parallel" in given):
        inherited["rules"] = None
    if changed & {"virtual_stages", "schedule"} or given.get("pp") == 1:
        # chunks and an interleaved schedule imply each other
        inherited |= {"virtual_stages": 1, "schedule": None} if "schedule" not in given else {"virtual_stages": 1}
        if "virtual_stages" not in given and given.get("schedule") in [str(s) for s in PipelineSchedule if s.takes_chunks]:
            inherited["virtual_stages"] = plan.virtual_stages
        if isinstance(given.get("schedule"), ScheduleTable) or given.get("schedule") in [str(s) for s in PipelineSchedule if s.num_chunks]:
            inherited["virtual_stages"] = None  # the schedule states it
    return make_plan(
        setting.job,
        cluster=setting.reference,
        num_chips=setting.cluster.num_chips,
        profile=setting.profile,
        calibration=setting.calibration,
        **(inherited | given),
    )


def _open_data_degrees(plan: Plan, given: dict[str, Any]) -> dict[str, Any]:
    """Return the data-parallel degrees and the ZeRO stage of the plan, with those open that use the remaining chips."""
    shard, replicate = plan.layout.dp_shard, plan.layout.dp_replicate
    stage: int | None = int(plan.zero)
    if "dp_shard" in given or "dp_replicate" in given:
        if given.get("dp_shard", 1) > 1 and not stage:
            stage = None  # dp_shard alone means FSDP
        if "dp_shard" in given:
            return {"dp_replicate": None, "zero": stage}
        return {"dp_shard": None if stage else 1, "zero": stage}
    if given.get("zero", stage) == 0 or ("zero" in given and shard == 1):
        return {"dp_shard": None, "dp_replicate": None}
    if shard == 1 or replicate > 1:
        return {"dp_shard": shard, "dp_replicate": None}
    return {"dp_shard": None, "dp_replicate": 1}


def changes(before: Plan, after: Plan, given: set[str]) -> tuple[Change, ...]:
    """Return the differences of two plans; `given` contains the names of the given knobs."""
    old, new = plan_facts(before), plan_facts(after)
    if {before.rules, after.rules} <= set(default_rule_sets()):
        del old["rules"]  # sequence_parallel distinguishes them
    return tuple(Change(knob=knob, before=old[knob], after=new[knob], follows=knob not in given) for knob in old if old[knob] != new[knob])


def with_plan(service: Service, plan: Service, *, is_searched: bool = False) -> Service:
    """Return the service with missing words taken from a plan.

    Another load replaces that of the plan, other workers or chips its degrees or replicas. is_searched: the layout is not taken.
    """
    held, given = plan.given(), service.given()
    without = [*words_of(ServingKnobs)] if is_searched else []
    if given.keys() & {"concurrency", "rate"}:
        without += ["concurrency", "rate"]
    if "workers" in given:
        without += [*DEGREES, "replicas"]
    elif given.keys() & {"chips", "cluster", *DEGREES}:
        without += ["replicas"]
    if "model" in given:
        without += ["draft_tokens", "acceptance", "draft_model", "quantization"]
    return service.having({name: value for name, value in held.items() if name not in {*given, *without}})
