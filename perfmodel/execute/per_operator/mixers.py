"""Torch functions of the operator kinds in mixers other than plain attention: slices and copies of tensors, and recurrences.

Recurrences are those of `execute/layers/recurrence.py`: a rank runs its shard of the positions in one piece.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from perfmodel.execute.layers import norm, recurrence
from perfmodel.execute.per_operator.collective_rules import state_before, with_halo, with_state_sent
from perfmodel.execute.per_operator.context import OperatorContext

Tensors = Sequence[torch.Tensor]


def _number(context: OperatorContext, name: str) -> int:
    return int(context.operator.settings[name])  # type: ignore[arg-type]


def piece(inputs: Tensors, context: OperatorContext) -> torch.Tensor:
    output = context.operator.output.dims
    return inputs[0].narrow(-1, _number(context, "start"), context.operator.dims[output[-1]])


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
    before, positions = _number(context, "taps") - 1, context.operator.inputs[0].dims[1]
    if context.parts(positions) > 1:
        row = x.numel() // x.shape[1]
        x = with_halo(x, position=1, above=before, below=0, context=context, dim=positions, fill=0.0, row=row)
    else:
        x = F.pad(x, (0, 0, 0, 0, before, 0))
    return recurrence.causal_conv(x, weight, inputs[2] if len(inputs) > 2 else None)


def gated_norm(inputs: Tensors, context: OperatorContext) -> torch.Tensor:
    x, gate, weight = inputs
    return norm.gated_norm(x, gate, weight, _number(context, "width"), bool(context.operator.settings["gates_first"]))


def state_scan(inputs: Tensors, context: OperatorContext) -> torch.Tensor:
    x, steps, *parameters = inputs
    shape = (x.shape[0], *steps.shape[2:], _number(context, "head_dim"), _number(context, "state"))
    positions = context.operator.inputs[0].dims[1]
    before = state_before(x, shape, context=context, dim=positions)
    y, after = recurrence.state_scan(x, steps, before, *parameters)
    return with_state_sent(y, after, context=context, dim=positions)


def delta_scan(inputs: Tensors, context: OperatorContext) -> torch.Tensor:
    x, strengths, *parameters = inputs
    shape = (x.shape[0], *parameters[0].shape, _number(context, "key_dim"), _number(context, "value_dim"))
    positions = context.operator.inputs[0].dims[1]
    before = state_before(x, shape, context=context, dim=positions)
    y, after = recurrence.delta_scan(x, strengths, before, *parameters)
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
