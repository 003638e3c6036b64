"""Tables of keys, one for each framework: strategies/configs/*.yaml. A table has the meaning of each key, and the keys of an exported plan.

Keys mean facts: words of a request (`model`, `seq_len`), knobs (`tp`, `micro_batch`), settings (`compile`), fields of a model
(`model.hidden_size`, `experts.top_k`), and facts from which these are derived (`accumulation`, `nodes`). strategies/configs/common.yaml has
the rules for all frameworks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from perfmodel.configs.training_script import ScriptCall
from perfmodel.foundation.errors import bad_field, suggest
from perfmodel.foundation.files import read_yaml
from perfmodel.foundation.resources import resource_dir

COMMON = "common"
#: Fields that a table does not inherit from its base.
_OWN = ("recognise", "outputs", "launch")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyMeaning:
    """Meaning of one key.

    to       fact that has its value; empty: `values` name the facts
    values   value in lower case -> value of the fact, or several facts; None: no effect on time or memory
    formula  expression of `value` and the other facts, in place of the value
    note     sentence for a value with an effect that is not predicted
    """

    to: str = ""
    values: Mapping[str, Any] | None = None
    formula: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FactRule:
    """A condition on facts, and a sentence with facts in braces."""

    when: str
    say: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedFile:
    """A configuration that projects ship, recognised by its name: a pattern, and the facts that it sets."""

    name: str
    sets: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenFile:
    """One file of an export.

    name    name of the file; {stem} is the requested name without its ending
    form    toml, yaml, json or python; of the launch line flags, arguments (truth values are written) or overrides (key=value)
    keys    key -> expression of its value; None leaves the key out
    always  constant lines of the file, key -> value
    when    condition on the facts under which the file is written
    head    of Python: text before the arguments of the config, with facts in braces
    calls   of Python: section -> function that makes it
    """

    name: str
    form: str
    keys: Mapping[str, str]
    always: Mapping[str, Any]
    when: str = "True"
    head: str = ""
    calls: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameworkTable:
    """Table of the configuration of one framework.

    name       name of the file in strategies/configs
    framework  name of the framework for users
    profile    assumed execution profile, or serving engine
    recognise  alternatives: keys that must all be present, or `program=PATTERN`
    named_files  configurations that are read by their name where the file is missing
    harmless   patterns of keys without effect on time and memory
    defaults   fact -> expression of the framework's default, if no key sets the fact
    derive     fact -> expressions of it, tried in order if no key sets the fact
    notes, refused   rules on reading
    cannot     rules on writing: plans that the framework cannot express
    lossy      rules on writing: plans that the framework expresses differently
    let        names for the expressions of outputs, in order
    outputs    files that a plan is written as, or names of `files` of the base; launch: the program and its arguments, with facts in braces
    """

    name: str
    framework: str
    profile: str
    source: str
    serves: bool
    recognise: tuple[tuple[str, ...], ...]
    keys: Mapping[str, KeyMeaning]
    named_files: tuple[NamedFile, ...]
    harmless: tuple[str, ...]
    defaults: tuple[tuple[str, str], ...]
    derive: tuple[tuple[str, str], ...]
    notes: tuple[FactRule, ...]
    refused: tuple[FactRule, ...]
    cannot: tuple[FactRule, ...]
    lossy: tuple[FactRule, ...]
    outputs: tuple[WrittenFile, ...]
    launch: str
    let: tuple[tuple[str, str], ...]

    def values_of(self, fact: str) -> set[Any]:
        """Return the values that keys can give a fact by `values`."""
        values = {value for key in self.keys.values() if key.to == fact for value in (key.values or {}).values()}
        meanings = [meaning for key in self.keys.values() for meaning in (key.values or {}).values() if isinstance(meaning, Mapping)]
        return values | {meaning[fact] for meaning in meanings if fact in meaning}

    def can_set(self, fact: str, value: object) -> bool:
        """Return whether a key can give a fact this value."""
        return value in self.values_of(fact) or any(key.to == fact and not key.values for key in self.keys.values())

    def entry(self, key: str) -> tuple[str, KeyMeaning] | None:
        """Return the table's key for a file's key: the same, or the longest of its last components."""
        parts = key.split(".")
        for start in range(len(parts)):
            name = ".".join(parts[start:])
            if name in self.keys:
                return name, self.keys[name]
        return None

    def is_harmless(self, key: str) -> bool:
        return any(re.search(pattern, key) for pattern in self.harmless)


@lru_cache(maxsize=1)
def load_tables() -> Mapping[str, FrameworkTable]:
    """Return every table by name, in the order in which a configuration is matched."""
    folder = resource_dir("strategies") / "configs"
    contents = {path.stem: read_yaml(path) for path in sorted(folder.glob("*.yaml"))}
    common = contents.pop(COMMON)
    tables = {name: _table(name, _based(name, contents), common) for name in contents}
    order = [name for name in common["order"] if name in tables]
    return {name: tables[name] for name in [*order, *(name for name in tables if name not in order)]}


@lru_cache(maxsize=1)
def script_calls() -> tuple[tuple[ScriptCall, ...], Mapping[str, str]]:
    """Return the calls of training scripts whose arguments are keys, and the keys of arguments with another name."""
    common = read_yaml(resource_dir("strategies") / "configs" / f"{COMMON}.yaml")
    return tuple(ScriptCall(**call) for call in common["script_calls"]), common["script_names"]


@lru_cache(maxsize=1)
def entry_points() -> Mapping[str, str]:
    """Return image of a container -> the program that it starts with the given arguments."""
    return dict(read_yaml(resource_dir("strategies") / "configs" / f"{COMMON}.yaml")["entry_points"])


def table_named(name: str) -> FrameworkTable:
    """Return the table of a framework for which plans can be written. Raises InputError."""
    known = {key: table for key, table in load_tables().items() if table.outputs}
    if name not in known:
        raise bad_field("to", name, "is no framework that plans are written for", suggest(name, known).removeprefix("; "))
    return known[name]


def _based(name: str, contents: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return a table merged with its base: keys and rules are joined, other fields override the base."""
    merged = dict(contents[name])
    if "base" not in merged:
        return merged
    base = _based(merged.pop("base"), contents)
    for part in ("keys", "defaults", "let", "files"):
        merged[part] = {**base.get(part, {}), **merged.get(part, {})}
    for part in ("derive", "notes", "refused", "cannot", "lossy"):
        merged[part] = [*merged.get(part, []), *base.get(part, [])]
    merged["harmless"] = f"{merged.get('harmless', '')} {base.get('harmless', '')}"
    return {**{key: value for key, value in base.items() if key not in _OWN}, **merged}


def _table(name: str, content: Mapping[str, Any], common: Mapping[str, Any]) -> FrameworkTable:
    def pairs(field: str) -> tuple[tuple[str, str], ...]:
        entries = content.get(field, ())
        entries = [entries] if isinstance(entries, Mapping) else entries
        return tuple((str(fact), str(rule)) for entry in entries for fact, rule in entry.items())

    def rules(field: str) -> tuple[FactRule, ...]:
        return tuple(FactRule(**entry) for entry in content.get(field, ()))

    keys = {**common["launch_keys"], **content.get("keys", {})}
    return FrameworkTable(
        name=name,
        framework=content["framework"],
        profile=content["profile"],
        source=content["source"],
        serves=content.get("serves", False),
        recognise=tuple(tuple(str(line).split()) for line in content.get("recognise", ())),
        keys={key: _key(entry) for key, entry in keys.items()},
        named_files=tuple(NamedFile(**entry) for entry in content.get("named_files", ())),
        harmless=(*content.get("harmless", "").split(), *common["harmless"].split()),
        defaults=pairs("defaults"),
        derive=pairs("derive") + tuple((fact, rule) for rules_of_fact in common["derive"] for fact, rule in rules_of_fact.items()),
        notes=rules("notes"),
        refused=rules("refused"),
        cannot=rules("cannot"),
        lossy=rules("lossy"),
        outputs=tuple(
            WrittenFile(**{"always": {}, **entry})
            for entry in (content["files"][output] if isinstance(output, str) else output for output in content.get("outputs", ()))
        ),
        launch=content.get("launch", ""),
        let=pairs("let"),
    )


def _key(entry: Any) -> KeyMeaning:
    if entry is None:
        return KeyMeaning()
    if isinstance(entry, str):
        return KeyMeaning(to=entry)
    values = entry.get("values")
    named = None if values is None else {plain(value): meaning for value, meaning in values.items()}
    return KeyMeaning(**{**entry, "values": named})


def plain(value: object) -> str:
    """Return a value as a key of a table's `values`: in lower case, true and false for truth values."""
    return str(value).strip().lower()
