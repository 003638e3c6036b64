"""Model of a job other than a configured decoder: a built-in network by name and sizes, or the user's module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Size = int | float | str | bool | tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkModel:
    """A network given by its factory; the graph is built once the batch is known.

    name     of a built-in network, or `module:factory` of the user's torch module
    sizes    overrides of the network's default sizes
    inputs   of a module: arguments of its forward
    """

    name: str
    sizes: Mapping[str, Size] = field(default_factory=dict)
    inputs: tuple[str, ...] = ()

    def __hash__(self) -> int:
        return hash((self.name, tuple(sorted(self.sizes.items(), key=lambda item: item[0])), self.inputs))

    @property
    def is_imported(self) -> bool:
        """Whether it is the user's code."""
        return ":" in self.name
