"""Serving predictions as lines, tables and the `--json` object."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from perfmodel.cost.serving.boundness import OperatorRow
from perfmodel.foundation.grouping import grouped
from perfmodel.foundation.plain import picked
from perfmodel.foundation.text import percent
from perfmodel.foundation.units import format_bytes, format_count, format_time
from perfmodel.frameworks.engine_launch import LaunchLine
from perfmodel.hardware.cluster_text import short_name
from perfmodel.parallel.framework_ref import flags_text
from perfmodel.parallel.rows import TIMES, throughput_object, without_total
from perfmodel.parallel.serving_plan import Pools, ServiceLayout
from perfmodel.parallel.serving_prediction import ServingPrediction, Spread, TokenCosts, service_line
from perfmodel.planner.result import RankedPlan
from perfmodel.report.table import Table, bar, bytes_like, shares_table, table_of, table_of_rows, times_like, words
from perfmodel.report.training_run import JOULES_OF_A_KILOWATT_HOUR

DOES_NOT_FIT = "does not fit: "


def verdict_line(prediction: ServingPrediction, limits: Mapping[str, float]) -> str:
    """Return text such as `fits; TTFT 792 ms, TPOT 67.7 ms, 286 output tokens/s a chip`."""
    verdict = verdict_text(prediction, limits)
    if not prediction.fits:
        return verdict
    times = ", ".join(
        f"{label} {format_time(spread.mean)}"
        for label, spread in (("TTFT", prediction.ttft), ("TPOT", prediction.tpot))
        if math.isfinite(spread.mean)
    )
    rate = f"{prediction.tokens_per_second_per_chip:,.0f} output tokens/s a chip"
    return f"{verdict}; {times}, {rate}" if times else f"{verdict}; {rate}"


def remedy_facts(prediction: ServingPrediction) -> list[tuple[str, str]]:
    """Return the smallest changes that make a non-fitting plan fit."""
    if prediction.fits:
        return []
    would = [flags_text(change) for change in prediction.remedies] or ["no single change; use chips with more memory"]
    return [("would fit" if at == 0 else "", text) for at, text in enumerate(would)]


def verdict_text(prediction: ServingPrediction, limits: Mapping[str, float]) -> str:
    """Return the verdict: memory fit, saturation, and limits met or missed."""
    if not prediction.fits:
        return "; ".join(note for note in prediction.notes if note.startswith(DOES_NOT_FIT))
    parts = ["fits"]
    if prediction.load.is_saturated and prediction.job.rate is not None:
        parts.append("cannot keep up: more requests come than are answered")
    elif not prediction.load.fits:
        parts.append("some requests wait for room")
    for name, result in limits_object(prediction, limits).items():
        mean = getattr(prediction, name).mean
        parts.append(
            f"{'meets' if result['kept_by_mean'] else 'misses'} {words(name)} {format_time(result['limit'])} ({format_time(mean)})"
        )
    return "; ".join(parts)


def headline(prediction: ServingPrediction, *, verbose: bool = False) -> list[tuple[str, str]]:
    """Return the key figures of a prediction as (name, value). A plan that does not fit has no times.

    verbose   add the basis of every part
    """
    job, plan = prediction.job, prediction.plan
    if not prediction.fits:
        total, usable = prediction.memory["total"], prediction.memory_usable
        return [
            ("plan", f"{plan.label()}, {short_name(plan.engine)}"),
            ("memory", f"{format_bytes(total)} of {format_bytes(usable)} usable on each chip"),
        ]
    user = prediction.tokens_per_second_per_user
    goodput: list[tuple[str, str]] = []
    cost: list[tuple[str, str]] = []
    if prediction.load.goodput is not None:
        kept = percent(prediction.load.kept_fraction or 0.0)
        goodput = [("goodput", f"{prediction.load.goodput:,.2f} requests/s keep the limits, {kept} of them")]
    if prediction.costs.cost_per_million is not None:
        price = f"{prediction.costs.price_per_hour:,.2f} USD an hour for a chip"
        cost = [("cost", f"{prediction.costs.cost_per_million:,.2f} USD a million output tokens, at {price}")]
    lines = [
        ("plan", f"{plan.label()}, {short_name(plan.engine)}"),
        ("TTFT", _spread(prediction.ttft, prediction, "ttft")),
        ("TPOT", f"{_spread(prediction.tpot, prediction, 'tpot')}, {user:,.1f} tokens/s for a user"),
        ("latency", _spread(prediction.request_latency, prediction, "request_latency")),
        (
            "throughput",
            f"{prediction.tokens_per_second_per_chip:,.0f} output tokens/s a chip, "
            f"{format_count(prediction.tokens_per_second_per_chip * plan.num_chips)} in all, "
            f"{prediction.requests_per_second:,.2f} requests/s",
        ),
        *goodput,
        *cost,
        *energy_facts(prediction.costs),
        ("in flight", _running(prediction)),
        ("memory", f"{format_bytes(prediction.memory['total'])} of {format_bytes(prediction.memory_usable)} usable on each chip"),
        ("KV cache", f"{job.kv_precision}; {prediction.max_sequences:,.0f} sequences of mean length fit in a replica"),
    ]
    return lines + basis_facts(prediction, verbose=verbose)


def basis_facts(prediction: ServingPrediction, *, verbose: bool = False) -> list[tuple[str, str]]:
    """Return the basis of the first part of a step, or of every part."""
    by_source = grouped(prediction.rests_on, prediction.rests_on.__getitem__)
    shown = [f"{words(', '.join(names))}: {source}" for source, names in by_source.items()] if verbose else [next(iter(by_source), "")]
    return [("based on" if at == 0 else "", text) for at, text in enumerate(shown) if text]


def service_facts(prediction: ServingPrediction, limits: Mapping[str, float], *, verbose: bool = False) -> list[tuple[str, str]]:
    """Return the job, remedies of a non-fitting plan, key figures and limits."""
    facts = [("job", service_line(prediction)), *remedy_facts(prediction), *headline(prediction, verbose=verbose)]
    return facts + (limits_facts(prediction, limits) if prediction.fits else [])


def shown_notes(prediction: ServingPrediction) -> list[str]:
    """Return the notes of a prediction without the verdict, which is printed first."""
    return [note for note in prediction.notes if not note.startswith(DOES_NOT_FIT)]


def energy_facts(costs: TokenCosts) -> list[tuple[str, str]]:
    """Return energy and carbon of a million output tokens, if known."""
    energy, carbon = costs.energy_per_million, costs.carbon_per_million
    if energy is None or carbon is None:
        return []
    energy /= JOULES_OF_A_KILOWATT_HOUR
    return [("energy", f"{energy:,.2f} kWh, {carbon:,.2f} kg CO2e a million output tokens, if chips draw the power of training")]


def short_layout(layout: ServiceLayout) -> str:
    """Return a short label for tables, such as `tp 4, ep 8 x 2`; of two pools workers x chips of each."""
    if isinstance(layout, Pools):
        prefill, decode = layout.prefill.chips_per_replica, layout.decode.chips_per_replica
        return f"prefill {layout.prefill_workers}x{prefill}, decode {layout.decode_workers}x{decode}"
    label = layout.label().replace(f", {layout.replicas} replicas", f" x {layout.replicas}").replace("attention dp", "attn dp")
    return label.removeprefix("tp 1, ")


def limits_facts(prediction: ServingPrediction, limits: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return the limits that the mean and the 99th percentile keep. Only a simulation counts the requests that keep all limits."""
    if not limits:
        return []
    results = []
    for name, result in limits_object(prediction, limits).items():
        means = "its mean keeps it" if result["kept_by_mean"] else "its mean is above"
        tail = {None: "", True: ", so does its p99", False: ", its p99 is above"}[result["kept_by_p99"] if result["kept_by_mean"] else None]
        results.append(f"{words(name)} {format_time(result['limit'])}: {means}{tail}")
    text = "; ".join(results)
    return [("limits", text if prediction.load.goodput is not None else f"{text}; --simulate counts the requests that keep all of them")]


def limits_object(prediction: ServingPrediction, limits: Mapping[str, float]) -> dict[str, dict[str, Any]]:
    """Return each limit [s], and whether the mean and the 99th percentile over requests keep it (None: unknown)."""
    results = {}
    for name, limit in limits.items():
        spread = getattr(prediction, name)
        by_p99 = None if spread.p99 is None else prediction.fits and spread.p99 <= limit
        results[name] = {"limit": limit, "kept_by_mean": prediction.fits and spread.mean <= limit, "kept_by_p99": by_p99}
    return results


def _running(prediction: ServingPrediction) -> str:
    load = prediction.load
    scope = " in each replica" if prediction.plan.layout.replicas > 1 else ""
    shown = _sequences(load.running)
    text = f"{shown} {'runs' if shown == '1 sequence' else 'run'}{scope}"
    if load.queued < 0.05:  # would be printed as 0
        return text
    return f"{text}, {_amount(load.queued)} wait" if math.isfinite(load.queued) else f"{text}, and a queue that only grows"


def _sequences(number: float) -> str:
    text = _amount(number)
    return f"{text} {'sequence' if text == '1' else 'sequences'}"


def _amount(number: float) -> str:
    """Return the text of a mean number of sequences, without decimals from ten on."""
    return f"{number:,.0f}" if number >= 9.95 else f"{number:,.1f}".removesuffix(".0")


def _spread(spread: Spread, prediction: ServingPrediction, name: str) -> str:
    if not math.isfinite(spread.mean):
        return "ever longer: more requests come than are answered"
    text = format_time(spread.mean)
    shown = [(label, value) for label, value in (("p50", spread.p50), ("p90", spread.p90), ("p99", spread.p99)) if value is not None]
    if shown:
        text += f" ({', '.join(f'{label} {format_time(value)}' for label, value in shown)})"
    interval = prediction.intervals.get(name)
    return text if interval is None else f"{text}; 80 % interval {format_time(interval[0])} to {format_time(interval[1])}"


def parts_table(prediction: ServingPrediction) -> Table:
    """Return the times of the parts of a decode step, longest first."""
    title = f"Where a decode step of {_sequences(prediction.load.running)} goes"
    text = times_like(prediction.decode_step)
    last = ("step", text(prediction.decode_step), "100 %", "")
    return shares_table(title, ("part", "time"), prediction.parts, prediction.decode_step, text, last)


def memory_table(prediction: ServingPrediction) -> Table:
    """Return the memory of each class, largest first."""
    usable, total = prediction.memory_usable, prediction.memory["total"]
    title, text = f"Memory of a chip, of {format_bytes(usable)} that the engine may use", bytes_like(usable)
    last = ("total", text(total), percent(total / usable), bar(total / usable))
    return shares_table(title, ("class", "size"), without_total(prediction.memory), usable, text, last)


def operators_table(rows: Sequence[OperatorRow], phase: str) -> Table:
    """Return one row per operator of a step on one chip, longest first."""
    of_phase = sorted((row for row in rows if row.phase == phase), key=lambda row: -row.time)
    total = sum(row.time for row in of_phase)
    text = times_like(total)
    return table_of(
        f"{'A decode step' if phase == 'decode' else 'The prefill of a prompt'} on one chip, operator by operator: {text(total)}",
        "~operator | >calls | ~shape | >GFLOP | >MB | >FLOP/B | >ridge | >time | bound | >compute from",
        (
            (
                row.name,
                str(row.calls),
                row.shape,
                f"{row.flops / 1e9:,.1f}" if row.flops else "",
                f"{row.bytes / 1e6:,.1f}" if row.bytes else "",
                f"{row.intensity:,.1f}" if row.bytes else "",
                f"{row.ridge:,.0f}" if row.ridge else "",
                text(row.time),
                row.bound,
                f"{row.crossover:,.0f} rows" if row.crossover else "",
            )
            for row in of_phase
        ),
    )


def operator_object(row: OperatorRow) -> dict[str, Any]:
    return picked(row, "name phase shape calls flops bytes intensity ridge time bound") | {"crossover_rows": row.crossover or None}


def serving_object(prediction: ServingPrediction) -> dict[str, Any]:
    """Return the prediction as the `--json` object, in SI units."""
    job, speculation = prediction.job, prediction.job.speculation
    return {
        **{name: asdict(getattr(prediction, name)) for name in TIMES},
        **throughput_object(prediction),
        "memory": dict(prediction.memory),
        **picked(prediction, "memory_usable fits"),
        "fits_load": prediction.load.fits,
        "runnable": not prediction.not_runnable,
        "not_runnable_reason": prediction.not_runnable,
        "remedies": [{"change": dict(change), "text": flags_text(change)} for change in prediction.remedies],
        "is_saturated": prediction.load.is_saturated,
        "parts": dict(prediction.parts),
        "intervals": {name: list(interval) for name, interval in prediction.intervals.items()},
        "plan": {
            **prediction.plan.to_dict(),
            "model": job.model.name,
            "cluster": prediction.cluster,
            "input_len": [job.input_len.least, job.input_len.most],
            "output_len": [job.output_len.least, job.output_len.most],
            **picked(job, "concurrency rate prefix_hit"),
            "quantization": job.quantization.name,
            "kv_precision": str(job.kv_precision),
            "draft_tokens": None if speculation is None else speculation.draft_tokens,
            "draft_model": None if speculation is None or speculation.draft is None else speculation.draft.name,
            "acceptance": None if speculation is None else speculation.acceptance,
        },
        "rests_on": dict(prediction.rests_on),
        "notes": list(prediction.notes),
    }


def launch_object(lines: Sequence[LaunchLine]) -> list[dict[str, Any]]:
    return [
        {"engine": line.engine, "version": line.version, "command": line.command, "copies": line.copies, "config": line.config or None}
        | {"config_name": line.config_name or None, "notes": list(line.notes)}
        for line in lines
    ]


_HEADERS = {"concurrency": "in flight", "rate": "requests/s"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLine:
    """A row of a table of services.

    asked    request fields that differ between rows
    result   plan of a search or of the request; None without a result
    """

    asked: Mapping[str, Any]
    verdict: str
    result: RankedPlan | None = None

    @property
    def plan(self) -> str:
        return "" if self.result is None else short_layout(self.result.plan.layout)


def predicted_line(asked: Mapping[str, Any], prediction: ServingPrediction | None, limits: Mapping[str, float]) -> ServiceLine:
    """Return the row of one of several requests; `prediction` is None if it failed."""
    if prediction is None:
        return ServiceLine(asked=asked, verdict="not predicted")
    result = RankedPlan(
        prediction=prediction,
        tokens_per_second_per_chip=prediction.tokens_per_second_per_chip,
        cost_per_million=prediction.costs.cost_per_million,
        idle_chips=0,
    )
    return ServiceLine(asked=asked, result=result, verdict=short_verdict(prediction, limits))


def services_table(lines: Sequence[ServiceLine], *, shows_load: bool = False, shows_chips: bool = False) -> Table:
    """Return one row per request: varied fields, plan, figures and verdict.

    shows_load, shows_chips   show the load or chip count that the search chose
    """
    varied = [name for name in lines[0].asked if name != "tp"] if lines else []
    has_plan = len({line.plan for line in lines if line.plan}) > 1 or shows_load or shows_chips
    has_cost = any(line.result is not None and line.result.cost_per_million is not None for line in lines)
    right = ("chips", "in flight", "requests/s", "TTFT", "TPOT", "tok/s/chip", "tok/s/user", "USD/M")

    def shown(name: str, value: object) -> str:
        if value is None:
            return "as fits" if name in ("concurrency", "rate") else ""
        return short_name(str(value)) if name == "cluster" else str(value)

    rows = []
    for line in lines:
        result = line.result
        row = {_HEADERS.get(name, name): shown(name, line.asked[name]) for name in varied}
        if shows_chips:
            row["chips"] = f"{result.plan.num_chips + result.idle_chips:,}" if result else ""
        if has_plan:
            row["plan"] = f"tp {line.asked['tp']}" if result is None and line.asked.get("tp") else line.plan
        if shows_load:
            row["in flight"] = load_cell(result) if result else ""
        fitting = result if result is not None and result.prediction.fits else None
        row |= {
            "TTFT": time_cell(fitting.prediction.ttft.mean) if fitting else "",
            "TPOT": time_cell(fitting.prediction.tpot.mean) if fitting else "",
            "tok/s/chip": f"{fitting.tokens_per_second_per_chip:,.0f}" if fitting else "",
            "tok/s/user": f"{fitting.prediction.tokens_per_second_per_user:,.1f}" if fitting else "",
        }
        if has_cost:
            row["USD/M"] = cost_cell(fitting) if fitting else ""
        rows.append(row | {"verdict": line.verdict})
    return table_of_rows(f"{len(lines)} services", rows, right=right, fold=("plan", "verdict"), optional=("USD/M", "tok/s/user"))


def short_verdict(prediction: ServingPrediction, limits: Mapping[str, float]) -> str:
    """Return a short verdict: does not fit, cannot keep up, misses ttft, meets (all limits), or fits."""
    if not prediction.fits:
        return "does not fit"
    if prediction.load.is_saturated and prediction.job.rate is not None:
        return "cannot keep up"
    missed = [words(name) for name, result in limits_object(prediction, limits).items() if not result["kept_by_mean"]]
    if missed:
        return f"misses {', '.join(missed)}"
    waits = "" if prediction.load.fits else ", some wait"
    return ("meets" if limits else "fits") + waits


def load_cell(result: RankedPlan) -> str:
    """Return the concurrency of a plan; empty for a rate."""
    concurrency = result.prediction.job.concurrency
    return "" if concurrency is None else f"{concurrency:,}"


def time_cell(time: float) -> str:
    """Return a mean latency; it grows without bound where more requests come than are answered."""
    return format_time(time) if math.isfinite(time) else "endless"


def cost_cell(result: RankedPlan) -> str:
    """Return the cost of a million output tokens; empty without a known price."""
    return "" if result.cost_per_million is None else f"{result.cost_per_million:,.2f}"
