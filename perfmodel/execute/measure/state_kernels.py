"""Microbenchmarks of what a layer with a state runs between its products: the convolution and the scan, from and into what they left.

On a CPU a scan is a chain of torch's small operators, position by position or chunk by chunk: no product's rate tells its time. On a GPU
kernels do it, which are predicted by their products and passes, and nothing is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from perfmodel.execute.layers.scans import causal_conv_on, delta_scan, state_scan
from perfmodel.execute.measure.kernels import Kernel
from perfmodel.execute.measure.stopwatch import from_memory
from perfmodel.execute.zero.flat import TORCH_DTYPES
from perfmodel.foundation.dtypes import Dtype
from perfmodel.hardware.calibration import KernelClass
from perfmodel.hardware.samples import StreamingSample

#: Of a group: heads, and the two dims of a state (Nemotron 3 Nano; Qwen3-Next). Positions of a chunk, and of the convolution.
_MAMBA, _DELTA = (8, 64, 128), (2, 128, 128)
_CHUNK, _TAPS = 128, 4
#: Read what no cache holds: the states of a layer come after those of all others.
_UPDATES = (KernelClass.STATE_UPDATE, KernelClass.DELTA_UPDATE)


def state_kernels(shape: tuple[int, int, int], dtype: Dtype, device: str) -> Iterator[Kernel]:
    """New positions of each of some sequences, in layers of so many groups: the convolution, Mamba-2's scan, the delta rule.

    Bytes of an update, of one position, are those of the state that is read and written; a scan over several, whose state stays in a cache,
    has none that count. Elements are those of the state, for each position; of the convolution its inputs.
    """
    b, s, groups = shape
    heads, width, depth = _MAMBA
    channels = heads * width + 2 * depth
    options: dict[str, Any] = {"dtype": TORCH_DTYPES[dtype], "device": device}
    item = options["dtype"].itemsize

    def made(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, **options)

    def convolution() -> Callable[[], object]:
        x, weight, last = made(b, s, groups, channels), made(groups, channels, _TAPS), made(b, _TAPS - 1, groups, channels)
        return lambda: causal_conv_on(x, [weight], last)

    def mamba() -> Callable[[], object]:
        x, steps, own = made(b, s, groups, channels), made(b, s, groups, heads), [made(groups, heads) for _ in range(3)]
        state = torch.randn(b, groups, heads, width, depth, device=device)
        return lambda: state_scan.onward(x, steps, own, state, min(_CHUNK, s))

    def delta() -> Callable[[], object]:
        heads, key, value = _DELTA
        x, state = made(b, s, groups, 2 * key + heads * value), torch.randn(b, groups, heads, key, value, device=device)
        strengths, own = made(b, s, groups, 2 * heads), [made(groups, heads) for _ in range(2)]
        return lambda: delta_scan.onward(x, strengths, own, state, s)

    inputs = b * s * groups * channels
    yield _kernel(KernelClass.CAUSAL_CONV, convolution, 2.0 * item * inputs, inputs)
    for make, update, scan, (heads, *dims) in (
        (mamba, KernelClass.STATE_UPDATE, KernelClass.STATE_SCAN, _MAMBA),
        (delta, KernelClass.DELTA_UPDATE, KernelClass.DELTA_SCAN, _DELTA),
    ):
        elements = b * groups * heads * dims[0] * dims[1]
        if s == 1:
            yield _kernel(update, make, 2.0 * torch.float32.itemsize * elements, elements)
        else:
            yield _kernel(scan, make, 0.0, s * elements)


def _kernel(kernel: KernelClass, make: Callable[[], Callable[[], object]], num_bytes: float, elements: float) -> Kernel:
    def sample(time: float) -> StreamingSample:
        return StreamingSample(kernel_class=kernel, num_bytes=num_bytes, num_elements=elements, time=time)

    call = from_memory(make, num_bytes) if kernel in _UPDATES else make()
    return Kernel(label=f"{kernel} of {elements:,.0f} elements", call=call, sample=sample)
