"""Fields of input files as rows, and their values in words."""

import pytest

from perfmodel.foundation.errors import InputError
from perfmodel.verbs.schemas import schema_of, schema_rows, value_words


def test_fields_of_a_mapping_follow_it():
    rows = list(schema_rows(schema_of("cluster")))
    names = [row["field"] for row in rows]
    index = names.index("tiers")
    assert names[index + 1] == "tiers[].name"
    assert rows[index]["value"] == "list of mappings"
    assert {row["field"] for row in rows if row["required"]} >= {"name", "chip", "tiers", "tiers[].bandwidth"}


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "integer"}, "whole number"),
        ({"type": "array", "items": {"type": "string"}}, "list of texts"),
        ({"enum": ["a", "b"]}, "a, b"),
        ({"enum": list("abcdefghi")}, "a, b, c, d, e, f, g and 2 more"),
        ({"type": "string", "quantity": "flop_rate", "examples": ["3 TFLOP/s"]}, "flop rate, such as 3 TFLOP/s"),
        ({"type": "object", "additionalProperties": {"type": "number"}}, "number, by name"),
        ({"anyOf": [{"type": "boolean"}, {"type": "null"}]}, "true or false"),
        ({"type": "number", "minimum": 0.0, "maximum": 1.0}, "number, 0 to 1"),
        ({"$ref": "#/$defs/Tier"}, "mapping"),
    ],
)
def test_a_value_in_words(schema, words):
    assert value_words(schema) == words


def test_a_kind_that_is_not_known_is_refused():
    with pytest.raises(InputError, match="kind=chp: is not known; did you mean 'chip'"):
        schema_of("chp")
