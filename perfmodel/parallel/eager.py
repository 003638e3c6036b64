"""Memory traffic of operators that are written out in torch and run kernel by kernel, over that of one fused kernel each way.

Every kernel's inputs and outputs, at activations of two bytes; counted with torch (`tests/execute/test_eager_traffic.py`).

    operator                                   bytes an element, both passes   of one kernel
    RMSNorm with `.float()`, as Llama has it   128                             10
    rotary, rotate-half in the compute dtype   49                              8
    rotary, complex numbers in float32         42                              8

LayerNorm, GELU and softmax have kernels of their own in torch: 1. Compiled (`torch.compile`), all of these are fused: 1.
"""

EAGER_RMS_NORM = 12.8
EAGER_ROTARY, EAGER_COMPLEX_ROTARY = 6.1, 5.2
