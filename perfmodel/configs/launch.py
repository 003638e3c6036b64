"""Files that start a job: shell scripts, tasks of SkyPilot and objects of Kubernetes, by the tables in strategies/launchers.

A table has the name of the file, shell lines before the command, and rules for plans that the launcher cannot express. It may have the
document around the script as a template: texts with expressions in braces, and `=expression` for other values.
"""

from __future__ import annotations

import re
import shlex
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


def launcher_named(name: str) -> Launcher:
    """Return a launcher of training jobs. Raises InputError."""
    known = {launcher.name: launcher for launcher in load_launchers().values() if not launcher.engines}
    if name not in known:
        raise bad_field("launcher", name, "is not known", f"use {', '.join(known)}")
    return known[name]


def server_named(name: str, engine: str) -> Launcher:
    """Return the launcher of a serving plan. Raises InputError if it does not start the engine."""
    known = {launcher.name: launcher for launcher in load_launchers().values() if launcher.engines}
    if name not in known:
        rule = "is nothing that serving plans are written for"
        raise bad_field("to", name, rule, f"use one of {', '.join(known)}")
    if engine not in known[name].engines:
        rule = f"starts {' and '.join(known[name].engines)}, and the plan is of {engine}"
        raise bad_field("to", name, rule, f"use --to {engine}, or predict the plan with --engine {known[name].engines[0]}")
    return known[name]


def launch_file(
    launcher: Launcher,
    command: str,
    flags: Sequence[tuple[str, Any, str]],
    *,
    header: Sequence[str],
    configs: Mapping[str, str],
    names: Mapping[str, Any],
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the files of a job, with the script that starts it last, and notes. Raises InputError if the launcher cannot express the plan.

    command   command that starts the program on the chips of a node, the same for every launcher
    flags     name, value and comment of each option of the program
    header    comments
    configs   name -> text of the files that the program reads
    names     facts of the plan
    """
    names = launch_names(launcher, {**names, "configs": configs or None})
    lines = [f"# {line}" for line in header]
    if flags:
        lines += ["ARGS=(", *(f"    {_flag(key, value)}{after(comment)}" for key, value, comment in flags), ")"]
    lines += launcher.setup if names["nodes"] > 1 else []
    lines += [launcher.copies] if launcher.copies and configs else []
    lines.append(f'{launcher.prefix}{command} "${{ARGS[@]}}"' if flags else launcher.prefix + command)
    if launcher.document is None:
        text = "\n".join(["#!/bin/bash", *(filled(line, names) for line in launcher.header), *lines]) + "\n"
    else:
        text = manifest(launcher, {**names, "script": "\n".join(lines) + "\n"}, header=header[:2])
    files = {} if launcher.embeds else dict(configs)
    return {**files, filled(launcher.file, names): text}, sentences(launcher.lossy, names)


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


def server_files(
    launcher: Launcher, workers: Sequence[Mapping[str, Any]], *, header: Sequence[str], names: Mapping[str, Any]
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the files of a service, and notes: a script for each kind of worker, or one document for all.

    workers   facts of each kind: role, replicas, chips, command, options, notes, ...
    names     facts of the service; facts of workers are added as `decode.replicas`, `prefill.replicas`
    """
    of_role = {f"{worker['role'] or 'decode'}.{name}": value for worker in workers for name, value in worker.items()}
    names = launch_names(launcher, {**names, **of_role, "workers": workers})
    notes = sentences(launcher.lossy, names)
    if launcher.document is not None:
        return {filled(launcher.file, names): manifest(launcher, names, header=header)}, notes
    files: dict[str, str] = {}
    for worker in workers:
        comments = [f"# {line}" for line in (*header, *worker["notes"])]
        files |= worker["configs"]
        files[filled(launcher.file, {**names, **worker})] = "\n".join(["#!/bin/bash", *comments, worker["command"]]) + "\n"
    return files, notes


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


def after(comment: str) -> str:
    return f"  # {comment}" if comment else ""


def _flag(key: str, value: object) -> str:
    if key.endswith("="):
        return shlex.quote(f"{key}{str(value).lower() if isinstance(value, bool) else value}")
    name = f"--{key.replace('_', '-')}"
    if value is True:
        return name
    text = str(value)
    return f"{name} {text}" if re.fullmatch(r"[\w ./:+-]+", text) else f"{name} {shlex.quote(text)}"
