"""Files that start a job: shell scripts, tasks of SkyPilot and objects of Kubernetes, by the tables in strategies/launchers.

A table has the name of the file, shell lines before the command, and rules for plans that the launcher cannot express. It may have the
document around the script as a template: texts with expressions in braces, and `=expression` for other values.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from perfmodel.configs.expressions import evaluate, filled
from perfmodel.configs.tables import FactRule, names_of, sentences
from perfmodel.foundation.errors import bad_field
from perfmodel.foundation.files import read_yaml
from perfmodel.foundation.resources import resource_dir

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


def script_in(keys: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """Return the script that a SkyPilot task or a Kubernetes list with a TrainJob starts, and the files of its ConfigMaps by name.

    keys   dotted keys of the document
    """
    files: dict[str, str] = {}
    script = ""
    match keys:
        case {"run": str(run), "num_nodes": _} | {"run": str(run), "resources.accelerators": _}:
            script = run
        case {"kind": "List", "items": [*items]}:
            for item in items:
                match item:
                    case {"kind": "ConfigMap", "data": {**data}}:
                        files |= {str(name): str(text) for name, text in data.items()}
                    case {"kind": "TrainJob", "spec": {"trainer": {"command": [*_, str(last)]}}}:
                        script = last
    return script, files


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
