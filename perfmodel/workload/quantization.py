"""Weight formats in serving: stored bytes, compute dtype, and the parameters that they apply to.

Products of attention and of dense and routed MLPs are quantised; embedding, output matrix, router, norms and biases stay in 16 bits.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, TypeAlias

from perfmodel.foundation.dtypes import Dtype
from perfmodel.foundation.errors import InputError, one_line, plain_text, suggest

#: Class of a weight; `other`: embedding, output matrix, router, norms, biases.
WeightPart: TypeAlias = Literal["attention", "dense", "experts", "other"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """A weight format.

    weight_bytes      bytes of an element of a quantised weight, scales included
    activation_bytes  bytes of an element of a quantised product's input
    product           dtype of the products
    needs             dtype in which the chip must have a FLOP rate to support the format
    experts_only      in a model with experts only these are quantised, all else is in 16 bits
    skips_attention_with_experts   attention of a model with experts stays in 16 bits
    measured_as       format whose measured kernels stand for it; empty: its own
    """

    name: str
    weight_bytes: float
    activation_bytes: float
    product: Dtype
    needs: Dtype
    source: str
    experts_only: bool = False
    skips_attention_with_experts: bool = False
    measured_as: str = ""

    @property
    def kernel(self) -> str:
        """Format name of its measured kernels."""
        return self.measured_as or self.name

    @property
    def checkpoint(self) -> str:
        """Checkpoint format that it needs: fp8 for fp8-weights."""
        return self.name.removesuffix("-weights") if self.measured_as else self.name

    @property
    def is_plain(self) -> bool:
        """Whether no weight is quantised."""
        return self.product in (Dtype.BF16, Dtype.FP16) and self.weight_bytes == self.activation_bytes

    def with_elements(self, element_bytes: float) -> Quantization:
        """Return the format with unquantised elements of this size; itself if it quantises weights."""
        return replace(self, weight_bytes=element_bytes, activation_bytes=element_bytes) if self.is_plain else self

    def parts(self, *, with_experts: bool) -> frozenset[WeightPart]:
        """Return the weight classes in this format; all others are in 16 bits. with_experts: the model has experts."""
        if self.is_plain:
            return frozenset()
        if self.experts_only:
            return frozenset({"experts"})
        skips = with_experts and self.skips_attention_with_experts
        return frozenset({"dense", "experts"} if skips else {"attention", "dense", "experts"})


def _plain(name: Dtype) -> Quantization:
    return Quantization(name=str(name), weight_bytes=2.0, activation_bytes=2.0, product=name, needs=name, source="the checkpoint's own")


QUANTIZATIONS: Mapping[str, Quantization] = MappingProxyType(
    {
        quantization.name: quantization
        for quantization in (
            _plain(Dtype.BF16),
            _plain(Dtype.FP16),
            Quantization(
                name="fp8", weight_bytes=1.0, activation_bytes=1.0, product=Dtype.FP8, needs=Dtype.FP8,
                source="W8A8, a scale for a tensor or a channel (vLLM fp8, TensorRT-LLM FP8)",
            ),
            Quantization(
                name="fp8-block", weight_bytes=1.0 + 4.0 / 128.0**2, activation_bytes=1.0 + 4.0 / 128.0, product=Dtype.FP8, needs=Dtype.FP8,
                source="DeepSeek-V3, arXiv 2412.19437, section 3.3: 128 x 128 blocks of weights, 1 x 128 of activations, fp32 scales",
            ),
            Quantization(
                name="int8", weight_bytes=1.0, activation_bytes=1.0, product=Dtype.INT8, needs=Dtype.INT8,
                source="W8A8, SmoothQuant (Xiao et al. 2023, arXiv 2211.10438)",
            ),
            Quantization(
                name="int8-weights", weight_bytes=1.0, activation_bytes=2.0, product=Dtype.BF16, needs=Dtype.BF16,
                source="W8A16: weights are widened inside the product",
            ),
            Quantization(
                name="fp8-weights", weight_bytes=1.0, activation_bytes=2.0, product=Dtype.BF16, needs=Dtype.BF16,
                measured_as="int8-weights",
                source="W8A16: fp8 weights widened inside the product (Marlin), for chips without units for fp8: "
                "vllm-project/vllm 0.14, docs/features/quantization/fp8.md",
            ),
            Quantization(
                name="w4a16", weight_bytes=0.5 + 2.5 / 128.0, activation_bytes=2.0, product=Dtype.BF16, needs=Dtype.BF16,
                skips_attention_with_experts=True,
                source="GPTQ, AWQ: groups of 128 with a scale in 16 bits and a zero in 4; widened inside the product (Marlin)",
            ),
            Quantization(
                name="w4a8", weight_bytes=0.5 + 2.5 / 128.0, activation_bytes=1.0, product=Dtype.FP8, needs=Dtype.FP8,
                source="4-bit weights widened to fp8 inside the product",
            ),
            Quantization(
                name="mxfp4", weight_bytes=0.5 + 1.0 / 32.0, activation_bytes=2.0, product=Dtype.BF16, needs=Dtype.BF16, experts_only=True,
                source="OCP Microscaling: 32 entries have one E8M0 scale; gpt-oss quantises its experts alone",
            ),
            Quantization(
                name="nvfp4-weights", weight_bytes=0.5 + 1.0 / 16.0, activation_bytes=2.0, product=Dtype.BF16, needs=Dtype.BF16,
                skips_attention_with_experts=True, measured_as="w4a16",
                source="W4A16: nvfp4 weights widened inside the product (Marlin), for chips without units for fp4: "
                "vllm-project/vllm 0.14, model_executor/layers/quantization/utils/marlin_utils_fp4.py",
            ),
            Quantization(
                name="nvfp4", weight_bytes=0.5 + 1.0 / 16.0, activation_bytes=0.5 + 1.0 / 16.0, product=Dtype.FP4, needs=Dtype.FP4,
                skips_attention_with_experts=True,
                source="16 entries have one E4M3 scale, a tensor one in fp32 (TensorRT Model Optimizer); of models with experts the "
                "published checkpoints hold experts and MLPs so, attention wider",
            ),
        )
    }
)  # fmt: skip


#: Families published in fewer bits: the default format of their models. Source: their model cards on Hugging Face.
PUBLISHED: Mapping[str, str] = MappingProxyType(
    {
        "deepseek_v3": "fp8-block",
        "deepseek_v32": "fp8-block",
        "kimi_k2": "fp8-block",
        "minimax_m2": "fp8-block",
        "gpt_oss": "mxfp4",
    }
)


def has_units(quantization: Quantization, peak_flop_rate: Mapping[Dtype, float]) -> bool:
    """Return whether a chip with these FLOP rates supports the products; either 16-bit format serves for the other."""
    return quantization.needs in peak_flop_rate or (quantization.needs in (Dtype.BF16, Dtype.FP16) and Dtype.FP16 in peak_flop_rate)


def published_format(architecture: str) -> Quantization:
    """Return the format in which a model family is published; 16 bits by default."""
    return QUANTIZATIONS[PUBLISHED.get(architecture, "bf16")]


ALIASES: Mapping[str, str] = MappingProxyType({"int4": "w4a16", "awq": "w4a16", "gptq": "w4a16", "int8-wo": "int8-weights"})
"""Names that engines and published runs use -> format."""


#: Pattern of the name of a checkpoint -> its format, as hub ids of Qwen, RedHatAI, NVIDIA and others end. In fp8, model makers publish
#: blocks; ModelOpt and llm-compressor write one scale for a tensor or a channel.
_NAMED = (
    (r"[-_.](?:AWQ|GPTQ|GPTQ-Int4|W4A16)$", "w4a16"),
    (r"[-_.](?:GPTQ-Int8|W8A16)$", "int8-weights"),
    (r"[-_.]W8A8$", "int8"),
    (r"[-_.]FP8-dynamic$|^(?:nvidia|RedHatAI|neuralmagic|amd)/.*-FP8$", "fp8"),
    (r"[-_.]FP8$", "fp8-block"),
    (r"[-_.](?:NVFP4|FP4)$", "nvfp4"),
)


def format_in_name(checkpoint: str) -> str | None:
    """Return the format that the name of a checkpoint ends with (`Qwen/Qwen2.5-7B-Instruct-AWQ`: w4a16); None if it names none."""
    return next((name for pattern, name in _NAMED if re.search(pattern, checkpoint, re.IGNORECASE)), None)


def quantization_named(name: str | Quantization, field: str = "quantization") -> Quantization:
    if isinstance(name, Quantization):
        return name
    text = plain_text(name)
    quantization = QUANTIZATIONS.get(ALIASES.get(text, text))
    if quantization is None:
        raise InputError(f"{field}={one_line(name)}: is not known{suggest(name, QUANTIZATIONS)}")
    return quantization
