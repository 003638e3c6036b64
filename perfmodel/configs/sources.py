"""Config files and launch lines as flat keys: `parallelism.tensor_parallel_degree` -> 4, `tensor_model_parallel_size` -> 4.

A launch line may name further files (`--config_file fsdp.yaml`, `--deepspeed ds.json`), which are read from the folder of the script. Its
own options override them. No file is executed: Python is parsed (`python_file.py`), shell scripts are expanded (`shell.py`).
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perfmodel.configs.python_file import read_python
from perfmodel.configs.shell import read_script
from perfmodel.configs.tables import common_rules
from perfmodel.foundation.errors import InputError, one_line
from perfmodel.foundation.files import parse_yaml, read_text
from perfmodel.foundation.plain import dotted
from perfmodel.parallel.schedule_table import table_in

PROGRAM, ARGUMENT = "launch.program", "launch.argument"
_DATA, _PYTHON = (".yaml", ".yml", ".json", ".toml"), ".py"
_READERS: Mapping[str, Callable[[str], Any]] = {".toml": tomllib.loads, ".json": json.loads}
_WHAT = "config or of a launch script (.yaml, .toml, .json, .py, .sh or .txt)"
_INTERPOLATION = re.compile(r"\$\{([^{}]*)\}")
_ENVIRONMENT = re.compile(r"[A-Z_][A-Z0-9_]*")
_IMAGE = re.compile(r"\w[\w.-]*(?::\d+)?(?:/[\w.-]+)*/([\w.-]+)(?::[\w.-]+)?(?:@sha256:[0-9a-f]+)?")
_MOST_FILES = 8
_OTHER_FILES = re.compile("data|tokenizer|path$|folder|output|assets")  # keys of files without options


@dataclass(slots=True, kw_only=True)
class ConfigKeys:
    """Keys of a configuration with their values, and the files from which they were read.

    embedded   name -> text of the files in a Kubernetes manifest
    missing    key -> name of a configuration with the sharding that is not next to the file
    """

    path: Path
    keys: dict[str, Any] = field(default_factory=dict)
    files: list[Path] = field(default_factory=list)
    embedded: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)


def read_source(path: str | Path) -> ConfigKeys:
    """Return the keys of a config file or launch script. `file.py:name` selects one of several configs of a Python file."""
    stem, _, function = str(path).rpartition(":")
    is_selected = stem.endswith(_PYTHON) and function.isidentifier()
    path = Path(stem if is_selected else path)
    source = ConfigKeys(path=path, files=[path])
    if path.suffix in (*_DATA, _PYTHON):
        source.keys = _keys_of_file(path, function if is_selected else "")
        script, source.embedded = _script_in(source.keys)
    else:
        script = read_text(path, _WHAT)
    if script or not source.keys:
        # the command that starts the job is that with the most options
        try:
            commands = read_script(script)
        except RecursionError:
            raise InputError(f"{one_line(path, 200)}: has substitutions nested too deep to read; write their values") from None
        if not commands:
            raise InputError(f"{one_line(path, 200)}: has no command; give the path of a {_WHAT}")
        options = [sum(word.startswith("-") or "=" in word for word in words) + len(environment) for words, environment in commands]
        words, environment = commands[options.index(max(options))]
        source.keys = {f"env.{name}": _value(value) for name, value in environment.items() if value} | dict(_options(words))
    _read_named_files(source)
    source.keys = _resolved(source.keys, where=str(path))
    _read_schedules(source)
    return source


def _keys_of_file(path: Path, wanted: str = "", text: str | None = None) -> dict[str, Any]:
    text = read_text(path, _WHAT) if text is None else text
    if path.suffix == _PYTHON:
        return read_python(text, where=str(path), wanted=wanted)
    if (read := _READERS.get(path.suffix)) is None:
        return dict(dotted(parse_yaml(text.replace("!!python/tuple", ""), where=str(path))))  # tuples become lists
    try:
        data = read(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{one_line(path, 200)}: is not {path.suffix[1:].upper()} ({one_line(error, 120)}); correct the file") from None
    if not isinstance(data, Mapping):
        raise InputError(f"{one_line(path, 200)}: must hold a mapping of fields at the top; give a config of a framework")
    return dict(dotted(data))


def _script_in(keys: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
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


def _options(words: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield the options and overrides of a command, then its program and first argument."""
    starters, short_options = common_rules()["starters"], common_rules()["short_options"]
    if re.match(r"(sudo )?(docker|podman|nerdctl) run ", " ".join(words)):
        # the command inside `docker run ... IMAGE ARGUMENTS`, with the entry point of its image
        images = ((index, match[1]) for index, word in enumerate(words) if (match := _IMAGE.fullmatch(word)))
        index, name = next(images, (-1, ""))
        words = [*common_rules()["entry_points"].get(name, "").split(), *words[index + 1 :]]
    rest = list(filter(None, words))
    program: list[str] = []
    arguments: list[str] = []
    while rest:
        word = rest.pop(0)
        if word.startswith("-") and not re.fullmatch(r"-[\d.]+(e-?\d+)?", word):
            name, equals, value = word.partition("=")
            key = short_options.get(name, name).lstrip("-").replace("-", "_")
            if key == "u":  # python -u takes no value
                continue
            takes_one = key in ("m", "module") and bool(program) and program[-1] in starters
            values = [value] if equals else list(_values(rest, takes_one=takes_one))
            rest = rest if equals else rest[len(values) :]
            if key == "m" and values:
                program.append(values[0])
                arguments += values[1:]
            else:
                yield key, _value(values[0]) if len(values) == 1 else list(map(_value, values)) or True
        elif override := re.fullmatch(r"\+{0,2}([A-Za-z_][\w.]*)=(.*)", word, re.DOTALL):
            yield override[1], _value(override[2])
        elif not program or program[-1] in starters or (len(program) == 1 and word.isidentifier()):
            program.append(word)
        else:
            arguments.append(word)
    yield PROGRAM, " ".join(program)
    yield ARGUMENT, arguments[0] if arguments else ""


def _values(words: Sequence[str], *, takes_one: bool) -> Iterator[str]:
    """Yield the values of an option: the words up to the next option, or the script that a launcher starts."""
    for number, word in enumerate(words):
        is_option = re.match(r"--?[A-Za-z]|[A-Za-z_][\w.]*=", word)
        if is_option or (number and (takes_one or word.endswith((_PYTHON, ".sh")) or words[number - 1].endswith(_PYTHON))):
            return
        yield word


def _value(text: str) -> Any:
    """Return the number, truth value or JSON mapping of a word, else its text."""
    lowered = text.strip().lower()
    if lowered in ("true", "false"):
        return lowered == "true"
    for pattern, number in ((r"[-+]?\d{1,18}", int), (r"[-+]?\d*\.?\d+(e[-+]?\d{1,3})?", float)):
        if re.fullmatch(pattern, lowered):
            return number(lowered)
    if text.startswith("{"):
        with suppress(ValueError, RecursionError):
            return json.loads(text)
    return text


def _read_named_files(source: ConfigKeys) -> None:
    """Add the keys of the files that options name; keys of the launch line are not overwritten."""
    of_line, folder, sections = set(source.keys), source.path.parent, common_rules()["sections"]
    pending = list(source.keys.items())
    for key, name in pending:
        if not isinstance(name, str) or key == PROGRAM or len(source.files) == _MOST_FILES:
            continue
        path, section = folder / name, sections.get(key.rpartition(".")[2], "")
        is_config = (path.suffix in _DATA or section == "hostfile") and not _OTHER_FILES.search(key)
        if name not in source.embedded and not (is_config and os.path.isfile(path)):
            if section not in ("", "hostfile") and path.suffix in _DATA:
                source.missing[key] = name
            continue
        if path in source.files:
            continue
        source.files.append(path)
        if section == "hostfile":  # of DeepSpeed
            slots = [int(count) for count in re.findall(r"^\s*[^#\s]\S*\s+slots=(\d{1,4})", read_text(path, "hostfile"), re.MULTILINE)]
            if not slots or len(set(slots)) > 1:
                rule = "must have a line `name slots=8` for each node, all with the same slots"
                raise InputError(f"{one_line(path, 200)}: {rule}; correct it")
            keys = {"nodes": len(slots), "slots": slots[0]}
        else:
            keys = _keys_of_file(path, text=source.embedded.get(path.name))
        if section and not (section == "accelerate" and keys.keys().isdisjoint(("compute_environment", "distributed_type"))):
            keys = {f"{section}.{name}": value for name, value in keys.items()}
        new = {name: value for name, value in keys.items() if name not in source.keys}
        source.keys |= new
        pending += new.items()
    for key, entry in list(source.keys.items()):
        if isinstance(entry, Mapping):  # the value of one word, such as `--speculative-config '{...}'`
            source.keys |= {name: value for name, value in dotted(entry, f"{key}.") if name not in of_line}
    _read_registry(source)


def _read_schedules(source: ConfigKeys) -> None:
    """Replace the names of CSV files with the schedules in them."""
    for key, name in source.keys.items():
        if not (isinstance(name, str) and name) or common_rules()["sections"].get(key.rpartition(".")[2]) != "schedule":
            continue
        path = source.path.parent / name
        if name not in source.embedded and not path.is_file():
            source.missing[key] = name
            continue
        source.files.append(path)
        source.keys[key] = table_in(path.stem, source.embedded.get(name) or read_text(path, "schedule"), where=str(path))


def _read_registry(source: ConfigKeys) -> None:
    """Add the keys of torchtitan's `--module llama3 --config llama3_8b`: a function of llama3/config_registry.py."""
    folder, module, config = source.path.parent, source.keys.get("module"), source.keys.get("config")
    if not (isinstance(module, str) and isinstance(config, str) and config.isidentifier()):
        return
    for path in (folder / f"{module}.py", folder / module / "config_registry.py", folder / "config_registry.py"):
        if path.name in source.embedded or path.is_file():
            source.files.append(path)
            source.keys = {**_keys_of_file(path, config, text=source.embedded.get(path.name)), **source.keys}
            return
    raise InputError(f"--config {config}: is a function of {module}/config_registry.py, which is not next to {source.path}; copy it there")


def _resolved(keys: dict[str, Any], *, where: str) -> dict[str, Any]:
    """Return the keys with `${other.key}` replaced. Raises InputError for a resolver, and for a missing key."""

    def value(text: str, depth: int) -> Any:
        match = _INTERPOLATION.search(text)
        if match is None:
            return text
        name = match[1].strip()
        bare, location = name.lstrip("."), f"{one_line(where, 200)}: ${{{one_line(name, 80)}}}"
        if ":" in name:
            raise InputError(f"{location} is filled in by the framework's own resolver when it starts; write its value")
        candidates = (name, bare, *(key for key in keys if key.endswith(f".{bare}")))
        target = next((keys[key] for key in candidates if keys.get(key) is not None), None)
        if target is None or depth > 8:
            if _ENVIRONMENT.fullmatch(name):
                return text  # a variable of the environment, which is not read: a key that needs it is missing
            raise InputError(f"{location} names a key that the file does not have; write its value")
        resolved = value(target, depth + 1) if isinstance(target, str) else target
        return resolved if match[0] == text.strip() else value(text.replace(match[0], str(resolved)), depth + 1)

    return {key: value(entry, 0) if isinstance(entry, str) and "${" in entry else entry for key, entry in keys.items()}
