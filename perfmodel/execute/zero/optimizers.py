"""torch's optimizers over the plain local tensors of a rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from perfmodel.execute.local import local_tensor
from perfmodel.workload.job import Optimizer

LEARNING_RATE = 1e-4
MOMENTUM = 0.9


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
