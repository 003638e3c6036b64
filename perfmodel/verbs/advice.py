"""`advise`: the changes of a plan or a configuration that help most, in the framework's options."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any

from perfmodel.configs.tables import FrameworkTable, common_rules, load_tables, plain
from perfmodel.configs.write import can_write, facts_of_plan, write_config
from perfmodel.foundation.errors import InputError
from perfmodel.foundation.values import optional_share
from perfmodel.foundation.words import Words, takes
from perfmodel.parallel.choices import OFFLOADS
from perfmodel.parallel.framework_ref import SETTING_NAMES, framework_named
from perfmodel.parallel.knobs import Knobs
from perfmodel.parallel.plan import Plan
from perfmodel.parallel.prediction import Prediction
from perfmodel.parallel.request import Request
from perfmodel.planner.explain import single_turns, turned_plans
from perfmodel.planner.remedies import is_needless
from perfmodel.report.advice import Advice, AdvisedChange, OptionChange
from perfmodel.verbs.configs import Start, overridden_plan, start_from
from perfmodel.verbs.requests import read_risk, stated_settings
from perfmodel.verbs.searching import remedies_in, search_in
from perfmodel.verbs.settable import faster_attention
from perfmodel.verbs.setting import Name, Setting, annotated, placed, predict_in, setting_of_plan

#: Limits of shown single changes and pairs, and of single changes that are combined into pairs.
MOST_SINGLE, MOST_PAIRS, MOST_IN_PAIRS = 5, 4, 4
#: Smallest gain of a shown change, as a share of the step time.
LEAST_GAIN = 0.005
#: Plans of a search that are tried in the framework's options.
_SEARCHED = 10


@takes(
    asked=Words(
        Request, only="model cluster chips nodes global_batch batch_tokens seq_len profile settings calibration memory_headroom risk"
    )
)
def advise(plan: Plan | Name, *, asked: Request, any_framework: bool = False) -> Advice:
    """Advise changes of a plan, a plan file or a framework's configuration: the changes that help most, and the best plan.

    Cluster, chips and model are given where a configuration lacks them.
    """
    return advise_on(start_from(plan, asked), asked, any_framework=any_framework)


def advise_on(
    start: Start,
    asked: Request,
    *,
    any_framework: bool = False,
    spelled: Callable[[str], str] = str,
    progress: Callable[[float], None] | None = None,
) -> Advice:
    """Return advice on the plan of a configuration or a plan file. Raises InputError."""
    report = progress or (lambda share: None)
    memory = {"memory_headroom": optional_share(asked.memory_headroom, "memory_headroom"), "risk": read_risk(asked.risk)}
    rule: dict[str, Any] = {**memory, "any_framework": any_framework}
    plan = overridden_plan(start.plan, asked, spelled=spelled)
    setting = setting_of_plan(plan, profile=asked.profile, settings=stated_settings(asked), calibration=asked.calibration)
    table = start.setup.table if start.setup is not None else None
    if table is None:  # the last and most general one of the plan's profile
        profile = framework_named(setting.estimator.profile.name)
        table = next((table for table in reversed([*load_tables().values()]) if table.profile == profile and table.outputs), None)
    current = predict_in(setting, placed(plan, setting), **memory)

    def is_written(plan: Plan) -> bool:
        if any_framework or start.setup is None or not start.setup.table.outputs:  # a plan file may be exported to any framework
            return True
        return can_write(_facts(plan, setting, start), start.setup.table)

    report(0.1)
    remedies = () if current.fits else remedies_in(setting, current.plan, **rule)
    remedies = tuple(remedy for remedy in remedies if is_written(remedy.prediction.plan)) or remedies
    report(0.3)
    changes = _helpful(setting, current, table, rule)
    report(0.6)
    best = _best(setting, current, is_written, rule)
    report(1.0)
    helpful = {name: value for change in changes if not change.is_pair for name, value in change.changes.items() if name in SETTING_NAMES}
    if best and helpful and (prediction := _with_settings(best[0].plan, helpful, memory)) is not None:
        best = (prediction,) if prediction.fits and prediction.step_time < best[0].step_time else best
    if best and current.fits and best[0].step_time >= current.step_time * (1 - LEAST_GAIN):
        best = (current,)
    diff, notes = _difference(setting, start, current.plan, best[0].plan, table) if best else ((), ())
    single, pairs = ([change for change in changes if change.is_pair is is_pair] for is_pair in (False, True))
    return Advice(
        framework=table.framework if table is not None else setting.estimator.profile.name,
        prediction=current,
        changes=tuple(sorted((*single[:MOST_SINGLE], *pairs[:MOST_PAIRS]), key=_step_time)),
        best=best,
        diff=diff,
        remedies=remedies,
        notes=(*notes, *setting.notes),
    )


def _best(setting: Setting, current: Prediction, is_written: Callable[[Plan], bool], rule: Mapping[str, Any]) -> tuple[Prediction, ...]:
    """Return the fastest plan of a search, with the current plan's offloads and kernel of attention and without; empty if none fits.

    A plan that the framework's options express comes before faster ones that they do not.
    """
    settings = [setting]
    if offloads := _without_offloads(current.plan):
        settings.append(setting_of_plan(current.plan, settings=offloads))
    knobs = [Knobs()]
    if current.plan.attention != setting.estimator.profile.kernels.default_attention:
        knobs.append(Knobs(attention=str(current.plan.attention)))
    best: list[tuple[bool, float, Prediction]] = []
    for searched, held in product(settings, knobs):
        plans = search_in(searched, held, {}, top=_SEARCHED, also=(), **rule).plans
        written = (plan for plan in plans if is_written(plan.plan))
        best += [(not is_written(plan.plan), plan.step_time, plan) for plan in (next(written, None) or plan for plan in plans[:1])]
    return tuple(plan for *_, plan in sorted(best, key=lambda entry: entry[:2])[:1])


def _without_offloads(plan: Plan) -> dict[str, bool]:
    """Return the settings that switch off the offloads of a plan."""
    return {name: False for name in OFFLOADS.values() if plan.framework.settings.get(name)}


def _helpful(setting: Setting, current: Prediction, table: FrameworkTable | None, rule: Mapping[str, Any]) -> tuple[AdvisedChange, ...]:
    """Return single changes, and pairs of the best ones, that fit and are faster; for a setup that does not fit, all that fit."""
    if current.plan.assignment is not None:
        return ()

    def turned(turns: Sequence[Mapping[str, Any]]) -> list[AdvisedChange]:
        alternatives = turned_plans(setting.estimator, current, turns, **rule)
        pairs = [(alternative, annotated(plan, setting)) for alternative in alternatives for plan in alternative.prediction if plan.fits]
        advised = [_advised(current, alternative.knobs, plan, alternative.changed) for alternative, plan in pairs]
        return [change for change in advised if change.gain > LEAST_GAIN or not current.fits]

    single = sorted(turned(single_turns(current.plan)), key=_step_time)
    candidates = combinations((change.changes for change in single[:MOST_IN_PAIRS]), 2)
    pairs = turned([{**one, **other} for one, other in candidates if not one.keys() & other.keys()])
    better = [pair for pair in pairs if not any(is_needless(pair, one, LEAST_GAIN) for one in single)]
    return tuple(sorted([*single, *better, *_turned_settings(setting, current, single[:MOST_IN_PAIRS], table, rule)], key=_step_time))


def _advised(current: Prediction, changes: Mapping[str, Any], prediction: Prediction, changed: Mapping[str, Any] = {}) -> AdvisedChange:
    gain = 1 - prediction.step_time / current.step_time
    return AdvisedChange(changes=dict(changes), changed=dict(changed), prediction=prediction, gain=gain)


def _step_time(change: AdvisedChange) -> float:
    return change.prediction.step_time


def _with_settings(plan: Plan, settings: Mapping[str, Any], memory: Mapping[str, Any]) -> Prediction | None:
    """Return the prediction of a plan with more settings; None if they are incompatible with the profile or with each other."""
    try:
        setting = setting_of_plan(plan, settings=settings)
    except InputError:
        return None
    return predict_in(setting, placed(plan, setting), **memory)


def _turned_settings(
    setting: Setting, current: Prediction, single: Sequence[AdvisedChange], table: FrameworkTable | None, rule: Mapping[str, Any]
) -> Iterator[AdvisedChange]:
    """Yield settings with an option of the framework, alone and with one of the changed knobs, and unneeded offloads switched off."""
    memory = {name: value for name, value in rule.items() if name != "any_framework"}
    stated = current.plan.framework.settings
    kernel = faster_attention(setting.estimator.profile, setting.estimator.machine)
    settings = {**common_rules()["to_try"], **({"attention_kernel": kernel} if kernel else {})}
    free = {name: value for name, value in settings.items() if name not in stated or name == "attention_kernel"}
    tried = {name: value for name, value in free.items() if table is not None and table.can_set(name, value)}
    for name, value in {**tried, **_without_offloads(current.plan)}.items():
        if (prediction := _with_settings(current.plan, {name: value}, memory)) is None:
            continue
        alone = _advised(current, {name: value}, prediction)
        if alone.gain <= LEAST_GAIN and current.fits:
            continue
        if alone.prediction.fits:
            yield alone
        for change in single:
            both = _with_settings(change.prediction.plan, {name: value}, memory)
            fitting = [_step_time(one) for one in (alone, change) if one.prediction.fits]
            if both is not None and both.fits and both.step_time < min(fitting) * (1 - LEAST_GAIN):
                yield _advised(current, {**change.changes, name: value}, both, change.changed)


# --- in the framework's options ----------------------------------------------------------------------------------------------------


def _difference(
    setting: Setting, start: Start, before: Plan, after: Plan, table: FrameworkTable | None
) -> tuple[tuple[OptionChange, ...], tuple[str, ...]]:
    """Return the options in which two plans differ, and notes on options that cannot be written."""
    if table is None or before == after:
        return (), ()
    facts = [_facts(plan, setting, start) for plan in (before, after)]
    notes: tuple[str, ...] = ()
    options = [_read_as(plan_facts, start, table) for plan_facts in facts]
    if table.outputs:
        try:
            options = [dict(write_config(plan_facts, table, prediction=None).options) for plan_facts in facts]
        except InputError as error:
            notes = (f"not all of it can be written: {error}",)
    old, new = options
    changed = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    return tuple(OptionChange(option=name, before=old.get(name), after=new.get(name)) for name in changed), notes


def _facts(plan: Plan, setting: Setting, start: Start) -> dict[str, Any]:
    """Return the facts of a plan, started as the configuration starts it."""
    distributed = start.setup.facts.get("distributed") if start.setup is not None else None
    return facts_of_plan(plan, setting.cluster) | {"distributed": distributed}


def _read_as(facts: Mapping[str, Any], start: Start, table: FrameworkTable) -> dict[str, Any]:
    """Return key -> value of the options with the meaning of these facts; of several keys the one in the file."""
    options: dict[str, Any] = {}
    used = start.setup.read if start.setup is not None else {}
    written_facts: set[str] = set()
    entries = sorted(table.keys.items(), key=lambda item: not any(key == item[0] or key.endswith(f".{item[0]}") for key in used))
    for name, key in entries:
        if name.startswith("env.") or key.formula or key.to in written_facts or key.to in ("chips", "nodes", "chips_per_node"):
            continue
        meanings = [(written, key.facts(meaning)) for written, meaning in (key.values or {}).items() if written != "*"]
        if key.values is None and facts.get(key.to) is not None:
            meanings = [(facts[key.to], {key.to: facts[key.to]})]
        for written, wanted in meanings:
            if wanted and all(fact in facts and plain(facts[fact]) == plain(entry) for fact, entry in wanted.items()):
                options[name] = written
                written_facts.update(wanted)
                break
    return options
