"""What perfmodel raises: one sentence that names the field, the value, the rule and the way out."""

import re
from collections.abc import Iterable

_LONG_WORD = re.compile(r"\S{400,}")
_LONGEST_MESSAGE = 4000


class PerfModelError(Exception):
    """Base of everything that perfmodel raises on purpose (exit code 1 unless a subclass says otherwise).

    Messages quote what people and files hold, so every message is made fit for a terminal.
    """

    def __init__(self, message: object = "", *details: object) -> None:
        super().__init__(presentable(message) if isinstance(message, str) else message, *details)


class InputError(PerfModelError, ValueError):
    """Bad input: a field, flag, name, unit or file that breaks a rule (exit code 2)."""


class RunError(PerfModelError):
    """A run or a check failed although its input was good (exit code 1)."""


def suggest(value: object, known: Iterable[str]) -> str:
    """The remedy for an unknown name, ready to be appended to a sentence: the nearest known names, else all of them."""
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
    shown = ", ".join(names[:12])
    return f"; use one of {shown}" + (f" and {len(names) - 12} more" if len(names) > 12 else "")


def bad_field(field: str, value: object, rule: str, remedy: str = "") -> InputError:
    """An `InputError` of the form `field=value: rule; remedy`; a long value is shortened."""
    return InputError(f"{one_line(field, 200)}={one_line(value)}: {one_line(rule, 600)}" + (f"; {one_line(remedy, 600)}" if remedy else ""))


def shown(value: object) -> str:
    """A value as a message quotes it: `repr`, of bounded length however deep or long the value is."""
    import reprlib

    brief = reprlib.Repr()
    brief.maxstring = brief.maxother = brief.maxlong = 60
    try:
        return one_line(brief.repr(value))
    except (ValueError, RecursionError):  # an integer of more digits than Python writes
        return f"a {type(value).__name__} too long to show"


def plain_text(value: object) -> str:
    """`str(value)`, of whatever Python cannot write its kind."""
    try:
        return str(value)
    except (ValueError, RecursionError):  # an integer of more digits than Python writes
        return f"a {type(value).__name__} too long to show"


def whole_number(text: str) -> int | None:
    """The number that plain digits write, up to 18 of them; None for anything else."""
    digits = text.strip()
    return int(digits) if digits.isascii() and digits.isdecimal() and len(digits) <= 18 else None


def presentable(message: str) -> str:
    """A text fit for a terminal: no control characters but line ends, no word or whole of any length."""
    text = "".join(char if char.isprintable() or char in "\n\t" else " " for char in message[: 16 * _LONGEST_MESSAGE])
    text = _LONG_WORD.sub(lambda match: match[0][:200] + "..." + match[0][-40:], text)
    return text if len(text) <= _LONGEST_MESSAGE else text[:_LONGEST_MESSAGE] + "..."


def one_line(value: object, width: int = 80) -> str:
    """What somebody wrote, fit for a message: white space collapsed, no control characters, cut at `width`."""
    text = "".join(char if char.isprintable() else " " for char in plain_text(value)[: 4 * width])
    text = " ".join(text.split())
    return text if len(text) <= width else text[: width - 3] + "..."
