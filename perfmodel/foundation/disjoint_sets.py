"""Disjoint sets (union-find)."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)


class DisjointSets(Generic[Item]):
    """Union-find with a representative item for each set; an item that was never joined is its own set.

    Source: Galler & Fischer, An improved equivalence algorithm, CACM 7(5), 1964; path halving: Tarjan & van Leeuwen,
    Worst-case analysis of set union algorithms, JACM 31(2), 1984.
    """

    def __init__(self, items: Iterable[Item] = ()) -> None:
        self._parents: dict[Item, Item] = {item: item for item in items}

    def find(self, item: Item) -> Item:
        """Return the representative of the item's set; an unknown item is added as a new set."""
        parents = self._parents
        parents.setdefault(item, item)
        while parents[item] != item:
            parents[item] = parents[parents[item]]
            item = parents[item]
        return item

    def join(self, item: Item, other: Item) -> None:
        """Merge the sets of two items; the representative of `other` becomes that of both."""
        self._parents[self.find(item)] = self.find(other)

    def __contains__(self, item: Item) -> bool:
        return item in self._parents

    def representatives(self) -> dict[Item, Item]:
        """Return the representative of every item."""
        return {item: self.find(item) for item in self._parents}
