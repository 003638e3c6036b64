"""Predictions as people read them: what is trained where, the plan, where the time goes, what fills the memory, what it rests on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from perfmodel.memory_room import Verdict
from perfmodel.parallel.executable import not_executable_reason
from perfmodel.parallel.layout import DEFAULT_ORDER
from perfmodel.parallel.plan import Plan, plan_to_dict
from perfmodel.parallel.prediction import Prediction
from perfmodel.parallel.residuals import COVERAGE, StepInterval
from perfmodel.report.sensitivity import STEP, Sensitivity
from perfmodel.report.table import Table, bar, percent, words
from perfmodel.units import format_bytes, format_count, format_flop_rate, format_time

SECONDS_OF_A_DAY, SECONDS_OF_AN_HOUR = 86400.0, 3600.0


def step_text(time: float) -> str:
    """A step's time, in seconds even where it takes minutes: steps are compared."""
    return format_time(time) if time < 60 else f"{time:,.{1 if time < 1000 else 0}f} s"


def training_time(prediction: Prediction, tokens: float) -> tuple[float, float]:
    """Days and chip-hours to train on so many tokens, without a pause."""
    steps = tokens / prediction.plan.job.tokens_per_step
    seconds = steps * prediction.step_time
    return seconds / SECONDS_OF_A_DAY, seconds * prediction.plan.num_chips / SECONDS_OF_AN_HOUR


def prediction_object(prediction: Prediction, *, tokens: float = 0.0) -> dict[str, Any]:
    """The prediction as `--json` has it (DESIGN.md section 7); SI units."""
    content: dict[str, Any] = {
        "step_time": prediction.step_time,
        "parts": dict(prediction.parts),
        "tokens_per_second_per_chip": prediction.tokens_per_second_per_chip,
        "tokens_per_second": prediction.tokens_per_second,
        "mfu_palm": prediction.mfu_palm,
        "mfu_causal": prediction.mfu_causal,
        "hfu": prediction.hfu,
        "peak_flop_rate": prediction.peak_flop_rate,
        "peak_dtype": prediction.peak_dtype,
        "memory": dict(prediction.memory),
        "memory_moment": prediction.memory_moment,
        "memory_capacity": prediction.memory_capacity,
        "memory_usable": prediction.memory_usable,
        "memory_spare": prediction.memory_spare,
        "fits": prediction.fits,
        "verdict": str(prediction.verdict),
    }
    if tokens:
        content["tokens"] = tokens
        content["days"], content["chip_hours"] = training_time(prediction, tokens)
    plan = prediction.plan
    reason = not_executable_reason(plan)
    return content | {
        "executable": not reason,
        "not_executable_reason": reason,
        "num_microbatches": plan.num_microbatches,
        "warnings": list(prediction.warnings),
        "plan": plan_to_dict(plan) | {"calibration": prediction.calibration or plan.calibration},
        "plan_hash": plan.hash(),
        "rests_on": dict(prediction.rests_on),
    }


def confidence_object(prediction: Prediction, interval: StepInterval, named: Sequence[Sensitivity]) -> dict[str, Any]:
    """What `--interval` adds to `--json`: the interval [s] and the parameters that the step hangs on most."""
    return {
        "step_time_low": prediction.step_time * interval.low,
        "step_time_high": prediction.step_time * interval.high,
        "interval": {"coverage": COVERAGE, "rests_on": interval.rests_on, "num_runs": interval.num_runs},
        "sensitivities": [
            {"parameter": each.parameter, "parameter_change": STEP, "step_time_change": each.change, "rests_on": each.rests_on}
            for each in named
        ],
    }


def confidence_lines(prediction: Prediction, interval: StepInterval) -> list[tuple[str, str]]:
    low, high = (step_text(prediction.step_time * factor) for factor in (interval.low, interval.high))
    return [(f"{COVERAGE:.0%} interval", f"{low} to {high}"), ("", f"from {interval.rests_on}")]


def sensitivity_table(named: Sequence[Sensitivity]) -> Table:
    return Table(
        title=f"What the step hangs on most: each {STEP:.0%} larger",
        headers=("parameter", "step time", "rests on"),
        rows=tuple((each.parameter, f"{each.change:+.1%}", each.rests_on) for each in named),
        right=("step time",),
    )


def workload_line(plan: Plan) -> str:
    job = plan.job
    parameters = format_count(job.model.num_parameters)
    return (
        f"{job.model.name} ({parameters} parameters), {job.global_batch:,} sequences of {job.seq_len:,} tokens a step, "
        f"{job.precision}, {job.optimizer}"
    )


def job_line(plan: Plan) -> str:
    chips = "1 chip" if plan.num_chips == 1 else f"{plan.num_chips:,} chips"
    return f"{workload_line(plan)}, on {chips} of {plan.cluster}"


def degrees_line(plan: Plan) -> str:
    """The degrees that are not 1, outermost first."""
    layout = plan.layout
    axes = [f"{axis} {layout.degree(axis)}" for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp") if layout.degree(axis) > 1]
    return ", ".join(axes) or "one chip"


def schedule_text(plan: Plan) -> str:
    if plan.layout.pp == 1:
        return "no pipeline"
    return f"{plan.schedule}, {plan.virtual_stages} chunks a rank" if plan.virtual_stages > 1 else str(plan.schedule)


def plan_line(plan: Plan) -> str:
    parts = [
        degrees_line(plan),
        f"ZeRO {int(plan.zero)}" if int(plan.zero) else "",
        "sequence parallel" if plan.sequence_parallel else "",
        f"micro-batch {plan.micro_batch} ({plan.num_microbatches} a step)",
        schedule_text(plan) if plan.layout.pp > 1 else "",
        f"recompute {plan.recompute}",
        f"{plan.attention} attention",
    ]
    return "; ".join(part for part in parts if part)


def memory_line(prediction: Prediction) -> str:
    return room_text(prediction.memory["total"], prediction.memory_usable, prediction.verdict)


def room_text(total: float, usable: float, verdict: Verdict) -> str:
    """`61.7 GiB of 79.1 GiB usable (78.0 %): fits, 17.4 GiB to spare`."""
    spare = usable - total
    left = f"{format_bytes(spare)} to spare" if spare >= 0 else f"{format_bytes(-spare)} too much"
    said = {Verdict.FITS: "fits", Verdict.TIGHT: "TIGHT", Verdict.DOES_NOT_FIT: "DOES NOT FIT"}[verdict]
    return f"{format_bytes(total)} of {format_bytes(usable)} usable ({percent(total / usable)}): {said}, {left}"


def fits_cell(verdict: Verdict) -> str:
    """The verdict in a column `fits`."""
    return {Verdict.FITS: "yes", Verdict.TIGHT: "tight", Verdict.DOES_NOT_FIT: "NO"}[verdict]


def headline(prediction: Prediction, *, tokens: float = 0.0) -> list[tuple[str, str]]:
    """The few lines that answer most questions: (name, value)."""
    plan = prediction.plan
    lines = [
        ("plan", plan_line(plan)),
        ("assumes", f"{plan.profile} as the framework, axes on the network {'-'.join(plan.order)} (innermost first)"),
        ("step time", f"{step_text(prediction.step_time)} for {format_count(plan.job.tokens_per_step)} tokens"),
        (
            "throughput",
            f"{prediction.tokens_per_second_per_chip:,.0f} tokens/s a chip, {format_count(prediction.tokens_per_second)} tokens/s in all",
        ),
        (
            "utilisation",
            f"MFU {percent(prediction.mfu_palm)} (PaLM: attention on the full square), {percent(prediction.mfu_causal)} (causal attention "
            f"counted once); HFU {percent(prediction.hfu)} (with what is computed again)",
        ),
        ("", f"of {format_flop_rate(prediction.peak_flop_rate)} a chip, dense {prediction.peak_dtype}"),
        ("memory", memory_line(prediction)),
    ]
    if tokens:
        days, chip_hours = training_time(prediction, tokens)
        lines.append(("training", f"{format_count(tokens)} tokens take {days:,.1f} days, {format_count(chip_hours)} chip-hours"))
    lines += [("rests on" if i == 0 else "", line) for i, line in enumerate(rests_on_lines(prediction))]
    return lines + [("note", warning) for warning in prediction.warnings]


def rests_on_lines(prediction: Prediction) -> list[str]:
    """What most of the numbers rest on, then `part: source` for the others; parts that take no time are left out."""
    by_source: dict[str, list[str]] = {}
    for part, source in prediction.rests_on.items():
        if prediction.parts.get(part, 1.0):
            by_source.setdefault(source, []).append(words(part))
    (main, _), *others = sorted(by_source.items(), key=lambda item: -len(item[1]))
    return [main, *(f"{', '.join(parts)}: {source}" for source, parts in others)]


def parts_table(prediction: Prediction) -> Table:
    step = prediction.step_time
    shown = sorted(((name, time) for name, time in prediction.parts.items() if time), key=lambda item: -item[1])
    rows = [(words(name), format_time(time), percent(time / step), bar(time / step)) for name, time in shown]
    return Table(
        title="Where the step goes (exposed time on the slowest rank)",
        headers=("part", "time", "share", ""),
        rows=(*rows, ("step", format_time(step), "100 %", "")),
        right=("time", "share"),
    )


def memory_table(prediction: Prediction) -> Table:
    capacity = prediction.memory_usable
    classes = sorted(((name, size) for name, size in prediction.memory.items() if size and name != "total"), key=lambda item: -item[1])
    total = prediction.memory["total"]
    rows = [(words(name), format_bytes(size), percent(size / capacity), bar(size / capacity)) for name, size in classes]
    over = "" if total <= capacity else f" over by {format_bytes(total - capacity)}"
    return Table(
        title=f"Memory of the fullest chip, of {format_bytes(capacity)} usable, at its peak ({prediction.memory_moment})",
        headers=("class", "size", "share", ""),
        rows=(*rows, ("total", format_bytes(total), percent(total / capacity), bar(total / capacity) + over)),
        right=("size", "share"),
    )


def settings_table(predictions: Sequence[Prediction], *, tokens: float = 0.0, intervals: Sequence[StepInterval] = ()) -> Table:
    """One line for each cluster and number of chips. intervals: none, or one for each prediction."""
    days = ("days", "chip-hours") if tokens else ()
    held = (f"{COVERAGE:.0%} interval",) if intervals else ()
    rows = []
    for place, each in enumerate(predictions):
        bounds = tuple(
            f"{step_text(each.step_time * found.low)} to {step_text(each.step_time * found.high)}" for found in intervals[place : place + 1]
        )
        cost: tuple[str, ...] = ()
        if tokens:
            taken, hours = training_time(each, tokens)
            cost = (f"{taken:,.1f}", format_count(hours))
        rows.append(
            (
                each.plan.cluster,
                f"{each.plan.num_chips:,}",
                step_text(each.step_time),
                *bounds,
                f"{each.tokens_per_second_per_chip:,.0f}",
                percent(each.mfu_palm),
                format_bytes(each.memory["total"]),
                fits_cell(each.verdict),
                *cost,
                degrees_line(each.plan),
                rests_on_lines(each)[0],
            )
        )
    return Table(
        title="",
        headers=("cluster", "chips", "step time", *held, "tokens/s/chip", "MFU", "memory", "fits", *days, "plan", "rests on"),
        rows=tuple(rows),
        right=("chips", "step time", *held, "tokens/s/chip", "MFU", "memory", *days),
    )


PLAN_HEADERS = ("tp", "sp", "cp", "pp", "schedule", "dp", "zero", "micro", "recompute")
PLAN_LEGEND = {
    "sp": "sequence parallel",
    "schedule": "x chunks a rank",
    "dp": "dp_replicate x dp_shard",
    "zero": "ZeRO stage",
    "micro": "micro-batch",
    "axis order": f"on the network, innermost first, where it is not {'-'.join(DEFAULT_ORDER)}",
}


def plan_cells(plan: Plan) -> tuple[str, ...]:
    layout = plan.layout
    interleaved = f"{plan.schedule} x{plan.virtual_stages}" if plan.virtual_stages > 1 else str(plan.schedule)
    return (
        str(layout.tp),
        "yes" if plan.sequence_parallel else "-",
        str(layout.cp),
        str(layout.pp),
        interleaved if layout.pp > 1 else "-",
        f"{layout.dp_replicate} x {layout.dp_shard}",
        str(int(plan.zero)),
        str(plan.micro_batch),
        str(plan.recompute),
    )


def comparison_tables(names: Sequence[str], predictions: Sequence[Prediction]) -> list[Table]:
    """Plans side by side: results, where the time goes, the memory, and the knobs in which they differ."""
    best = min(each.step_time for each in predictions)
    columns = tuple(names)

    def row(name: str, values: Sequence[str]) -> tuple[str, ...]:
        return (name, *values)

    results = [
        row("step time", [step_text(each.step_time) for each in predictions]),
        row("against the fastest", ["-" if each.step_time == best else f"+{percent(each.step_time / best - 1)}" for each in predictions]),
        row("tokens/s/chip", [f"{each.tokens_per_second_per_chip:,.0f}" for each in predictions]),
        row("MFU (PaLM)", [percent(each.mfu_palm) for each in predictions]),
        row("fits", [fits_cell(each.verdict) for each in predictions]),
        row("memory to spare", [_signed_bytes(each.memory_spare) for each in predictions]),
    ]
    parts = [
        row(words(part), [format_time(each.parts[part]) if each.parts[part] else "-" for each in predictions])
        for part in predictions[0].parts
        if any(each.parts[part] for each in predictions)
    ]
    memory = [
        row(words(name), [format_bytes(each.memory[name]) if each.memory[name] else "-" for each in predictions])
        for name in predictions[0].memory
        if any(each.memory[name] for each in predictions)
    ]
    knobs = [_flat(each) for each in predictions]
    differing = [row(words(knob), [values[knob] for values in knobs]) for knob in knobs[0] if len({values[knob] for values in knobs}) > 1]
    tables = [
        Table(title="Results", headers=("", *columns), rows=tuple(results), right=columns),
        Table(title="Where the step goes", headers=("part", *columns), rows=tuple(parts), right=columns),
        Table(title="Memory of the fullest chip", headers=("class", *columns), rows=tuple(memory), right=columns),
    ]
    if differing:
        tables.append(Table(title="In what they differ", headers=("knob", *columns), rows=tuple(differing), right=columns))
    return tables


def _signed_bytes(size: float) -> str:
    return format_bytes(size) if size >= 0 else f"-{format_bytes(-size)}"


def _flat(prediction: Prediction) -> dict[str, str]:
    plan = prediction.plan
    layout, job = plan.layout, plan.job
    return {
        "model": job.model.name,
        "cluster": plan.cluster,
        "chips": str(plan.num_chips),
        "global_batch": str(job.global_batch),
        "seq_len": str(job.seq_len),
        "precision": str(job.precision),
        "optimizer": str(job.optimizer),
        **{axis: str(layout.degree(axis)) for axis in ("tp", "cp", "pp", "dp_replicate", "dp_shard")},
        "sequence_parallel": "yes" if plan.sequence_parallel else "no",
        "zero": str(int(plan.zero)),
        "micro_batch": str(plan.micro_batch),
        "schedule": schedule_text(plan),
        "recompute": str(plan.recompute),
        "attention": str(plan.attention),
        "order": "-".join(plan.order),
        "profile": plan.profile,
        "calibration": prediction.calibration or plan.calibration,
    }
