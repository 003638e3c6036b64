"""Reasons of cases that could not be predicted."""

from perfmodel.foundation.errors import InputError, one_line

FAILURES = (ArithmeticError, ValueError, TypeError, LookupError, AttributeError, AssertionError, MemoryError, RecursionError)
"""Errors of a prediction. One that is no `InputError` is a bug of perfmodel: it is reported, and the other cases still count."""

NOT_FINITE = "the prediction is not a finite number; please report this case"


def reason_of(error: Exception) -> str:
    if isinstance(error, InputError):
        return one_line(error, 400)
    return f"the prediction failed ({type(error).__name__}: {one_line(error, 200)}); please report this case"
