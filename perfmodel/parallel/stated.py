"""A framework with what is known of its setup, as people state it: `generic+compile+attention_kernel=flash3`.

Inside it is this one text, so whatever carries the name of a plan's profile carries its settings; options, arguments and plan files write
the two apart. What a setting changes is in `parallel/settings.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from perfmodel.foundation.errors import bad_field, one_line, shown, suggest
from perfmodel.parallel.settings import SEPARATOR, SETTINGS, STATED, Value, framework_named, setting_value, unread, with_settings

if TYPE_CHECKING:
    from perfmodel.parallel.profile import ExecutionProfile

Stated: TypeAlias = "Mapping[str, Value] | list[str] | str | None"


def read_settings(given: object, name: str = "settings") -> dict[str, Value]:
    """`{"compile": True}`, `compile+fused_rmsnorm=false` or a list of such texts. Raises InputError for what is not known."""
    found: dict[str, Value] = {}
    for each, value in _pairs(given, name):
        known = setting_value(each, value)
        if found.setdefault(each, known) != known:
            raise bad_field("setting", _text(each, known), f"was stated as {_text(each, found[each])} before", "state it once")
    return _in_order(found)


def _pairs(given: object, name: str) -> Iterator[tuple[str, object]]:
    if isinstance(given, Mapping):
        yield from given.items()
        return
    texts = [] if given is None else given if isinstance(given, (list, tuple)) else [given]
    for text in texts:
        if not isinstance(text, str):
            raise bad_field(name, shown(given), "must be a mapping of names to values", 'write {"compile": true}')
        for each in re.split(r"[+,]", text):
            setting, separator, value = (part.strip() for part in each.partition("="))
            yield setting, value if separator else True


def settings_in(profile: str) -> dict[str, Value]:
    """What is stated with the name of a profile."""
    behind = profile[len(framework_named(profile)) :]
    return read_settings(behind[len(SEPARATOR) :]) if behind else {}


def stated(profile: str, settings: Mapping[str, Value]) -> str:
    """The text of a profile and these settings beside those that it has; what contradicts them is refused."""
    own = settings_in(profile)
    for name, value in settings.items():
        if own.get(name, value) != value:
            rule = f"the profile {one_line(profile)} says {_text(name, own[name])}"
            raise bad_field("setting", _text(name, value), rule, "state one of them")
    every = settings_text(_in_order({**own, **settings}))
    return SEPARATOR.join([framework_named(profile), every]) if every else framework_named(profile)


def with_stated(profile: ExecutionProfile, settings: Mapping[str, Value]) -> ExecutionProfile:
    """The profile of a run with these settings, and named so."""
    name = stated(profile.name, settings)
    if name == profile.name:
        return profile
    if settings_in(profile.name):  # one setting may take back what another did
        raise bad_field("profile", profile.name, "has settings of its own", f"load it with all of them: {name}")
    return replace(with_settings(profile, settings), name=name)


def passed_over(settings: object) -> list[str]:
    """What of the settings of a run that was measured is not read: those that are not known, and values that are not."""
    given = settings.items() if isinstance(settings, Mapping) else ()
    return [told for name, value in given if value is not None and (told := unread(name, value))]


def passed_over_line(names: Sequence[str]) -> str:
    """One line about it."""
    first = names[0].partition("=")[0].partition(" ")[0]
    remedy = "" if first in SETTINGS else suggest(first, SETTINGS)
    return f"settings that nothing is known of, passed over: {', '.join(names[:12])}{' ...' if len(names) > 12 else ''}{remedy}"


def settings_text(settings: Mapping[str, Value]) -> str:
    return SEPARATOR.join(_text(name, value) for name, value in settings.items())


def _in_order(settings: Mapping[str, Value]) -> dict[str, Value]:
    return {name: settings[name] for name in STATED if name in settings}


def _text(name: str, value: Value) -> str:
    if isinstance(value, bool):
        return name if value else f"{name}=false"
    if isinstance(value, float):
        return f"{name}={int(value) if value.is_integer() else repr(value)}"
    return f"{name}={value}"
