"""Samples of microbenchmarks: one record per timed call. A fit turns a list of them into a `Calibration`."""

from dataclasses import dataclass

from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.foundation.dtypes import Dtype
from perfmodel.hardware.calibration import KernelClass


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulSample:
    """A batch of products [m, k] x [k, n]; time [s]."""

    m: int
    n: int
    k: int
    batch: int
    dtype: Dtype
    time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvolutionSample:
    """A convolution or one of its gradients, as a batch (groups) of products [m, k] x [k, n]; num_bytes of its three tensors [byte]."""

    m: int
    n: int
    k: int
    batch: int
    num_bytes: float
    dtype: Dtype
    time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamingSample:
    """A streaming kernel, forward or backward; num_bytes read and written [byte], num_elements of its output, time [s]."""

    kernel_class: KernelClass
    num_bytes: float
    num_elements: float
    time: float
    is_backward: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSample:
    """A fused attention kernel, forward and backward separately [s]; causal_fraction 1/2 for a causal mask, else 1."""

    batch: int
    heads: int
    kv_heads: int
    query_length: int
    key_length: int
    head_dim: int
    causal_fraction: float
    dtype: Dtype
    time: float
    backward_time: float
    kernel: str = "flash"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSample:
    """A product of a few rows with a weight that is read from memory, as in decoding; time [s]."""

    rows: int
    outputs: int
    inputs: int
    dtype: Dtype
    time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSample:
    """Attention of one new token of each of `batch` sequences with a cache of `key_length` tokens; time [s]."""

    batch: int
    heads: int
    kv_heads: int
    key_length: int
    head_dim: int
    dtype: Dtype
    time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveSample:
    """A collective of group_size ranks; num_bytes as in `collective_time`: the full buffer, for an all-to-all the local one."""

    kind: CollectiveKind
    num_bytes: float
    group_size: int
    time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSample:
    """Host time of one event, such as dtensor_op, autograd_op, fsdp_unit, step; `launch` is per operator [s]."""

    name: str
    time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentionSample:
    """Slow-down factor of an activity while another one runs; 1 = none."""

    name: str
    factor: float


Sample = (
    MatmulSample
    | ConvolutionSample
    | StreamingSample
    | AttentionSample
    | DecodeSample
    | WeightSample
    | CollectiveSample
    | HostSample
    | ContentionSample
)
