"""Attention masks: the keys that each query sees."""

from __future__ import annotations

import torch


def seen(queries: torch.Tensor, keys: torch.Tensor, window: int = 0, *, chunked: bool = False) -> torch.Tensor:
    """Return whether each query sees each key [..., q, z], from their positions [..., q] and [z].

    window   number of keys that a query sees, or (`chunked`) length of the chunk within which it sees keys; 0: all earlier keys
    """
    query, key = queries.unsqueeze(-1), keys
    result = key <= query
    if window and chunked:
        return result & (key // window == query // window)
    return result & (key > query - window) if window else result


def causal(queries: int, keys: int, window: int = 0, *, chunked: bool = False, device: torch.device) -> torch.Tensor:
    """Return the mask [q, z] of queries at the last positions of the keys' sequence."""
    positions = torch.arange(keys, device=device)
    return seen(positions[keys - queries :], positions, window, chunked=chunked)


def marked(chosen: torch.Tensor, keys: int) -> torch.Tensor:
    """Compute [..., top] -> [..., z]: whether a query chose a key."""
    return torch.zeros(*chosen.shape[:-1], keys, dtype=torch.bool, device=chosen.device).scatter_(-1, chosen.long(), True)


def additive(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the additive score bias: -inf for keys that a query does not see."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)


def heads_of(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return keys or values [b, g, z, d] repeated for each query head of `like` [b, n, q, d]."""
    repeats = like.shape[1] // x.shape[1]
    return x.repeat_interleave(repeats, dim=1) if repeats > 1 else x
