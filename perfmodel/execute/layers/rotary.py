"""Rotary position embedding: pairs of entries half a head apart are rotated by an angle proportional to the position."""

from __future__ import annotations

import torch

#: Default base of the frequencies. Its value affects neither time nor memory.
ROTARY_BASE = 10000.0


def rotary_angles(positions: torch.Tensor, depth: int, dtype: torch.dtype, base: float = ROTARY_BASE) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines [s, depth] of positions [s], computed in at least float32."""
    exact = torch.promote_types(dtype, torch.float32)
    half = depth // 2
    frequency = base ** (-torch.arange(half, device=positions.device, dtype=exact) / half)
    angle = torch.outer(positions.to(exact), frequency).repeat(1, 2)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, *, start: int = 0) -> torch.Tensor:
    """Rotate the entries `start` to `start + depth` of x [b, s, ..., d] by angles [s, depth]."""
    depth = cosine.shape[-1]
    if depth < x.shape[-1]:
        before, turned, after = x.split((start, depth, x.shape[-1] - start - depth), dim=-1)
        return torch.cat([piece for piece in (before, rotate(turned, cosine, sine), after) if piece.shape[-1]], dim=-1)
    shape = (x.shape[1], *(1,) * (x.dim() - 3), depth)
    first, second = x.chunk(2, dim=-1)
    return x * cosine.view(shape) + torch.cat((-second, first), dim=-1) * sine.view(shape)
