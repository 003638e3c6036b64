"""Any network as a training step: operators over named dims, with their work, their own traffic and what they keep for backward.

An operator describes itself completely; nothing elsewhere looks at its kind to price it. So a new kind of operator is one function in one
file that returns a `NetworkOperator` (`kinds/`); only running it with torch needs a second one, of the same name.

A configuration of an operator puts mesh axes on its dims. What follows (rules R3 and R4 of the sharding algebra):

- an input is needed cut where the operator cuts a dim that the input names, whole elsewhere;
- the output is left cut likewise, and partial on the axes of `sums` dims (plainly summed over: it lacks them);
- an input's gradient leaves backward partial on every axis that cuts a dim which the input lacks.

The last makes the gradient of a weight partial on the axes of the batch: data parallelism needs no rule of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.foundation.errors import InputError
from perfmodel.workload.operator import Operand, Pass, TensorRole

#: (size, dim that cuts it) for each factor of a number of elements; "" where nothing cuts it: a window, a gate, a joined dim.
Extent = tuple[tuple[int, str], ...]

Setting = int | float | str | bool | tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A batch of matrix products [m, k] x [k, n], `repeats` times one after another (time steps).

    tensors   of a convolution: input, weight and output as they lie in memory (m x k holds an entry of the input once for every window)
    """

    batch: Extent = ()
    m: Extent = ()
    n: Extent = ()
    k: Extent = ()
    repeats: int = 1
    tensors: tuple[Extent, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """A pass over memory: `elements` of its output, and one extent for each tensor read or written.

    kernel  the class of its efficiency (`hardware.calibration.KernelClass`)
    """

    kernel: str
    elements: Extent
    accesses: tuple[Extent, ...]
    repeats: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedAttention:
    """A fused attention kernel. `causal_fraction`: the share of the scores that is computed."""

    batch: Extent
    heads: Extent
    kv_heads: Extent
    queries: Extent
    keys: Extent
    head_dim: int
    causal_fraction: float = 1.0


Work = Product | Stream | FusedAttention


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


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkTensor:
    """Shape at full size. Indices have 8 bytes an element and no gradient; the itemsize of the others is the job's."""

    name: str
    shape: tuple[int, ...]
    role: TensorRole = TensorRole.ACTIVATION

    @property
    def num_elements(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkOperator:
    """One operator.

    kind      what it is called; the executor finds the torch function by it
    dims      size of each iteration dim, the batch first; the order is that in which axes are placed (`parallel/per_operator/plan.py`)
    inputs    tensors read, parameters among them: the dim at each position, "" where the position must be whole
    output    the tensor written
    forward, backward   work of each pass. Gradients of several readers are added by the cost model, not here
    traffic   collectives of its own
    sums      dims that the output lacks and that are summed plainly: cutting them leaves the output partial
    whole     dims that no axis may cut
    padded    dims whose shards may be uneven (a vocabulary); the parts of other dims divide every size that they cut
    saved     elements kept for backward, each extent once, in the layout of the operator; parameters are not among them
    kept      which of the inputs and the output are among `saved`, each as the extent of its shape and dims; the rest are extras
    settings  what the torch function needs (stride, padding, window ...)
    layer     a group that pipelines and reports know it by ("encoder.3"); "" for none
    """

    name: str
    kind: str
    dims: Mapping[str, int]
    inputs: tuple[Operand, ...]
    output: Operand
    forward: tuple[Work, ...]
    backward: tuple[Work, ...]
    traffic: tuple[OwnTraffic, ...] = ()
    sums: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    padded: tuple[str, ...] = ()
    saved: tuple[Extent, ...] = ()
    kept: tuple[str, ...] = ()
    settings: Mapping[str, Setting] = field(default_factory=dict)
    layer: str = ""

    def __post_init__(self) -> None:
        for name, size in self.dims.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise InputError(f"operator {self.name}: dim {name}={size}: must be a whole number of at least 1; correct the shape")
        for operand in (*self.inputs, self.output):
            named = [dim for dim in operand.dims if dim]
            for dim in named:
                if dim not in self.dims:
                    raise InputError(f"operator {self.name}: operand {operand.tensor} has dim {dim!r}: not a dim of the operator; add it")
            if len(set(named)) != len(named):
                raise InputError(f"operator {self.name}: operand {operand.tensor} has dims={operand.dims}: each may occur once; rename one")
        for dim in (*self.sums, *self.whole, *self.padded):
            if dim not in self.dims:
                raise InputError(f"operator {self.name}: dim {dim!r}: not a dim of the operator; add it")
        for tensor in self.kept:
            if tensor not in (self.output.tensor, *(operand.tensor for operand in self.inputs)):
                raise InputError(f"operator {self.name}: keeps {tensor!r}: is neither an input nor the output; name one of them")
        for dim in self.sums:
            if dim in self.output.dims:
                raise InputError(f"operator {self.name}: dim {dim!r} is summed over and in the output; leave it out of one")
        for extent in self._extents():
            for size, dim in extent:
                if dim and dim not in self.dims:
                    raise InputError(f"operator {self.name}: an extent has dim {dim!r}: not a dim of the operator; add it")
                if size < 1:
                    raise InputError(f"operator {self.name}: an extent has size {size}: must be at least 1; correct the shape")

    def _extents(self) -> list[Extent]:
        found = [traffic.extent for traffic in self.traffic] + list(self.saved)
        for work in (*self.forward, *self.backward):
            match work:
                case Product():
                    found += [work.batch, work.m, work.n, work.k, *work.tensors]
                case Stream():
                    found += [work.elements, *work.accesses]
                case FusedAttention():
                    found += [work.batch, work.heads, work.kv_heads, work.queries, work.keys]
        return found

    @property
    def flops(self) -> float:
        """Products of the forward pass, a multiply-add as 2; fused attention with its causal share. [FLOP]"""
        total = 0.0
        for work in self.forward:
            match work:
                case Product():
                    total += 2.0 * work.repeats * _count(work.batch) * _count(work.m) * _count(work.n) * _count(work.k)
                case FusedAttention():
                    scores = _count(work.batch) * _count(work.heads) * _count(work.queries) * _count(work.keys)
                    total += 4.0 * scores * work.head_dim * work.causal_fraction
        return total


def _count(extent: Extent) -> float:
    return float(prod(size for size, _ in extent))


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Operators in an order of execution; the tensors by name. A tensor that no operator writes is an input or a parameter."""

    name: str
    operators: tuple[NetworkOperator, ...]
    tensors: Mapping[str, NetworkTensor]
    batch: int
    source: str = ""

    def __post_init__(self) -> None:
        made: set[str] = set()
        names: set[str] = set()
        produced = {operator.output.tensor for operator in self.operators}
        for operator in self.operators:
            if operator.name in names:
                raise InputError(f"operator {operator.name}: occurs twice; rename one")
            names.add(operator.name)
            for operand in (*operator.inputs, operator.output):
                tensor = self.tensors.get(operand.tensor)
                if tensor is None:
                    raise InputError(f"operator {operator.name}: tensor {operand.tensor!r} is not in the network; declare it")
                if len(tensor.shape) != len(operand.dims):
                    raise InputError(
                        f"operator {operator.name}: operand {operand.tensor} has dims={operand.dims}: must be one for each position of "
                        f"shape {tensor.shape}"
                    )
            if operator.output.tensor in made:
                raise InputError(f"operator {operator.name}: output {operator.output.tensor!r} is made twice; rename one")
            early = [operand.tensor for operand in operator.inputs if operand.tensor in produced and operand.tensor not in made]
            if early:
                raise InputError(f"operator {operator.name}: input {early[0]!r} is made after it; put its producer first")
            made.add(operator.output.tensor)

    def producers(self) -> dict[str, int]:
        """Tensor -> index of the operator that writes it."""
        return {operator.output.tensor: index for index, operator in enumerate(self.operators)}

    def readers(self) -> dict[str, list[tuple[int, int]]]:
        """Tensor -> (operator, input) of each reader, in order."""
        found: dict[str, list[tuple[int, int]]] = {}
        for index, operator in enumerate(self.operators):
            for position, operand in enumerate(operator.inputs):
                found.setdefault(operand.tensor, []).append((index, position))
        return found

    @property
    def layer_parameters(self) -> dict[str, int]:
        """Elements of the parameters that each layer is the first to read."""
        found: dict[str, int] = {}
        seen: set[str] = set()
        for operator in self.operators:
            for operand in operator.inputs:
                tensor = self.tensors[operand.tensor]
                if tensor.role is TensorRole.PARAMETER and tensor.name not in seen:
                    seen.add(tensor.name)
                    found[operator.layer] = found.get(operator.layer, 0) + tensor.num_elements
        return found

    @property
    def parameters(self) -> tuple[NetworkTensor, ...]:
        return tuple(tensor for tensor in self.tensors.values() if tensor.role is TensorRole.PARAMETER)

    @property
    def num_parameters(self) -> int:
        return sum(tensor.num_elements for tensor in self.parameters)

    @property
    def flops(self) -> float:
        """Of one forward pass. [FLOP]"""
        return sum(operator.flops for operator in self.operators)


__all__ = [
    "CollectiveKind",
    "Extent",
    "FusedAttention",
    "Network",
    "NetworkOperator",
    "NetworkTensor",
    "Operand",
    "OwnTraffic",
    "Pass",
    "Product",
    "Setting",
    "Stream",
    "TensorRole",
    "Work",
]
