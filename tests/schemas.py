"""The JSON Schema of every kind of file that people write, and the tables of docs/files.md.

    python -m tests.schemas               # write docs/schemas/*.json and the tables

A page has a table between `<!--fields:KIND-->` and `<!--/fields-->`. A contract test compares both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from perfmodel.foundation.schema import FileModel, model_of
from perfmodel.frameworks.engine import ENGINE_GROUPS, Engine
from perfmodel.hardware.calibration import Calibration
from perfmodel.hardware.schemas import ChipFile, ClusterFile
from perfmodel.parallel.schemas import PlanFile, RuleSetFile

ROOT = Path(__file__).resolve().parents[1]
SCHEMAS, PAGE = ROOT / "docs" / "schemas", ROOT / "docs" / "files.md"
KINDS: dict[str, type[FileModel]] = {
    "chip": ChipFile,
    "cluster": ClusterFile,
    "calibration": model_of(Calibration),
    "engine": model_of(Engine, inline=tuple(ENGINE_GROUPS)),
    "plan": PlanFile,
    "rule-set": RuleSetFile,
}
_TABLE = re.compile(r"(<!--fields:(\w+)-->\n).*?(<!--/fields-->)", re.DOTALL)


def schema_of(kind: str) -> dict[str, Any]:
    """Return the JSON Schema of a kind of file. A field that may be left out and has no default has none in the schema."""
    schema = KINDS[kind].model_json_schema()
    for fields in (record.get("properties", {}) for record in (schema, *schema.get("$defs", {}).values())):
        for field in fields.values():
            if field.get("default", 0) is None:
                del field["default"]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def schema_text(kind: str) -> str:
    return json.dumps(schema_of(kind), indent=1, ensure_ascii=False) + "\n"


def fields_of(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Return every field of a schema with its path, those of nested records included."""
    for owner, record in (("", schema), *schema.get("$defs", {}).items()):
        for name, field in record.get("properties", {}).items():
            yield f"{owner}.{name}".strip("."), field


def table(kind: str) -> str:
    """Return the fields of a kind of file as a Markdown table."""
    schema = schema_of(kind)
    lines = ["| field | value | content |", "|---|---|---|"]
    for name, field in schema["properties"].items():
        need = "" if name in schema.get("required", ()) else "optional, "
        lines.append(f"| `{name}` | {need}{_value(field, schema)} | {field['description'].replace('|', chr(92) + '|')} |")
    return "\n".join(lines) + "\n"


def _value(field: dict[str, Any], schema: dict[str, Any]) -> str:
    """Return what a field holds, in words."""
    if "$ref" in field:
        record = schema["$defs"][field["$ref"].rpartition("/")[2]]
        names = ", ".join(f"`{name}`" for name in record["properties"])
        return f"mapping of {names}"
    if "enum" in field:
        return " / ".join(f"`{value}`" for value in field["enum"]) if len(field["enum"]) < 8 else "name"
    if "quantity" in field:
        return f"{field['quantity'].replace('_', ' ')}, such as `{field['examples'][0]}`"
    if field.get("type") == "array":
        return f"list: {_value(field['items'], schema)}"
    if field.get("type") == "object" and "additionalProperties" in field:
        return f"mapping of names: {_value(field.get('additionalProperties', {}), schema)}"
    if "anyOf" in field:
        return _value(next(part for part in field["anyOf"] if part.get("type") != "null"), schema)
    kinds = [field["type"]] if isinstance(field["type"], str) else field["type"]
    return " or ".join(_WORDS[kind] for kind in kinds)


_WORDS = {
    "string": "text",
    "integer": "whole number",
    "number": "number",
    "boolean": "true or false",
    "array": "list",
    "object": "mapping",
}


def page_text(text: str) -> str:
    """Return a page with the tables as the schemas have them."""
    return _TABLE.sub(lambda found: f"{found[1]}{table(found[2])}{found[3]}", text)


if __name__ == "__main__":
    SCHEMAS.mkdir(exist_ok=True)
    for each in KINDS:
        (SCHEMAS / f"{each}.json").write_text(schema_text(each), encoding="utf-8")
    PAGE.write_text(page_text(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
