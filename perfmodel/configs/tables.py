"""Tables of keys, one for each framework: strategies/configs/*.yaml. A table has the meaning of each key, and the keys of an exported plan.

Keys mean facts: words of a request (`model`, `seq_len`), knobs (`tp`, `micro_batch`), settings (`compile`), fields of a model
(`model.hidden_size`, `experts.top_k`), and facts from which these are derived (`accumulation`, `nodes`). strategies/configs/common.yaml has
the rules for all frameworks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeAlias

from perfmodel.configs.expressions import evaluate, filled
from perfmodel.foundation.errors import InputError, bad_field, suggest
from perfmodel.foundation.files import read_yaml
from perfmodel.foundation.resources import resource_dir

FactRule: TypeAlias = Mapping[str, str]
"""A condition on facts (`when`), and a sentence with facts in braces (`say`)."""

#: Fields that a table does not inherit from its base.
_OWN = ("recognise", "outputs", "launch", "base")
_COMMON = "common"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyMeaning:
    """Meaning of one key.

    to       fact that has its value; empty: `values` name the facts
    values   value in lower case -> value of the fact, or several facts; None: no effect on time or memory
    formula  expression of `value` and the other facts, in place of the value
    """

    to: str = ""
    values: Mapping[str, Any] | None = None
    formula: str = ""

    @classmethod
    def of(cls, entry: Any) -> KeyMeaning:
        """Return the meaning in a table: a mapping of these fields, or the fact alone."""
        if not isinstance(entry, Mapping):
            return cls(to=entry or "")
        values = entry.get("values")
        return cls(**{**entry, "values": values and {plain(value): meaning for value, meaning in values.items()}})

    def facts(self, meaning: Any) -> Mapping[str, Any]:
        """Return the facts of an entry of `values`."""
        return meaning if isinstance(meaning, Mapping) else {self.to: meaning} if self.to else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenFile:
    """One file of an export.

    name    name of the file; {stem} is the requested name without its ending
    form    toml, yaml, json or python; of the launch line flags, arguments (truth values are written) or overrides (key=value)
    keys    key -> expression of its value; None leaves the key out
    when    condition on the facts under which the file is written
    head    of Python: text before the arguments of the config, with facts in braces
    calls   of Python: section -> function that makes it
    lines   expression of the lines of a file without options
    """

    name: str
    form: str = ""
    keys: Mapping[str, str] = field(default_factory=dict)
    when: str = "True"
    head: str = ""
    calls: Mapping[str, str] = field(default_factory=dict)
    lines: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameworkTable:
    """Table of the configuration of one framework.

    name       name of the file in strategies/configs
    framework  name of the framework for users
    profile    assumed execution profile, or serving engine
    source     documentation of its keys
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
    keys: Mapping[str, KeyMeaning]
    harmless: Sequence[str]
    derive: Sequence[Mapping[str, str]]
    let: Mapping[str, str]
    outputs: Sequence[WrittenFile] = ()
    serves: bool = False
    recognise: Sequence[str] = ()
    defaults: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[FactRule] = ()
    refused: Sequence[FactRule] = ()
    cannot: Sequence[FactRule] = ()
    lossy: Sequence[FactRule] = ()
    named_files: Sequence[Mapping[str, Any]] = ()
    launch: str = ""

    def can_set(self, fact: str, value: object) -> bool:
        """Return whether a key can give a fact this value."""
        for key in self.keys.values():
            if key.to == fact and not key.values:
                return True
            if any(fact in facts and facts[fact] == value for facts in map(key.facts, (key.values or {}).values())):
                return True
        return False

    def entry(self, key: str) -> str | None:
        """Return the table's key for a file's key: the same, or the longest of its last components."""
        parts = key.split(".")
        names = (".".join(parts[start:]) for start in range(len(parts)))
        return next((name for name in names if name in self.keys), None)

    def is_harmless(self, key: str) -> bool:
        return any(re.search(pattern, key) for pattern in self.harmless)


def common_rules() -> Mapping[str, Any]:
    """Return the rules of all frameworks."""
    return _content(_COMMON)


@lru_cache(maxsize=64)
def _content(name: str) -> dict[str, Any]:
    return read_yaml(resource_dir("strategies") / "configs" / f"{name}.yaml")


@lru_cache(maxsize=1)
def load_tables() -> Mapping[str, FrameworkTable]:
    """Return every table by name, in the order in which a configuration is matched."""
    tables = {}
    for name in common_rules()["order"]:
        content = _with_base(name)
        content.pop("base", None)
        files = content.pop("files")
        outputs = (files[output] if isinstance(output, str) else output for output in content.get("outputs", ()))
        content["keys"] = {key: KeyMeaning.of(entry) for key, entry in content["keys"].items()}
        content["harmless"] = content["harmless"].split()
        content["outputs"] = [WrittenFile(**output) for output in outputs]
        tables[name] = FrameworkTable(name=name, **content)
    return tables


def table_named(name: str) -> FrameworkTable:
    """Return the table of a framework for which plans can be written. Raises InputError, which names the files of a profile."""
    known = {key: table for key, table in load_tables().items() if table.outputs}
    if name not in known:
        of_profile = " or ".join(key for key, table in known.items() if table.profile == name)
        remedy = f"use {of_profile}" if of_profile else suggest(name, known).removeprefix("; ")
        raise bad_field("to", name, "is no framework that plans are written for", remedy)
    return known[name]


def _with_base(name: str) -> dict[str, Any]:
    """Return a table merged with its base: keys and rules are joined, other fields override the base."""
    content = _content(name)
    if name == _COMMON:
        return {part: content[part] for part in ("keys", "let", "derive", "harmless")}
    base = _with_base(content.get("base", _COMMON))
    merged = {key: value for key, value in {**base, **content}.items() if key in content or key not in _OWN}
    for part in ("keys", "defaults", "let", "files"):
        merged[part] = {**base.get(part, {}), **content.get(part, {})}
    for part in ("derive", "notes", "refused", "cannot", "lossy"):
        merged[part] = [*content.get(part, []), *base.get(part, [])]
    merged["harmless"] = f"{content.get('harmless', '')} {base['harmless']}"
    return merged


def sentences(rules: Iterable[FactRule], facts: Mapping[str, Any], width: int = 120) -> tuple[str, ...]:
    """Return the sentences of the rules whose condition the facts meet. width: most characters of a fact."""
    return tuple(filled(rule["say"], facts, width) for rule in rules if evaluate(rule["when"], facts))


def names_of(table: str, let: Mapping[str, str], cannot: Iterable[FactRule], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts with the names that a table defines. Raises InputError if its framework or launcher cannot express them."""
    names = dict(facts)
    for name, expression in let.items():
        names[name] = evaluate(expression, names)
    for sentence in sentences(cannot, names):
        raise InputError(f"{table}: {sentence}")
    return names


def plain(value: object) -> str:
    """Return a value as a key of a table's `values`: in lower case, true and false for truth values."""
    return str(value).strip().lower()
