"""Activation functions: config names, what backward reads, and the kernel class that sets the efficiency.

To add one: a line here, and its torch function in `execute/layers/activations.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation:
    """An activation function.

    names   in a Hugging Face config
    kept    "input" or "output": the tensor that backward reads
    kernel  class of its efficiency
    """

    names: tuple[str, ...]
    kept: str
    kernel: str


ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {
        "gelu": Activation(names=("gelu", "gelu_python"), kept="input", kernel="gelu"),
        # The erf and the tanh form differ fourfold on a CPU.
        "gelu_tanh": Activation(names=("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), kept="input", kernel="gelu_tanh"),
        "silu": Activation(names=("silu", "swish"), kept="input", kernel="silu"),
        "relu": Activation(names=("relu",), kept="output", kernel="add"),
        "relu2": Activation(names=("relu2", "squared_relu"), kept="input", kernel="add"),
    }
)
"""Activations by the name in `TransformerConfig`."""
