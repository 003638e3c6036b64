"""Sharding of a rank's copy of the model: the information that modules need beyond their local shapes."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from perfmodel.execute.layers import rotary
from perfmodel.workload.routing import RoutingCounts


@dataclass(frozen=True, slots=True)
class ExpertSharding:
    """Experts are distributed over ep; each of them is sharded over etp.

    gathers   all-gather tokens over ep, and sum the partial outputs
    once      send a token once to each rank of ep, independent of the number of its experts there
    """

    ep: int = 1
    ep_rank: int = 0
    ep_group: dist.ProcessGroup | None = None
    etp: int = 1
    etp_rank: int = 0
    etp_group: dist.ProcessGroup | None = None
    gathers: bool = False
    once: bool = False


@dataclass(slots=True)
class Sharding:
    """Sharding of all modules of a rank.

    exchanges_heads   attention over the full sequence of some heads, by all-to-alls over cp; else of local queries over gathered keys
    tp_group        group that reduces partial sums; None on one rank
    angles          cosines and sines shared by all layers, computed once
    loss_scale      weight per token of losses that modules add
    positions       positions of the tokens if they are not one chunk of a sequence [s]; else None
    dropout         dropout probability; nonzero only in audits
    is_abstract     tensors have no values (an audit): fused attention then needs no mask, which is an argument on a GPU and a tensor on
                    a CPU, and experts are chosen round-robin, so that splits are known
    routing         given number of tokens from each rank to each expert; None: by the router
    """

    tp: int = 1
    tp_rank: int = 0
    tp_group: dist.ProcessGroup | None = None
    cp: int = 1
    cp_rank: int = 0
    cp_group: dist.ProcessGroup | None = None
    sequence_parallel: bool = False
    exchanges_heads: bool = False
    dropout: float = 0.0
    is_abstract: bool = False
    experts: ExpertSharding = ExpertSharding()
    routing: RoutingCounts | None = None
    angles: dict[object, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    positions: torch.Tensor | None = None
    loss_scale: float = 1.0

    @property
    def head_rank(self) -> int:
        """Index of this rank's attention heads among those of all ranks: tp shards them first."""
        return self.tp_rank * self.cp + self.cp_rank if self.exchanges_heads else self.tp_rank


def rotary_angles(sharding: Sharding, x: torch.Tensor, depth: int, *, of_residual: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines [s, depth] of this rank's positions, for x[b, s, n, d]; cached.

    of_residual   positions of its residual stream, which sequence parallelism shards further
    """
    length = x.shape[1]
    chunk = sharding.cp_rank
    if of_residual and sharding.sequence_parallel:
        chunk = chunk * sharding.tp + sharding.tp_rank
    key = (chunk, length, depth, x.dtype, x.device)
    if key not in sharding.angles:
        position = sharding.positions
        if position is None:
            position = torch.arange(chunk * length, (chunk + 1) * length, device=x.device)
        sharding.angles[key] = rotary.rotary_angles(position, depth, x.dtype)
    return sharding.angles[key]
