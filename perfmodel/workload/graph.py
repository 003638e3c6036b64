"""Operators as computations over named iteration dims that describe themselves, and graphs of them.

`q_proj: x[b,s,h] * W[g,r,d,h] -> q[b,s,g,r,d]`. A tensor is known to an operator by the operator's own dim names, one for
each position (rules R5, R6, R12, R13, R15 and R16 of docs/explanation/algebra.md): the same position may be
`s` where a tensor is made and `z` (key position) where it is read.

An operator describes itself completely; nothing elsewhere looks at its kind to price it. So a new kind of operator is one function in one
file that returns an `Operator` (`kinds/`); only running it with torch needs a second one, of the same name.

Mesh axes cut dims. What follows (rules R3 and R4 of the sharding algebra):

- an input is needed cut where the operator cuts a dim that the input names, whole elsewhere;
- the output is left cut likewise, and partial on the axes of `sums` dims (plainly summed over: it lacks them);
- an input's gradient leaves backward partial on every axis that cuts a dim which the input lacks.

The last makes the gradient of a weight partial on the axes of the batch: data parallelism needs no rule of its own.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from fractions import Fraction
from math import inf, prod
from typing import Any

from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.foundation.copies import Copies
from perfmodel.foundation.errors import InputError
from perfmodel.workload.by_length import ByLength
from perfmodel.workload.causal import CausalWindow
from perfmodel.workload.quantization import WeightPart

#: (size, dim that cuts it) for each factor of a number of elements; "" where nothing cuts it: a window, a gate, a joined dim.
Extent = tuple[tuple[int, str], ...]

#: Of a token's id or place: int64, as torch's embeddings and losses take it.
INDEX_BYTES = 8.0

Setting = int | float | str | bool | tuple[int, ...]


class Pass(StrEnum):
    FORWARD = "forward"
    BACKWARD = "backward"


class TensorRole(StrEnum):
    ACTIVATION = "activation"
    PARAMETER = "parameter"
    INDEX = "index"
    """Token ids, positions: no gradient (R13)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """A tensor as an operator sees it: the operator's dim name at each of the tensor's positions, "" where the position must be whole."""

    tensor: str
    dims: tuple[str, ...]


# --- work -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """Elements that an operator reads, writes or keeps.

    of           which of its operands they are, by position: the inputs, then the output; None: something of its own (masks, statistics)
    is_gradient  of that operand's gradient
    itemsize     bytes of an element; 0 for that of the operand's tensor, or of activations
    """

    extent: Extent
    of: int | None = None
    is_gradient: bool = False
    itemsize: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A batch of matrix products [m, k] x [k, n], `repeats` times one after another (time steps).

    tensors   of a convolution: input, weight and output as they lie in memory (m x k holds an entry of the input once for every window)
    is_low       of operands in fewer bits, by the job's recipe
    is_grouped   one call of a kernel for products of experts
    gradient_of   in backward: the input whose gradient it makes, and no other's; None: not told
    call         products of one call run as one kernel, whose n is the sum of theirs; "": a kernel of its own
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

    def extents(self) -> Iterator[Extent]:
        yield from (self.batch, self.m, self.n, self.k, *self.tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """A pass over memory: `elements` of its output, and what it reads and writes.

    kernel  the class of its efficiency (`hardware.calibration.KernelClass`)
    is_launched_along  by the call that launches another kernel: the host's time is that one's
    is_fused  in the kernel of a neighbour, whose floor is counted there
    element_flops  that it computes for each element                   [FLOP]
    only_across    axes: made only where these hold more than one rank, else by the kernel before it; none: always
    """

    kernel: str
    elements: Extent
    accesses: tuple[Data, ...]
    repeats: int = 1
    is_launched_along: bool = False
    is_fused: bool = False
    element_flops: float = 0.0
    only_across: frozenset[str] = frozenset()

    def extents(self) -> Iterator[Extent]:
        yield self.elements
        yield from (access.extent for access in self.accesses)


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedAttention:
    """A fused attention kernel; under a causal mask it computes a part of the scores.

    head_dim         entries of a query or key head
    value_head_dim   of a value head, where they are others; 0: as many
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
        """Mean of the entries over which its two products sum, and which they write, of a head."""
        return 0.5 * (self.head_dim + (self.value_head_dim or self.head_dim))

    def extents(self) -> Iterator[Extent]:
        yield from (self.batch, self.heads, self.kv_heads, self.queries, self.keys)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheAttention:
    """Attention of new tokens of sequences to what a cache holds of them; how many there are of each are columns of a step.

    head_dim, value_head_dim   entries of a query or key head, and of a value head
    latent       entries that the cache holds of each token in place of keys and values: latent and rotary key; (0, 0): none
    window       keys that a query sees at most, in the share `windowed` of the layers that the operator stands for; 0: all
    index        heads and head dim of the indexer that chooses those keys for each query; (0, 0): they are the last ones
    takes_prompts   besides sequences that decode
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
        """Entries of a cached key and of its value. A latent is both: its first part is the value."""
        return (sum(self.latent), self.latent[0]) if self.latent[0] else (self.head_dim, self.value_head_dim)

    def extents(self) -> Iterator[Extent]:
        yield from (self.heads, self.kv_heads)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedExperts:
    """The experts of a layer as one fused call, with what tokens send to them and back.

    matrices   of an expert that read a token: 2 of a gated one
    """

    num_experts: int
    top_k: int
    width: int
    hidden_size: int
    matrices: int

    def extents(self) -> Iterator[Extent]:
        yield from ()


Work = Product | Stream | FusedAttention | CacheAttention | RoutedExperts


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnTraffic:
    """A collective that the operator issues by itself where any of the dims `over` is cut; the group is all axes that cut them.

    extent    elements of the full buffer in the group; of an all-to-all the local buffer, of a send what is sent
    itemsize  bytes of an element; 0 for that of activations
    """

    kind: CollectiveKind
    over: tuple[str, ...]
    extent: Extent
    phase: Pass
    repeats: int = 1
    itemsize: float = 0.0


# --- operators ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One operator, forward, with what its backward does.

    kind      what it is called; the executor finds the torch function by it, an execution profile what a framework makes of it
    dims      size of each iteration dim, the batch first; the order is that in which axes are placed (`parallel/per_operator/plan.py`)
    inputs    tensors read, parameters among them
    output    the tensor written
    forward, backward   work of each pass. Gradients of several readers are added by the cost model, not here
    traffic   collectives of its own
    sums      dims that the output lacks and that are summed plainly: cutting them leaves the output partial
    unsplit   dims that no axis may shard
    padded    dims whose shards may be uneven (a vocabulary); the parts of other dims divide every size that they cut
    saved     what autograd keeps of it for backward, in the layout of the operator; parameters are not among it
    scratch   what its backward holds for itself besides the gradients
    parts     tensors of which it reads a piece as it lies, and how many times larger they are: all of one is kept, and the gradient of the
              piece becomes one of the whole
    streamed  inputs of which the parts of other ranks pass by block by block, where they would be gathered
    is_linear                  in all its inputs: a partial sum may enter (R6)
    passes_gradient            its backward hands the gradient of the output on to its activations as it is
    makes_weight_gradients     its backward makes the gradients of its parameters as tensors; else it adds them where they are gathered up
    settings  what the torch function needs (stride, padding, window ...)
    layer     a group that pipelines and reports know it by ("encoder.3"); of a decoder embedding, layer or head; "" for none
    group     the set of operators that selective recomputation speaks of

    Of a graph in which the batch is a quantity of the plan and rule sets hand out axes:

    logical     the names that rule sets know dims by: they belong to the operator, not to the tensor (R16); else a dim's own
    per_sample  dims that count sequences: their size is the (micro)batch, and 1 in `dims`
    per_token   dims that count tokens of a sequence: their size is its length times that in `dims`
    stretched   dims of size 1 of which each shard holds a whole copy (the weight form of grouped-query attention)
    """

    name: str
    kind: str
    dims: Mapping[str, int]
    inputs: tuple[Operand, ...]
    output: Operand
    forward: tuple[Work, ...] = ()
    backward: tuple[Work, ...] = ()
    traffic: tuple[OwnTraffic, ...] = ()
    sums: tuple[str, ...] = ()
    unsplit: tuple[str, ...] = ()
    padded: tuple[str, ...] = ()
    saved: tuple[Data, ...] = ()
    scratch: tuple[Data, ...] = ()
    parts: Mapping[str, float] = field(default_factory=dict)
    streamed: tuple[int, ...] = ()
    is_linear: bool = False
    passes_gradient: bool = False
    makes_weight_gradients: bool = True
    settings: Mapping[str, Setting] = field(default_factory=dict)
    layer: str = ""
    group: str = ""
    logical: Mapping[str, str] = field(default_factory=dict)
    per_sample: tuple[str, ...] = ()
    per_token: tuple[str, ...] = ()
    stretched: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, size in self.dims.items():
            if isinstance(size, float | Fraction) and 0 < size < inf:  # rows that an expert has on average, a part of a token
                continue
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise InputError(f"operator {self.name}: dim {name}={size}: must be a whole number of at least 1; correct the shape")
        for operand in (*self.inputs, self.output):
            named = [dim for dim in operand.dims if dim]
            for dim in named:
                if dim not in self.dims:
                    raise InputError(f"operator {self.name}: operand {operand.tensor} has dim {dim!r}: not a dim of the operator; add it")
            if len(set(named)) != len(named):
                raise InputError(f"operator {self.name}: operand {operand.tensor} has dims={operand.dims}: each may occur once; rename one")
        for dim in (*self.sums, *self.unsplit, *self.padded, *self.logical, *self.per_sample, *self.per_token, *self.stretched):
            if dim not in self.dims:
                raise InputError(f"operator {self.name}: dim {dim!r}: not a dim of the operator; add it")
        for dim in self.sums:
            if dim in self.output.dims:
                raise InputError(f"operator {self.name}: dim {dim!r} is summed over and in the output; leave it out of one")
        for data in (*self.saved, *self.scratch):
            if data.of is not None and not 0 <= data.of <= len(self.inputs):
                raise InputError(f"operator {self.name}: keeps operand {data.of}: has {len(self.inputs)} inputs and the output; name one")
        for extent in self._extents():
            for size, dim in extent:
                if dim and dim not in self.dims:
                    raise InputError(f"operator {self.name}: an extent has dim {dim!r}: not a dim of the operator; add it")
                if size <= 0:
                    raise InputError(f"operator {self.name}: an extent has size {size}: must be positive; correct the shape")

    def _extents(self) -> Iterator[Extent]:
        yield from (traffic.extent for traffic in self.traffic)
        yield from (data.extent for data in (*self.saved, *self.scratch))
        for work in (*self.forward, *self.backward):
            yield from work.extents()

    @property
    def operands(self) -> tuple[Operand, ...]:
        """Inputs, then the output: what `Data.of` counts."""
        return (*self.inputs, self.output)

    @property
    def kept(self) -> tuple[str, ...]:
        """Which of the inputs and the output it keeps for backward."""
        operands = self.operands
        return tuple(operands[data.of].tensor for data in self.saved if data.of is not None)

    def streams(self, operand: Operand) -> bool:
        """Whether the parts of other ranks pass by: the operator holds its own rank's."""
        return any(self.inputs[place] == operand for place in self.streamed)

    @property
    def is_product(self) -> bool:
        return any(isinstance(work, Product) for work in self.forward)

    @property
    def is_attention(self) -> bool:
        return any(isinstance(work, FusedAttention) for work in self.forward)

    @property
    def name_in_layer(self) -> str:
        """Name without the layer: q_proj of `layer3.q_proj`."""
        return self.name.removeprefix(f"{self.layer}.")

    def logical_name(self, dim: str) -> str:
        return self.logical.get(dim, dim)

    def size(self, dims: tuple[str, ...]) -> int:
        """Elements over these dims; of a decoder's for one sequence."""
        return prod(self.dims[name] for name in dims)

    def extent(self, dims: tuple[str, ...]) -> Extent:
        """The product of these dims."""
        return tuple((self.dims[name], name) for name in dims if name)

    @property
    def flops(self) -> float:
        """Products of the forward pass, a multiply-add as 2; fused attention with its causal share. [FLOP]"""
        return float(sum(each.at(1) for each in self.flops_by_length))

    @property
    def flops_by_length(self) -> tuple[ByLength, ...]:
        """The same for each work, of sequences of any length. [FLOP]"""
        return tuple(flops_of(work, self.per_token) for work in self.forward)


def flops_of(work: Work, per_token: Container[str] = ()) -> ByLength:
    """FLOPs of products, a multiply-add counted as 2; per_token: the dims that count tokens. [FLOP]"""
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
    """Its elements, of a decoder's those of one sequence, or of one token."""
    return float(prod(size for size, _ in extent))


def length_power(extent: Extent, per_token: Container[str]) -> int:
    """Power of the sequence length that it is proportional to; per_token: the dims that count tokens."""
    return sum(dim in per_token for _, dim in extent)


# --- graphs ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightCasts:
    """Memory traffic of low-precision copies of a weight, for each element. [byte]

    all_copies   one pass that writes every copy
    one_copy     one that writes the copy of one order alone, as a forward pass needs it
    update       what follows the optimizer's pass over it, of an element that it updates
    """

    all_copies: float = 0.0
    one_copy: float = 0.0
    update: float = 0.0


#: Of a tensor that no recipe casts, or whose casts are its readers' work.
NO_CASTS = WeightCasts()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A tensor at full size; where the batch is a quantity of the plan, that of one sequence.

    itemsize   bytes of an element; 0: the job says it
    num_rows   leading positions that form dim 0 of the stored matrix (of parameters), the dim that ZeRO cuts
    bias_of    of a bias: the product to whose output it is added
    part       of a parameter: what formats of weights tell apart (`quantization.py`)
    is_stored  lies in memory; else it is only between operators of one kernel
    tokens_at_once   of a sequence, that lie in memory together, in a graph of one token; 0: all
    copies     of each row, where only one for each place travels between chips; None: all of them do
    exchanged  of an all-to-all of it: what the busiest chip sends or receives, over what a chip holds
    is_counted how much of it goes where is known on the chips alone: the host waits for that before it sends any
    is_set     rows in any order, whose order is kept apart: which of them a chip holds is all that matters, not in which chunk
    copy_bytes   of an element of the copies in fewer bits that live beside it, of a parameter; less what they live in place of
    gathered_bytes   of an element as it is gathered, of a parameter; 0: as it lies
    casts      of a parameter: how its copies in fewer bits are made once a step, or each time that it is gathered
    sent_bytes, sent_gradient_bytes   of an activation and of its gradient, of an element as it travels; 0: as it lies
    has_gradient   backward makes its gradient: a parameter is trained, an activation depends on one that is (`freezing.py`)
    """

    name: str
    shape: tuple[int, ...]
    role: TensorRole = TensorRole.ACTIVATION
    itemsize: float = 0.0
    num_rows: int = 1
    bias_of: str = ""
    part: WeightPart = "other"
    is_stored: bool = True
    tokens_at_once: int = 0
    is_set: bool = False
    copies: Copies | None = None
    exchanged: float = 1.0
    is_counted: bool = False
    copy_bytes: float = 0.0
    gathered_bytes: float = 0.0
    casts: WeightCasts = NO_CASTS
    sent_bytes: float = 0.0
    sent_gradient_bytes: float = 0.0
    has_gradient: bool = True

    @property
    def num_elements(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    """Operators that run `count` times, one run after another.

    layer    the `Operator.layer` that they have
    carried  the tensor that a run reads of the run before it. The first reads what comes before in the same layout, and what follows
             reads the last: the boundaries are identity operators
    turn     repeats of one name here run in turn, each as its share of the others has run; "": one repeat after the other
    """

    layer: str
    count: int
    carried: str
    turn: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """The operators of one layer, of which the graph runs `count`.

    is_block       of a `Repeat`, or one of `Graph.blocks`: what frameworks recompute, launch and gather as a unit
    carried, turn  the repeat's
    host_layers    transformer layers that a block counts for where a host waits layer by layer
    """

    name: str
    count: int = 1
    is_block: bool = False
    carried: str = ""
    turn: str = ""
    host_layers: float = 1.0

    @property
    def is_repeated(self) -> bool:
        """Whether a run of it follows another."""
        return bool(self.carried)


def regions_of(layers: Iterable[str], repeats: Iterable[Repeat], blocks: Mapping[str, float] | None = None) -> tuple[Region, ...]:
    """The layers in the order in which they are first met."""
    by_layer = {repeat.layer: repeat for repeat in repeats}

    def region(name: str) -> Region:
        repeat = by_layer.get(name)
        if repeat is not None:
            return Region(name=name, count=repeat.count, is_block=True, carried=repeat.carried, turn=repeat.turn)
        if blocks and name in blocks:
            return Region(name=name, is_block=True, host_layers=blocks[name])
        return Region(name=name)

    return tuple(map(region, dict.fromkeys(layers)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """Operators in an order of execution, and the tensors by name; backward follows. A tensor that no operator writes is given.

    batch    samples of a microbatch; 0: a quantity of the plan, and sizes are those of one sequence
    repeats  which operators stand for several layers; those of no repeat run once
    blocks   layers that run once and are blocks all the same -> `Region.host_layers`
    compute_bytes   of an element of activations, where nothing else is said; 0: that of what repeated layers hand on
    regions  the layers, in order
    loss     the operator that ends the step, where one is told apart
    tied     parameters that more than one layer reads
    """

    name: str
    operators: tuple[Operator, ...]
    tensors: Mapping[str, Tensor]
    batch: int = 0
    source: str = ""
    repeats: tuple[Repeat, ...] = ()
    loss: str = ""
    tied: tuple[str, ...] = ()
    blocks: Mapping[str, float] = field(default_factory=dict)
    compute_bytes: float = 0.0
    regions: tuple[Region, ...] = field(init=False, repr=False, compare=False)
    _made: dict[str, int] = field(init=False, repr=False, compare=False, default_factory=dict)
    _read: dict[str, list[tuple[int, int]]] = field(init=False, repr=False, compare=False, default_factory=dict)
    _layers: dict[str, list[Operator]] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        names: set[str] = set()
        produced = {operator.output.tensor for operator in self.operators}
        for index, operator in enumerate(self.operators):
            if operator.name in names:
                raise InputError(f"operator {operator.name}: occurs twice; rename one")
            names.add(operator.name)
            self._layers.setdefault(operator.layer, []).append(operator)
            for operand in operator.operands:
                tensor = self.tensors.get(operand.tensor)
                if tensor is None:
                    raise InputError(f"operator {operator.name}: tensor {operand.tensor!r} is not in the graph; declare it")
                if len(tensor.shape) != len(operand.dims):
                    raise InputError(
                        f"operator {operator.name}: operand {operand.tensor} has dims={operand.dims}: must be one for each position of "
                        f"shape {tensor.shape}"
                    )
            if operator.output.tensor in self._made:
                raise InputError(f"operator {operator.name}: output {operator.output.tensor!r} is made twice; rename one")
            for place, operand in enumerate(operator.inputs):
                if operand.tensor in produced and operand.tensor not in self._made:
                    raise InputError(f"operator {operator.name}: input {operand.tensor!r} is made after it; put its producer first")
                self._read.setdefault(operand.tensor, []).append((index, place))
            self._made[operator.output.tensor] = index
        for repeat in self.repeats:
            if repeat.carried not in self.tensors:
                raise InputError(f"repeat of {repeat.layer}: tensor {repeat.carried!r} is not in the graph; declare it")
        object.__setattr__(self, "regions", regions_of((operator.layer for operator in self.operators), self.repeats, self.blocks))

    # --- edges ----------------------------------------------------------------------------------------------

    def producers(self) -> Mapping[str, int]:
        """Tensor -> index of the operator that writes it."""
        return self._made

    def readers(self) -> Mapping[str, list[tuple[int, int]]]:
        """Tensor -> (operator, input) of each reader, in order."""
        return self._read

    def shared(self) -> Mapping[str, list[tuple[int, int]]]:
        """Readers of the tensors that are made here and have several, in the order in which they are read first."""
        return {tensor: readers for tensor, readers in self._read.items() if len(readers) > 1 and tensor in self._made}

    def with_itemsizes(self, *, activation: float, parameter: float, **changes: Any) -> Graph:
        """With the bytes of an element where a tensor does not say them, and `changes` of its other fields."""
        of_role = {TensorRole.ACTIVATION: activation, TensorRole.PARAMETER: parameter, TensorRole.INDEX: INDEX_BYTES}
        tensors = {name: each if each.itemsize else replace(each, itemsize=of_role[each.role]) for name, each in self.tensors.items()}
        return replace(self, tensors=tensors, **changes)

    def operators_of(self, layer: str) -> list[Operator]:
        """The operators of a layer, or of a region, by its name."""
        return self._layers.get(layer, [])

    def producer(self, tensor: str) -> Operator | None:
        index = self._made.get(tensor)
        return None if index is None else self.operators[index]

    def consumers(self, tensor: str) -> list[tuple[Operator, int]]:
        """The operators that read it, each with the place among its inputs."""
        return [(self.operators[index], place) for index, place in self._read.get(tensor, ())]

    def operator(self, name: str) -> Operator:
        for operator in self.operators:
            if operator.name == name:
                return operator
        raise InputError(f"graph {self.name}: no operator {name!r}")

    # --- repeats --------------------------------------------------------------------------------------------

    def count(self, layer: str) -> int:
        """How often the operators of a layer run."""
        return next((repeat.count for repeat in self.repeats if repeat.layer == layer), 1)

    @property
    def boundary(self) -> str:
        """The tensor that repeated layers hand on; "" of a graph without them."""
        return self.repeats[0].carried if self.repeats else ""

    @property
    def activation_bytes(self) -> float:
        """Bytes of an activation's element, unless a tensor says otherwise."""
        return self.compute_bytes or self.tensors[self.boundary or self.operators[-1].output.tensor].itemsize

    def itemsize(self, operator: Operator, data: Data) -> float:
        """Bytes of an element of what an operator reads, writes or keeps."""
        if data.itemsize or data.of is None:
            return data.itemsize or self.activation_bytes
        return self.tensors[operator.operands[data.of].tensor].itemsize

    # --- sizes ----------------------------------------------------------------------------------------------

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return tuple(tensor for tensor in self.tensors.values() if tensor.role is TensorRole.PARAMETER)

    def is_trained(self, operand: Operand) -> bool:
        """Whether it is a parameter of which a gradient is made."""
        tensor = self.tensors[operand.tensor]
        return tensor.role is TensorRole.PARAMETER and tensor.has_gradient

    def makes_gradient(self, operand: Operand) -> bool:
        """Whether it is an activation of which a gradient is made."""
        tensor = self.tensors[operand.tensor]
        return tensor.role is TensorRole.ACTIVATION and tensor.has_gradient

    @property
    def layer_parameters(self) -> dict[str, int]:
        """Elements of the parameters that each layer is the first to read."""
        return self._by_layer(self.parameters)

    def _by_layer(self, parameters: Iterable[Tensor]) -> dict[str, int]:
        found: dict[str, int] = {}
        for tensor in parameters:
            if tensor.name in self._read:
                layer = self.operators[self._read[tensor.name][0][0]].layer
                found[layer] = found.get(layer, 0) + tensor.num_elements
        return found

    @property
    def num_parameters(self) -> int:
        if not self.repeats:
            return sum(tensor.num_elements for tensor in self.parameters)
        return sum(self.count(layer) * number for layer, number in self.layer_parameters.items())

    @property
    def num_trained_parameters(self) -> int:
        """Parameters with gradients."""
        return self._number_of(tensor for tensor in self.parameters if tensor.has_gradient)

    @property
    def num_frozen_in_products(self) -> int:
        """Frozen parameters that products read."""
        frozen = (tensor for tensor in self.parameters if not tensor.has_gradient)
        return self._number_of(tensor for tensor in frozen if any(reader.is_product for reader, _ in self.consumers(tensor.name)))

    def _number_of(self, parameters: Iterable[Tensor]) -> int:
        return sum(self.count(layer) * number for layer, number in self._by_layer(parameters).items())

    @property
    def flops(self) -> float:
        """FLOPs of one forward pass. [FLOP]"""
        return sum(self.count(operator.layer) * operator.flops for operator in self.operators)

    @property
    def flops_by_length(self) -> tuple[ByLength, ...]:
        """The same, of sequences of any length where the graph is of one token. [FLOP]"""
        return tuple(each.times(self.count(op.layer)) for op in self.operators for each in op.flops_by_length if each.base)
