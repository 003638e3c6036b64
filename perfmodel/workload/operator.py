"""Operators as computations over named iteration dims, and the tensors that they own a part of.

`q_proj: x[b,s,h] * W[g,r,d,h] -> q[b,s,g,r,d]`. A tensor is known to an operator by the operator's own dim names, one for
each position (DESIGN.md section 1; rules R5, R6, R12, R13, R15 and R16 of the sharding algebra): the same position may be
`s` where a tensor is made and `z` (key position) where it is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import prod

from perfmodel.foundation.errors import InputError
from perfmodel.workload.causal import ALL_BEFORE, CausalMask


class OperatorKind(StrEnum):
    EINSUM = "einsum"
    """One product term of two operands; dims of both operands that the output lacks are summed over."""
    STREAM = "stream"
    """Elementwise or normalising: time is memory traffic."""
    ADD = "add"
    """A sum of its operands: linear in all of them."""
    ATTENTION = "attention"
    """A fused attention kernel: q, k, v in, output and log-sum-exp out."""
    EMBEDDING = "embedding"
    CROSS_ENTROPY = "cross_entropy"
    IDENTITY = "identity"
    """No work: a place where a layout is required (block boundaries, pipeline cuts)."""


class Pass(StrEnum):
    FORWARD = "forward"
    BACKWARD = "backward"


class TensorRole(StrEnum):
    ACTIVATION = "activation"
    PARAMETER = "parameter"
    INDEX = "index"
    """Token ids, positions: no gradient (R13)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dim:
    """One iteration dim of an operator.

    logical     the name that rule sets know it by: it belongs to the operator, not to the tensor (R16)
    per_sample  counts sequences: its size is the (micro)batch, a quantity of the plan, and `size` is 1
    stretched   a dim of size 1 of which each shard holds a whole copy (the weight form of grouped-query attention)
    padded      uneven shards are padded (vocabulary); other dims must divide
    """

    name: str
    size: int
    logical: str
    per_sample: bool = False
    stretched: bool = False
    padded: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """A tensor as an operator sees it: the operator's dim name at each of the tensor's positions."""

    tensor: str
    dims: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """num_rows: leading positions that form dim 0 of the stored matrix (parameters only), the composite dim that ZeRO cuts."""

    name: str
    role: TensorRole
    itemsize: float
    num_rows: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """Something that autograd keeps for backward: an operand, the output, or an extra of `itemsize` bytes an element.

    what      "input" (with index), "output", "mask" (an extra with the output's shape) or "statistics" (one element a row of
              the named dims)
    """

    what: str
    index: int = 0
    itemsize: float = 0.0
    dims: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One operator, forward; what its backward does follows from its kind.

    region         embedding, layer or head
    kernel_class   the class of kernel whose measured rates hold for it
    saved          what autograd keeps of it for backward
    group          the set of operators that selective recomputation speaks of
    causal         which scores attention computes; a fused attention kernel alone reads it
    reduced_dims   dims that it sums or normalises over without being a product (softmax, attention, norms)
    """

    name: str
    kind: OperatorKind
    region: str
    dims: tuple[Dim, ...]
    inputs: tuple[Operand, ...]
    output: Operand
    kernel_class: str
    saved: tuple[Saved, ...] = ()
    group: str = ""
    causal: CausalMask = ALL_BEFORE
    reduced_dims: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = [dim.name for dim in self.dims]
        if len(set(names)) != len(names):
            raise InputError(f"operator {self.name}: dims={names}: each name may occur once; rename one")
        for operand in (*self.inputs, self.output):
            for dim in operand.dims:
                if dim not in names:
                    raise InputError(f"operator {self.name}: operand {operand.tensor} has dim {dim!r}: not a dim of the operator; add it")
            if len(set(operand.dims)) != len(operand.dims):
                raise InputError(f"operator {self.name}: operand {operand.tensor} has dims={operand.dims}: each may occur once; rename one")
        padded = [dim.name for dim in self.dims if dim.padded]
        if len(padded) > 1:
            raise InputError(f"operator {self.name}: padded dims={padded}: at most one may be padded; let the others divide")
        if self.kind is OperatorKind.EINSUM and len(self.inputs) != 2:
            raise InputError(f"operator {self.name}: an einsum has {len(self.inputs)} operands: must be one product of two; split it")

    def dim(self, name: str) -> Dim:
        for dim in self.dims:
            if dim.name == name:
                return dim
        raise InputError(f"operator {self.name}: no dim {name!r}")

    @property
    def is_linear(self) -> bool:
        """A partial sum may enter (R6)."""
        return self.kind in (OperatorKind.ADD, OperatorKind.IDENTITY)

    def size(self, dims: tuple[str, ...]) -> int:
        """Elements over these dims, for one sequence."""
        return prod(self.dim(name).size for name in dims)


REGIONS = ("embedding", "layer", "head")


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """Forward operators in order, of one embedding, one layer (repeated) and one head; backward is derived from them.

    carried: (tensor that a layer leaves, tensor that the next layer reads). The first layer reads what the embedding leaves, the
    head what the last layer leaves, in the same layout: block boundaries are identity operators.
    """

    name: str
    operators: tuple[Operator, ...]
    tensors: dict[str, Tensor]
    num_layers: int
    boundary: str
    tied: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        made: set[str] = set()
        for operator in self.operators:
            if operator.region not in REGIONS:
                raise InputError(f"operator {operator.name}: region={operator.region}: must be one of {', '.join(REGIONS)}")
            for operand in (*operator.inputs, operator.output):
                if operand.tensor not in self.tensors:
                    raise InputError(f"operator {operator.name}: tensor {operand.tensor!r} is not in the graph; declare it")
            for operand in operator.inputs:
                if self.tensors[operand.tensor].role is TensorRole.ACTIVATION and operand.tensor not in made:
                    raise InputError(
                        f"operator {operator.name}: input {operand.tensor!r} is made by no operator before it; put its producer first"
                    )
            if operator.output.tensor in made:
                raise InputError(f"operator {operator.name}: output {operator.output.tensor!r} is made twice; rename one")
            made.add(operator.output.tensor)

    def consumers(self, tensor: str) -> list[tuple[Operator, int]]:
        return [(op, i) for op in self.operators for i, operand in enumerate(op.inputs) if operand.tensor == tensor]

    def producer(self, tensor: str) -> Operator | None:
        for operator in self.operators:
            if operator.output.tensor == tensor:
                return operator
        return None
