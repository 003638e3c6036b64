"""Recurrent states of sequences, which replace keys and values: one slot per sequence, and mixers that continue from a state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from perfmodel.execute.layers.scans import causal_conv_on
from perfmodel.execute.uniform.recurrent import DeltaMixer, MambaMixer, RecurrentMixer
from perfmodel.foundation.errors import RunError
from perfmodel.workload.config import TransformerConfig


def state_shapes(config: TransformerConfig, mixer: str, tp: int) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of a layer's state per sequence on one rank: last inputs of the convolution [taps - 1, m, c], and the state of
    each head [m, heads, ...]; none for a layer without a state."""
    spec = config.recurrence_of(mixer)
    if spec is None:
        return ()
    groups, *state = spec.state_shape
    return (spec.conv_kernel - 1, groups // tp, spec.group_channels), (groups // tp, *state)


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


class CachedStates(RecurrentMixer):
    """Recurrent mixer that continues sequences: several positions by chunks, a single position as a decode step.

    index   index of the layer
    """

    index: int

    def _run(self, mixed: torch.Tensor, steps: torch.Tensor, conv: Sequence[torch.Tensor], scan: Sequence[torch.Tensor]) -> torch.Tensor:
        """Compute [1, t, m, c], [1, t, m, ...] -> [1, t, m, o]."""
        cache, step = self.sharding.now()  # type: ignore[attr-defined]
        pools = cache.states.pools[self.index]
        rows = []
        for group in step.groups:
            x, given = (tensor[0, group.rows : group.stop].unflatten(0, (-1, group.queries)) for tensor in (mixed, steps))
            last, state = (group.slots.of(pool) for pool in pools)
            y = self.scan.onward(causal_conv_on(x, conv, last), given, scan, state, self.chunk_of(x))
            for pool, values in zip(pools, (last, state), strict=True):
                group.slots.put(pool, values)
            rows.append(y.flatten(0, 1))
        return torch.cat(rows).unsqueeze(0)


class CachedMamba(CachedStates, MambaMixer):
    pass


class CachedDelta(CachedStates, DeltaMixer):
    pass


#: By the mixer of a layer.
CACHED_STATES: dict[str, type[CachedMamba] | type[CachedDelta]] = {"mamba": CachedMamba, "delta": CachedDelta}
