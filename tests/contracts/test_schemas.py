"""Shipped files have the schemas of user files; the JSON Schemas and the tables of docs/files.md are current; every field is described."""

import gzip
import json
from pathlib import Path

import pytest

from perfmodel.foundation.files import read_yaml
from perfmodel.foundation.resources import resource_dir
from perfmodel.foundation.schema import check
from perfmodel.frameworks.shipped import flattened, framework_names, shipped_fields
from perfmodel.validation.measured import is_serving
from perfmodel.verbs.schemas import KINDS, model_of_kind, schema_of
from tests.schemas import PAGE, SCHEMAS, fields_of, page_text, schema_text

GOLDEN = Path(__file__).parents[1] / "golden"
FOLDERS = {
    "chip": resource_dir("hardware_specs") / "chips",
    "cluster": resource_dir("hardware_specs") / "clusters",
    "chip-spec": resource_dir("hardware_specs") / "chip_specs",
    "technology": resource_dir("hardware_specs") / "technology",
    "calibration": resource_dir("hardware_specs") / "calibrations",
    "engine": resource_dir("strategies") / "engines",
    "plan": resource_dir("strategies") / "plans",
    "rule-set": resource_dir("strategies") / "rules",
    "study": resource_dir("strategies") / "studies",
}
FILES = [(kind, path) for kind, folder in FOLDERS.items() for path in sorted(folder.glob("*.yaml"))]


@pytest.mark.parametrize(("kind", "path"), FILES, ids=lambda value: value.stem if isinstance(value, Path) else value)
def test_a_shipped_file_has_the_schema_of_its_kind(kind: str, path: Path) -> None:
    data = read_yaml(path)
    if kind == "engine" and "base" in data:
        data = read_yaml(path.parent / f"{data.pop('base')}.yaml") | data
    check(model_of_kind(kind), data, where=str(path))


@pytest.mark.parametrize("name", framework_names())
def test_a_shipped_framework_has_the_schema_of_a_profile(name: str) -> None:
    fields = flattened(shipped_fields(name) or {}, where=name)
    check(model_of_kind("profile"), fields, where=name)


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.jsonl.gz")), ids=lambda path: path.name)
def test_the_lines_of_published_runs_have_the_schema_of_a_case(path: Path) -> None:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for case in map(json.loads, filter(str.strip, lines)):
            check(model_of_kind("serving-case" if is_serving(case) else "case"), case, where=str(case["id"]))


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
