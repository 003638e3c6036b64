"""Records with fields in typed groups: a training framework, a serving engine, a model."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Any, ClassVar, Self


def group_of(groups: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the group of each option. groups: field of a record -> dataclass of the group."""
    return MappingProxyType({option.name: group for group, group_type in groups.items() for option in fields(group_type)})


def in_groups(values: Mapping[str, Any], groups: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Split flat fields into those of the record itself, and options by group. groups: option -> group (`group_of`)."""
    fields_of_record: dict[str, Any] = {}
    options: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        (options.setdefault(groups[name], {}) if name in groups else fields_of_record)[name] = value
    return fields_of_record, options


def without_groups(data: Mapping[str, Any], groups: Collection[str]) -> dict[str, Any]:
    """Return the fields of a record in plain data with those of its groups among them, as in files."""
    return {name: item for key, value in data.items() for name, item in (value.items() if key in groups else [(key, value)])}


class Grouped:
    """Base of a frozen dataclass, some of whose fields are groups of options. Names of options are unique among the groups."""

    __slots__ = ()

    GROUP_OF: ClassVar[Mapping[str, str]]

    @property
    def options(self) -> dict[str, Any]:
        """Every option by name, without groups, as in files."""
        return {name: self.option(name) for name in self.GROUP_OF}

    def option(self, name: str) -> Any:
        """Return the value of an option of any group."""
        return getattr(getattr(self, self.GROUP_OF[name]), name)

    def having(self, **changes: Any) -> Self:
        """Return the record with other values of its own fields or of options. Raises InputError for a value that is out of bounds."""
        replaced, groups = in_groups(changes, self.GROUP_OF)
        for group, values in groups.items():
            replaced[group] = replace(getattr(self, group), **values)
        return replace(self, **replaced)  # type: ignore[type-var]
