"""Operators as self-describing computations over named iteration dims, and graphs of them.

`q_proj: x[b,s,h] * W[g,r,d,h] -> q[b,s,g,r,d]`. An operand gives the operator's own dim name at each position of its tensor (rules R5, R6,
R12, R13, R15 and R16 of docs/explanation/algebra.md). The same position may be `s` for the producer and `z` (key position) for a reader.

The cost model never branches on the kind of an operator. A new kind is therefore one function that returns an `Operator` (`kinds/`). Only
execution with torch needs a second function, of the same name.

Mesh axes shard dims. The consequences (rules R3 and R4 of the sharding algebra):

- an input must be sharded where the operator shards a dim that the input names, and unsharded elsewhere;
- the output is sharded likewise, and partial on the axes of `sums` dims (dims that it lacks because they are summed over);
- backward leaves an input's gradient partial on every axis that shards a dim which the input lacks.

The last makes a weight's gradient partial on the axes of the batch: data parallelism needs no extra rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from fractions import Fraction
from itertools import chain
from math import inf, prod
from operator import attrgetter
from typing import Any

from perfmodel.foundation.copies import Copies
from perfmodel.foundation.errors import InputError
from perfmodel.workload.by_length import ByLength
from perfmodel.workload.quantization import WeightPart
from perfmodel.workload.work import (
    Data,
    Extent,
    FusedAttention,
    OwnTraffic,
    Product,
    Work,
    extents_of,
    flops_of,
)

#: Bytes of a token id or position: int64, as in torch's embeddings and losses.
INDEX_BYTES = 8.0

Setting = int | float | str | bool | tuple[int, ...]


class TensorRole(StrEnum):
    ACTIVATION = "activation"
    PARAMETER = "parameter"
    INDEX = "index"
    """Token ids, positions: no gradient (R13)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """An operator's view of a tensor: its dim name at each position of the tensor, "" where the position must be unsharded."""

    tensor: str
    dims: tuple[str, ...]


# --- operators ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class DimRoles:
    """Dims of an operator with a role beyond their size.

    sums      dims that are summed over, so that the output lacks them: sharding them leaves the output partial
    unsplit   dims that no axis may shard
    padded    dims whose shards may be uneven (a vocabulary); other dims must be divisible by the degrees that shard them

    In a graph whose batch is a quantity of the plan and whose axes rule sets assign:

    logical     names of dims in rule sets: they belong to the operator, not to the tensor (R16); default: the dim's name
    per_sample  dims that count sequences: their size is the (micro)batch, and 1 in `Operator.dims`
    per_token   dims that count tokens of a sequence: their size is the sequence length times that in `Operator.dims`
    stretched   dims of size 1 of which each shard holds a full copy (the weight form of grouped-query attention)
    """

    sums: tuple[str, ...] = ()
    unsplit: tuple[str, ...] = ()
    padded: tuple[str, ...] = ()
    logical: Mapping[str, str] = field(default_factory=dict)
    per_sample: tuple[str, ...] = ()
    per_token: tuple[str, ...] = ()
    stretched: tuple[str, ...] = ()

    def with_dims(self, change: Callable[[tuple[str, ...]], tuple[str, ...]]) -> DimRoles:
        """Return the roles after a change of dims that renames them or leaves some out."""
        return DimRoles(
            sums=change(self.sums),
            unsplit=change(self.unsplit),
            padded=change(self.padded),
            logical={dim: logical for before, logical in self.logical.items() for dim in change((before,))},
            per_sample=change(self.per_sample),
            per_token=change(self.per_token),
            stretched=change(self.stretched),
        )


#: Of an operator whose dims all may be sharded evenly.
NO_ROLES = DimRoles()


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """An operator's forward pass and its backward pass.

    kind      key of the torch function in the executor, and of the operator's treatment in an execution profile
    dims      size of each iteration dim, the batch first; the order in which axes are placed (`parallel/per_operator/plan.py`)
    inputs    tensors read, parameters among them
    output    the tensor written
    forward, backward   work of each pass. The cost model, not the operator, adds the gradients of several readers
    traffic   collectives that the operator issues itself
    roles     dims that are more than a size: summed over, never sharded, counting sequences ...
    saved     data saved for backward by autograd, in the operator's layout; parameters are not included
    scratch   temporary memory of backward in addition to the gradients
    parts     tensors of which it reads a view, and how many times larger they are: the full tensor stays saved, and the gradient of the
              view becomes one of the full tensor
    streamed  inputs whose remote shards are processed block by block (ring), where they would otherwise be gathered
    is_linear                  linear in all inputs: a partial sum may enter (R6)
    passes_gradient            backward passes the output's gradient on to its activations unchanged
    makes_weight_gradients     backward writes parameter gradients as new tensors; else it accumulates them into the gradient buffer
    settings  arguments of the torch function (stride, padding, window ...)
    layer     group for pipelines and reports ("encoder.3"); in a decoder embedding, layer or head; "" for none
    group     operator set for selective recomputation

    operands  inputs, then the output, in the order of `Data.of`
    """

    name: str
    kind: str
    dims: Mapping[str, int]
    inputs: tuple[Operand, ...]
    output: Operand
    forward: tuple[Work, ...] = ()
    backward: tuple[Work, ...] = ()
    traffic: tuple[OwnTraffic, ...] = ()
    roles: DimRoles = NO_ROLES
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
    operands: tuple[Operand, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "operands", (*self.inputs, self.output))
        for name, size in self.dims.items():
            if isinstance(size, int) and not isinstance(size, bool) and size >= 1:
                continue
            if not (isinstance(size, float | Fraction) and 0 < size < inf):  # mean rows of an expert, a share of a token
                raise InputError(f"operator {self.name}: dim {name}={size}: must be a whole number of at least 1; correct the shape")
        for operand in self.operands:
            named = (*filter(None, operand.dims),)
            for dim in named:
                if dim not in self.dims:
                    raise InputError(f"operator {self.name}: operand {operand.tensor} has dim {dim!r}: not a dim of the operator; add it")
            if len(set(named)) != len(named):
                raise InputError(f"operator {self.name}: operand {operand.tensor} has dims={operand.dims}: each may occur once; rename one")
        roles = self.roles
        for dim in chain(roles.sums, roles.unsplit, roles.padded, roles.logical, roles.per_sample, roles.per_token, roles.stretched):
            if dim not in self.dims:
                raise InputError(f"operator {self.name}: dim {dim!r}: not a dim of the operator; add it")
        for dim in roles.sums:
            if dim in self.output.dims:
                raise InputError(f"operator {self.name}: dim {dim!r} is summed over and in the output; leave it out of one")
        for data in (*self.saved, *self.scratch):
            if data.of is not None and not 0 <= data.of <= len(self.inputs):
                raise InputError(f"operator {self.name}: keeps operand {data.of}: has {len(self.inputs)} inputs and the output; name one")
        sized: tuple[Data | OwnTraffic, ...] = (*self.traffic, *self.saved, *self.scratch)
        for extent in chain(map(attrgetter("extent"), sized), *map(extents_of, (*self.forward, *self.backward))):
            for size, dim in extent:
                if dim and dim not in self.dims:
                    raise InputError(f"operator {self.name}: an extent has dim {dim!r}: not a dim of the operator; add it")
                if size <= 0:
                    raise InputError(f"operator {self.name}: an extent has size {size}: must be positive; correct the shape")

    @property
    def name_in_layer(self) -> str:
        """Name without the layer prefix: q_proj of `layer3.q_proj`."""
        return self.name.removeprefix(f"{self.layer}.")

    @property
    def is_product(self) -> bool:
        """Whether the forward pass has a matrix product."""
        return Product in map(type, self.forward)

    @property
    def is_attention(self) -> bool:
        """Whether the forward pass is fused attention."""
        return FusedAttention in map(type, self.forward)

    @property
    def kept(self) -> tuple[str, ...]:
        """Names of the inputs and the output that are saved for backward."""
        return tuple(self.operands[data.of].tensor for data in self.saved if data.of is not None)

    def streams(self, operand: Operand) -> bool:
        """Return whether remote shards of the operand are processed block by block: the operator holds only its own rank's."""
        return operand in map(self.inputs.__getitem__, self.streamed)

    def logical_name(self, dim: str) -> str:
        return self.roles.logical.get(dim, dim)

    def size(self, dims: tuple[str, ...]) -> int:
        """Return the elements over these dims; in a decoder's graph for one sequence."""
        return prod(self.dims[name] for name in dims)

    @property
    def flops(self) -> float:
        """FLOPs of the forward pass, a multiply-add as 2; fused attention with its causal share. [FLOP]"""
        return float(sum(quantity.at(1) for quantity in self.flops_by_length))

    @property
    def flops_by_length(self) -> tuple[ByLength, ...]:
        """FLOPs of each work as functions of the sequence length. [FLOP]"""
        return tuple(flops_of(work, self.roles.per_token) for work in self.forward)


# --- graphs ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightCasts:
    """Memory traffic per element for low-precision copies of a weight. [byte]

    all_copies   a pass that writes every copy
    one_copy     a pass that writes the copy of one operand order, as a forward pass needs it
    update       traffic after the optimizer's pass, per updated element
    """

    all_copies: float = 0.0
    one_copy: float = 0.0
    update: float = 0.0


#: For a tensor that no recipe casts, or whose casts are part of its readers' work.
NO_CASTS = WeightCasts()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A tensor at full size; that of one sequence where the batch is a quantity of the plan.

    itemsize   bytes of an element; 0: given by the job
    num_rows   of a parameter: leading positions that form dim 0 of the stored matrix, the dim that ZeRO shards
    bias_of    of a bias: the product to whose output it is added
    part       of a parameter: class for weight formats (`quantization.py`)
    is_stored  materialised in memory; else only a value inside a fused kernel
    tokens_at_once   tokens of a sequence stored at the same time, in a graph of one token; 0: all
    copies     multiplicity of rows, where only one copy per destination is sent; None: all copies are sent
    exchanged  of an all-to-all: traffic of the busiest chip over the local buffer of a chip
    is_counted the split sizes are known on the chips only: the host waits for them before the exchange
    is_set     rows in any order, with the order stored separately: the set of rows on a chip matters, not their chunk
    copy_bytes   of a parameter: bytes per element of its low-precision copies, less those that replace the 16-bit weight
    gathered_bytes   of a parameter: bytes per element in the all-gather; 0: as stored
    casts      of a parameter: traffic of its low-precision copies, once a step or at each all-gather
    sent_bytes, sent_gradient_bytes   of an activation and its gradient: bytes per element sent; 0: as stored
    has_gradient   backward computes its gradient: a trained parameter, or an activation that depends on one (`freezing.py`)
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
    """Operators that run `count` times in sequence.

    layer    their `Operator.layer`
    carried  tensor that a run reads from the previous run. The first run reads its predecessor in the same layout, and the successor
             reads the last run: the boundaries are identity operators
    turn     repeats with the same name alternate, in proportion to their counts; "": one repeat after the other
    """

    layer: str
    count: int
    carried: str
    turn: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """The operators of one layer, which the graph runs `count` times.

    is_block       of a `Repeat`, or one of `Graph.blocks`: the unit of recomputation, launching and gathering in frameworks
    carried, turn  of the repeat; "" for a layer that runs once
    host_layers    number of transformer layers that a block counts as, where the host synchronises per layer
    """

    name: str
    count: int = 1
    is_block: bool = False
    carried: str = ""
    turn: str = ""
    host_layers: float = 1.0


def regions_of(layers: Iterable[str], repeats: Iterable[Repeat], blocks: Mapping[str, float] | None = None) -> tuple[Region, ...]:
    """Return the regions in the order of their first operators."""
    blocks = blocks or {}
    regions: dict[str, Region] = {}
    for name in layers:
        regions[name] = Region(name=name, is_block=name in blocks, host_layers=blocks.get(name, 1.0))
    for repeat in repeats:
        if repeat.layer in regions:
            regions[repeat.layer] = Region(name=repeat.layer, count=repeat.count, is_block=True, carried=repeat.carried, turn=repeat.turn)
    return tuple(regions.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """Operators in execution order, and the tensors by name; backward follows. A tensor without a producer is an input or a parameter.

    batch    samples of a microbatch; 0: a quantity of the plan, and sizes are those of one sequence
    repeats  layers that stand for several; operators outside them run once
    blocks   layers that run once but are blocks -> `Region.host_layers`
    compute_bytes   bytes of an activation element by default; 0: as of the tensor between repeated layers
    regions  the layers, in order
    boundary the tensor between repeated layers; "" in a graph without them
    activation_bytes   default bytes of an activation element
    sets     names of the tensors that are sets of rows
    trained  names of the parameters with gradients; activations_with_gradient: of the activations with gradients
    loss     the operator that ends the step, if named
    tied     parameters that several layers read
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
    boundary: str = field(init=False, repr=False, compare=False)
    activation_bytes: float = field(init=False, repr=False, compare=False)
    sets: set[str] = field(init=False, repr=False, compare=False, default_factory=set)
    trained: set[str] = field(init=False, repr=False, compare=False, default_factory=set)
    activations_with_gradient: set[str] = field(init=False, repr=False, compare=False, default_factory=set)
    _made: dict[str, int] = field(init=False, repr=False, compare=False, default_factory=dict)
    _read: dict[str, list[tuple[int, int]]] = field(init=False, repr=False, compare=False, default_factory=dict)
    _consumers: dict[str, list[tuple[Operator, int]]] = field(init=False, repr=False, compare=False, default_factory=dict)
    _layers: dict[str, list[Operator]] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        for name, tensor in self.tensors.items():
            if tensor.has_gradient and tensor.role is not TensorRole.INDEX:
                (self.trained if tensor.role is TensorRole.PARAMETER else self.activations_with_gradient).add(name)
            if tensor.is_set:
                self.sets.add(name)
        names: set[str] = set()
        for index, operator in enumerate(self.operators):
            if operator.name in names:
                raise InputError(f"operator {operator.name}: occurs twice; rename one")
            names.add(operator.name)
            self._layers.setdefault(operator.layer, []).append(operator)
            for operand in operator.operands:
                if operand.tensor not in self.tensors:
                    raise InputError(f"operator {operator.name}: tensor {operand.tensor!r} is not in the graph; declare it")
                shape = self.tensors[operand.tensor].shape
                if len(shape) != len(operand.dims):
                    raise InputError(
                        f"operator {operator.name}: operand {operand.tensor} has dims={operand.dims}: must be one for each position of "
                        f"shape {shape}"
                    )
            if operator.output.tensor in self._made:
                raise InputError(f"operator {operator.name}: output {operator.output.tensor!r} is made twice; rename one")
            for position, operand in enumerate(operator.inputs):
                self._read.setdefault(operand.tensor, []).append((index, position))
                self._consumers.setdefault(operand.tensor, []).append((operator, position))
            self._made[operator.output.tensor] = index
        for name, ((first, _), *_) in self._read.items():
            if first <= self._made.get(name, -1):
                raise InputError(f"operator {self.operators[first].name}: input {name!r} is made after it; put its producer first")
        for repeat in self.repeats:
            if repeat.carried not in self.tensors:
                raise InputError(f"repeat of {repeat.layer}: tensor {repeat.carried!r} is not in the graph; declare it")
        object.__setattr__(self, "regions", regions_of(self._layers, self.repeats, self.blocks))
        object.__setattr__(self, "boundary", self.repeats[0].carried if self.repeats else "")
        between = self.boundary or (self.operators[-1].output.tensor if self.operators else "")
        object.__setattr__(self, "activation_bytes", self.compute_bytes or (self.tensors[between].itemsize if between else 0.0))

    # --- edges ----------------------------------------------------------------------------------------------

    def producers(self) -> Mapping[str, int]:
        """Return tensor -> index of its producer."""
        return self._made

    def readers(self) -> Mapping[str, list[tuple[int, int]]]:
        """Return tensor -> (operator, input) of each reader, in order."""
        return self._read

    def shared(self) -> Mapping[str, list[tuple[int, int]]]:
        """Return the readers of the produced tensors with several readers, in the order of the first read."""
        return {tensor: readers for tensor, readers in self._read.items() if len(readers) > 1 and tensor in self._made}

    def with_itemsizes(self, *, activation: float, parameter: float, **changes: Any) -> Graph:
        """Return the graph with element sizes filled in where a tensor has none, and other fields changed."""
        of_role = {TensorRole.ACTIVATION: activation, TensorRole.PARAMETER: parameter, TensorRole.INDEX: INDEX_BYTES}
        tensors = {
            name: tensor if tensor.itemsize else replace(tensor, itemsize=of_role[tensor.role]) for name, tensor in self.tensors.items()
        }
        return replace(self, tensors=tensors, **changes)

    def operators_of(self, layer: str) -> list[Operator]:
        """Return the operators of a layer or region by name."""
        return self._layers.get(layer, [])

    def producer(self, tensor: str) -> Operator | None:
        index = self._made.get(tensor)
        return None if index is None else self.operators[index]

    def consumers(self, tensor: str) -> list[tuple[Operator, int]]:
        """Return the operators that read a tensor, each with its input position."""
        return self._consumers.get(tensor, [])

    def operator(self, name: str) -> Operator:
        for operator in self.operators:
            if operator.name == name:
                return operator
        raise InputError(f"graph {self.name}: no operator {name!r}")

    # --- repeats --------------------------------------------------------------------------------------------

    def count(self, layer: str) -> int:
        """Return the number of runs of a layer's operators."""
        return next((repeat.count for repeat in self.repeats if repeat.layer == layer), 1)

    def extent(self, operand: Operand) -> Extent:
        """Return all elements of the operand's tensor, including positions without a dim of the operator."""
        return tuple(zip(self.tensors[operand.tensor].shape, operand.dims, strict=True))

    def itemsize(self, operator: Operator, data: Data) -> float:
        """Return the bytes of an element that an operator reads, writes or saves."""
        if data.itemsize or data.of is None:
            return data.itemsize or self.activation_bytes
        return self.tensors[operator.operands[data.of].tensor].itemsize

    # --- sizes ----------------------------------------------------------------------------------------------

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return tuple(tensor for tensor in self.tensors.values() if tensor.role is TensorRole.PARAMETER)

    @property
    def num_parameters(self) -> int:
        if not self.repeats:
            return sum(tensor.num_elements for tensor in self.parameters)
        return self._number_of(self.parameters)

    @property
    def num_trained_parameters(self) -> int:
        """Number of parameters with gradients."""
        return self._number_of(tensor for tensor in self.parameters if tensor.has_gradient)

    @property
    def num_frozen_in_products(self) -> int:
        """Number of frozen parameters that products read."""
        frozen = [tensor for tensor in self.tensors.values() if tensor.role is TensorRole.PARAMETER and not tensor.has_gradient]
        if not frozen:
            return 0
        return self._number_of(tensor for tensor in frozen if any(reader.is_product for reader, _ in self.consumers(tensor.name)))

    def _number_of(self, parameters: Iterable[Tensor]) -> int:
        """Return the elements of parameters in all runs of the first layers that read them."""
        reading = ((tensor.num_elements, self.consumers(tensor.name)[:1]) for tensor in parameters)
        return sum(self.count(reader.layer) * number for number, readers in reading for reader, _ in readers)

    @property
    def flops(self) -> float:
        """FLOPs of one forward pass. [FLOP]"""
        return sum(self.count(operator.layer) * operator.flops for operator in self.operators)

    @property
    def flops_by_length(self) -> tuple[ByLength, ...]:
        """FLOPs of one forward pass as functions of the sequence length, in a graph of one token. [FLOP]"""
        return tuple(quantity.times(self.count(op.layer)) for op in self.operators for quantity in op.flops_by_length if quantity.base)
