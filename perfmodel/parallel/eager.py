"""Operators that are written out in torch and run kernel by kernel: memory traffic over that of one fused kernel each way, and kernels.

Every kernel's inputs and outputs, at activations of two bytes; counted with torch (`tests/execute/test_eager_traffic.py`).

    operator                                   bytes an element, both passes   of one kernel   kernels
    RMSNorm with `.float()`, as Llama has it   128                             10              8 + 16
    rotary, rotate-half in the compute dtype   49                              8               5 + 7
    rotary, complex numbers in float32         42                              8               3 + 4

AdamW's step in float32, one kernel for each line of its rule (foreach, as torch.optim takes it where nobody asks for fused), moves 80
bytes a parameter; one kernel 28: parameter and moments read and written, the gradient read.

LayerNorm, GELU and softmax have kernels of their own in torch: 1. Compiled (`torch.compile`), all of these are fused: 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

EAGER_RMS_NORM = 12.8
EAGER_ADAMW = 80 / 28
EAGER_ROTARY, EAGER_COMPLEX_ROTARY = 6.1, 5.2


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenOut:
    """traffic            the field of a profile that says how far
    eager_traffic      its value where every step is a kernel
    forward, backward  of which there are so many
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
