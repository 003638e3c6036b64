"""Writer of a plan as a framework's configuration, by the framework's table, and as the files that start it, by the launcher's.

The table of a launcher (strategies/launchers) has the name of the file, shell lines before the command, and rules for plans that it cannot
express. It may have the document around the script as a template: texts with expressions in braces, and `=expression` for other values.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any

from perfmodel.configs.expressions import evaluate, filled
from perfmodel.configs.tables import FactRule, FrameworkTable, WrittenFile, common_rules, names_of, sentences
from perfmodel.foundation.errors import InputError, bad_field
from perfmodel.foundation.files import read_yaml
from perfmodel.foundation.resources import resource_dir
from perfmodel.foundation.units import format_bytes, format_step, format_time
from perfmodel.hardware.cluster import Cluster
from perfmodel.parallel.choices import MODULES, ULYSSES, ULYSSES_RULES
from perfmodel.parallel.framework_ref import SETTING_NAMES
from perfmodel.parallel.plan import Plan, plan_facts
from perfmodel.parallel.prediction import Prediction
from perfmodel.parallel.schedule_table import ScheduleTable
from perfmodel.parallel.stage_cuts import default_stage_layers
from perfmodel.workload.models import hub_id_of

TORCHRUN = "torchrun"
_IF, _EACH = "=if", "=each "


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """Form of the files of one launcher.

    file            name of the file
    source          documentation of its keys
    engines         serving engines that it starts; none: it starts training jobs
    joins_nodes     whether it joins the nodes of a replica itself, without options of the engine
    header, setup   lines of the script, before the comments and before the command; prefix: of the command
    embeds          whether the document contains the configs, as `configs`; copies: command that fetches them
    let             names for the template; cannot, lossy: rules for plans that it cannot express, or expresses differently
    document        template of a YAML document around the script; None: the script is the file
    """

    name: str
    file: str
    source: str = ""
    engines: Sequence[str] = ()
    joins_nodes: bool = False
    header: Sequence[str] = ()
    setup: Sequence[str] = ()
    prefix: str = ""
    embeds: bool = False
    copies: str = ""
    let: Mapping[str, str] = field(default_factory=dict)
    cannot: Sequence[FactRule] = ()
    lossy: Sequence[FactRule] = ()
    document: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedPlan:
    """Files that a framework loads, and the script that starts it.

    files     name -> text, the launch script last
    options   key -> value of every option, of all files together
    notes     differences between the framework's run and the plan
    """

    framework: str
    files: Mapping[str, str]
    options: Mapping[str, Any]
    notes: tuple[str, ...] = ()

    @property
    def script(self) -> str:
        """Name of the launch script."""
        return list(self.files)[-1]


def facts_of_plan(plan: Plan, cluster: Cluster) -> dict[str, Any]:
    """Return the facts of a plan: the names in a table's expressions for exported keys."""
    job, layout, model = plan.job, plan.layout, plan.job.transformer
    facts: dict[str, Any] = dict.fromkeys((*SETTING_NAMES, "lora_rank", "lora_modules", "base_format", "adapters", "distributed"))
    facts |= plan_facts(plan) | dict(plan.framework.settings)
    facts |= {
        "chips_per_node": min(cluster.chips_per_node, plan.num_chips),
        "dp": layout.data_parallel,
        "ep": plan.ep,
        "etp": plan.etp,
        "dispatcher": str(plan.dispatcher),
        "accumulation": plan.num_microbatches,
        "schedule": plan.schedule.listed_as,
        "schedule_lines": list(plan.schedule.lines) if isinstance(plan.schedule, ScheduleTable) else None,
        "splits_backward": plan.schedule.splits_backward,
        "placement": str(plan.schedule.placement),
        "stage_layers": list(plan.stage_layers),
        "even_stages": len(set(plan.stage_layers)) == 1
        and plan.stage_layers == default_stage_layers(job, layout.pp, plan.virtual_stages, plan.schedule.placement),
        "recompute_operators": list(plan.recompute_operators),
        "recompute_modules": [name for name, operators in MODULES.items() if set(operators) <= set(plan.recompute_operators)],
        "capacity_factor": job.routing.capacity_factor or None,
        "model_id": hub_id_of(model.name),
        "chip": cluster.chip.name,
        "vendor": cluster.chip.vendor,
        "pools": len(cluster.pools),
        "dense_layers": sum(kind.count for kind in model.parts.kinds if kind.feed_forward == "dense"),
    }
    if facts["cp_form"] is None and plan.rule_set in ULYSSES_RULES:
        facts["cp_form"] = ULYSSES
    if not job.train.is_full:
        facts |= {"lora_rank": job.train.rank, "lora_modules": list(job.train.targets) or None, "base_format": job.train.base or None}
        facts["adapters"] = "dora" if job.train.decomposes else "lora"
    facts |= {f"model.{name}": value for name, value in model.values.items()}
    if model.parts.experts is not None:
        facts |= {f"experts.{field.name}": getattr(model.parts.experts, field.name) for field in fields(model.parts.experts)}
    return facts


def write_config(
    facts: Mapping[str, Any], table: FrameworkTable, *, prediction: Prediction | None, stem: str = "plan", launcher: str = TORCHRUN
) -> ExportedPlan:
    """Return the plan with these facts as the framework's files. Raises InputError if the framework cannot express it.

    prediction   has the numbers in comments; None: no comments
    """
    launched_by = launcher_named(launcher)
    names = _names(facts, table, stem)
    header = [f"{table.framework}, written by perfmodel"]
    if prediction is not None:
        plan, memory = prediction.plan, format_bytes(prediction.memory["total"])
        header = [
            f"{header[0]} from plan {plan.hash()}",
            f"predicted on {plan.num_chips} chips of {plan.cluster}: {format_step(prediction.step_time)} a step, {memory} of "
            f"{format_bytes(prediction.memory_usable)} (probability of fitting {prediction.fits_probability:.0%})",
            "behind each option: exposed time of a step, memory of the fullest chip",
        ]
    files: dict[str, str] = {}
    options: dict[str, Any] = {}
    arguments: list[str] = []
    for output in table.outputs:
        if not evaluate(output.when, names):
            continue
        if output.lines:
            files[filled(output.name, names)] = "".join(f"{line}\n" for line in evaluate(output.lines, names))
            continue
        written: dict[str, tuple[Any, str]] = {}  # key -> value and comment
        for key, expression in output.keys.items():
            if expression is not None and (value := evaluate(expression, names)) is not None:
                comment = "" if isinstance(value, list) else _comment(table.let.get(expression, expression), prediction)
                written[key] = (value, comment and f"  # {comment}")
        options |= {key: value for key, (value, _) in written.items()}
        if output.form in ("flags", "arguments", "overrides"):
            arguments = [f"{_argument(output.form, key, value)}{comment}" for key, (value, comment) in written.items()]
        else:
            files[filled(output.name, names)] = _text(output, written, header, names)
    command = filled(table.launch, names, 1000)
    job = {"role": "", "command": command, "arguments": arguments, "configs": files, "notes": ()}
    files, notes = launch_files(launched_by, [job], header=header, names={**names, "configs": files or None})
    return ExportedPlan(framework=table.framework, files=files, options=options, notes=(*sentences(table.lossy, names), *notes))


def can_write(facts: Mapping[str, Any], table: FrameworkTable) -> bool:
    """Return whether the framework can express the plan with these facts."""
    try:
        _names(facts, table, "plan")
    except InputError:
        return False
    return True


def _names(facts: Mapping[str, Any], table: FrameworkTable, stem: str) -> dict[str, Any]:
    given = {**facts, "stem": stem, "framework": table.framework, "profile": table.profile}
    return names_of(table.framework, table.let, table.cannot, given)


def _comment(expression: str, prediction: Prediction | None) -> str:
    """Return the parts of time and the memory that the first fact of an expression determines."""
    determines = common_rules()["determines"]
    determined = next((determines[name] for name in re.findall(r"[a-z_.]+", expression) if name in determines), None)
    if prediction is None or determined is None:
        return ""
    parts = [(name, time) for name in determined.get("time", ()) if (time := prediction.parts.get(name))]
    classes = [(name, size) for name in determined.get("memory", ()) if (size := prediction.memory.get(name))]
    times = [f"{name.replace('_', ' ')} {format_time(time)}" for name, time in parts]
    return ", ".join([*times, *(f"{name} {format_bytes(size)}" for name, size in classes)])


# --- forms ------------------------------------------------------------------------------------------------------------------


def _argument(form: str, key: str, value: object) -> str:
    """Return an option of a launch line: `--key value`, without the value of a true flag, or `key=value`."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    if form == "overrides":
        return shlex.quote(f"{key}={text}")
    quoted = text if re.fullmatch(r"[\w ./:+-]+", text) else shlex.quote(text)
    name = f"--{key.replace('_', '-')}"
    return name if value is True and form == "flags" else f"{name} {quoted}"


def _text(output: WrittenFile, written: Mapping[str, tuple[Any, str]], header: Sequence[str], names: Mapping[str, Any]) -> str:
    if output.form == "json":
        return json.dumps(_tree({key: value for key, (value, _) in written.items()}), indent=2) + "\n"
    body = list(_lines(output, _tree(written), " " * 8 if output.form == "python" else ""))
    if output.form == "python":
        body = [filled(output.head.rstrip(), names), *body, "    )"]
    return "\n".join([*(f"# {line}" for line in header), *body]) + "\n"


def _tree(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by dotted keys as nested mappings."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *sections, last = key.split(".")
        branch = tree
        for section in sections:
            branch = branch.setdefault(section, {})
        branch[last] = value
    return tree


def _lines(output: WrittenFile, tree: Mapping[str, Any], indent: str, section: str = "") -> Iterator[str]:
    """Yield the options and sections of a file. In TOML the options come before the sections, of which empty ones have no line."""
    step, option, begin, end = common_rules()["forms"][output.form]
    is_toml = output.form == "toml"
    for key, entry in sorted(tree.items(), key=lambda item: is_toml and isinstance(item[1], Mapping)):
        if not isinstance(entry, Mapping):
            value, comment = entry
            if output.form == "python":  # a text that begins with `=` is an expression
                text = value[1:] if isinstance(value, str) and value.startswith("=") else repr(value).replace("'", '"')
            else:  # YAML 1.1 reads 1e-08 as text
                text = re.sub(r"^(-?\d+)(e[-+]\d+)$", r"\1.0\2", json.dumps(value, ensure_ascii=False))
            yield indent + option.format(key=key, value=text, comment=comment)
            continue
        path = f"{section}.{key}" if section else key
        if not is_toml or not all(isinstance(inner, Mapping) for inner in entry.values()):
            yield indent + begin.format(key=key, path=path, call=output.calls.get(key))
        yield from _lines(output, entry, indent + step, path)
        if end:
            yield indent + end


# --- files that start a job or a service --------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def load_launchers() -> Mapping[str, Launcher]:
    """Return every launcher by name."""
    paths = sorted((resource_dir("strategies") / "launchers").glob("*.yaml"))
    return {path.stem: Launcher(name=path.stem, **read_yaml(path)) for path in paths}


def launcher_named(name: str, engine: str = "") -> Launcher:
    """Return a launcher of training jobs, or of the plans of a serving engine. Raises InputError."""
    known = {launcher.name: launcher for launcher in load_launchers().values() if bool(launcher.engines) is bool(engine)}
    if name not in known and engine:
        raise bad_field("to", name, "is nothing that serving plans are written for", f"use one of {', '.join(known)}")
    if name not in known:
        raise bad_field("launcher", name, "is not known", f"use {', '.join(known)}")
    engines = known[name].engines
    if engine and engine not in engines:
        rule = f"starts {' and '.join(engines)}, and the plan is of {engine}"
        raise bad_field("to", name, rule, f"use --to {engine}, or predict the plan with --engine {engines[0]}")
    return known[name]


def launch_files(
    launcher: Launcher, workers: Sequence[Mapping[str, Any]], *, header: Sequence[str], names: Mapping[str, Any]
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the files of a job or a service, with the script or document that starts it last, and notes.

    Raises InputError if the launcher cannot express the plan.

    workers   facts of each kind, of a job one: role, command, arguments (lines with its options), configs (name -> text), notes, ...
    header    comments
    names     facts of the plan; facts of workers are added as `decode.replicas`, `prefill.replicas`
    """
    of_role = {f"{worker['role'] or 'decode'}.{name}": value for worker in workers for name, value in worker.items()}
    names = launch_names(launcher, {**names, **of_role, "workers": workers})
    files: dict[str, str] = {}
    script = ""
    for worker in workers:
        arguments, configs = worker["arguments"], worker["configs"]
        lines = [f"# {line}" for line in (*header, *worker["notes"])]
        lines += ["ARGS=(", *(f"    {argument}" for argument in arguments), ")"] if arguments else []
        lines += launcher.setup if names.get("nodes", 1) > 1 else []
        lines += [launcher.copies] if launcher.copies and configs else []
        lines.append(launcher.prefix + worker["command"] + (' "${ARGS[@]}"' if arguments else ""))
        script = "\n".join(lines) + "\n"
        files |= {} if launcher.embeds else configs
        if launcher.document is None:
            head = ["#!/bin/bash", *(filled(line, names) for line in launcher.header)]
            files[filled(launcher.file, {**names, **worker})] = "\n".join([*head, script])
    if launcher.document is not None:
        files[filled(launcher.file, names)] = manifest(launcher, {**names, "script": script}, header=header[:2])
    return files, sentences(launcher.lossy, names)


def launch_names(launcher: Launcher, names: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts with the names of the launcher's table. Raises InputError if the launcher cannot express the plan."""
    label = re.sub(r"[^a-z0-9]+", "-", names["stem"].lower())[:63]
    label = re.sub(r"^[^a-z]+|-+$", "", label) or "plan"  # an RFC 1035 label
    return names_of(launcher.name, launcher.let, launcher.cannot, {**names, "name": label})


def manifest(launcher: Launcher, names: Mapping[str, Any], *, header: Sequence[str]) -> str:
    """Return the launcher's document as YAML, after comments."""
    import yaml

    class Dumper(yaml.SafeDumper):
        """Dumper that writes scripts and files as blocks and indents lists."""

        def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
            super().increase_indent(flow, indentless=False)

    def text_node(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)

    Dumper.add_representer(str, text_node)
    body = yaml.dump(filled_template(launcher.document, names), Dumper=Dumper, sort_keys=False, width=1000, allow_unicode=True)
    return "".join(f"# {line}\n" for line in header) + body


def filled_template(node: object, names: Mapping[str, Any]) -> Any:
    """Return a template with its values; entries without a value are left out.

    `=if: EXPRESSION` keeps a mapping only if the expression is true. `=each NAME: {KEY: VALUE}` gives one entry for each mapping of facts
    in the list NAME.
    """
    match node:
        case str():
            return evaluate(node[1:], names) if node.startswith("=") else filled(node, names)
        case Mapping():
            if _IF in node and not evaluate(node[_IF], names):
                return None
            mapping: dict[str, Any] = {}
            for key, entry in node.items():
                if key.startswith(_EACH):
                    for facts in names[key.removeprefix(_EACH)]:
                        mapping |= filled_template(entry, {**names, **facts})
                elif key != _IF and (value := filled_template(entry, names)) not in (None, []):
                    mapping[filled(key, names)] = value
            return mapping
        case list():
            return [value for entry in node if (value := filled_template(entry, names)) is not None]
    return node
