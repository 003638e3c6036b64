"""Microbenchmarks of kernels that networks have and transformers lack: convolutions, pooling, LSTM cells. On CPUs only.

On a GPU they are priced as their nearest equivalent: a matrix multiply or a plain pass over memory. Bytes and elements are counted as
in the operator kinds (`perfmodel.workload.kinds`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from perfmodel.execute.measure.kernels import Kernel, Operands, both_passes, passes_of
from perfmodel.execute.measure.stopwatch import in_rotation
from perfmodel.execute.per_operator.collective_rules import lstm_cell, lstm_cell_backward
from perfmodel.execute.zero import TORCH_DTYPES
from perfmodel.foundation.dtypes import Dtype
from perfmodel.hardware.calibration import KernelClass
from perfmodel.hardware.samples import ConvolutionSample

#: (samples, channels, filters, side of the image, window, stride); padding is half the window. A window of 1 is a plain product.
_CONVOLUTIONS = (
    (4, 3, 64, 112, 7, 2), (4, 64, 64, 56, 3, 1), (8, 128, 128, 28, 3, 1), (8, 128, 256, 28, 3, 2), (8, 512, 512, 7, 3, 1),
    (8, 256, 192, 14, 3, 1), (4, 48, 96, 35, 5, 1), (2, 192, 160, 17, 7, 1), (2, 32, 32, 28, 3, 1),
)  # fmt: skip
#: (samples, channels, side of the image, window, stride)
_POOLINGS = ((2, 64, 56, 2, 2), (8, 64, 56, 3, 2), (4, 192, 28, 3, 1), (8, 128, 14, 2, 2), (8, 96, 80, 3, 2))
#: (samples, width)
_CELLS = ((4, 64), (4, 512), (16, 256), (16, 1024), (64, 384), (64, 1536))


def convolution_kernels(shape: tuple[int, int, int, int, int, int], dtype: Dtype, device: str) -> Iterator[Kernel]:
    """Yield forward and both gradients; no input gradient for an image of three channels, which is data."""
    batch, channels, filters, side, window, stride = shape
    options: dict[str, Any] = {"dtype": TORCH_DTYPES[dtype], "device": device}
    padding = window // 2
    out = (side + 2 * padding - window) // stride + 1
    sizes = ((batch, channels, side, side), (filters, channels, window, window), (batch, filters, out, out))
    num_bytes = float(sum(torch.Size(size).numel() for size in sizes) * options["dtype"].itemsize)
    m, n, k = batch * out * out, filters, channels * window * window

    def forward() -> Callable[[], object]:
        x, weight = (torch.randn(*size, **options) for size in sizes[:2])
        return lambda: F.conv2d(x, weight, None, stride, padding)

    def gradient(mask: list[bool]) -> Callable[[], Callable[[], object]]:
        def make() -> Callable[[], object]:
            x, weight, above = (torch.randn(*size, **options) for size in sizes)
            where = [stride, stride], [padding, padding], [1, 1]
            return lambda: torch.ops.aten.convolution_backward(above, x, weight, None, *where, False, [0, 0], 1, mask)

        return make

    passes = [(forward, (m, n, k)), (gradient([False, True, False]), (n, k, m))]
    if channels != 3:
        passes.append((gradient([True, False, False]), (m, k, n)))
    for make, (rows, columns, depth) in passes:
        yield Kernel(
            label=f"convolution of {channels} channels, {side} x {side}",
            call=in_rotation(make, num_bytes),
            sample=lambda seconds, rows=rows, columns=columns, depth=depth: ConvolutionSample(  # type: ignore[misc]
                m=rows, n=columns, k=depth, batch=1, num_bytes=num_bytes, dtype=dtype, time=seconds
            ),
        )


def pooling_kernels(shape: tuple[int, int, int, int, int], dtype: Dtype, device: str) -> Iterator[Kernel]:
    """Yield maximum and average pooling; an element is one entry of one window."""
    batch, channels, side, window, stride = shape
    options: dict[str, Any] = {"dtype": TORCH_DTYPES[dtype], "device": device}
    out = (side - window) // stride + 1
    item = options["dtype"].itemsize
    read, written = float(batch * channels * side * side * item), float(batch * channels * out * out * item)

    def operands(pool: Callable[..., torch.Tensor]) -> Operands:
        x = torch.randn(batch, channels, side, side, **options).requires_grad_()
        return lambda: pool(x, window, stride), (x,)

    # indices of the maxima have 8 bytes, which the operator kind counts as two entries
    for kernel, pool, kept in ((KernelClass.MAX_POOLING, F.max_pool2d, 2.0), (KernelClass.AVERAGE_POOLING, F.avg_pool2d, 0.0)):
        moved = read + written * (1.0 + kept)
        yield from both_passes(kernel, passes_of(partial(operands, pool)), (moved, moved), window * window * written / item)


def cell_kernels(shape: tuple[int, int], dtype: Dtype, device: str) -> Iterator[Kernel]:
    """Yield one time step of an LSTM without its product: sum of both parts of the gates, gates, cell and output."""
    batch, width = shape
    options: dict[str, Any] = {"dtype": TORCH_DTYPES[dtype], "device": device}
    size = float(batch * width * options["dtype"].itemsize)

    def forward() -> Callable[[], object]:
        first, second = (torch.randn(batch, 4, width, **options) for _ in range(2))
        cell = torch.randn(batch, width, **options)
        return lambda: lstm_cell(first + second, cell)

    def backward() -> Callable[[], object]:
        before, above, for_hidden, for_cell = (torch.randn(batch, width, **options) for _ in range(4))
        values, cell, _ = lstm_cell(torch.randn(batch, 4, width, **options), before)
        into = torch.empty(batch, 4, width, **options)
        return lambda: lstm_cell_backward(into, above + for_hidden, for_cell, values, cell, before)

    # as in the operator kind: 3 tensors of gates and 3 of the cell's size forward, 2 and 5 backward
    yield from both_passes(KernelClass.LSTM_CELL, (forward, backward), (15.0 * size, 13.0 * size), 4.0 * batch * width)


def network_kernels(dtype: Dtype, device: str) -> Iterator[Kernel]:
    for convolution in _CONVOLUTIONS:
        yield from convolution_kernels(convolution, dtype, device)
    for pooling in _POOLINGS:
        yield from pooling_kernels(pooling, dtype, device)
    for cell in _CELLS:
        yield from cell_kernels(cell, dtype, device)
