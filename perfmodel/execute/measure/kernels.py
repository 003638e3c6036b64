"""Microbenchmark kernels of the executor's programs, each with the sample built from its time.

Kernels run through autograd with newly allocated outputs. Bytes and elements follow the cost model (`perfmodel.cost.program`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F

from perfmodel.execute.layers.attention import attention
from perfmodel.execute.layers.norm import NORM_EPSILON, rms_norm
from perfmodel.execute.layers.rotary import rotary_angles, rotate
from perfmodel.execute.layers.vocabulary import cross_entropy
from perfmodel.execute.measure.scope import Scope
from perfmodel.execute.measure.stopwatch import copies_from_memory, from_memory, in_rotation
from perfmodel.execute.zero import TORCH_DTYPES, build_optimizer
from perfmodel.foundation.dtypes import Dtype
from perfmodel.hardware.calibration import KernelClass
from perfmodel.hardware.samples import AttentionSample, DecodeSample, MatmulSample, Sample, StreamingSample, WeightSample
from perfmodel.workload.job import PRECISION_POLICIES, Optimizer, Precision

#: Allocates operands, and returns a call on them.
Make: TypeAlias = Callable[[], Callable[[], object]]
#: A call on operands, and those that have a gradient.
Operands: TypeAlias = tuple[Callable[[], torch.Tensor], Sequence[torch.Tensor]]

#: Width of the activation rows. Streaming kernels depend on the size and hardly on the width.
WIDTH = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A kernel to time: its label, one call, and the sample as a function of the time."""

    label: str
    call: Callable[[], object]
    sample: Callable[[float], Sample]


def linear_kernels(shape: tuple[int, int, int], dtype: Dtype, device: str) -> Iterator[Kernel]:
    """Yield the products of a linear layer [rows, inputs] -> [rows, outputs]: forward, input gradient and weight gradient."""
    rows, outputs, inputs = shape
    options: dict[str, Any] = {"dtype": TORCH_DTYPES[dtype], "device": device}
    num_bytes = (rows * inputs + outputs * inputs + rows * outputs) * options["dtype"].itemsize

    def forward() -> Callable[[], object]:
        x, weight, bias = (torch.randn(*size, **options) for size in ((rows, inputs), (outputs, inputs), (outputs,)))
        return lambda: F.linear(x, weight, bias)

    def input_gradient() -> Callable[[], object]:
        gradient, weight = torch.randn(rows, outputs, **options), torch.randn(outputs, inputs, **options)
        return lambda: gradient.mm(weight)

    def weight_gradient() -> Callable[[], object]:
        gradient, x = torch.randn(rows, outputs, **options), torch.randn(rows, inputs, **options)
        return lambda: gradient.t().mm(x)

    for make, (m, n, k) in (
        (forward, (rows, outputs, inputs)),
        (input_gradient, (rows, inputs, outputs)),
        (weight_gradient, (outputs, inputs, rows)),
    ):
        yield Kernel(
            label=f"matrix multiply {m} x {n} x {k} in {dtype}",
            call=in_rotation(make, num_bytes),
            sample=lambda seconds, m=m, n=n, k=k: MatmulSample(m=m, n=n, k=k, batch=1, dtype=dtype, time=seconds),  # type: ignore[misc]
        )


def batched_kernel(shape: tuple[int, int, int, int], dtype: Dtype, device: str) -> Kernel:
    batch, m, n, k = shape
    options: dict[str, Any] = {"dtype": TORCH_DTYPES[dtype], "device": device}

    def make() -> Callable[[], object]:
        a, b = torch.randn(batch, m, k, **options), torch.randn(batch, k, n, **options)
        return lambda: torch.bmm(a, b)

    return Kernel(
        label=f"{batch} matrix multiplies {m} x {n} x {k}",
        call=in_rotation(make, batch * (m * k + k * n + m * n) * options["dtype"].itemsize),
        sample=lambda seconds: MatmulSample(m=m, n=n, k=k, batch=batch, dtype=dtype, time=seconds),
    )


#: Bytes in the cost model, in units of the tensor's size: (forward, backward). 0: no kernel.
_TENSORS_MOVED = {
    KernelClass.DEFAULT: (2.0, 0.0),
    KernelClass.ADD: (3.0, 5.0),
    KernelClass.GELU: (2.0, 3.0),
    KernelClass.GELU_TANH: (2.0, 3.0),
    KernelClass.SILU: (2.0, 3.0),
    KernelClass.LAYERNORM: (2.0, 3.0),
    KernelClass.RMSNORM: (2.0, 3.0),
    KernelClass.SOFTMAX: (2.0, 3.0),
    KernelClass.ROTARY: (2.0, 2.0),
    KernelClass.PERMUTE: (2.0, 2.0),
}


def _streaming_operands(kernel: KernelClass, rows: int, options: dict[str, Any]) -> Operands:
    """Return the operator of the kernel class, on a tensor [rows, WIDTH]."""
    x = torch.randn(rows, WIDTH, **options).requires_grad_()
    scale, shift = (torch.randn(WIDTH, **options).requires_grad_() for _ in range(2))
    match kernel:
        case KernelClass.DEFAULT:
            return lambda: x * 1.5, (x,)
        case KernelClass.ADD:
            other = torch.randn(rows, WIDTH, **options).requires_grad_()
            return lambda: x * other, (x, other)
        case KernelClass.GELU:
            return lambda: F.gelu(x), (x,)
        case KernelClass.GELU_TANH:
            return lambda: F.gelu(x, approximate="tanh"), (x,)
        case KernelClass.SILU:
            return lambda: F.silu(x), (x,)
        case KernelClass.LAYERNORM:
            return lambda: F.layer_norm(x, (WIDTH,), scale, shift), (x, scale, shift)
        case KernelClass.RMSNORM:
            return lambda: rms_norm(x, scale, NORM_EPSILON), (x, scale)
        case KernelClass.SOFTMAX:
            return lambda: torch.softmax(x, dim=-1, dtype=torch.float32).to(x.dtype), (x,)
        case KernelClass.ROTARY:
            angles = rotary_angles(torch.arange(rows, device=options["device"]), WIDTH // 8, options["dtype"])
            return lambda: rotate(x.view(1, rows, 8, WIDTH // 8), *angles).view(rows, WIDTH), (x,)
        case KernelClass.PERMUTE:
            order = torch.randperm(rows, device=options["device"])
            return lambda: x.index_select(0, order), (x,)
    raise AssertionError(kernel)


def passes_of(make: Callable[[], Operands]) -> tuple[Make, Make]:
    """Return the forward and the backward pass of the call that `make` returns; backward has the gradients of all leaves."""

    def backward() -> Callable[[], object]:
        call, leaves = make()
        output = call()
        gradient = torch.randn_like(output)
        return lambda: torch.autograd.grad(output, leaves, gradient, retain_graph=True)

    return lambda: make()[0], backward


def streaming_kernels(kernel: KernelClass, elements: int, dtype: Dtype, device: str) -> Iterator[Kernel]:
    """Yield forward and backward of one kernel class on `elements` elements."""
    rows = max(elements // WIDTH, 1)
    options: dict[str, Any] = {"dtype": TORCH_DTYPES[dtype], "device": device}
    size = rows * WIDTH * options["dtype"].itemsize
    moved = tuple(number * size for number in _TENSORS_MOVED[kernel])
    makes = passes_of(lambda: _streaming_operands(kernel, rows, options))
    yield from both_passes(kernel, makes, moved, rows * WIDTH, rotated=2 * size)


def both_passes(
    kernel: KernelClass, makes: Sequence[Make], moved: Sequence[float], elements: float, *, rotated: float = 0.0
) -> Iterator[Kernel]:
    """Yield the kernels of forward and backward.

    moved     bytes of each; 0: no kernel
    rotated   bytes of the operands of which copies are used in turn; 0: the moved ones
    """
    for phase, make, num_bytes in zip(("forward", "backward"), makes, moved, strict=True):
        if num_bytes:
            sample = _streaming_sample(kernel, num_bytes, elements, phase)
            yield Kernel(label=f"{kernel} {phase}", call=in_rotation(make, rotated or num_bytes), sample=sample)


def _streaming_sample(kernel: KernelClass, num_bytes: float, elements: float, phase: str = "forward") -> Callable[[float], Sample]:
    # ADD covers several elementwise kernels; forward and backward share one curve
    is_backward = phase == "backward" and kernel is not KernelClass.ADD
    return lambda seconds: StreamingSample(
        kernel_class=kernel, num_bytes=num_bytes, num_elements=elements, time=seconds, is_backward=is_backward
    )


def bias_gradient_kernel(elements: int, dtype: Dtype, device: str) -> Kernel:
    """Return the sum over rows that computes a bias gradient: one pass."""
    options: dict[str, Any] = {"dtype": TORCH_DTYPES[dtype], "device": device}
    rows = max(elements // WIDTH, 1)
    size = rows * WIDTH * options["dtype"].itemsize

    def make() -> Callable[[], object]:
        gradient = torch.randn(rows, WIDTH, **options)
        return lambda: gradient.sum(0)

    return Kernel(label="bias gradient", call=in_rotation(make, size), sample=_streaming_sample(KernelClass.ADD, size, rows * WIDTH))


def dropout_kernels(elements: int, dtype: Dtype, device: str) -> Iterator[Kernel]:
    options: dict[str, Any] = {"dtype": TORCH_DTYPES[dtype], "device": device}
    size = elements * options["dtype"].itemsize
    num_bytes = 2 * size + elements  # the mask takes one byte per element

    def make() -> Operands:
        x = torch.randn(elements, **options).requires_grad_()
        return lambda: F.dropout(x, 0.1), (x,)

    yield from both_passes(KernelClass.DROPOUT, passes_of(make), (num_bytes, num_bytes), elements, rotated=2 * size)


def embedding_kernels(rows: int, vocabulary: int, dtype: Dtype, device: str) -> Iterator[Kernel]:
    options: dict[str, Any] = {"dtype": TORCH_DTYPES[dtype], "device": device}
    table = torch.randn(vocabulary, WIDTH, **options).requires_grad_()
    size, table_size = rows * WIDTH * options["dtype"].itemsize, vocabulary * WIDTH * options["dtype"].itemsize

    def make() -> Operands:
        chosen = torch.randint(vocabulary, (rows,), device=device)
        return lambda: F.embedding(chosen, table), (table,)

    moved = (2 * size, 2 * size + table_size)
    yield from both_passes(KernelClass.EMBEDDING, passes_of(make), moved, rows * WIDTH, rotated=2 * size)


def loss_kernels(rows: int, vocabulary: int, logit_bytes: float, dtype: Dtype, device: str) -> Iterator[Kernel]:
    options: dict[str, Any] = {"dtype": TORCH_DTYPES[dtype], "device": device}
    elements = rows * vocabulary

    def operands() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(rows, vocabulary, **options).requires_grad_(), torch.randint(vocabulary, (rows,), device=device)

    def forward() -> Callable[[], object]:
        logits, targets = operands()
        return lambda: cross_entropy(logits, targets)

    def backward() -> Callable[[], object]:
        logits, targets = operands()
        output = cross_entropy(logits, targets)
        weights = torch.ones_like(output)
        (probabilities, *_) = output.grad_fn.saved_tensors  # type: ignore[union-attr]

        def gradient() -> object:
            # The gradient overwrites the probabilities, so a graph is normally used once. Only its time matters here.
            with torch.autograd._unsafe_preserve_version_counter(probabilities):
                return torch.autograd.grad(output, logits, weights, retain_graph=True)

        return gradient

    moved, rotated = elements * logit_bytes / 2, 3 * elements * options["dtype"].itemsize
    yield from both_passes(KernelClass.CROSS_ENTROPY, (forward, backward), (moved, moved), elements, rotated=rotated)


def optimizer_kernel(elements: int, device: str) -> Kernel:
    """Return the AdamW step of the executor on fp32 weights."""

    def make() -> Callable[[], object]:
        weights = torch.randn(elements, device=device)
        weights.grad = torch.randn(elements, device=device)
        return build_optimizer(Optimizer.ADAMW, [weights]).step

    num_bytes = elements * PRECISION_POLICIES[Precision.FP32].step_bytes_per_parameter(Optimizer.ADAMW)
    return Kernel(
        label="optimizer step", call=in_rotation(make, num_bytes), sample=_streaming_sample(KernelClass.OPTIMIZER, num_bytes, elements)
    )


def attention_calls(
    shape: tuple[int, int, int, int, int], dtype: Dtype, device: str
) -> tuple[Callable[[], object], Callable[[], object], Callable[[float, float], Sample]]:
    """Return forward, backward, and the sample of both times. Operands have the layout that the model's projections produce."""
    batch, heads, kv_heads, length, head_dim = shape
    options: dict[str, Any] = {"dtype": TORCH_DTYPES[dtype], "device": device}
    size = batch * length * heads * head_dim * options["dtype"].itemsize

    def make() -> Operands:
        leaves = [torch.randn(batch, length, number, head_dim, **options).requires_grad_() for number in (heads, kv_heads, kv_heads)]
        return lambda: attention(*(leaf.transpose(1, 2) for leaf in leaves), is_causal=True).transpose(1, 2).flatten(2), leaves

    def sample(forward_time: float, backward_time: float) -> Sample:
        return AttentionSample(
            batch=batch, heads=heads, kv_heads=kv_heads, query_length=length, key_length=length, head_dim=head_dim,
            causal_fraction=0.5, dtype=dtype, time=forward_time, backward_time=backward_time,
        )  # fmt: skip

    forward, backward = passes_of(make)
    return in_rotation(forward, 4 * size), in_rotation(backward, 8 * size), sample


def decode_kernel(shape: tuple[int, int, int, int, int], dtype: Dtype, device: str) -> Kernel:
    """Return decode attention: one new token per sequence with its KV cache. Query heads that share a key head form rows of one product."""
    batch, heads, kv_heads, length, head_dim = shape
    options: dict[str, Any] = {"dtype": TORCH_DTYPES[dtype], "device": device}

    def make() -> Callable[[], object]:
        q = torch.randn(batch, kv_heads, heads // kv_heads, head_dim, **options)
        k, v = (torch.full((batch, length, kv_heads, head_dim), 0.5, **options).transpose(1, 2) for _ in range(2))
        return lambda: attention(q, k, v)

    def sample(time: float) -> Sample:
        return DecodeSample(
            batch=batch, heads=heads, kv_heads=kv_heads, key_length=length, head_dim=head_dim, dtype=dtype, time=time
        )  # fmt: skip

    num_bytes = 2 * options["dtype"].itemsize * batch * head_dim * (kv_heads * length + heads)
    return Kernel(label=f"decoding over {length} tokens", call=from_memory(make, num_bytes), sample=sample)


#: Numbers of rows in a decode step.
FEW_ROWS = (1, 4, 8, 16, 32)


def weight_kernels(shape: tuple[int, int], dtype: Dtype, device: str, numbers_of_rows: Sequence[int] = FEW_ROWS) -> Iterator[Kernel]:
    """Yield products of each number of rows with weights of this shape, rotating over so large a set of weights that no cache holds it."""
    outputs, inputs = shape
    options: dict[str, Any] = {"dtype": TORCH_DTYPES[dtype], "device": device}
    number = copies_from_memory(outputs * inputs * options["dtype"].itemsize)
    weights = [torch.full((outputs, inputs), 0.5, **options) for _ in range(number)]
    for rows in numbers_of_rows:
        x = torch.randn(rows, inputs, **options)
        cycle = itertools.cycle(weights)

        def sample(time: float, rows: int = rows) -> Sample:
            return WeightSample(rows=rows, outputs=outputs, inputs=inputs, dtype=dtype, time=time)

        def call(x: torch.Tensor = x, cycle: Iterator[torch.Tensor] = cycle) -> object:
            return F.linear(x, next(cycle))

        yield Kernel(label=f"{rows} rows of a weight", call=call, sample=sample)


def all_kernels(scope: Scope, device: str) -> Iterator[Kernel]:
    """Yield all kernels except attention, one at a time, so that the next kernel reuses the memory of the last."""
    for shape in scope.matmuls:
        yield from linear_kernels(shape, scope.dtype, device)
    for batched in scope.batched_matmuls:
        yield batched_kernel(batched, scope.dtype, device)
    for shape in scope.half_matmuls:
        yield from linear_kernels(shape, scope.half_dtype, device)
    for elements in scope.elements:
        for kernel in _TENSORS_MOVED:
            yield from streaming_kernels(kernel, elements, scope.dtype, device)
        yield bias_gradient_kernel(elements, scope.dtype, device)
        yield from dropout_kernels(elements, scope.dtype, device)
        yield from embedding_kernels(max(elements // WIDTH, 1), max(elements // WIDTH * 4, 64), scope.dtype, device)
        yield from loss_kernels(max(elements // 4096, 1), 4096, scope.logit_bytes, scope.dtype, device)
        yield optimizer_kernel(elements, device)
    for decode in scope.decodes:
        yield decode_kernel(decode, scope.dtype, device)
    for weight in scope.weights:
        yield from weight_kernels(weight, scope.dtype, device)
