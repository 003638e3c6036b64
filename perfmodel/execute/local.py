"""Tensors and their bytes, local shards of distributed ones, and collectives along one of their dims."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial


def num_bytes(tensors: Iterable[torch.Tensor]) -> float:
    return float(sum(tensor.numel() * tensor.element_size() for tensor in tensors))


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local shard of a DTensor, within the autograd graph, or any other tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def applied_locally(weight: torch.Tensor) -> torch.Tensor:
    """Return a replicated weight that each rank applies to its own tokens or heads: its gradient is partial."""
    return weight.to_local(grad_placements=[Partial()]) if isinstance(weight, DTensor) else weight


def placed_like(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return a local shard as a DTensor with the placements of the parameter; unchanged if that is no DTensor."""
    if not isinstance(parameter, DTensor):
        return tensor
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(tensor, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride())


def gathered(tensor: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the all-gathered chunks of a dim, in the order of the ranks."""
    pieces = torch.empty((dist.get_world_size(group), *tensor.shape), dtype=tensor.dtype, device=tensor.device)
    dist.all_gather_into_tensor(pieces.view(-1), tensor.contiguous().view(-1), group=group)
    # [ways, ..., local, ...] -> [..., ways * local, ...]
    return pieces.movedim(0, dim).flatten(dim, dim + 1)


def scattered(tensor: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Return this rank's chunk along the dim of the sum over the group."""
    pieces = tensor.unflatten(dim, (dist.get_world_size(group), -1)).movedim(dim, 0).contiguous()
    result = torch.empty(pieces.shape[1:], dtype=tensor.dtype, device=tensor.device)
    dist.reduce_scatter_tensor(result.view(-1), pieces.view(-1), group=group)
    return result
