"""Explanation of a plan in numbers: its parts, the effect of each knob, and why another plan was not chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from perfmodel.cost.estimate import Estimator
from perfmodel.foundation.errors import InputError, bad_field, shown, suggest, whole_number
from perfmodel.foundation.memory_headroom import Verdict, memory_rule
from perfmodel.foundation.units import format_bytes, format_step, format_time
from perfmodel.foundation.words import words_of
from perfmodel.frameworks.profile import ExecutionProfile
from perfmodel.parallel.algebra.rules import default_rule_sets, rule_labels, rule_set_of
from perfmodel.parallel.choices import USUAL_DISPATCHERS, PipelineSchedule, Recompute
from perfmodel.parallel.knobs import Knobs, bounded_knobs, choices_of
from perfmodel.parallel.plan import Plan, check_expert_knobs, make_plan, plan_facts
from perfmodel.parallel.prediction import Prediction
from perfmodel.planner.reasons import layouts_left_out
from perfmodel.planner.result import FittingChange
from perfmodel.planner.uniform.space import KNOBS, Space, runnable_space, searched_rules, unlimited_space
from perfmodel.planner.uniform.sweep import Sweep, sweep
from perfmodel.uncertainty.sources import TrustAccount

_INTEGER_KNOBS = frozenset(bounded_knobs())
#: Predicate of the plan itself where it does not fit with the headroom.
_UNFIT: Mapping[Verdict, str] = {Verdict.TIGHT: "is tight", Verdict.DOES_NOT_FIT: "does not fit"}
#: Knobs that a question may fix: those of a space, and a rule set by its name or file.
_ALLOWED_KNOBS = (*KNOBS, "rules")
_WORDS: Mapping[str, tuple[str, ...]] = {name: tuple(kind) for name, kind in choices_of().items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """A plan with some knobs fixed.

    knobs        the fixed knobs
    prediction   the plan with the fewest other changes. If that does not fit, the fastest plan with these knobs that does; else the one
                 with the least memory. Empty where no plan has these knobs
    reason       why it is not the chosen plan, as a sentence with numbers
    slower_by    additional seconds a step over the plan in question (0 without a prediction)
    parts        part -> additional seconds over the plan in question
    changed      the other knobs in which it differs from the plan in question
    """

    knobs: Mapping[str, int | str | bool]
    prediction: tuple[Prediction, ...]
    reason: str
    slower_by: float
    parts: Mapping[str, float]
    changed: Mapping[str, int | str | bool] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Explanation:
    """Prediction of a plan with its alternatives.

    neighbours: the same plan with one knob changed; why_not: alternatives that were asked about; trust: if requested;
    remedies: the smallest changes with which a plan that does not fit would fit.
    """

    prediction: Prediction
    bottleneck: str
    neighbours: tuple[Alternative, ...]
    why_not: tuple[Alternative, ...]
    trust: TrustAccount | None = None
    remedies: tuple[FittingChange, ...] = ()

    def __str__(self) -> str:
        asked = [f"why not {alternative.reason}" for alternative in self.why_not]
        turned = ["the same plan with one knob turned:", *(f"  {alternative.reason}" for alternative in self.neighbours)]
        trust = [str(self.trust)] if self.trust is not None else []
        return "\n".join([*asked, *trust, str(self.prediction), f"mostly {self.bottleneck.replace('_', ' ')}", *turned])

    __repr__ = __str__


def parse_knobs(text: str) -> dict[str, int | str | bool]:
    """Parse `tp=16,pp=2` into knobs of the space."""
    knobs: dict[str, int | str | bool] = {}
    for item in text.split(","):
        name, equals, value = (part.strip() for part in item.partition("="))
        name = name.replace("-", "_")
        if name in knobs:
            raise InputError(f"why-not={item.strip()}: {name} is given twice; ask for each value with a --why-not of its own")
        if not equals or not value:
            raise InputError(f"why-not={item.strip()}: must be knob=value; write for example tp=16,pp=2")
        if name not in _ALLOWED_KNOBS:
            raise InputError(f"why-not={item.strip()}: {name!r} is not a knob{suggest(name, _ALLOWED_KNOBS)}")
        if name in _INTEGER_KNOBS:
            count, least = whole_number(value), words_of(Knobs)[name].least
            if count is None or count < least:
                raise InputError(f"why-not={item.strip()}: {name} must be a whole number of at least {least}; give one")
            knobs[name] = count
        elif name == "rules":
            knobs[name] = value
        elif words_of(Knobs)[name].kind is bool:
            if value.lower() not in ("true", "false"):
                raise InputError(f"why-not={item.strip()}: {name} must be true or false; write one of them")
            knobs[name] = value.lower() == "true"
        else:
            if value not in _WORDS[name]:
                raise InputError(f"why-not={item.strip()}: not known{suggest(value, _WORDS[name])}")
            knobs[name] = value
    return knobs


def check_knobs(knobs: object) -> dict[str, int | str | bool]:
    """Check knobs of the space that are passed as a mapping, and return them."""
    if not isinstance(knobs, Mapping):
        raise bad_field("why_not", shown(knobs), "must name knobs and their values", 'write {"tp": 16}')
    checked: dict[str, int | str | bool] = {}
    for name, value in knobs.items():
        if name not in _ALLOWED_KNOBS:
            raise InputError(f"why_not: {name!r} is not a knob{suggest(name, _ALLOWED_KNOBS)}")
        if name in _WORDS and value not in _WORDS[name]:
            raise bad_field(name, value, f"not known{suggest(value, _WORDS[name])}")
        checked[name] = str(value) if name == "rules" or name in _WORDS else words_of(Knobs)[name].value(value, name)
    return checked


def plan_knobs(plan: Plan) -> dict[str, int | str | bool]:
    facts = plan_facts(plan)
    return {knob: facts[knob] for knob in KNOBS if knob in facts} | {"rules": rule_labels(plan.rules)}


def _space_of(plan: Plan, knobs: Mapping[str, int | str | bool], profile: ExecutionProfile) -> Space:
    """Return the plans with these knobs, under the given rule set, else those of a search and the plan's own."""
    fixed = {knob: value for knob, value in knobs.items() if knob != "rules"}
    rules = (rule_set_of(knobs["rules"]),) if "rules" in knobs else (*searched_rules(profile, plan.job.seq_len), plan.rules)
    # flex is tried only if the plan uses it
    dispatchers = (*USUAL_DISPATCHERS, plan.dispatcher)
    return Space(fixed=fixed, rules=tuple(dict.fromkeys(rules)), dispatchers=tuple(dict.fromkeys(dispatchers)))


def space_around(plan: Plan, fixed: Mapping[str, int | str | bool]) -> Space:
    """Return the plans with these knobs that have the order and the stages of a plan, and its rules if they are the user's own."""
    rules = default_rule_sets() if plan.rules in default_rule_sets() else (plan.rules,)
    return Space(fixed=fixed, orders=(plan.order,), stage_layers=plan.stage_layers, rules=rules)


def changed_knobs(plan: Plan, other: Plan) -> dict[str, int | str | bool]:
    """Return the knobs in which `other` differs from `plan`, with the values of `other`."""
    before, after = plan_knobs(plan), plan_knobs(other)
    changed = {knob: after[knob] if knob != "rules" else other.rule_set for knob in after if after[knob] != before.get(knob)}
    if {"sequence_parallel", "rules"} <= changed.keys() and other.rules in default_rule_sets():
        del changed["rules"]  # the switch names the rule set
    if other.order != plan.order:
        changed["order"] = "-".join(other.order)
    return changed


@dataclass(frozen=True, slots=True, kw_only=True)
class _Comparison:
    """The plan that others are compared with, and the settings of the comparison.

    base            the plan in question
    any_framework   other plans may be ones that the framework cannot run
    """

    estimator: Estimator
    base: Prediction
    memory_headroom: float | None
    risk: float | None
    any_framework: bool

    def sweep(self, space: Space) -> Sweep:
        plan = self.base.plan
        return sweep(
            self.estimator,
            unlimited_space(space) if self.any_framework else runnable_space(space, self.estimator.profile, self.estimator.job),
            top=1,
            memory_headroom=self.memory_headroom,
            risk=self.risk,
            attention=plan.attention,
            recompute_operators=plan.recompute_operators,
            also=(),
        )

    def predict(self, plan: Plan) -> Prediction:
        return self.estimator.predict(plan, memory_headroom=self.memory_headroom, risk=self.risk)


def explain(
    estimator: Estimator,
    plan: Plan,
    *,
    why_not: Mapping[str, int | str | bool] | None = None,
    memory_headroom: float | None = None,
    risk: float | None = None,
    any_framework: bool = False,
) -> Explanation:
    """Explain a plan: parts of time and memory, the effect of each knob, and why a plan with other knobs was not chosen."""
    base = estimator.predict(plan, memory_headroom=memory_headroom, risk=risk)
    if plan.assignment is not None and why_not:
        rule = "asks for knobs, which a plan whose operators have shardings of their own does not have"
        raise bad_field("why_not", ",".join(why_not), rule, "leave it out, or use a plan of `perfmodel search`")
    check_expert_knobs(why_not or {}, plan.job)
    against = _Comparison(estimator=estimator, base=base, memory_headroom=memory_headroom, risk=risk, any_framework=any_framework)
    turns = single_turns(plan) if plan.assignment is None else []
    neighbours = turned_plans(estimator, base, turns, memory_headroom=memory_headroom, risk=risk, any_framework=any_framework)
    asked = (_answer(against, dict(why_not)),) if why_not else ()
    return Explanation(prediction=base, bottleneck=max(base.parts, key=lambda part: base.parts[part]), neighbours=neighbours, why_not=asked)


def turned_plans(
    estimator: Estimator,
    base: Prediction,
    turns: Sequence[Mapping[str, int | str | bool]],
    *,
    memory_headroom: float | None = None,
    risk: float | None = None,
    any_framework: bool = False,
) -> tuple[Alternative, ...]:
    """Return one alternative per turn, with the fewest other knobs changed; turns without a plan are left out."""
    against = _Comparison(estimator=estimator, base=base, memory_headroom=memory_headroom, risk=risk, any_framework=any_framework)
    return tuple(alternative for turned in turns for alternative in _turned(against, turned))


def single_turns(plan: Plan) -> list[dict[str, int | str | bool]]:
    """Return single changes of knobs: degrees doubled and halved (the data axes absorb the rest), other choices one by one."""
    turns: list[dict[str, int | str | bool]] = []
    layout = plan.layout
    for axis in ("tp", "pp", "cp"):
        value = layout.degree(axis)
        turns += [{axis: v} for v in (value * 2, value // 2) if v >= 1 and v != value]
    if plan.job.transformer.parts.experts is not None:
        turns += [{"ep": v} for v in (plan.ep * 2, plan.ep // 2) if v >= 1]
        turns += [{"dispatcher": str(d)} for d in USUAL_DISPATCHERS if d is not plan.dispatcher and plan.ep > 1]
    turns += [{"micro_batch": v} for v in (plan.micro_batch * 2, plan.micro_batch // 2) if v >= 1]
    turns += [{"recompute": str(r)} for r in Recompute if r is not plan.recompute]
    if layout.tp > 1 and plan.rules in default_rule_sets():
        turns.append({"sequence_parallel": not plan.sequence_parallel})
    if layout.dp_shard * layout.cp > 1:
        turns += [{"zero": z} for z in range(0 if layout.dp_shard == 1 else 1, 4) if z != int(plan.zero)]
    if layout.pp > 1:
        turns += [{"schedule": str(s)} for s in PipelineSchedule if s is not plan.schedule and not s.splits_backward]
    return turns


#: Least gain, as a share of the step, at which the best plan with the knobs is named in addition to the plan with them alone.
_LEAST_GAIN = 0.005
#: Least share of the difference of two steps at which the part most changed by the knobs alone is named.
_LEAST_PART = 0.1
#: Knobs that other degrees may need to change, the most specific first; each attempt frees one more group.
_FREED = (("dp_replicate", "dp_shard"), ("virtual_stages",), ("schedule", "sequence_parallel"), ("zero",))


def _turned(against: _Comparison, turned: Mapping[str, int | str | bool], frees: bool | None = None) -> tuple[Alternative, ...]:
    """Return the plan with these knobs and the fewest other changes; empty where the framework runs no such plan.

    frees   other knobs may change; None: only if degrees change
    """
    plan, changes = against.base.plan, set(turned)
    frees = bool(changes & {"tp", "pp", "cp"}) if frees is None else frees
    fixed = {**plan_knobs(plan), **turned}
    fixed.pop("rules")
    if "schedule" in turned:
        fixed.pop("virtual_stages")
    if changes & {"tp", "pp", "cp"}:
        layout = plan.layout
        fixed.pop("dp_shard" if layout.dp_replicate == 1 else "dp_replicate")
        if layout.dp_replicate > 1 and layout.dp_shard > 1:
            fixed.pop("dp_shard")
    around = space_around(plan, fixed)
    state = against.sweep(around)
    for freed in _FREED if frees else ():
        if state.counts.num_evaluated:
            break
        fixed = {knob: value for knob, value in fixed.items() if knob not in freed or knob in turned}
        state = against.sweep(replace(around, fixed=fixed))
    if not state.counts.num_evaluated and not against.any_framework:
        if replace(against, any_framework=True).sweep(replace(around, fixed=fixed)).counts.num_evaluated:
            return ()
        against = replace(against, any_framework=True)
    return (_compared(against, dict(turned), state),)


def _answer(against: _Comparison, knobs: dict[str, int | str | bool]) -> Alternative:
    """Return the plan with only these knobs changed, where it fits; else the best plan with them and the other knobs free.

    The reason mentions where the plan has these knobs already, or is slower than the alternative.
    """
    base, plan = against.base, against.base.plan
    has_it = all(plan_knobs(plan).get(knob) == value for knob, value in knobs.items() if knob != "rules")
    has_it = has_it and ("rules" not in knobs or plan.rules == rule_set_of(knobs["rules"]))
    alone = () if has_it or "rules" in knobs else _turned(against, knobs, frees=True)
    turned = alone[0].prediction if alone else ()
    cause = _cause(turned[0], base) if turned and not turned[0].fits else ""
    answer = best = _compared(against, knobs, against.sweep(_space_of(plan, knobs, against.estimator.profile)), cause=cause)
    if not best.prediction or not best.prediction[0].fits:
        return replace(answer, reason=f"{answer.reason}; the plan itself has that") if has_it else answer
    _, _, numbers = best.reason.partition(": ")
    if has_it:
        best_one = f"the best such plan is {numbers}" if best.changed else "no such plan is better"
        return replace(answer, reason=f"{_named(knobs)}: the plan has that; {best_one}")
    of_best = f"the best such plan {'would be better: ' if best.prediction[0].step_time < base.step_time and base.fits else 'is '}{numbers}"
    if turned and turned[0].fits:
        answer, numbers = alone[0], alone[0].reason.partition(": ")[2]
        if best.prediction[0].step_time < turned[0].step_time * (1.0 - _LEAST_GAIN):
            numbers = f"{numbers}; {of_best}"
    elif turned:
        numbers = f"alone it needs {format_bytes(turned[0].memory['total'])} and {_UNFIT[turned[0].verdict]}; {of_best}"
    if not base.fits:
        return replace(answer, reason=f"{_named(knobs)}: it would fit, and the plan {_UNFIT[base.verdict]}: {numbers}")
    is_better = answer.prediction[0].step_time < base.step_time and not (turned and answer is best)
    return replace(answer, reason=f"{_named(knobs)}: {'it would be better: ' if is_better else ''}{numbers}")


def _named(knobs: Mapping[str, int | str | bool]) -> str:
    return ", ".join(f"{knob}={str(value).lower() if isinstance(value, bool) else value}" for knob, value in knobs.items())


def _compared(against: _Comparison, knobs: dict[str, int | str | bool], state: Sweep, cause: str = "") -> Alternative:
    """Compare the best plan of a sweep with the plan in question.

    cause   part of the step that the knobs alone change most; empty: the part that differs most
    """
    base, named = against.base, _named(knobs)
    number = state.counts.num_evaluated
    if number == 0:
        reason = _rule(against, knobs)
        if not against.any_framework:
            lifted = replace(against, any_framework=True).sweep(state.space)
            if lifted.counts.num_evaluated:
                lacks = against.predict(lifted.plan(int(lifted.best.least.ids[0]))).not_runnable or "other knobs of the plan rule it out"
                reason = f"not a plan for this framework: {lacks}; --any-framework compares it all the same"
        return Alternative(knobs=knobs, prediction=(), reason=f"{named}: {reason}", slower_by=0.0, parts={})
    ids = state.best.time.ids if state.counts.num_feasible else state.best.least.ids
    other = against.predict(state.plan(int(ids[0])))
    difference = {part: other.parts[part] - base.parts[part] for part in base.parts}
    changed = {knob: value for knob, value in changed_knobs(base.plan, other.plan).items() if knob not in knobs}
    also_changed = f", with {_named(changed)}" if changed else ""
    if not other.fits:
        lacking = other.memory["total"] - memory_rule(against.memory_headroom, against.risk).allowed(other.memory_usable)
        largest = other.largest_memory_class
        none = "does not fit; it" if number == 1 else f"none of {number:,} such plans fits; the smallest"
        much = f"{format_bytes(lacking)} too much" if lacking > 0 else f"which fits with {other.fits_probability:.0%} only"
        reason = (
            f"{named}: {none} needs {format_bytes(other.memory['total'])}, "
            f"{much} (mostly {largest.replace('_', ' ')}: {format_bytes(other.memory[largest])}){also_changed}"
        )
    else:
        reason = f"{named}: {_change(other, base, difference, cause)}{also_changed}"
    return Alternative(
        knobs=knobs,
        prediction=(other,),
        reason=reason,
        slower_by=other.step_time - base.step_time,
        parts=difference,
        changed=changed,
    )


def _cause(other: Prediction, base: Prediction) -> str:
    """Return the part of the step that accounts for most of the difference to another plan."""
    sign = 1.0 if other.step_time > base.step_time else -1.0
    return max(base.parts, key=lambda part: sign * (other.parts[part] - base.parts[part]))


def _change(other: Prediction, base: Prediction, difference: Mapping[str, float], cause: str) -> str:
    """Return how much slower or faster the other plan is, and the part that changes most.

    If the knobs alone change another part, `cause`, that one comes first; the largest only if the two change in opposite directions.
    """
    change = other.step_time / base.step_time - 1.0
    times = f"({format_step(other.step_time)} against {format_step(base.step_time)})"
    if abs(change) < 1e-9:
        return f"as fast {times}"
    word = "slower" if change > 0 else "faster"
    largest = _cause(other, base)
    counts = bool(cause) and abs(difference[cause]) >= _LEAST_PART * abs(other.step_time - base.step_time)

    def text(part: str) -> str:
        return f"{part.replace('_', ' ')} ({'+' if difference[part] > 0 else '-'}{format_time(abs(difference[part]))})"

    if not counts or cause == largest:
        parts = f"mostly {text(largest)}"
    else:
        parts = text(cause) if difference[cause] * difference[largest] > 0 else f"{text(cause)} but {text(largest)}"
    return f"{100 * abs(change):.1f} % {word} {times}, {parts}"


def _rule(against: _Comparison, knobs: Mapping[str, int | str | bool]) -> str:
    """Return the rule that the knobs break: a check of the plan, a limit of the framework, or the reason for left-out layouts."""
    estimator, plan = against.estimator, against.base.plan
    wanted: dict[str, Any] = {**plan_knobs(plan), **knobs}
    if set(knobs) & {"tp", "pp", "cp", "dp_replicate", "dp_shard"}:
        for axis in ("dp_replicate", "dp_shard", "zero"):
            if axis not in knobs:
                wanted.pop(axis)
    if "virtual_stages" not in knobs and ({"pp", "schedule"} & set(knobs)):
        wanted["virtual_stages"] = None if wanted["schedule"] in [str(s) for s in PipelineSchedule if s.num_chunks] else 1
        if "schedule" not in knobs:
            wanted["schedule"] = "1f1b"
    wanted["rules"] = rule_set_of(knobs["rules"]) if "rules" in knobs else plan.rules
    if wanted["rules"] in default_rule_sets() and "rules" not in knobs:
        wanted["rules"] = None
    elif "sequence_parallel" not in knobs:
        wanted["sequence_parallel"] = None
    if wanted["tp"] == 1 and wanted["rules"] is None:
        wanted["sequence_parallel"] = False
    if wanted.get("zero") == 0 and int(wanted.get("dp_shard", 1)) > 1:
        return f"no such plan: dp_shard={wanted['dp_shard']} shards nothing with zero=0; it is written dp_replicate={wanted['dp_shard']}"
    try:
        make_plan(
            estimator.job,
            cluster=plan.cluster,
            num_chips=plan.num_chips,
            order=plan.order,
            attention=str(plan.attention),
            profile=plan.profile,
            **wanted,
        )
    except InputError as error:
        return f"no such plan: {error}"
    space = _space_of(plan, knobs, estimator.profile)
    broken = [reason for reason in layouts_left_out(estimator.job, plan.num_chips, space) if "given flag" not in reason]
    return "no such plan" + (f": {'; '.join(broken)}" if broken else " in the searched space (docs/space.md)")
