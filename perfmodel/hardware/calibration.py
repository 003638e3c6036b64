"""Calibration: the performance of one software stack on a chip and its links, as parameters of smooth formulas (no table of shapes).

It is an overlay on a chip and a cluster. Rates are fractions of the data sheet, so that a faster chip is predicted faster.
`peaks` replaces data-sheet figures by measured ones if there is no data sheet (the CPU of this machine). The formulas
are in `perfmodel.cost.compute` and `perfmodel.cost.collectives`.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from types import MappingProxyType

from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.foundation.dtypes import Dtype
from perfmodel.foundation.errors import InputError, bad_field, suggest
from perfmodel.foundation.records import INLINE
from perfmodel.hardware.rules import ReadOnly, freeze, least, require, require_not_negative, require_share
from perfmodel.hardware.serving_kernels import ServingKernels


class KernelClass(StrEnum):
    """Classes of streaming kernels with different bandwidths; the order defines the integer codes (`KERNEL_CODE`)."""

    DEFAULT = "default"
    SOFTMAX = "softmax"
    LAYERNORM = "layernorm"
    GELU = "gelu"
    DROPOUT = "dropout"
    ADD = "add"
    EMBEDDING = "embedding"
    CROSS_ENTROPY = "cross_entropy"
    OPTIMIZER = "optimizer"
    GELU_TANH = "gelu_tanh"
    SILU = "silu"
    RMSNORM = "rmsnorm"
    ROTARY = "rotary"
    MAX_POOLING = "max_pooling"
    AVERAGE_POOLING = "average_pooling"
    LSTM_CELL = "lstm_cell"
    PERMUTE = "permute"
    CAUSAL_CONV = "causal_conv"
    STATE_SCAN = "state_scan"
    DELTA_SCAN = "delta_scan"
    STATE_UPDATE = "state_update"
    DELTA_UPDATE = "delta_update"


COLLECTIVE_CODE: Mapping[CollectiveKind, int] = MappingProxyType({kind: code for code, kind in enumerate(CollectiveKind)})
KERNEL_CODE: Mapping[KernelClass, int] = MappingProxyType({kernel: code for code, kernel in enumerate(KernelClass)})

SCALE_UP = "scale_up"
"""The innermost network tier: NVLink domain, xGMI mesh, torus, PCIe tree, the processes of one CPU."""
SCALE_OUT = "scale_out"
"""Every outer network tier."""

LATENT_KERNEL = "latent"
"""Fused attention kernel whose value heads are narrower than its key heads, where it was measured."""
PARTS = ("matmul", "streaming", "attention", SCALE_UP, SCALE_OUT)
"""Parts of a calibration; a prediction reports the basis of each."""

WEIGHT_BANDWIDTH, VECTOR_BANDWIDTH = "memory_bandwidth.weights", "memory_bandwidth.vector"
"""Peaks of CPUs: memory bandwidth of weights in products of a few rows, and of a single row, which uses another kernel."""

PEAK_NAMES = ("flop_rate", "memory_bandwidth", "memory_capacity", f"{SCALE_UP}_bandwidth", f"{SCALE_OUT}_bandwidth")


class Provenance(StrEnum):
    """Basis of a number; printed with every prediction."""

    SPEC_SHEET = "spec sheet"
    PRIOR = "prior"
    PARTIAL = "partial calibration"
    CALIBRATED = "calibrated"


MOST_BUSY = 0.1
"""Share of the processors used by other processes above which a measurement does not count."""

NO_TILES = ((1.0, 1.0, 0.0),)
"""Tiles of a library whose matrix products cost their output elements, without tile quantization."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulModel:
    """Parameters of `matmul_time`, for one dtype.

    peak_fraction       e   fraction of the dense peak, for large matrices in short bursts
    depth_offset        k0  contraction length that costs the same as starting a tile
    wave_softness       a   share of the last, partial wave that is paid in full (0: work spreads evenly, 1: all of it)
    memory_fraction     b   fraction of the memory bandwidth, for the operands and the result
    floor_time          t0  [s] one launch, without overlap
    sharpness           p   sharpness of the transition from compute-bound to memory-bound: (C^p + M^p)^(1/p)
    small_tile_penalty  m0  extra time of a small tile, times its exponent in `tiles`
    least_waves         w0  time of a tile among few over that of a tile in a full wave, a lower bound of any product; 0: no bound
    split_depth         D   contraction length from which idle units share it (split-k); 0: never
    few_rows            mu  minimum number of rows paid for by the kernel for few rows, which computes products of fewer rows than half a
                            tile at half the rate; 0: only full tiles were measured
    tiles               (rows, columns, penalty exponent) that the library chooses from
    """

    peak_fraction: float
    depth_offset: float = 0.0
    wave_softness: float = 0.0
    memory_fraction: float = 1.0
    floor_time: float = 0.0
    sharpness: float = 4.0
    small_tile_penalty: float = 0.0
    least_waves: float = 0.0
    split_depth: float = 0.0
    few_rows: float = 0.0
    tiles: tuple[tuple[float, float, float], ...] = NO_TILES

    def __post_init__(self) -> None:
        require_share("peak_fraction", self.peak_fraction, most=1.25)
        require_share("memory_fraction", self.memory_fraction)
        require(0 <= self.wave_softness <= 1, "wave_softness", self.wave_softness, "must lie in 0..1")
        require(self.sharpness >= 1, "sharpness", self.sharpness, "must be at least 1 (the sum)")
        offsets = (self.depth_offset, self.floor_time, self.small_tile_penalty, self.least_waves, self.split_depth, self.few_rows)
        require(min(offsets) >= 0, "matmul", offsets, "must not be negative")
        require(bool(self.tiles) and all(min(t[0], t[1]) > 0 for t in self.tiles), "tiles", self.tiles, "must be positive sizes")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvolutionModel:
    """Parameters of `convolution_time`, for one dtype, if a library computes convolutions at a rate of their own (CPUs).

    peak_fraction    e   fraction of the dense peak of matrix multiplies; may exceed 1
    depth_offset     k0  contraction length that costs the same as starting an output element
    memory_fraction  b   fraction of the memory bandwidth, for input, weight and output
    floor_time       t0  [s] one launch, without overlap
    """

    peak_fraction: float
    depth_offset: float = 0.0
    memory_fraction: float = 1.0
    floor_time: float = 0.0

    def __post_init__(self) -> None:
        require_share("peak_fraction", self.peak_fraction)
        require_share("memory_fraction", self.memory_fraction)
        require(min(self.depth_offset, self.floor_time) >= 0, "convolution", self.floor_time, "must not be negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamingModel:
    """Parameters of `streaming_time`, for one class of kernels.

    bandwidth_fraction  fraction of the memory bandwidth, for many bytes
    floor_time          [s] launch and start of a kernel; on a GPU also the time to fill the memory pipeline
    element_time        [s] per element if the kernel is compute-bound (transcendental functions on a CPU; 0 on GPUs)
    caches              (capacity [byte], bandwidth as a fraction of the memory bandwidth), innermost first: faster below the capacity
    backward_factor     time of the backward kernel over the time of the forward kernel for the same bytes and elements
    """

    bandwidth_fraction: float
    floor_time: float = 0.0
    element_time: float = 0.0
    caches: tuple[tuple[float, float], ...] = ()
    backward_factor: float = 1.0

    def __post_init__(self) -> None:
        require_share("bandwidth_fraction", self.bandwidth_fraction)
        require(self.floor_time >= 0, "floor_time", self.floor_time, "must not be negative")
        require(self.element_time >= 0, "element_time", self.element_time, "must not be negative")
        require(self.backward_factor > 0, "backward_factor", self.backward_factor, "must be positive")
        fractions = [*(fraction for _, fraction in self.caches), self.bandwidth_fraction]
        capacities = [0.0, *(capacity for capacity, _ in self.caches)]
        require(all(a < b for a, b in pairwise(capacities)), "caches", self.caches, "capacities must increase")
        require(all(a >= b for a, b in pairwise(fractions)), "caches", self.caches, "bandwidths must not increase")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionModel:
    """Parameters of `attention_time` (a fused kernel).

    peak_fraction         e   fraction of the dense peak, for long sequences and large heads
    head_dim_offset       d0  softmax work per score, in head dims
    sequence_offset       s1  start of each block of queries [keys x head dims]
    floor_time            t0  [s]
    query_tile            queries per thread block
    memory_fraction       fraction of the memory bandwidth, for q, k, v and the output; the memory time adds to the compute time
    wave_softness         a   as in MatmulModel
    backward_flops        backward FLOPs over forward FLOPs (2.5: five products against two)
    backward_rate         FLOP rate of backward over that of forward
    """

    peak_fraction: float
    head_dim_offset: float = 0.0
    sequence_offset: float = 0.0
    floor_time: float = 0.0
    query_tile: float = 128.0
    memory_fraction: float = 0.8
    wave_softness: float = 0.0
    backward_flops: float = 2.5
    backward_rate: float = 0.8

    def __post_init__(self) -> None:
        require_share("peak_fraction", self.peak_fraction, most=1.25)
        require_share("memory_fraction", self.memory_fraction)
        require(self.query_tile > 0, "query_tile", self.query_tile, "must be positive")
        require(0 <= self.wave_softness <= 1, "wave_softness", self.wave_softness, "must lie in 0..1")
        require(self.backward_flops > 0 and self.backward_rate > 0, "backward_rate", self.backward_rate, "must be positive")
        offsets = (self.head_dim_offset, self.sequence_offset, self.floor_time)
        require(min(offsets) >= 0, "attention", offsets, "must not be negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class LongAttention:
    """Sustained rate of a generation of fused attention over many keys (`cost/compute.py`), as fractions of the dense peak.

    forward, backward   fraction for heads of 128 entries and long sequences
    """

    forward: float
    backward: float

    def __post_init__(self) -> None:
        require_share("long_attention.forward", self.forward)
        require_share("long_attention.backward", self.backward)

    def at_clock(self, fraction: float) -> "LongAttention":
        """Return the rates on a chip with that fraction of this chip's clock."""
        return LongAttention(forward=min(1.0, self.forward * fraction), backward=min(1.0, self.backward * fraction))


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedMatmulModel:
    """Parameters of `grouped_matmul_time` (the experts of a layer in one fused call), for one dtype, relative to plain products.

    rate_fraction    f   fraction of the FLOP rate of plain products of these sizes
    memory_fraction  g   fraction of the memory bandwidth of plain products
    row_fraction     b   fraction of the memory bandwidth, for sorting rows by expert, the activation and combining a token's experts
    expert_time      t1  [s] per expert with rows
    floor_time       t0  [s] once: routing, and the launches of all its kernels
    """

    rate_fraction: float = 1.0
    memory_fraction: float = 1.0
    row_fraction: float = 0.8
    expert_time: float = 0.0
    floor_time: float = 0.0

    def __post_init__(self) -> None:
        require_share("rate_fraction", self.rate_fraction)
        require_share("memory_fraction", self.memory_fraction)
        require_share("row_fraction", self.row_fraction)
        times = (self.expert_time, self.floor_time)
        require(min(times) >= 0, "grouped_matmul", times, "must not be negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeAttentionModel:
    """Parameters of `attention_decode_time` (one query per sequence against a cache of keys and values).

    memory_fraction  b   fraction of the memory bandwidth, for a large cache
    floor_time       t0  [s]
    ramp_time        t1  [s] additional time if keys and values do not fit the chip's cache
    ramp_bytes       V1  size at which half of `ramp_time` is added
    wave_time        w   [s] minimum time of a compute unit per sequence and key-value head
    """

    memory_fraction: float = 0.8
    floor_time: float = 0.0
    ramp_time: float = 0.0
    ramp_bytes: float = 1e6
    wave_time: float = 0.0

    def __post_init__(self) -> None:
        require_share("memory_fraction", self.memory_fraction)
        require(self.ramp_bytes > 0, "ramp_bytes", self.ramp_bytes, "must be positive")
        times = (self.floor_time, self.ramp_time, self.wave_time)
        require(min(times) >= 0, "decode_attention", times, "must not be negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveModel:
    """Parameters of `collective_time`, for one kind of collective on one kind of tier.

    base_time           a   [s] once
    hop_time            a1  [s] per ring hop
    bandwidth_fraction  fraction of the link's bandwidth (of one chip, one direction) for wire bytes
    switch_fraction     fraction of the link's bandwidth at which a reducing switch returns the full buffer, independent of the number of
                        ranks (NVLink SHARP), used if faster than the ring; 0: not supported
    own_share           g   share of the chunk that a rank keeps that costs the same as if it were sent (the local copy)
    step_share          l   relative increase of the latency if a chunk (the buffer over the ranks) exceeds one packet of the
                        low-latency protocol; half of it at chunks of `step_bytes`
    step_bytes          size of a chunk at which half of `step_share` is added
    bulk_time           J   [s] additional time of the library's bulk protocol for large chunks; half of it at `bulk_bytes`
    bulk_bytes          size of a chunk at which half of `bulk_time` is added
    ramp_time, ramp_exponent  c, x  [s] c * (wire bytes / RAMP_BYTES)^x: gradual rise between small and large messages, where the
                        protocols were not measured separately
    tree_hop_time       [s] per level of a tree, used instead of ring hops if faster; 0: the library has no tree
    inner_hop_time      [s] additional time per ring hop inside the inner domains of a ring that leaves them (slower protocol)
    one_shot_time       [s] time to send the full buffer to every peer at once, instead of a0, hops and passes; 0: not supported
    nested              between nodes each chip moves its part only (hierarchical, or a tree over nodes); False: one flat ring
    """

    base_time: float = 0.0
    hop_time: float = 0.0
    bandwidth_fraction: float = 0.8
    switch_fraction: float = 0.0
    own_share: float = 0.0
    step_share: float = 0.0
    step_bytes: float = 4096.0
    bulk_time: float = 0.0
    bulk_bytes: float = 1048576.0
    ramp_time: float = 0.0
    ramp_exponent: float = 0.5
    tree_hop_time: float = 0.0
    inner_hop_time: float = 0.0
    one_shot_time: float = 0.0
    nested: bool = False

    def __post_init__(self) -> None:
        require_share("bandwidth_fraction", self.bandwidth_fraction)
        require(0 < self.ramp_exponent <= 1, "ramp_exponent", self.ramp_exponent, "must lie in 0..1")
        hops = (self.base_time, self.hop_time, self.ramp_time, self.tree_hop_time, self.inner_hop_time, self.one_shot_time)
        times = (*hops, self.switch_fraction, self.own_share, self.step_share, self.bulk_time)
        require(min(map(least, times)) >= 0, "collective", times, "must not be negative")
        require(min(self.step_bytes, self.bulk_bytes) > 0, "step_bytes", self.step_bytes, "must be positive, and so must bulk_bytes")


RAMP_BYTES = 2.0**20
"""Unit of the ramp's argument: 1 MiB, so that c is the extra time of a message of that size."""


ATTENTION_KERNELS = ("flash1", "flash2", "flash3", "cudnn")
"""Generations of fused attention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelModels(ReadOnly):
    """Parameters of kernels and collectives.

    matmul, streaming, attention, collectives   parameters by dtype, kernel class, kernel, tier kind and collective; an attention kernel
                        that differs by dtype has a second entry, such as `flash.bf16`
    convolution         parameters by dtype; without an entry a convolution takes the time of a matrix multiply of its size
    grouped_matmul      parameters by dtype; without an entry a grouped product takes the time of plain products
    decode_attention    parameters by kernel
    serving             kernels used only in serving
    """

    matmul: Mapping[Dtype, MatmulModel] = field(default_factory=dict)
    convolution: Mapping[Dtype, ConvolutionModel] = field(default_factory=dict)
    streaming: Mapping[KernelClass, StreamingModel] = field(default_factory=dict)
    attention: Mapping[str, AttentionModel] = field(default_factory=dict)
    grouped_matmul: Mapping[Dtype, GroupedMatmulModel] = field(default_factory=dict)
    decode_attention: Mapping[str, DecodeAttentionModel] = field(default_factory=dict)
    serving: ServingKernels = field(default_factory=ServingKernels)
    collectives: Mapping[str, Mapping[CollectiveKind, CollectiveModel]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        freeze(self)
        for tier in self.collectives:
            if tier not in (SCALE_UP, SCALE_OUT):
                raise bad_field("collectives", tier, f"unknown kind of tier{suggest(tier, (SCALE_UP, SCALE_OUT))}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SustainedRates(ReadOnly):
    """Rates of kernels in a run, over those measured in short bursts.

    sustained_clock_fraction   matmul rate in a training run over that in a burst on a cool chip (power limit)
    clock_fractions     the same by dtype, where it differs (fp8: products of 8 bits)
    attention_clock_fraction   the same for fused attention, which draws less power while its softmax waits
    attention_generations      rate of an older generation of fused attention (ATTENTION_KERNELS) over the measured one; generations
                        without an entry run at the measured rate
    long_attention             sustained rate over many keys, by generation; generations without an entry run at the rate of few keys
    exposed_floor_fraction     exposed share of a kernel's floor time when kernels follow one another
    """

    sustained_clock_fraction: float = 1.0
    clock_fractions: Mapping[Dtype, float] = field(default_factory=dict)
    attention_clock_fraction: float = 1.0
    attention_generations: Mapping[str, float] = field(default_factory=dict)
    long_attention: Mapping[str, LongAttention] = field(default_factory=dict)
    exposed_floor_fraction: float = 1.0

    def __post_init__(self) -> None:
        freeze(self)
        for name in ("sustained_clock_fraction", "attention_clock_fraction"):
            require(0 < getattr(self, name) <= 1, name, getattr(self, name), "must lie in 0..1")
        for name in ("attention_generations", "long_attention"):
            for kernel in getattr(self, name):
                if kernel not in ATTENTION_KERNELS:
                    raise InputError(f"{name}.{kernel}: must be one of {', '.join(ATTENTION_KERNELS)}; correct it")
        for name in ("clock_fractions", "attention_generations"):
            for key, rate in getattr(self, name).items():
                require(0 < rate <= 1, f"{name}.{key}", rate, "must lie in 0..1")
        require(0 <= self.exposed_floor_fraction <= 1, "exposed_floor_fraction", self.exposed_floor_fraction, "must lie in 0..1")

    def clock(self, dtype: Dtype) -> float:
        """Return the fraction of the clock that products of a dtype sustain."""
        return self.clock_fractions.get(dtype, self.sustained_clock_fraction)

    def at_clock(self, fraction: float) -> "SustainedRates":
        """Return the rates on a chip that sustains that fraction of this chip's clock."""
        return replace(
            self,
            sustained_clock_fraction=min(1.0, self.sustained_clock_fraction * fraction),
            clock_fractions={dtype: min(1.0, clock * fraction) for dtype, clock in self.clock_fractions.items()},
            attention_clock_fraction=min(1.0, self.attention_clock_fraction * fraction),
            long_attention={kernel: rates.at_clock(min(1.0, fraction)) for kernel, rates in self.long_attention.items()},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTimes(ReadOnly):
    """Host times where nothing overlaps them.

    launch_time         [s] host time per operator where nothing overlaps it (CPUs; 0 on GPUs)
    host_times          [s] by name. `dtensor_op`: an operator pass on distributed tensors, in addition to the launch. `redistribution`:
                        issue and copies of a collective of activations. `gather_unit`, `reduce_unit`: bookkeeping of the collective of a
                        parameter unit. `pipeline_send`: one pass of a micro-batch through a stage. `step`: once a step. Copies of
                        buffers, per MiB: `redistribution_mebibyte`, `gather_mebibyte`, `reduce_mebibyte`, `gradient_mebibyte`
    """

    launch_time: float = 0.0
    host_times: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        freeze(self)
        require(self.launch_time >= 0, "launch_time", self.launch_time, "must not be negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftwareMemory:
    """Memory of a chip that its software takes.

    context_bytes       memory of the driver's context and libraries on a chip
    channel_bytes       memory of the buffers of one channel of a communicator (NCCL, RCCL)
    allocator_factor    memory reserved over memory allocated
    """

    context_bytes: float = 0.0
    channel_bytes: float = 0.0
    allocator_factor: float = 1.0

    def __post_init__(self) -> None:
        require(1 <= self.allocator_factor <= 1000, "allocator_factor", self.allocator_factor, "must lie from 1 to 1000")
        require_not_negative(self, "context_bytes", "channel_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationFit(ReadOnly):
    """Measurements that a calibration is fitted to.

    points, errors      number of measurements and held-out median errors, by part
    busy_fraction       share of the machine's processors used by other processes during the measurement
    """

    points: Mapping[str, int] = field(default_factory=dict)
    errors: Mapping[str, float] = field(default_factory=dict)
    busy_fraction: float = 0.0

    def __post_init__(self) -> None:
        freeze(self)
        require(0 <= self.busy_fraction <= 1, "busy_fraction", self.busy_fraction, "must lie in 0..1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration(ReadOnly):
    """Measured parameters of one software stack on one chip, and their fit errors.

    name                in tables and of `--calibration`
    source              how it was measured
    date                date of the measurement, such as '2026-01-15'
    provenance          basis of its numbers for the chips in `chips`
    notes               free text
    chips               chips that it was measured on; a prediction for them is `calibrated`
    relatives           similar chips that may use it; a prediction for them is based on a `prior`
    borrowed            parts measured on another chip, or with few points (matmul, streaming, attention, scale_up, scale_out): a
                        `partial calibration`
    software            libraries and their versions
    peaks               replaced data-sheet figures (PEAK_NAMES; flop rates as `flop_rate.bf16`); empty on a chip with a data sheet
    contention          slow-down factors by name. `matmul`, `streaming`, `attention`: all cores busy, over one alone;
                        `cores`: number of processes for these factors; `compute_under_communication`
    """

    name: str
    chips: tuple[str, ...]
    software: str
    source: str
    date: str
    provenance: Provenance = Provenance.CALIBRATED
    relatives: tuple[str, ...] = ()
    borrowed: tuple[str, ...] = ()
    kernels: KernelModels = field(default_factory=KernelModels, metadata=INLINE)
    peaks: Mapping[str, float] = field(default_factory=dict)
    sustained: SustainedRates = field(default_factory=SustainedRates, metadata=INLINE)
    host: HostTimes = field(default_factory=HostTimes, metadata=INLINE)
    memory: SoftwareMemory = field(default_factory=SoftwareMemory, metadata=INLINE)
    contention: Mapping[str, float] = field(default_factory=dict)
    fit: CalibrationFit = field(default_factory=CalibrationFit, metadata=INLINE)
    notes: str = ""

    def __post_init__(self) -> None:
        freeze(self)
        for part in self.borrowed:
            if part not in PARTS:
                raise bad_field("borrowed", part, f"unknown part{suggest(part, PARTS)}")
        for peak, value in self.peaks.items():
            if peak.partition(".")[0] not in PEAK_NAMES:
                raise bad_field("peaks", peak, f"unknown figure{suggest(peak, PEAK_NAMES)}")
            require(1 <= value < math.inf, f"peaks.{peak}", value, "must be positive, 1 at least")

    def __hash__(self) -> int:
        return hash(self.name)


GPU_TILES = ((256.0, 128.0, 0.0), (128.0, 256.0, 0.0), (128.0, 128.0, 1.0), (64.0, 128.0, 3.0), (128.0, 64.0, 3.0))
"""Output tiles of the matrix-multiply kernels that GPU libraries choose from, with the penalty exponent of the small ones."""

SPEC_SHEET_NAME = "spec-sheet"
#: Name of a calibration that a run measures for itself and does not store.
MEASURED_NOW = "measured with this run"
"""Name for the absence of a calibration: typical fractions of the data sheet, even if measurements exist."""

PRIOR_NAME = "prior"
"""Name of the prior of a chip: the calibrations of its vendor's other chips (`perfmodel.hardware.prior`)."""

GROUPED_TILE = (16.0, 128.0, 1.0)
"""Additional tile of grouped kernels, for experts with few rows: TensorRT-LLM's fused kernel has it on Ampere. It reduces the error of the
A100's table from 14 % to 9 %; the others do not change."""

WIDENED_TILE = (16.0, 128.0, 6.0)
"""Additional tile of kernels that widen weights of 8 or 4 bits inside the product, such as Marlin's of 16 rows. A padded tile of 64 rows
would take longer than reading the weights: with it the A100's products of few rows with weights in 4 bits were 79 % too slow."""

SPEC_SHEET = Calibration(
    name="",
    chips=(),
    software="none: typical fractions of the data sheet",
    source=(
        "matmul .8: best achieved matrix multiplies of seven NVIDIA GPUs lie at .73-.87 of the dense peak (Bekman, ML Engineering, MAMF "
        "table). Memory .8 and 3 us a kernel: aiconfigurator system files. Links .8: NCCL tests on NVLink and InfiniBand. Attention: "
        "aiconfigurator tables of A100 to B200. Sustained clock: the share of their best matrix multiply that training runs on A100, "
        "H100 and B200 reach (fits to whole kernel tables times their sustained clocks, geometric mean)"
    ),
    date="2026-11-21",
    provenance=Provenance.SPEC_SHEET,
    kernels=KernelModels(
        matmul={
            Dtype.BF16: MatmulModel(
                peak_fraction=0.8, depth_offset=100.0, wave_softness=0.2, memory_fraction=0.8, floor_time=3e-6, tiles=GPU_TILES
            )
        },
        streaming={KernelClass.DEFAULT: StreamingModel(bandwidth_fraction=0.8, floor_time=3e-6)},
        attention={
            "flash": AttentionModel(peak_fraction=0.7, head_dim_offset=30.0, sequence_offset=5e4, floor_time=15e-6, memory_fraction=0.5)
        },
    ),
    sustained=SustainedRates(sustained_clock_fraction=0.785, exposed_floor_fraction=0.5),
)
"""Calibration used if neither the chip nor a relative was measured. Collectives: alpha-beta model on the cluster's own links."""


def typical_fractions() -> str:
    """Return the assumptions of `SPEC_SHEET` about matrix products, as text."""
    matmul = SPEC_SHEET.kernels.matmul[Dtype.BF16]
    return f"{matmul.peak_fraction:.0%} of the data sheet's FLOP rate and {matmul.memory_fraction:.0%} of its memory bandwidth are assumed"


def default_calibration(chip: str, calibrations: Iterable[Calibration]) -> Calibration:
    """Return the calibration measured on `chip`, else one that applies to it (a relative's, a prior), else `SPEC_SHEET`."""
    known = list(calibrations)
    for calibration in known:
        if chip in calibration.chips:
            return calibration
    for calibration in known:
        if chip in calibration.relatives:
            return calibration
    return SPEC_SHEET
