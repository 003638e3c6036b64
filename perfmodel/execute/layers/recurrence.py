"""Reference recurrences over a sequence and the operators around them: plain torch, used by both executors.

Shapes: b sequences, s positions, m groups of heads. A recurrence starts from the state of the preceding positions and returns its
final state. A sequence can therefore run in pieces: by chunks on one rank, or by shards on several.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def causal_conv(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Compute silu of the depthwise convolution: x [b, taps - 1 + s, m, c], weight [m, c, taps], bias [m, c] -> [b, s, m, c]."""
    channels = weight.shape[0] * weight.shape[1]
    shift = None if bias is None else bias.flatten()
    mixed = F.conv1d(x.flatten(2).transpose(1, 2), weight.reshape(channels, 1, -1), shift, groups=channels)
    return F.silu(mixed).transpose(1, 2).unflatten(-1, weight.shape[:2])


def state_scan(
    x: torch.Tensor,
    steps: torch.Tensor,
    before: torch.Tensor,
    dt_bias: torch.Tensor,
    a_log: torch.Tensor,
    skip: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute h = a h + dt B x, y = C h + D x of each head, with a = exp(-dt exp(A_log)) and dt = softplus(steps + dt_bias).

    x        [b, s, m, heads * width + 2 * state]: head inputs, then B and C of the group
    before   [b, m, heads, width, state]: h before the first position. The second result is h after the last.
    """
    width, state = before.shape[-2:]
    values, b, c = x.split((x.shape[-1] - 2 * state, state, state), -1)
    values = values.unflatten(-1, (-1, width))  # [b,s,m,heads,width]
    dt = F.softplus(steps + dt_bias)
    so_far = (-dt * a_log.exp()).cumsum(1)
    passed = so_far.unsqueeze(2) - so_far.unsqueeze(1)  # [b, to, from, m, heads]
    length = x.shape[1]
    seen = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()[:, :, None, None]
    weights = passed.masked_fill(~seen, -torch.inf).exp() * torch.einsum("bimn,bjmn->bijm", c, b).unsqueeze(-1)
    y = torch.einsum("bijmh,bjmh,bjmhp->bimhp", weights, dt, values) + skip.unsqueeze(-1) * values
    y = y + torch.einsum("bimh,bimn,bmhpn->bimhp", so_far.exp(), c, before)
    left = torch.einsum("bjmh,bjmh,bjmhp,bjmn->bmhpn", (so_far[:, -1:] - so_far).exp(), dt, values, b)
    return y.flatten(-2), before * so_far[:, -1].exp()[..., None, None] + left


def delta_scan(
    x: torch.Tensor, strengths: torch.Tensor, before: torch.Tensor, dt_bias: torch.Tensor, a_log: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute S = a S + beta k (v - k a S), y = q S of each head, k and q normalised, a = exp(-softplus(. + dt_bias) exp(A_log)).

    x        [b, s, m, 2 * key + heads * value]: query, key, values of the group
    before   [b, m, heads, key, value]: S before the first position. The second result is S after the last.
    """
    depth, width = before.shape[-2:]
    q, k, v = x.split((depth, depth, x.shape[-1] - 2 * depth), -1)
    q, k = F.normalize(q, dim=-1) * depth**-0.5, F.normalize(k, dim=-1)
    v = v.unflatten(-1, (-1, width))  # [b,s,m,heads,width]
    writes, decays = strengths.chunk(2, -1)
    beta, decay = writes.sigmoid(), (-F.softplus(decays + dt_bias) * a_log.exp()).exp()
    state, outputs = before, []
    for position in range(x.shape[1]):
        state = state * decay[:, position, :, :, None, None]
        known = torch.einsum("bmk,bmhkv->bmhv", k[:, position], state)
        change = beta[:, position, :, :, None] * (v[:, position] - known)
        state = state + torch.einsum("bmk,bmhv->bmhkv", k[:, position], change)
        outputs.append(torch.einsum("bmk,bmhkv->bmhv", q[:, position], state))
    return torch.stack(outputs, 1).flatten(-2), state
