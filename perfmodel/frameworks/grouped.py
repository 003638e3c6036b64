"""Records whose options lie in typed groups: a training framework, a serving engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Self


class Grouped:
    """Base of a frozen dataclass, some of whose fields are groups of options. Names of options are unique among the groups."""

    __slots__ = ()

    GROUP_OF: ClassVar[Mapping[str, str]]

    def option(self, name: str) -> Any:
        """Return the value of an option, whatever its group."""
        return getattr(getattr(self, self.GROUP_OF[name]), name)

    def having(self, **changes: Any) -> Self:
        """Return the record with other values of its own fields or of options. Raises InputError for a value that is out of bounds."""
        own = {name: value for name, value in changes.items() if name not in self.GROUP_OF}
        groups: dict[str, dict[str, Any]] = {}
        for name, value in changes.items():
            if name in self.GROUP_OF:
                groups.setdefault(self.GROUP_OF[name], {})[name] = value
        for group, values in groups.items():
            own[group] = replace(getattr(self, group), **values)
        return replace(self, **own)  # type: ignore[type-var]
