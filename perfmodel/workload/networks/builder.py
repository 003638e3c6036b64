"""Builder of networks: collects tensors and operators, and tracks shapes.

Dims of a tensor are names separated by spaces, one for each position: `b s d`. Parameters of operator `fc` are `fc.weight` and `fc.bias`,
its output is `fc.out`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from types import MappingProxyType

from perfmodel.foundation.errors import InputError
from perfmodel.workload.graph import Graph, Operand, Operator, Tensor, TensorRole
from perfmodel.workload.kinds.batch_norm import batch_norm
from perfmodel.workload.kinds.convolution import convolution
from perfmodel.workload.kinds.dense import einsum, elementwise, layer_norm, reduction, softmax
from perfmodel.workload.kinds.joining import concat
from perfmodel.workload.kinds.pooling import pooling
from perfmodel.workload.kinds.vocabulary import cross_entropy, embedding

Window = int | tuple[int, int]

MAX_OPERATORS = 10_000  # the largest built-in network has a fifth of them

_NOTHING: Mapping[str, int] = MappingProxyType({})


class NetworkBuilder:
    """Collector of operators. Every method adds operators and returns the output tensor of the last."""

    def __init__(self, name: str, *, batch: int, source: str) -> None:
        self.name = name
        self.batch = batch
        self.source = source
        self.layer = ""
        """Layer of the operators that follow."""
        self._operators: list[Operator] = []
        self._tensors: dict[str, Tensor] = {}
        self._made: set[str] = set()

    def build(self) -> Graph:
        return Graph(name=self.name, operators=tuple(self._operators), tensors=dict(self._tensors), batch=self.batch, source=self.source)

    # --- tensors --------------------------------------------------------------------------------------------

    def input(self, name: str, *shape: int, role: TensorRole = TensorRole.ACTIVATION) -> str:
        """Declare input data of the step; a second declaration has no effect."""
        return self._declare(name, shape, role)

    def parameter(self, name: str, *shape: int, rows: int = 1, bias_of: str = "") -> str:
        """Declare a parameter; a second declaration shares it. rows: leading positions that form dim 0 of the stored matrix."""
        return self._declare(name, shape, TensorRole.PARAMETER, rows, bias_of)

    def shape(self, tensor: str) -> tuple[int, ...]:
        return self._tensors[tensor].shape

    def _declare(self, name: str, shape: tuple[int, ...], role: TensorRole, rows: int = 1, bias_of: str = "") -> str:
        tensor = Tensor(name=name, shape=shape, role=role, num_rows=rows, bias_of=bias_of)
        if self._tensors.setdefault(name, tensor) != tensor:
            raise InputError(f"tensor {name}: shape={shape}: is declared already with {self._tensors[name].shape}; rename one")
        return name

    def add(self, operator: Operator, *shape: int) -> str:
        """Add any operator; `shape` is that of its output."""
        if len(self._operators) == MAX_OPERATORS:
            raise InputError(f"network {self.name}: has more than {MAX_OPERATORS:,} operators; use fewer layers or blocks")
        self._operators.append(operator)
        self._made.add(operator.output.tensor)
        return self._declare(operator.output.tensor, shape, TensorRole.ACTIVATION)

    def sizes(self, *operands: tuple[str, str], new: Mapping[str, int] = _NOTHING) -> dict[str, int]:
        """Return the size of each dim of (tensor, dims), then of the new ones; for an image h and w come before the channels."""
        known: dict[str, int] = {}
        for tensor, dims in operands:
            names = dims.split()
            if len(names) != len(self.shape(tensor)):
                raise InputError(f"tensor {tensor}: dims={dims!r}: must be one for each position of shape {self.shape(tensor)}")
            for name, size in zip(names, self.shape(tensor), strict=True):
                if known.setdefault(name, size) != size:
                    raise InputError(f"tensor {tensor}: dim {name} has size {size}: has size {known[name]} elsewhere; correct the shapes")
        sizes = known | dict(new)
        return {dim: sizes[dim] for dim in ("b", "h", "w")} | sizes if {"b", "h", "w"} <= set(sizes) else sizes

    # --- products -------------------------------------------------------------------------------------------

    def einsum(
        self, name: str, first: tuple[str, str], second: tuple[str, str], output: str, *, unsplit: str = "", padded: str = ""
    ) -> str:
        """Add a product of two tensors (name, dims). The output's dims are the operator's first dims."""
        sizes = self.sizes(first, second)
        order = dict.fromkeys(chain(output.split(), first[1].split(), second[1].split()))
        role = self._tensors[second[0]].role
        operator = einsum(
            name,
            _operand(*first),
            _operand(*second),
            _operand(f"{name}.out", output),
            {dim: sizes[dim] for dim in order},
            second_is_parameter=role is TensorRole.PARAMETER,
            first_has_gradient=first[0] in self._made,
            unsplit=tuple(unsplit.split()),
            padded=tuple(padded.split()),
            layer=self.layer,
        )
        return self.add(operator, *(sizes[dim] for dim in output.split()))

    def linear(
        self,
        name: str,
        x: str,
        dims: str,
        weight_dims: str,
        output: str,
        *,
        bias: bool = True,
        weight: str = "",
        unsplit: str = "",
        padded: str = "",
        new: Mapping[str, int] = _NOTHING,
    ) -> str:
        """Add x[dims] times a weight, plus a bias over the weight's dims that the output has; `new`: sizes of dims that x lacks.

        weight   name of a shared parameter; default: `name`.weight
        """
        sizes = self.sizes((x, dims), new=new)
        names = weight_dims.split()
        rows = next((i for i, dim in enumerate(names) if dim in dims.split()), len(names))
        matrix = self.parameter(weight or f"{name}.weight", *(sizes[dim] for dim in names), rows=max(1, rows))
        y = self.einsum(name, (x, dims), (matrix, weight_dims), output, unsplit=unsplit, padded=padded)
        if not bias:
            return y
        left = [dim for dim in weight_dims.split() if dim in output.split()]
        return self.bias(name, y, output, " ".join(left), unsplit=_only(unsplit, output), padded=_only(padded, output))

    def bias(self, name: str, x: str, dims: str, bias_dims: str, *, unsplit: str = "", padded: str = "") -> str:
        """Add x + `name`.bias, as operator `name`_bias."""
        sizes = self.sizes((x, dims))
        shape = [sizes[dim] for dim in bias_dims.split()]
        vector = self.parameter(f"{name}.bias", *shape, rows=len(shape), bias_of=name)
        return self.pointwise(f"{name}_bias", "bias", (x, dims), (vector, bias_dims), unsplit=unsplit, padded=padded)

    # --- elementwise operators and rows ---------------------------------------------------------------------

    def pointwise(self, name: str, function: str, *inputs: tuple[str, str], unsplit: str = "", padded: str = "") -> str:
        """Add function(inputs...), with the shape of the first input."""
        x, dims = inputs[0]
        operator = elementwise(
            name,
            function,
            tuple(_operand(*operand) for operand in inputs),
            _operand(f"{name}.out", dims),
            self.sizes(*inputs),
            unsplit=tuple(unsplit.split()),
            padded=tuple(padded.split()),
            layer=self.layer,
        )
        return self.add(operator, *self.shape(x))

    def layer_norm(self, name: str, x: str, dims: str, over: str, *, eps: float = 1e-5) -> str:
        sizes = self.sizes((x, dims))
        shape = [sizes[dim] for dim in over.split()]
        weight = _operand(self.parameter(f"{name}.weight", *shape), over)
        shift = _operand(self.parameter(f"{name}.bias", *shape), over)
        operator = layer_norm(name, _operand(x, dims), weight, shift, _operand(f"{name}.out", dims), sizes, eps=eps, layer=self.layer)
        return self.add(operator, *self.shape(x))

    def softmax(self, name: str, x: str, dims: str, over: str, *, scale: float = 1.0, causal_queries: str = "") -> str:
        output = _operand(f"{name}.out", dims)
        sizes = self.sizes((x, dims))
        operator = softmax(name, _operand(x, dims), output, sizes, over=over, scale=scale, causal_queries=causal_queries, layer=self.layer)
        return self.add(operator, *self.shape(x))

    def embedding(
        self,
        name: str,
        ids: str,
        dims: str,
        vocabulary: int,
        features: int,
        *,
        weight: str = "",
        feature_dim: str = "d",
        table_dim: str = "v",
    ) -> str:
        """Add a lookup of rows of a table (`name`.weight unless shared) at the indices ids[dims]."""
        table = self.parameter(weight or f"{name}.weight", vocabulary, features)
        output = f"{dims} {feature_dim}"
        sizes = self.sizes((ids, dims)) | {feature_dim: features, table_dim: vocabulary}
        rows = _operand(table, f"{table_dim} {feature_dim}")
        operator = embedding(name, _operand(ids, dims), rows, _operand(f"{name}.out", output), sizes, layer=self.layer)
        return self.add(operator, *self.shape(ids), features)

    def cross_entropy(self, logits: str, dims: str, over: str) -> str:
        """Add the loss of each row against `labels`."""
        rows = [name for name in dims.split() if name != over]
        sizes = self.sizes((logits, dims))
        labels = self.input("labels", *(sizes[name] for name in rows), role=TensorRole.INDEX)
        operator = cross_entropy(
            "loss",
            _operand(logits, dims),
            _operand(labels, " ".join(rows)),
            _operand("loss.out", " ".join(rows)),
            sizes,
            over=over,
            layer=self.layer,
        )
        return self.add(operator, *(sizes[name] for name in rows))

    # --- images: b c h w ------------------------------------------------------------------------------------

    def convolution(
        self,
        name: str,
        x: str,
        filters: int,
        window: Window,
        *,
        stride: Window = 1,
        padding: Window = 0,
        groups: int = 1,
        bias: bool = False,
    ) -> str:
        batch, channels, *_ = self.shape(x)
        weight = self.parameter(f"{name}.weight", filters, channels // groups, *_pair(window))
        operator = convolution(
            name,
            self._tensors[x],
            weight,
            f"{name}.out",
            filters=filters,
            window=_pair(window),
            stride=_pair(stride),
            padding=_pair(padding),
            groups=groups,
            first_has_gradient=x in self._made,
            layer=self.layer,
        )
        y = self.add(operator, batch, filters, operator.dims["h"], operator.dims["w"])
        return self.bias(name, y, "b c h w", "c") if bias else y

    def pooling(self, name: str, x: str, window: Window, *, stride: Window, padding: Window = 0, mode: str = "max") -> str:
        batch, channels, *_ = self.shape(x)
        operator = pooling(
            name,
            self._tensors[x],
            f"{name}.out",
            window=_pair(window),
            stride=_pair(stride),
            padding=_pair(padding),
            mode=mode,
            layer=self.layer,
        )
        return self.add(operator, batch, channels, operator.dims["h"], operator.dims["w"])

    def batch_norm(self, name: str, x: str, *, synchronised: bool = False, eps: float = 1e-5) -> str:
        channels = self.shape(x)[1]
        operator = batch_norm(
            name,
            _operand(x, "b c h w"),
            _operand(self.parameter(f"{name}.weight", channels), "c"),
            _operand(self.parameter(f"{name}.bias", channels), "c"),
            _operand(f"{name}.out", "b c h w"),
            self.sizes((x, "b c h w")),
            synchronised=synchronised,
            eps=eps,
            layer=self.layer,
        )
        return self.add(operator, *self.shape(x))

    def relu(self, name: str, x: str, dims: str = "b c h w") -> str:
        return self.pointwise(name, "relu", (x, dims))

    def concat(self, name: str, *parts: str) -> str:
        """Add the concatenation of images along the channels."""
        batch, _, height, width = self.shape(parts[0])
        dims = ("b", "", "h", "w")
        channels = tuple(self.shape(part)[1] for part in parts)
        operator = concat(
            name,
            tuple(Operand(tensor=part, dims=dims) for part in parts),
            Operand(tensor=f"{name}.out", dims=dims),
            {"b": batch, "h": height, "w": width},
            axis=1,
            sizes=channels,
            layer=self.layer,
        )
        return self.add(operator, batch, sum(channels), height, width)

    def mean(self, name: str, x: str, dims: str, output: str) -> str:
        sizes = self.sizes((x, dims))
        operator = reduction(name, _operand(x, dims), _operand(f"{name}.out", output), sizes, layer=self.layer)
        return self.add(operator, *(sizes[dim] for dim in output.split()))


def _operand(tensor: str, dims: str) -> Operand:
    return Operand(tensor=tensor, dims=tuple(dims.split()))


def _pair(value: Window) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else value


def _only(names: str, output: str) -> str:
    left: Sequence[str] = output.split()
    return " ".join(name for name in names.split() if name in left)
