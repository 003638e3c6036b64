"""Parameters of kernels that only serving uses.

These are small all-reduces of the engines, products with quantized weights, attention to a quantized or latent cache, and
grouped products of experts with quantized weights.

They are a part of a calibration (`KernelModels.serving`), as fractions of the chip's and its links' own rates. The formulas
are in `perfmodel.cost.serving.kernels`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from perfmodel.hardware.rules import ReadOnly, freeze, require, require_not_negative, require_positive, require_share

ONE_SHOT, TWO_SHOT = "one_shot", "two_shot"
"""One-shot: every rank reads the full buffer of every peer. Two-shot: it reads and sums one share, then reads the sums of the others."""

ALL_REDUCE_KERNELS = (ONE_SHOT, TWO_SHOT)


FEW = ".few"
"""Suffix of a second kernel for experts with few rows, where a library has one; the faster of both counts."""

WEIGHT_FORMATS = ("fp8", "fp8-block", "int8", "int8-weights", "w4a16", "w4a8", "mxfp4", "nvfp4")
"""Formats of quantized weights, as named in `perfmodel.workload.quantization`."""

LATENT_CACHE, LATENT_FP8_CACHE, FP8_CACHE = "latent", "latent.fp8", "flash.fp8"
CACHED_KERNELS = (LATENT_CACHE, LATENT_FP8_CACHE, FP8_CACHE)
"""Decode attention to a latent cache (one vector per token for all heads), in 16 and in 8 bits; to keys and values in 8 bits."""


def _require_sharpness(value: float) -> None:
    require(value == 0 or value >= 1, "sharpness", value, "must be at least 1 (the sum), or 0 (as the products' in 16 bits)")


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallAllReduceModel:
    """Parameters of one of the kernels of `small_all_reduce_time`.

    base_time           a  [s] once: start, and the barriers
    peer_time           c  [s] per peer
    bandwidth_fraction  fraction of the link's bandwidth (of one chip, one direction) at which peers' buffers are read
    """

    base_time: float
    peer_time: float = 0.0
    bandwidth_fraction: float = 0.6

    def __post_init__(self) -> None:
        require_not_negative(self, "base_time", "peer_time")
        require_share("bandwidth_fraction", self.bandwidth_fraction, most=1.25)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightProductModel:
    """Parameters of `weight_product_time`, for one format of weights, relative to the chip's products in 16 bits.

    rate_fraction    f   fraction of the compute dtype's peak, over the fraction that products in 16 bits reach
    memory_fraction  g   fraction of the memory bandwidth, over that of products in 16 bits
    depth_factor     d   contraction length that costs the same as starting a tile, over that of products in 16 bits
    waves_factor     w   time of a tile among few, over that of products in 16 bits
    split_factor     s   contraction length from which idle units share it, over that of products in 16 bits
    sharpness        p   sharpness of the transition from compute-bound to memory-bound; 0: as in 16 bits
    cast_time        t1  [s] of a separate kernel that quantizes the activations before the product, if there is one
    cast_fraction    q   fraction of the memory bandwidth, for the bytes that this kernel reads and writes
    """

    rate_fraction: float = 1.0
    memory_fraction: float = 1.0
    depth_factor: float = 1.0
    waves_factor: float = 1.0
    split_factor: float = 1.0
    sharpness: float = 0.0
    cast_time: float = 0.0
    cast_fraction: float = 0.4

    def __post_init__(self) -> None:
        require_positive(self, "rate_fraction", "memory_fraction", "depth_factor", "waves_factor", "split_factor", "cast_fraction")
        require_not_negative(self, "cast_time")
        _require_sharpness(self.sharpness)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedWeightModel:
    """Parameters of `grouped_weight_time` (the experts of a layer in one fused call), for one format, relative to products in 16 bits.

    rate_fraction    f   fraction of the compute dtype's peak, over the fraction that products in 16 bits reach
    memory_fraction  g   fraction of the memory bandwidth, over that of products in 16 bits
    depth_factor     d   contraction length that costs the same as starting a tile, over that of products in 16 bits
    sharpness        p   sharpness of the transition from compute-bound to memory-bound; 0: as in 16 bits
    row_fraction     b   fraction of the memory bandwidth, for sorting and quantizing rows, the activation and combining a token's experts
    expert_time      t1  [s] per expert with rows
    floor_time       t0  [s] once: routing, and the launches of all its kernels
    """

    rate_fraction: float = 1.0
    memory_fraction: float = 1.0
    depth_factor: float = 1.0
    sharpness: float = 0.0
    row_fraction: float = 0.5
    expert_time: float = 0.0
    floor_time: float = 0.0

    def __post_init__(self) -> None:
        require_positive(self, "rate_fraction", "memory_fraction", "depth_factor", "row_fraction")
        require_not_negative(self, "expert_time", "floor_time")
        _require_sharpness(self.sharpness)


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedAttentionModel:
    """Parameters of `cached_attention_time` and `latent_decode_time`, for one kernel.

    memory_fraction  b   fraction of the memory bandwidth, for a large cache
    query_fraction   bq  fraction of the memory bandwidth, for queries and outputs
    peak_fraction    e   fraction of the dense peak in 16 bits; 8 bits may exceed 1
    floor_time       t0  [s]
    ramp_time        t1  [s] additional time if the cache of keys and values does not fit the chip's cache
    ramp_bytes       V1  size at which half of `ramp_time` is added
    wave_time        w   [s] minimum time of a compute unit per sequence and key-value head
    """

    memory_fraction: float = 0.8
    query_fraction: float = 0.8
    peak_fraction: float = 0.6
    floor_time: float = 0.0
    ramp_time: float = 0.0
    ramp_bytes: float = 1e6
    wave_time: float = 0.0

    def __post_init__(self) -> None:
        require_positive(self, "memory_fraction", "query_fraction", "peak_fraction", "ramp_bytes")
        require_not_negative(self, "floor_time", "ramp_time", "wave_time")


_NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "small_all_reduce": ALL_REDUCE_KERNELS,
        "weight_product": WEIGHT_FORMATS,
        "grouped_weight": (*WEIGHT_FORMATS, *(name + FEW for name in WEIGHT_FORMATS)),
        "cached_attention": CACHED_KERNELS,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingKernels(ReadOnly):
    """Measured serving kernels of a chip; missing ones are taken from `TYPICAL`.

    small_all_reduce   by algorithm (`ALL_REDUCE_KERNELS`)
    weight_product     by format (`WEIGHT_FORMATS`)
    grouped_weight     by format: the experts of a layer; `nvfp4.few` is a second kernel of that format (`FEW`)
    cached_attention   by kernel (`CACHED_KERNELS`); keys and values in 16 bits are the calibration's `decode_attention`
    points, errors     number of measurements and held-out median errors, by part
    """

    small_all_reduce: Mapping[str, SmallAllReduceModel] = field(default_factory=dict)
    weight_product: Mapping[str, WeightProductModel] = field(default_factory=dict)
    grouped_weight: Mapping[str, GroupedWeightModel] = field(default_factory=dict)
    cached_attention: Mapping[str, CachedAttentionModel] = field(default_factory=dict)
    points: Mapping[str, int] = field(default_factory=dict)
    errors: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        freeze(self)
        for name, known in _NAMES.items():
            for kernel in getattr(self, name):
                require(kernel in known, name, kernel, f"must be one of {', '.join(known)}")

    def with_typical(self) -> "ServingKernels":
        """Return these kernels, and typical ones where there is no measurement."""
        return replace(self, **{name: {**getattr(TYPICAL, name), **getattr(self, name)} for name in _NAMES})


_NARROW = WeightProductModel(
    rate_fraction=1.0, memory_fraction=0.98, depth_factor=3.0, waves_factor=1.1, split_factor=1.8, sharpness=3.0,
    cast_time=11e-6, cast_fraction=0.35,
)  # fmt: skip
_WIDENED = WeightProductModel(rate_fraction=0.97, memory_fraction=1.0, depth_factor=0.8, waves_factor=1.2, split_factor=22.0, sharpness=3.8)
_NARROW_EXPERTS = GroupedWeightModel(
    rate_fraction=1.5, memory_fraction=1.13, depth_factor=0.1, sharpness=2.9, row_fraction=0.36, expert_time=0.13e-6, floor_time=29e-6
)
_WIDENED_EXPERTS = GroupedWeightModel(rate_fraction=1.2, memory_fraction=0.8, row_fraction=0.5, expert_time=0.1e-6, floor_time=27e-6)
TYPICAL = ServingKernels(
    small_all_reduce={
        ONE_SHOT: SmallAllReduceModel(base_time=3.7e-6, peer_time=0.1e-6, bandwidth_fraction=0.58),
        TWO_SHOT: SmallAllReduceModel(base_time=17e-6, peer_time=0.1e-6, bandwidth_fraction=0.47),
    },
    weight_product={
        "fp8": _NARROW,
        "fp8-block": WeightProductModel(
            rate_fraction=0.9, memory_fraction=1.24, depth_factor=4.0, waves_factor=1.2, split_factor=10.0, sharpness=1.3,
            cast_time=2.2e-6, cast_fraction=0.6,
        ),
        "int8": WeightProductModel(
            rate_fraction=1.055, memory_fraction=0.92, depth_factor=3.4, waves_factor=2.2, split_factor=25.0, sharpness=3.9,
            cast_time=5.4e-6, cast_fraction=1.0,
        ),
        "int8-weights": WeightProductModel(rate_fraction=1.0, memory_fraction=1.0, waves_factor=1.2, split_factor=24.0, sharpness=3.6),
        "w4a16": _WIDENED,
        "w4a8": _NARROW,
        "mxfp4": _WIDENED,
        "nvfp4": WeightProductModel(
            rate_fraction=0.8, memory_fraction=0.72, depth_factor=0.2, waves_factor=1.7, split_factor=25.0, sharpness=2.4,
            cast_time=3.6e-6, cast_fraction=0.85,
        ),
    },
    grouped_weight={
        "fp8": _NARROW_EXPERTS,
        "fp8-block": GroupedWeightModel(
            rate_fraction=0.97, memory_fraction=1.07, depth_factor=25.0, sharpness=4.0, row_fraction=0.37, expert_time=0.32e-6,
            floor_time=26e-6,
        ),
        "int8": _NARROW_EXPERTS,
        "int8-weights": _WIDENED_EXPERTS,
        "w4a16": _WIDENED_EXPERTS,
        "w4a8": _NARROW_EXPERTS,
        "mxfp4": _WIDENED_EXPERTS,
        "nvfp4": _NARROW_EXPERTS,
    },
    cached_attention={
        LATENT_CACHE: CachedAttentionModel(
            memory_fraction=0.9, query_fraction=0.5, peak_fraction=0.8, floor_time=13.5e-6, ramp_time=9e-6, ramp_bytes=80e6, wave_time=1e-6
        ),
        LATENT_FP8_CACHE: CachedAttentionModel(
            memory_fraction=0.8, query_fraction=0.33, peak_fraction=1.0, floor_time=13e-6, ramp_time=6e-6, ramp_bytes=25e6, wave_time=1e-6
        ),
        FP8_CACHE: CachedAttentionModel(
            memory_fraction=0.95, query_fraction=0.4, floor_time=9.4e-6, ramp_time=11e-6, ramp_bytes=60e6, wave_time=1e-6
        ),
    },
)  # fmt: skip
"""Serving kernels of a chip without measurements. Geometric means of shipped calibrations: small all-reduces of A100, H100 and B200; fp8
and attention to caches of H100 and B200. From one chip: int8 and dequantized weights of the A100, nvfp4 of the B200. The A100 reads
dequantized weights at .81 to .85 of its bandwidth, as other chips read those in 16 bits, hence their fraction of 1. Not measured: w4a8 as
fp8, mxfp4 as w4a16; experts in int8, w4a8 and nvfp4 as in fp8, dequantized ones at .8 of the bandwidth of those in 16 bits."""
