"""Rewrite of the graph for adapter training: low-rank products next to linear operators with frozen weights.

    y = W x + s B A x        A[r, in], B[out, r], s = alpha / r
    y = W x + (c - 1) W x + c s B A x,   c = m / |W + s B A|        DoRA: m[out] is trained, |.| the norm of each row

Each forward pass computes the norm by the product B A and passes over the matrix. Backward treats it as a constant (DoRA, section 4.3).
Both products with c save their input for the gradient of m.

Sources: LoRA, Hu et al., arXiv 2106.09685, section 4.1; QLoRA, Dettmers et al., arXiv 2305.14314, sections 3 and 4; DoRA, Liu et al.,
arXiv 2402.09353, with the passes of PEFT 0.19, tuners/lora/dora.py. Not modelled: dropout before A (0 by default in PEFT and NeMo), and the
identity matrix with which PEFT multiplies to get B A.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from perfmodel.workload.config import TransformerConfig
from perfmodel.workload.freezing import with_frozen
from perfmodel.workload.graph import Graph, Operand, Operator, Region, Tensor, TensorRole
from perfmodel.workload.kinds.dense import einsum, elementwise
from perfmodel.workload.training import Training, is_linear_name
from perfmodel.workload.transformer import decoder_regions
from perfmodel.workload.unroll import with_first_run_apart
from perfmodel.workload.work import Data, Extent, Product, Stream, Work, extent

#: Layer that is the first run of the repeated one: below its first adapter there is no backward.
FIRST = "first_layer"
_RANK = "rank"
#: Halves of a gated product of experts, each with its own matrices (`decoder/experts.py`).
_HALVES = "y"
#: alpha / r, as in NeMo's recipes; no cost depends on it.
SCALE = 2.0


def with_training(graph: Graph, training: Training) -> Graph:
    """Return a decoder's graph, folded or unrolled, rewritten for the training method."""
    if training.is_full:
        return graph
    # With several kinds of layers the first run equals the others. This counts a gradient of its input that nothing needs.
    apart = with_first_run_apart(graph, FIRST) if len(graph.repeats) == 1 else graph
    adapted = _with_adapters(apart, training)
    frozen = with_frozen(adapted, trained=adapted.tensors.keys() - apart.tensors.keys())
    stored = _with_quantized_base(frozen, training) if training.quantizes_base else frozen
    return _with_idle_adapters(stored, training) if training.num_adapters > 1 else stored


def regions_in_training(model: TransformerConfig, training: Training) -> tuple[Region, ...]:
    """Return `Graph.regions` of the graph that `with_training` would build, without building it."""
    regions = decoder_regions(model)
    if training.is_full or len(model.layer_kinds) > 1:
        return regions
    adapted_regions: list[Region] = []
    for region in regions:
        if region.carried:
            adapted_regions.append(replace(region, name=FIRST, count=1, carried=f"{FIRST}.{region.carried}"))
        if region.count > 1 or not region.carried:
            adapted_regions.append(replace(region, count=region.count - 1) if region.carried else region)
    return tuple(adapted_regions)


# --- adapters -------------------------------------------------------------------------------------------------------


def _is_linear_layer(operator: Operator, graph: Graph) -> bool:
    """Return whether the operator multiplies by its own parameter matrix, in a layer that is a block, so that it may have an adapter."""
    return (
        operator.kind == "einsum"
        and is_linear_name(operator.name_in_layer)
        and any(region.is_block and region.name == operator.layer for region in graph.regions)
        and graph.tensors[operator.inputs[1].tensor].role is TensorRole.PARAMETER
    )


def _with_adapters(graph: Graph, training: Training) -> Graph:
    operators: list[Operator] = []
    tensors = dict(graph.tensors)
    waiting: dict[str, _Adapter] = {}
    for operator in graph.operators:
        if _is_linear_layer(operator, graph) and training.adapts(operator.name_in_layer):
            # The adapter is added to the output of the linear operator, or of the bias after it.
            end, readers = operator, graph.consumers(operator.output.tensor)
            if len(readers) == 1 and any(graph.tensors[operand.tensor].bias_of == operator.name for operand in readers[0][0].inputs):
                end = readers[0][0]
            adapter = _Adapter(graph=graph, operator=operator, end=end, rank=training.rank, decomposes=training.decomposes)
            waiting[end.name] = adapter
            if training.decomposes:
                operator = replace(operator, forward=(*operator.forward, *adapter.norm()))
        adapter_here = waiting.pop(operator.name, None)
        if adapter_here is None:
            operators.append(operator)
            continue
        base = replace(operator.output, tensor=f"{operator.name}.base")
        tensors[base.tensor] = replace(tensors[operator.output.tensor], name=base.tensor)
        operators += [replace(operator, output=base), *adapter_here.operators(base)]
        tensors |= {tensor.name: tensor for tensor in adapter_here.tensors()}
    return replace(graph, operators=tuple(operators), tensors=tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Adapter:
    """Adapter of a linear operator.

    end   operator to whose output the adapter's output is added
    """

    graph: Graph
    operator: Operator
    end: Operator
    rank: int
    decomposes: bool

    @property
    def x(self) -> Operand:
        return self.operator.inputs[0]

    @property
    def batch(self) -> tuple[str, ...]:
        """Dims shared by the input, the matrix and the output: experts."""
        return tuple(dim for dim in self.operator.inputs[1].dims if dim in self.x.dims and dim in self.operator.output.dims)

    @property
    def halves(self) -> tuple[str, ...]:
        return (_HALVES,) if _HALVES in self.operator.inputs[1].dims else ()

    @property
    def is_grouped(self) -> bool:
        return any(isinstance(work, Product) and work.is_grouped for work in self.operator.forward)

    @property
    def inner(self) -> Operand:
        """The tensor A x: dims of the input that the product keeps, and the rank."""
        kept = tuple(dim for dim in self.x.dims if dim in self.operator.output.dims)
        return Operand(tensor=f"{self.operator.name}_lora_a.out", dims=(*kept, *self.halves, _RANK))

    @property
    def a(self) -> Operand:
        summed = tuple(dim for dim in self.x.dims if dim not in self.operator.output.dims)
        return Operand(tensor=f"{self.operator.name}_lora_a.weight", dims=(*self.batch, *self.halves, _RANK, *summed))

    @property
    def b(self) -> Operand:
        written = tuple(dim for dim in self.operator.inputs[1].dims if dim in self.operator.output.dims)
        return Operand(tensor=f"{self.operator.name}_lora_b.weight", dims=(*written, _RANK))

    @property
    def magnitude(self) -> Operand:
        return Operand(tensor=f"{self.operator.name}_magnitude", dims=self.b.dims[:-1])

    def output(self, tensor: str) -> Operand:
        return replace(self.operator.output, tensor=tensor)

    def tensors(self) -> Iterator[Tensor]:
        weight, activation = self.graph.tensors[self.operator.inputs[1].tensor], self.graph.tensors[self.operator.output.tensor]
        sizes = {**self.operator.dims, _RANK: self.rank}
        for operand, rows in ((self.a, len(self.batch) + len(self.halves) + 1), (self.b, len(self.b.dims) - 1)):
            shape = tuple(sizes[dim] for dim in operand.dims)
            yield Tensor(name=operand.tensor, shape=shape, role=TensorRole.PARAMETER, itemsize=weight.itemsize, num_rows=rows)
        if self.decomposes:
            shape = tuple(sizes[dim] for dim in self.magnitude.dims)
            yield Tensor(name=self.magnitude.tensor, shape=shape, role=TensorRole.PARAMETER, itemsize=weight.itemsize, num_rows=len(shape))
        yield replace(activation, name=self.inner.tensor, shape=tuple(sizes[dim] for dim in self.inner.dims))
        for name in ("b", "scale"):
            yield replace(activation, name=f"{self.operator.name}_lora_{name}.out")

    def operators(self, base: Operand) -> list[Operator]:
        """Return the operators A, B, the scale factor, and the sum with `base`, which replaces the original output."""
        name, sizes = self.operator.name, {**self.operator.dims, _RANK: self.rank}
        inside = {dim: sizes[dim] for dim in (*self.x.dims, *self.halves, _RANK)}
        outside = {dim: sizes[dim] for dim in (*self.operator.output.dims, _RANK)}
        added = {dim: sizes[dim] for dim in self.operator.output.dims}
        b, scaled = self.output(f"{name}_lora_b.out"), self.output(f"{name}_lora_scale.out")
        scale = self._as_read(elementwise(f"{name}_lora_scale", "scale", (b,), scaled, added))
        return [
            self._as_base(einsum(f"{name}_lora_a", self.x, self.a, self.inner, inside, grouped=self.is_grouped)),
            self._as_read(einsum(f"{name}_lora_b", self.inner, self.b, b, outside, grouped=self.is_grouped)),
            replace(scale, settings={**scale.settings, "factor": SCALE}),
            self._as_read(self.sum_with(f"{name}_lora_add", self.output(base.tensor), scaled, added)),
        ]

    def sum_with(self, name: str, base: Operand, scaled: Operand, dims: Mapping[str, int]) -> Operator:
        """Return the operator base + scaled; with DoRA base + (c - 1) base + c scaled, one pass per kernel."""
        output = self.output(self.end.output.tensor)
        if not self.decomposes:
            return elementwise(name, "add", (base, scaled), output, dims)
        rows, vector = extent(dims, output.dims), extent(dims, self.magnitude.dims)
        temp, out = Data(extent=rows), Data(extent=rows, of=3)
        first, second = (Data(extent=rows, of=position) for position in (0, 1))
        gradient, to_base, to_scaled = (data.gradient for data in (out, first, second))
        to_magnitude = Data(extent=vector, of=2, is_gradient=True)
        backward = (
            (gradient, temp), (gradient, temp, to_base), (gradient, first, temp), (temp, to_magnitude),
            (gradient, to_scaled), (gradient, second, temp), (temp, to_magnitude),
        )  # fmt: skip
        return Operator(
            name=name,
            kind="decomposed_sum",
            dims=dims,
            inputs=(base, scaled, self.magnitude),
            output=output,
            forward=tuple(_pass(rows, *accesses) for accesses in ((first, temp), (second, temp), (temp, temp, temp), (first, temp, out))),
            backward=tuple(_pass(rows, *accesses) for accesses in backward),
            saved=(first, second),
        )

    def norm(self) -> tuple[Work, ...]:
        """Return the work of B A, s B A, W + s B A and the norm of its rows; the linear operator runs it, because it reads W."""
        weight, like = self.operator.inputs[1], self.operator
        entries = extent(like.dims, weight.dims)
        plain = Data(extent=entries, itemsize=self.graph.tensors[weight.tensor].itemsize)
        product = Product(
            batch=extent(like.dims, self.batch),
            m=extent(like.dims, tuple(dim for dim in self.magnitude.dims if dim not in self.batch)),
            n=extent(like.dims, self.a.dims[len(self.batch) + len(self.halves) + 1 :]),
            k=((self.rank, ""),),
            is_grouped=self.is_grouped,
        )
        return product, *(_pass(entries, *(plain,) * number) for number in (2, 3, 1))

    def _as_base(self, operator: Operator) -> Operator:
        """Return the operator with the layer, group and dim properties of the linear operator; no sharding rule names the rank dim."""
        like = self.operator

        def among(dims: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(dim for dim in dims if dim in operator.dims)

        unsplit = among((*like.roles.unsplit, _RANK))
        roles = replace(like.roles.with_dims(among), sums=operator.roles.sums, unsplit=unsplit)
        return replace(operator, layer=like.layer, group=like.group, roles=roles)

    def _as_read(self, operator: Operator) -> Operator:
        """Likewise, but shard tokens as the reader of the sum does: with sequence parallelism each rank has its own tokens."""
        based = self._as_base(operator)
        names = dict(based.roles.logical)
        for reader, position in self.graph.consumers(self.end.output.tensor)[:1]:
            for dim, read in zip(self.operator.output.dims, reader.inputs[position].dims, strict=True):
                if dim == read and dim in self.x.dims:
                    names[dim] = reader.logical_name(read)
        return replace(based, roles=replace(based.roles, logical=names))


# --- quantised base weights ---------------------------------------------------------------------------------------


def _with_quantized_base(graph: Graph, training: Training) -> Graph:
    """Store the frozen matrices of layers in few bits; dequantise them before each product, in forward and for the input's gradient.

    The norm of DoRA dequantises them once more.

    The product's input stays saved although the matrix has no gradient: bitsandbytes 0.43, autograd/_functions.py,
    `MatMul4Bit.forward` (`ctx.tensors = (A, B)`). The output of attention, whose heads come first, is saved as a copy.
    """
    bytes_per_weight = training.base_format.bytes_per_weight
    operators: list[Operator] = []
    tensors = dict(graph.tensors)
    for operator in graph.operators:
        weight = tensors[operator.inputs[1].tensor] if _is_linear_layer(operator, graph) else None
        if weight is None or weight.has_gradient:
            operators.append(operator)
            continue
        entries = extent(operator.dims, operator.inputs[1].dims)
        plain = Data(extent=entries, itemsize=weight.itemsize)
        dequantize = Stream(kernel="default", elements=entries, accesses=(Data(extent=entries, of=1, itemsize=bytes_per_weight), plain))
        again = operator.backward
        maker = graph.producer(operator.inputs[0].tensor)
        is_copy = maker is not None and maker.is_attention
        kept = Data(extent=extent(operator.dims, operator.inputs[0].dims), of=None if is_copy else 0)
        is_decomposed = training.decomposes and training.adapts(operator.name_in_layer)
        tensors[weight.name] = replace(weight, itemsize=bytes_per_weight)
        operators.append(
            replace(
                operator,
                forward=(*((dequantize, dequantize) if is_decomposed else (dequantize,)), *operator.forward),
                backward=(dequantize, *again) if again else (),
                scratch=(*operator.scratch, plain) if again else operator.scratch,
                saved=(kept,) if again else (),
            )
        )
    return replace(graph, operators=tuple(operators), tensors=tensors)


def _with_idle_adapters(graph: Graph, training: Training) -> Graph:
    """Add loaded but untrained adapters: stored and gathered with the frozen matrix next to them."""
    tensors = dict(graph.tensors)
    for operator in graph.operators:
        if not _is_linear_layer(operator, graph) or not training.adapts(operator.name_in_layer):
            continue
        weight, names = tensors[operator.inputs[1].tensor], [f"{operator.name}_lora_{matrix}.weight" for matrix in "ab"]
        names += [f"{operator.name}_magnitude"] if training.decomposes else []
        idle = (training.num_adapters - 1) * sum(tensors[name].num_elements * tensors[name].itemsize for name in names)
        tensors[weight.name] = replace(weight, itemsize=weight.itemsize + idle / weight.num_elements)
    return replace(graph, tensors=tensors)


def _pass(elements: Extent, *accesses: Data) -> Stream:
    return Stream(kernel="add", elements=elements, accesses=accesses)


__all__ = ["FIRST", "regions_in_training", "with_training"]
