"""Activation functions: what configs call each, what its backward pass reads, which kernel's rate it runs at.

A new one is a line here, and its torch function in `execute/layers/activations.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation:
    """names: in a Hugging Face config; kept: "input" or "output", which backward reads; kernel: the class of its efficiency."""

    names: tuple[str, ...]
    kept: str
    kernel: str


ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {
        "gelu": Activation(names=("gelu", "gelu_python"), kept="input", kernel="gelu"),
        # its two forms differ fourfold on a CPU
        "gelu_tanh": Activation(names=("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), kept="input", kernel="gelu_tanh"),
        "silu": Activation(names=("silu", "swish"), kept="input", kernel="silu"),
        "relu": Activation(names=("relu",), kept="output", kernel="add"),
        "relu2": Activation(names=("relu2", "squared_relu"), kept="input", kernel="add"),
    }
)
"""By the name that a `TransformerConfig` has."""
