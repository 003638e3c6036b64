"""Work of an operator's passes: matrix products, passes over memory, fused attention, serving kernels, own collectives; their extents.

The cost model prices each kind of work by one formula and never branches on the kind of an operator.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import filterfalse
from math import prod
from operator import attrgetter

from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.foundation.errors import InputError
from perfmodel.workload.by_length import ByLength
from perfmodel.workload.causal import CausalWindow

#: (size, dim) of each factor of a number of elements; dim "" where no axis shards the factor: a window, a gate, a joined dim.
Extent = tuple[tuple[int, str], ...]


class Pass(StrEnum):
    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """Elements that an operator reads, writes or saves.

    of           index of the operand: the inputs, then the output; None: internal data (masks, statistics)
    is_gradient  the elements are of that operand's gradient
    itemsize     bytes of an element; 0 for that of the operand's tensor, or of activations
    """

    extent: Extent
    of: int | None = None
    is_gradient: bool = False
    itemsize: float = 0.0

    @property
    def gradient(self) -> Data:
        """The same elements of the operand's gradient."""
        return Data(extent=self.extent, of=self.of, is_gradient=True, itemsize=self.itemsize)


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A batch of matrix products [m, k] x [k, n], repeated `repeats` times in sequence (time steps).

    tensors      of a convolution: input, weight and output as stored (m x k counts an input entry once per window)
    is_low       operands in fewer bits, by the job's recipe
    is_grouped   one call of a grouped GEMM kernel (experts)
    gradient_of  in backward: index of the only input whose gradient it computes; None: not given
    call         products with the same call run as one kernel, whose n is their sum; "": a separate kernel
    """

    batch: Extent = ()
    m: Extent = ()
    n: Extent = ()
    k: Extent = ()
    repeats: int = 1
    tensors: tuple[Extent, ...] = ()
    gradient_of: int | None = None
    is_grouped: bool = False
    is_low: bool = False
    call: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """A pass over memory: `elements` of its output, and the data that it reads and writes.

    kernel             class of its efficiency (`hardware.calibration.KernelClass`)
    is_launched_along  launched by the call of another kernel, which accounts for the host time
    is_fused           part of a neighbour's kernel, which accounts for the minimum kernel time
    element_flops      computed per element                     [FLOP]
    only_across        axes: a separate kernel only where these have more than one rank, else part of the kernel before it; none: always
    """

    kernel: str
    elements: Extent
    accesses: tuple[Data, ...]
    repeats: int = 1
    is_launched_along: bool = False
    is_fused: bool = False
    element_flops: float = 0.0
    only_across: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedAttention:
    """A fused attention kernel; under a causal mask it computes a share of the scores.

    head_dim         entries of a query or key head
    value_head_dim   entries of a value head, where different; 0: the same
    """

    batch: Extent
    heads: Extent
    kv_heads: Extent
    queries: Extent
    keys: Extent
    head_dim: int
    value_head_dim: int = 0
    mask: CausalWindow | None = None

    @property
    def width(self) -> float:
        """Mean of the contraction width and the output width of its two products, per head."""
        return 0.5 * (self.head_dim + (self.value_head_dim or self.head_dim))


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheAttention:
    """Attention of new tokens to a cache; the numbers of new and cached tokens are columns of a step.

    head_dim, value_head_dim   entries of a query or key head, and of a value head
    latent         cached entries per token in place of keys and values: latent and rotary key; (0, 0): none
    window         most keys that a query attends to, in the share `windowed` of the layers that the operator stands for; 0: all
    index          heads and head dim of the indexer that selects those keys per query; (0, 0): the most recent keys
    takes_prompts  the step prefills in addition to decoding
    """

    heads: Extent
    kv_heads: Extent
    head_dim: int
    value_head_dim: int
    latent: tuple[int, int] = (0, 0)
    window: int = 0
    windowed: float = 0.0
    index: tuple[int, int] = (0, 0)
    takes_prompts: bool = False

    @property
    def cached_dims(self) -> tuple[int, int]:
        """Entries of a cached key and of its value. A latent serves as both: its first part is the value."""
        return (sum(self.latent), self.latent[0]) if self.latent[0] else (self.head_dim, self.value_head_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedExperts:
    """The experts of a layer as one fused call, dispatch and combine included.

    matrices   input projections of an expert: 2 if gated
    """

    num_experts: int
    top_k: int
    width: int
    hidden_size: int
    matrices: int


Work = Product | Stream | FusedAttention | CacheAttention | RoutedExperts


def extents_of(work: Work) -> tuple[Extent, ...]:
    """Return the sizes of which a work is a function."""
    match work:
        case Product():
            return (work.batch, work.m, work.n, work.k, *work.tensors)
        case Stream():
            return (work.elements, *map(attrgetter("extent"), work.accesses))
        case FusedAttention():
            return (work.batch, work.heads, work.kv_heads, work.queries, work.keys)
        case CacheAttention():
            return (work.heads, work.kv_heads)
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnTraffic:
    """A collective that the operator issues itself where any of the dims `over` is sharded; its group is all axes that shard them.

    extent    elements of the full buffer in the group; for an all-to-all the local buffer, for a send the message
    itemsize  bytes of an element; 0 for that of activations
    """

    kind: CollectiveKind
    over: tuple[str, ...]
    extent: Extent
    phase: Pass
    repeats: int = 1
    itemsize: float = 0.0


def flops_of(work: Work, per_token: Container[str] = ()) -> ByLength:
    """Return the FLOPs of products, a multiply-add as 2; per_token: the dims that count tokens. [FLOP]"""
    match work:
        case Product():
            base = 2.0 * work.repeats * count_of(work.batch) * count_of(work.m) * count_of(work.n) * count_of(work.k)
            power = sum(length_power(extent, per_token) for extent in (work.batch, work.m, work.n, work.k))
            return ByLength(base=base, power=power)
        case FusedAttention():
            scores = count_of(work.batch) * count_of(work.heads) * count_of(work.queries) * count_of(work.keys)
            power = sum(length_power(extent, per_token) for extent in (work.batch, work.heads, work.queries, work.keys))
            keys = count_of(work.keys), length_power(work.keys, per_token)
            return ByLength(base=4.0 * scores * work.width, power=power, mask=work.mask, keys=keys)
    return ByLength()


def count_of(extent: Extent) -> float:
    """Return the number of elements; in a decoder's graph of one sequence or one token."""
    return float(prod(size for size, _ in extent))


def length_power(extent: Extent, per_token: Container[str]) -> int:
    """Return the power of the sequence length in the number of elements; per_token: the dims that count tokens."""
    return sum(dim in per_token for _, dim in extent)


# --- extents ----------------------------------------------------------------------------------------------------------


def extent(dims: Mapping[str, int], names: Iterable[str]) -> Extent:
    """Return the extent of these dims; unsharded positions ("") are skipped."""
    named = (*filter(None, names),)
    return tuple(zip(map(dims.__getitem__, named), named, strict=True))


def passes(*extents: Extent) -> tuple[Data, ...]:
    """Return reads or writes of these extents, without operands."""
    return tuple([Data(extent=size) for size in extents])


def reduced_rows(dims: Mapping[str, int], names: Iterable[str], over: Collection[str], *, values: int = 1) -> Extent:
    """Return `values` numbers for each entry that is left after the reduction of `over`."""
    rows = extent(dims, filterfalse(over.__contains__, names))
    return ((values, ""), *rows) if values > 1 else rows


def window_output(name: str, size: int, window: int, stride: int, padding: int, dilation: int = 1) -> int:
    """Return the positions of a window along one side: floor((size + 2 padding - dilation (window - 1) - 1) / stride) + 1."""
    for field, value, least in (("window", window, 1), ("stride", stride, 1), ("padding", padding, 0), ("dilation", dilation, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InputError(f"operator {name}: {field}={value}: must be a whole number of at least {least}; correct it")
    left = size + 2 * padding - dilation * (window - 1) - 1
    if left < 0:
        raise InputError(f"operator {name}: window={window}: is wider than the padded input of {size + 2 * padding}; use a larger input")
    return left // stride + 1


def halo_rows(window: int, stride: int, padding: int, dilation: int = 1) -> int:
    """Return the rows that a shard needs from its neighbours: `padding` above it, the rest of the window below it.

    Source: sharding algebra, convolution with sharded h: owned rows are stride * outputs, needed stride * (outputs - 1) + window.
    """
    return padding + max(0, dilation * (window - 1) + 1 - stride - padding)


def halo_exchange(dim: str, rows: int, along: Extent) -> tuple[OwnTraffic, ...]:
    """Return the halo exchange: input rows to the neighbours in forward, the same number of gradient rows back in backward.

    Each dim is exchanged separately: with two sharded dims the corners (rows times columns) are not counted.
    """
    if rows == 0:
        return ()
    sent: Extent = ((rows, ""), *along)
    return tuple(OwnTraffic(kind=CollectiveKind.SEND_RECV, over=(dim,), extent=sent, phase=phase) for phase in Pass)
