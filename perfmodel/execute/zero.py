"""ZeRO on one rank, for any program: flat buffers of a unit, and torch's optimizers over local shards.

A unit is the parameters whose gradients are reduced in one collective, an all-reduce or, for ZeRO 1, a reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from perfmodel.execute.compression import GradientHook
from perfmodel.execute.local import local_tensor
from perfmodel.workload.job import PRECISION_POLICIES, Optimizer, Precision

LEARNING_RATE = 1e-4
MOMENTUM = 0.9
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

    Gradients accumulate in the buffer. The last one of a step starts their reduction, which overlaps with the rest of backward.

    shard_group     ranks that shard gradients, optimizer state and update; None: no sharding
    replica_group   ranks with the same shards; None: no replicas
    hook            compression of the reduction over replicas, which gives their mean; None: gradients are summed as they are
    scale           factor of the reduced gradients
    places          slice of each parameter in the buffers, in order
    master          this rank's shard that the optimizer updates: a view of the weights if both have the same dtype
    missing         number of gradients that are missing in this step
    filled          parameters of which a micro-batch of this step has computed a gradient
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        *,
        shard_group: dist.ProcessGroup | None,
        replica_group: dist.ProcessGroup | None,
        dtypes: Dtypes,
        device: str,
        hook: GradientHook | None = None,
        scale: float = 1.0,
    ) -> None:
        self.hook, self.scale = hook, scale
        self.shard_group, self.replica_group, self.dtypes = shard_group, replica_group, dtypes
        ways = dist.get_world_size(shard_group) if shard_group is not None else 1
        index = dist.get_rank(shard_group) if shard_group is not None else 0
        self.places: dict[str, slice] = {}
        end = 0
        for name, size in sizes.items():
            self.places[name] = slice(end, end + size)
            end += size
        padded = -(-end // ways) * ways
        self.weights = torch.zeros(padded, dtype=dtypes.weight, device=device)
        self.gradients = torch.zeros(padded, dtype=dtypes.reduce, device=device)
        piece = padded // ways
        self.shard = slice(index * piece, (index + 1) * piece)
        if dtypes.master == dtypes.weight:
            self.master = self.weights[self.shard]
        else:
            self.master = torch.zeros(piece, dtype=dtypes.master, device=device)
        self.missing = 0
        self.filled: set[str] = set()
        self._work: list[Any] = []

    @torch.no_grad()
    def fill(self, pieces: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Set the weights. The master copy is not rounded, so that small updates are not lost in the precision of the weights."""
        exact = torch.zeros_like(self.weights, dtype=self.dtypes.master)
        for name, piece in pieces:
            exact[self.places[name]] = piece.reshape(-1)
        self.weights.copy_(exact)
        self.master.copy_(exact[self.shard])

    def begin_step(self, num_gradients: int) -> None:
        self.missing = num_gradients
        self.filled.clear()

    def accumulate(self, name: str, local: Callable[[torch.Tensor], torch.Tensor], parameter: torch.Tensor) -> None:
        """Add a finished gradient to the buffer. (A hook of the parameters, which the unit does not hold: a cycle would keep them alive.)

        local   returns this rank's part of a gradient
        """
        assert parameter.grad is not None
        gradient, target = local(parameter.grad).reshape(-1), self.gradients[self.places[name]]
        if name in self.filled:
            target.add_(gradient)
        else:
            target.copy_(gradient)
            self.filled.add(name)
        parameter.grad = None
        self.missing -= 1
        if not self.missing:
            self.launch()

    def complete(self) -> None:
        """Start the reduction if a parameter without a reader has no gradient."""
        if self.missing > 0:
            for name, span in self.places.items():
                if name not in self.filled:
                    self.gradients[span].zero_()
            self.launch()

    def launch(self) -> None:
        """Start the reduction of the gradients over one group, overlapped with computation."""
        if self.shard_group is not None:
            self._work.append(dist.reduce_scatter_tensor(self.gradients[self.shard], self.gradients, group=self.shard_group, async_op=True))
        elif self.hook is not None:
            self._work.append(self.hook.reduce(self.gradients))
        elif self.replica_group is not None:
            self._work.append(dist.all_reduce(self.gradients, group=self.replica_group, async_op=True))

    def finish(self) -> None:
        """Wait for the reduction, then all-reduce shards over their replicas."""
        for work in self._work:
            work.wait()
        self._work.clear()
        if self.scale != 1.0:
            self.gradients.mul_(self.scale)
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


def build_optimizer(kind: Optimizer, shards: list[torch.Tensor], *, learning_rate: float = LEARNING_RATE) -> torch.optim.Optimizer:
    """Return torch's optimizer over plain local tensors: on DTensors, every elementary operator would pay the dispatch overhead."""
    fused = all(shard.dtype in (torch.float32, torch.bfloat16) for shard in shards)
    match kind:
        case Optimizer.ADAMW:
            return torch.optim.AdamW(shards, lr=learning_rate, fused=fused)
        case Optimizer.ADAM:
            return torch.optim.Adam(shards, lr=learning_rate, fused=fused)
        case Optimizer.MOMENTUM:
            return torch.optim.SGD(shards, lr=learning_rate, momentum=MOMENTUM, fused=fused)
        case Optimizer.SGD:
            return torch.optim.SGD(shards, lr=learning_rate, fused=fused)
    raise AssertionError(kind)


def state_of(optimizer: torch.optim.Optimizer | None) -> Iterator[torch.Tensor]:
    """Yield the optimizer's state tensors; none before its first step."""
    for state in optimizer.state.values() if optimizer is not None else ():
        yield from (tensor for tensor in state.values() if torch.is_tensor(tensor))


class ShardOptimizer:
    """An optimizer over the local shards of parameters, built at its first step. `optimizer` is None until then."""

    def __init__(self, kind: Optimizer, *, learning_rate: float = LEARNING_RATE) -> None:
        self._kind, self._learning_rate = kind, learning_rate
        self.optimizer: torch.optim.Optimizer | None = None
        self._shards: list[torch.Tensor] = []

    def step(self, parameters: Iterable[torch.Tensor]) -> None:
        """Run a step on the same parameters each time, and clear their gradients."""
        pairs = [(p, p.grad) for p in parameters if p.grad is not None]
        if self.optimizer is None:
            # Views of the local shards, so that the optimizer works on plain tensors.
            self._shards = [local_tensor(p).detach() for p, _ in pairs]
            # small weights over many ranks may leave this rank without any entries, but torch's optimizers require a parameter
            held = [shard for shard in self._shards if shard.numel()] or self._shards[:1]
            if not held:
                return
            self.optimizer = build_optimizer(self._kind, held, learning_rate=self._learning_rate)
        for shard, (parameter, gradient) in zip(self._shards, pairs, strict=True):
            shard.grad = local_tensor(gradient)
            parameter.grad = None
        self.optimizer.step()
        for shard in self._shards:
            shard.grad = None
