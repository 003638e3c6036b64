"""Exceptions of perfmodel, whose message is one sentence with field, value, rule and remedy."""

import re
from collections.abc import Iterable, Sequence
from typing import ClassVar

_LONG_WORD = re.compile(r"\S{121,}")
_LONGEST_MESSAGE = 4000
#: Longest sentence about bad input [characters]; characters of a path beyond `_PATH` are not counted.
LONGEST_SENTENCE = 200
_PATH = 40
#: A sentence that is too long by at most this is not shortened [characters].
_SLACK = 20
#: A list of faults may be as long as this number of sentences.
_FAULTS_SHOWN = 4
#: An enumeration of names, of which the first few suffice.
_ENUMERATION = re.compile(
    r"(?P<names>(?:[^\s,;:()\[\]]+, ){5,}[^\s,;:()\[\]]+)(?: or (?P<last>[^\s,;:()\[\]]+))?(?: and (?P<more>[\d,]+) more)?"
)
_FEWEST_NAMES = 4
_FAULTS = re.compile(r"(?P<head>\b[\d,]+ faults: )(?=\(1\) )")
_NEXT_FAULT = re.compile(r"; (?=\(\d+\) |and [\d,]+ more$|[\w-]+: is missing; )")
_ASIDE = re.compile(r" \([^()=]{12,}\)")


class PerfModelError(Exception):
    """Base of all errors that perfmodel raises on purpose (exit code 1 unless a subclass has another).

    Messages quote input of users and files, so every message is sanitised for a terminal.
    """

    def __init__(self, message: object = "", *details: object) -> None:
        super().__init__(presentable(message) if isinstance(message, str) else message, *details)


class InputError(PerfModelError, ValueError):
    """Bad input: a field, flag, name, unit or file that violates a rule (exit code 2).

    longest   longest message [characters]; a longer one is shortened
    full      message before it was shortened, with every fault of a file
    """

    longest: ClassVar[int] = LONGEST_SENTENCE

    def __init__(self, message: object = "", *details: object) -> None:
        super().__init__(message, *details)
        self.full = str(self)
        if isinstance(message, str):
            self.args = (shortened(self.full, self.longest), *details)


class RunError(PerfModelError):
    """Failure of a run or a check with valid input (exit code 1)."""


def suggest(value: object, known: Iterable[str]) -> str:
    """Return the remedy for an unknown name, to be appended to a sentence: the nearest known names, else all of them."""
    import difflib

    names = sorted({str(name) for name in known})
    if not names:
        return ""
    wanted = plain_text(value).lower()
    by_lower = {name.lower(): name for name in names}
    close = difflib.get_close_matches(wanted, by_lower, n=3, cutoff=0.5)
    holding = [lower for lower in by_lower if len(wanted) > 2 and wanted in lower]
    near = [by_lower[lower] for lower in dict.fromkeys([*(set(close) & {wanted}), *holding, *close])][:3]
    if near:
        return f"; did you mean {' or '.join(repr(name) for name in near)}?"
    return f"; use one of {first_of(names, 12)}"


def first_of(names: Sequence[str], most: int) -> str:
    """Return the first names, and the number of the others."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def bad_field(field: str, value: object, rule: str, remedy: str = "") -> InputError:
    """Return an `InputError` of the form `field=value: rule; remedy`; a long value is shortened."""
    return InputError(f"{one_line(field, 200)}={one_line(value)}: {one_line(rule, 600)}" + (f"; {one_line(remedy, 600)}" if remedy else ""))


def shown(value: object) -> str:
    """Return a value for a message: its `repr`, of bounded length for any depth or length of the value."""
    import reprlib

    brief = reprlib.Repr()
    brief.maxstring = brief.maxother = brief.maxlong = 60
    try:
        return one_line(brief.repr(value))
    except (ValueError, RecursionError):  # an integer with more digits than Python converts
        return f"a {type(value).__name__} too long to show"


def plain_text(value: object) -> str:
    """Return `str(value)`, or the type of a value that Python cannot convert."""
    try:
        return str(value)
    except (ValueError, RecursionError):  # an integer with more digits than Python converts
        return f"a {type(value).__name__} too long to show"


def whole_number(text: str) -> int | None:
    """Return the number of a text of up to 18 digits; None for any other text."""
    digits = text.strip()
    return int(digits) if digits.isascii() and digits.isdecimal() and len(digits) <= 18 else None


def presentable(message: str) -> str:
    """Return a text for a terminal: no control characters except line ends, words and text of bounded length."""
    text = "".join(char if char.isprintable() or char in "\n\t" else " " for char in message[: 16 * _LONGEST_MESSAGE])
    text = _LONG_WORD.sub(lambda match: match[0][:77] + "..." + match[0][-40:], text)
    return text if len(text) <= _LONGEST_MESSAGE else text[:_LONGEST_MESSAGE] + "..."


def shortened(sentence: str, longest: int = LONGEST_SENTENCE) -> str:
    """Return a sentence of about `longest` characters that keeps the field, the value, the rule and the remedy.

    A list of faults may be `_FAULTS_SHOWN` times as long, each of them one such sentence. The least useful text is removed first, in this
    order: further names of an enumeration, the last faults of a list, explanations in parentheses, inner clauses, the middle of the rest.
    """
    if _NEXT_FAULT.search(sentence):
        return _fewer_faults(sentence, longest)
    limit = _limit(sentence, longest)
    if len(sentence) <= limit + _SLACK:
        return sentence
    for enumeration in sorted(_ENUMERATION.finditer(sentence), key=lambda match: -len(match[0])):
        sentence = sentence.replace(enumeration[0], _fewer_names(enumeration, len(enumeration[0]) - (len(sentence) - limit)))
    for aside in reversed(_ASIDE.findall(sentence)):
        if len(sentence) > limit:
            sentence = sentence.replace(aside, "")
    first, *others = sentence.split("; ")
    while len(others) > 1 and len("; ".join((first, *others))) > limit:
        del others[-2]
    if len("; ".join((first, *others))) <= limit or not others:
        return one_line("; ".join((first, *others)), limit)
    remedy = one_line(others[-1], max(limit - len(first), limit // 2) - 2)
    return f"{one_line(first, limit - len(remedy) - 2)}; {remedy}"


def _limit(sentence: str, longest: int) -> int:
    """Return `longest` plus the characters of the longest path beyond `_PATH`."""
    return longest + max((len(word) - _PATH for word in sentence.split() if "/" in word and len(word) > _PATH), default=0)


def _fewer_names(enumeration: re.Match[str], width: int) -> str:
    """Return the first names of an enumeration that fit in `width` characters, and the number of the others."""
    names = enumeration["names"].split(", ") + ([enumeration["last"]] if enumeration["last"] else [])
    more = int((enumeration["more"] or "0").replace(",", ""))
    text = enumeration[0]
    for kept in range(len(names) - 1, _FEWEST_NAMES - 1, -1):
        if len(text) <= width:
            break
        text = f"{', '.join(names[:kept])} and {more + len(names) - kept:,} more"
    return text


def _fewer_faults(sentence: str, longest: int) -> str:
    """Return a list of shortened faults, without those at its end that exceed the limit, and the number of these."""
    match = _FAULTS.search(sentence)
    head = sentence[: match.end()] if match else ""
    faults = _NEXT_FAULT.split(sentence[len(head) :])
    left_out = re.fullmatch(r"and ([\d,]+) more", faults[-1])
    more = int(left_out[1].replace(",", "")) if left_out else 0
    kept = [shortened(fault, longest) for fault in (faults[:-1] if left_out else faults)]
    total, limit = len(kept) + more, _limit(head, _FAULTS_SHOWN * longest)
    while len(kept) > 1 and len(head) + len("; ".join(kept)) > limit:
        kept.pop()
    return head + "; ".join(kept) + (f"; and {total - len(kept):,} more" if total > len(kept) else "")


def one_line(value: object, width: int = 80) -> str:
    """Return the value for a message: white space collapsed, no control characters, truncated at `width`."""
    text = "".join(char if char.isprintable() else " " for char in plain_text(value)[: 4 * width])
    text = " ".join(text.split())
    return text if len(text) <= width else text[: width - 3] + "..."
