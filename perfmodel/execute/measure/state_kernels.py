"""Microbenchmarks of recurrent layers between their matrix products: the convolution and the scan, continued from a state.

On a CPU a scan is a chain of small torch operators, by position or by chunk, so the rate of matrix products does not predict its time.
On a GPU these are kernels that are predicted from their products and passes, and nothing is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from perfmodel.execute.layers.scans import causal_conv_on, delta_scan, state_scan
from perfmodel.execute.measure.kernels import Kernel
from perfmodel.execute.measure.stopwatch import from_memory
from perfmodel.execute.zero import TORCH_DTYPES
from perfmodel.foundation.dtypes import Dtype
from perfmodel.hardware.calibration import KernelClass
from perfmodel.hardware.samples import StreamingSample

#: Per group: heads, and the two dims of a state (Nemotron 3 Nano; Qwen3-Next). Then positions per chunk, and taps of the convolution.
_MAMBA, _DELTA = (8, 64, 128), (2, 128, 128)
_CHUNK, _TAPS = 128, 4
#: Kernels whose state is in no cache: the states of all other layers are read in between.
_UPDATES = (KernelClass.STATE_UPDATE, KernelClass.DELTA_UPDATE)


def state_kernels(shape: tuple[int, int, int], dtype: Dtype, device: str) -> Iterator[Kernel]:
    """Yield the convolution, Mamba-2's scan and the delta rule for new positions of several sequences in layers of several groups.

    The bytes of an update by one position are those of the state, read and written. A scan over several positions keeps its state in a
    cache, so no bytes count. Elements are those of the state, per position; for the convolution, of its inputs.
    """
    b, s, groups = shape
    heads, width, depth = _MAMBA
    channels = heads * width + 2 * depth
    options: dict[str, Any] = {"dtype": TORCH_DTYPES[dtype], "device": device}
    item = options["dtype"].itemsize

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, **options)

    def convolution() -> Callable[[], object]:
        x, weight, last = normal(b, s, groups, channels), normal(groups, channels, _TAPS), normal(b, _TAPS - 1, groups, channels)
        return lambda: causal_conv_on(x, [weight], last)

    def mamba() -> Callable[[], object]:
        x, steps, parameters = normal(b, s, groups, channels), normal(b, s, groups, heads), [normal(groups, heads) for _ in range(3)]
        state = torch.randn(b, groups, heads, width, depth, device=device)
        return lambda: state_scan.onward(x, steps, parameters, state, min(_CHUNK, s))

    def delta() -> Callable[[], object]:
        heads, key, value = _DELTA
        x, state = normal(b, s, groups, 2 * key + heads * value), torch.randn(b, groups, heads, key, value, device=device)
        strengths, parameters = normal(b, s, groups, 2 * heads), [normal(groups, heads) for _ in range(2)]
        return lambda: delta_scan.onward(x, strengths, parameters, state, s)

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
