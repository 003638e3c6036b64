"""Work of a serving step on one rank: sequences and prompts, calls of products, attention."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Work:
    """Work of one step on one rank of attention, as flat columns.

    decoding     sequences with `new_tokens` rows each over `cached` tokens, the new ones included
    prompts      of `prompt_tokens` new tokens each after `prompt_cached`
    tokens       rows of all attention ranks together: those that meet at the experts (one prompt keeps one rank busy, not all)
    copies       of those that decode, rows that further ranks of pcp compute too: they come to the experts as well
    sharing      pcp: ranks that share the tokens of each prompt
    """

    decoding: Array
    cached: Array
    new_tokens: Array
    prompts: Array
    prompt_tokens: Array
    prompt_cached: Array
    tokens: Array
    copies: Array
    sharing: Array

    @property
    def rows(self) -> Array:
        return self.decoding * self.new_tokens + self.own_prompt_rows

    @property
    def own_prompt_rows(self) -> Array:
        """This rank's rows of prompts."""
        return self.prompts * self.prompt_tokens / self.sharing

    @property
    def outputs(self) -> Array:
        """Rows that have logits."""
        return self.decoding * self.new_tokens + self.prompts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Calls:
    """Fused products of one format: [calls, columns]. which: their places among `FusedProducts`."""

    which: NDArray[np.int64]
    is_low: bool
    batch: Array
    m: Array
    n: Array
    k: Array


@dataclass(frozen=True, slots=True)
class AttentionRow:
    """Attention of one kind of layer on a chip: heads and key-value heads, entries of a query and of a value."""

    name: str
    heads: Array
    kv_heads: Array
    head_dim: int
    value_dim: int

    @property
    def is_latent(self) -> bool:
        return self.head_dim != self.value_dim
