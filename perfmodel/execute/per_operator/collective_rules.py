"""Operators that issue collectives if certain dims are sharded: halo exchange, recurrent states, LSTM.

Each issues exactly the traffic declared by its kind (`Operator.traffic`) in either pass. Without sharding
it computes the same as a single process.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from perfmodel.execute.layers.kernel import differentiable
from perfmodel.execute.per_operator.context import OperatorContext
from perfmodel.workload.work import Pass

_exchange = partial(differentiable, keeps_inputs=False, is_contiguous=False)


def with_halo(
    x: torch.Tensor, *, position: int, above: int, below: int, context: OperatorContext, dim: str, fill: float, row: int
) -> torch.Tensor:
    """Return `x` with rows of the neighbours around the local ones, `fill` at the ends. Backward returns and adds their gradients.

    row   elements of one row as declared by the operator, without the corners of a second sharded dim
    """
    if not above and not below:
        return x
    size, noted = x.shape[position], (above + below) * row
    if max(above, below) > size:
        raise context.fail(f"a share of dim {dim} has {size} rows, a window reaches {max(above, below)} into the next; use fewer parts")

    def forward(x: torch.Tensor) -> torch.Tensor:
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

    def backward(gradient: torch.Tensor) -> torch.Tensor:
        up = gradient.narrow(position, 0, above).contiguous()
        down = gradient.narrow(position, above + size, below).contiguous()
        # the received gradients belong to the rows that were sent
        from_up, from_down = torch.zeros_like(down), torch.zeros_like(up)
        context.trade(dim, up, down, from_up, from_down, Pass.BACKWARD, noted)
        result = gradient.narrow(position, above, size).clone()
        result.narrow(position, 0, below).add_(from_up)
        result.narrow(position, size - above, above).add_(from_down)
        return result

    return _exchange(forward, backward)(x)


def state_before(x: torch.Tensor, shape: tuple[int, ...], *, context: OperatorContext, dim: str) -> torch.Tensor:
    """Return the initial state of this rank's shard of `x` in a recurrence along `dim`: the final state of the previous shard, zero on the
    first. Backward sends its gradient back."""
    if context.parts(dim) == 1:
        return x.new_zeros(shape)
    none = x.new_empty(0)

    def forward(x: torch.Tensor) -> torch.Tensor:
        state = x.new_zeros(shape)
        context.trade(dim, none, none, state, none, Pass.FORWARD, 0, is_noted=False)
        return state

    def backward(gradient: torch.Tensor) -> None:
        context.trade(dim, gradient.contiguous(), none, none, none, Pass.BACKWARD, gradient.numel())

    return _exchange(forward, backward)(x)


def with_state_sent(output: torch.Tensor, state: torch.Tensor, *, context: OperatorContext, dim: str) -> torch.Tensor:
    """Send the final state of this rank's shard of a recurrence along `dim`, and return the output. Backward receives the state's
    gradient, zero on the last shard."""
    if context.parts(dim) == 1:
        return output
    shape, none = state.shape, state.new_empty(0)

    def forward(output: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        context.trade(dim, none, state.contiguous(), none, none, Pass.FORWARD, state.numel())
        return output.view_as(output)

    def backward(gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for_state = gradient.new_zeros(shape)
        context.trade(dim, none, none, none, for_state, Pass.BACKWARD, 0, is_noted=False)
        return gradient, for_state

    return _exchange(forward, backward)(output, state)


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


def lstm(gates: torch.Tensor, weight: torch.Tensor, *, context: OperatorContext, dim: str) -> torch.Tensor:
    """Run an LSTM over gates [b,s,4,e] with weight [4,e,k] -> h [b,s,e], from a zero state; e may be sharded, k is not.

    The first step has no previous h. With e sharded, each other step all-gathers h, and reduce-scatters its gradient in backward.
    """
    batch, steps, _, hidden = gates.shape
    has_weight_gradient = weight.requires_grad

    def forward(gates: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        matrix = weight.flatten(0, 1).t()
        cell = gates.new_zeros(batch, hidden)
        active: list[torch.Tensor] = []
        hiddens: list[torch.Tensor] = []
        cells, gathered = [], []
        for step in range(steps):
            sums = gates[:, step]
            if step:
                previous = context.gather_last(hiddens[-1], dim, Pass.FORWARD)
                gathered.append(previous)
                sums = sums + (previous @ matrix).view(batch, 4, hidden)
            gate_values, cell, output = lstm_cell(sums, cell)
            active += gate_values
            cells.append(cell)
            hiddens.append(output)
        return torch.stack(hiddens, 1), weight, *active, *cells, *gathered

    def backward(gradient: torch.Tensor, weight: torch.Tensor, *kept: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        active = [kept[4 * step : 4 * step + 4] for step in range(steps)]
        cells, gathered = kept[4 * steps : 5 * steps], kept[5 * steps :]
        matrix = weight.flatten(0, 1)
        into = gradient.new_empty(batch, steps, 4, hidden)
        for_hidden, for_cell = gradient.new_zeros(batch, hidden), gradient.new_zeros(batch, hidden)
        for step in reversed(range(steps)):
            above = gradient[:, step] + for_hidden
            for_cell = lstm_cell_backward(into[:, step], above, for_cell, active[step], cells[step], cells[step - 1] if step else None)
            if step:
                for_hidden = context.scatter_last(into[:, step].flatten(1) @ matrix, dim, Pass.BACKWARD)
        for_weight = None
        if has_weight_gradient:
            if gathered:
                rows = into[:, 1:].flatten(2).flatten(0, 1)
                for_weight = (rows.t() @ torch.stack(gathered, 1).flatten(0, 1)).view(weight.shape)
            else:
                for_weight = torch.zeros_like(weight)
        return into, for_weight

    return _exchange(forward, backward)(gates, weight)


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
