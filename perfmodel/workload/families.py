"""Hugging Face model families: the keys of their `config.json`, and constants of their code, as `families.json` has them.

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import fields as fields_of
from functools import lru_cache
from pathlib import Path
from typing import Any

from perfmodel.workload.config import FIELDS
from perfmodel.workload.config_fields import ConfigFields, Values, head_dim_of, layer_parts
from perfmodel.workload.family_rules import LAYERS, RULES, window
from perfmodel.workload.layer_specs import PARTS

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
