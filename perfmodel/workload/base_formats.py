"""Storage formats of the frozen base weights under adapters, and the cost of dequantising them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseFormat:
    """A storage format.

    bytes_per_weight  scales and zero points included   [byte]
    source            of the block and scale sizes
    """

    bytes_per_weight: float
    source: str


def _blocks(bits: float, scale_bits: float, block: int) -> float:
    """Return the bytes of a weight of `bits` bits, with a scale of `scale_bits` bits for each block."""
    return (bits + scale_bits / block) / 8.0


#: NF4 with double quantisation: 4 bits, an 8-bit scale per block of 64, a float32 scale per 256 of these scales. [byte]
NF4_BYTES = (4.0 + 8.0 / 64.0 + 32.0 / (64.0 * 256.0)) / 8.0

BASE_FORMATS: Mapping[str, BaseFormat] = MappingProxyType(
    {
        "nf4-dq": BaseFormat(bytes_per_weight=NF4_BYTES, source="QLoRA, arXiv 2305.14314, section 3: double quantisation"),
        "nf4": BaseFormat(
            bytes_per_weight=_blocks(4, 32, 64),
            source="bitsandbytes 0.45, functional.py, quantize_4bit: float32 maximum of each block of 64",
        ),
        "int4": BaseFormat(
            bytes_per_weight=_blocks(4, 16 + 4, 128),
            source="GPTQ (AutoGPTQ, qlinear): groups of 128 rows, scale in 16 bits and zero point in 4",
        ),
        "int8": BaseFormat(bytes_per_weight=1.0, source="bitsandbytes 0.45, Linear8bitLt: one float32 scale for each row"),
        "fp8": BaseFormat(bytes_per_weight=1.0, source="torch.float8_e4m3fn with one scale for each tensor or row"),
        "nvfp4": BaseFormat(bytes_per_weight=_blocks(4, 8, 16), source="NVIDIA: E2M1 with an E4M3 scale for each 16 entries"),
        "mxfp4": BaseFormat(bytes_per_weight=_blocks(4, 8, 32), source="OCP microscaling: E2M1 with an E8M0 scale for each 32 entries"),
    }
)

__all__ = ["BASE_FORMATS", "NF4_BYTES", "BaseFormat"]
