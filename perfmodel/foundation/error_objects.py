"""Errors as objects for programs: code, field, value and suggestions, parsed from the sentence of an error."""

from __future__ import annotations

import re
from enum import StrEnum


class ErrorCode(StrEnum):
    """The kind of an error, for programs.

    BAD_INPUT       a value violates a rule (exit code 2)          MISSING    a required value was not given (2)
    UNKNOWN_NAME    no model, cluster, profile ... of this name (2)    UNKNOWN_OPTION   no such flag (2)
    NOTHING_FITS    a search found no plan that fits (2)           FAILED     a run or a check failed (1)
    NOTHING_MEETS   no cluster meets the deadline and the budget (2)
    INTERRUPTED     Ctrl-C, or a signal (130 and more)
    """

    BAD_INPUT = "bad_input"
    MISSING = "missing"
    UNKNOWN_NAME = "unknown_name"
    UNKNOWN_OPTION = "unknown_option"
    NOTHING_FITS = "nothing_fits"
    NOTHING_MEETS = "nothing_meets"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


#: `tp=6: must divide ...` or `--tokens: is missing ...`; a file and a line may precede it.
_NAMED = re.compile(r"(?:^|: )(?P<field>--?[a-z][\w-]*|[a-z][\w.-]*)(?:=(?P<value>.*?))?: ")
_OPTION = re.compile(r"No such (?:option|command):? '?(?P<field>[\w-]+)")
_NAMES = re.compile(r"; (?:did you mean|use one of|use) (?P<names>.+?)(?: and \d+ more)?\??(?:;|$| \()")
_POSSIBLE = re.compile(r"\((?:Possible options:|here it is) (?P<names>[^)]+)\)")
_MISSING = re.compile(r"([\w-]+): is missing; (give [^;]+)")
_NAME = re.compile(r"'([^']+)'|([\w.+/-]+)")
_LONGEST_NAME = 40
#: Kind of bad input, and the words of its sentence.
_KINDS = {
    ErrorCode.UNKNOWN_OPTION: re.compile(r"^No such "),
    ErrorCode.MISSING: re.compile(r": is missing|^Missing "),
    ErrorCode.UNKNOWN_NAME: re.compile(r": unknown|: not known|: is not known|has this name|is not a knob"),
}


def error_object(sentence: str, code: ErrorCode) -> dict[str, str | list[str] | None]:
    """Return the fields of an error: `field` and `value` are null if the sentence names none, `suggestions` may be empty."""
    named = _NAMED.search(sentence) or _OPTION.match(sentence)
    if code is ErrorCode.BAD_INPUT:
        code = next((kind for kind, words in _KINDS.items() if words.search(sentence)), code)
    return {
        "code": str(code),
        "field": named["field"].lstrip("-").replace("-", "_") if named else None,
        "value": named.groupdict().get("value") if named else None,
        "message": sentence,
        "suggestions": suggestions_of(sentence),
    }


def suggestions_of(sentence: str) -> list[str]:
    """Return the names or values that a sentence suggests in place of the given one; else its remedy unchanged."""
    missing = _MISSING.findall(sentence)
    if missing:
        return [f"{name}: {remedy}" for name, remedy in missing]
    match = _POSSIBLE.search(sentence) or _NAMES.search(sentence)
    if match is not None:
        words = re.split(r", | or ", match["names"])
        names = [name[1] or name[2] for word in words if (name := _NAME.fullmatch(word.strip())) is not None]
        if len(names) == len(words) and all(len(name) <= _LONGEST_NAME for name in names):
            return names
    _, semicolon, remedy = sentence.partition("; see perfmodel")[0].rpartition("; ")
    return [remedy] if semicolon else []
