"""Predictions as text and tables: verdict, job, plan, parts of time and memory, and basis of the numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from perfmodel.foundation.grouping import grouped
from perfmodel.foundation.memory_headroom import Verdict
from perfmodel.foundation.plain import picked
from perfmodel.foundation.text import flop_rate_text, percent
from perfmodel.foundation.units import format_bytes, format_count, format_flop_rate, format_step
from perfmodel.frameworks.profile import GENERIC
from perfmodel.hardware.cluster_text import chips_text, short_name
from perfmodel.parallel.algebra.rules import MEGATRON, rule_labels
from perfmodel.parallel.choices import recompute_words
from perfmodel.parallel.executable import not_executable_reason
from perfmodel.parallel.interval import COVERAGE, StepInterval
from perfmodel.parallel.plan import Plan, expert_words, plan_facts, plan_to_dict
from perfmodel.parallel.prediction import (
    PROBABILITY,
    Prediction,
    batch_text,
    layers_row,
    logits_note,
    probability_cell,
    routed_text,
    trained_text,
)
from perfmodel.parallel.rows import without_total
from perfmodel.parallel.training_run import training_cost, training_time
from perfmodel.report.table import Table, bar, bytes_like, shares_table, table_of, table_of_rows, times_like, words
from perfmodel.uncertainty.sensitivity import STEP, Sensitivity
from perfmodel.workload.config import TransformerConfig
from perfmodel.workload.network_model import NetworkModel
from perfmodel.workload.routing import BALANCED, Routing
from perfmodel.workload.training import FULL_TRAINING, num_trained_parameters

#: Default convention of TFLOP/s and MFU (Chowdhery et al., arXiv 2204.02311, appendix B).
FLOP_CONVENTION = "PaLM: 6 N + 12 L H Q S a token, attention on the full square, nothing counted twice"
_FROZEN = ", 4 for each frozen parameter"


def prediction_object(prediction: Prediction, *, tokens: float = 0.0) -> dict[str, Any]:
    """Return the prediction as the `--json` object, in SI units."""
    conditions = prediction.conditions
    content: dict[str, Any] = {
        "step_time": prediction.step_time,
        "parts": dict(prediction.parts),
        **picked(prediction, "tokens_per_second_per_chip tokens_per_second tflops_per_chip"),
        "flop_convention": FLOP_CONVENTION + ("" if prediction.plan.job.train.is_full else _FROZEN),
        **picked(prediction, "mfu_palm mfu_causal hfu peak_flop_rate"),
        "peak_dtype": conditions.peak_dtype,
        "memory": dict(prediction.memory),
        **picked(prediction, "memory_moment memory_capacity memory_usable"),
        "host_memory": conditions.host_memory,
        "memory_spare": prediction.memory_spare,
        "memory_interval": [prediction.memory_low, prediction.memory_high],
        **picked(prediction, "fits fits_probability"),
        "verdict": str(prediction.verdict),
    }
    if tokens:
        content["tokens"] = tokens
        content["days"], content["chip_hours"] = training_time(prediction, tokens)
        content["cost"] = training_cost(prediction, tokens) or None
    plan = prediction.plan
    model, train = plan.job.model, plan.job.train
    if isinstance(model, TransformerConfig):
        trained = num_trained_parameters(model, train)
        content["num_parameters"] = model.num_parameters + (0 if train.is_full else trained)
        content["num_trained_parameters"] = trained
    reason = not_executable_reason(plan)
    return content | {
        "executable": not reason,
        "not_executable_reason": reason,
        "runnable": not prediction.not_runnable,
        "not_runnable_reason": prediction.not_runnable,
        "num_microbatches": plan.num_microbatches,
        "warnings": list(prediction.warnings),
        "plan": plan_to_dict(plan) | {"calibration": conditions.calibration or plan.calibration},
        "plan_hash": plan.hash(),
        "rests_on": dict(prediction.rests_on),
    }


def confidence_object(prediction: Prediction, interval: StepInterval, named: Sequence[Sensitivity]) -> dict[str, Any]:
    """Return the fields that `--interval` adds to `--json`: interval [s], trust and most sensitive parameters."""
    return {
        "trust": grade_object(interval.trust),
        "step_time_low": prediction.step_time * interval.low,
        "step_time_high": prediction.step_time * interval.high,
        "interval": {"coverage": COVERAGE, "rests_on": interval.rests_on, "num_runs": interval.num_runs, "trust": interval.trust},
        "sensitivities": [
            {
                "parameter": sensitivity.parameter,
                "parameter_change": STEP,
                "step_time_change": sensitivity.change,
                "rests_on": sensitivity.rests_on,
            }
            for sensitivity in named
        ],
    }


def grade_object(trust: str) -> dict[str, str]:
    grade, _, reason = trust.partition("; ")
    return {"grade": grade, "reason": reason}


def confidence_lines(prediction: Prediction, interval: StepInterval) -> list[tuple[str, str]]:
    low, high = (format_step(prediction.step_time * factor) for factor in (interval.low, interval.high))
    return [(f"{COVERAGE:.0%} interval", f"{low} to {high}, from {interval.rests_on}"), ("trust", interval.trust)]


def sensitivity_table(named: Sequence[Sensitivity]) -> Table:
    rows = ((sensitivity.parameter, f"{sensitivity.change:+.1%}", sensitivity.rests_on) for sensitivity in named)
    title = f"Most sensitive parameters: step time with each {STEP:.0%} larger"
    return table_of(title, "parameter | >step time | based on", rows)


def workload_line(plan: Plan) -> str:
    job, model = plan.job, plan.job.model
    without = f", without {model.origin.left_out}" if isinstance(model, TransformerConfig) and model.origin.left_out else ""
    return f"{model_text(model, without)}, {batch_text(job)} a step, {job.precision}, {job.optimizer}{trained_text(job)}{routed_text(job)}"


def model_text(model: TransformerConfig | NetworkModel, without: str = "") -> str:
    """Return the name of a model, with its size if it has a configuration."""
    if isinstance(model, TransformerConfig):
        active = f", {format_count(model.num_active_parameters)} active" if model.parts.experts else ""
        return f"{model.name} ({format_count(model.num_parameters)} parameters{active}{without})"
    return model.name


def job_line(plan: Plan) -> str:
    return f"{workload_line(plan)}, on {chips_text(plan.num_chips)} of {short_name(plan.cluster)}"


def degrees_line(plan: Plan) -> str:
    """Return the parallel degrees above 1, outermost first, and the rules unless they are the default."""
    layout = plan.layout
    if plan.assignment is not None:
        return f"every operator by itself, on {plan.assignment.described()}"
    axes = [f"{axis} {layout.degree(axis)}" for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp") if layout.degree(axis) > 1]
    text = ", ".join([*axes, *expert_words(plan)]) or "one chip"
    return f"{text}, rules {rule_labels(plan.rules)}" if rule_labels(plan.rules) else text


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
        f"recompute {recompute_words(plan.recompute, plan.recompute_operators)}",
        f"{plan.attention} attention",
    ]
    return "; ".join(part for part in parts if part)


def memory_line(prediction: Prediction) -> str:
    return memory_text(prediction.memory["total"], prediction.memory_usable, prediction.verdict)


def memory_text(total: float, usable: float, verdict: Verdict) -> str:
    """Return text such as `61.7 GiB of 79.1 GiB usable (78.0 %): fits, 17.4 GiB to spare`."""
    spare = usable - total
    left = f"{format_bytes(spare)} to spare" if spare >= 0 else f"{format_bytes(-spare)} too much"
    return f"{format_bytes(total)} of {format_bytes(usable)} usable ({percent(total / usable)}): {_VERDICTS[verdict]}, {left}"


_VERDICTS = {Verdict.FITS: "fits", Verdict.TIGHT: "TIGHT", Verdict.DOES_NOT_FIT: "DOES NOT FIT"}


def probability_text(probability: float) -> str:
    """Return `97 %`, `over 99 %` or `under 1 %`: no fit is certain."""
    return "over 99 %" if probability > 0.99 else "under 1 %" if probability < 0.01 else f"{100 * probability:.0f} %"


def fits_text(probability: float) -> str:
    """Return text such as `probability of fitting 97 %`."""
    return f"probability of fitting {probability_text(probability)}"


def headroom_words(headroom: float, risk: float | None) -> str:
    """Return the text of the memory headroom and the out-of-memory risk that a fitting plan observes."""
    at_risk = f"at a risk of {percent(risk)} of running out of memory" if risk is not None else ""
    free = f"less {percent(headroom)} kept free" if headroom or not at_risk else ""
    return " and ".join(text for text in (free, at_risk) if text)


def fits_cell(verdict: Verdict) -> str:
    """Return the cell of the verdict in a column `fits`."""
    return {Verdict.FITS: "yes", Verdict.TIGHT: "tight", Verdict.DOES_NOT_FIT: "NO"}[verdict]


def verdict_line(prediction: Prediction) -> str:
    """Return text such as `fits (over 99 %): 47.1 GiB of 79.1 GiB; 7.54 s a step, 8,695 tokens/s a chip, MFU 50.9 %`."""
    share = probability_text(prediction.fits_probability)
    memory = f"{format_bytes(prediction.memory['total'])} of {format_bytes(prediction.memory_usable)}"
    speed = f"{prediction.tokens_per_second_per_chip:,.0f} {prediction.plan.job.unit}/s a chip, MFU {percent(prediction.mfu_palm)}"
    return f"{_VERDICTS[prediction.verdict]} ({share}): {memory}; {format_step(prediction.step_time)} a step, {speed}"


def short_verdict(prediction: Prediction) -> str:
    """Return text such as `fits: 264 MiB of 10.9 GiB; 23.3 ms a step`."""
    memory = f"{format_bytes(prediction.memory['total'])} of {format_bytes(prediction.memory_usable)}"
    return f"{_VERDICTS[prediction.verdict]}: {memory}; {format_step(prediction.step_time)} a step"


def comparison_verdict(names: Sequence[str], predictions: Sequence[Prediction]) -> str:
    """Return the fitting plan with the highest throughput per chip, and its lead over the second."""
    rates = {name: prediction.tokens_per_second_per_chip for name, prediction in zip(names, predictions, strict=True) if prediction.fits}
    if not rates:
        return "None of the plans fits"
    first, *others = sorted(rates, key=lambda name: -rates[name])
    unit = f"{predictions[0].plan.job.unit}/s a chip"
    verdict = f"{first} is the fastest{'' if len(rates) == len(names) else ' that fits'}: {rates[first]:,.0f} {unit}"
    if others:
        verdict += f", {percent(rates[first] / rates[others[0]] - 1.0)} more than {others[0]}"
    return verdict if is_one_job(predictions) else f"{verdict}; the plans run different jobs"


#: Text for a plan that no framework runs.
_RUNS_NOWHERE = "no framework that plans are exported to; --profile NAME finds plans that NAME runs"


def headline(prediction: Prediction, *, verbose: bool = False, runs_in: Sequence[str] | None = None) -> list[tuple[str, str]]:
    """Return the key figures of a prediction as (name, value).

    verbose   add the axis order, other utilisation conventions and the basis of every part
    runs_in   frameworks that run the plan; None: one was given
    """
    plan = prediction.plan
    framework = short_name(plan.profile)
    if plan.framework.name == GENERIC:
        framework += " (not given: the mean of the known ones; --profile NAME, or --setting such as compile, narrows it)"
    memory_low, memory_high = format_bytes(prediction.memory_low), format_bytes(prediction.memory_high)
    lines = [
        ("job", job_line(plan)),
        *layers_row(plan.job),
        ("plan", plan_line(plan)),
        *([("axes", f"on the network, innermost first: {'-'.join(plan.order)}")] if verbose and plan.assignment is None else []),
        ("framework", framework),
        *([("runs in", ", ".join(runs_in) or _RUNS_NOWHERE)] if runs_in is not None else []),
        ("step time", f"{format_step(prediction.step_time)} for {format_count(plan.job.tokens_per_step)} {plan.job.unit}"),
        (
            "throughput",
            f"{prediction.tokens_per_second_per_chip:,.0f} {plan.job.unit}/s a chip, "
            f"{format_count(prediction.tokens_per_second)} {plan.job.unit}/s in all",
        ),
        *_utilisation(prediction, verbose=verbose),
        ("memory", memory_line(prediction)),
        ("", f"{fits_text(prediction.fits_probability)}; 80 % interval {memory_low} to {memory_high}"),
    ]
    basis = basis_lines(prediction)
    return lines + [("based on" if i == 0 else "", line) for i, line in enumerate(basis if verbose else basis[:1])]


def _utilisation(prediction: Prediction, *, verbose: bool) -> list[tuple[str, str]]:
    rate, mfu = f"{flop_rate_text(prediction.tflops_per_chip)} TFLOP/s a chip", f"MFU {percent(prediction.mfu_palm)}"
    short = f"{rate}, {mfu} of {format_flop_rate(prediction.peak_flop_rate)} dense {prediction.conditions.peak_dtype}"
    if not verbose:
        return [("utilisation", short)]
    executed = ("", f"HFU {percent(prediction.hfu)} (FLOPs executed, recomputation included, causal attention)")
    if isinstance(prediction.plan.job.model, NetworkModel):
        return [("utilisation", f"{short} (model FLOPs: three times those of a forward pass)"), executed]
    frozen = "" if prediction.plan.job.train.is_full else ", 4 of 6 parts for a frozen weight"
    return [
        ("utilisation", f"{short} (model FLOPs as PaLM counts them: attention on the full square{frozen})"),
        ("", f"MFU {percent(prediction.mfu_causal)} (model FLOPs, attention below the diagonal only)"),
        executed,
    ]


def basis_lines(prediction: Prediction) -> list[str]:
    """Return the basis of most of the step time, then `part: source` for the other parts that take time."""
    times = prediction.parts
    by_source = grouped((part for part in prediction.rests_on if times.get(part, 1.0)), prediction.rests_on.__getitem__)
    # Host time comes from the profile, whatever the basis of the kernels.
    (main, _), *others = sorted(by_source.items(), key=lambda item: (item[0] == "profile", -sum(times.get(part, 0.0) for part in item[1])))
    return [main, *(f"{', '.join(map(words, parts))}: {source}" for source, parts in others)]


def parts_table(prediction: Prediction) -> Table:
    step = prediction.step_time
    text = times_like(step)
    title, last = "Where the step goes (exposed time on the slowest rank)", ("step", text(step), "100 %", "")
    return shares_table(title, ("part", "time"), prediction.parts, step, text, last)


def memory_table(prediction: Prediction) -> Table:
    capacity, total = prediction.memory_usable, prediction.memory["total"]
    text = bytes_like(capacity)
    title = f"Memory of the fullest chip, of {format_bytes(capacity)} usable, at its peak ({prediction.memory_moment})"
    over = "" if total <= capacity else f" over by {text(total - capacity)}"
    last = ("total", text(total), percent(total / capacity), bar(total / capacity) + over)
    return shares_table(title, ("class", "size"), without_total(prediction.memory), capacity, text, last)


def settings_table(
    predictions: Sequence[Prediction],
    *,
    tokens: float = 0.0,
    intervals: Sequence[StepInterval] = (),
    varied: Sequence[str] = (),
    of_run: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> Table:
    """Return one row per prediction; cluster, chips, model, batch and other job columns appear only if they differ.

    intervals   empty, or one per prediction
    varied      knobs with several given values; those not visible in the degrees get a column
    of_run      columns of the whole training run: header -> one cell per prediction
    """
    varying = _varying(predictions)
    knobs = [name for name in _KNOB_COLUMNS if name in varied]
    step, size = times_like(min(prediction.step_time for prediction in predictions)), bytes_like(predictions[0].memory_usable)
    bounds = f"{COVERAGE:.0%} interval"
    rows: list[dict[str, str]] = []
    for index, prediction in enumerate(predictions):
        row = {name: _COLUMNS[name](prediction) for name in varying} | {words(name): _KNOB_COLUMNS[name](prediction.plan) for name in knobs}
        row |= {header: cells[index] for header, cells in of_run.items()}
        row["step time"] = step(prediction.step_time)
        for interval in intervals[index : index + 1]:
            row[bounds] = f"{step(prediction.step_time * interval.low)} to {step(prediction.step_time * interval.high)}"
        row |= {
            "tokens/s/chip": f"{prediction.tokens_per_second_per_chip:,.0f}",
            "TFLOP/s/chip": flop_rate_text(prediction.tflops_per_chip),
            "MFU": percent(prediction.mfu_palm),
            "memory": size(prediction.memory["total"]),
            "fits": fits_cell(prediction.verdict),
            PROBABILITY: probability_cell(prediction.fits_probability),
        }
        if tokens:
            days, hours = training_time(prediction, tokens)
            price = training_cost(prediction, tokens)
            row |= {"days": f"{days:,.1f}", "chip-hours": format_count(hours), "USD": f"{price:,.0f}" if price else "-"}
        rows.append(row | {"plan": degrees_line(prediction.plan), "based on": basis_lines(prediction)[0]})
    return table_of_rows(
        "",
        rows,
        fold=("plan", "based on"),
        optional=("TFLOP/s/chip", "fits", "based on", "MFU", "chip-hours", "tokens/s/chip"),
        right=("chips", "batch", "seq", *of_run, "step time", bounds, "tokens/s/chip", "TFLOP/s/chip", "MFU", "memory", PROBABILITY,
               "days", "chip-hours", "USD"),
    )  # fmt: skip


_KNOB_COLUMNS: Mapping[str, Callable[[Plan], str]] = {
    "zero": lambda plan: f"{int(plan.zero)}",
    "micro_batch": lambda plan: f"{plan.micro_batch:,}",
    "recompute": lambda plan: recompute_words(plan.recompute, plan.recompute_operators),
    "schedule": lambda plan: str(plan.schedule),
    "virtual_stages": lambda plan: f"{plan.virtual_stages}",
}

_COLUMNS: Mapping[str, Callable[[Prediction], str]] = {
    "cluster": lambda prediction: short_name(prediction.plan.cluster),
    "chips": lambda prediction: f"{prediction.plan.num_chips:,}",
    "model": lambda prediction: prediction.plan.job.model.name,
    "batch": lambda prediction: f"{prediction.plan.job.global_batch:,}",
    "seq": lambda prediction: f"{prediction.plan.job.seq_len:,}",
    "precision": lambda prediction: str(prediction.plan.job.precision),
    "optimizer": lambda prediction: str(prediction.plan.job.optimizer),
    "train": lambda prediction: str(prediction.plan.job.train),
    "routing": lambda prediction: _routing_cell(prediction.plan.job.routing),
    "framework": lambda prediction: short_name(prediction.plan.profile),
}


def _routing_cell(routing: Routing) -> str:
    spread = str(routing) if routing.counts is None else f"counts, skew {routing.skew:.4g}"
    return f"{spread}, capacity {routing.capacity_factor:g}" if routing.capacity_factor else spread


def _varying(predictions: Sequence[Prediction]) -> list[str]:
    return [name for name, value in _COLUMNS.items() if len({value(prediction) for prediction in predictions}) > 1]


def settings_title(predictions: Sequence[Prediction]) -> str:
    """Return the values that all rows of a table share, and the assumed framework."""
    plan, job, varying = predictions[0].plan, predictions[0].plan.job, _varying(predictions)
    chips, cluster = f"{plan.num_chips:,} chip{'s' * (plan.num_chips > 1)}", short_name(plan.cluster)
    shared = {
        "model": model_text(job.model),
        "batch": f"{job.global_batch:,} sequence{'s' * (job.global_batch > 1)} a step",
        "seq": f"{job.seq_len:,} tokens a sequence",
        "precision": str(job.precision),
        "optimizer": str(job.optimizer),
        **({} if job.train == FULL_TRAINING else {"train": str(job.train) if "model" in varying else trained_text(job).removeprefix(", ")}),
        **({} if job.routing == BALANCED else {"routing": routed_text(job).removeprefix(", ")}),
        "framework": f"{short_name(plan.profile)} as the framework",
        **({"chips": chips, "cluster": cluster} if {"cluster", "chips"} & {*varying} else {"chips": f"{chips} of {cluster}"}),
    }
    return ", ".join(text for name, text in shared.items() if name not in varying)


def convention_lines(predictions: Sequence[Prediction]) -> list[str]:
    """Return the notes of a table: FLOP convention, plans that the framework cannot run, and warnings."""
    dtypes = " or ".join(dict.fromkeys(prediction.conditions.peak_dtype for prediction in predictions))
    counted = f"TFLOP/s and MFU count model FLOPs as PaLM does (attention on the full square); MFU is of each chip's dense {dtypes} peak"
    unable: dict[str, dict[str, None]] = {}
    for prediction in predictions:
        if prediction.not_runnable:
            unable.setdefault(prediction.not_runnable, {})[short_plan_text(prediction.plan)] = None
    marked = [f"not a plan for this framework: {reason} ({'; '.join(plans)})" for reason, plans in unable.items()]
    several = len({prediction.plan.job.model.name for prediction in predictions}) > 1
    logits = [
        f"{prediction.plan.job.model.name}: {text}" if several else text for prediction in predictions for text in logits_note(prediction)
    ]
    return [*marked, *dict.fromkeys([*logits, *(text for prediction in predictions for text in prediction.warnings)]), counted]


PLAN_LEGEND = {
    "sp": "sequence parallel",
    "schedule": "with chunks per rank",
    "cp form": "of context parallelism (--cp-form)",
    "dp": "dp_replicate x dp_shard",
    "micro": "micro-batch",
    "MFU": "of model FLOPs as PaLM counts them",
}


def short_plan_text(plan: Plan) -> str:
    """Return the degrees and the non-default knobs of a plan, for a table column."""
    parts = [
        degrees_line(plan),
        f"ZeRO {int(plan.zero)}" if int(plan.zero) else "",
        schedule_text(plan) if plan.layout.pp > 1 else "",
        f"micro-batch {plan.micro_batch}" if plan.micro_batch > 1 else "",
        f"recompute {recompute_words(plan.recompute, plan.recompute_operators)}",
    ]
    return ", ".join(part for part in parts if part)


def plan_cells(plan: Plan) -> dict[str, str]:
    """Return the knobs of a plan as cells by header."""
    layout = plan.layout
    interleaved = f"{plan.schedule} x{plan.virtual_stages}" if plan.virtual_stages > 1 else str(plan.schedule)
    return {
        "tp": str(layout.tp),
        "sp": "yes" if plan.sequence_parallel else "-",
        "cp": str(layout.cp),
        "pp": str(layout.pp),
        "schedule": interleaved if layout.pp > 1 else "-",
        "dp": ", ".join([f"{layout.dp_replicate}x{layout.dp_shard}", *expert_words(plan)]),
        "zero": str(int(plan.zero)),
        "micro": str(plan.micro_batch),
        "recompute": recompute_words(plan.recompute, plan.recompute_operators),
    }


def short_names(plans: Sequence[str]) -> list[str]:
    """Return file names without folder and extension, numbered if they are not unique."""
    names = [Path(plan).name.removesuffix(".yaml").removesuffix(".yml") for plan in plans]
    if len(set(names)) == len(names):
        return names
    return [f"{number}: {name}" for number, name in enumerate(names, 1)]


def comparison_tables(names: Sequence[str], predictions: Sequence[Prediction]) -> list[Table]:
    """Return tables of plans side by side: results, step-time parts, memory, and knobs that differ."""
    best, most = (
        min(prediction.step_time for prediction in predictions),
        max(prediction.tokens_per_second_per_chip for prediction in predictions),
    )
    step, size = times_like(best), bytes_like(predictions[0].memory_usable)

    def table(title: str, header: str, rows: Mapping[str, Sequence[str]]) -> Table:
        cells = tuple((words(name), *row) for name, row in rows.items())
        return Table(title=title, headers=(header, *names), rows=cells, right=tuple(names))

    results = {"step time": [step(prediction.step_time) for prediction in predictions]}
    rates = {f"{predictions[0].plan.job.unit}/s/chip": [f"{prediction.tokens_per_second_per_chip:,.0f}" for prediction in predictions]}
    if is_one_job(predictions):
        results |= {"against the fastest": [_apart(prediction.step_time / best) for prediction in predictions]} | rates
    else:
        results |= rates | {"against the most": [_apart(prediction.tokens_per_second_per_chip / most) for prediction in predictions]}
    results |= {
        "TFLOP/s/chip": [flop_rate_text(prediction.tflops_per_chip) for prediction in predictions],
        "MFU (PaLM)": [percent(prediction.mfu_palm) for prediction in predictions],
        "fits": [fits_cell(prediction.verdict) for prediction in predictions],
        "probability that it fits": [probability_cell(prediction.fits_probability) for prediction in predictions],
        "memory to spare": [size(prediction.memory_spare) for prediction in predictions],
    }
    parts = {
        part: [step(prediction.parts[part]) if prediction.parts.get(part) else "-" for prediction in predictions]
        for part in dict.fromkeys(part for prediction in predictions for part in prediction.parts)  # parts differ between plans
        if any(prediction.parts.get(part) for prediction in predictions)
    }
    memory = {
        name: [size(prediction.memory[name]) if prediction.memory[name] else "-" for prediction in predictions]
        for name in predictions[0].memory
        if any(prediction.memory[name] for prediction in predictions)
    }
    knobs = [_knobs(prediction) for prediction in predictions]
    settings = {knob: [values.get(knob, "-") for values in knobs] for knob in dict.fromkeys(knob for values in knobs for knob in values)}
    differing = {knob: values for knob, values in settings.items() if len(set(values)) > 1}
    return [
        table("Results", "", results),
        table("Where the step goes", "part", parts),
        table("Memory of the fullest chip", "class", memory),
        *([table("Knobs that differ", "knob", differing)] if differing else []),
    ]


def is_one_job(predictions: Sequence[Prediction]) -> bool:
    """Return whether all steps do the same work on the same number of chips, so that step times are comparable."""
    jobs = (
        (prediction.plan.job.model, prediction.plan.job.global_batch, prediction.plan.job.seq_len, prediction.plan.num_chips)
        for prediction in predictions
    )
    return len(set(jobs)) == 1


def _apart(ratio: float) -> str:
    return "-" if ratio == 1.0 else f"{'+' if ratio > 1.0 else '-'}{percent(abs(ratio - 1))}"


def _knobs(prediction: Prediction) -> dict[str, str]:
    plan = prediction.plan
    facts = plan_facts(plan) | {
        "cluster": short_name(plan.cluster),
        "rules": rule_labels(plan.rules) or MEGATRON,
        "sequence_parallel": "yes" if plan.sequence_parallel else "no",
        "schedule": schedule_text(plan),
        "order": "-".join(plan.order),
        "calibration": prediction.conditions.calibration or plan.calibration,
    }
    return {name: str(value) for name, value in facts.items() if name != "virtual_stages"}  # part of the schedule text
