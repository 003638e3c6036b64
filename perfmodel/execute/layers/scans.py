"""Recurrences of whole sequences as kernels: one operator each way, chunk by chunk, with the states between chunks in a workspace.

Kept is what the convolution reads, and the steps; the convolution and the states are made again in backward. Operators named `..._on` go on
where a sequence stopped and have no backward: so a model serves (`execute/serving/states.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.utils._python_dispatch import _disable_current_modes

from perfmodel.execute.layers import recurrence
from perfmodel.execute.layers.kernel import like
from perfmodel.execute.layers.norm import wide

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx

Tensor: TypeAlias = torch.Tensor
#: x, steps, the state before and parameters -> y and the state after.
Recurrence: TypeAlias = Callable[..., tuple[Tensor, Tensor]]


_AUTOGRAD = (torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.ADInplaceOrView)


@contextmanager
def _differentiating() -> Iterator[None]:
    """Context of a kernel's inside: gradients are recorded, which a custom operator leaves out, and no counter sees it.

    (functorch's would leave wrappers behind that nothing frees.)
    """
    excluded = [torch._C._dispatch_tls_is_dispatch_key_excluded(key) for key in _AUTOGRAD]
    for key in _AUTOGRAD:
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
    try:
        with _disable_current_modes(), torch.enable_grad():
            yield
    finally:
        for key, was in zip(_AUTOGRAD, excluded, strict=True):
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, was)


def _pulled(function: Callable[..., Any], inputs: Sequence[Tensor], gradients: Any) -> Sequence[Tensor]:
    """Gradients of the inputs of a function, of those of what it makes."""
    with _differentiating():
        given = [each.detach().requires_grad_() for each in inputs]
        return torch.autograd.grad(function(*given), given, gradients)


# ------------------------------------------------------------------------------------------------------- convolution


def _from_start(x: Tensor, weight: Tensor, *bias: Tensor) -> Tensor:
    before = x.new_zeros(x.shape[0], weight.shape[-1] - 1, *x.shape[2:])
    return recurrence.causal_conv(torch.cat((before, x), 1), weight, bias[0] if bias else None)


@torch.library.custom_op("perfmodel::causal_conv", mutates_args=())
def causal_conv(x: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """x [b, s, m, c]; weight [m, c, taps] and, where there is one, bias [m, c]."""
    return _from_start(x, *parameters).contiguous()


causal_conv.register_fake(lambda x, parameters: x.new_empty(x.shape))


@torch.library.custom_op("perfmodel::causal_conv_on", mutates_args={"last"})
def causal_conv_on(x: Tensor, parameters: Sequence[Tensor], last: Tensor) -> Tensor:
    """The same after the positions in `last` [b, taps - 1, m, c], in whose place it leaves the last ones."""
    joined = torch.cat((last, x), 1)
    last.copy_(joined[:, x.shape[1] :])
    weight, *bias = parameters
    return recurrence.causal_conv(joined, weight, bias[0] if bias else None).contiguous()


causal_conv_on.register_fake(lambda x, parameters, last: x.new_empty(x.shape))


@torch.library.custom_op("perfmodel::causal_conv_backward", mutates_args=())
def causal_conv_backward(gradient: Tensor, x: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    return [each.contiguous() for each in _pulled(_from_start, (x, *parameters), gradient)]


causal_conv_backward.register_fake(lambda gradient, x, parameters: list(like(x, *parameters)))


# ------------------------------------------------------------------------------------------------------------- scans


def _by_chunk(
    scan: Recurrence, x: Tensor, steps: Tensor, parameters: Sequence[Tensor], state: Tensor, chunk: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """y of each chunk, and the state after it."""
    given = [wide(each) for each in parameters]
    for own, step in zip(x.split(chunk, 1), steps.split(chunk, 1), strict=True):
        y, state = scan(wide(own), wide(step), state, *given)
        yield y.to(x.dtype), state


def _forward(scan: Recurrence, x: Tensor, steps: Tensor, parameters: Sequence[Tensor], states: Tensor, chunk: int) -> Tensor:
    outputs = []
    states[:, 0] = 0
    for place, (y, state) in enumerate(_by_chunk(scan, x, steps, parameters, states[:, 0], chunk), 1):
        if place < states.shape[1]:
            states[:, place] = state
        outputs.append(y)
    return torch.cat(outputs, 1)


def _backward(
    scan: Recurrence, gradient: Tensor, x: Tensor, steps: Tensor, parameters: Sequence[Tensor], states: Tensor, chunk: int
) -> list[Tensor]:
    """Gradients of x, steps and parameters; the states are recomputed."""
    _forward(scan, x, steps, parameters, states, chunk)
    given = [wide(each) for each in parameters]
    for_state, for_parameters = torch.zeros_like(states[:, 0]), [torch.zeros_like(each) for each in given]
    pieces = [each.split(chunk, 1) for each in (x, steps, gradient)]
    for_pieces: list[tuple[Tensor, Tensor]] = []
    for place in reversed(range(len(pieces[0]))):
        own, step, wanted = (wide(each[place]) for each in pieces)
        for_own, for_step, for_state, *rest = _pulled(scan, (own, step, states[:, place], *given), (wanted, for_state))
        for_pieces.insert(0, (for_own.to(x.dtype), for_step.to(steps.dtype)))
        for_parameters = [one + other for one, other in zip(for_parameters, rest, strict=True)]
    joined = [torch.cat(each, 1) for each in zip(*for_pieces, strict=True)]
    return [*joined, *(each.to(like.dtype) for each, like in zip(for_parameters, parameters, strict=True))]


def _state_products(states: Sequence[int], chunk: int) -> tuple[float, float]:
    """FLOP of the chunked form forward (Dao and Gu 2024, section 6), and of what backward makes again; below the diagonal of a chunk.

    Q G N + Q H P + 4 H P N a token, with Q positions of a chunk, G groups, H heads of P and N of the state; of a position alone the last.
    """
    b, chunks, groups, heads, width, state = states
    scores = chunk * (chunk // 2) * state * groups
    left = chunk * width * state * groups * heads
    within = chunk * (chunk // 2) * width * groups * heads
    number = 2.0 * b * chunks
    return number * (scores + within + 2 * left), number * (scores + left)


def _delta_products(states: Sequence[int], chunk: int) -> tuple[float, float]:
    """The same of the gated delta rule (Yang et al. 2024, section 3): scores of keys with keys and with queries, the inverse of a triangle
    (a third of a product's work, in whole columns), what it makes of keys and values, what scores weigh; three products with the state, all
    that a position alone has."""
    b, chunks, groups, heads, depth, width = states
    half, with_state = chunk // 2, chunk * depth * width
    scores, of_values = chunk * half * depth, chunk * half * width
    inverse = chunk * chunk * max(round(chunk / 6), 1) if half else 0
    number = 2.0 * b * chunks * groups * heads
    made = scores + inverse + scores + of_values
    return number * (made + scores + of_values + 3 * with_state), number * (made + 2 * with_state)


#: Shape of the states [b, chunks, m, heads, ...] and positions of a chunk -> FLOP forward, and of what backward makes again.
_Products: TypeAlias = Callable[[Sequence[int], int], tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Scan:
    """The operators of a recurrence: whole sequences, their backward, and sequences that go on from and into a state; FLOP of each."""

    whole: Callable[..., Tensor]
    backward: Callable[..., list[Tensor]]
    onward: Callable[..., Tensor]
    products: Mapping[Any, tuple[str, Callable[..., float]]]


def _scan(name: str, scan: Recurrence, products: _Products, width: int) -> Scan:
    """width: which dim of a head's state [heads, ., .] its output has"""

    def output(x: Tensor, state: Tensor) -> Tensor:
        return x.new_empty(*x.shape[:-1], state.shape[-3] * state.shape[width - 3])

    @torch.library.custom_op(f"perfmodel::{name}", mutates_args={"states"})
    def whole(x: Tensor, steps: Tensor, parameters: Sequence[Tensor], states: Tensor, chunk: int) -> Tensor:
        """y [b, s, m, heads * width]; states [b, chunks, m, heads, ...] are written."""
        return _forward(scan, x, steps, parameters, states, chunk)

    whole.register_fake(lambda x, steps, parameters, states, chunk: output(x, states))

    @torch.library.custom_op(f"perfmodel::{name}_on", mutates_args={"state"})
    def onward(x: Tensor, steps: Tensor, parameters: Sequence[Tensor], state: Tensor, chunk: int) -> Tensor:
        """y [b, s, m, heads * width], from and into a state [b, m, heads, ...]; one position is a decode step."""
        made = list(_by_chunk(scan, x, steps, parameters, state, chunk))
        state.copy_(made[-1][1])
        return torch.cat([y for y, _ in made], 1)

    onward.register_fake(lambda x, steps, parameters, state, chunk: output(x, state))

    @torch.library.custom_op(f"perfmodel::{name}_backward", mutates_args={"states"})
    def backward(gradient: Tensor, x: Tensor, steps: Tensor, parameters: Sequence[Tensor], states: Tensor, chunk: int) -> list[Tensor]:
        return _backward(scan, gradient, x, steps, parameters, states, chunk)

    backward.register_fake(lambda gradient, x, steps, parameters, states, chunk: list(like(x, steps, *parameters)))

    def flops(x: Tensor, steps: Tensor, parameters: Sequence[Tensor], states: Tensor, chunk: int, **_: Any) -> float:
        return products(states.shape, chunk)[0]

    def flops_onward(x: Tensor, steps: Tensor, parameters: Sequence[Tensor], state: Tensor, chunk: int, **_: Any) -> float:
        return products((len(x), -(-x.shape[1] // chunk), *state.shape[1:]), chunk)[0]

    def flops_backward(_: Tensor, x: Tensor, steps: Tensor, parameters: Sequence[Tensor], states: Tensor, chunk: int, **__: Any) -> float:
        """Two products for each, and those that are made again."""
        forward, again = products(states.shape, chunk)
        return 2.0 * forward + again

    made = getattr(torch.ops.perfmodel, name), getattr(torch.ops.perfmodel, f"{name}_on"), getattr(torch.ops.perfmodel, f"{name}_backward")
    counted = (name, flops), (name, flops_onward), (f"{name}.grad", flops_backward)
    return Scan(whole, backward, onward, dict(zip(made, counted, strict=True)))


state_scan = _scan("state_scan", recurrence.state_scan, _state_products, 1)
delta_scan = _scan("delta_scan", recurrence.delta_scan, _delta_products, 2)

#: Of operators that are kernels of several products: the kind that the graph has them by (".grad": backward), and their FLOP.
PRODUCTS = {**state_scan.products, **delta_scan.products}


class _Scanned(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, mixed: Tensor, steps: Tensor, scan: Scan, state: tuple[int, ...], chunk: int, num_conv: int, *parameters: Tensor
    ) -> Tensor:
        x = causal_conv(mixed, parameters[:num_conv])
        ctx.save_for_backward(mixed, steps, *parameters)
        ctx.rest = scan, state, chunk, num_conv
        return scan.whole(x, steps, parameters[num_conv:], _workspace(mixed, state, chunk), chunk)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> Any:
        mixed, steps, *parameters = ctx.saved_tensors
        scan, state, chunk, num_conv = ctx.rest
        conv = parameters[:num_conv]
        x = causal_conv(mixed, conv)
        states = _workspace(mixed, state, chunk)
        for_x, for_steps, *for_own = scan.backward(gradients[0].contiguous(), x, steps, parameters[num_conv:], states, chunk)
        del x, states
        for_mixed, *for_conv = causal_conv_backward(for_x, mixed, conv)
        return for_mixed, for_steps, None, None, None, None, *for_conv, *for_own


def _workspace(x: Tensor, state: tuple[int, ...], chunk: int) -> Tensor:
    """Room for the states before each chunk, in float32 at least."""
    shape = (x.shape[0], -(-x.shape[1] // chunk), x.shape[2], *state)
    return x.new_empty(shape, dtype=torch.promote_types(x.dtype, torch.float32))


def scanned(
    mixed: Tensor, steps: Tensor, conv: Sequence[Tensor], own: Sequence[Tensor], *, scan: Scan, state: tuple[int, ...], chunk: int
) -> Tensor:
    """Convolution and scan of whole sequences: mixed [b, s, m, c], steps [b, s, m, ...] -> y [b, s, m, o].

    conv, own   parameters of the convolution and of the scan
    state       shape of the states of a group [heads, ...]
    """
    return _Scanned.apply(mixed, steps, scan, state, chunk, len(conv), *conv, *own)  # type: ignore[no-any-return, no-untyped-call]
