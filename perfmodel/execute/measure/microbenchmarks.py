"""Microbenchmarks that every rank of a group runs at once: kernels, collectives, and what ranks cost one another.

Kernels run as the executor's programs run them (through autograd, outputs freshly allocated, all ranks busy), so a sample holds what
memory and caches are shared. Bytes and elements are counted as the cost model counts them (`perfmodel.cost.program`). On a CPU a kernel
is timed by the processor time of its thread: other processes of the machine then do not disturb it. Collectives are timed by the clock.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from perfmodel.execute.launch.launch import Worker
from perfmodel.execute.measure.scope import Scope
from perfmodel.execute.norm import rms_norm
from perfmodel.execute.uniform.collective_ops import cross_entropy
from perfmodel.execute.uniform.model import NORM_EPSILON, Attention
from perfmodel.execute.uniform.sharding import Sharding
from perfmodel.execute.zero.flat import TORCH_DTYPES
from perfmodel.execute.zero.optimizers import build_optimizer
from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.foundation.dtypes import Dtype
from perfmodel.hardware.calibration import KernelClass
from perfmodel.hardware.samples import (
    AttentionSample,
    CollectiveSample,
    ContentionSample,
    DecodeSample,
    MatmulSample,
    Sample,
    StreamingSample,
    WeightSample,
)
from perfmodel.workload.config import TransformerConfig
from perfmodel.workload.job import PRECISION_POLICIES, Optimizer, Precision

MEBIBYTE = 2**20

#: Rows of activations are this wide: streaming kernels depend on the size, hardly on the width.
WIDTH = 512
#: Copies of the operands, used in turn, up to this many bytes together: what a step reads has not just been written.
ROTATED_BYTES = 32 * MEBIBYTE
MOST_COPIES = 8
#: Of operands that come from memory: more than a core's share of any cache.
STREAMED_BYTES = 192 * MEBIBYTE
MOST_STREAMED = 512


class Stopwatch:
    """Median time of a call."""

    def __init__(self, device: str) -> None:
        self.on_gpu = device == "cuda"

    def time(self, call: Callable[[], object], *, budget: float, least: int = 5, most: int = 60) -> float:
        """Seconds of one call: the median of as many as the budget allows."""
        call()
        once = self._one(call)
        count = max(least, min(most, int(budget / max(once, 1e-7))))
        return statistics.median(self._one(call) for _ in range(count))

    def _one(self, call: Callable[[], object]) -> float:
        if not self.on_gpu:
            start = time.thread_time()
            call()
            return time.thread_time() - start
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record()
        call()
        after.record()
        after.synchronize()
        return before.elapsed_time(after) / 1e3


def copies_from_memory(num_bytes: float) -> int:
    """So many operands that each comes from memory when its turn has come again."""
    return min(max(2, int(STREAMED_BYTES / max(num_bytes, 1.0))), MOST_STREAMED)


def from_memory(make: Callable[[], Callable[[], object]], num_bytes: float) -> Callable[[], object]:
    """Calls on copies of the operands that no cache holds together."""
    return _rotated([make() for _ in range(copies_from_memory(num_bytes))])


def in_turn(make: Callable[[], Callable[[], object]], num_bytes: float) -> Callable[[], object]:
    """Calls on several copies of the operands, one after the other."""
    return _rotated([make() for _ in range(max(1, min(MOST_COPIES, int(ROTATED_BYTES / max(num_bytes, 1.0)))))])


def _rotated(copies: Sequence[Callable[[], object]]) -> Callable[[], object]:
    index = 0

    def call() -> object:
        nonlocal index
        index = (index + 1) % len(copies)
        return copies[index]()

    return call


# ---------------------------------------------------------------------------------------------------------------------------------
# Kernels
# ---------------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A kernel to time: what it is called, one call of it, and the sample that its time makes."""

    label: str
    call: Callable[[], object]
    sample: Callable[[float], Sample]


def linear_kernels(shape: tuple[int, int, int], dtype: Dtype, device: str) -> Iterator[Kernel]:
    """A linear layer [rows, inputs] -> [rows, outputs]: forward, gradient of the input, gradient of the weight."""
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
            call=in_turn(make, num_bytes),
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
        call=in_turn(make, batch * (m * k + k * n + m * n) * options["dtype"].itemsize),
        sample=lambda seconds: MatmulSample(m=m, n=n, k=k, batch=batch, dtype=dtype, time=seconds),
    )


#: Bytes that the cost model counts, in units of the tensor's: (forward, backward). 0: no kernel of its own.
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

_ROTARY_MODEL = TransformerConfig(
    name="rotary", architecture="llama", num_hidden_layers=1, hidden_size=WIDTH, num_attention_heads=8, num_key_value_heads=8,
    head_dim=WIDTH // 8, intermediate_size=WIDTH, vocab_size=8, max_position_embeddings=64, gated_mlp=False, activation="silu",
    norm="rmsnorm", position="rotary", qkv_bias=False, attention_output_bias=False, mlp_bias=False, norm_bias=False,
    tie_word_embeddings=True,
)  # fmt: skip


def _streaming_function(kernel: KernelClass, rows: int, options: dict[str, Any]) -> Callable[[torch.Tensor], torch.Tensor]:
    """The operator of that class, on a tensor [rows, WIDTH]."""
    other, scale = torch.randn(rows, WIDTH, **options).requires_grad_(), torch.randn(WIDTH, **options).requires_grad_()
    shift = torch.randn(WIDTH, **options).requires_grad_()
    match kernel:
        case KernelClass.DEFAULT:
            return lambda x: x * 1.5
        case KernelClass.ADD:
            return lambda x: x * other
        case KernelClass.GELU:
            return F.gelu
        case KernelClass.GELU_TANH:
            return lambda x: F.gelu(x, approximate="tanh")
        case KernelClass.SILU:
            return F.silu
        case KernelClass.LAYERNORM:
            return lambda x: F.layer_norm(x, (WIDTH,), scale, shift)
        case KernelClass.RMSNORM:
            return lambda x: rms_norm(x, scale, NORM_EPSILON)
        case KernelClass.SOFTMAX:
            return lambda x: torch.softmax(x, dim=-1, dtype=torch.float32).to(x.dtype)
        case KernelClass.ROTARY:
            layer = Attention(_ROTARY_MODEL, Sharding(), index=0, fused=True, recompute_core=False, device=str(options["device"]))
            return lambda x: layer._rotate(x.view(1, rows, 8, WIDTH // 8)).view(rows, WIDTH)
        case KernelClass.PERMUTE:
            order = torch.randperm(rows, device=options["device"])
            return lambda x: x.index_select(0, order)
    raise AssertionError(kernel)


def _with_gradient(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Callable[[], object]:
    """The backward pass alone, of everything that `function` reads and that wants a gradient."""
    output = function(x)
    gradient = torch.randn_like(output)
    leaves = [x, *_leaves(function)]
    return lambda: torch.autograd.grad(output, leaves, gradient, retain_graph=True)


def _leaves(function: Callable[..., object]) -> list[torch.Tensor]:
    cells = getattr(function, "__closure__", None) or ()
    found = [cell.cell_contents for cell in cells]
    return [value for value in found if isinstance(value, torch.Tensor) and value.requires_grad]


def streaming_kernels(kernel: KernelClass, elements: int, dtype: Dtype, device: str) -> Iterator[Kernel]:
    """Forward and backward of one class on that many elements."""
    rows = max(elements // WIDTH, 1)
    options: dict[str, Any] = {"dtype": TORCH_DTYPES[dtype], "device": device}
    size = rows * WIDTH * options["dtype"].itemsize

    def forward() -> Callable[[], object]:
        function = _streaming_function(kernel, rows, options)
        x = torch.randn(rows, WIDTH, **options).requires_grad_()
        return lambda: function(x)

    def backward() -> Callable[[], object]:
        x = torch.randn(rows, WIDTH, **options).requires_grad_()
        return _with_gradient(_streaming_function(kernel, rows, options), x)

    for phase, make, moved in zip(("forward", "backward"), (forward, backward), _TENSORS_MOVED[kernel], strict=True):
        if moved:
            yield Kernel(
                label=f"{kernel} {phase}",
                call=in_turn(make, 2 * size),
                sample=_streaming_sample(kernel, moved * size, rows * WIDTH, phase),
            )


def _streaming_sample(kernel: KernelClass, num_bytes: float, elements: float, phase: str = "forward") -> Callable[[float], Sample]:
    # ADD stands for several elementwise kernels, forward and backward: they share one curve
    is_backward = phase == "backward" and kernel is not KernelClass.ADD
    return lambda seconds: StreamingSample(
        kernel_class=kernel, num_bytes=num_bytes, num_elements=elements, time=seconds, is_backward=is_backward
    )


def bias_gradient_kernel(elements: int, dtype: Dtype, device: str) -> Kernel:
    """The sum over rows that is a bias's gradient: one pass."""
    options: dict[str, Any] = {"dtype": TORCH_DTYPES[dtype], "device": device}
    rows = max(elements // WIDTH, 1)
    size = rows * WIDTH * options["dtype"].itemsize

    def make() -> Callable[[], object]:
        gradient = torch.randn(rows, WIDTH, **options)
        return lambda: gradient.sum(0)

    return Kernel(label="bias gradient", call=in_turn(make, size), sample=_streaming_sample(KernelClass.ADD, size, rows * WIDTH))


def dropout_kernels(elements: int, dtype: Dtype, device: str) -> Iterator[Kernel]:
    options: dict[str, Any] = {"dtype": TORCH_DTYPES[dtype], "device": device}
    size = elements * options["dtype"].itemsize
    num_bytes = 2 * size + elements  # the mask is a byte an element

    def forward() -> Callable[[], object]:
        x = torch.randn(elements, **options).requires_grad_()
        return lambda: F.dropout(x, 0.1)

    def backward() -> Callable[[], object]:
        return _with_gradient(lambda x: F.dropout(x, 0.1), torch.randn(elements, **options).requires_grad_())

    for phase, make in (("forward", forward), ("backward", backward)):
        yield Kernel(
            label=f"dropout {phase}",
            call=in_turn(make, 2 * size),
            sample=_streaming_sample(KernelClass.DROPOUT, num_bytes, elements, phase),
        )


def embedding_kernels(rows: int, vocabulary: int, dtype: Dtype, device: str) -> Iterator[Kernel]:
    options: dict[str, Any] = {"dtype": TORCH_DTYPES[dtype], "device": device}
    table = torch.randn(vocabulary, WIDTH, **options).requires_grad_()
    size, table_size = rows * WIDTH * options["dtype"].itemsize, vocabulary * WIDTH * options["dtype"].itemsize

    def tokens() -> torch.Tensor:
        return torch.randint(vocabulary, (rows,), device=device)

    def forward() -> Callable[[], object]:
        chosen = tokens()
        return lambda: F.embedding(chosen, table)

    def backward() -> Callable[[], object]:
        chosen = tokens()
        return _with_gradient(lambda x: F.embedding(chosen, x), table)

    for phase, make, num_bytes in (("forward", forward, 2 * size), ("backward", backward, 2 * size + table_size)):
        yield Kernel(
            label=f"embedding {phase}",
            call=in_turn(make, 2 * size),
            sample=_streaming_sample(KernelClass.EMBEDDING, num_bytes, rows * WIDTH, phase),
        )


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
        (probabilities, *_) = output.grad_fn.saved_tensors  # type: ignore[union-attr]

        def gradient() -> object:
            # Made in place of the probabilities, for which a graph is used once; here only the time of it counts.
            with torch.autograd._unsafe_preserve_version_counter(probabilities):
                return torch.autograd.grad(output, logits, retain_graph=True)

        return gradient

    for phase, make in (("forward", forward), ("backward", backward)):
        yield Kernel(
            label=f"cross-entropy {phase}",
            call=in_turn(make, 3 * elements * options["dtype"].itemsize),
            sample=_streaming_sample(KernelClass.CROSS_ENTROPY, elements * logit_bytes / 2, elements, phase),
        )


def optimizer_kernel(elements: int, device: str) -> Kernel:
    """AdamW as the executor runs it, on fp32 weights."""

    def make() -> Callable[[], object]:
        weights = torch.randn(elements, device=device)
        weights.grad = torch.randn(elements, device=device)
        return build_optimizer(Optimizer.ADAMW, [weights]).step

    num_bytes = elements * PRECISION_POLICIES[Precision.FP32].step_bytes_per_parameter(Optimizer.ADAMW)
    return Kernel(
        label="optimizer step", call=in_turn(make, num_bytes), sample=_streaming_sample(KernelClass.OPTIMIZER, num_bytes, elements)
    )


def attention_calls(
    shape: tuple[int, int, int, int, int], dtype: Dtype, device: str
) -> tuple[Callable[[], object], Callable[[], object], Callable[[float, float], Sample]]:
    """Forward, backward, and the sample of both times. Operands lie as the model's projections leave them."""
    batch, heads, kv_heads, length, head_dim = shape
    options: dict[str, Any] = {"dtype": TORCH_DTYPES[dtype], "device": device}
    size = batch * length * heads * head_dim * options["dtype"].itemsize

    def operands() -> list[torch.Tensor]:
        return [torch.randn(batch, length, number, head_dim, **options).requires_grad_() for number in (heads, kv_heads, kv_heads)]

    def attend(leaves: Sequence[torch.Tensor]) -> torch.Tensor:
        q, k, v = (leaf.transpose(1, 2) for leaf in leaves)
        context = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)
        return context.transpose(1, 2).flatten(2)

    def forward() -> Callable[[], object]:
        leaves = operands()
        return lambda: attend(leaves)

    def backward() -> Callable[[], object]:
        leaves = operands()
        output = attend(leaves)
        gradient = torch.randn_like(output)
        return lambda: torch.autograd.grad(output, leaves, gradient, retain_graph=True)

    def sample(forward_time: float, backward_time: float) -> Sample:
        return AttentionSample(
            batch=batch, heads=heads, kv_heads=kv_heads, query_length=length, key_length=length, head_dim=head_dim,
            causal_fraction=0.5, dtype=dtype, time=forward_time, backward_time=backward_time,
        )  # fmt: skip

    return in_turn(forward, 4 * size), in_turn(backward, 8 * size), sample


def decode_kernel(shape: tuple[int, int, int, int, int], dtype: Dtype, device: str) -> Kernel:
    """One new token of each sequence against its cache; query heads that share a key head are rows of one product, as in the executor."""
    batch, heads, kv_heads, length, head_dim = shape
    options: dict[str, Any] = {"dtype": TORCH_DTYPES[dtype], "device": device}

    def make() -> Callable[[], object]:
        q = torch.randn(batch, kv_heads, heads // kv_heads, head_dim, **options)
        k, v = (torch.full((batch, length, kv_heads, head_dim), 0.5, **options).transpose(1, 2) for _ in range(2))
        return lambda: F.scaled_dot_product_attention(q, k, v)

    def sample(time: float) -> Sample:
        return DecodeSample(
            batch=batch, heads=heads, kv_heads=kv_heads, key_length=length, head_dim=head_dim, dtype=dtype, time=time
        )  # fmt: skip

    num_bytes = 2 * options["dtype"].itemsize * batch * head_dim * (kv_heads * length + heads)
    return Kernel(label=f"decoding over {length} tokens", call=from_memory(make, num_bytes), sample=sample)


#: Rows of a decode step.
FEW_ROWS = (1, 4, 8, 16, 32)


def weight_kernels(shape: tuple[int, int], dtype: Dtype, device: str) -> Iterator[Kernel]:
    """Products of a few rows with weights of this shape, one after another as in a model: no cache holds them all."""
    outputs, inputs = shape
    options: dict[str, Any] = {"dtype": TORCH_DTYPES[dtype], "device": device}
    number = copies_from_memory(outputs * inputs * options["dtype"].itemsize)
    weights = [torch.full((outputs, inputs), 0.5, **options) for _ in range(number)]
    for rows in FEW_ROWS:
        x = torch.randn(rows, inputs, **options)
        each = itertools.cycle(weights)

        def sample(time: float, rows: int = rows) -> Sample:
            return WeightSample(rows=rows, outputs=outputs, inputs=inputs, dtype=dtype, time=time)

        def call(x: torch.Tensor = x, each: Iterator[torch.Tensor] = each) -> object:
            return F.linear(x, next(each))

        yield Kernel(label=f"{rows} rows of a weight", call=call, sample=sample)


def all_kernels(scope: Scope, device: str) -> Iterator[Kernel]:
    """Everything but attention, made one at a time: operands of the next kernel take the memory of the last."""
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


def measure_kernels_on_rank(worker: Worker, scope: Scope) -> list[Sample]:
    """Every kernel, on all ranks at the same time."""
    watch = Stopwatch(worker.device)
    samples = []
    for kernel in all_kernels(scope, worker.device):
        worker.beat(kernel.label)
        dist.barrier()
        samples.append(kernel.sample(watch.time(kernel.call, budget=scope.budget)))
    for shape in scope.attentions:
        worker.beat(f"attention over {shape[3]} tokens")
        forward, backward, sample = attention_calls(shape, scope.dtype, worker.device)
        dist.barrier()
        times = [watch.time(call, budget=scope.budget) for call in (forward, backward)]
        samples.append(sample(*times))
    return samples


# ---------------------------------------------------------------------------------------------------------------------------------
# Contention
# ---------------------------------------------------------------------------------------------------------------------------------


def measure_contention_on_rank(worker: Worker, scope: Scope) -> list[Sample]:
    """How much longer kernels take while every rank computes than on rank 0 alone, and while a collective is under way."""
    device, watch = worker.device, Stopwatch(worker.device)
    parts: dict[str, list[Callable[[], object]]] = {
        "matmul": [kernel.call for kernel in linear_kernels(scope.matmuls[-2], scope.dtype, device)],
        "streaming": [
            kernel.call
            for name in (KernelClass.ADD, KernelClass.LAYERNORM)
            for kernel in streaming_kernels(name, scope.elements[-2], scope.dtype, device)
        ],
        "attention": list(attention_calls(scope.attentions[len(scope.attentions) // 2], scope.dtype, device)[:2]),
    }
    samples: list[Sample] = []
    for name, calls in parts.items():
        worker.beat(f"contention of {name}")
        together, alone = [], []
        for _ in range(3):
            dist.barrier()
            together.append(sum(watch.time(call, budget=scope.budget) for call in calls))
            dist.barrier()
            if worker.rank == 0:
                alone.append(sum(watch.time(call, budget=scope.budget) for call in calls))
            dist.barrier()
        if worker.rank == 0:
            factor = statistics.median(together) / statistics.median(alone)
            samples.append(ContentionSample(name=name, factor=max(factor, 1.0)))
    if worker.world_size > 1:
        samples.append(ContentionSample(name="compute_under_communication", factor=_under_communication(worker, parts["matmul"][0])))
    return samples


def _under_communication(worker: Worker, call: Callable[[], object]) -> float:
    """Time of compute while an all-reduce is under way over its time without, by the clock."""
    buffer = torch.randn(2 * MEBIBYTE, device=worker.device)

    def seconds() -> float:
        start = time.perf_counter()
        for _ in range(4):
            call()
        if worker.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    dist.all_reduce(buffer)
    quiet, busy = [], []
    for _ in range(6):
        worker.beat("compute under communication")
        dist.barrier()
        quiet.append(seconds())
        dist.barrier()
        work = [dist.all_reduce(buffer, async_op=True) for _ in range(4)]
        busy.append(seconds())
        for item in work:
            item.wait()
    return max(statistics.median(busy) / statistics.median(quiet), 1.0)


# ---------------------------------------------------------------------------------------------------------------------------------
# Collectives
# ---------------------------------------------------------------------------------------------------------------------------------


def group_sizes(world_size: int) -> tuple[int, ...]:
    """Powers of two up to the world, and the world."""
    sizes = [1 << exponent for exponent in range(1, world_size.bit_length()) if 1 << exponent <= world_size]
    return tuple(dict.fromkeys([*sizes, world_size])) if world_size > 1 else ()


def _collective(kind: CollectiveKind, num_bytes: int, ranks: int, group: Any, device: str) -> Callable[[], object]:
    whole = torch.zeros(max(num_bytes // 4 // ranks, 1) * ranks, device=device)
    part = torch.zeros(whole.numel() // ranks, device=device)
    match kind:
        case CollectiveKind.ALL_REDUCE:
            return lambda: dist.all_reduce(whole, group=group)
        case CollectiveKind.REDUCE_SCATTER:
            return lambda: dist.reduce_scatter_tensor(part, whole, group=group)
        case CollectiveKind.ALL_GATHER:
            return lambda: dist.all_gather_into_tensor(whole, part, group=group)
        case CollectiveKind.ALL_TO_ALL:
            other = torch.empty_like(whole)
            return lambda: dist.all_to_all_single(other, whole, group=group)
        case CollectiveKind.SEND_RECV:
            first, second = 0, 1
            if dist.get_rank() == first:
                return lambda: (dist.send(whole, second), dist.recv(whole, second))
            if dist.get_rank() == second:
                return lambda: (dist.recv(whole, first), dist.send(whole, first))
            return lambda: None
    raise AssertionError(kind)


#: Most calls of a collective in one timing, and how many timings there are; their lower quartile counts: what disturbs adds.
MOST_CALLS, NUM_TIMINGS = 20, 15


def measure_collectives_on_rank(worker: Worker, scope: Scope) -> list[Sample]:
    """Every collective over sizes and group sizes, a few calls after one another: each waits for its peers."""
    samples: list[Sample] = []
    for ranks in group_sizes(worker.world_size):
        key = ("microbenchmark group", ranks)
        if key not in worker.cache:
            worker.cache[key] = dist.new_group(list(range(ranks)))
        group = worker.cache[key]
        kinds = list(CollectiveKind) if ranks == 2 else [kind for kind in CollectiveKind if kind is not CollectiveKind.SEND_RECV]
        for kind in kinds:
            for num_bytes in scope.message_bytes:
                worker.beat(f"{kind} of {num_bytes} bytes on {ranks} ranks")
                dist.barrier()
                if worker.rank >= ranks:
                    continue
                call = _collective(kind, num_bytes, ranks, group, worker.device)
                messages = 2 if kind is CollectiveKind.SEND_RECV else 1
                seconds = _time_collective(call, scope.budget, worker.device, group) / messages
                samples.append(CollectiveSample(kind=kind, num_bytes=float(num_bytes), group_size=ranks, time=seconds))
    return samples


def _time_collective(call: Callable[[], object], budget: float, device: str, group: Any) -> float:
    def seconds(count: int) -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            call()
        if device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / count

    seconds(1)
    # every rank must make the same number of calls
    once = torch.tensor([seconds(2)], device=device)
    dist.all_reduce(once, dist.ReduceOp.MAX, group=group)
    count = max(1, min(MOST_CALLS, int(budget / NUM_TIMINGS / max(float(once), 1e-7))))
    return statistics.quantiles((seconds(count) for _ in range(NUM_TIMINGS)), n=4)[0]
