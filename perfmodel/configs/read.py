"""Reader of a framework's configuration as a job and a plan: recognised by its keys, and read by the framework's table."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from perfmodel.configs.adapter_targets import adapter_targets, peft_targets
from perfmodel.configs.expressions import evaluate
from perfmodel.configs.sources import ARGUMENT, PROGRAM, ConfigKeys, keys_text, read_source
from perfmodel.configs.tables import FrameworkTable, KeyMeaning, load_tables, plain
from perfmodel.foundation.errors import InputError, one_line
from perfmodel.foundation.words import words_of
from perfmodel.parallel.framework_ref import SETTING_NAMES
from perfmodel.parallel.knobs import Knobs
from perfmodel.parallel.model_fields import read_model
from perfmodel.parallel.request import Request
from perfmodel.parallel.serving.request import ServingRequest
from perfmodel.workload.config import TransformerConfig
from perfmodel.workload.layer_specs import Experts
from perfmodel.workload.models import list_models, load_model

_MODEL, _EXPERTS = "model.", "experts."
#: Placeholder values, which another file or the framework fills in.
_PLACEHOLDERS = (None, "auto", "none", "null", "")
_WHOLE = {*(name for name, knob in words_of(Knobs).items() if knob.kind is int), "chips", "nodes", "chips_per_node", "seq_len"}
_PASSES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigSetup:
    """Job and plan of a configuration, and how it was read.

    framework     name of the framework; table: name of its table
    files         files that were read
    request       words of a request (of `ServingRequest` for a serving engine); knobs: of a plan
    stage_layers  layers of each virtual stage; empty: the framework's default
    facts         all facts of the keys and of the framework's rules
    read          key -> fact that it became
    assumed       facts without a key: defaults of the framework, or derived by its rules
    notes         sentences about omissions of the prediction
    ignored       keys that the prediction does not use; keys known to have no effect come last
    num_unknown   number of unknown keys among these
    """

    framework: str
    table: str
    serves: bool
    files: tuple[Path, ...]
    request: Mapping[str, Any]
    knobs: Mapping[str, Any]
    stage_layers: tuple[int, ...]
    facts: Mapping[str, Any]
    read: Mapping[str, str]
    assumed: Mapping[str, Any]
    notes: tuple[str, ...]
    ignored: tuple[str, ...]
    num_unknown: int

    @property
    def path(self) -> Path:
        return self.files[0]


def read_setup(path: str | Path, given: Mapping[str, Any] | None = None) -> ConfigSetup:
    """Read the configuration in a file. Raises InputError for an unknown framework.

    given   facts for which the file has no key: chips, seq_len, model, ...
    """
    source = read_source(path)
    table = _recognised(source)
    return setup_of(source, table, given or {})


def _recognised(source: ConfigKeys) -> FrameworkTable:
    """Return the first table with an alternative that the keys meet. Raises InputError if there is none."""
    tables = [table for table in load_tables().values() if any(_meets(source, alternative) for alternative in table.recognise)]
    if not tables:
        known = ", ".join(dict.fromkeys(table.framework for table in load_tables().values()))
        rule = "is neither a plan of perfmodel nor a configuration of a framework that is known"
        raise InputError(f"{one_line(source.path, 200)}: {rule} ({known}); give a plan file, or --model and the other flags")
    return tables[0]


def _meets(source: ConfigKeys, alternative: tuple[str, ...]) -> bool:
    for condition in alternative:
        name, equals, pattern = condition.partition("=")
        if name == "program":
            if not re.search(pattern, source.program):
                return False
        elif equals:
            if not any(key.endswith(name) and re.search(pattern, str(value)) for key, value in source.keys.items()):
                return False
        elif not any(key == name or key.endswith(f".{name}") for key in source.keys):
            return False
    return True


def setup_of(source: ConfigKeys, table: FrameworkTable, given: Mapping[str, Any]) -> ConfigSetup:
    """Return the setup of a source's keys, read by a table."""
    facts: dict[str, Any] = {}
    read: dict[str, str] = {}
    notes: list[str] = []
    unknown: list[str] = []
    harmless: list[str] = []
    by_entry: dict[str, list[str]] = {}
    for key in source.keys:
        entry = table.entry(key)
        if entry is not None:
            by_entry.setdefault(entry[0], []).append(key)
        elif key not in (PROGRAM, ARGUMENT, "python.function") and not key.startswith(("env.", "python.")):
            (harmless if table.is_harmless(key) else unknown).append(key)
    for name, meaning in table.keys.items():  # in the order of the table: later keys are more specific
        for file_key in reversed(by_entry.get(name, ())):  # the launch line comes first and overrides files
            _read_key(file_key, source.keys[file_key], meaning, facts, read, notes, unknown)
    notes += _read_names(source, table, facts, read)
    read_facts = set(facts)
    facts = {**given, **facts, **({"model": given["model"]} if given.get("model") is not None else {})}
    for name, expression in table.defaults:
        if name not in facts and (value := _value(expression, facts)) is not None:
            facts[name] = value
    _derive(facts, table)
    for rule in table.refused:
        if _value(rule.when, facts):
            raise InputError(f"{one_line(source.path, 200)}: {_sentence(rule.say, facts)}")
    notes += [_sentence(rule.say, facts) for rule in table.notes if _value(rule.when, facts)]
    request, knobs = _words(facts, table)
    shown = {*words_of(ServingRequest)} if table.serves else {*words_of(Request), *words_of(Knobs), *SETTING_NAMES}
    assumed = {name: value for name, value in facts.items() if name in shown and name not in read_facts and name not in given}
    return ConfigSetup(
        framework=table.framework,
        table=table.name,
        serves=table.serves,
        files=tuple(source.files),
        request=request,
        knobs=knobs,
        stage_layers=tuple(facts.get("stage_layers") or ()),
        facts=facts,
        read=read,
        assumed=assumed,
        notes=tuple(dict.fromkeys(notes)),
        ignored=(*unknown, *harmless),
        num_unknown=len(unknown),
    )


def _read_key(
    name: str, value: object, key: KeyMeaning, facts: dict[str, Any], read: dict[str, str], notes: list[str], unknown: list[str]
) -> None:
    """Add the facts of one key."""
    if key.values is None and value in _PLACEHOLDERS:
        return
    if key.note and value not in (*_PLACEHOLDERS, False):
        notes.append(_sentence(key.note, {**facts, "value": value, "key": name}))
    if key.values is None:
        meaning: Any = _value(key.formula, {**facts, "value": value}) if key.formula else value
    elif plain(value) in key.values:
        meaning = key.values[plain(value)]
    elif "*" in key.values:
        meaning = key.values["*"]
    else:
        if value not in _PLACEHOLDERS:
            unknown.append(f"{name}={one_line(value, 40)}")
        return
    meanings = meaning if isinstance(meaning, Mapping) and not (key.to and key.values is None) else {key.to: meaning} if key.to else {}
    for fact, entry in meanings.items():
        if isinstance(entry, str) and entry.startswith("="):
            entry = _value(entry[1:], {**facts, "value": value})
        if entry is None or (fact in _WHOLE and not _is_whole(entry)):
            continue
        facts[fact] = int(entry) if fact in _WHOLE else entry
        read[name] = fact


def _read_names(source: ConfigKeys, table: FrameworkTable, facts: dict[str, Any], read: dict[str, str]) -> Iterator[str]:
    """Add the facts of missing files that are known by their names, and yield a note for each. Raises InputError for other files."""
    for key, name in source.missing.items():
        stem = Path(name).stem
        known = next((file for file in table.named_files if re.search(file.name, stem, re.IGNORECASE)), None)
        where = f"{key}={one_line(name, 200)}: is not next to {one_line(source.path.name, 80)}"
        if known is None:
            raise InputError(f"{where}, and decides how the job is sharded; copy it there")
        for fact, value in known.sets.items():
            facts.setdefault(fact, value)
            read[key] = fact
        yield f"{where}; read from its name: {', '.join(f'{fact} {_plain(value)}' for fact, value in known.sets.items())}"


def _is_whole(value: object) -> bool:
    return not isinstance(value, bool) and (isinstance(value, int) or (isinstance(value, float) and value.is_integer()))


def _derive(facts: dict[str, Any], table: FrameworkTable) -> None:
    """Add derived facts until no more follow."""
    for _ in range(_PASSES):
        before = len(facts)
        _add_model(facts)
        for name, expression in table.derive:
            if name not in facts and (value := _value(expression, facts)) is not None:
                facts[name] = value
        if len(facts) == before:
            break


def _add_model(facts: dict[str, Any]) -> None:
    """Add the sizes of a named model, if it is shipped or a file."""
    name = facts.get("model")
    if name is None or f"{_MODEL}num_hidden_layers" in facts:
        return
    try:
        model = name if isinstance(name, TransformerConfig) else load_model(str(name))
    except InputError:
        return
    for field in fields(model):
        facts.setdefault(f"{_MODEL}{field.name}", getattr(model, field.name))


def _value(expression: str, facts: Mapping[str, Any]) -> Any:
    return evaluate(expression, facts, _FUNCTIONS)


def _sentence(text: str, facts: Mapping[str, Any]) -> str:
    return re.sub(r"\{([^{}]+)\}", lambda match: one_line(_value(match[1], facts), 60), text)


def _words(facts: Mapping[str, Any], table: FrameworkTable) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the facts that are words of a request, and those that are knobs."""
    if table.serves:
        words = {name: facts[name] for name in words_of(ServingRequest) if name in facts}
        return {**words, "engine": table.profile}, {}
    request = {name: facts[name] for name in words_of(Request) if name in facts and name != "settings"}
    request["settings"] = {name: facts[name] for name in SETTING_NAMES if name in facts and facts[name] is not None}
    request["profile"] = facts.get("profile", table.profile)
    if "chips" in request:
        request.pop("nodes", None)
    if "model" not in request and (model := _model_of(facts, table)) is not None:
        request["model"] = model
    knobs = {name: facts[name] for name in words_of(Knobs) if name in facts}
    for name in ("dp", "fsdp"):
        knobs.pop(name, None)
    return request, knobs


def _model_of(facts: Mapping[str, Any], table: FrameworkTable) -> TransformerConfig | None:
    """Return the model that the file describes by its sizes; None if some are missing."""
    names = {field.name for field in fields(TransformerConfig)}
    values = {name.removeprefix(_MODEL): value for name, value in facts.items() if name.startswith(_MODEL)}
    values = {name: value for name, value in values.items() if name in names}
    experts = {name.removeprefix(_EXPERTS): value for name, value in facts.items() if name.startswith(_EXPERTS)}
    if experts:
        values["experts"] = {name: value for name, value in experts.items() if name in {field.name for field in fields(Experts)}}
        if dense := facts.get("dense_layers"):
            rest = {"name": "layer", "count": values["num_hidden_layers"] - dense, "feed_forward": "experts"}
            values["kinds"] = [{"name": "dense_layer", "count": dense}, rest]
    if not {"num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"} <= values.keys():
        return None
    values = {"name": f"{table.name}-model", "architecture": "megatron", "source": f"sizes of a {table.framework} configuration", **values}
    model = read_model(values, "model")
    assert isinstance(model, TransformerConfig)
    return model


# --- functions of expressions ---------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _known_models() -> dict[str, str]:
    """Return name of a shipped model without punctuation -> its name."""
    return {re.sub(r"[^a-z0-9]", "", name): name for name in list_models()}


def _shipped(*parts: Any) -> str | None:
    """Return the shipped model with the name of these parts; of a path the last component counts."""
    text = "".join(str(part).rstrip("/").rpartition("/")[2] for part in parts if part is not None).lower()
    text = re.sub(r"[^a-z0-9]", "", text)
    known = _known_models()
    while text not in known:
        shorter = re.sub(r"(hf|instruct|base|chat|thinking|fp8|bf16|fp16|25\d\d|v01|it|pt)$", "", text)
        shorter = re.sub(r"^meta(?=llama)", "", shorter) if shorter == text else shorter
        if shorter == text:
            return None
        text = shorter
    return known[text]


def _found_in(pattern: str, text: object) -> str | None:
    """Return the first group of a pattern in a text."""
    match = re.search(pattern, str(text), re.IGNORECASE)
    return match[1] if match else None


def _counted(text: object) -> int:
    """Return the number of entries of a list with commas: CUDA_VISIBLE_DEVICES=0,1."""
    return len(str(text).split(","))


def _layout(text: object, stages: object = None) -> list[int] | None:
    """Return the layers of each stage of Megatron's layout: `Et*7|t*9|t*9|t*7L`."""
    if not isinstance(text, str):
        return None
    expanded = re.sub(r"\(([^()]*)\)\*(\d{1,3})", lambda match: match[1] * int(match[2]), text)
    expanded = re.sub(r"([a-zA-Z])\*(\d{1,4})", lambda match: match[1] * int(match[2]), expanded)
    return [stage.count("t") for stage in expanded.split("|")]


def _module_layers(names: object) -> list[int] | None:
    """Return the layers of each stage of torchtitan's module_fqns_per_model_part."""
    if not isinstance(names, list) or not all(isinstance(stage, list) for stage in names):
        return None
    return [sum(str(name).startswith("layers.") for name in stage) for stage in names]


def _split_with_ends(layers: Any, stages: Any) -> list[int] | None:
    """Return the layers of each stage with embedding and head counted as a layer each."""
    from perfmodel.parallel.layout import shorter_ends_stage_layers

    return list(shorter_ends_stage_layers(layers, stages)) if stages > 1 else None


def _dense_layers(frequency: object) -> int | None:
    """Return the number of leading dense layers of Megatron's --moe-layer-freq: `([0]*1+[1]*27)`."""
    match = re.match(r"\W*\[0\]\*(\d{1,3})", str(frequency))
    return int(match[1]) if match else None


def _hub(name: object) -> str | None:
    """Return a hub id or path unchanged if its model is known; else the shipped model of this name, if there is one."""
    text = str(name)
    try:
        load_model(text)
    except InputError:
        return _shipped(text) or text
    return text


def _fused_loss(target: object) -> str | None:
    """Return the loss form of NeMo Automodel's loss class."""
    text = str(target).lower()
    return "fused" if "linear" in text else "chunked" if "chunk" in text else None


def _optimizer_named(target: object) -> str | None:
    """Return the optimizer of a class: torch.optim.AdamW."""
    name = str(target).rpartition(".")[2].lower()
    return next((optimizer for optimizer in ("adamw", "adam", "sgd", "muon", "lion", "adafactor") if optimizer in name), None)


_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "shipped": _shipped,
    "hub": _hub,
    "fused_loss": _fused_loss,
    "optimizer_named": _optimizer_named,
    "found": _found_in,
    "counted": _counted,
    "layout": _layout,
    "module_layers": _module_layers,
    "split_with_ends": _split_with_ends,
    "dense_layers": _dense_layers,
    "lower": lambda text: str(text).lower(),
    "adapter_targets": adapter_targets,
    "peft_targets": peft_targets,
    "split": lambda text: str(text).strip("[]").replace("+", ",").split(",") if not isinstance(text, list) else text,
}


def described(setup: ConfigSetup, *, verbose: bool) -> Iterator[str]:
    """Yield sentences about the reading of a configuration: assumptions, notes and ignored keys."""
    if setup.assumed:
        named = ", ".join(f"{name} {_plain(value)}" for name, value in setup.assumed.items())
        yield f"{setup.framework} defaults and what follows from the file: {named}"
    yield from setup.notes
    unknown, harmless = setup.ignored[: setup.num_unknown], setup.ignored[setup.num_unknown :]
    if unknown:
        yield f"keys that are not read: {keys_text(unknown, 10**6 if verbose else 12)}"
    if harmless and verbose:
        yield f"keys without effect on time and memory: {keys_text(harmless, 10**6)}"


def _plain(value: object) -> str:
    return getattr(value, "name", None) or one_line(str(value).lower() if isinstance(value, bool) else value, 60)
