"""Recurrences over full sequences as kernels: one operator each for forward and backward, by chunks, with the chunk states in a workspace.

Saved for backward are the convolution's input and the steps; backward recomputes the convolution and the states. Operators named
`..._on` continue a sequence from a state and have no backward: serving uses them (`execute/serving/cache.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.utils._python_dispatch import _disable_current_modes

from perfmodel.execute.layers import recurrence
from perfmodel.execute.layers.kernel import differentiable, like, operator
from perfmodel.execute.layers.norm import wide

Tensor: TypeAlias = torch.Tensor
#: (x, steps, initial state, parameters) -> y and the final state.
Recurrence: TypeAlias = Callable[..., tuple[Tensor, Tensor]]


_AUTOGRAD = (torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.ADInplaceOrView)


def _vjp(function: Callable[..., Any], inputs: Sequence[Tensor], gradients: object) -> Sequence[Tensor]:
    """Return the vector-Jacobian product: gradients of the function's inputs from those of its outputs.

    Autograd is enabled, which torch excludes inside a custom operator, and the inner operators are hidden from counters.
    (functorch's version would leave wrappers behind that are never freed.)
    """
    excluded = [torch._C._dispatch_tls_is_dispatch_key_excluded(key) for key in _AUTOGRAD]
    for key in _AUTOGRAD:
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
    try:
        with _disable_current_modes(), torch.enable_grad():
            given = [tensor.detach().requires_grad_() for tensor in inputs]
            return torch.autograd.grad(function(*given), given, gradients)
    finally:
        for key, was in zip(_AUTOGRAD, excluded, strict=True):
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, was)


# ------------------------------------------------------------------------------------------------------- convolution


def _from_start(x: Tensor, weight: Tensor, *bias: Tensor) -> Tensor:
    before = x.new_zeros(x.shape[0], weight.shape[-1] - 1, *x.shape[2:])
    return recurrence.causal_conv(torch.cat((before, x), 1), weight, bias[0] if bias else None)


@operator("causal_conv", lambda x, parameters: x.new_empty(x.shape))
def causal_conv(x: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """Compute the convolution of x [b, s, m, c] with weight [m, c, taps] and, where present, bias [m, c]."""
    return _from_start(x, *parameters).contiguous()


@operator("causal_conv_on", lambda x, parameters, last: x.new_empty(x.shape), mutates={"last"})
def causal_conv_on(x: Tensor, parameters: Sequence[Tensor], last: Tensor) -> Tensor:
    """Continue the convolution after the positions in `last` [b, taps - 1, m, c], and overwrite `last` with the new last positions."""
    joined = torch.cat((last, x), 1)
    last.copy_(joined[:, x.shape[1] :])
    weight, *bias = parameters
    return recurrence.causal_conv(joined, weight, bias[0] if bias else None).contiguous()


@operator("causal_conv_backward", lambda gradient, x, parameters: list(like(x, *parameters)))
def causal_conv_backward(gradient: Tensor, x: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.contiguous() for tensor in _vjp(_from_start, (x, *parameters), gradient)]


# ------------------------------------------------------------------------------------------------------------- scans


def _by_chunk(
    scan: Recurrence, x: Tensor, steps: Tensor, parameters: Sequence[Tensor], state: Tensor, chunk: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield y of each chunk and the state after it."""
    given = [wide(parameter) for parameter in parameters]
    for x_chunk, step in zip(x.split(chunk, 1), steps.split(chunk, 1), strict=True):
        y, state = scan(wide(x_chunk), wide(step), state, *given)
        yield y.to(x.dtype), state


def _forward(scan: Recurrence, x: Tensor, steps: Tensor, parameters: Sequence[Tensor], states: Tensor, chunk: int) -> Tensor:
    outputs = []
    states[:, 0] = 0
    for index, (y, state) in enumerate(_by_chunk(scan, x, steps, parameters, states[:, 0], chunk), 1):
        if index < states.shape[1]:
            states[:, index] = state
        outputs.append(y)
    return torch.cat(outputs, 1)


def _backward(
    scan: Recurrence, gradient: Tensor, x: Tensor, steps: Tensor, parameters: Sequence[Tensor], states: Tensor, chunk: int
) -> list[Tensor]:
    """Return the gradients of x, steps and parameters; the states are recomputed."""
    _forward(scan, x, steps, parameters, states, chunk)
    given = [wide(parameter) for parameter in parameters]
    for_state, for_parameters = torch.zeros_like(states[:, 0]), [torch.zeros_like(parameter) for parameter in given]
    pieces = [tensor.split(chunk, 1) for tensor in (x, steps, gradient)]
    for_pieces: list[tuple[Tensor, Tensor]] = []
    for index in reversed(range(len(pieces[0]))):
        x_chunk, step, wanted = (wide(chunks[index]) for chunks in pieces)
        for_own, for_step, for_state, *rest = _vjp(scan, (x_chunk, step, states[:, index], *given), (wanted, for_state))
        for_pieces.insert(0, (for_own.to(x.dtype), for_step.to(steps.dtype)))
        for_parameters = [one + other for one, other in zip(for_parameters, rest, strict=True)]
    joined = [torch.cat(chunks, 1) for chunks in zip(*for_pieces, strict=True)]
    return [*joined, *(total.to(like.dtype) for total, like in zip(for_parameters, parameters, strict=True))]


def _state_products(states: Sequence[int], chunk: int) -> tuple[float, float]:
    """Return the FLOPs of the chunked form (Dao and Gu 2024, section 6), below a chunk's diagonal: forward, and the recomputed part.

    Per token Q G N + Q H P + 4 H P N: Q positions per chunk, G groups, H heads of width P, state size N. A single position: 4 H P N.
    """
    b, chunks, groups, heads, width, state = states
    scores = chunk * (chunk // 2) * state * groups
    left = chunk * width * state * groups * heads
    within = chunk * (chunk // 2) * width * groups * heads
    number = 2.0 * b * chunks
    return number * (scores + within + 2 * left), number * (scores + left)


def _delta_products(states: Sequence[int], chunk: int) -> tuple[float, float]:
    """Return the FLOPs of the gated delta rule (Yang et al. 2024, section 3): forward, and the part that backward recomputes.

    Scores of keys with keys and queries; a triangular inverse (a third of a product, in full columns), times keys and values; weighting by
    scores; three products with the state, the only ones of a single position.
    """
    b, chunks, groups, heads, depth, width = states
    half, with_state = chunk // 2, chunk * depth * width
    scores, of_values = chunk * half * depth, chunk * half * width
    inverse = chunk * chunk * max(round(chunk / 6), 1) if half else 0
    number = 2.0 * b * chunks * groups * heads
    recomputed = scores + inverse + scores + of_values
    return number * (recomputed + scores + of_values + 3 * with_state), number * (recomputed + 2 * with_state)


#: (shape of the states [b, chunks, m, heads, ...], positions per chunk) -> FLOPs of forward, and of the part that backward recomputes.
_Products: TypeAlias = Callable[[Sequence[int], int], tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Scan:
    """Operators of a recurrence: forward and backward over full sequences, and continuation from a state in place; FLOPs of each."""

    forward: Callable[..., Tensor]
    backward: Callable[..., list[Tensor]]
    onward: Callable[..., Tensor]
    products: Mapping[Any, tuple[str, Callable[..., float]]]


def _scan(name: str, scan: Recurrence, products: _Products, width: int) -> Scan:
    """Register the operators of a recurrence. width: the dim of a head's state [heads, ., .] that its output has."""

    def output(x: Tensor, state: Tensor) -> Tensor:
        return x.new_empty(*x.shape[:-1], state.shape[-3] * state.shape[width - 3])

    @operator(name, lambda x, steps, parameters, states, chunk: output(x, states), mutates={"states"})
    def forward(x: Tensor, steps: Tensor, parameters: Sequence[Tensor], states: Tensor, chunk: int) -> Tensor:
        """Compute y [b, s, m, heads * width]; writes states [b, chunks, m, heads, ...]."""
        return _forward(scan, x, steps, parameters, states, chunk)

    @operator(f"{name}_on", lambda x, steps, parameters, state, chunk: output(x, state), mutates={"state"})
    def onward(x: Tensor, steps: Tensor, parameters: Sequence[Tensor], state: Tensor, chunk: int) -> Tensor:
        """Compute y [b, s, m, heads * width] from a state [b, m, heads, ...], updated in place; one position is a decode step."""
        chunks = list(_by_chunk(scan, x, steps, parameters, state, chunk))
        state.copy_(chunks[-1][1])
        return torch.cat([y for y, _ in chunks], 1)

    @operator(
        f"{name}_backward", lambda gradient, x, steps, parameters, states, chunk: list(like(x, steps, *parameters)), mutates={"states"}
    )
    def backward(gradient: Tensor, x: Tensor, steps: Tensor, parameters: Sequence[Tensor], states: Tensor, chunk: int) -> list[Tensor]:
        return _backward(scan, gradient, x, steps, parameters, states, chunk)

    def flops(x: Tensor, steps: Tensor, parameters: Sequence[Tensor], states: Tensor, chunk: int, **_: Any) -> float:
        return products(states.shape, chunk)[0]

    def flops_onward(x: Tensor, steps: Tensor, parameters: Sequence[Tensor], state: Tensor, chunk: int, **_: Any) -> float:
        return products((len(x), -(-x.shape[1] // chunk), *state.shape[1:]), chunk)[0]

    def flops_backward(_: Tensor, x: Tensor, steps: Tensor, parameters: Sequence[Tensor], states: Tensor, chunk: int, **__: Any) -> float:
        """Return the FLOPs of two products per forward product, plus the recomputation."""
        forward, again = products(states.shape, chunk)
        return 2.0 * forward + again

    ops = getattr(torch.ops.perfmodel, name), getattr(torch.ops.perfmodel, f"{name}_on"), getattr(torch.ops.perfmodel, f"{name}_backward")
    counted = (name, flops), (name, flops_onward), (f"{name}.grad", flops_backward)
    return Scan(forward, backward, onward, dict(zip(ops, counted, strict=True)))


state_scan = _scan("state_scan", recurrence.state_scan, _state_products, 1)
delta_scan = _scan("delta_scan", recurrence.delta_scan, _delta_products, 2)

#: Operators that are kernels of several products: their kind in the graph (".grad": backward), and their FLOPs.
PRODUCTS = {**state_scan.products, **delta_scan.products}


def _workspace(x: Tensor, state: tuple[int, ...], chunk: int) -> Tensor:
    """Allocate the states before each chunk, in float32 at least."""
    shape = (x.shape[0], -(-x.shape[1] // chunk), x.shape[2], *state)
    return x.new_empty(shape, dtype=torch.promote_types(x.dtype, torch.float32))


def scanned(
    mixed: Tensor, steps: Tensor, conv: Sequence[Tensor], parameters: Sequence[Tensor], *, scan: Scan, state: tuple[int, ...], chunk: int
) -> Tensor:
    """Run convolution and scan over full sequences: mixed [b, s, m, c], steps [b, s, m, ...] -> y [b, s, m, o].

    conv, parameters   parameters of the convolution and of the scan
    state              shape of the states of a group [heads, ...]
    """
    number = len(conv)

    def forward(mixed: Tensor, steps: Tensor, *given: Tensor) -> Tensor:
        x = causal_conv(mixed, given[:number])
        return scan.forward(x, steps, given[number:], _workspace(mixed, state, chunk), chunk)

    def backward(gradient: Tensor, mixed: Tensor, steps: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        x = causal_conv(mixed, given[:number])
        states = _workspace(mixed, state, chunk)
        for_x, for_steps, *for_own = scan.backward(gradient, x, steps, given[number:], states, chunk)
        del x, states
        for_mixed, *for_conv = causal_conv_backward(for_x, mixed, given[:number])
        return for_mixed, for_steps, *for_conv, *for_own

    return differentiable(forward, backward)(mixed, steps, *conv, *parameters)
