"""Schemas of the files that users write, by kind."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, create_model

from perfmodel.foundation.errors import bad_field, first_of, one_line, shown, suggest
from perfmodel.foundation.schema import OMITTED, FileModel, ReadBy, Text, model_of
from perfmodel.foundation.words import words_of
from perfmodel.frameworks.engine import Engine
from perfmodel.frameworks.profile import ExecutionProfile
from perfmodel.frameworks.schemas import profile_model
from perfmodel.hardware.calibration import Calibration
from perfmodel.hardware.schemas import ChipFile, ClusterFile, MixedClusterFile
from perfmodel.hardware.technology import ChipSpec, Technology
from perfmodel.parallel.knobs import Knobs
from perfmodel.parallel.request import Request
from perfmodel.parallel.schemas import PlanFile, RuleSetFile, ServingPlanFile
from perfmodel.verbs.study import study_model

_LONGEST_VALUE = 200


def _read_value(value: object, field: str) -> None:
    if not isinstance(value, str | int | float):
        raise bad_field(field, shown(value), "must be a text, a number or true or false", "give one value")
    if isinstance(value, str) and len(value) > _LONGEST_VALUE:
        raise bad_field(field, shown(value), f"is longer than {_LONGEST_VALUE} characters", "give a name")


_Value = Annotated[Any, ReadBy(_read_value, {"type": ["string", "number", "boolean"]})]

#: Fields of a request of the web page that are no words of a verb -> type and meaning.
_PAGE_FIELDS: Mapping[str, tuple[Any, str]] = {
    "config": (Text, "text of a config.json, a framework's configuration or a plan"),
    "remedies": (bool, "with `predict`: also the smallest changes that fit"),
    "objective": (Text, "with `search`: what is best"),
    "top": (_Value, "with `search`: number of plans"),
    "any_framework": (bool, "with `search`: also plans that the framework cannot run"),
}


@cache
def request_model() -> type[FileModel]:
    """Return the model of a request of the web page: the words of `predict` and `search` with one value each, and `_PAGE_FIELDS`."""
    words = {**words_of(Request), **words_of(Knobs)}
    fields: dict[str, Any] = {name: (_Value, Field(OMITTED, description=word.help)) for name, word in words.items()}
    fields |= {name: (kind, Field(OMITTED, description=about)) for name, (kind, about) in _PAGE_FIELDS.items()}
    return create_model("RequestFile", __base__=FileModel, __doc__="A request of the web page.", **fields)


#: Kind of file -> factory of its model.
KINDS: Mapping[str, Callable[[], type[FileModel]]] = {
    "chip": lambda: ChipFile,
    "cluster": lambda: ClusterFile,
    "mixed-cluster": lambda: MixedClusterFile,
    "chip-spec": lambda: model_of(ChipSpec),
    "technology": lambda: model_of(Technology),
    "calibration": lambda: model_of(Calibration),
    "profile": lambda: profile_model(ExecutionProfile),
    "engine": lambda: model_of(Engine),
    "plan": lambda: PlanFile,
    "serving-plan": lambda: ServingPlanFile,
    "rule-set": lambda: RuleSetFile,
    "study": study_model,
    "case": lambda: import_module("perfmodel.validation.schemas").TrainingCaseFile,  # the web page has no such package
    "serving-case": lambda: import_module("perfmodel.validation.schemas").ServingCaseFile,
    "request": request_model,
    "measured-run": lambda: import_module("perfmodel.fitting.schemas").MeasuredRunFile,
}
DRAFT = "https://json-schema.org/draft/2020-12/schema"
#: Verb -> JSON Schema of its `--json` output, inferred from examples by `python -m tests.schemas`.
OUTPUTS = Path(__file__).with_name("output_schemas.json")


def output_schema(verb: str) -> dict[str, Any]:
    """Return the JSON Schema of a verb's `--json` output; of verbs that measure or run a plan an object without named fields."""
    known: dict[str, dict[str, Any]] = json.loads(OUTPUTS.read_text(encoding="utf-8"))
    return known.get(verb, {"type": "object"})


def model_of_kind(kind: str) -> type[FileModel]:
    """Return the model of a kind of file. Raises InputError."""
    if kind not in KINDS:
        raise bad_field("kind", one_line(kind), f"is not known{suggest(kind, KINDS)}", f"use {', '.join(KINDS)}")
    return KINDS[kind]()


def schema_of(kind: str) -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a kind of file (`KINDS`). An optional field without a default has no default in the schema.

    Raises InputError.
    """
    schema = model_of_kind(kind).model_json_schema()
    for fields in (record.get("properties", {}) for record in (schema, *schema.get("$defs", {}).values())):
        for field in fields.values():
            if field.get("default", 0) is None:
                del field["default"]
    return {"$schema": DRAFT, **schema}


def schema_rows(record: Mapping[str, Any], prefix: str = "", known: Mapping[str, Any] | None = None) -> Iterator[dict[str, Any]]:
    """Yield field, value, whether it is required, and meaning, of each field of a schema; fields of a mapping follow it.

    known   records of the schema; None: the record has them
    """
    known = record.get("$defs", {}) if known is None else known
    for name, field in record.get("properties", {}).items():
        required = name in record.get("required", ())
        yield {"field": prefix + name, "value": value_words(field), "required": required, "meaning": field.get("description", "")}
        inner, mark = field, ""
        while "$ref" not in inner and ("items" in inner or isinstance(inner.get("additionalProperties"), dict)):
            mark += "[]" if "items" in inner else ".*"
            inner = inner["items"] if "items" in inner else inner["additionalProperties"]
        fields = known[inner["$ref"].rpartition("/")[2]] if "$ref" in inner else inner
        yield from schema_rows(fields, f"{prefix}{name}{mark}.", known)


def value_words(field: Mapping[str, Any]) -> str:
    """Return the type of a field in words."""
    if "$ref" in field:
        return "mapping"
    if "enum" in field:
        return first_of([str(value) for value in field["enum"]], 7)
    if "quantity" in field:
        return f"{field['quantity'].replace('_', ' ')}, such as {field['examples'][0]}"
    if field.get("type") == "array" and "items" in field:
        items = value_words(field["items"])
        return f"list of {items}{'s' * (items in ('text', 'whole number', 'number', 'mapping'))}"
    if field.get("type") == "object" and isinstance(field.get("additionalProperties"), dict):
        return f"{value_words(field['additionalProperties'])}, by name"
    if "anyOf" in field:
        return " or ".join(value_words(part) for part in field["anyOf"] if part.get("type") != "null")
    kinds = [field["type"]] if isinstance(field.get("type"), str) else field.get("type", ["anything"])
    words = " or ".join(_WORDS.get(kind, kind) for kind in kinds)
    least, most = field.get("minimum"), field.get("maximum")
    return f"{words}, {least:g} to {most:g}" if kinds == ["number"] and most is not None and most < 1e9 else words


_WORDS = {"string": "text", "integer": "whole number", "number": "number", "boolean": "true or false", "array": "list", "object": "mapping"}
