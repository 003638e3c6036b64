"""A record's fields become arguments, and what is no argument is refused in one sentence."""

import inspect
from dataclasses import dataclass

import pytest

from perfmodel.foundation.errors import InputError
from perfmodel.foundation.words import Words, given_words, part, read_words, size, takes, word, words_of


@dataclass(frozen=True, kw_only=True)
class Meal:
    apples: int | None = word("Apples", kind=int, aliases=("--fruit",))
    pears: str | None = word("Pears", takes="int | str", several=True)
    share: float = word("Share", takes="float | str", default=0.5, is_last=True)


@takes(meal=Words(Meal, needed="apples", several=True))
def eat(guest, *, meal, slowly=False):
    return guest, meal, slowly


def test_words_are_arguments_among_others():
    assert eat("ann", apples=2, slowly=True) == ("ann", Meal(apples=2), True)
    assert str(inspect.signature(eat)) == (
        "(guest, *, apples: 'int', pears: 'Several[int | str]' = None, share: 'float | str' = 0.5, slowly=False)"
    )


@pytest.mark.parametrize(
    ("arguments", "given", "sentence"),
    [
        (("ann",), {"apple": 2}, r"^eat\(\) has no argument 'apple'; did you mean 'apples'\?$"),
        (("ann",), {"fruit": 2}, r"^eat\(\) has no argument 'fruit'; here it is 'apples'$"),
        (("ann", 2), {"apples": 2}, r"^eat\(\) takes 1 without a name \(guest\), not 2; write name=value$"),
        (("ann",), {}, r"^eat\(\) needs apples; give it by name: apples=\.\.\.$"),
        ((), {"apples": 2}, "missing 1 required positional argument: 'guest'"),
    ],
)
def test_what_is_no_argument_is_a_type_error_of_one_sentence(arguments, given, sentence):
    with pytest.raises(TypeError, match=sentence):
        eat(*arguments, **given)


@dataclass(frozen=True, kw_only=True)
class Table:
    seats: int | None = size("Seats")
    terrace: bool | None = word("Terrace", kind=bool)


@dataclass(frozen=True, kw_only=True)
class Order:
    meal: Meal = part(Meal)
    table: Table = part(Table)


@takes(order=Words(Order, needed="seats"))
def order_of(*, order):
    return order


def test_the_words_of_a_record_of_records_are_those_of_its_parts():
    assert list(words_of(Order)) == list(words_of(Meal, Table)) == ["apples", "pears", "seats", "terrace", "share"]
    given = order_of(apples=2, seats="1k")
    assert given == Order(meal=Meal(apples=2), table=Table(seats="1k"))
    assert given_words(given) == {"apples": 2, "seats": "1k", "share": 0.5}
    assert read_words(given, "terrace", "seats") == {"seats": 1024}
    assert "seats: 'int | str', terrace" in str(inspect.signature(order_of))
    with pytest.raises(KeyError):
        Words(Order).make({"chairs": 2})
    with pytest.raises(InputError, match="seats=0: must be a whole number of at least 1; write 64 or 8k"):
        read_words(order_of(seats=0), "seats")
