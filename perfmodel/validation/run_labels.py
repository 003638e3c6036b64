"""Labels of published runs: chip, framework, size and others. Labels group errors and are no input of a prediction."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from perfmodel.foundation.errors import InputError, bad_field, one_line, shown, suggest
from perfmodel.foundation.grouping import grouped
from perfmodel.report.predictions import degrees_line
from perfmodel.validation.case_plan import PlannedCase
from perfmodel.validation.cases import Case
from perfmodel.validation.expert_cases import has_experts
from perfmodel.validation.fields import UNKNOWN, label
from perfmodel.validation.run_machine import cluster_of_run
from perfmodel.validation.serving_cases import PlannedServing

#: Classes by size: (upper bound, inclusive; name), smallest first.
_SIZES = ((1e9, "up to 1 B"), (1e10, "1-10 B"), (1e11, "10-100 B"), (math.inf, "over 100 B"))
_CHIPS = ((1, "1 chip"), (8, "2-8 chips"), (64, "9-64 chips"), (512, "65-512 chips"), (math.inf, "over 512 chips"))

#: Fields of a case in which the runs of a plan group may differ; all other inputs are equal.
PLAN_FIELDS = frozenset({
    "dp", "tp", "pp", "cp", "ep", "virtual_stages", "micro_batch", "sequence_parallel", "zero_stage", "distributed_optimizer", "recompute",
    "flash_attention",
})  # fmt: skip
#: The same for `settings`: parallelism options of the framework, not software versions.
_PLAN_SETTINGS = frozenset({"tp_mode", "sharding"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLabels:
    """Labels of one run in each field that errors are grouped by; `?` where the run does not state it.

    size         class of the number of parameters
    chips        class of the number of chips
    parameters, num_chips   the numbers themselves; nan where unknown
    form         parallel axes, such as tp+pp+dp
    experts      "8, 2 chosen", or "dense"
    dispatcher   dispatcher of tokens to experts
    degrees      parallel degrees of the plan, such as "pp 2, tp 4"
    engine, concurrency, kind   of a serving run
    peak_share   MFU of the linear layers at the measured time; above one the run cannot have been on these chips
    """

    source: str
    chip: str = UNKNOWN
    framework: str = UNKNOWN
    model: str = UNKNOWN
    size: str = UNKNOWN
    chips: str = UNKNOWN
    form: str = UNKNOWN
    tier: str = UNKNOWN
    precision: str = UNKNOWN
    profile: str = UNKNOWN
    experts: str = UNKNOWN
    dispatcher: str = UNKNOWN
    degrees: str = UNKNOWN
    engine: str = UNKNOWN
    concurrency: str = UNKNOWN
    kind: str = UNKNOWN
    parameters: float = math.nan
    num_chips: float = math.nan
    peak_share: float = math.nan


class Labelled(Protocol):
    """Row with labels."""

    @property
    def labels(self) -> RunLabels: ...


_Row = TypeVar("_Row", bound=Labelled)

#: Source label of all runs that train adapters only: no other line of a table contains them.
ADAPTERS = "adapters only (LoRA)"
#: Fields of `--by`.
FIELDS = ("source", "chip", "framework", "model", "size", "chips", "form", "tier", "precision", "profile", "experts", "dispatcher")
#: The same for serving runs.
SERVING_FIELDS = ("source", "engine", "chip", "model", "precision", "concurrency", "framework", "kind", "tier", "experts")


def check_fields(names: Iterable[str], known: Sequence[str]) -> tuple[str, ...]:
    """Return the fields without duplicates. Raises InputError for invalid ones."""
    if not isinstance(names, Iterable) or not all(isinstance(name, str) for name in names):
        raise bad_field("by", shown(names), "must be names of fields", f"use any of {', '.join(known)}")
    fields = tuple(dict.fromkeys(name.strip() for name in names if name.strip()))
    for name in fields:
        if name not in known:
            raise InputError(f"by={one_line(name)}: not known{suggest(name, list(known))}; use any of {', '.join(known)}")
    if not fields:
        raise InputError(f"by: names no field; use any of {', '.join(known)}")
    return fields


def by_label(rows: Iterable[_Row], field: str) -> dict[str, list[_Row]]:
    """Return the rows of each label of a field: classes and numbers in order of size, then names."""
    classes = [name for _, name in {"size": _SIZES, "chips": _CHIPS}.get(field, ())]
    groups = grouped(rows, lambda row: str(getattr(row.labels, field)))

    def order(label: str) -> tuple[int, float, str]:
        return classes.index(label) if label in classes else len(classes), float(label) if label.isdigit() else math.inf, label

    return {label: groups[label] for label in sorted(groups, key=order)}


def labels_of(case: Case, planned: PlannedCase | None) -> RunLabels:
    """Return the labels that follow from the case; those that follow from a plan are unknown without one."""
    stated, model = _stated_labels(case), case.inputs.get("model")
    if isinstance(model, Mapping):
        experts = f"{model.get('num_experts')}, {model.get('num_experts_per_tok')} chosen" if has_experts(model) else "dense"
        stated = replace(stated, experts=experts)
    chips = case.inputs.get("num_chips") if planned is None else planned.plan.num_chips
    chips = float(chips) if isinstance(chips, int) and not isinstance(chips, bool) and 0 < chips < 2**31 else math.nan
    stated = replace(stated, chip=label(case.inputs.get("chip")), chips=_class_of(chips, _CHIPS), num_chips=chips)
    if planned is None:
        return stated
    plan, parameters = planned.plan, float(planned.plan.job.transformer.num_parameters)
    return replace(
        stated,
        size=_class_of(parameters, _SIZES),
        form=parallel_form(planned),
        profile=planned.framework.profile,
        dispatcher=str(plan.dispatcher) if plan.has_experts else UNKNOWN,
        degrees=degrees_line(plan),
        parameters=parameters,
        peak_share=_peak_share(planned, case.measured("step_time")),
    )


def labels_of_serving(case: Case, planned: PlannedServing | None) -> RunLabels:
    """Return the labels of a serving run; those that follow from a plan are unknown without one."""
    model, batch = case.inputs.get("model"), case.inputs.get("batch")
    moe = model.get("moe") if isinstance(model, Mapping) else None
    stated = replace(
        _stated_labels(case),
        concurrency=str(batch) if isinstance(batch, int) and not isinstance(batch, bool) else UNKNOWN,
        kind=label(case.inputs.get("kind")),
        experts="experts" if isinstance(moe, Mapping) and moe.get("experts") else "dense",
    )
    return stated if planned is None else replace(stated, engine=planned.engine, chip=planned.hardware.chip)


def _stated_labels(case: Case) -> RunLabels:
    """Return the labels that a run of any kind states."""
    inputs, model = case.inputs, case.inputs.get("model")
    return RunLabels(
        source=ADAPTERS if case.trains_adapters else case.group or UNKNOWN,
        framework=label(inputs.get("framework")),
        model=label(model.get("name")) if isinstance(model, Mapping) else UNKNOWN,
        tier=case.tier or UNKNOWN,
        precision=label(inputs.get("precision")),
    )


def _peak_share(planned: PlannedCase, measured: float) -> float:
    """Return 6 FLOP per parameter and token, without embedding tables, over the peak FLOP of the measured time."""
    job, chip = planned.plan.job, cluster_of_run(planned.hardware).chip
    model = job.transformer
    looked_up = model.hidden_size * (
        model.vocab_size * (not model.tie_word_embeddings)
        + model.positions.max_position_embeddings * (model.positions.position == "learned")
    )
    flops = 6.0 * (model.num_parameters - looked_up) * job.global_batch * job.seq_len
    return flops / (planned.plan.num_chips * chip.flop_rate(planned.matmul_dtype) * measured)


def parallel_form(planned: PlannedCase) -> str:
    """Return the parallel axes of the run, such as `tp+pp+dp`; `fsdp` is ZeRO-3, `zero` a lower stage."""
    layout = planned.plan.layout
    forms = [axis for axis in ("tp", "cp", "pp") if layout.degree(axis) > 1]
    if layout.dp_shard * layout.dp_replicate > 1:
        forms.append({0: "dp", 3: "fsdp"}.get(int(planned.plan.zero), "zero"))
    return "+".join(forms) or "one chip"


def plan_group(case: Case) -> str:
    """Return a key of the runs of a source that differ in their plan only (and in measurements)."""
    settings = case.inputs.get("settings")
    if isinstance(settings, Mapping):
        of_source = {key: value for key, value in settings.items() if key not in _PLAN_SETTINGS}
        case = replace(case, inputs={**case.inputs, "settings": of_source})
    return text_without(case, PLAN_FIELDS)


def plan_of(case: Case, planned: PlannedCase) -> str:
    """Return a key of the runs of a group with the same plan."""
    settings = case.inputs.get("settings")
    chosen = {key: settings.get(key) for key in _PLAN_SETTINGS} if isinstance(settings, Mapping) else {}
    return json.dumps([planned.plan.hash(), chosen], sort_keys=True, default=str)


def text_without(case: Case, names: Collection[str]) -> str:
    """Return a key of the runs of a source that differ in these inputs alone."""
    inputs = {key: value for key, value in case.inputs.items() if key not in names and value is not None}
    return json.dumps([case.group, inputs], sort_keys=True, default=str)


def _class_of(value: float, classes: Iterable[tuple[float, str]]) -> str:
    return next((name for bound, name in classes if value <= bound), UNKNOWN)
