"""Sums over ranks inside a layer's function: the caller, who knows how a dim is cut, passes them."""

from __future__ import annotations

from typing import Protocol

import torch

from perfmodel.workload.graph import Pass


class Reduce(Protocol):
    def __call__(self, tensor: torch.Tensor, *, phase: Pass, largest: bool = False) -> torch.Tensor:
        """Sum, or maximum, over the ranks that have other shares of the dim."""


def whole(tensor: torch.Tensor, *, phase: Pass, largest: bool = False) -> torch.Tensor:
    """The tensor: no dim is cut."""
    return tensor
