"""What a file may hold: each thing that is wrong has a sentence with field, value, rule and remedy; JSON Schema and tables of fields."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from perfmodel.foundation.errors import InputError
from perfmodel.foundation.schemas import (
    check_file,
    count,
    field_rows,
    file_model,
    json_schema,
    list_of,
    map_of,
    model_of,
    number,
    one_of,
    quantity,
    quantity_or_number,
    text,
)

MODEL = file_model(
    "Thing",
    {"name": (text(), "its name"), "rate": (quantity("bandwidth"), "how fast")},
    {
        "chips": (count(64), "how many"),
        "share": (number(0, 1), "a share"),
        "ring": (bool, "whether it is one"),
        "kind": (one_of(["a", "b"]), "which"),
        "sizes": (list_of(count(), least=1, most=3), "some sizes"),
        "facts": (map_of(file_model("Fact", {"source": (text(may_be_empty=True), "from where")})), "by name"),
        "host_time": (quantity_or_number("time", 0, 10), "a time"),
    },
)
GOOD = {"name": "x", "rate": "1 GB/s", "chips": 8, "share": 1, "ring": True, "kind": "a", "sizes": [1, 2], "facts": {"y": {"source": ""}}}


def test_what_fits_the_model_is_handed_on():
    assert check_file(GOOD, MODEL, where="f") is GOOD


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("name", "", "name='': must not be empty; write a text"),
        ("name", 5, "name=5: must be a text; write '5' in quotes"),
        ("name", None, "name=None: must be a text; write one text"),
        ("rate", 450, "rate=450: a bandwidth needs its unit; write '450 GB/s'"),
        ("rate", "3 GB", "rate='3 GB': "),
        ("chips", 0, "chips=0: must be at least 1"),
        ("chips", 65, "chips=65: must be at most 64"),
        ("chips", True, "chips=True: must be a whole number"),
        ("chips", 8.0, "chips=8.0: must be a whole number"),
        ("chips", None, "chips=None: must be a whole number"),
        ("share", float("nan"), "share=nan: must be a number from 0 to 1"),
        ("share", "1", "share='1': must be a number"),
        ("ring", 1, "ring=1: must be true or false"),
        ("kind", ["a"], r"kind=\['a'\]: must be one of a, b"),
        ("sizes", [], r"sizes=\[\]: must have at least 1 entry, not 0"),
        ("sizes", 3, "sizes=3: must be a list; write a list"),
        ("sizes", [1, "2"], "sizes.1='2': must be a whole number"),
        ("facts", {}, "facts={}: must not be empty"),
        ("facts", {"y": 3}, "facts.y=3: must be a mapping; write a line 'name: value' for each entry"),
        ("facts", {7: {"source": ""}}, "facts.7=7: must be a text"),
        ("facts", {"y": {"sauce": "", "source": ""}}, "facts.y.sauce: unknown field; did you mean 'source'"),
        ("host_time", "3 GB", "host_time='3 GB': unknown time unit"),
        ("host_time", 11, "host_time=11: must be a number from 0 to 10"),
        ("chps", 3, "chps: unknown field; did you mean 'chips'"),
    ],
)
def test_what_is_wrong_is_a_sentence(field, value, sentence):
    with pytest.raises(InputError, match=f"^f: {sentence}"):
        check_file({**GOOD, field: value}, MODEL, where="f")


def test_a_misspelt_field_comes_before_the_one_that_it_should_be():
    with pytest.raises(InputError, match=r"^f: 2 faults: \(1\) nam: unknown field; did you mean 'name'\?; \(2\) name: required field"):
        check_file({"rate": "1 GB/s", "nam": "x"}, MODEL, where="f")
    with pytest.raises(InputError, match=r"^f: file=3: must be a mapping"):
        check_file(3, MODEL, where="f")


@dataclass(frozen=True, kw_only=True)
class Inner:
    """A part.

    rate_fraction   share of the rate that it reaches,
                    large sizes   [-]
    """

    rate_fraction: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Outer:
    """A whole.

    floor_time, ramp_time   what it takes   [s]
    parts                   by name
    pairs                   two numbers each
    """

    floor_time: float
    ramp_time: float = 0.0
    parts: Mapping[str, Inner] = field(default_factory=dict)
    pairs: tuple[tuple[float, float], ...] = ()


def test_a_record_describes_its_file():
    rows = {row.name: row for row in field_rows(model_of(Outer))}
    assert rows["floor_time"].kind == "quantity [s], such as 5 us"
    assert (rows["floor_time"].is_needed, rows["ramp_time"].is_needed) == (True, False)
    assert rows["floor_time"].says == rows["ramp_time"].says == "what it takes [s]"
    assert rows["parts"].kind == "mapping; by name"
    assert rows["parts.*.rate_fraction"].says == "share of the rate that it reaches, large sizes [-]"
    check_file({"floor_time": "3 us", "parts": {"a": {"rate_fraction": 1}}, "pairs": [[1, 2.5]]}, model_of(Outer), where="f")


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({}, "of.floor_time: required field is missing; add it"),
        ({"floor_time": 3}, "of.floor_time=3: a time needs its unit"),
        ({"floor_time": "3 us", "pairs": [[1]]}, r"of.pairs.0=\[1\]: must have at least 2 entries, not 1"),
        ({"floor_time": "3 us", "parts": {"a": {"rate": 1}}}, "of.parts.a.rate: unknown field; did you mean 'rate_fraction'"),
    ],
)
def test_what_is_wrong_with_a_record(data, sentence):
    with pytest.raises(InputError, match=sentence):
        check_file(data, model_of(Outer), where="f", within="of")


def test_json_schema_has_units_and_descriptions():
    schema = json_schema(MODEL)
    assert schema["additionalProperties"] is False
    assert schema["required"] == ["name", "rate"]
    assert schema["properties"]["rate"]["unit"] == "byte/s"
    assert schema["properties"]["share"]["anyOf"][0]["maximum"] == 1 if "anyOf" in schema["properties"]["share"] else True
    assert all(each["description"] for each in schema["properties"].values())
