"""Mixers with a recurrent state instead of keys: Mamba-2 and the gated delta network (`workload/decoder/recurrent.py`).

Groups of heads are sharded over tp; sequences are not sharded. Saved: outputs of the first products, the scan's output, norm statistics.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from perfmodel.execute.layers.norm import gated_norm
from perfmodel.execute.layers.scans import Scan, delta_scan, scanned, state_scan
from perfmodel.execute.local import applied_locally, local_tensor
from perfmodel.execute.uniform.sharding import Sharding
from perfmodel.workload.config import TransformerConfig


class _Weight(nn.Module):
    """Parameters of a kernel of the mixer."""

    def __init__(self, shape: tuple[int, ...], *, bias: bool, device: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, device=device))
        if bias:
            self.bias = nn.Parameter(torch.empty(shape[0], device=device))


class RecurrentMixer(nn.Module):
    """Common recurrent mixer: input products, then per group the convolution, the scan and the gated norm, and the output product.

    chunk, groups, heads   positions per chunk; groups over all ranks; heads per group
    state                  the two dims of a head's state, in the order of the scan
    shared_norm            name of a norm whose weight is shared by all heads; "": each head has its own
    scan                   operators of the scan
    """

    chunk: int
    groups: int
    heads: int
    state: Sequence[int]
    shared_norm: str = ""
    scan: Scan

    def __init__(self, sharding: Sharding) -> None:
        super().__init__()
        self.sharding = sharding

    def chunk_of(self, x: torch.Tensor) -> int:
        return min(self.chunk, x.shape[1])

    def _by_group(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of a parameter that is sharded by groups."""
        return local_tensor(parameter).unflatten(0, (self.groups // self.sharding.tp, -1))

    def _scanned(self, mixed: torch.Tensor, steps: torch.Tensor, names: Sequence[str]) -> torch.Tensor:
        """Return the scan's output [b, s, m, o] for mixed [b, s, m, c] and steps [b, s, m, ...]; names: the scan's parameters."""
        conv = [self._by_group(parameter) for parameter in self.conv.parameters()]
        parameters = [self._by_group(getattr(self, name)) for name in names]
        return self._run(mixed, steps, conv, parameters)

    def _run(self, mixed: torch.Tensor, steps: torch.Tensor, conv: Sequence[torch.Tensor], scan: Sequence[torch.Tensor]) -> torch.Tensor:
        return scanned(mixed, steps, conv, scan, scan=self.scan, state=(self.heads, *self.state), chunk=self.chunk_of(mixed))


class MambaMixer(RecurrentMixer):
    def __init__(self, config: TransformerConfig, sharding: Sharding, *, device: str) -> None:
        super().__init__(sharding)
        mamba = config.parts.mamba
        assert mamba is not None
        self.chunk = mamba.chunk_size
        self.groups, self.heads, *self.state = mamba.state_shape
        self.scan = state_scan
        self.inner = mamba.inner_size // mamba.num_groups
        mixed = mamba.group_channels
        self.pieces = self.inner, mixed, self.heads
        self.in_proj = nn.Linear(config.hidden_size, self.groups * sum(self.pieces), bias=mamba.bias, device=device)
        self.conv = _Weight((self.groups * mixed, mamba.conv_kernel), bias=mamba.conv_bias, device=device)
        for name in ("dt_bias", "A_log", "D"):
            self.register_parameter(name, nn.Parameter(torch.empty(mamba.num_heads, device=device)))
        self.mamba_norm = _Weight((mamba.inner_size,), bias=False, device=device)
        self.out_proj = nn.Linear(mamba.inner_size, config.hidden_size, bias=mamba.bias, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute [b, s, h] -> [b, s, h]; partial over tp."""
        gate, mixed, steps = self.in_proj(x).unflatten(-1, (-1, sum(self.pieces))).split(self.pieces, -1)
        y = self._scanned(mixed, steps, ("dt_bias", "A_log", "D"))
        y = gated_norm(y, gate, self._by_group(self.mamba_norm.weight), self.inner, True)
        output: torch.Tensor = self.out_proj(y.flatten(2))
        return output


class DeltaMixer(RecurrentMixer):
    shared_norm = "delta_norm"

    def __init__(self, config: TransformerConfig, sharding: Sharding, *, device: str) -> None:
        super().__init__(sharding)
        delta = config.parts.delta
        assert delta is not None
        self.chunk = delta.chunk_size
        self.groups, self.heads, *self.state = delta.state_shape
        self.scan = delta_scan
        inner = self.heads * delta.value_head_dim
        self.pieces = delta.group_channels, inner
        size = config.hidden_size
        self.in_proj_qkvz = nn.Linear(size, self.groups * sum(self.pieces), bias=False, device=device)
        self.in_proj_ba = nn.Linear(size, 2 * delta.num_value_heads, bias=False, device=device)
        self.conv = _Weight((self.groups * self.pieces[0], delta.conv_kernel), bias=False, device=device)
        for name in ("dt_bias", "A_log"):
            self.register_parameter(name, nn.Parameter(torch.empty(delta.num_value_heads, device=device)))
        self.delta_norm = _Weight((delta.value_head_dim,), bias=False, device=device)
        self.out_proj = nn.Linear(self.groups * inner, size, bias=False, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute [b, s, h] -> [b, s, h]; partial over tp."""
        mixed, gate = self.in_proj_qkvz(x).unflatten(-1, (-1, sum(self.pieces))).split(self.pieces, -1)
        y = self._scanned(mixed, self.in_proj_ba(x).unflatten(-1, (-1, 2 * self.heads)), ("dt_bias", "A_log"))
        y = gated_norm(y, gate, applied_locally(self.delta_norm.weight), self.state[1], False)
        output: torch.Tensor = self.out_proj(y.flatten(2))
        return output
