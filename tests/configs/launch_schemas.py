"""Documented schemas of what starts a job, as far as perfmodel writes them: tests/configs/schemas/*.json, with their sources."""

import json
from functools import lru_cache
from pathlib import Path

import pytest
import yaml


@lru_cache
def schema_of(name):
    return json.loads((Path(__file__).parent / "schemas" / f"{name}.json").read_text(encoding="utf-8"))


def check(document, name):
    """Raises jsonschema.ValidationError for a key that the schema does not have and for a value of another type."""
    pytest.importorskip("jsonschema").validate(document, schema_of(name))


def documents_of(exported):
    """The YAML documents of the launch file of an export."""
    document = yaml.safe_load(exported.files[exported.script])
    return document["items"] if document.get("kind") == "List" else [document]
