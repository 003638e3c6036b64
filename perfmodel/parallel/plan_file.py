"""Strategy files: a plan as YAML, complete, readable, versioned, and read back exactly.

A file may name a shipped model (`model: llama-3-8b`); what we write spells the whole configuration out, so that a saved
plan does not change when a shipped configuration does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from perfmodel.foundation.errors import InputError, bad_field, one_line, shown, suggest
from perfmodel.foundation.files import listed, read_yaml
from perfmodel.foundation.resources import resource_dir, write_atomically
from perfmodel.foundation.values import check_path
from perfmodel.foundation.words import words_of
from perfmodel.parallel.algebra.rules import RuleSet, check_rule_set, rule_set_from_dict, rule_set_of
from perfmodel.parallel.framework_ref import read_settings, stated
from perfmodel.parallel.knobs import Knobs, plan_keys
from perfmodel.parallel.layout import DEFAULT_ORDER
from perfmodel.parallel.per_operator.assignment import assignment_from_dict
from perfmodel.parallel.plan import DEFAULT_RECOMPUTE_OPERATORS, SCHEMA_VERSION, Plan, assigned_plan, make_plan, plan_to_dict
from perfmodel.parallel.recompute_modules import MODULES, operators_of
from perfmodel.workload.config import MAX_SIZE, TransformerConfig
from perfmodel.workload.job import Optimizer, Precision, TrainingJob
from perfmodel.workload.layer_specs import PARTS, part_from_plain
from perfmodel.workload.network_model import NetworkModel
from perfmodel.workload.routing import BALANCED, Routing, routing_of
from perfmodel.workload.training import FULL_TRAINING, Training, training_of
from perfmodel.workload.transformer import build_graph

#: The knobs that a plan's file has beside its layout, and all of its keys.
_KNOBS = tuple(name for name in plan_keys() if name not in DEFAULT_ORDER)
_PLAN_KEYS = {
    "schema_version", "kind", "source", "notes", "job", "cluster", "num_chips", "layout", "rule_set", "recompute_operators",
    "stage_layers", "profile", "settings", "calibration", "assignment", *_KNOBS,
}  # fmt: skip
#: What `kind` says; the second is what plans in which every operator has a sharding of its own once said.
_KIND, _NETWORK_KIND = "plan", "network"
_JOB_KEYS = {*(each.name for each in fields(TrainingJob)), "capacity_factor"}


class _Fields:
    """Reads the fields of a mapping; what is wrong with one goes to `faults`, so that a file's faults are told at once."""

    def __init__(self, data: Mapping[str, Any], known: set[str], faults: list[str], within: str = "") -> None:
        self.data, self.faults, self.within = data, faults, within
        for key in data:
            if key not in known:
                self.wrong(f"unknown field {shown(key)}{suggest(one_line(key), sorted(known))}; remove it or correct it")

    def wrong(self, sentence: str) -> None:
        self.faults.append(f"{self.within}{sentence}")

    def whole(self, key: str, default: int | None = None) -> int:
        value = self.data.get(key, default)
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) <= MAX_SIZE:
            return value
        self.wrong(f"{key}={shown(value)}: must be a whole number of {MAX_SIZE} at most; write it without quotes")
        return 1

    def text(self, key: str, default: str | None = None) -> str:
        value = self.data.get(key, default)
        if isinstance(value, (str, int, float)) and not isinstance(value, bool):
            return value if isinstance(value, str) else shown(value)
        self.wrong(f"{key}={shown(value)}: must be a text; give one")
        return ""

    def choice(self, key: str, kind: type[StrEnum], default: StrEnum) -> str:
        value = self.text(key, default)
        if value in list(kind):
            return value
        self.wrong(f"{key}={shown(value)}: not known{suggest(one_line(value), kind)}; use {', '.join(kind)}")
        return default

    def training(self, key: str) -> Training:
        try:
            return training_of(self.data.get(key, FULL_TRAINING), key)
        except InputError as error:
            self.wrong(str(error))
            return FULL_TRAINING

    def routing(self) -> Routing:
        try:
            return routing_of(self.data.get("routing", "balanced")).with_capacity(self.data.get("capacity_factor", 0.0))
        except InputError as error:
            self.wrong(str(error))
            return BALANCED

    def mapping(self, key: str, known: set[str]) -> _Fields:
        value = self.data.get(key)
        if not isinstance(value, Mapping):
            self.wrong(f"{key}={shown(value)}: must be a mapping of fields; see strategies/ for examples")
            value = {}
        return _Fields(value, known, self.faults, f"{self.within}{key}: ")

    def map(self, key: str) -> Mapping[str, Any]:
        """A map of anything."""
        value = self.data.get(key, {})
        if isinstance(value, Mapping):
            return value
        self.wrong(f"{key}={shown(value)}: must be a mapping; write {{name: value}}")
        return {}

    def strings(self, key: str, default: tuple[str, ...]) -> tuple[str, ...]:
        value = self.data.get(key, list(default))
        if isinstance(value, list) and all(isinstance(v, str) for v in value):
            return tuple(value)
        self.wrong(f"{key}={shown(value)}: must be a list of names; write it as [a, b]")
        return default

    def flag(self, key: str) -> bool:
        value = self.data.get(key, False)
        if not isinstance(value, bool):
            self.wrong(f"{key}={shown(value)}: must be true or false; write one of them")
        return value is True

    def rules(self) -> RuleSet | None:
        """A shipped rule set by its name, one's own by its file or in full; `rule_set` is what old files call it."""
        key = "rules" if "rules" in self.data else "rule_set"
        if key not in self.data:
            return None
        value = self.data[key]
        try:
            if isinstance(value, Mapping):
                return check_rule_set(rule_set_from_dict(value, where=key, default_name="own"), where=key)
            return rule_set_of(value)
        except InputError as error:
            self.wrong(str(error))
            return None

    def profile(self) -> str:
        """The framework that is assumed, and what the file states of its setup."""
        name = self.text("profile", "megatron")
        try:
            return stated(name, read_settings(self.map("settings")))
        except InputError as error:
            self.wrong(str(error))
            return name

    def knob(self, name: str) -> Any:
        """The value of a knob, or what leaving it out means."""
        if name == "rules":
            return self.rules()
        known = words_of(Knobs)[name]
        if known.kind is bool:
            return self.flag(name)
        if known.in_files is None and name not in self.data:
            return None
        if isinstance(known.in_files, tuple):
            return self.strings(name, known.in_files)
        return self.whole(name, known.in_files) if known.kind is int else self.text(name, known.in_files)

    def whole_numbers(self, key: str, otherwise: str) -> tuple[int, ...] | None:
        value = self.data.get(key)
        if value is None:
            return None
        if isinstance(value, list) and all(isinstance(n, int) and not isinstance(n, bool) and abs(n) <= MAX_SIZE for n in value):
            return tuple(value)
        self.wrong(f"{key}={shown(value)}: must be a list of whole numbers; {otherwise}")
        return None


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
    if not {"schema_version", "layout", "job"} & set(data):
        raise InputError(f"{where}: is no plan; give the file that `perfmodel predict ... --save plan.yaml` or a search writes")
    version = data.get("schema_version")
    if version != SCHEMA_VERSION:
        raise InputError(
            f"{where}: schema_version={shown(version)}: this perfmodel reads version {SCHEMA_VERSION}; "
            "search again and save, or use the perfmodel that wrote the file"
        )
    faults: list[str] = []
    plan_fields = _Fields(data, _PLAN_KEYS, faults)
    job_fields = plan_fields.mapping("job", _JOB_KEYS)
    layout = plan_fields.mapping("layout", set(DEFAULT_ORDER))
    model = _model(job_fields)
    job_values: dict[str, Any] = {
        "global_batch": job_fields.whole("global_batch"),
        "seq_len": job_fields.whole("seq_len"),
        "precision": Precision(job_fields.choice("precision", Precision, Precision.BF16_MIXED)),
        "optimizer": Optimizer(job_fields.choice("optimizer", Optimizer, Optimizer.ADAMW)),
        "train": job_fields.training("train"),
        "routing": job_fields.routing(),
    }
    values: dict[str, Any] = {
        "cluster": plan_fields.text("cluster"),
        "num_chips": plan_fields.whole("num_chips"),
        **{axis: layout.whole(axis, 1) for axis in DEFAULT_ORDER},
        **{name: plan_fields.knob(name) for name in _KNOBS},
        "recompute_operators": plan_fields.strings("recompute_operators", DEFAULT_RECOMPUTE_OPERATORS),
        "stage_layers": plan_fields.whole_numbers("stage_layers", "leave it out for even stages"),
        "profile": plan_fields.profile(),
        "calibration": plan_fields.text("calibration", ""),
    }
    if values["rules"] is not None:
        del values["sequence_parallel"]  # which they say; `_check_rules_agree` looks whether the file does too
    if faults or model is None:
        raise InputError(f"{where}: {listed(list(dict.fromkeys(faults)))}")
    if "assignment" in data:
        return _assigned(data["assignment"], TrainingJob(model=model, **job_values), values, where)
    plan = make_plan(TrainingJob(model=model, **job_values), **values)
    _check_recompute_operators(plan, where)
    _check_rules_agree(plan, plan_fields, where)
    return plan


def _assigned(data: Any, job: TrainingJob, values: Mapping[str, Any], where: str) -> Plan:
    """The plan of a file in which each operator has a sharding of its own."""
    assignment = assignment_from_dict(data, where=f"{where}: assignment")
    chips, stated = assignment.num_stages // max(1, values["virtual_stages"]) * assignment.num_chips, values["num_chips"]
    if stated != chips:
        raise InputError(f"{where}: num_chips={stated}: the assignment is for {chips} (stages times the mesh of one); correct one of them")
    plan = assigned_plan(
        job,
        cluster=values["cluster"],
        assignment=assignment,
        **{name: values[name] for name in _OF_ASSIGNED},
    )
    fixed = {axis: plan.layout.degree(axis) for axis in DEFAULT_ORDER}
    for name, value in fixed.items():
        if values[name] != value:
            rule = f"is {value} where every operator has a sharding of its own and there are {assignment.num_stages} stages"
            raise InputError(f"{where}: {name}={shown(values[name])}: {rule}; correct it")
    return plan


_OF_ASSIGNED = (
    *("micro_batch", "zero", "recompute", "recompute_operators", "schedule", "virtual_stages", "attention", "profile", "calibration"),
)
"""What such a plan has besides."""


def _check_rules_agree(plan: Plan, given: _Fields, where: str) -> None:
    """What else a file says of its rules must be so."""
    name = given.data.get("rule_set", plan.rule_set)
    if name != plan.rule_set:
        raise InputError(f"{where}: rule_set={shown(name)}: rules={plan.rule_set} say another; leave out rule_set")
    if "sequence_parallel" in given.data and given.flag("sequence_parallel") != plan.sequence_parallel:
        does = "cut" if plan.sequence_parallel else "do not cut"
        says = str(not plan.sequence_parallel).lower()
        raise InputError(
            f"{where}: sequence_parallel={says}: the rules {plan.rule_set} {does} the residual stream by tp={plan.layout.tp}; leave out "
            "sequence_parallel or correct rules"
        )


def _check_recompute_operators(plan: Plan, where: str) -> None:
    """Each is a group or an operator of one of the model's layers, with dropout or without."""
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
    known |= set(operators_of(tuple(MODULES)))  # of which a model need not have all
    for name in plan.recompute_operators:
        if name not in known:
            quoted = one_line(name, 80)
            raise InputError(
                f"{where}: recompute_operators={quoted}: no operator of a layer of {plan.job.model.name}{suggest(quoted, known)}"
            )


def _model(job: _Fields) -> TransformerConfig | NetworkModel | None:
    """A shipped model by its name, or all of its fields, or a network; None where they are wrong."""
    value = job.data.get("model")
    if isinstance(value, str):
        from perfmodel.workload.models import load_model

        try:
            return load_model(value)
        except InputError as error:
            job.wrong(str(error))
            return None
    if not isinstance(value, Mapping):
        job.wrong(f"model={shown(value)}: must be a model's name or its fields; see `perfmodel models`")
        return None
    before = len(job.faults)
    if "network" in value:
        network = _Fields(value, {"network", "sizes", "inputs"}, job.faults, f"{job.within}model: ")
        sizes = {str(name): tuple(size) if isinstance(size, list) else size for name, size in network.map("sizes").items()}
        found = NetworkModel(name=network.text("network"), sizes=sizes, inputs=network.strings("inputs", ()))
        return found if len(job.faults) == before else None
    given = _Fields(value, {field.name for field in fields(TransformerConfig)}, job.faults, f"{job.within}model: ")
    plain = dict(value)
    for name, entry in value.items():
        if name in PARTS or name == "kinds":
            try:
                plain[name] = part_from_plain(name, entry)
            except InputError as error:
                given.wrong(str(error))
        elif not isinstance(entry, (str, int, float, bool)):
            given.wrong(f"{one_line(name)}={shown(entry)}: must be a single value; correct it")
    for field in fields(TransformerConfig):
        if field.name not in value and field.default is MISSING and field.default_factory is MISSING:
            given.wrong(f"{field.name}: is missing; give every field of the model, or its name")
    if len(job.faults) > before:
        return None
    try:
        return TransformerConfig(**plain)
    except InputError as error:
        given.wrong(str(error))
        return None


def read_plan(path: str | Path) -> Plan:
    """The plan in a strategy file; a bare name is looked up among the shipped ones."""
    check_path(path, "plan")
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
    if not isinstance(plan, Plan):
        raise bad_field("plan", shown(plan), "must be a Plan", "read one, search one or make one")
    import yaml

    content = plan_to_dict(plan)
    if not plan.calibration:
        del content["calibration"]  # the best known where the plan is read: no number of this cluster's goes to another
    text = yaml.dump(content, sort_keys=False, default_flow_style=None, width=120)
    write_atomically(Path(path), text)


def list_plans() -> list[str]:
    """Names of the shipped expert plans."""
    return sorted(path.stem for path in (resource_dir("strategies") / "plans").glob("*.yaml"))
