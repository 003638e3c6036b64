"""Fields that a file may hold: each fault has a sentence with field, value, rule and remedy."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

import pytest
from pydantic import Field

from perfmodel.foundation.errors import InputError
from perfmodel.foundation.records import record_from_data
from perfmodel.foundation.schema import OMITTED, Bandwidth, Count, FileModel, OneOf, Text, check, checked_record, model_of


class Fact(FileModel):
    source: str


class Example(FileModel):
    name: Text
    rate: Bandwidth
    chips: Count = 1
    share: Annotated[float, Field(ge=0, le=1)] = 0.0
    ring: bool = False
    kind: Annotated[str, OneOf(["alpha", "beta"])] = "alpha"
    sizes: list[Count] = Field([], min_length=1, max_length=3)
    facts: dict[str, Fact] = OMITTED
    rates: dict[Annotated[str, OneOf(["bf16", "fp8"])], Bandwidth] = OMITTED


GOOD = {"name": "x", "rate": "1 GB/s", "chips": 8, "share": 1, "ring": True, "sizes": [1, 2], "facts": {"y": {"source": ""}}}


def test_what_has_the_schema_is_returned():
    assert check(Example, GOOD, where="f") is GOOD


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("name", "", "name='': must not be empty; write a text"),
        ("name", 5, "name=5: must be a text; write '5' in quotes"),
        ("name", None, "name=None: must be a text; write one text"),
        ("rate", 450, "rate=450: a bandwidth needs its unit; write '450 GB/s'"),
        ("chips", 0, "chips=0: must be at least 1"),
        ("chips", 2**32, "chips=4294967296: must be at most 2147483648"),
        ("chips", True, "chips=True: must be a whole number"),
        ("chips", 8.0, "chips=8.0: must be a whole number"),
        ("share", float("nan"), "share=nan: must be a finite number"),
        ("share", 2, "share=2: must be at most 1"),
        ("share", "1", "share='1': must be a number"),
        ("ring", 1, "ring=1: must be true or false"),
        ("kind", ["alpha"], r"kind=\['alpha'\]: must be one of alpha, beta"),
        ("kind", "alfa", "kind='alfa': must be one of alpha, beta; did you mean 'alpha'"),
        ("sizes", [], r"sizes=\[\]: must have at least 1 entries, not 0"),
        ("sizes", [1, "2"], "sizes.1='2': must be a whole number"),
        ("facts", {"y": 3}, "facts.y=3: must be a mapping; write a line 'name: value' for each entry"),
        ("facts", {7: {"source": ""}}, "facts.7=7: must be a text"),
        ("facts", {"y": {"sorce": "x", "source": "x"}}, "facts.y.sorce: unknown field; did you mean 'source'"),
        ("rates", {"bf61": "1 GB/s"}, "rates.bf61: unknown name; did you mean 'bf16'"),
        ("chps", 3, "chps: unknown field; did you mean 'chips'"),
        (3, 3, "3: unknown field"),
    ],
)
def test_what_is_wrong_is_a_sentence(field, value, sentence):
    with pytest.raises(InputError, match=f"^f: {sentence}"):
        check(Example, {**GOOD, field: value}, where="f")


def test_a_misspelt_field_comes_before_the_one_that_it_should_be():
    with pytest.raises(InputError, match=r"^f: 2 faults: \(1\) nam: unknown field; did you mean 'name'\?; \(2\) name: required field"):
        check(Example, {"rate": "1 GB/s", "nam": "x"}, where="f")
    with pytest.raises(InputError, match=r"^f: file=3: must be a mapping"):
        check(Example, 3, where="f")


class Colour(StrEnum):
    RED = "red"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A sample.

    floor_time   of a kernel
                 at least
    colour       of it
    pairs        two numbers each
    """

    floor_time: float
    colour: Colour = Colour.RED
    pairs: tuple[tuple[float, float], ...] = ()
    times: dict[str, float] = field(default_factory=dict)


@pytest.mark.parametrize("read", [checked_record, record_from_data])
def test_checked_and_trusted_data_give_equal_records(read):
    data = {"floor_time": "3 us", "colour": "red", "pairs": [[1, 2]], "times": {"a": "1 ms"}}
    assert read(Sample, data, where="s") == Sample(floor_time=3e-6, colour=Colour.RED, pairs=((1.0, 2.0),), times={"a": 1e-3})


def test_a_record_is_its_own_schema():
    properties = model_of(Sample).model_json_schema()["properties"]
    assert properties["floor_time"] == {"type": "string", "quantity": "time", "unit": "s", "examples": ["5 us"], "title": "Floor Time",
                                        "description": "of a kernel at least"}  # fmt: skip
    assert properties["colour"]["default"] == "red"
    with pytest.raises(InputError, match=r"s.pairs.0=\[1\]: must have at least 2 entries, not 1"):
        checked_record(Sample, {"floor_time": "1 s", "pairs": [[1]]}, where="s")
