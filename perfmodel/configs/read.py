"""Reader of a framework's configuration as a job and a plan: recognised by its keys, and read by the framework's table."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from perfmodel.configs.adapter_targets import known_model
from perfmodel.configs.expressions import evaluate
from perfmodel.configs.sources import ARGUMENT, PROGRAM, ConfigKeys, read_source
from perfmodel.configs.tables import FrameworkTable, KeyMeaning, load_tables, plain, sentences
from perfmodel.foundation.errors import InputError, first_of, one_line
from perfmodel.foundation.words import words_of
from perfmodel.parallel.framework_ref import SETTING_NAMES
from perfmodel.parallel.knobs import Knobs
from perfmodel.parallel.model_fields import read_model
from perfmodel.parallel.request import Request, Service
from perfmodel.workload.config import FIELDS, TransformerConfig
from perfmodel.workload.layer_specs import Experts, LatentAttention

_MODEL, _EXPERTS, _LATENT = "model.", "experts.", "latent."
#: Placeholder values, which another file or the framework fills in.
_PLACEHOLDERS = (None, "auto", "none", "null", "")
_WHOLE = {*(name for name, knob in words_of(Knobs).items() if knob.kind is int), "chips", "nodes", "chips_per_node", "seq_len"}
_PASSES = 4
#: Most characters of a fact in a sentence, and most keys in a sentence that is not verbose.
_WIDTH, _MOST_KEYS = 60, 12


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigSetup:
    """Job and plan of a configuration, and how it was read.

    files     files that were read
    request   words of a request, of a serving engine also its knobs; knobs: of a training plan
    facts     all facts of the keys and of the framework's rules
    read      key -> fact that it became
    assumed   facts without a key: defaults of the framework, or derived by its rules
    notes     sentences about omissions of the prediction
    unknown   keys that the prediction does not use; harmless: keys known to have no effect
    """

    table: FrameworkTable
    files: tuple[Path, ...]
    request: Mapping[str, Any]
    knobs: Mapping[str, Any]
    facts: Mapping[str, Any]
    read: Mapping[str, str]
    assumed: Mapping[str, Any]
    notes: tuple[str, ...]
    unknown: tuple[str, ...]
    harmless: tuple[str, ...]

    def described(self, *, verbose: bool) -> Iterator[str]:
        """Yield sentences about the reading of a configuration: assumptions, notes and ignored keys."""
        if self.assumed:
            named = ", ".join(f"{name} {_plain(value)}" for name, value in self.assumed.items())
            yield f"{self.table.framework} defaults and what follows from the file: {named}"
        yield from self.notes
        if self.unknown:
            yield f"keys that are not read: {first_of(self.unknown, len(self.unknown) if verbose else _MOST_KEYS)}"
        if self.harmless and verbose:
            yield f"keys without effect on time and memory: {', '.join(self.harmless)}"


def read_setup(path: str | Path, given: Mapping[str, Any] | None = None) -> ConfigSetup:
    """Read the configuration in a file. Raises InputError for an unknown framework.

    given   facts for which the file has no key: chips, seq_len, model, ...
    """
    source = read_source(path)
    table, given = _recognised(source), given or {}
    entries = {key: table.entry(key) for key in source.keys}
    others = [key for key, entry in entries.items() if entry is None and not key.startswith((PROGRAM, ARGUMENT, "env.", "python."))]
    harmless = list(filter(table.is_harmless, others))
    unknown = [key for key in others if key not in harmless]
    facts: dict[str, Any] = {}
    read: dict[str, str] = {}
    for name, meaning in table.keys.items():  # in the order of the table: later keys are more specific
        for key in reversed([key for key, entry in entries.items() if entry == name]):  # the launch line comes first and overrides files
            key_facts = _facts_of_key(source.keys[key], meaning, facts)
            if key_facts is None:
                unknown.append(f"{key}={one_line(source.keys[key], 40)}")
            elif key_facts:
                facts |= key_facts
                read[key] = list(key_facts)[-1]
    notes = list(_read_names(source, table, facts, read))
    shown = {*words_of(Service)} if table.serves else {*words_of(Request, Knobs), *SETTING_NAMES}
    shown -= facts.keys() | given.keys()
    facts = {**given, **facts, **({"model": given["model"]} if given.get("model") is not None else {})}
    _derive(facts, [table.defaults])
    for _ in range(_PASSES):  # until no more facts follow
        before = len(facts)
        if facts.get("model") is not None and f"{_MODEL}num_hidden_layers" not in facts and (model := known_model(facts["model"])):
            facts = {f"{_MODEL}{name}": value for name, value in model.values.items()} | facts
        _derive(facts, table.derive)
        if len(facts) == before:
            break
    for sentence in sentences(table.refused, facts, _WIDTH):
        raise InputError(f"{one_line(source.path, 200)}: {sentence}")
    request, knobs = _words(facts, table)
    return ConfigSetup(
        table=table,
        files=tuple(source.files),
        request=request,
        knobs=knobs,
        facts=facts,
        read=read,
        assumed={name: value for name, value in facts.items() if name in shown},
        notes=tuple(dict.fromkeys([*notes, *sentences(table.notes, facts, _WIDTH)])),
        unknown=tuple(unknown),
        harmless=tuple(harmless),
    )


def _recognised(source: ConfigKeys) -> FrameworkTable:
    """Return the first table with an alternative that the keys meet. Raises InputError if there is none."""
    tables = load_tables().values()
    for table in tables:
        if any(all(_meets(source, condition) for condition in alternative.split()) for alternative in table.recognise):
            return table
    rule = "is neither a plan of perfmodel nor a configuration of a framework that is known"
    raise InputError(
        f"{one_line(source.path, 200)}: {rule}; give a plan, a file that docs/configs.md lists, or --model and the other flags"
    )


def _meets(source: ConfigKeys, condition: str) -> bool:
    name, equals, pattern = condition.partition("=")
    if name == "program":
        return re.search(pattern, str(source.keys.get(PROGRAM, ""))) is not None
    if equals:
        return any(key.endswith(name) and re.search(pattern, str(value)) for key, value in source.keys.items())
    return any(key == name or key.endswith(f".{name}") for key in source.keys)


def _facts_of_key(value: object, key: KeyMeaning, facts: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the facts that follow from the value of one key; None if the table lacks the value."""
    names = {**facts, "value": value}
    if key.values is None:
        meaning = evaluate(key.formula, names) if key.formula else value
        entries = {key.to: meaning} if key.to and value not in _PLACEHOLDERS else {}
    elif (text := plain(value)) in key.values or "*" in key.values:
        entries = dict(key.facts(key.values[text if text in key.values else "*"]))
    else:
        return {} if value in _PLACEHOLDERS else None
    for fact, entry in entries.items():
        if isinstance(entry, str) and entry.startswith("="):
            entry = evaluate(entry[1:], names)
        if fact in _WHOLE and isinstance(entry, float) and entry.is_integer():
            entry = int(entry)
        elif fact in _WHOLE and (isinstance(entry, bool) or not isinstance(entry, int)):
            entry = None
        entries[fact] = entry
    return {fact: entry for fact, entry in entries.items() if entry is not None}


def _read_names(source: ConfigKeys, table: FrameworkTable, facts: dict[str, Any], read: dict[str, str]) -> Iterator[str]:
    """Add the facts of missing files that are known by their names, and yield a note for each. Raises InputError for other files."""
    for key, name in source.missing.items():
        where = f"{key}={one_line(name, 200)}: is not next to {one_line(source.path.name, 80)}"
        sets = next((file["sets"] for file in table.named_files if re.search(file["name"], Path(name).stem, re.IGNORECASE)), None)
        if sets is None:
            raise InputError(f"{where}, and decides how the job is sharded; copy it there")
        for fact, value in sets.items():
            facts.setdefault(fact, value)
            read[key] = fact
        yield f"{where}; read from its name: {', '.join(f'{fact} {_plain(value)}' for fact, value in sets.items())}"


def _derive(facts: dict[str, Any], rules: Iterable[Mapping[str, str]]) -> None:
    """Add each missing fact that the first of its expressions with a value gives."""
    for name, expression in (item for rule in rules for item in rule.items()):
        if name not in facts and (value := evaluate(expression, facts)) is not None:
            facts[name] = value


def _words(facts: Mapping[str, Any], table: FrameworkTable) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the facts that are words of a request, and those that are knobs."""
    if table.serves:
        return {**_given(facts, words_of(Service)), "engine": table.profile}, {}
    without = {"settings", *(["nodes"] if "chips" in facts else [])}
    request = _given(facts, (name for name in words_of(Request) if name not in without))
    request["settings"] = {name: value for name, value in _given(facts, SETTING_NAMES).items() if value is not None}
    request["profile"] = facts.get("profile", table.profile)
    if "model" not in request and (model := _model_of(facts, table)) is not None:
        request["model"] = model
    return request, _given(facts, (name for name in words_of(Knobs) if name not in ("dp", "fsdp")))


def _given(facts: Mapping[str, Any], names: Iterable[str], prefix: str = "") -> dict[str, Any]:
    return {name: facts[f"{prefix}{name}"] for name in names if f"{prefix}{name}" in facts}


def _model_of(facts: Mapping[str, Any], table: FrameworkTable) -> TransformerConfig | None:
    """Return the model that the file describes by its sizes; None if some are missing."""
    values = _given(facts, FIELDS, _MODEL)
    if not {"num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"} <= values.keys():
        return None
    mixer = {}
    if facts.get("latent"):  # its norms are those of the latents
        values["latent"] = _given(facts, (field.name for field in fields(LatentAttention)), _LATENT)
        mixer = {"mixer": "latent"}
        values.pop("qk_norm", None)
    if experts := _given(facts, (field.name for field in fields(Experts)), _EXPERTS):
        values["experts"] = experts
        if dense := facts.get("dense_layers"):
            rest = {"name": "layer", "count": values["num_hidden_layers"] - dense, "feed_forward": "experts"}
            values["kinds"] = [{"name": "dense_layer", "count": dense, **mixer}, {**rest, **mixer}]
    values = {"name": f"{table.name}-model", "architecture": "megatron", "source": f"sizes of a {table.framework} configuration", **values}
    model = read_model(values, "model")
    assert isinstance(model, TransformerConfig)
    return model


def _plain(value: object) -> str:
    return getattr(value, "name", None) or one_line(str(value).lower() if isinstance(value, bool) else value, 60)
