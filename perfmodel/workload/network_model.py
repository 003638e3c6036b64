"""Model of a job that is no configured decoder: a built-in network by name and sizes, or the user's module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Size = int | float | str | bool | tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkModel:
    """A network by what it is built from; its graph follows, once the batch is known.

    name     of a built-in network, or `module:factory` of a torch module of one's own
    sizes    given beyond the network's defaults
    inputs   of a module: what its forward is called with
    """

    name: str
    sizes: Mapping[str, Size] = field(default_factory=dict)
    inputs: tuple[str, ...] = ()

    def __hash__(self) -> int:
        return hash((self.name, tuple(sorted(self.sizes.items(), key=lambda item: item[0])), self.inputs))

    @property
    def is_imported(self) -> bool:
        """Whether it is code of one's own."""
        return ":" in self.name
