"""Torch functions of the operator kinds in mixers other than plain attention: slices and copies of tensors, and recurrences.

Recurrences are those of `execute/layers/recurrence.py`: a rank runs its shard of the positions in one piece.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from perfmodel.execute.layers import norm, recurrence
from perfmodel.execute.per_operator.collective_rules import state_before, with_halo, with_state_sent
from perfmodel.execute.per_operator.context import OperatorContext

Tensors = Sequence[torch.Tensor]


def number(context: OperatorContext, name: str) -> int:
    return int(context.operator.settings[name])  # type: ignore[arg-type]


def piece(inputs: Tensors, context: OperatorContext) -> torch.Tensor:
    output = context.operator.output.dims
    return inputs[0].narrow(-1, number(context, "start"), context.operator.dims[output[-1]])


def copy(inputs: Tensors, context: OperatorContext) -> torch.Tensor:
    return inputs[0].clone(memory_format=torch.contiguous_format)


def side_by_side(inputs: Tensors, context: OperatorContext) -> torch.Tensor:
    """Concatenate along the last position; the second operand is expanded along the dims that it lacks."""
    first, second = inputs
    ours, theirs = (operand.dims for operand in context.operator.inputs)
    for position, dim in enumerate(ours[:-1]):
        if dim not in theirs:
            second = second.unsqueeze(position)
    return torch.cat((first, second.expand(*first.shape[:-1], -1)), -1)


def causal_conv(inputs: Tensors, context: OperatorContext) -> torch.Tensor:
    """Compute the causal convolution of x [b,s,m,c] with weight [m,c,taps] and bias [m,c]."""
    x, weight = inputs[:2]
    before, positions = number(context, "taps") - 1, context.operator.inputs[0].dims[1]
    if context.parts(positions) > 1:
        row = x.numel() // x.shape[1]
        x = with_halo(x, position=1, above=before, below=0, context=context, dim=positions, fill=0.0, row=row)
    else:
        x = F.pad(x, (0, 0, 0, 0, before, 0))
    return recurrence.causal_conv(x, weight, inputs[2] if len(inputs) > 2 else None)


def gated_norm(inputs: Tensors, context: OperatorContext) -> torch.Tensor:
    x, gate, weight = inputs
    return norm.gated_norm(x, gate, weight, number(context, "width"), bool(context.operator.settings["gates_first"]))


def state_scan(inputs: Tensors, context: OperatorContext) -> torch.Tensor:
    heads = inputs[1].shape[2:]
    return _scanned(recurrence.state_scan, inputs, (*heads, number(context, "head_dim"), number(context, "state")), context)


def delta_scan(inputs: Tensors, context: OperatorContext) -> torch.Tensor:
    heads = inputs[2].shape
    return _scanned(recurrence.delta_scan, inputs, (*heads, number(context, "key_dim"), number(context, "value_dim")), context)


def _scanned(scan: Callable[..., Any], inputs: Tensors, state: tuple[int, ...], context: OperatorContext) -> torch.Tensor:
    """Scan the local positions from the state of those before them, which is received, and send the state after them."""
    x, steps, *parameters = inputs
    positions = context.operator.inputs[0].dims[1]
    y, after = scan(x, steps, state_before(x, (x.shape[0], *state), context=context, dim=positions), *parameters)
    return with_state_sent(y, after, context=context, dim=positions)


FUNCTIONS = {
    "piece": piece,
    "copy": copy,
    "side_by_side": side_by_side,
    "causal_conv": causal_conv,
    "gated_norm": gated_norm,
    "state_scan": state_scan,
    "delta_scan": delta_scan,
}
