"""What a file may hold: each thing that is wrong has a sentence with field, value, rule and remedy."""

import pytest

from perfmodel.foundation.errors import InputError
from perfmodel.foundation.shapes import check_shape, count, list_of, map_of, number, one_of, quantity, record, text, yes_or_no

SHAPE = record(
    {"name": text(), "rate": quantity("bandwidth")},
    {
        "chips": count(64),
        "share": number(0, 1),
        "ring": yes_or_no(),
        "kind": one_of(["a", "b"]),
        "sizes": list_of(count(), least=1, most=3),
        "facts": map_of(record({"source": text(may_be_empty=True)})),
    },
)
GOOD = {"name": "x", "rate": "1 GB/s", "chips": 8, "share": 1, "ring": True, "kind": "a", "sizes": [1, 2], "facts": {"y": {"source": ""}}}


def test_what_has_the_shape_is_handed_on():
    assert check_shape(GOOD, SHAPE, where="f") is GOOD


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("name", "", "name='': must not be empty; write a text"),
        ("name", 5, "name=5: must be a text; write '5' in quotes"),
        ("name", None, "name=None: must be a text; write one text"),
        ("rate", 450, "rate=450: a bandwidth needs its unit; write '450 GB/s'"),
        ("chips", 0, "chips=0: must be at least 1"),
        ("chips", 65, "chips=65: must be at most 64"),
        ("chips", True, "chips=True: must be a whole number"),
        ("chips", 8.0, "chips=8.0: must be a whole number"),
        ("share", float("nan"), "share=nan: must be from 0 to 1"),
        ("share", "1", "share='1': must be a number"),
        ("ring", 1, "ring=1: must be true or false"),
        ("kind", ["a"], r"kind=\['a'\]: must be one of a, b"),
        ("sizes", [], r"sizes=\[\]: must have from 1 to 3 entries, not 0"),
        ("sizes", [1, "2"], "sizes.1='2': must be a whole number"),
        ("facts", {}, "facts={}: must not be empty"),
        ("facts", {"y": 3}, "facts.y=3: must be a mapping; write a line 'name: value' for each entry"),
        ("facts", {7: {"source": ""}}, "facts.7=7: must be a text"),
        ("chps", 3, "chps: unknown field; did you mean 'chips'"),
    ],
)
def test_what_is_wrong_is_a_sentence(field, value, sentence):
    with pytest.raises(InputError, match=f"^f: {sentence}"):
        check_shape({**GOOD, field: value}, SHAPE, where="f")


def test_a_misspelt_field_comes_before_the_one_that_it_should_be():
    with pytest.raises(InputError, match=r"^f: 2 faults: \(1\) nam: unknown field; did you mean 'name'\?; \(2\) name: required field"):
        check_shape({"rate": "1 GB/s", "nam": "x"}, SHAPE, where="f")
    with pytest.raises(InputError, match=r"^f: file=3: must be a mapping"):
        check_shape(3, SHAPE, where="f")
