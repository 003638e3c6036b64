"""The JSON Schema of every kind of file that people write and of what commands print, and the tables of docs/files.md.

    python -m tests.schemas               # write docs/schemas/*.json, perfmodel/verbs/output_schemas.json and the tables

A page has a table between `<!--fields:KIND-->` and `<!--/fields-->`. A contract test compares both.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from perfmodel.cli.app import run
from perfmodel.verbs.schemas import KINDS, OUTPUTS, schema_of, value_words

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
        return value_words(field)
    record = schema["$defs"][field["$ref"].rpartition("/")[2]]
    return f"mapping of {', '.join(f'`{name}`' for name in record['properties'])}"


def page_text(text: str) -> str:
    """Return a page with the tables as the schemas have them."""
    return _TABLE.sub(lambda match: f"{match[1]}{table(match[2])}{match[3]}", text)


_JOB = "--model gpt2 --cluster dgx-h100 --chips 8 --global-batch 16 --seq-len 1k"
_LOAD = "--model llama-3-8b --cluster dgx-h100 --chips 1 --input-len 512 --output-len 64 --concurrency 8"
#: verb -> command lines whose objects its schema describes; a field is required where all of them have it.
OUTPUT_EXAMPLES = {
    "predict": (f"predict {_JOB} --tp 2", f"predict {_JOB} --tokens 1T --interval", f"predict {_JOB} --tp 1,2"),
    "search": (
        f"search {_JOB} --top 2",
        f"search {_JOB} --top 2 --tokens 1T --objective cost",
        f"search {_JOB} --tp 1 --tokens 10B --by 30d",
    ),
    "serve": (f"serve {_LOAD}",),
    "limits": (f"limits {_JOB} --recompute none",),
    "explore": (f"explore {_JOB} --tp 2 --vary chip.memory.bandwidth=2..4TB/s --points 2",),
    "sweep": ("sweep llama-3-8b-memory --out results.csv --jobs 1",),
    "explain": ("explain ddp --why-not tp=2",),
    "advise": ("advise ddp",),
    "compare": ("compare ddp fsdp",),
    "export": ("export fsdp --to torchtitan",),
    "trace": ("trace ddp --out trace.json", "trace --measured trace.json --plan ddp"),
    "report": ("report ddp --out report.html",),
    "shard": ("shard alexnet --cluster dgx-h100 --chips 4",),
    "doctor": ("doctor",),
    "schema": ("schema rule-set",),
    **{
        kind: (f"{kind} {name}".rstrip(),)
        for kind, name in (
            ("chips", "h100-sxm-80gb"), ("clusters", "dgx-h100"), ("models", "gpt2"), ("networks", ""), ("profiles", "megatron"),
            ("engines", "vllm"), ("assumptions", ""), ("calibrations", "h100"), ("chip", "--from a100-spec"),
        )
    },
}  # fmt: skip


_MOST_ALIKE = 6  # fields of one type; more are names of a mapping


def inferred(values: list[Any]) -> dict[str, Any]:
    """Return the schema of values that examples have."""
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null", list: "array", dict: "object"}
    types = sorted({kinds[type(value)] for value in values} or {"null"})
    types = [kind for kind in types if kind != "integer" or "number" not in types]
    schema: dict[str, Any] = {"type": types[0] if len(types) == 1 else types}
    if "array" in types:
        items = [item for value in values if isinstance(value, list) for item in value]
        schema |= {"items": inferred(items)} if items else {}
    if "object" in types:
        records = [value for value in values if isinstance(value, dict)]
        names = list(dict.fromkeys(name for record in records for name in record))
        properties = {name: inferred([record[name] for record in records if name in record]) for name in names}
        alike = [item_schema for i, item_schema in enumerate(properties.values()) if item_schema not in list(properties.values())[:i]]
        if len(names) > _MOST_ALIKE and len(alike) == 1:
            return schema | {"additionalProperties": alike[0]}
        schema["properties"] = properties
        schema["required"] = [name for name in names if all(name in record for record in records)]
    return schema


def example_objects(verb: str) -> list[Any]:
    """Return what the examples of a verb print with --json, in the working folder."""
    documents = []
    for line in OUTPUT_EXAMPLES[verb]:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            code = run([*shlex.split(line), "--json"])
        assert code == 0, line
        documents.append(json.loads(out.getvalue()))
    return documents


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        outputs = {verb: inferred(example_objects(verb)) for verb in OUTPUT_EXAMPLES}
    OUTPUTS.write_text(json.dumps(outputs, separators=(",", ":"), ensure_ascii=False) + "\n", encoding="utf-8")
    SCHEMAS.mkdir(exist_ok=True)
    for kind in KINDS:
        (SCHEMAS / f"{kind}.json").write_text(schema_text(kind), encoding="utf-8")
    PAGE.write_text(page_text(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
