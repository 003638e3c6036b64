"""A record's fields become arguments, and what is no argument is refused in one sentence."""

import inspect
from dataclasses import dataclass

import pytest

from perfmodel.foundation.words import Words, takes, word


@dataclass(frozen=True, kw_only=True)
class Meal:
    apples: int | None = word("Apples", kind=int, aliases=("--fruit",))
    pears: str | None = word("Pears", takes="int | str", several=True)
    share: float = word("Share", takes="float | str", default=0.5)


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
