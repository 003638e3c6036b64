"""Comparison of the tensors of each rank with those of one process, which rank 0 ran."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
import torch.distributed as dist

from perfmodel.execute.launch.launch import Worker

_Item = TypeVar("_Item")


def from_first_rank(value: _Item) -> _Item:
    """Return the value of rank 0 on every rank."""
    holder = [value]
    dist.broadcast_object_list(holder)
    return holder[0]


def errors_on_rank(
    worker: Worker,
    local: Mapping[str, torch.Tensor],
    reference: Mapping[str, torch.Tensor],
    expected: Callable[[str, torch.Tensor], Mapping[str, torch.Tensor]],
    *,
    dtype: torch.dtype,
    floor: float = 0.0,
) -> dict[str, float]:
    """Return the largest deviation of each tensor of this rank, relative to the largest entry of what is expected. Collective.

    local       tensors of this rank, by name
    reference   tensors of one process, by name; on rank 0 only
    expected    (name, tensor of one process) -> the tensors of this rank that it determines, by name; others may be among them
    dtype       in which they are compared
    floor       tensors smaller than this share of the largest reference are compared relative to that share
    """
    shapes = from_first_rank({name: tuple(tensor.shape) for name, tensor in reference.items()})
    largest, deviations, sizes = 0.0, dict[str, float](), dict[str, float]()
    for name, shape in shapes.items():
        worker.beat(f"comparing {name}")
        if worker.rank == 0:
            tensor = reference[name].to(worker.device, dtype).contiguous()
        else:
            tensor = torch.empty(shape, dtype=dtype, device=worker.device)
        dist.broadcast(tensor, 0)
        largest = max(largest, _largest(tensor))
        for key, wanted in expected(name, tensor).items():
            if key not in local:
                continue
            is_alike = local[key].shape == wanted.shape
            deviations[key], sizes[key] = _largest(local[key].to(dtype) - wanted) if is_alike else float("inf"), _largest(wanted)
    missing = set(local) - set(sizes)
    assert not missing, f"no reference for {sorted(missing)}"
    least = floor * largest
    # nan stays nan, and the comparison with the tolerance fails
    return {name: deviation / (max(sizes[name], least) or 1.0) for name, deviation in deviations.items()}


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0
