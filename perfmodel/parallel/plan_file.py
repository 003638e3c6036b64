"""Strategy files: a plan as YAML, complete, readable, versioned, and read back exactly.

A file may name a shipped model (`model: llama-3-8b`); what we write spells the whole configuration out, so that a saved
plan does not change when a shipped configuration does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from perfmodel.errors import InputError, one_line, shown, suggest
from perfmodel.files import read_yaml
from perfmodel.parallel.layout import DEFAULT_ORDER
from perfmodel.parallel.plan import DEFAULT_RECOMPUTE_OPERATORS, SCHEMA_VERSION, Plan, make_plan, plan_to_dict
from perfmodel.resources import resource_dir, write_atomically
from perfmodel.values import check_name
from perfmodel.workload.config import TransformerConfig
from perfmodel.workload.job import Optimizer, Precision, TrainingJob
from perfmodel.workload.operator import OperatorKind
from perfmodel.workload.transformer import build_graph

_PLAN_KEYS = {
    "schema_version", "kind", "source", "notes", "job", "cluster", "num_chips", "layout", "order", "rule_set", "sequence_parallel",
    "zero", "micro_batch", "recompute", "recompute_operators", "schedule", "virtual_stages", "stage_layers", "attention", "profile",
    "calibration",
}  # fmt: skip
#: What `kind` says; the second is that of plans in which every operator has a sharding of its own (`network_plan_file.py`).
_KIND, _NETWORK_KIND = "plan", "network"
_JOB_KEYS = {"model", "global_batch", "seq_len", "precision", "optimizer"}


def _only_known(given: Mapping[str, Any], known: set[str], where: str) -> None:
    for key in given:
        if key not in known:
            raise InputError(f"{where}: unknown field {shown(key)}{suggest(one_line(key), sorted(known))}; remove it or correct it")


def _whole(data: Mapping[str, Any], key: str, where: str, default: int | None = None) -> int:
    value = data.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool):
        raise InputError(f"{where}: {key}={shown(value)}: must be a whole number; write it without quotes")
    return value


def _text(data: Mapping[str, Any], key: str, where: str, default: str | None = None) -> str:
    value = data.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise InputError(f"{where}: {key}={shown(value)}: must be a text; give one")
    return str(value)


def _mapping(data: Any, key: str, where: str) -> Mapping[str, Any]:
    value = data.get(key)
    if not isinstance(value, Mapping):
        raise InputError(f"{where}: {key}={shown(value)}: must be a mapping of fields; see strategies/ for examples")
    return value


def _strings(data: Mapping[str, Any], key: str, default: tuple[str, ...], where: str) -> tuple[str, ...]:
    value = data.get(key, list(default))
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise InputError(f"{where}: {key}={shown(value)}: must be a list of names; write it as [a, b]")
    return tuple(value)


def plan_from_dict(data: Any, *, where: str = "plan") -> Plan:
    """The plan of a file's contents. Raises InputError naming the field."""
    if not isinstance(data, Mapping):
        raise InputError(f"{where}: must be a mapping of fields, not {type(data).__name__}; see strategies/ for examples")
    kind = data.get("kind", _KIND)
    if kind == _NETWORK_KIND:
        raise InputError(
            f"{where}: kind={kind}: is a plan of `perfmodel shard`, which only `perfmodel predict` and `perfmodel run` take; "
            "give a plan of `perfmodel search` here"
        )
    if kind != _KIND:
        raise InputError(f"{where}: kind={one_line(repr(kind), 80)}: must be {_KIND}; correct it or leave it out")
    version = data.get("schema_version")
    if version != SCHEMA_VERSION:
        raise InputError(
            f"{where}: schema_version={shown(version)}: this perfmodel reads version {SCHEMA_VERSION}; "
            "search again and save, or use the perfmodel that wrote the file"
        )
    _only_known(data, _PLAN_KEYS, where)
    job_data = _mapping(data, "job", where)
    _only_known(job_data, _JOB_KEYS, f"{where}: job")
    layout = _mapping(data, "layout", where)
    _only_known(layout, set(DEFAULT_ORDER), f"{where}: layout")
    try:
        precision = Precision(_text(job_data, "precision", where, "bf16-mixed"))
        optimizer = Optimizer(_text(job_data, "optimizer", where, "adamw"))
    except ValueError as error:
        raise InputError(f"{where}: job: {error}; use {', '.join(Precision)} and {', '.join(Optimizer)}") from None
    job = TrainingJob(
        model=_model(job_data.get("model"), where),
        global_batch=_whole(job_data, "global_batch", f"{where}: job"),
        seq_len=_whole(job_data, "seq_len", f"{where}: job"),
        precision=precision,
        optimizer=optimizer,
    )
    sequence_parallel = data.get("sequence_parallel", False)
    if not isinstance(sequence_parallel, bool):
        raise InputError(f"{where}: sequence_parallel={shown(sequence_parallel)}: must be true or false; write one of them")
    stage_layers = data.get("stage_layers")
    if stage_layers is not None and not (
        isinstance(stage_layers, list) and all(isinstance(n, int) and not isinstance(n, bool) for n in stage_layers)
    ):
        raise InputError(f"{where}: stage_layers={shown(stage_layers)}: must be a list of whole numbers; leave it out for even stages")
    plan = make_plan(
        job,
        cluster=_text(data, "cluster", where),
        num_chips=_whole(data, "num_chips", where),
        pp=_whole(layout, "pp", where, 1),
        dp_replicate=_whole(layout, "dp_replicate", where, 1),
        dp_shard=_whole(layout, "dp_shard", where, 1),
        cp=_whole(layout, "cp", where, 1),
        tp=_whole(layout, "tp", where, 1),
        zero=_whole(data, "zero", where, 0),
        order=_strings(data, "order", DEFAULT_ORDER, where),
        sequence_parallel=sequence_parallel,
        micro_batch=_whole(data, "micro_batch", where, 1),
        recompute=_text(data, "recompute", where, "none"),
        recompute_operators=_strings(data, "recompute_operators", DEFAULT_RECOMPUTE_OPERATORS, where),
        schedule=_text(data, "schedule", where, "1f1b"),
        virtual_stages=_whole(data, "virtual_stages", where, 1),
        stage_layers=None if stage_layers is None else tuple(stage_layers),
        attention=_text(data, "attention", where, "flash"),
        profile=_text(data, "profile", where, "megatron"),
        calibration=_text(data, "calibration", where, ""),
    )
    _check_recompute_operators(plan, where)
    rule_set = data.get("rule_set", plan.rule_set)
    if rule_set != plan.rule_set:
        raise InputError(
            f"{where}: rule_set={rule_set}: sequence_parallel={sequence_parallel} uses {plan.rule_set}; correct one of the two"
        )
    return plan


def _check_recompute_operators(plan: Plan, where: str) -> None:
    """Each is a group or an operator of one of the model's layers, with dropout or without."""
    if plan.recompute_operators == DEFAULT_RECOMPUTE_OPERATORS:
        return
    graph = build_graph(
        plan.job.model, seq_len=plan.job.seq_len, attention=str(plan.attention), dropout=True, activation_bytes=2.0, parameter_bytes=2.0
    )
    inside = [operator for operator in graph.operators if operator.region == "layer" and operator.kind is not OperatorKind.IDENTITY]
    known = {operator.name for operator in inside} | {operator.group for operator in inside if operator.group}
    for name in plan.recompute_operators:
        if name not in known:
            shown = one_line(name, 80)
            raise InputError(
                f"{where}: recompute_operators={shown}: no operator of a layer of {plan.job.model.name}{suggest(shown, known)}"
            )


def _model(value: Any, where: str) -> TransformerConfig:
    if isinstance(value, str):
        from perfmodel.workload.models import load_model

        return load_model(value)
    if not isinstance(value, Mapping):
        raise InputError(f"{where}: job.model={shown(value)}: must be a model's name or its fields; see `perfmodel models`")
    known = {field.name: field for field in fields(TransformerConfig)}
    _only_known(value, set(known), f"{where}: job.model")
    for name in value:
        if not isinstance(value[name], (str, int, float, bool)):
            raise InputError(f"{where}: job.model.{name}={shown(value[name])}: must be a single value; correct it")
    try:
        return TransformerConfig(**value)
    except TypeError as error:
        raise InputError(f"{where}: job.model: {error}; give every field of the model or its name") from None


def read_plan(path: str | Path) -> Plan:
    """The plan in a strategy file; a bare name is looked up among the shipped ones."""
    check_name(path, "plan", Plan, "see strategies/plans for examples")
    path = Path(path)
    is_name = path.suffix not in (".yaml", ".yml") and path.parent == Path()
    shipped = resource_dir("strategies") / "plans" / f"{path.name}.yaml"
    try:
        found = path if path.is_file() else shipped if is_name and shipped.is_file() else None
    except (OSError, ValueError):  # a name too long, or with a null byte
        found = None
    if found is None:
        shown = one_line(path, 200)
        raise InputError(f"plan={shown}: no such file and no expert plan{suggest(shown, list_plans())}")
    return plan_from_dict(read_yaml(found), where=str(found))


def write_plan(plan: Plan, path: str | Path) -> None:
    """Write a strategy file: to a temporary name, then renamed."""
    import yaml

    content = plan_to_dict(plan)
    if not plan.calibration:
        del content["calibration"]  # the best known where the plan is read: no number of this cluster's goes to another
    text = yaml.dump(content, sort_keys=False, default_flow_style=None, width=120)
    write_atomically(Path(path), text)


def list_plans() -> list[str]:
    """Names of the shipped expert plans."""
    return sorted(path.stem for path in (resource_dir("strategies") / "plans").glob("*.yaml"))
