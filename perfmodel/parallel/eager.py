"""Unfused operators in eager torch: memory traffic relative to one fused kernel per pass, and number of kernels.

Traffic is every kernel's inputs and outputs, with activations of two bytes; counted with torch (`tests/execute/test_eager_traffic.py`).

    operator                                   bytes per element, both passes  one kernel      kernels
    RMSNorm with `.float()`, as Llama has it   128                             10              8 + 16
    rotary, rotate-half in the compute dtype   49                              8               5 + 7
    rotary, complex numbers in float32         42                              8               3 + 4

AdamW's step in float32 with one kernel per operation (foreach, the default of torch.optim) moves 80 bytes per parameter. One fused kernel
moves 28: parameter and moments are read and written, the gradient is read.

LayerNorm, GELU and softmax each have a fused kernel in torch: factor 1. With `torch.compile` all of these are fused: factor 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

EAGER_RMS_NORM = 12.8
EAGER_ADAMW = 80 / 28
EAGER_ROTARY, EAGER_COMPLEX_ROTARY = 6.1, 5.2


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenOut:
    """An operator that eager torch runs as several kernels.

    traffic            option of a profile that holds its relative traffic
    eager_traffic      value of that option where nothing is fused
    forward, backward  number of kernels
    """

    traffic: str
    eager_traffic: float
    forward: int
    backward: int


#: By kind of operator.
KERNELS: Mapping[str, WrittenOut] = {
    "rms_norm": WrittenOut(traffic="rms_norm_traffic", eager_traffic=EAGER_RMS_NORM, forward=8, backward=16),
    "rotary": WrittenOut(traffic="rotary_traffic", eager_traffic=EAGER_ROTARY, forward=5, backward=7),
}
