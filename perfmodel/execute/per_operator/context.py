"""Context of an operator's torch function: how its dims are cut, and collectives over the axes that cut them."""

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
from perfmodel.workload.graph import Operator, Pass


@dataclass(frozen=True, slots=True)
class OperatorContext:
    """One operator on one rank.

    sizes    size of each dim, without what pads uneven shares
    imitate  parts of each dim in the plan that one process is compared with: a rule that is other mathematics where a dim is cut
             (statistics of each share alone) is followed in one process too
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
        """Which share of a dim this rank has."""
        return self.mesh.index(self.axes(dim))

    def positions(self, dim: str, local_size: int, device: torch.device) -> torch.Tensor:
        """Where the entries of the local share lie in the whole dim."""
        return torch.arange(local_size, device=device) + self.index(dim) * local_size

    def purpose(self, phase: Pass) -> Purpose:
        return Purpose(phase, self.operator.output.tensor, self.operator.name, "own")

    def all_reduce(self, tensor: torch.Tensor, dims: tuple[str, ...], phase: Pass, *, largest: bool = False) -> torch.Tensor:
        """The sum over the ranks that have other shares of `dims`, in place where there are any."""
        return network_mesh.all_reduce(self.mesh, tensor, self.axes(*dims), self.purpose(phase), largest=largest)

    def gather_last(self, tensor: torch.Tensor, dim: str, phase: Pass) -> torch.Tensor:
        """The whole of a tensor whose last position is cut where `dim` is."""
        if self.parts(dim) == 1:
            return tensor
        pieces = network_mesh.all_gather(self.mesh, tensor, self.axes(dim), self.purpose(phase))[self._order(dim)]
        return pieces.movedim(0, -2).reshape(*tensor.shape[:-1], -1)

    def scatter_last(self, tensor: torch.Tensor, dim: str, phase: Pass) -> torch.Tensor:
        """This rank's share, at the last position, of the sum over the ranks."""
        parts = self.parts(dim)
        if parts == 1:
            return tensor
        pieces = tensor.unflatten(-1, (parts, -1)).movedim(-2, 0)[_inverse(self._order(dim))]
        return network_mesh.reduce_scatter(self.mesh, pieces, self.axes(dim), self.purpose(phase))

    def _order(self, dim: str) -> list[int]:
        """Place in the group of the rank with each share of the dim."""
        axes = self.axes(dim)
        shares = [self.mesh.index(axes, rank) for rank in self.mesh.members(axes)]
        return _inverse(shares)

    def neighbours(self, dim: str) -> tuple[int, int]:
        """Ranks of the world with the shares before and after; -1 where there is none."""
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
        """Send `up` to the share before and `down` to the one after, and fill what comes from them; nothing at the ends.

        noted      elements that an inner rank sends, as the operator declares them; it sends corners too where a second dim is cut
        is_noted   False of what only receives: who sends notes it
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
    found = [0] * len(order)
    for place, value in enumerate(order):
        found[value] = place
    return found
