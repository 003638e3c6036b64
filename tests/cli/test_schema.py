"""`perfmodel schema` from outside: what commands take and print."""

import json

import pytest

from perfmodel.cli.app import VERBS
from perfmodel.cli.schema import command_schema
from tests.schemas import OUTPUT_EXAMPLES, example_objects

QUICK = ("predict", "compare", "trace", "doctor", "chips", "schema", "assumptions")


def fits(schema, value):
    """Whether a value has the type, the required fields and the known fields of a schema, at every level."""
    kinds = {"boolean": bool, "integer": int, "number": (int, float), "string": str, "null": type(None), "array": list, "object": dict}
    types = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
    if not any(isinstance(value, kinds[kind]) for kind in types):
        return False
    if isinstance(value, list):
        return all(fits(schema["items"], item) for item in value)
    if not isinstance(value, dict):
        return True
    known, others = schema.get("properties", {}), schema.get("additionalProperties")
    inside = all(fits(known.get(name, others), member) for name, member in value.items() if name in known or others)
    return inside and set(schema.get("required", ())) <= set(value)


@pytest.mark.parametrize("verb", VERBS)
def test_every_option_of_a_command_is_described(verb):
    described = command_schema(verb)
    assert described["output"]["type"] == "object"
    for name, field in described["input"]["properties"].items():
        assert field["description"], name
        assert field["type"] in ("string", "integer", "number", "boolean", "array")
    serves = verb in ("web", "mcp")  # which answer a browser or an agent
    assert serves or {"json", "format"} <= set(described["input"]["properties"])


@pytest.mark.parametrize("verb", QUICK)
def test_what_a_command_prints_has_its_schema(verb):
    schema = command_schema(verb)["output"]
    assert all(fits(schema, printed) for printed in example_objects(verb))
    assert not fits(schema, {})


def test_commands_that_are_described_are_commands():
    assert set(OUTPUT_EXAMPLES) <= set(VERBS)


def test_the_text_lists_options_and_fields(call):
    code, out, err = call("schema", "predict")
    assert (code, err) == (0, "")
    assert "--global-batch" in out
    assert "step_time" in out
    assert json.loads(call("schema", "chip", "--command", "--json")[1])["command"] == "chip"
    assert call("schema", "chip")[1].startswith("Fields of a chip file")


@pytest.mark.parametrize(("arguments", "sentence"), [(["predikt"], "did you mean 'predict'"), (["plan", "--command"], "kind=plan")])
def test_other_names_are_refused(call, arguments, sentence):
    code, out, err = call("schema", *arguments)
    assert (code, out) == (2, "")
    assert sentence in err
    assert err.count("\n") == 1
