"""Models by name: configs in the folder `models`, in Hugging Face's form, each with its source.

`_hub_ids` of a config are the Hugging Face hub ids with these sizes: the one that it was read from, then further releases, such as
instruction-tuned ones. They are resolved offline, with or without their owner (`deepseek-r1`). A copy under another owner or with quantised
weights (`unsloth/Qwen3-8B-bnb-4bit`) has the sizes of the id with the same name. `_vision_hub_ids` are vision-language models whose
language model has these sizes; their vision tower is not counted.

Read a Hugging Face `config.json` into a `TransformerConfig`, without `transformers`.

The language-model part of the config is selected, unsupported models are refused, and missing parts are named. `families.json` has the
keys of each family and constants of its code.

A family, or a block that several families share, has entries that are read in order:

base            blocks or families, whose values its own replace
check           key -> [the only value that is modelled, what others are]
window          condition of a sliding window (`family_rules.window`); `_every`: period of the layers without it
adds, layers    functions of `family_rules.py`: further values, and the mixer and feed-forward of each layer
classes         names in `architectures`
text_of         vision-language models whose language model it is, where their text_config does not name it
class_defaults  of the configuration class of transformers 5.23, for nested configs only, which omit values that equal them

All other entries are fields of a config or, nested, of a part of the layers; names that begin with `_` are for the expressions after them.
An entry has a constant, or `KEYS = DEFAULT`:

null                 the key with the name of the field; without a default, a missing key is an error
n_embd|hidden_size   the first present key; all present ones must agree
moe_size or size     the first present key
?n_shared_experts    null is 0
attn_config.alibi    a key inside another
= 4 * hidden_size    no key: names and numbers, from left to right; `/` must leave no rest, and comes after the default of the class

Not counted, because they have no trained parameters and negligible work: constant factors (logit_scale, embedding_multiplier,
residual_multiplier, soft caps), clamps (clip_qkv), normalisation of scores (norm_topk_prob, routed_scaling_factor), load-balancing losses
and the load-balancing bias (e_score_correction_bias, a buffer).
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import fields as fields_of
from functools import lru_cache
from pathlib import Path
from typing import Any

from perfmodel.foundation.errors import InputError, bad_field, suggest
from perfmodel.foundation.files import listed, read_text
from perfmodel.foundation.session import session_cache
from perfmodel.foundation.values import check_path
from perfmodel.workload.config import FIELDS, TransformerConfig, printable
from perfmodel.workload.config_fields import ConfigFields, Values, head_dim_of, layer_parts
from perfmodel.workload.family_rules import LAYERS, RULES, window
from perfmodel.workload.imported.decoder import decoder_of, is_saved_graph, read_graph
from perfmodel.workload.layer_specs import PARTS

_FOLDER = Path(__file__).parent / "models"


_HUB_ID = re.compile(r"[\w-][\w.-]{0,95}/[\w.-]{1,95}", re.ASCII)
#: Suffixes of the names of copies, mostly of quantised weights.
_PACKED = re.compile(
    r"(?:-(?:hf|unsloth|bnb|gptq|awq|nvfp4|mxfp4|fp4|fp8|bf16|fp16|nf4|int4|int8|4bit|8bit|(?:quantized[.])?w[48]a(?:8|16)|dequantized|dynamic))+$"
)


@lru_cache(maxsize=2)
def _hub_ids(key: str) -> dict[str, str]:
    """Return hub id in lower case -> name of the shipped model. key: `_hub_ids` or `_vision_hub_ids`."""
    names = {}
    for path in _FOLDER.glob("*.json"):
        for hub_id in json.loads(path.read_text(encoding="utf-8")).get(key, ()):
            names[hub_id.lower()] = path.stem
    return names


def is_hub_id(value: object) -> bool:
    """Return whether the value is the id of a model on the Hugging Face hub, and not a file or a name."""
    return isinstance(value, str) and _HUB_ID.fullmatch(value) is not None and not Path(value).exists()


def hub_id_of(name: str) -> str:
    """Return the hub id that a shipped model was read from; the name itself if there is none."""
    path = _FOLDER / f"{name}.json"
    if not path.is_file():
        return name
    return str(next(iter(json.loads(path.read_text(encoding="utf-8")).get("_hub_ids", ())), name))


def list_models() -> tuple[str, ...]:
    """Return the model names for `load_model`, in alphabetical order."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.json")))


def load_model(name_or_path: str | Path) -> TransformerConfig:
    """Return a shipped model by name or hub id, or any other model by the path of its config.json or folder."""
    check_path(name_or_path, "model")
    text = str(name_or_path)
    shipped = _FOLDER / f"{text}.json"
    try:
        if Path(text).name == text and shipped.is_file():
            return _shipped_model(text)
        if text and Path(text).exists():
            return read_config(Path(text))
    except (OSError, ValueError) as error:  # a name that is invalid as a path
        if isinstance(error, InputError):
            raise
    has_owner = _HUB_ID.fullmatch(text) is not None
    name = _PACKED.sub("", (text.partition("/")[2] if has_owner else text).lower())
    for ids, left_out in ((_hub_ids("_hub_ids"), ""), (_hub_ids("_vision_hub_ids"), VISION_TOWER)):
        model_name = ids.get(text.lower())
        if model_name is None:  # a copy of the only model with its name
            models = {model for hub_id, model in ids.items() if _PACKED.sub("", hub_id.partition("/")[2]) == name}
            model_name = models.pop() if len(models) == 1 else None
        if model_name is not None:
            return _shipped_model(model_name).having(left_out=left_out)
    shown = text if len(text) <= 80 else text[:77] + "..."
    if text.endswith(".json") or text.startswith((".", "/", "~")):
        raise InputError(f"model={shown}: there is no such file; give a config.json, its folder, or the name of a shipped model")
    if has_owner:
        near = suggest(text.partition("/")[2], list_models())
        raise InputError(f"model={shown}: no shipped model has this hub id; give its config.json{near if 'did you mean' in near else ''}")
    near = suggest(text, list_models())
    remedy = near if "did you mean" in near else "; `perfmodel models` lists them"
    raise InputError(f"model={shown}: no shipped model has this name, and there is no such file{remedy}")


@lru_cache(maxsize=256)
def _shipped_model(name: str) -> TransformerConfig:
    path = _FOLDER / f"{name}.json"
    return model_of(json.loads(path.read_text(encoding="utf-8")), origin=str(path), name=name)


def is_model(name_or_path: str | Path) -> bool:
    """Return whether `load_model` returns a model."""
    try:
        load_model(name_or_path)
    except InputError:
        return False
    return True


# --- config.json --------------------------------------------------------------------------------


def read_config(source: Mapping[str, Any] | str | Path, *, name: str = "") -> TransformerConfig:
    """Return the model of a `config.json`, given as its contents, its path or its folder. Also reads the decoder in a file that `perfmodel
    import --save` wrote."""
    if not isinstance(source, (str, Path)):
        return model_of(source, origin="config", name=name)
    path = Path(source)
    try:
        if path.is_dir():
            path = path / "config.json"
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise InputError(f"{path}: cannot be read ({reason}); give a config.json or the folder that holds it") from None
    text = read_text(path, "config.json or of the folder that holds it")
    return _config_of(text, str(path), name or (path.parent.resolve().name if path.name == "config.json" else path.stem))


@session_cache(maxsize=32)
def _config_of(text: str, path: str, name: str) -> TransformerConfig:
    """Return the model of a file's text; cached, because every prediction reads the same few files."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: is not JSON ({error}); give a Hugging Face config.json") from None
    return model_of(data, origin=path, name=name)


def model_of(data: object, *, origin: str, name: str = "") -> TransformerConfig:
    """Return the model of the contents of a `config.json`. origin: its path in messages and, unless the contents state one, its source."""
    if not isinstance(data, Mapping):
        raise InputError(f"{origin}: must be a JSON object of fields, not {type(data).__name__}; give a Hugging Face config.json")
    if "schema_version" in data and is_saved_graph(data):
        return decoder_of(read_graph(data, where=origin), name=name)
    left_out = " and ".join(part for key, part in _TOWERS.items() if isinstance(data.get(key), Mapping) and data[key])
    nested = data.get("text_config")
    if isinstance(nested, Mapping):  # a vision-language model: only its language model is modelled
        text = dict(nested)
        text.setdefault("tie_word_embeddings", data.get("tie_word_embeddings"))
        text.setdefault("model_type", family_table().family_with("text_of", _text(data, "model_type")) or None)
        model_type = _model_type(text)
        fields = ConfigFields(data=text, model_type=model_type, defaults=family_table().families[model_type].get("class_defaults", {}))
    else:  # older Qwen files have no text_config: the language model's keys are next to the tower's
        model_type = (left_out and family_table().family_with("text_of", _text(data, "model_type"))) or _model_type(data)
        fields = ConfigFields(data=data, model_type=model_type, defaults={})
    _refuse(fields)
    try:
        values = read_family(fields)
    except InputError:
        if not fields.faults:  # otherwise a placeholder may have caused it
            raise
    if fields.faults:
        raise InputError(listed(list(dict.fromkeys(fields.faults))))
    called = name or _text(data, "_name_or_path").rstrip("/").rpartition("/")[2] or model_type
    return TransformerConfig.of(name=called, architecture=model_type, left_out=left_out, source=_text(data, "_source") or origin, **values)


#: Parts of a model other than the language model, by key.
VISION_TOWER = "its vision tower"
_TOWERS: Mapping[str, str] = {"vision_config": VISION_TOWER, "audio_config": "its audio tower"}


def _text(data: Mapping[str, Any], key: str) -> str:
    value = data.get(key)
    return value if isinstance(value, str) else ""


# --- unsupported configs ------------------------------------------------------------------------------------------------

_MOE_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "num_experts_per_tok", "moe_intermediate_size")
_MLA_KEYS = ("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim")
_ENCODER_DECODER = "an encoder with cross-attention to the decoder"


def _refuse(fields: ConfigFields) -> None:
    """Refuse keys that change a decoder of a known family into something else."""
    data, family = fields.data, fields.model_type
    parts = parts_of_family(family)
    for keys, is_read, above in ((_MOE_KEYS, bool(parts), 1), (_MLA_KEYS, "latent" in parts, 0)):
        for key in keys:
            value = data.get(key)
            if not is_read and isinstance(value, (int, float)) and not isinstance(value, bool) and value > above:
                fields.refuse(key, f"model_type={family} has no such key", "name the family that has it, or leave it out")
                break
    if data.get("is_encoder_decoder") is True or data.get("add_cross_attention") is True:
        raise _not_modelled(family, _ENCODER_DECODER)
    for key, lacking in family_table().variants.items():
        if data.get(key) and key != parts.get("latent", {}).get("index_top"):
            fields.refuse(key, f"{lacking} not modelled yet", "only models without are")


def _not_modelled(model_type: str, lacking: str) -> InputError:
    return bad_field("model_type", model_type, f"needs {lacking}, which perfmodel does not model yet", "give another model")


def _model_type(data: Mapping[str, Any]) -> str:
    value = data.get("model_type")
    if value is None:
        names = data.get("architectures")
        first = names[0] if isinstance(names, (list, tuple)) and names else None
        value = (family_table().family_with("classes", first) or None) if isinstance(first, str) else None
        if value is None and isinstance(data.get("_class_name"), str):
            rule = "is a diffusers config, of a network that is no language model"
            remedy = "`perfmodel shard MODULE:FACTORY` takes any torch module"
            raise bad_field("_class_name", data["_class_name"], rule, remedy)
        if value is None:
            known = f"use one of {', '.join(family_table().families)}"
            raise InputError(f"model_type: is missing, and architectures does not tell it either; {known}")
    if not isinstance(value, str):
        raise bad_field("model_type", printable(value), "must be a text", "use one of " + ", ".join(family_table().families))
    if value in family_table().families:
        return value
    unsupported = {prefix: lacking for lacking, prefixes in family_table().unsupported.items() for prefix in prefixes}
    prefix = max((known for known in unsupported if value.startswith(known)), key=len, default="")
    if prefix:
        raise _not_modelled(value, unsupported[prefix])
    raise InputError(f"model_type={value[:80]!r}: there is no reader for this architecture{suggest(value, family_table().families)}")


# --- families -----------------------------------------------------------------------------------------------------------

_SCORES = ("softmax", "sigmoid")
#: Entries of a family that are no values of a config.
_ABOUT = ("about", "classes", "text_of", "class_defaults")
_OPERATORS: Mapping[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "*": operator.mul,
    "/": head_dim_of,
    "//": lambda dividend, divisor: dividend // max(1, divisor),
    ">": operator.gt,
}
_NAMES: Mapping[Any, str] = {int: "int", bool: "bool", float: "float"}
#: Field of a config or of a part -> name of its type.
_TYPES = {name: _NAMES.get(field.type, "text") for name, field in FIELDS.items()} | {"activation": "activation"}


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyTable:
    """Content of `families.json`.

    families     entries by `model_type`
    blocks       entries that families share, by name
    unsupported  text in a refusal -> prefixes of `model_type`, of which the longest match counts
    variants     key of a variant that no family supports -> its meaning
    """

    families: Mapping[str, Mapping[str, Any]]
    blocks: Mapping[str, Mapping[str, Any]]
    unsupported: Mapping[str, Sequence[str]]
    variants: Mapping[str, str]

    def family_with(self, about: str, name: str) -> str:
        """Return the family that has a name in a list of its entry (`classes`, `text_of`); empty: none has."""
        return next((family for family, entry in self.families.items() if name in entry.get(about, ())), "")


@lru_cache(maxsize=1)
def family_table() -> FamilyTable:
    return FamilyTable(**json.loads(Path(__file__).with_name("families.json").read_text(encoding="utf-8")))


@lru_cache(maxsize=256)
def parts_of_family(name: str) -> Mapping[str, Any]:
    """Return the parts that a family or block reads, by name, and `layers` where it assigns them to layers."""
    table = family_table()
    entry = table.blocks.get(name) or table.families[name]
    inherited = {part: spec for base in entry.get("base", []) for part, spec in parts_of_family(base).items()}
    return inherited | {part: entry[part] for part in (*PARTS, "layers") if part in entry}


def read_family(fields: ConfigFields) -> Values:
    """Return the values of a config by its family. Faults are collected in `fields`."""
    values = _values(fields, fields.model_type, {})
    if "_layers" in values:
        values |= layer_parts(values["_layers"], **{part: values[part] for part in PARTS if part in values})
    for name in [*values]:
        if name.startswith("_"):
            del values[name]
    return values


def _values(fields: ConfigFields, name: str, before: Values) -> Values:
    """Return the values of a family or block. before: values that its expressions may name."""
    inherited: Values = {}
    values: Values = {}
    table = family_table()
    for field, spec in (table.blocks.get(name) or table.families[name]).items():
        known = {**before, **inherited, **values}
        if field == "base":
            for base in spec:
                inherited |= _values(fields, base, {**known, **inherited})
        elif field == "check":
            for path, (expected, others) in spec.items():
                of, key = _nested(fields, path)
                of.must_be(key, _evaluated(expected[2:], known) if str(expected).startswith("= ") else expected, others)
        elif field == "adds":
            for rule in spec:
                values |= RULES[rule](fields, {**known, **values})
        elif field == "layers":
            values["_layers"] = LAYERS[spec](fields)
        elif field == "window":
            values |= window(fields, spec, every=known.get("_every", 0))
        elif field in PARTS:
            types = {entry.name: str(entry.type) for entry in fields_of(PARTS[field])}
            part: Values = {}
            for name_in_part, source in spec.items():
                part[name_in_part] = _value(fields, name_in_part, types.get(name_in_part, ""), source, {**known, **part})
            values[field] = fields.record(PARTS[field], **{of: value for of, value in part.items() if of in types})
        elif field not in _ABOUT:
            values[field] = _value(fields, field, _TYPES.get(field, ""), spec, known)
    return inherited | values


def _value(fields: ConfigFields, name: str, kind: str, spec: Any, known: Values) -> Any:
    """Return the value of a field.

    kind   name of its type; empty for a name that only expressions read
    """
    if not isinstance(spec, str | None) or kind == "text":
        return spec
    source, equals, default = map(str.strip, (spec or name).partition("="))
    if not source:
        return _evaluated(default, known)
    first, _, second = source.partition(" or ")
    path = first if not second or fields.has(first) else second
    of, key = _nested(fields, path) if "." in path else (fields, path)
    match kind or default:
        case "bool" | "true" | "false":
            return of.flag(key, default=default == "true")
        case "float":
            return of.share(key, default=float(default or 0.0))
        case "activation":
            return of.activation(key, default=default)
        case "Score":
            return of.choice(key, _SCORES, default=str(_evaluated(default, known)))
    if key.startswith("?"):
        key = key[1:]
        return 0 if key in of.data and not of.has(key) else of.count(key)
    keys = key.split("|")
    if not equals or any(map(of.has, keys)):
        return of.count(*keys)
    if "/" in default.split() and of.defaults.get(key):
        return of.defaults[key]
    return of.count(*keys, default=_evaluated(default, known))


def _nested(fields: ConfigFields, path: str) -> tuple[ConfigFields, str]:
    """Return the keys that a dotted path leads to, and its last name."""
    *outer, last = path.split(".")
    for key in outer:
        fields = fields.nested(key)
    return fields, last


def _evaluated(expression: str, known: Values) -> Any:
    """Return the value of names, words and numbers with operators between them, from left to right."""
    value, combine = None, _OPERATORS["+"]
    for position, word in enumerate(expression.split()):
        if position % 2:
            combine = _OPERATORS[word]
            continue
        term = int(word) if word.isdecimal() else known.get(word, word)
        value = combine(value, term) if position else term
    return value
