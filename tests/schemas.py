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

from perfmodel.verbs.schemas import KINDS, schema_of, value_words

ROOT = Path(__file__).resolve().parents[1]
SCHEMAS, PAGE = ROOT / "docs" / "schemas", ROOT / "docs" / "files.md"
_TABLE = re.compile(r"(<!--fields:([\w-]+)-->\n).*?(<!--/fields-->)", re.DOTALL)


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
        lines.append(f"| `{name}` | {need}{_cell(field, schema)} | {field['description'].replace('|', chr(92) + '|')} |")
    return "\n".join(lines) + "\n"


def _cell(field: dict[str, Any], schema: dict[str, Any]) -> str:
    """Return what a field holds, with the fields of a mapping."""
    if "$ref" not in field:
        return value_words(field, schema.get("$defs", {}))
    record = schema["$defs"][field["$ref"].rpartition("/")[2]]
    return f"mapping of {', '.join(f'`{name}`' for name in record['properties'])}"


def page_text(text: str) -> str:
    """Return a page with the tables as the schemas have them."""
    return _TABLE.sub(lambda found: f"{found[1]}{table(found[2])}{found[3]}", text)


if __name__ == "__main__":
    SCHEMAS.mkdir(exist_ok=True)
    for each in KINDS:
        (SCHEMAS / f"{each}.json").write_text(schema_text(each), encoding="utf-8")
    PAGE.write_text(page_text(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
