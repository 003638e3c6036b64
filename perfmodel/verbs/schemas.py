"""Schemas of the files that users write, by kind."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from perfmodel.foundation.errors import bad_field, one_line, suggest
from perfmodel.foundation.schema import FileModel, model_of


def _chip() -> type[FileModel]:
    from perfmodel.hardware.schemas import ChipFile

    return ChipFile


def _cluster() -> type[FileModel]:
    from perfmodel.hardware.schemas import ClusterFile

    return ClusterFile


def _mixed_cluster() -> type[FileModel]:
    from perfmodel.hardware.schemas import MixedClusterFile

    return MixedClusterFile


def _calibration() -> type[FileModel]:
    from perfmodel.hardware.calibration import Calibration

    return model_of(Calibration)


def _chip_spec() -> type[FileModel]:
    from perfmodel.hardware.technology import ChipSpec

    return model_of(ChipSpec)


def _technology() -> type[FileModel]:
    from perfmodel.hardware.technology import Technology

    return model_of(Technology)


def _profile() -> type[FileModel]:
    from perfmodel.frameworks.profile import ExecutionProfile
    from perfmodel.frameworks.schemas import profile_model

    return profile_model(ExecutionProfile)


def _engine() -> type[FileModel]:
    from perfmodel.frameworks.engine import ENGINE_GROUPS, Engine

    return model_of(Engine, inline=tuple(ENGINE_GROUPS))


def _plan() -> type[FileModel]:
    from perfmodel.parallel.schemas import PlanFile

    return PlanFile


def _rule_set() -> type[FileModel]:
    from perfmodel.parallel.schemas import RuleSetFile

    return RuleSetFile


def _study() -> type[FileModel]:
    from perfmodel.verbs.study import study_model

    return study_model()


#: Kind of file -> factory of its model.
KINDS: Mapping[str, Callable[[], type[FileModel]]] = {
    "chip": _chip,
    "cluster": _cluster,
    "mixed-cluster": _mixed_cluster,
    "chip-spec": _chip_spec,
    "technology": _technology,
    "calibration": _calibration,
    "profile": _profile,
    "engine": _engine,
    "plan": _plan,
    "rule-set": _rule_set,
    "study": _study,
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


def field_rows(kind: str) -> Iterator[dict[str, Any]]:
    """Yield field, value, whether it is required, and meaning, of each field of a kind of file; fields of a mapping follow it.

    Raises InputError.
    """
    yield from schema_rows(schema_of(kind))


def schema_rows(schema: Mapping[str, Any], prefix: str = "") -> Iterator[dict[str, Any]]:
    """Yield the rows of `field_rows` for a schema."""
    yield from _rows(schema, schema.get("$defs", {}), prefix)


def _rows(record: Mapping[str, Any], known: Mapping[str, Any], prefix: str) -> Iterator[dict[str, Any]]:
    for name, field in record.get("properties", {}).items():
        required = name in record.get("required", ())
        yield {"field": prefix + name, "value": value_words(field, known), "required": required, "meaning": field.get("description", "")}
        inner, mark = field, ""
        while "$ref" not in inner and ("items" in inner or isinstance(inner.get("additionalProperties"), dict)):
            mark += "[]" if "items" in inner else ".*"
            inner = inner["items"] if "items" in inner else inner["additionalProperties"]
        fields = known[inner["$ref"].rpartition("/")[2]] if "$ref" in inner else inner
        yield from _rows(fields, known, f"{prefix}{name}{mark}.")


def value_words(field: Mapping[str, Any], known: Mapping[str, Any]) -> str:
    """Return the type of a field in words. known: the records of its schema."""
    if "$ref" in field:
        return "mapping"
    if "enum" in field:
        choices = [str(value) for value in field["enum"]]
        return ", ".join(choices[:7]) + (f" and {len(choices) - 7} more" if len(choices) > 7 else "")
    if "quantity" in field:
        return f"{field['quantity'].replace('_', ' ')}, such as {field['examples'][0]}"
    if field.get("type") == "array" and "items" in field:
        items = value_words(field["items"], known)
        return f"list of {items}{'s' * (items in ('text', 'whole number', 'number', 'mapping'))}"
    if field.get("type") == "object" and isinstance(field.get("additionalProperties"), dict):
        return f"{value_words(field['additionalProperties'], known)}, by name"
    if "anyOf" in field:
        return " or ".join(value_words(part, known) for part in field["anyOf"] if part.get("type") != "null")
    kinds = [field["type"]] if isinstance(field.get("type"), str) else field.get("type", ["anything"])
    words = " or ".join(_WORDS.get(kind, kind) for kind in kinds)
    least, most = field.get("minimum"), field.get("maximum")
    return f"{words}, {least:g} to {most:g}" if kinds == ["number"] and most is not None and most < 1e9 else words


_WORDS = {
    "string": "text",
    "integer": "whole number",
    "number": "number",
    "boolean": "true or false",
    "array": "list",
    "object": "mapping",
}
