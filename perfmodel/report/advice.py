"""Advice, and the smallest changes that make a plan fit, as text, tables and `--json` objects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perfmodel.foundation.text import percent
from perfmodel.foundation.units import format_bytes, format_step, format_time
from perfmodel.parallel.framework_ref import flags_text, settings_text
from perfmodel.parallel.plan import Plan
from perfmodel.parallel.prediction import PROBABILITY, Prediction, notes, probability_cell
from perfmodel.planner.result import FittingChange
from perfmodel.report.document import Block, Facts, Notes, Text
from perfmodel.report.predictions import job_line, memory_line, plan_line, prediction_object, verdict_line
from perfmodel.report.table import Table, table_of

#: Parts of a step that are model compute; the others are exposed communication, waiting and bookkeeping.
_WORK = ("forward", "backward")
_COMMUNICATION = ("communication", "gather", "reduction")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvisedChange:
    """Changes of a plan that make it faster. changed: other knobs that follow; gain: saved share of the step time."""

    changes: Mapping[str, int | str | bool]
    changed: Mapping[str, int | str | bool]
    prediction: Prediction
    gain: float

    @property
    def is_pair(self) -> bool:
        return len(self.changes) > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionChange:
    """One option of the framework: its current and its advised value; None where it is absent."""

    option: str
    before: Any
    after: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Result of `advise`.

    prediction   of the current setup
    changes      the most helpful changes that fit, single ones and pairs, the fastest first
    best         the best plan of a search; empty if no plan fits
    diff         the best plan in the framework's options
    remedies     the smallest changes that fit, if the setup does not
    """

    framework: str
    prediction: Prediction
    changes: tuple[AdvisedChange, ...]
    best: tuple[Prediction, ...]
    diff: tuple[OptionChange, ...]
    remedies: tuple[FittingChange, ...] = ()
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return "\n".join((why_slow(self.prediction), gain_line(self), *diff_lines(self)))


def advice_object(advice: Advice) -> dict[str, Any]:
    """Return the advice as the `--json` object, in SI units."""
    return {
        "framework": advice.framework,
        "current": prediction_object(advice.prediction),
        "why": why_slow(advice.prediction),
        "changes": [
            {"changes": dict(change.changes), "follows": dict(change.changed), "gain": change.gain, **result_object(change.prediction)}
            for change in advice.changes
        ],
        "best": prediction_object(advice.best[0]) if advice.best else None,
        "options": list(advice.diff),
        "remedies": remedies_objects(advice.remedies),
    }


def advice_blocks(advice: Advice, read: Sequence[str]) -> Iterator[Block]:
    """Yield the advice as blocks. read: notes on the reading of a configuration."""
    current = advice.prediction
    facts = [("job", job_line(current.plan)), ("plan", plan_line(current.plan)), ("memory", memory_line(current))]
    yield Facts(verdict_line(current), facts)
    yield Text(why_slow(current), apart=True)
    if not current.fits:
        yield from fitting_blocks(current.plan, advice.remedies)
    if advice.changes:
        yield changes_table(advice)
    yield Text(gain_line(advice), apart=True)
    if advice.diff:
        yield Text(f"Options of {advice.framework} to change", apart=True)
        yield from map(Text, diff_lines(advice))
    yield Notes(list(dict.fromkeys([*advice.notes, *read, *notes(current)])))


def changes_table(advice: Advice) -> Table:
    """Return the table of the most helpful changes, fastest first."""
    rows = []
    for change in advice.changes:
        time, *others = result_cells(change.prediction)
        rows.append((flags_text(change.changes), time, f"{100 * change.gain:+.1f} %", *others, flags_text(change.changed) or "-"))
    title = "Changes that help most, alone and in pairs" if advice.prediction.fits else "Changes of one knob or setting that fit"
    return table_of(title, f"~change | >step time | >gain | >memory | >{PROBABILITY} | ~with", rows)


def gain_line(advice: Advice) -> str:
    """Return one sentence that compares the best plan with the current one."""
    if not advice.best:
        return "No plan of this job fits on these chips."
    current, best = advice.prediction, advice.best[0]
    if best.plan == current.plan:
        return "The setup is as fast as any plan of this job that fits, within half a percent."
    gain = 1 - best.step_time / current.step_time
    how = f"{100 * gain:.1f} % faster" if gain > 0 else f"{-100 * gain:.1f} % slower, but fits"
    memory = f"{format_bytes(best.memory['total'])} (probability of fitting {probability_cell(best.fits_probability)})"
    changed = {name: value for name, value in best.plan.framework.settings.items() if current.plan.framework.settings.get(name) != value}
    settings = f"; settings {settings_text(changed)}" if changed else ""
    return f"Best plan: {format_step(best.step_time)} a step, {how}, {memory}: {plan_line(best.plan)}{settings}"


def diff_lines(advice: Advice) -> Iterator[str]:
    """Yield the changed options as lines of a diff."""
    for option in advice.diff:
        for sign, value in (("-", option.before), ("+", option.after)):
            if value is not None:
                text = str(value).lower() if isinstance(value, bool) else str(value)
                yield f"{sign} {option.option}: {text if len(text) <= 80 else f'{text[:77]}...'}"


def why_slow(prediction: Prediction) -> str:
    """Return one paragraph: the largest parts of the step time, the bottleneck and the nearest limit."""
    step, parts = prediction.step_time, prediction.parts
    largest = sorted(parts, key=lambda name: -parts[name])[:3]
    shares = ", ".join(f"{name.replace('_', ' ')} {percent(parts[name] / step)}" for name in largest)
    work = sum(parts.get(name, 0.0) for name in _WORK)
    lost = {
        "recomputation": parts.get("recompute", 0.0),
        "the pipeline's bubble": parts.get("pipeline_bubble", 0.0),
        "exposed communication": sum(time for name, time in parts.items() if name.endswith(_COMMUNICATION)),
        "the host": parts.get("host", 0.0),
        "the optimizer": parts.get("optimizer", 0.0),
    }
    cause = max(lost, key=lambda name: lost[name])
    bound = (
        f"it is bound by the work itself ({percent(work / step)})"
        if lost[cause] < 0.05 * step
        else f"{percent(work / step)} is the work itself; most of the rest is {cause} ({format_time(lost[cause])})"
    )
    share = prediction.memory["total"] / prediction.memory_usable
    memory = f"memory is {percent(share)} full, mostly {prediction.largest_memory_class.replace('_', ' ')}"
    limit = f"the nearest limit is memory: {memory}" if share > 0.8 else f"{memory}, so there is room to spend on speed"
    return f"Why it takes {format_step(step)}: {shares}; {bound}, at {percent(prediction.mfu_palm)} MFU; {limit}."


# --- changes that fit -------------------------------------------------------------------------------------------------


def fitting_blocks(plan: Plan, remedies: Sequence[FittingChange]) -> Iterator[Block]:
    """Yield the changes that fit; where none keeps the number of chips, also what the user can change in the job."""
    if remedies:
        yield fitting_changes_table(remedies)
    if any("chips" not in remedy.changes for remedy in remedies):
        return
    train = plan.job.train
    lighter = "--train lora:16" if train.is_full else "" if train.quantizes_base else f"--train q{train}"
    others = ["chips with more memory", "a smaller model", "shorter sequences", *filter(None, [lighter])]
    chips = "In place of more chips" if remedies else "No plan of this job fits, neither on these chips nor on more of them"
    yield Text(f"{chips}: use {', '.join(others[:-1])} or {others[-1]}.", apart=True)


def result_cells(prediction: Prediction) -> tuple[str, str, str]:
    """Return step time, memory and probability of fitting as cells of a table."""
    time, memory = format_step(prediction.step_time), format_bytes(prediction.memory["total"])
    return time, memory, probability_cell(prediction.fits_probability)


def result_object(prediction: Prediction) -> dict[str, Any]:
    """Return step time, memory and probability of fitting for a `--json` object."""
    return {"step_time": prediction.step_time, "memory": prediction.memory["total"], "fits_probability": prediction.fits_probability}


def fitting_changes_table(remedies: Sequence[FittingChange]) -> Table:
    rows = ((flags_text(change.changes), *result_cells(change.prediction)) for change in remedies)
    columns = f"~flags | >step time | >memory | >{PROBABILITY}"
    return table_of("Smallest changes that fit: flags to add or to replace", columns, rows)


def remedies_objects(remedies: Sequence[FittingChange]) -> list[dict[str, Any]]:
    return [
        {"flags": flags_text(change.changes), "changes": dict(change.changes), **result_object(change.prediction)} for change in remedies
    ]
