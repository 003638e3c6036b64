"""Recurrences over a sequence as their definitions say, and what lies around them: plain torch, for both ways to run a plan.

Shapes: b sequences, s positions, m groups of heads. A recurrence begins with the state that the positions before left and hands on its
own, so that a sequence may be run in pieces: by chunks on one rank, or by the shares of several.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def causal_conv(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [b, taps - 1 + s, m, c], weight [m, c, taps], bias [m, c] -> silu of the convolution of each channel by itself, [b, s, m, c]."""
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
    """h = a h + dt B x, y = C h + D x of each head, with a = exp(-dt exp(A_log)) and dt = softplus(steps + dt_bias).

    x        [b, s, m, heads * width + 2 * state]: what heads read, then B and C of the group
    before   [b, m, heads, width, state]: h before the first position; returned beside y: h after the last
    """
    width, state = before.shape[-2:]
    own, b, c = x.split((x.shape[-1] - 2 * state, state, state), -1)
    own = own.unflatten(-1, (-1, width))  # [b,s,m,heads,width]
    dt = F.softplus(steps + dt_bias)
    so_far = (-dt * a_log.exp()).cumsum(1)
    passed = so_far.unsqueeze(2) - so_far.unsqueeze(1)  # [b, to, from, m, heads]
    length = x.shape[1]
    seen = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()[:, :, None, None]
    weights = passed.masked_fill(~seen, -torch.inf).exp() * torch.einsum("bimn,bjmn->bijm", c, b).unsqueeze(-1)
    y = torch.einsum("bijmh,bjmh,bjmhp->bimhp", weights, dt, own) + skip.unsqueeze(-1) * own
    y = y + torch.einsum("bimh,bimn,bmhpn->bimhp", so_far.exp(), c, before)
    left = torch.einsum("bjmh,bjmh,bjmhp,bjmn->bmhpn", (so_far[:, -1:] - so_far).exp(), dt, own, b)
    return y.flatten(-2), before * so_far[:, -1].exp()[..., None, None] + left


def delta_scan(
    x: torch.Tensor, strengths: torch.Tensor, before: torch.Tensor, dt_bias: torch.Tensor, a_log: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """S = a S + beta k (v - k a S), y = q S of each head, with normed keys and queries, a = exp(-softplus(. + dt_bias) exp(A_log)).

    x        [b, s, m, 2 * key + heads * value]: query, key, values of the group
    before   [b, m, heads, key, value]: S before the first position; returned beside y: S after the last
    """
    depth, width = before.shape[-2:]
    q, k, v = x.split((depth, depth, x.shape[-1] - 2 * depth), -1)
    q, k = F.normalize(q, dim=-1) * depth**-0.5, F.normalize(k, dim=-1)
    v = v.unflatten(-1, (-1, width))  # [b,s,m,heads,width]
    writes, decays = strengths.chunk(2, -1)
    beta, decay = writes.sigmoid(), (-F.softplus(decays + dt_bias) * a_log.exp()).exp()
    state, outputs = before, []
    for place in range(x.shape[1]):
        state = state * decay[:, place, :, :, None, None]
        known = torch.einsum("bmk,bmhkv->bmhv", k[:, place], state)
        change = beta[:, place, :, :, None] * (v[:, place] - known)
        state = state + torch.einsum("bmk,bmhv->bmhkv", k[:, place], change)
        outputs.append(torch.einsum("bmk,bmhkv->bmhv", q[:, place], state))
    return torch.stack(outputs, 1).flatten(-2), state
