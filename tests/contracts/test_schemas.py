"""Every shipped file passes the schema that files of users have to pass; every field has a type and a meaning."""

from pathlib import Path

import pytest

from perfmodel.foundation.files import read_yaml
from perfmodel.foundation.resources import resource_dir
from perfmodel.foundation.schemas import check_file, field_rows, json_schema
from perfmodel.frameworks.shipped import flattened, framework_names, shipped_fields
from perfmodel.verbs.schemas import KINDS, model_of_kind

_HARDWARE = {"chips": "chip", "clusters": "cluster", "calibrations": "calibration"}
FILES = [
    *((path, kind) for folder, kind in _HARDWARE.items() for path in sorted((resource_dir("hardware_specs") / folder).glob("*.yaml"))),
    *((path, "engine") for path in sorted((resource_dir("strategies") / "engines").glob("*.yaml"))),
]


@pytest.mark.parametrize(("path", "kind"), FILES, ids=lambda each: each.stem if isinstance(each, Path) else each)
def test_a_shipped_file_passes(path, kind):
    data = read_yaml(path)
    if "base" in data:  # of an engine: the rest is its base's
        data = read_yaml(path.with_name(f"{data['base']}.yaml")) | data
    check_file(data, model_of_kind(kind), where=path.name)


@pytest.mark.parametrize("name", framework_names())
def test_a_shipped_framework_passes(name):
    fields = flattened(shipped_fields(name), where=name)
    check_file({key: value for key, value in fields.items() if key != "base"}, model_of_kind("profile"), where=name)


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_has_a_type_and_a_meaning(kind):
    rows = list(field_rows(model_of_kind(kind)))
    assert rows
    assert [row.name for row in rows if not row.says] == []
    assert [row.name for row in rows if row.kind in ("", "anything", "object")] == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_schema_refuses_fields_that_it_does_not_know(kind):
    schema = json_schema(model_of_kind(kind))
    assert schema["additionalProperties"] is False
    assert all(each.get("additionalProperties") is False for each in schema.get("$defs", {}).values() if each.get("type") == "object")
