"""Context of an operator's torch function: the sharding of its dims, and collectives over their mesh axes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from perfmodel.execute.per_operator import mesh as network_mesh
from perfmodel.execute.per_operator.mesh import NetworkMesh, Purpose
from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.foundation.errors import RunError
from perfmodel.parallel.algebra.sharding import Sharding
from perfmodel.workload.graph import Operator
from perfmodel.workload.work import Pass


@dataclass(frozen=True, slots=True)
class OperatorContext:
    """One operator on one rank.

    sizes    size of each dim, without the padding of uneven shards
    imitate  shards per dim in the plan that a single process is compared with. Rules whose result depends on the sharding
             (statistics per shard) then compute the sharded result in one process too
    """

    mesh: NetworkMesh
    operator: Operator
    sharding: Sharding
    sizes: Mapping[str, int]
    imitate: Mapping[str, int] = field(default_factory=dict)

    def axes(self, *dims: str) -> tuple[str, ...]:
        return tuple(axis for dim in dims if dim for axis in self.sharding.get(dim, ()))

    def parts(self, *dims: str) -> int:
        return self.mesh.size(self.axes(*dims))

    def index(self, dim: str) -> int:
        """Return the index of this rank's shard of a dim."""
        return self.mesh.index(self.axes(dim))

    def positions(self, dim: str, local_size: int, device: torch.device) -> torch.Tensor:
        """Return the global positions of the local shard's entries in a dim."""
        return torch.arange(local_size, device=device) + self.index(dim) * local_size

    def purpose(self, phase: Pass) -> Purpose:
        return Purpose(phase, self.operator.output.tensor, self.operator.name, "own")

    def all_reduce(self, tensor: torch.Tensor, dims: tuple[str, ...], phase: Pass, *, largest: bool = False) -> torch.Tensor:
        """Sum over the ranks with other shards of `dims`; in place if there are any."""
        return network_mesh.all_reduce(self.mesh, tensor, self.axes(*dims), self.purpose(phase), largest=largest)

    def gather_last(self, tensor: torch.Tensor, dim: str, phase: Pass) -> torch.Tensor:
        """All-gather a tensor whose last position is sharded like `dim`."""
        if self.parts(dim) == 1:
            return tensor
        pieces = network_mesh.all_gather(self.mesh, tensor, self.axes(dim), self.purpose(phase))[self._order(dim)]
        return pieces.movedim(0, -2).reshape(*tensor.shape[:-1], -1)

    def scatter_last(self, tensor: torch.Tensor, dim: str, phase: Pass) -> torch.Tensor:
        """Reduce-scatter along the last position: return this rank's shard of the sum."""
        parts = self.parts(dim)
        if parts == 1:
            return tensor
        pieces = tensor.unflatten(-1, (parts, -1)).movedim(-2, 0)[_inverse(self._order(dim))]
        return network_mesh.reduce_scatter(self.mesh, pieces, self.axes(dim), self.purpose(phase))

    def _order(self, dim: str) -> list[int]:
        """Return the group position of the rank with each shard of the dim."""
        axes = self.axes(dim)
        shares = [self.mesh.index(axes, rank) for rank in self.mesh.members(axes)]
        return _inverse(shares)

    def neighbours(self, dim: str) -> tuple[int, int]:
        """Return the world ranks with the previous and the next shard; -1 where there is none."""
        axes = self.axes(dim)
        by_share = {self.mesh.index(axes, rank): self.mesh.world_rank(rank) for rank in self.mesh.members(axes)}
        mine = self.index(dim)
        return by_share.get(mine - 1, -1), by_share.get(mine + 1, -1)

    def trade(
        self,
        dim: str,
        up: torch.Tensor,
        down: torch.Tensor,
        from_up: torch.Tensor,
        from_down: torch.Tensor,
        phase: Pass,
        noted: int,
        *,
        is_noted: bool = True,
    ) -> None:
        """Send `up` to the previous shard and `down` to the next one, and receive from both; no transfer at the ends.

        noted      elements that an inner rank sends by the operator's declaration; with a second sharded dim, corners are sent too
        is_noted   False for a pure receive: the sender records the transfer
        """
        before, after = self.neighbours(dim)
        work: list[Any] = []
        group = self.mesh.process_group(self.axes(dim))
        if is_noted:
            self.mesh.note(CollectiveKind.SEND_RECV, self.axes(dim), noted, self.purpose(phase), issued=up.numel() + down.numel())
        for rank, outgoing, incoming in ((before, up, from_up), (after, down, from_down)):
            if rank < 0:
                continue
            if outgoing.numel():
                work.append(dist.P2POp(dist.isend, outgoing, rank, group))
            if incoming.numel():
                work.append(dist.P2POp(dist.irecv, incoming, rank, group))
        for request in dist.batch_isend_irecv(work) if work else ():
            request.wait()

    def fail(self, message: str) -> RunError:
        return RunError(f"operator {self.operator.name}: {message}")


def _inverse(order: list[int]) -> list[int]:
    inverse = [0] * len(order)
    for index, value in enumerate(order):
        inverse[value] = index
    return inverse
