"""Flat buffers of a unit: parameters whose gradients are reduced in one collective, an all-reduce or, for ZeRO 1, a reduce-scatter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from perfmodel.workload.job import PRECISION_POLICIES, Precision

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Dtypes:
    """Dtypes of one run: weights in the forward pass, gradients in the reduction, and the optimizer's master copy."""

    weight: torch.dtype
    reduce: torch.dtype
    master: torch.dtype

    @property
    def has_master_copy(self) -> bool:
        return self.master != self.weight


def dtypes_of(precision: Precision) -> Dtypes:
    policy = PRECISION_POLICIES[precision]
    return Dtypes(weight=TORCH_DTYPES[policy.parameter], reduce=TORCH_DTYPES[policy.gradient_reduce], master=TORCH_DTYPES[policy.master])


class FlatUnit:
    """Contiguous weights and gradients of a unit, padded so that the ranks of `shard_group` have equal shards.

    shard_group     ranks that shard gradients, optimizer state and update; None: no sharding
    replica_group   ranks with the same shards; None: no replicas
    places          slice of each parameter in the buffers, in order
    master          this rank's shard that the optimizer updates: a view of the weights if both have the same dtype
    missing         number of gradients that are missing in this step; the last one starts the overlapped reduction
    """

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        shard_group: dist.ProcessGroup | None,
        replica_group: dist.ProcessGroup | None,
        dtypes: Dtypes,
        device: str,
    ) -> None:
        self.shard_group, self.replica_group, self.dtypes = shard_group, replica_group, dtypes
        ways = dist.get_world_size(shard_group) if shard_group is not None else 1
        index = dist.get_rank(shard_group) if shard_group is not None else 0
        starts = [sum(sizes[:number]) for number in range(len(sizes))]
        self.places = [slice(start, start + size) for start, size in zip(starts, sizes, strict=True)]
        padded = -(-sum(sizes) // ways) * ways
        self.weights = torch.zeros(padded, dtype=dtypes.weight, device=device)
        self.gradients = torch.zeros(padded, dtype=dtypes.reduce, device=device)
        piece = padded // ways
        self.shard = slice(index * piece, (index + 1) * piece)
        if dtypes.master == dtypes.weight:
            self.master = self.weights[self.shard]
        else:
            self.master = torch.zeros(piece, dtype=dtypes.master, device=device)
        self.missing = 0
        self._work: list[Any] = []

    def arrived(self, _: torch.Tensor) -> None:
        """Count a finished gradient, and start the reduction after the last one of the step. (A hook of the parameters.)"""
        self.missing -= 1
        if not self.missing:
            self.launch()

    def launch(self) -> None:
        """Start the reduction of the gradients over one group, overlapped with computation."""
        if self.shard_group is not None:
            self._work.append(dist.reduce_scatter_tensor(self.gradients[self.shard], self.gradients, group=self.shard_group, async_op=True))
        elif self.replica_group is not None:
            self._work.append(dist.all_reduce(self.gradients, group=self.replica_group, async_op=True))

    def finish(self) -> None:
        """Wait for the reduction, then all-reduce shards over their replicas."""
        for work in self._work:
            work.wait()
        self._work.clear()
        if self.shard_group is not None and self.replica_group is not None:
            dist.all_reduce(self.gradients[self.shard], group=self.replica_group)

    def full_gradients(self) -> torch.Tensor:
        """Return the reduced gradients of all shards."""
        if self.shard_group is None:
            return self.gradients
        gathered = torch.empty_like(self.gradients)
        dist.all_gather_into_tensor(gathered, self.gradients[self.shard].clone(), group=self.shard_group)
        return gathered


def update(optimizer: torch.optim.Optimizer, units: Sequence[FlatUnit]) -> None:
    """Run the optimizer on this rank's shards, and all-gather the new weights."""
    for unit in units:
        unit.master.grad = unit.gradients[unit.shard].to(unit.dtypes.master)
    optimizer.step()
    for unit in units:
        unit.master.grad = None
        if unit.dtypes.master != unit.dtypes.weight:
            unit.weights[unit.shard].copy_(unit.master)
    for unit in units:
        if unit.shard_group is not None:
            dist.all_gather_into_tensor(unit.weights, unit.weights[unit.shard].clone(), group=unit.shard_group)
