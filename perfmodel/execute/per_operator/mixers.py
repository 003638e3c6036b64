"""The torch functions of the kinds that mixers other than plain attention are made of: pieces of tensors, and recurrences over a sequence.

A recurrence is written as its definition says, not in chunks: runs compare it with itself on other ranks, and it is never timed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from perfmodel.execute.norm import wide
from perfmodel.execute.per_operator.context import OperatorContext
from perfmodel.execute.per_operator.own_rules import handing_on, state_before, with_halo

Tensors = Sequence[torch.Tensor]

_EPSILON = 1e-6


def _number(context: OperatorContext, name: str) -> int:
    return int(context.operator.settings[name])  # type: ignore[arg-type]


def piece(inputs: Tensors, context: OperatorContext) -> torch.Tensor:
    output = context.operator.output.dims
    return inputs[0].narrow(-1, _number(context, "start"), context.operator.dims[output[-1]])


def copy(inputs: Tensors, context: OperatorContext) -> torch.Tensor:
    return inputs[0].clone(memory_format=torch.contiguous_format)


def side_by_side(inputs: Tensors, context: OperatorContext) -> torch.Tensor:
    """Along the positions that the second lacks it is the same."""
    first, second = inputs
    ours, theirs = (operand.dims for operand in context.operator.inputs)
    for place, dim in enumerate(ours[:-1]):
        if dim not in theirs:
            second = second.unsqueeze(place)
    return torch.cat((first, second.expand(*first.shape[:-1], -1)), -1)


def causal_conv(inputs: Tensors, context: OperatorContext) -> torch.Tensor:
    """x [b,s,m,c], weight [m,c,taps], bias [m,c]"""
    x, weight = inputs[:2]
    before, positions = _number(context, "taps") - 1, context.operator.inputs[0].dims[1]
    if context.parts(positions) > 1:
        row = x.numel() // x.shape[1]
        x = with_halo(x, position=1, above=before, below=0, context=context, dim=positions, fill=0.0, row=row)
    else:
        x = F.pad(x, (0, 0, 0, 0, before, 0))
    channels = weight.shape[0] * weight.shape[1]
    bias = inputs[2].flatten() if len(inputs) > 2 else None
    mixed = F.conv1d(x.flatten(2).transpose(1, 2), weight.reshape(channels, 1, -1), bias, groups=channels)
    return F.silu(mixed).transpose(1, 2).unflatten(-1, weight.shape[:2])


def gated_norm(inputs: Tensors, context: OperatorContext) -> torch.Tensor:
    x, gate, weight = inputs
    width, gates_first = _number(context, "width"), bool(context.operator.settings["gates_first"])
    given = x * F.silu(gate) if gates_first else x
    rows = wide(given).unflatten(-1, (-1, width))
    normed = (rows * (rows.square().mean(-1, keepdim=True) + _EPSILON).rsqrt()).to(x.dtype)
    scaled = normed * (weight.unflatten(-1, (-1, width)) if weight.dim() > 1 else weight)
    result = scaled.flatten(-2)
    return result if gates_first else result * F.silu(gate)


def state_scan(inputs: Tensors, context: OperatorContext) -> torch.Tensor:
    """h = a h + dt B x, y = C h + D x of each head, with a = exp(-dt exp(A_log)) and dt = softplus(steps + dt_bias)."""
    x, steps, dt_bias, a_log, skip = inputs
    state, width = _number(context, "state"), _number(context, "head_dim")
    own, b, c = x.split((x.shape[-1] - 2 * state, state, state), -1)
    own = own.unflatten(-1, (-1, width))  # [b,s,m,heads,width]
    dt = F.softplus(steps + dt_bias)
    so_far = (-dt * a_log.exp()).cumsum(1)
    passed = so_far.unsqueeze(2) - so_far.unsqueeze(1)  # [b, to, from, m, heads]
    length = x.shape[1]
    seen = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()[:, :, None, None]
    weights = passed.masked_fill(~seen, -torch.inf).exp() * torch.einsum("bimn,bjmn->bijm", c, b).unsqueeze(-1)
    y = torch.einsum("bijmh,bjmh,bjmhp->bimhp", weights, dt, own) + skip.unsqueeze(-1) * own
    positions = context.operator.inputs[0].dims[1]
    before = state_before(x, (x.shape[0], *own.shape[2:], state), context=context, dim=positions)
    y = y + torch.einsum("bimh,bimn,bmhpn->bimhp", so_far.exp(), c, before)
    left = torch.einsum("bjmh,bjmh,bjmhp,bjmn->bmhpn", (so_far[:, -1:] - so_far).exp(), dt, own, b)
    after = before * so_far[:, -1].exp()[..., None, None] + left
    return handing_on(y.flatten(-2), after, context=context, dim=positions)


def delta_scan(inputs: Tensors, context: OperatorContext) -> torch.Tensor:
    """S = a S + beta k (v - k a S), y = q S of each head, with normed keys and queries, a = exp(-softplus(. + dt_bias) exp(A_log))."""
    x, strengths, dt_bias, a_log = inputs
    depth, width = _number(context, "key_dim"), _number(context, "value_dim")
    q, k, v = x.split((depth, depth, x.shape[-1] - 2 * depth), -1)
    q, k = F.normalize(q, dim=-1) * depth**-0.5, F.normalize(k, dim=-1)
    v = v.unflatten(-1, (-1, width))  # [b,s,m,heads,width]
    writes, decays = strengths.chunk(2, -1)
    beta, decay = writes.sigmoid(), (-F.softplus(decays + dt_bias) * a_log.exp()).exp()
    positions = context.operator.inputs[0].dims[1]
    state = state_before(x, (x.shape[0], *v.shape[2:4], depth, width), context=context, dim=positions)
    outputs = []
    for place in range(x.shape[1]):
        state = state * decay[:, place, :, :, None, None]
        known = torch.einsum("bmk,bmhkv->bmhv", k[:, place], state)
        change = beta[:, place, :, :, None] * (v[:, place] - known)
        state = state + torch.einsum("bmk,bmhv->bmhkv", k[:, place], change)
        outputs.append(torch.einsum("bmk,bmhkv->bmhv", q[:, place], state))
    return handing_on(torch.stack(outputs, 1).flatten(-2), state, context=context, dim=positions)


FUNCTIONS = {
    "piece": piece,
    "copy": copy,
    "side_by_side": side_by_side,
    "causal_conv": causal_conv,
    "gated_norm": gated_norm,
    "state_scan": state_scan,
    "delta_scan": delta_scan,
}
