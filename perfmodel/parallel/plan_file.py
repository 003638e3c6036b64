"""Plan files: a plan as versioned YAML, which is read back exactly.

A file may name a shipped model (`model: llama-3-8b`). Files that we write hold the whole configuration of the model, so that a saved plan
does not change with a shipped configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perfmodel.foundation.errors import InputError, bad_field, one_line, shown, suggest
from perfmodel.foundation.files import read_yaml
from perfmodel.foundation.resources import resource_dir, write_atomically
from perfmodel.foundation.values import check_path
from perfmodel.foundation.words import words_of
from perfmodel.parallel.algebra.rules import check_rule_set, rule_set_from_dict, rule_set_of
from perfmodel.parallel.choices import MODULES, module_operators
from perfmodel.parallel.framework_ref import read_settings, stated
from perfmodel.parallel.knobs import Knobs, plan_keys
from perfmodel.parallel.layout import DEFAULT_ORDER
from perfmodel.parallel.model_fields import model_to_dict, read_model
from perfmodel.parallel.per_operator.assignment import assignment_from_dict
from perfmodel.parallel.plan import DEFAULT_RECOMPUTE_OPERATORS, SCHEMA_VERSION, Plan, assigned_plan, make_plan, plan_to_dict
from perfmodel.parallel.request import Service
from perfmodel.parallel.schedule_table import FILE, table_of
from perfmodel.parallel.serving_plan import SERVING_KIND, Pools, ServingPlan
from perfmodel.workload.job import Optimizer, Precision, TrainingJob
from perfmodel.workload.models import is_model
from perfmodel.workload.routing import routing_of
from perfmodel.workload.serving import Lengths
from perfmodel.workload.training import FULL_TRAINING, training_of
from perfmodel.workload.transformer import build_graph

#: Knobs of a plan's file outside its layout.
_KNOBS = tuple(name for name in plan_keys() if name not in DEFAULT_ORDER)
#: Values of `kind`; the second is that of old plans with a sharding per operator.
_KIND, _NETWORK_KIND = "plan", "network"


def plan_from_dict(data: object, *, where: str = "plan", is_shipped: bool = False) -> Plan:
    """Return the plan of a file's contents. Raises InputError that names the field."""
    if not isinstance(data, Mapping):
        raise InputError(f"{where}: must be a mapping of fields, not {type(data).__name__}; see strategies/ for examples")
    kind = data.get("kind", _KIND)
    if kind == SERVING_KIND:
        raise InputError(f"{where}: kind={kind}: is a plan of a service; give it to `perfmodel serve`")
    if kind == _NETWORK_KIND:
        raise InputError(
            f"{where}: kind={kind}: is a plan of `perfmodel shard`, which only `perfmodel predict` and `perfmodel run` take; "
            "give a plan of `perfmodel search` here"
        )
    if kind != _KIND:
        raise InputError(f"{where}: kind={one_line(repr(kind), 80)}: must be {_KIND}; correct it or leave it out")
    if not {"schema_version", "layout", "job"} & set(data):
        raise InputError(f"{where}: is no plan; give the file that `perfmodel predict ... --save plan.yaml` or a search writes")
    _check_version(data, where)
    if not is_shipped:
        from perfmodel.foundation.schema import check
        from perfmodel.parallel.schemas import PlanFile

        check(PlanFile, data, where=where)
    try:
        return _plan(data)
    except InputError as error:
        raise InputError(f"{where}: {error.full}") from None


def _check_version(data: Mapping[str, Any], where: str) -> None:
    version = data.get("schema_version")
    if version != SCHEMA_VERSION:
        raise InputError(
            f"{where}: schema_version={shown(version)}: this perfmodel reads version {SCHEMA_VERSION}; "
            "search again and save, or use the perfmodel that wrote the file"
        )


def _plan(data: Mapping[str, Any]) -> Plan:
    """Return the plan of contents that have the schema of a plan file."""
    given = data["job"]
    job = TrainingJob(
        model=read_model(given["model"], "job.model"),
        global_batch=given["global_batch"],
        seq_len=given["seq_len"],
        precision=Precision(given.get("precision", Precision.BF16_MIXED)),
        optimizer=Optimizer(given.get("optimizer", Optimizer.ADAMW)),
        train=training_of(given.get("train", FULL_TRAINING), "job.train"),
        routing=routing_of(given.get("routing", "balanced")).with_capacity(given.get("capacity_factor", 0.0)),
    )
    layers, table = data.get("stage_layers"), data.get("schedule_table")
    values: dict[str, Any] = {
        "cluster": _text(data["cluster"]),
        "num_chips": data["num_chips"],
        **{axis: data["layout"].get(axis, 1) for axis in DEFAULT_ORDER},
        **{name: _knob(name, data) for name in _KNOBS},
        "recompute_operators": tuple(data.get("recompute_operators", DEFAULT_RECOMPUTE_OPERATORS)),
        "stage_layers": None if layers is None else tuple(layers),
        "profile": stated(_text(data.get("profile", "megatron")), read_settings(data.get("settings", {}))),
        "calibration": _text(data.get("calibration", "")),
    }
    if table is not None:
        values["schedule"] = table_of(table["name"], table["orders"], where="schedule_table")
    elif values["schedule"] == FILE:
        raise bad_field("schedule", FILE, "the plan has no schedule_table", "save the plan again, or use a schedule by name")
    if values["rules"] is not None:
        del values["sequence_parallel"]  # follows from the rules; `_check_rules_agree` compares it with the file
    if "assignment" in data:
        return _assigned(data["assignment"], job, values)
    plan = make_plan(job, **values)
    _check_recompute_operators(plan)
    _check_rules_agree(plan, data)
    return plan


def _text(value: str | float) -> str:
    return value if isinstance(value, str) else shown(value)


def _knob(name: str, data: Mapping[str, Any]) -> Any:
    """Return the value of a knob, or its default in files. Rules are a name, a path or their fields; old files name them `rule_set`."""
    if name == "rules":
        key = "rules" if "rules" in data else "rule_set"
        rules = data.get(key)
        if isinstance(rules, Mapping):
            return check_rule_set(rule_set_from_dict(rules, where=key, default_name="own"), where=key)
        return None if rules is None else rule_set_of(rules)
    known = words_of(Knobs)[name]
    value = data.get(name, False if known.kind is bool else known.in_files)
    return tuple(value) if isinstance(value, list) else value


def _assigned(data: Mapping[str, Any], job: TrainingJob, values: Mapping[str, Any]) -> Plan:
    """Return the plan of a file with an assignment."""
    assignment = assignment_from_dict(data)
    chips, stated = assignment.num_stages // max(1, values["virtual_stages"]) * assignment.num_chips, values["num_chips"]
    if stated != chips:
        raise InputError(f"num_chips={stated}: the assignment is for {chips} (stages times the mesh of one); correct one of them")
    plan = assigned_plan(job, cluster=values["cluster"], assignment=assignment, **{name: values[name] for name in _OF_ASSIGNED})
    for axis in DEFAULT_ORDER:
        if values[axis] != (value := plan.layout.degree(axis)):
            rule = f"is {value} where every operator has a sharding of its own and there are {assignment.num_stages} stages"
            raise InputError(f"{axis}={shown(values[axis])}: {rule}; correct it")
    return plan


_OF_ASSIGNED = (
    *("micro_batch", "zero", "recompute", "recompute_operators", "schedule", "virtual_stages", "attention", "profile", "calibration"),
)
"""Knobs of a plan with an assignment."""


def _check_rules_agree(plan: Plan, data: Mapping[str, Any]) -> None:
    """Refuse a file whose other fields contradict its rules."""
    name = data.get("rule_set", plan.rule_set)
    if name != plan.rule_set:
        raise InputError(f"rule_set={shown(name)}: rules={plan.rule_set} say another; leave out rule_set")
    if data.get("sequence_parallel", plan.sequence_parallel) != plan.sequence_parallel:
        does = "cut" if plan.sequence_parallel else "do not cut"
        says = str(not plan.sequence_parallel).lower()
        raise InputError(
            f"sequence_parallel={says}: the rules {plan.rule_set} {does} the residual stream by tp={plan.layout.tp}; leave out "
            "sequence_parallel or correct rules"
        )


def _check_recompute_operators(plan: Plan) -> None:
    """Check that each name is a group or an operator of one of the model's layers, with or without dropout."""
    if plan.recompute_operators == DEFAULT_RECOMPUTE_OPERATORS:
        return
    graph = build_graph(
        plan.job.transformer,
        seq_len=plan.job.seq_len,
        attention=str(plan.attention),
        dropout=True,
        activation_bytes=2.0,
        parameter_bytes=2.0,
    )
    blocks = {region.name for region in graph.regions if region.is_block}
    inside = [operator for operator in graph.operators if operator.layer in blocks and operator.forward]
    known = {operator.name_in_layer for operator in inside} | {operator.group for operator in inside if operator.group}
    known |= set(module_operators(tuple(MODULES)))  # a model need not have all of them
    for name in plan.recompute_operators:
        if name not in known:
            quoted = one_line(name, 80)
            raise InputError(f"recompute_operators={quoted}: no operator of a layer of {plan.job.model.name}{suggest(quoted, known)}")


def read_plan(path: str | Path) -> Plan:
    """Return the plan of a plan file; a bare name is that of a shipped plan."""
    check_path(path, "plan")
    path = Path(path)
    is_name = path.suffix not in (".yaml", ".yml") and path.parent == Path()
    shipped = resource_dir("strategies") / "plans" / f"{path.name}.yaml"
    try:
        file = path if path.is_file() else shipped if is_name and shipped.is_file() else None
    except (OSError, ValueError):  # a name too long, or with a null byte
        file = None
    if file is None:
        shown = one_line(path, 200)
        remedy = f"; it is a model: give it as --model {shown}" if is_model(path) else suggest(shown, list_plans())
        raise InputError(f"plan={shown}: no such file and no expert plan{remedy}")
    return plan_from_dict(read_yaml(file), where=str(file), is_shipped=file == shipped)


def serving_plan_to_dict(plan: ServingPlan) -> dict[str, Any]:
    """Return the plan as plain values, in an order for readers."""
    job, drafts, layout = plan.job, plan.job.speculation, plan.layout
    load: dict[str, Any] = {"concurrency": job.concurrency, "rate": job.rate, "prefix_hit": job.prefix_hit or None}
    if drafts is not None:
        draft = None if drafts.draft is None else model_to_dict(drafts.draft)
        load |= {"draft_tokens": drafts.draft_tokens, "acceptance": drafts.acceptance, "draft_model": draft}
    limits = layout.decode if isinstance(layout, Pools) else layout  # workers share them
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": SERVING_KIND,
        "job": {
            "model": model_to_dict(job.model),
            "input_len": _lengths(job.input_len),
            "output_len": _lengths(job.output_len),
            **{name: value for name, value in load.items() if value is not None},
            "quantization": job.quantization.name,
            "kv_precision": str(job.kv_precision),
        },
        "cluster": plan.cluster,
        "num_chips": plan.num_chips,
        "engine": plan.engine,
        **({"workers": layout.text} if isinstance(layout, Pools) else {"layout": layout.degrees | {"replicas": layout.replicas}}),
        **{name: value for name, value in (("max_batch", limits.max_batch), ("max_tokens", limits.max_tokens)) if value},
        "calibration": plan.calibration,
    }


def _lengths(lengths: Lengths) -> int | str:
    return lengths.least if lengths.least == lengths.most else str(lengths)


def service_from_dict(data: Mapping[str, Any], *, where: str = "plan") -> Service:
    """Return the service of a file's contents. Raises InputError that names the field."""
    from perfmodel.foundation.schema import check
    from perfmodel.parallel.schemas import ServingPlanFile

    check(ServingPlanFile, data, where=where)
    words = dict(data["job"])
    for name in ("model", "draft_model"):
        if name in words:
            words[name] = read_model(words[name], f"job.{name}")
    words |= {name: data[name] for name in ("cluster", "engine", "workers", "max_batch", "max_tokens") if name in data}
    words |= data.get("layout", {})
    return Service().having({**words, "chips": data["num_chips"], "calibration": data.get("calibration") or None})


def is_serving_plan(path: str | Path) -> bool:
    """Return whether a file is the plan of a service."""
    try:
        content = read_yaml(path) if Path(path).suffix in (".yaml", ".yml") and Path(path).is_file() else None
    except (InputError, OSError, ValueError):  # the reader of plans reports the fault
        return False
    return isinstance(content, Mapping) and content.get("kind") == SERVING_KIND


def read_serving_plan(path: str | Path) -> Service:
    """Return the service that reproduces the plan of a file. Raises InputError that names the field."""
    content = read_yaml(path)
    _check_version(content, str(path))
    return service_from_dict(content, where=str(path))


def write_plan(plan: Plan | ServingPlan, path: str | Path) -> None:
    """Write a plan file atomically: to a temporary name, then renamed."""
    if not isinstance(plan, (Plan, ServingPlan)):
        raise bad_field("plan", shown(plan), "must be a Plan", "read one, search one or make one")
    write_atomically(Path(path), plan_text(plan))


def plan_text(plan: Plan | ServingPlan) -> str:
    """Return the content of a plan file."""
    import yaml

    content = plan_to_dict(plan) if isinstance(plan, Plan) else serving_plan_to_dict(plan)
    if not plan.calibration:
        del content["calibration"]  # the reader takes its own best calibration: numbers of one cluster do not apply to another
    return yaml.dump(content, sort_keys=False, default_flow_style=None, width=120)


def list_plans() -> list[str]:
    """Return the names of the shipped expert plans."""
    return sorted(path.stem for path in (resource_dir("strategies") / "plans").glob("*.yaml"))
