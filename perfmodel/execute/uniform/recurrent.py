"""Mixers with a state in the place of keys, as modules: Mamba-2 and the gated delta network (`workload/decoder/recurrent.py`).

Convolution, scan and norm are each one operator each way, as a GPU's kernels are: so a plan keeps and counts the same wherever it runs. A
scan goes chunk by chunk, with the states between chunks in a workspace. Kept: what the first products made, the scan's output, the
statistics of the norm; the convolution and the states are made again in backward.

Groups of heads are cut over tp; a rank has whole sequences. Operators named `..._on` go on where a sequence stopped and have no backward:
so a model serves (`execute/serving/states.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial
from torch.utils._python_dispatch import _disable_current_modes

from perfmodel.execute import recurrences
from perfmodel.execute.local import local_tensor
from perfmodel.execute.norm import wide
from perfmodel.execute.uniform.sharding import Sharding
from perfmodel.workload.config import TransformerConfig

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
    return recurrences.causal_conv(torch.cat((before, x), 1), weight, bias[0] if bias else None)


@torch.library.custom_op("perfmodel::causal_conv", mutates_args=())
def causal_conv(x: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """x [b, s, m, c]; weight [m, c, taps] and, where there is one, bias [m, c]."""
    return _from_start(x, *parameters).contiguous()


@causal_conv.register_fake
def _(x: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("perfmodel::causal_conv_on", mutates_args={"last"})
def causal_conv_on(x: Tensor, parameters: Sequence[Tensor], last: Tensor) -> Tensor:
    """The same after the positions in `last` [b, taps - 1, m, c], in whose place it leaves the last ones."""
    joined = torch.cat((last, x), 1)
    last.copy_(joined[:, x.shape[1] :])
    weight, *bias = parameters
    return recurrences.causal_conv(joined, weight, bias[0] if bias else None).contiguous()


@causal_conv_on.register_fake
def _(x: Tensor, parameters: Sequence[Tensor], last: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("perfmodel::causal_conv_backward", mutates_args=())
def causal_conv_backward(gradient: Tensor, x: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    return [each.contiguous() for each in _pulled(_from_start, (x, *parameters), gradient)]


@causal_conv_backward.register_fake
def _(gradient: Tensor, x: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    return [each.new_empty(each.shape) for each in (x, *parameters)]


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


def _onward(scan: Recurrence, x: Tensor, steps: Tensor, parameters: Sequence[Tensor], state: Tensor, chunk: int) -> Tensor:
    """From the state before to the state after, which takes its place."""
    made = list(_by_chunk(scan, x, steps, parameters, state, chunk))
    state.copy_(made[-1][1])
    return torch.cat([y for y, _ in made], 1)


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


def _like(*tensors: Tensor) -> list[Tensor]:
    return [each.new_empty(each.shape) for each in tensors]


@torch.library.custom_op("perfmodel::state_scan", mutates_args={"states"})
def state_scan(x: Tensor, steps: Tensor, parameters: Sequence[Tensor], states: Tensor, chunk: int) -> Tensor:
    """y [b, s, m, heads * width]; states [b, chunks, m, heads, width, state] are written."""
    return _forward(recurrences.state_scan, x, steps, parameters, states, chunk)


@state_scan.register_fake
def _(x: Tensor, steps: Tensor, parameters: Sequence[Tensor], states: Tensor, chunk: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], states.shape[3] * states.shape[4])


@torch.library.custom_op("perfmodel::state_scan_on", mutates_args={"state"})
def state_scan_on(x: Tensor, steps: Tensor, parameters: Sequence[Tensor], state: Tensor, chunk: int) -> Tensor:
    """y [b, s, m, heads * width], from and into a state [b, m, heads, width, state]; one position is a decode step."""
    return _onward(recurrences.state_scan, x, steps, parameters, state, chunk)


@state_scan_on.register_fake
def _(x: Tensor, steps: Tensor, parameters: Sequence[Tensor], state: Tensor, chunk: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], state.shape[2] * state.shape[3])


@torch.library.custom_op("perfmodel::state_scan_backward", mutates_args={"states"})
def state_scan_backward(
    gradient: Tensor, x: Tensor, steps: Tensor, parameters: Sequence[Tensor], states: Tensor, chunk: int
) -> list[Tensor]:
    return _backward(recurrences.state_scan, gradient, x, steps, parameters, states, chunk)


@state_scan_backward.register_fake
def _(gradient: Tensor, x: Tensor, steps: Tensor, parameters: Sequence[Tensor], states: Tensor, chunk: int) -> list[Tensor]:
    return _like(x, steps, *parameters)


@torch.library.custom_op("perfmodel::delta_scan", mutates_args={"states"})
def delta_scan(x: Tensor, steps: Tensor, parameters: Sequence[Tensor], states: Tensor, chunk: int) -> Tensor:
    """y [b, s, m, heads * value]; states [b, chunks, m, heads, key, value] are written."""
    return _forward(recurrences.delta_scan, x, steps, parameters, states, chunk)


@delta_scan.register_fake
def _(x: Tensor, steps: Tensor, parameters: Sequence[Tensor], states: Tensor, chunk: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], states.shape[3] * states.shape[5])


@torch.library.custom_op("perfmodel::delta_scan_on", mutates_args={"state"})
def delta_scan_on(x: Tensor, steps: Tensor, parameters: Sequence[Tensor], state: Tensor, chunk: int) -> Tensor:
    """y [b, s, m, heads * value], from and into a state [b, m, heads, key, value]; one position is a decode step."""
    return _onward(recurrences.delta_scan, x, steps, parameters, state, chunk)


@delta_scan_on.register_fake
def _(x: Tensor, steps: Tensor, parameters: Sequence[Tensor], state: Tensor, chunk: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], state.shape[2] * state.shape[4])


@torch.library.custom_op("perfmodel::delta_scan_backward", mutates_args={"states"})
def delta_scan_backward(
    gradient: Tensor, x: Tensor, steps: Tensor, parameters: Sequence[Tensor], states: Tensor, chunk: int
) -> list[Tensor]:
    return _backward(recurrences.delta_scan, gradient, x, steps, parameters, states, chunk)


@delta_scan_backward.register_fake
def _(gradient: Tensor, x: Tensor, steps: Tensor, parameters: Sequence[Tensor], states: Tensor, chunk: int) -> list[Tensor]:
    return _like(x, steps, *parameters)


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


_Products: TypeAlias = Callable[[Sequence[int], int], tuple[float, float]]


def _forward_flops(products: _Products) -> Callable[..., float]:
    return lambda x, steps, parameters, states, chunk, **_: products(states.shape, chunk)[0]


def _onward_flops(products: _Products) -> Callable[..., float]:
    def flops(x: Tensor, steps: Tensor, parameters: Sequence[Tensor], state: Tensor, chunk: int, **_: Any) -> float:
        return products((len(x), -(-x.shape[1] // chunk), *state.shape[1:]), chunk)[0]

    return flops


def _backward_flops(products: _Products) -> Callable[..., float]:
    """Two products for each, and those that are made again."""

    def flops(gradient: Tensor, x: Tensor, steps: Tensor, parameters: Sequence[Tensor], states: Tensor, chunk: int, **_: Any) -> float:
        forward, again = products(states.shape, chunk)
        return 2.0 * forward + again

    return flops


#: Of operators that are kernels of several products: the kind that the graph has them by (".grad": backward), and their FLOP.
PRODUCTS: Mapping[Any, tuple[str, Callable[..., float]]] = {
    torch.ops.perfmodel.state_scan: ("state_scan", _forward_flops(_state_products)),
    torch.ops.perfmodel.state_scan_on: ("state_scan", _onward_flops(_state_products)),
    torch.ops.perfmodel.state_scan_backward: ("state_scan.grad", _backward_flops(_state_products)),
    torch.ops.perfmodel.delta_scan: ("delta_scan", _forward_flops(_delta_products)),
    torch.ops.perfmodel.delta_scan_on: ("delta_scan", _onward_flops(_delta_products)),
    torch.ops.perfmodel.delta_scan_backward: ("delta_scan.grad", _backward_flops(_delta_products)),
}


class _Scanned(torch.autograd.Function):
    """Convolution and scan. Keeps what the convolution reads, and the steps."""

    @staticmethod
    def forward(ctx: FunctionCtx, mixed: Tensor, steps: Tensor, mixer: RecurrentMixer, num_conv: int, *parameters: Tensor) -> Tensor:
        conv, own = parameters[:num_conv], parameters[num_conv:]
        x = causal_conv(mixed, conv)
        ctx.save_for_backward(mixed, steps, *parameters)
        ctx.mixer, ctx.num_conv = mixer, num_conv
        return mixer.scan(x, steps, own, mixer.workspace(mixed), mixer.chunk_of(mixed))  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> Any:
        mixed, steps, *parameters = ctx.saved_tensors
        conv, own = parameters[: ctx.num_conv], parameters[ctx.num_conv :]
        mixer = ctx.mixer
        x = causal_conv(mixed, conv)
        states, chunk = mixer.workspace(mixed), mixer.chunk_of(mixed)
        for_x, for_steps, *for_own = mixer.scan_backward(gradients[0].contiguous(), x, steps, own, states, chunk)
        del x, states
        for_mixed, *for_conv = causal_conv_backward(for_x, mixed, conv)
        return for_mixed, for_steps, None, None, *for_conv, *for_own


# -------------------------------------------------------------------------------------------------------------- norm


@torch.library.custom_op("perfmodel::gated_norm", mutates_args=())
def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, width: int, gates_first: bool) -> tuple[Tensor, Tensor]:
    """`recurrences.gated_norm`, and the reciprocal root mean square of each row [b, s, m, rows] in at least float32."""
    given = wide(x * torch.nn.functional.silu(gate) if gates_first else x)
    scale = given.unflatten(-1, (-1, width)).square().mean(-1).add_(recurrences.EPSILON).rsqrt_()
    return recurrences.gated_norm(x, gate, weight, width=width, gates_first=gates_first).contiguous(), scale


@gated_norm.register_fake
def _(x: Tensor, gate: Tensor, weight: Tensor, width: int, gates_first: bool) -> tuple[Tensor, Tensor]:
    rows = (*x.shape[:-1], x.shape[-1] // width)
    return x.new_empty(x.shape), x.new_empty(rows, dtype=torch.promote_types(x.dtype, torch.float32))


@torch.library.custom_op("perfmodel::gated_norm_backward", mutates_args=())
def gated_norm_backward(
    gradient: Tensor, x: Tensor, gate: Tensor, weight: Tensor, scale: Tensor, width: int, gates_first: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, gate and weight. With n = r u the normed rows: du = r (dn - n mean(n dn)), where u is x, or x silu(gate)."""
    rows = (-1, width)
    own, opened, wanted = (wide(each).unflatten(-1, rows) for each in (x, gate, gradient))
    factor = wide(weight).unflatten(-1, rows) if weight.dim() > 1 else wide(weight)
    share = opened.sigmoid()
    gating, r = opened * share, scale.unsqueeze(-1)
    normed = own * gating * r if gates_first else own * r
    for_scaled = wanted if gates_first else wanted * gating
    for_normed = for_scaled * factor
    for_given = r * (for_normed - normed * (normed * for_normed).mean(-1, keepdim=True))
    for_gating = for_given * own if gates_first else wanted * normed * factor
    for_x = for_given * gating if gates_first else for_given
    for_gate = for_gating * share * (1 + opened * (1 - share))
    of_weight = for_scaled * normed
    lasting = (0, 1) if weight.dim() > 1 else tuple(range(of_weight.dim() - 1))
    for_weight = of_weight.sum(lasting).reshape(weight.shape)
    return for_x.flatten(-2).to(x.dtype), for_gate.flatten(-2).to(gate.dtype), for_weight.to(weight.dtype)


@gated_norm_backward.register_fake
def _(
    gradient: Tensor, x: Tensor, gate: Tensor, weight: Tensor, scale: Tensor, width: int, gates_first: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), gate.new_empty(gate.shape), weight.new_empty(weight.shape)


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, gate: Tensor, weight: Tensor, width: int, gates_first: bool) -> Tensor:
        y, scale = gated_norm(x, gate, weight, width, gates_first)
        ctx.save_for_backward(x, gate, weight, scale)
        ctx.form = width, gates_first
        return y  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> Any:
        return (*gated_norm_backward(gradients[0].contiguous(), *ctx.saved_tensors, *ctx.form), None, None)


# ----------------------------------------------------------------------------------------------------------- modules


class _Weight(nn.Module):
    """Parameters of a kernel of the mixer."""

    def __init__(self, shape: tuple[int, ...], *, bias: bool, device: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, device=device))
        if bias:
            self.bias = nn.Parameter(torch.empty(shape[0], device=device))


class RecurrentMixer(nn.Module):
    """Common recurrent mixer: a product, then for each group the convolution, the scan, the gated norm, and a product that ends the branch.

    chunk, groups, heads   positions of a chunk; groups of all ranks; heads of a group
    state                  of one head: two dims, in the order of the scan
    shared_norm            the norm with one weight for all heads; "": each has its own
    scan, scan_backward    of whole sequences; scan_on: of sequences that go on
    """

    chunk: int
    groups: int
    heads: int
    state: Sequence[int]
    shared_norm: str = ""
    scan: Callable[..., Tensor]
    scan_on: Callable[..., Tensor]
    scan_backward: Callable[..., list[Tensor]]

    def __init__(self, sharding: Sharding) -> None:
        super().__init__()
        self.sharding = sharding

    def chunk_of(self, x: Tensor) -> int:
        return min(self.chunk, x.shape[1])

    def workspace(self, x: Tensor) -> Tensor:
        """Room for the states before each chunk, in float32 at least."""
        chunks = -(-x.shape[1] // self.chunk_of(x))
        shape = (x.shape[0], chunks, x.shape[2], self.heads, *self.state)
        return x.new_empty(shape, dtype=torch.promote_types(x.dtype, torch.float32))

    def _by_group(self, parameter: Tensor) -> Tensor:
        """This rank's piece of one that is cut by groups."""
        return local_tensor(parameter).unflatten(0, (self.groups // self.sharding.tp, -1))

    def _scanned(self, mixed: Tensor, steps: Tensor, names: Sequence[str]) -> Tensor:
        """Output [b, s, m, o] of the scan of mixed [b, s, m, c] and steps [b, s, m, ...]; names: of the scan's parameters"""
        conv = [self._by_group(parameter) for parameter in self.conv.parameters()]
        own = [self._by_group(getattr(self, name)) for name in names]
        return self._run(mixed, steps, conv, own)

    def _run(self, mixed: Tensor, steps: Tensor, conv: Sequence[Tensor], own: Sequence[Tensor]) -> Tensor:
        return _Scanned.apply(mixed, steps, self, len(conv), *conv, *own)  # type: ignore[no-any-return, no-untyped-call]


class MambaMixer(RecurrentMixer):
    def __init__(self, config: TransformerConfig, sharding: Sharding, *, device: str) -> None:
        super().__init__(sharding)
        mamba = config.mamba
        assert mamba is not None
        self.chunk = mamba.chunk_size
        self.groups, self.heads, *self.state = mamba.state_shape
        self.scan, self.scan_on, self.scan_backward = state_scan, state_scan_on, state_scan_backward
        self.inner = mamba.inner_size // mamba.num_groups
        mixed = mamba.group_channels
        self.pieces = self.inner, mixed, self.heads
        self.in_proj = nn.Linear(config.hidden_size, self.groups * sum(self.pieces), bias=mamba.bias, device=device)
        self.conv = _Weight((self.groups * mixed, mamba.conv_kernel), bias=mamba.conv_bias, device=device)
        for name in ("dt_bias", "A_log", "D"):
            self.register_parameter(name, nn.Parameter(torch.empty(mamba.num_heads, device=device)))
        self.mamba_norm = _Weight((mamba.inner_size,), bias=False, device=device)
        self.out_proj = nn.Linear(mamba.inner_size, config.hidden_size, bias=mamba.bias, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, h] -> the same; over tp a part of the sum"""
        gate, mixed, steps = self.in_proj(x).unflatten(-1, (-1, sum(self.pieces))).split(self.pieces, -1)
        y = self._scanned(mixed, steps, ("dt_bias", "A_log", "D"))
        y = _GatedNorm.apply(y, gate, self._by_group(self.mamba_norm.weight), self.inner, True)  # type: ignore[no-untyped-call]
        output: Tensor = self.out_proj(y.flatten(2))
        return output


class DeltaMixer(RecurrentMixer):
    shared_norm = "delta_norm"

    def __init__(self, config: TransformerConfig, sharding: Sharding, *, device: str) -> None:
        super().__init__(sharding)
        delta = config.delta
        assert delta is not None
        self.chunk = delta.chunk_size
        self.groups, self.heads, *self.state = delta.state_shape
        self.scan, self.scan_on, self.scan_backward = delta_scan, delta_scan_on, delta_scan_backward
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

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, h] -> the same; over tp a part of the sum"""
        mixed, gate = self.in_proj_qkvz(x).unflatten(-1, (-1, sum(self.pieces))).split(self.pieces, -1)
        y = self._scanned(mixed, self.in_proj_ba(x).unflatten(-1, (-1, 2 * self.heads)), ("dt_bias", "A_log"))
        weight = self.delta_norm.weight
        if isinstance(weight, DTensor):  # each rank norms its own heads
            weight = weight.to_local(grad_placements=[Partial()])
        y = _GatedNorm.apply(y, gate, weight, self.state[1], False)  # type: ignore[no-untyped-call]
        output: Tensor = self.out_proj(y.flatten(2))
        return output
