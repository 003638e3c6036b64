"""Conversion of a row to a run that can be predicted. Errors name the file and the line."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from perfmodel.fitting.columns import MEASURED, MEMORIES, Row, flag_of, positive, settings_of, size_of, time_of, times_of
from perfmodel.fitting.fit import UserRun
from perfmodel.foundation.errors import InputError, bad_field, one_line
from perfmodel.foundation.session import session_cache
from perfmodel.foundation.values import choice_of
from perfmodel.frameworks.profile import list_profiles
from perfmodel.hardware.cluster import Cluster
from perfmodel.hardware.cluster_text import chip_cluster, state_chip_cluster
from perfmodel.hardware.reader import LOCALHOST, load_cluster
from perfmodel.parallel.framework_ref import FrameworkRef, framework_named
from perfmodel.parallel.plan import Plan
from perfmodel.parallel.plan_file import plan_from_dict, read_plan
from perfmodel.validation.case_plan import HardwareOfCase, PlannedCase, load_profile_once, plan_of_case
from perfmodel.validation.fields import PRECISIONS
from perfmodel.validation.framework_patterns import framework_of
from perfmodel.workload.config import TransformerConfig
from perfmodel.workload.job import Optimizer
from perfmodel.workload.models import load_model

#: Spelling of a precision -> its name in published runs.
_PRECISIONS: Mapping[str, str] = {
    **{name: name for name in PRECISIONS},
    "bf16-mixed": "bf16",
    "bfloat16": "bf16",
    "fp16-mixed": "fp16",
    "float16": "fp16",
    "float32": "fp32",
}
#: Spelling of recomputation -> its name.
_RECOMPUTE: Mapping[str, str] = {"op": "selective", "layer": "full", "true": "full", "false": "none", "off": "none", "uniform": "full"}
_WARMUP = 3
"""Steps of a long enough list that are skipped as warm-up."""


def run_of_row(row: Row, *, profile: str, calibration: str) -> UserRun:
    """Return the run that a row describes. profile: the framework's profile where the row names none; empty: `generic`."""
    try:
        framework = row.text("framework") or profile
        name = row.text("framework")  # of a profile, with settings (`torchtitan+compile`), or in any words
        stated = dict(FrameworkRef.parse(name).settings) if framework_named(name) in list_profiles() else {}
        settings = stated | settings_of(row.values)
        plan = row.values.get("plan")
        if isinstance(plan, (str, Plan)):
            plan = read_plan(plan) if isinstance(plan, str) else plan
            settings = {**plan.framework.settings, **settings}
            planned = planned_of(plan, framework, calibration)
        elif isinstance(plan, Mapping):  # a line of `perfmodel run --save`: run by our executor, independent of the plan's framework
            on_cpu = row.values.get("device") == "cpu"
            planned = planned_of(plan_from_dict(dict(plan), where="plan"), framework, calibration, cluster=LOCALHOST if on_cpu else "")
        else:
            planned = _planned(row, framework, settings, calibration)
        plan = planned.plan
        for logged, field, value in (("logged_batch", "global_batch", plan.job.global_batch), ("logged_chips", "chips", plan.num_chips)):
            if row.values.get(logged) not in (None, value):  # a log or a trace contradicts its plan
                raise bad_field(field, value, f"must be {row.values[logged]}, as the run itself wrote", "give the plan that it ran")
        identity = row.values.get("id")
        memory, memory_kind = _memory(row)
        return UserRun(
            id=one_line(identity, 80) if isinstance(identity, (str, int)) else row.location,
            planned=planned,
            measured=_step_time(row, planned.plan) if has_time(row) else math.nan,
            memory=memory,
            memory_kind=memory_kind,
            profile=planned.framework.profile,
            settings=settings,
            assumed=planned.assumed,
        )
    except InputError as error:
        raise InputError(f"{row.location}: {error}") from None


def has_time(row: Row) -> bool:
    return any(row.values.get(name) is not None for name in (*MEASURED, "logged_steps")) or any(
        row.measured.get(name) is not None for name in ("step_time_s", "tokens_per_s_per_chip")
    )


def has_memory(row: Row) -> bool:
    return any(row.values.get(name) is not None or row.measured.get(name) is not None for name in MEMORIES)


def planned_of(plan: Plan, framework: str, calibration: str, *, cluster: str = "") -> PlannedCase:
    """Return the run of a plan. cluster: where it ran, if not on the plan's cluster."""
    if plan.assignment is not None:
        raise bad_field("plan", plan.job.model.name, "gives every operator a sharding of its own", "fit with plans of `perfmodel search`")
    matched_framework = framework_of(framework or plan.framework.name)
    cluster_name = cluster or plan.cluster
    return PlannedCase(
        hardware=HardwareOfCase(
            chip=_cluster(cluster_name, plan.num_chips).chip.name,
            num_chips=plan.num_chips,
            cluster=cluster_name,
            calibration=calibration or ("" if cluster else plan.calibration),
        ),
        framework=matched_framework,
        profile=load_profile_once(matched_framework.profile),
        matmul_dtype=plan.job.policy.recipe.product if plan.job.policy.recipe is not None else plan.job.policy.compute,
        plan=plan,
        assumed=(),
    )


def _planned(row: Row, framework: str, settings: Mapping[str, Any], calibration: str) -> PlannedCase:
    degrees = {name: row.integer(name) or 1 for name in ("tp", "pp", "cp")}
    chips, shard = _chips(row, degrees)
    dp = chips // math.prod(degrees.values())
    cluster_name, chip = _cluster_name(row), row.text("chip")
    cluster = _cluster(cluster_name, chips)
    if row.text("cluster") and chip and _cluster(chip, chips).chip.name != cluster.chip.name:
        raise bad_field("chip", chip, f"is not the chip of {cluster_name}, which is {cluster.chip.name}", "leave one of the two out")
    hardware = HardwareOfCase(chip=cluster.chip.name, num_chips=chips, cluster=cluster_name, calibration=calibration)
    micro_batch, zero, sequence_parallel = row.integer("micro_batch"), row.integer("zero", least=0), row.flag("sequence_parallel")
    is_published = isinstance(row.values.get("model"), Mapping)  # its model is an object of sizes
    precision, recompute = row.text("precision").lower(), row.values.get("recompute")
    if precision and precision not in _PRECISIONS:
        raise bad_field("precision", precision, "not known", f"use one of {', '.join(_PRECISIONS)}")
    spelling = str(recompute).strip().lower()
    inputs = {
        **degrees,
        "framework": framework or None,
        "model": _model(row),
        "sequence_length": row.integer("seq_len"),
        "chip": hardware.chip,
        "chips_per_node": cluster.chips_per_node,
        "num_chips": chips,
        "dp": dp,
        "precision": _PRECISIONS.get(precision, "bf16"),
        "global_batch": _global_batch(row, dp, micro_batch),
        "micro_batch": micro_batch,
        "virtual_stages": row.integer("virtual_stages"),
        # sequence parallelism is the default with tp today; published runs that do not mention it did not use it
        "sequence_parallel": sequence_parallel if is_published else sequence_parallel is not False,
        "zero_stage": 3 if zero is None and shard else zero,
        "distributed_optimizer": row.flag("distributed_optimizer"),
        "recompute": None if recompute is None else _RECOMPUTE.get(spelling, spelling),
        "flash_attention": _flash(row),
        "settings": settings,
        "train": row.text("train") or None,
    }
    if inputs["sequence_length"] is None:
        raise InputError("seq_len: is missing; say how many tokens a sequence has")
    optimizer = choice_of(Optimizer, row.text("optimizer").lower() or Optimizer.ADAMW, "optimizer")
    return plan_of_case(inputs, hardware=hardware, optimizer=optimizer, dp_shard=shard)


def _chips(row: Row, degrees: Mapping[str, int]) -> tuple[int, int | None]:
    """Return (number of chips, replicas that shard; None where the row does not give them).

    Raise InputError if chips and degrees do not match: either may be wrong.
    """
    dp, replicate, shard = row.integer("dp"), row.integer("dp_replicate"), row.integer("dp_shard")
    if replicate is not None or shard is not None:
        product = (replicate or 1) * (shard or 1)
        if dp is not None and dp != product:
            raise bad_field("dp", dp, f"must be dp_replicate*dp_shard={product}", "leave it out, or correct one of them")
        dp = product
    ways = math.prod(degrees.values())
    chips, nodes = row.integer("chips"), row.integer("nodes")
    if chips is None and nodes is not None:
        per_node = row.integer("chips_per_node") or load_cluster(_cluster_name(row), num_chips=None).chips_per_node
        chips = nodes * per_node
    if chips is None and dp is not None:
        chips = ways * dp
    if chips is None and _cluster_name(row) == LOCALHOST:
        chips = load_cluster(LOCALHOST).num_chips
    if chips is None:
        raise InputError("chips: is missing; say on how many chips it ran")
    degrees_text = "*".join(f"{name}={value}" for name, value in degrees.items() if value > 1) or "tp*pp*cp=1"
    if dp is not None and dp * ways != chips:
        rule = f"must equal dp={dp} times {degrees_text}, which is {dp * ways}"
        raise bad_field("chips", chips, rule, "correct the degrees or the number of chips")
    if chips % ways:
        raise bad_field("chips", chips, f"must be a multiple of {degrees_text}", "correct the degrees or the number of chips")
    return chips, shard if shard and shard > 1 else None


def _cluster_name(row: Row) -> str:
    """Return the cluster by its name in a plan file."""
    cluster, chip = row.text("cluster"), row.text("chip")
    if not cluster and not chip:
        raise InputError("chip: is missing; give chip (`perfmodel chips`), or cluster (`perfmodel clusters`)")
    stated = {"per_node": row.integer("chips_per_node")}
    rate = row.number("inter_node_gbit_per_s_per_node")
    if rate is not None:
        stated["scale_out"] = f"{rate / (stated['per_node'] or 8)} Gbit/s"  # type: ignore[assignment]
    if cluster:
        return str(Path(cluster).resolve()) if Path(cluster).suffix in (".yaml", ".yml") else cluster
    if chip_cluster(chip) is not None or not any(stated.values()):
        return chip
    return state_chip_cluster(chip, **{name: value for name, value in stated.items() if value is not None}).text


@session_cache(maxsize=1024, file=lambda cluster_name, chips: cluster_name)
def _cluster(cluster_name: str, chips: int) -> Cluster:
    return load_cluster(cluster_name, num_chips=chips)


def _model(row: Row) -> Mapping[str, Any] | TransformerConfig:
    model = row.values.get("model")
    if isinstance(model, (Mapping, TransformerConfig)):
        return model
    if not row.text("model"):
        raise InputError("model: is missing; give a name (`perfmodel models`) or the path of a config.json")
    return _known_model(row.text("model"))


def _config_of(name: str) -> str:
    """Return the file of a model that is a path, of a folder its config.json."""
    config = os.path.join(name, "config.json")
    return config if os.path.isfile(config) else name


@session_cache(maxsize=64, file=_config_of)
def _known_model(name: str) -> TransformerConfig:
    return load_model(name)


def _global_batch(row: Row, dp: int, micro_batch: int | None) -> int:
    global_batch, accumulation = row.integer("global_batch"), row.integer("accumulation")
    if global_batch is None and accumulation is not None and micro_batch is not None:
        return micro_batch * accumulation * dp
    if global_batch is None:
        raise InputError("global_batch: is missing; say how many sequences a step has on all chips together")
    if accumulation is not None and micro_batch is not None and global_batch != micro_batch * accumulation * dp:
        rule = f"must be micro_batch={micro_batch} * accumulation={accumulation} * dp={dp} = {micro_batch * accumulation * dp}"
        raise bad_field("global_batch", global_batch, rule, "correct one of them")
    return global_batch


def _flash(row: Row) -> bool | None:
    value = row.values.get("attention")
    if value is None or isinstance(value, bool):
        return value
    spelling = str(value).strip().lower()
    if "flash" in spelling or spelling in ("sdpa", "cudnn", "fused"):
        return True
    if spelling in ("unfused", "eager", "math"):
        return False
    return flag_of(value, "attention")


def _step_time(row: Row, plan: Plan) -> float:
    """Return the measured step. [s]"""
    values = row.values
    measured = values.get("measured")
    if isinstance(measured, Mapping):  # of a published run
        values = {"step_time": measured.get("step_time_s"), "tokens_per_s_per_chip": measured.get("tokens_per_s_per_chip")}
    if values.get("logged_steps") is not None:  # of a log or a trace
        job = plan.job
        amount = {"tokens": job.tokens_per_step / plan.num_chips, "samples": job.global_batch}.get(values["logged_unit"])
        return steady([rate if amount is None else amount / rate for rate in values["logged_steps"]])
    if values.get("step_times") is not None:
        return steady(times_of(values["step_times"], "step_times"), warmup=0 if "warmup" in values else None)
    if values.get("step_time") is not None:
        return time_of(values["step_time"], "step_time")
    if values.get("step_time_ms") is not None:
        return positive(values["step_time_ms"], "step_time_ms") * 1e-3
    job = plan.job
    for name, amount in (
        ("tokens_per_s", job.tokens_per_step),
        ("tokens_per_s_per_chip", job.tokens_per_step / plan.num_chips),
        ("samples_per_s", job.global_batch),
    ):
        if values.get(name) is not None:
            return amount / positive(values[name], name)
    raise InputError("step_time: is missing; give it, or tokens_per_s, tokens_per_s_per_chip or samples_per_s")


def _memory(row: Row) -> tuple[float, str]:
    """Return the measured peak and what it counts; the reserved one, if both are given. [byte]

    The kind is "" for a published run: as its framework reports it.
    """
    for name, kind in MEMORIES.items():
        if row.values.get(name) is not None:
            return size_of(row.values[name], name), kind
        if row.measured.get(name) is not None:
            return size_of(row.measured[name], name), ""
    return math.nan, ""


def steady(times: list[float], *, warmup: int | None = None) -> float:
    """Return the median of the steps after warm-up: without the first three of eight or more, the first one of fewer. [s]"""
    skipped = warmup if warmup is not None else _WARMUP if len(times) > 2 * _WARMUP + 1 else 1 if len(times) > 1 else 0
    return median(times[skipped:])
