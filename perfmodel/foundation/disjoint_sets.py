"""Things joined step by step into sets that share nothing."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)


class DisjointSets(Generic[Item]):
    """Each item is a set of its own until it is joined to another; one item of a set stands for it.

    Source: Galler & Fischer, An improved equivalence algorithm, CACM 7(5), 1964; paths are halved on the way (Tarjan & van Leeuwen,
    Worst-case analysis of set union algorithms, JACM 31(2), 1984).
    """

    def __init__(self, items: Iterable[Item] = ()) -> None:
        self._above: dict[Item, Item] = {item: item for item in items}

    def find(self, item: Item) -> Item:
        """The item that stands for the set of this one, which is new if it was not known."""
        above = self._above
        above.setdefault(item, item)
        while above[item] != item:
            above[item] = above[above[item]]
            item = above[item]
        return item

    def join(self, item: Item, other: Item) -> None:
        """Make their sets one; what stands for the set of `other` stands for both."""
        self._above[self.find(item)] = self.find(other)

    def __contains__(self, item: Item) -> bool:
        return item in self._above

    def representatives(self) -> dict[Item, Item]:
        """The representative of every item."""
        return {item: self.find(item) for item in self._above}
