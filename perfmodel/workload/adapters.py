"""Adapters-only training as a rewrite of the graph: low-rank products beside linear operators, whose weights are frozen.

    y = W x + (alpha / r) B A x        A[r, in], B[out, r]

Sources: LoRA, Hu et al., arXiv 2106.09685, section 4.1; QLoRA, Dettmers et al., arXiv 2305.14314, sections 3 and 4. Dropout before A is
left out (0 by default in PEFT and NeMo).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from perfmodel.workload.config import TransformerConfig
from perfmodel.workload.freezing import with_frozen
from perfmodel.workload.graph import Data, Graph, Operand, Operator, Region, Stream, Tensor, TensorRole
from perfmodel.workload.kinds.einsum import einsum
from perfmodel.workload.kinds.elementwise import elementwise
from perfmodel.workload.training import NF4_BYTES, Training
from perfmodel.workload.transformer import decoder_regions
from perfmodel.workload.unroll import with_first_run_apart

#: The layer that is the first run of the repeated one: below its first adapter nothing runs backward.
FIRST = "first_layer"
_RANK = "rank"
#: alpha / r in a run, as NeMo's recipes have it; no cost hangs on it.
SCALE = 2.0


def with_training(graph: Graph, training: Training) -> Graph:
    """A decoder's graph, folded or unrolled, as a job trains it."""
    if training.is_full:
        return graph
    apart = with_first_run_apart(graph, FIRST) if graph.repeats else graph
    adapted = _with_adapters(apart, training)
    frozen = with_frozen(adapted, trained=adapted.tensors.keys() - apart.tensors.keys())
    return _with_quantized_base(frozen) if training.quantizes_base else frozen


def regions_in_training(model: TransformerConfig, training: Training) -> tuple[Region, ...]:
    """`Graph.regions` of what `with_training` makes of the model's graph, which need not be built for them."""
    regions = decoder_regions(model)
    if training.is_full:
        return regions
    found: list[Region] = []
    for region in regions:
        if region.is_repeated:
            found.append(replace(region, name=FIRST, count=1, carried=f"{FIRST}.{region.carried}"))
        if region.count > 1 or not region.is_repeated:
            found.append(replace(region, count=region.count - 1) if region.is_repeated else region)
    return tuple(found)


# --- adapters -------------------------------------------------------------------------------------------------------


def _is_linear_layer(operator: Operator, graph: Graph) -> bool:
    """Whether it multiplies by a matrix of its own, in a layer that is a block."""
    return (
        operator.kind == "einsum"
        and any(region.is_block and region.name == operator.layer for region in graph.regions)
        and graph.tensors[operator.inputs[1].tensor].role is TensorRole.PARAMETER
    )


def _with_adapters(graph: Graph, training: Training) -> Graph:
    operators: list[Operator] = []
    tensors = dict(graph.tensors)
    waiting: dict[str, _Adapter] = {}
    for operator in graph.operators:
        if _is_linear_layer(operator, graph) and (not training.targets or operator.name_in_layer in training.targets):
            adapter = _Adapter(graph=graph, operator=operator, end=_end(operator, graph), rank=training.rank)
            waiting[adapter.end.name] = adapter
        adapter_here = waiting.pop(operator.name, None)
        if adapter_here is None:
            operators.append(operator)
            continue
        base = replace(operator.output, tensor=f"{operator.name}.base")
        tensors[base.tensor] = replace(tensors[operator.output.tensor], name=base.tensor)
        operators += [replace(operator, output=base), *adapter_here.operators(base)]
        tensors |= {tensor.name: tensor for tensor in adapter_here.tensors()}
    return replace(graph, operators=tuple(operators), tensors=tensors)


def _end(operator: Operator, graph: Graph) -> Operator:
    """A linear operator, or the bias that is added to its product: what an adapter's output is added to."""
    readers = graph.consumers(operator.output.tensor)
    for reader, _ in readers:
        if len(readers) == 1 and any(graph.tensors[operand.tensor].bias_of == operator.name for operand in reader.inputs):
            return reader
    return operator


@dataclass(frozen=True, slots=True, kw_only=True)
class _Adapter:
    """What stands beside a linear operator. end: what its output is added to."""

    graph: Graph
    operator: Operator
    end: Operator
    rank: int

    @property
    def x(self) -> Operand:
        return self.operator.inputs[0]

    @property
    def inner(self) -> Operand:
        """A x: what the product keeps of its input's dims, and the rank."""
        kept = tuple(dim for dim in self.x.dims if dim in self.operator.output.dims)
        return Operand(tensor=f"{self.operator.name}_lora_a.out", dims=(*kept, _RANK))

    @property
    def a(self) -> Operand:
        summed = tuple(dim for dim in self.x.dims if dim not in self.operator.output.dims)
        return Operand(tensor=f"{self.operator.name}_lora_a.weight", dims=(_RANK, *summed))

    @property
    def b(self) -> Operand:
        written = tuple(dim for dim in self.operator.inputs[1].dims if dim in self.operator.output.dims)
        return Operand(tensor=f"{self.operator.name}_lora_b.weight", dims=(*written, _RANK))

    def output(self, tensor: str) -> Operand:
        return replace(self.operator.output, tensor=tensor)

    def tensors(self) -> Iterator[Tensor]:
        weight, made = self.graph.tensors[self.operator.inputs[1].tensor], self.graph.tensors[self.operator.output.tensor]
        sizes = {**self.operator.dims, _RANK: self.rank}
        for operand, rows in ((self.a, 1), (self.b, len(self.b.dims) - 1)):
            shape = tuple(sizes[dim] for dim in operand.dims)
            yield Tensor(name=operand.tensor, shape=shape, role=TensorRole.PARAMETER, itemsize=weight.itemsize, num_rows=rows)
        yield replace(made, name=self.inner.tensor, shape=tuple(sizes[dim] for dim in self.inner.dims))
        for name in ("b", "scale"):
            yield replace(made, name=f"{self.operator.name}_lora_{name}.out")

    def operators(self, base: Operand) -> list[Operator]:
        """A, B, the factor and the sum with `base`, which takes the place of what was there."""
        name, sizes = self.operator.name, {**self.operator.dims, _RANK: self.rank}
        inside = {dim: sizes[dim] for dim in (*self.x.dims, _RANK)}
        outside = {dim: sizes[dim] for dim in (*self.operator.output.dims, _RANK)}
        added = {dim: sizes[dim] for dim in self.operator.output.dims}
        b, scaled = self.output(f"{name}_lora_b.out"), self.output(f"{name}_lora_scale.out")
        scale = self._as_read(elementwise(f"{name}_lora_scale", "scale", (b,), scaled, added))
        return [
            self._as_base(einsum(f"{name}_lora_a", self.x, self.a, self.inner, inside)),
            self._as_read(einsum(f"{name}_lora_b", self.inner, self.b, b, outside)),
            replace(scale, settings={**scale.settings, "factor": SCALE}),
            self._as_read(
                elementwise(f"{name}_lora_add", "add", (self.output(base.tensor), scaled), self.output(self.end.output.tensor), added)
            ),
        ]

    def _as_base(self, operator: Operator) -> Operator:
        """With what is known of the dims of the linear operator. No rule speaks of the rank: it is whole."""
        like = self.operator

        def among(dims: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(dim for dim in dims if dim in operator.dims)

        return replace(
            operator,
            layer=like.layer,
            group=like.group,
            logical={dim: name for dim, name in like.logical.items() if dim in operator.dims},
            per_sample=among(like.per_sample),
            stretched=among(like.stretched),
            padded=among(like.padded),
            whole=(*among(like.whole), *among((_RANK,))),
        )

    def _as_read(self, operator: Operator) -> Operator:
        """Likewise, but where its tokens are cut as what reads the sum cuts them: with sequence parallelism each rank's own."""
        found = self._as_base(operator)
        names = dict(found.logical)
        for reader, place in self.graph.consumers(self.end.output.tensor)[:1]:
            for dim, read in zip(self.operator.output.dims, reader.inputs[place].dims, strict=True):
                if dim == read and dim in self.x.dims:
                    names[dim] = reader.logical_name(read)
        return replace(found, logical=names)


# --- a base in four bits --------------------------------------------------------------------------------------------


def _with_quantized_base(graph: Graph) -> Graph:
    """Frozen matrices of layers stored as NF4, and made into what is multiplied with each time: forward, and for the input's gradient."""
    operators: list[Operator] = []
    tensors = dict(graph.tensors)
    for operator in graph.operators:
        weight = tensors[operator.inputs[1].tensor] if _is_linear_layer(operator, graph) else None
        if weight is None or weight.has_gradient:
            operators.append(operator)
            continue
        entries = operator.extent(operator.inputs[1].dims)
        plain = Data(extent=entries, itemsize=weight.itemsize)
        made = Stream(kernel="default", elements=entries, accesses=(Data(extent=entries, of=1, itemsize=NF4_BYTES), plain))
        again = operator.backward
        tensors[weight.name] = replace(weight, itemsize=NF4_BYTES)
        operators.append(
            replace(
                operator,
                forward=(made, *operator.forward),
                backward=(made, *again) if again else (),
                scratch=(*operator.scratch, plain) if again else operator.scratch,
            )
        )
    return replace(graph, operators=tuple(operators), tensors=tensors)


__all__ = ["FIRST", "regions_in_training", "with_training"]
