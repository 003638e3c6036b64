"""What perfmodel raises: one sentence that names the field, the value, the rule and the way out."""

from collections.abc import Iterable


class PerfModelError(Exception):
    """Base of everything that perfmodel raises on purpose (exit code 1 unless a subclass says otherwise)."""


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
    wanted = str(value).lower()
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


def one_line(value: object, width: int = 80) -> str:
    """What somebody wrote, fit for a message: white space collapsed, no control characters, cut at `width`."""
    text = "".join(char if char.isprintable() else " " for char in str(value)[: 4 * width])
    text = " ".join(text.split())
    return text if len(text) <= width else text[: width - 3] + "..."
