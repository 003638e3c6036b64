"""KV cache in blocks of a few tokens that any sequence may hold, plus one state slot per sequence for layers with a recurrent state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil

import torch

from perfmodel.execute.uniform.model import kind_of
from perfmodel.foundation.errors import RunError
from perfmodel.workload.config import TransformerConfig
from perfmodel.workload.kinds.cache import state_shapes, token_shapes


@dataclass(frozen=True, slots=True)
class Slots:
    """State slots of `number` sequences.

    index   [number] slots; None if they are contiguous from `first` on, so that they are read and written in place
    """

    number: int
    index: torch.Tensor | None
    first: int = 0

    def of(self, pool: torch.Tensor) -> torch.Tensor:
        """Read [slots, ...] -> [number, ...]."""
        return pool[self.first : self.first + self.number] if self.index is None else pool[self.index]

    def put(self, pool: torch.Tensor, values: torch.Tensor) -> None:
        """Write back values read with `of` after an update."""
        if self.index is not None:
            pool.index_copy_(0, self.index, values)


class StateCache:
    """Pools of `num_slots` slots, one pair per layer with a state, and the slot of each sequence.

    The last inputs of the convolution are kept in the model's dtype, states in at least float32.
    """

    def __init__(
        self, config: TransformerConfig, mixers: Sequence[str], num_slots: int, *, tp: int, dtype: torch.dtype, device: str
    ) -> None:
        self.device = device
        dtypes = dtype, torch.promote_types(dtype, torch.float32)
        self.pools: dict[int, tuple[torch.Tensor, ...]] = {
            layer: tuple(torch.zeros(num_slots, *shape, dtype=kind, device=device) for shape, kind in zip(shapes, dtypes, strict=True))
            for layer, mixer in enumerate(mixers)
            if (shapes := state_shapes(config, mixer, tp))
        }
        self.free = list(range(num_slots))
        self.slots: dict[int, int] = {}

    @property
    def slot_bytes(self) -> int:
        """Bytes of one sequence in all layers."""
        return sum(pool[0].numel() * pool.element_size() for pools in self.pools.values() for pool in pools)

    def reserve(self, sequence: int) -> None:
        """Reserve the first free slot and clear it."""
        if not self.free:
            raise RunError(f"sequence={sequence}: none of the {len(self.slots)} slots for states is free")
        slot = self.slots[sequence] = self.free.pop(0)
        for pools in self.pools.values():
            for pool in pools:
                pool[slot].zero_()

    def release(self, sequence: int) -> None:
        self.free = sorted([*self.free, self.slots.pop(sequence)])

    def of(self, sequences: Sequence[int]) -> Slots:
        slots = [self.slots[sequence] for sequence in sequences]
        if all(b - a == 1 for a, b in pairwise(slots)):
            return Slots(len(slots), None, slots[0])
        return Slots(len(slots), torch.tensor(slots, device=self.device))


#: Tokens per block, as in vLLM.
BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Reads:
    """Slots of a pool that a step reads for `number` sequences, `length` tokens of each.

    index    [number, length] slots; None if the sequences start at `first` with a constant `stride`, so that they are read without a copy
    """

    number: int
    length: int
    index: torch.Tensor | None
    first: int = 0
    stride: int = 0

    def of(self, pool: torch.Tensor, start: int = 0) -> torch.Tensor:
        """Read [slots, ...] -> [number, length - start, ...], the tokens from `start` on."""
        if self.index is not None:
            return pool[self.index[:, start:]]
        row_stride = pool.stride(0)
        shape = (self.number, self.length - start, *pool.shape[1:])
        return pool.as_strided(shape, (self.stride * row_stride, *pool.stride()), (self.first + start) * row_stride)


class PagedCache:
    """Pools of `num_blocks` blocks, one set per attention layer, and the block table of each sequence; states of up to `num_sequences`
    sequences (0: the number of blocks)."""

    def __init__(
        self,
        config: TransformerConfig,
        num_blocks: int,
        *,
        num_sequences: int = 0,
        tp: int = 1,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        block_tokens: int = BLOCK_TOKENS,
    ) -> None:
        self.block_tokens, self.num_blocks, self.device = block_tokens, num_blocks, device
        places = num_blocks * block_tokens
        mixers = [kind_of(config, layer).mixer for layer in range(config.num_hidden_layers)]
        # zeros: slots past the end of a short sequence are read with probability 0, so they must be finite
        self.pools: dict[int, tuple[torch.Tensor, ...]] = {
            layer: tuple(torch.zeros(places, *width, dtype=dtype, device=device) for width in token_shapes(config, mixer, tp))
            for layer, mixer in enumerate(mixers)
        }
        self.states = StateCache(config, mixers, num_sequences or num_blocks, tp=tp, dtype=dtype, device=device)
        self.free = list(range(num_blocks))
        self.tables: dict[int, list[int]] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of the pools of all layers."""
        return sum(pool.numel() * pool.element_size() for pool in self.all_pools)

    @property
    def all_pools(self) -> list[torch.Tensor]:
        return [pool for of_layers in (self.pools, self.states.pools) for pools in of_layers.values() for pool in pools]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers."""
        pools = (pool for pools in self.pools.values() for pool in pools)
        return sum(self.block_tokens * pool[0].numel() * pool.element_size() for pool in pools)

    @property
    def bytes_held(self) -> int:
        """Bytes of the blocks and states that sequences hold."""
        return sum(map(len, self.tables.values())) * self.block_bytes + len(self.tables) * self.states.slot_bytes

    def blocks_for(self, tokens: int) -> int:
        return ceil(tokens / self.block_tokens)

    def has_capacity(self, tokens: int) -> bool:
        """Return whether blocks and a slot are free for another sequence of `tokens` tokens."""
        return self.blocks_for(tokens) <= len(self.free) and bool(self.states.free)

    def reserve(self, sequence: int, tokens: int) -> None:
        """Reserve a slot and blocks for a sequence of up to `tokens` tokens: the first contiguous run, else the first free blocks."""
        number = self.blocks_for(tokens)
        if sequence in self.tables:
            raise RunError(f"sequence={sequence}: is in the cache already")
        if number > len(self.free):
            raise RunError(f"sequence={sequence}: {tokens} tokens take {number} blocks, and {len(self.free)} are free")
        self.states.reserve(sequence)
        starts = (i for i in range(len(self.free) - number + 1) if self.free[i + number - 1] - self.free[i] == number - 1)
        start = next(starts, 0)
        self.tables[sequence] = self.free[start : start + number]
        del self.free[start : start + number]

    def release(self, sequence: int) -> None:
        self.states.release(sequence)
        self.free = sorted([*self.free, *self.tables.pop(sequence)])

    def release_all(self) -> None:
        for sequence in list(self.tables):
            self.release(sequence)

    def places(self, sequence: int, start: int, stop: int) -> list[int]:
        """Return the slots in a pool of the tokens `start` to `stop` of a sequence."""
        table, size = self.tables[sequence], self.block_tokens
        if stop > len(table) * size:
            raise RunError(f"sequence={sequence}: token {stop} is beyond the {len(table)} blocks that it holds")
        return [table[token // size] * size + token % size for token in range(start, stop)]

    def reads(self, sequences: Sequence[int], lengths: Sequence[int]) -> Reads:
        """Return the slots that a step reads for these sequences, each padded to the longest one."""
        number, longest = len(sequences), max(lengths)
        tables = [self.tables[sequence] for sequence in sequences]
        firsts = [table[0] for table in tables]
        steps = {b - a for a, b in pairwise(firsts)} or {0}
        joined = all(table[-1] - table[0] == len(table) - 1 for table in tables)
        size = self.block_tokens
        if joined and len(steps) == 1 and min(steps) >= 0 and firsts[-1] * size + longest <= self.num_blocks * size:
            return Reads(number, longest, None, firsts[0] * size, min(steps) * size)
        rows = [self.places(sequence, 0, length) for sequence, length in zip(sequences, lengths, strict=True)]
        padded = [row + row[:1] * (longest - len(row)) for row in rows]
        return Reads(number, longest, torch.tensor(padded, device=self.device))
