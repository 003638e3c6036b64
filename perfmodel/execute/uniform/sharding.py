"""How a rank's copy of the model is cut: what its modules must know beyond their own local shapes."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from perfmodel.execute.layers import rotary
from perfmodel.workload.routing import RoutingCounts


@dataclass(frozen=True, slots=True)
class ExpertSharding:
    """Experts are dealt over ep, each of them cut over etp.

    gathers   tokens are gathered over ep, and what is made of them is added up
    once      a token travels once to each rank of ep, however many of its experts are there
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

    exchanges_heads   attention has the whole sequence of some heads, by all-to-alls over cp; else its own queries, and all keys gathered
    tp_group        over which partial sums are added up; None on one rank
    angles          cosines and sines that all layers read, made once
    loss_scale      of what modules add to the loss for each token
    positions       of the tokens where they are not one chunk of a sequence [s]; None: they are
    dropout         probability; only audits drop
    is_abstract     tensors have no values (an audit): fused attention need not be told which keys a query sees, which it takes as an
                    argument on a GPU and as a tensor on a CPU; and experts are chosen in turn, so that splits are known
    routing         how many tokens each rank sends to each expert, whatever their scores; None: as they choose
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
        """Place of the heads of this rank's attention among those of all ranks: tp cuts them first."""
        return self.tp_rank * self.cp + self.cp_rank if self.exchanges_heads else self.tp_rank


def rotary_angles(sharding: Sharding, x: torch.Tensor, depth: int, *, of_residual: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [s, depth] of this rank's positions, for x[b, s, n, d]; made once.

    of_residual   of those of its residual stream, which sequence parallelism cuts further
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
