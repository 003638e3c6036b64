"""Operators that issue collectives if certain dims are sharded: halo exchange, recurrent states, LSTM.

Each is an autograd function that issues exactly the traffic declared by its kind (`Operator.traffic`) in either pass. Without sharding
it computes the same as a single process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from perfmodel.execute.per_operator.context import OperatorContext
from perfmodel.workload.work import Pass

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx


class _Halo(torch.autograd.Function):
    """Halo exchange: rows of the neighbours around the local ones, `fill` at the ends. Backward returns and adds their gradients."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x: torch.Tensor,
        position: int,
        above: int,
        below: int,
        fill: float,
        noted: int,
        context: OperatorContext,
        dim: str,
    ) -> torch.Tensor:
        ctx.rest = position, above, below, noted, context, dim
        size = x.shape[position]
        if max(above, below) > size:
            raise context.fail(f"a share of dim {dim} has {size} rows, a window reaches {max(above, below)} into the next; use fewer parts")
        shape = list(x.shape)
        rows = x.new_full((), fill)
        shape[position] = above
        top = rows.expand(shape).clone()
        shape[position] = below
        bottom = rows.expand(shape).clone()
        up = x.narrow(position, 0, below).contiguous()
        down = x.narrow(position, size - above, above).contiguous()
        context.trade(dim, up, down, top, bottom, Pass.FORWARD, noted)
        return torch.cat((top, x, bottom), position)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor) -> Any:
        position, above, below, noted, context, dim = ctx.rest
        gradient = gradients[0]
        size = gradient.shape[position] - above - below
        up = gradient.narrow(position, 0, above).contiguous()
        down = gradient.narrow(position, above + size, below).contiguous()
        # the received gradients belong to the rows that were sent
        from_up, from_down = torch.zeros_like(down), torch.zeros_like(up)
        context.trade(dim, up, down, from_up, from_down, Pass.BACKWARD, noted)
        result = gradient.narrow(position, above, size).clone()
        result.narrow(position, 0, below).add_(from_up)
        result.narrow(position, size - above, above).add_(from_down)
        return result, None, None, None, None, None, None, None


def with_halo(
    x: torch.Tensor, *, position: int, above: int, below: int, context: OperatorContext, dim: str, fill: float, row: int
) -> torch.Tensor:
    """Return `x` with halo rows. `row`: elements of one row as declared by the operator, without the corners of a second sharded dim."""
    if not above and not below:
        return x
    return _Halo.apply(x, position, above, below, fill, (above + below) * row, context, dim)  # type: ignore[no-any-return, no-untyped-call]


class _ReceiveState(torch.autograd.Function):
    """Receive of the final state of the previous shard, zero on the first; backward sends its gradient back."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, shape: tuple[int, ...], context: OperatorContext, dim: str) -> torch.Tensor:
        ctx.rest = context, dim
        state, none = x.new_zeros(shape), x.new_empty(0)
        context.trade(dim, none, none, state, none, Pass.FORWARD, 0, is_noted=False)
        return state

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor) -> Any:
        context, dim = ctx.rest
        none = gradients[0].new_empty(0)
        context.trade(dim, gradients[0].contiguous(), none, none, none, Pass.BACKWARD, gradients[0].numel())
        return None, None, None, None


class _SendState(torch.autograd.Function):
    """Send of the final state to the next shard, returning the output; backward receives the state's gradient, zero on the last."""

    @staticmethod
    def forward(ctx: FunctionCtx, output: torch.Tensor, state: torch.Tensor, context: OperatorContext, dim: str) -> torch.Tensor:
        ctx.rest = context, dim, state.shape
        none = state.new_empty(0)
        context.trade(dim, none, state.contiguous(), none, none, Pass.FORWARD, state.numel())
        return output.view_as(output)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor) -> Any:
        context, dim, shape = ctx.rest
        for_state, none = gradients[0].new_zeros(shape), gradients[0].new_empty(0)
        context.trade(dim, none, none, none, for_state, Pass.BACKWARD, 0, is_noted=False)
        return gradients[0], for_state, None, None


def state_before(x: torch.Tensor, shape: tuple[int, ...], *, context: OperatorContext, dim: str) -> torch.Tensor:
    """Return the initial state of this rank's shard of `x` in a recurrence along `dim`."""
    if context.parts(dim) == 1:
        return x.new_zeros(shape)
    return _ReceiveState.apply(x, shape, context, dim)  # type: ignore[no-any-return, no-untyped-call]


def with_state_sent(output: torch.Tensor, state: torch.Tensor, *, context: OperatorContext, dim: str) -> torch.Tensor:
    """Send the final state of this rank's shard of a recurrence along `dim`, and return the output."""
    if context.parts(dim) == 1:
        return output
    return _SendState.apply(output, state, context, dim)  # type: ignore[no-any-return, no-untyped-call]


Gates = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def lstm_cell(sums: torch.Tensor, cell: torch.Tensor) -> tuple[Gates, torch.Tensor, torch.Tensor]:
    """Compute one time step from sums [b,4,e] and the previous cell [b,e]: the four gates, the cell and the output."""
    i, f, g, o = sums[:, 0].sigmoid(), sums[:, 1].sigmoid(), sums[:, 2].tanh(), sums[:, 3].sigmoid()
    cell = torch.addcmul(i * g, f, cell)
    return (i, f, g, o), cell, o * cell.tanh()


def lstm_cell_backward(
    into: torch.Tensor, above: torch.Tensor, for_cell: torch.Tensor, gates: Gates, cell: torch.Tensor, before: torch.Tensor | None
) -> torch.Tensor:
    """Return the gradient of the previous cell (`before`) from those of output and cell; write those of the sums `into` [b,4,e]."""
    i, f, g, o = gates
    bent = cell.tanh()
    for_cell = for_cell + above * o * (1 - bent.square())
    into[:, 0] = for_cell * g * i * (1 - i)
    into[:, 2] = for_cell * i * (1 - g.square())
    into[:, 3] = above * bent * o * (1 - o)
    if before is None:
        into[:, 1] = 0.0
        return for_cell
    into[:, 1] = for_cell * before * f * (1 - f)
    return for_cell * f


class _Lstm(torch.autograd.Function):
    """LSTM over gates [b,s,4,e] with weight [4,e,k] -> h [b,s,e], from a zero state; e may be sharded, k is not.

    The first step has no previous h. With e sharded, each other step all-gathers h, and reduce-scatters its gradient in backward.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, gates: torch.Tensor, weight: torch.Tensor, context: OperatorContext, dim: str) -> torch.Tensor:
        batch, steps, _, hidden = gates.shape
        matrix = weight.flatten(0, 1).t()
        cell = gates.new_zeros(batch, hidden)
        active, cells, gathered = [], [], []
        hiddens: list[torch.Tensor] = []
        for step in range(steps):
            sums = gates[:, step]
            if step:
                previous = context.gather_last(hiddens[-1], dim, Pass.FORWARD)
                gathered.append(previous)
                sums = sums + (previous @ matrix).view(batch, 4, hidden)
            gate_values, cell, output = lstm_cell(sums, cell)
            active.append(gate_values)
            cells.append(cell)
            hiddens.append(output)
        ctx.save_for_backward(weight, *(value for values in active for value in values), *cells, *gathered)
        ctx.rest = batch, steps, hidden, context, dim
        return torch.stack(hiddens, 1)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor) -> Any:
        weight, *kept = ctx.saved_tensors
        batch, steps, hidden, context, dim = ctx.rest
        active = [kept[4 * step : 4 * step + 4] for step in range(steps)]
        cells, gathered = kept[4 * steps : 5 * steps], kept[5 * steps :]
        matrix = weight.flatten(0, 1)
        into = gradients[0].new_empty(batch, steps, 4, hidden)
        for_hidden, for_cell = gradients[0].new_zeros(batch, hidden), gradients[0].new_zeros(batch, hidden)
        for step in reversed(range(steps)):
            above = gradients[0][:, step] + for_hidden
            for_cell = lstm_cell_backward(into[:, step], above, for_cell, active[step], cells[step], cells[step - 1] if step else None)
            if step:
                for_hidden = context.scatter_last(into[:, step].flatten(1) @ matrix, dim, Pass.BACKWARD)
        for_weight = None
        if ctx.needs_input_grad[1]:
            if gathered:
                rows = into[:, 1:].flatten(2).flatten(0, 1)
                for_weight = (rows.t() @ torch.stack(gathered, 1).flatten(0, 1)).view(weight.shape)
            else:
                for_weight = torch.zeros_like(weight)
        return into, for_weight, None, None


def lstm(gates: torch.Tensor, weight: torch.Tensor, *, context: OperatorContext, dim: str) -> torch.Tensor:
    return _Lstm.apply(gates, weight, context, dim)  # type: ignore[no-any-return, no-untyped-call]


def shares(x: torch.Tensor, parts: Sequence[int]) -> list[torch.Tensor]:
    """Split a tensor into equal shards, `parts` of them at each position."""
    pieces = [x]
    for position, number in enumerate(parts):
        pieces = [piece for part in pieces for piece in part.chunk(number, position)]
    return pieces


def joined(pieces: list[torch.Tensor], parts: Sequence[int]) -> torch.Tensor:
    """Concatenate the shards: the inverse of `shares`."""
    for position in reversed(range(len(parts))):
        number = parts[position]
        pieces = [torch.cat(pieces[start : start + number], position) for start in range(0, len(pieces), number)]
    return pieces[0]
