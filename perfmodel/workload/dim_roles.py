"""Roles of an operator's dims in sharding and in the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain


@dataclass(frozen=True, slots=True, kw_only=True)
class DimRoles:
    """Dims of an operator with a role beyond their size.

    sums      dims that are summed over, so that the output lacks them: sharding them leaves the output partial
    unsplit   dims that no axis may shard
    padded    dims whose shards may be uneven (a vocabulary); other dims must be divisible by the degrees that shard them

    In a graph whose batch is a quantity of the plan and whose axes rule sets assign:

    logical     names of dims in rule sets: they belong to the operator, not to the tensor (R16); default: the dim's name
    per_sample  dims that count sequences: their size is the (micro)batch, and 1 in `Operator.dims`
    per_token   dims that count tokens of a sequence: their size is the sequence length times that in `Operator.dims`
    stretched   dims of size 1 of which each shard holds a full copy (the weight form of grouped-query attention)
    """

    sums: tuple[str, ...] = ()
    unsplit: tuple[str, ...] = ()
    padded: tuple[str, ...] = ()
    logical: Mapping[str, str] = field(default_factory=dict)
    per_sample: tuple[str, ...] = ()
    per_token: tuple[str, ...] = ()
    stretched: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[str]:
        """Iterate over the dims of every role; one with several roles comes several times."""
        return chain(self.sums, self.unsplit, self.padded, self.logical, self.per_sample, self.per_token, self.stretched)

    def with_dims(self, change: Callable[[tuple[str, ...]], tuple[str, ...]]) -> DimRoles:
        """Return the roles after a change of dims that renames them or leaves some out."""
        return DimRoles(
            sums=change(self.sums),
            unsplit=change(self.unsplit),
            padded=change(self.padded),
            logical={dim: logical for before, logical in self.logical.items() for dim in change((before,))},
            per_sample=change(self.per_sample),
            per_token=change(self.per_token),
            stretched=change(self.stretched),
        )


#: Of an operator whose dims all may be sharded evenly.
NO_ROLES = DimRoles()
