"""Shipped files have the schemas of user files; the JSON Schemas and the tables of docs/files.md are current; every field is described."""

from pathlib import Path

import pytest

from perfmodel.foundation.files import read_yaml
from perfmodel.foundation.resources import resource_dir
from perfmodel.foundation.schema import check
from tests.schemas import KINDS, PAGE, SCHEMAS, fields_of, page_text, schema_of, schema_text

FOLDERS = {
    "chip": resource_dir("hardware_specs") / "chips",
    "cluster": resource_dir("hardware_specs") / "clusters",
    "calibration": resource_dir("hardware_specs") / "calibrations",
    "engine": resource_dir("strategies") / "engines",
    "plan": resource_dir("strategies") / "plans",
    "rule-set": resource_dir("strategies") / "rules",
}
FILES = [(kind, path) for kind, folder in FOLDERS.items() for path in sorted(folder.glob("*.yaml"))]


@pytest.mark.parametrize(("kind", "path"), FILES, ids=lambda value: value.stem if isinstance(value, Path) else value)
def test_a_shipped_file_has_the_schema_of_its_kind(kind: str, path: Path) -> None:
    data = read_yaml(path)
    if kind == "engine" and "base" in data:
        data = read_yaml(path.parent / f"{data.pop('base')}.yaml") | data
    check(KINDS[kind], data, where=str(path))


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_has_a_type_and_a_description(kind: str) -> None:
    fields = list(fields_of(schema_of(kind)))
    assert fields
    assert [name for name, field in fields if not field.get("description")] == []
    assert [name for name, field in fields if not field.keys() & {"type", "enum", "$ref", "anyOf"}] == []


@pytest.mark.parametrize("kind", KINDS)
def test_the_json_schema_is_current(kind: str) -> None:
    assert (SCHEMAS / f"{kind}.json").read_text(encoding="utf-8") == schema_text(kind), "run `python -m tests.schemas`"


def test_the_tables_of_fields_are_current() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert page_text(text) == text, "run `python -m tests.schemas`"
