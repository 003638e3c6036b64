"""Rewrites of a sharded graph by the options of a framework: fused operators, casts, saved tensors.

The kinds of `workload/kinds/` say what an operator does as a kernel of its own. A framework adds biases inside the product before them,
runs chains of elementwise operators as one kernel, keeps a softmax in float32, writes the loss's gradient over the logits. Each such habit
is a function here; what comes out is a graph again, which is compiled as any other. Nothing else looks at a kind.

Any graph that says the bytes of its elements is rewritten: of a decoder, folded or unrolled, of a network, of an imported module. Kinds
and facts of operators decide (works, what is kept, which operands are parameters), never what a model calls them or where they stand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from perfmodel.frameworks.profile import ExecutionProfile
from perfmodel.frameworks.tiles import tiled
from perfmodel.parallel.algebra.derive import ShardedGraph
from perfmodel.parallel.algebra.parameters import with_gathered_bias_gradients
from perfmodel.parallel.context_forms import RINGS
from perfmodel.parallel.loss_forms import UPCAST_LOSS, WHOLE_LOSS
from perfmodel.workload.activations import ACTIVATIONS
from perfmodel.workload.graph import Data, Extent, Graph, Operator, Product, Stream, TensorRole, Work

FLOAT32_BYTES = 4.0

#: Kinds that work entry by entry: chains of them can be one kernel.
ENTRYWISE = ("elementwise", "dropout")


def with_behaviour(derivation: ShardedGraph, profile: ExecutionProfile) -> ShardedGraph:
    """The same graph with the same layouts, as the framework of `profile` runs it."""
    graph = derivation.graph
    sums = {op.name: derivation.left[op.inputs[0].tensor].partial for op in _epilogues(graph)}
    epilogues = {name for name, axes in sums.items() if not axes}
    operators = _by_kind(graph, profile)
    if not profile.kernels.fuses_elementwise:
        # on a group of one rank there is no sum to wait for: the product adds the bias
        operators |= {name: _only_across(operators[name], axes) for name, axes in sums.items() if axes}
    internal = {
        tensor for tensor, (reader, i) in _internal(graph, epilogues) if derivation.needed[reader.name, i] == derivation.left[tensor]
    }
    return replace(
        derivation,
        graph=_joined(graph, profile, operators, epilogues, internal),
        parameters=with_gathered_bias_gradients(derivation.parameters)
        if profile.communication.gathers_row_bias_gradients
        else derivation.parameters,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fusions:
    """A graph in which all that can be one kernel lies alike; `apart`: biases are added after their product's partial sums are reduced, in
    the chains that follow."""

    graph: Graph
    apart: Graph


#: How the names of an adapter's first product end (`workload/adapters.py`).
ADAPTER_INPUT = "_lora_a"

#: A copy in 16 bits and a mask. [byte]
_DROPPED_BYTES = 3.0


def all_fused(graph: Graph, profile: ExecutionProfile) -> Fusions:
    """The graph as the framework runs it where no layout comes in between."""
    operators = _by_kind(graph, profile)
    epilogues = {op.name for op in _epilogues(graph)}
    return Fusions(
        graph=_joined(graph, profile, operators, epilogues, {tensor for tensor, _ in _internal(graph, epilogues)}),
        apart=_joined(graph, profile, operators, set(), {tensor for tensor, _ in _internal(graph, set())}),
    )


def _by_kind(graph: Graph, profile: ExecutionProfile) -> dict[str, Operator]:
    """Rewritten operators by name, each on its own."""
    operators = {op.name: _OF_KIND[op.kind](op, graph, profile) if op.kind in _OF_KIND else op for op in graph.operators}
    if profile.kernels.fused_cross_entropy:
        operators |= _gradient_in_logits(graph, operators)
    if profile.activations.recomputes_gated_product:
        operators |= _gated_products_again(graph, operators)
    traffic = {"rms_norm": profile.kernels.rms_norm_traffic, "rotary": profile.kernels.rotary_traffic}
    operators = {
        name: _more_traffic(op, graph, traffic[op.kind]) if traffic.get(op.kind, 1.0) != 1.0 else op for name, op in operators.items()
    }
    if profile.activations.adapter_dropout:
        operators = {name: _after_dropout(op) if name.endswith(ADAPTER_INPUT) else op for name, op in operators.items()}
    if profile.activations.norms_keep_float32:
        operators = {name: _in_float32(op) if op.kind == "rms_norm" else op for name, op in operators.items()}
    if profile.kernels.fuses_gradient_accumulation:
        # the products of backward add into the accumulators; a table's rows are scattered into a gradient first
        operators = {name: op if _looks_up(op) else replace(op, makes_weight_gradients=False) for name, op in operators.items()}
    return {**operators, **tiled(graph, operators, profile).operators} if _has_tiles(profile) else operators


def _has_tiles(profile: ExecutionProfile) -> bool:
    return profile.kernels.tiles_mlp or profile.kernels.loss_form not in (WHOLE_LOSS, UPCAST_LOSS)


def _joined(graph: Graph, profile: ExecutionProfile, operators: Mapping[str, Operator], epilogues: set[str], internal: set[str]) -> Graph:
    """The graph with neighbouring operators fused.

    epilogues   biases that the product before them adds; internal: tensors between operators of one kernel, if there are such kernels
    """
    joined = {**operators, **{name: replace(operators[name], forward=()) for name in epilogues}}
    if profile.kernels.fuses_experts:
        joined |= {op.name: replace(operators[op.name], forward=(), backward=()) for op in _expert_output_biases(graph)}
    elif profile.kernels.adds_expert_bias_apart:
        joined |= {op.name: _weighted_pieces(operators[op.name], graph) for op in _expert_output_biases(graph)}
    if not profile.kernels.fuses_elementwise:
        internal = set()
    if internal:
        joined = {name: _without(op, internal, graph) for name, op in joined.items()}
    tensors = {name: replace(tensor, is_stored=False) if name in internal else tensor for name, tensor in graph.tensors.items()}
    if _has_tiles(profile):
        tiles = tiled(graph, operators, profile)
        tensors |= {name: tiles.share_of(tensors[name]) for name in tiles.shares}
    return replace(graph, operators=tuple(joined.values()), tensors=tensors)


# --- of one kind ----------------------------------------------------------------------------------------------------


def _cross_entropy(op: Operator, graph: Graph, profile: ExecutionProfile) -> Operator:
    """Its kernels' traffic is the profile's, half of it forward. Apart from its gradient's kernel it works in float32, and keeps that."""
    logits = _in_memory(op, 0, graph)
    work = (Stream(kernel="cross_entropy", elements=logits, accesses=(Data(extent=logits, itemsize=profile.kernels.logit_bytes / 2),)),)
    return replace(op, forward=work, backward=work, saved=(Data(extent=logits, itemsize=FLOAT32_BYTES),))


def _after_dropout(op: Operator) -> Operator:
    """The first product of an adapter, which keeps what dropout left of its input, and dropout its mask of a byte an entry."""
    operand = op.operands[0]
    return replace(op, saved=(*op.saved, Data(extent=op.extent(operand.dims), itemsize=_DROPPED_BYTES)))


def _in_float32(op: Operator) -> Operator:
    """Written out, a norm keeps the float32 copy of its input that it works on, and what lies between is float32 too."""
    return replace(op, saved=tuple(replace(data, itemsize=FLOAT32_BYTES) if data.of == 0 else data for data in op.saved))


def _rotary(op: Operator, graph: Graph, profile: ExecutionProfile) -> Operator:
    """Fused it holds nothing for itself. Where v is cut from the same tensor as q and k, what they were before the rotation stays, unless
    a part of each head turns where it lies."""
    unrotated = Data(extent=_in_memory(op, 0, graph), of=0)
    return replace(
        op,
        scratch=() if profile.kernels.fuses_elementwise else op.scratch,
        saved=(unrotated, *op.saved) if profile.activations.keeps_unrotated_qk and "start" not in op.settings else op.saved,
    )


def _softmax(op: Operator, graph: Graph, profile: ExecutionProfile) -> Operator:
    """In float32 where it keeps its result so, of which others read a cast; both its gradients are float32 then."""
    itemsize = graph.tensors[op.output.tensor].itemsize
    if not profile.activations.softmax_keeps_float32 or itemsize >= FLOAT32_BYTES:
        return op
    scores = _in_memory(op, len(op.inputs), graph)
    return replace(
        op,
        saved=(Data(extent=scores, itemsize=FLOAT32_BYTES),),
        scratch=(Data(extent=scores, itemsize=2.0 * (FLOAT32_BYTES - itemsize)),),
    )


def _unpermute(op: Operator, graph: Graph, profile: ExecutionProfile) -> Operator:
    """Rows added up by an indexed sum stay for its backward, where the framework's does not add them up as they come."""
    return (
        replace(op, saved=(*op.saved, Data(extent=_in_memory(op, 0, graph), of=0)))
        if profile.activations.keeps_added_rows and op.is_linear
        else op
    )


def _attention(op: Operator, graph: Graph, profile: ExecutionProfile) -> Operator:
    """Blocks of keys add to the gradient of all queries, in a buffer of its own; in a ring those of other ranks pass by."""
    if profile.communication.context_form in RINGS:
        op = replace(op, streamed=(1, 2))
    if not profile.activations.query_gradient_bytes:
        return op
    return replace(op, scratch=(*op.scratch, Data(extent=_in_memory(op, 0, graph), itemsize=profile.activations.query_gradient_bytes)))


def _permute(op: Operator, graph: Graph, profile: ExecutionProfile) -> Operator:
    """Nothing where the kernels that exchange rows put them in order themselves: of rows that come or go as copies."""
    is_exchanged = any(graph.tensors[operand.tensor].copies is not None for operand in (op.inputs[0], op.output))
    return replace(op, forward=(), backward=()) if profile.communication.permutes_in_exchange and is_exchanged else op


def _gated(op: Operator, graph: Graph, profile: ExecutionProfile) -> Operator:
    """Part of the products beside it where these are one kernel."""
    return replace(op, forward=(), backward=()) if profile.kernels.fuses_experts else op


_OF_KIND: Mapping[str, Callable[[Operator, Graph, ExecutionProfile], Operator]] = {
    "attention": _attention,
    "cross_entropy": _cross_entropy,
    "gated": _gated,
    "permute": _permute,
    "rotary": _rotary,
    "softmax": _softmax,
    "unpermute": _unpermute,
}


# --- of neighbours --------------------------------------------------------------------------------------------------


def _gradient_in_logits(graph: Graph, operators: Mapping[str, Operator]) -> dict[str, Operator]:
    """A fused loss writes the gradient over the logits, in the dtype of activations, where it lives until the product before reads it."""
    rewritten: dict[str, Operator] = {}
    for loss in operators.values():
        maker = graph.producer(loss.inputs[0].tensor) if loss.kind == "cross_entropy" and loss.backward else None
        if maker is not None:
            product = operators[maker.name]
            itemsize = graph.tensors[product.output.tensor].itemsize
            gradient = Data(extent=_in_memory(product, len(product.inputs), graph), itemsize=itemsize)
            rewritten |= {loss.name: replace(loss, saved=()), product.name: replace(product, saved=(*product.saved, gradient))}
    return rewritten


def _gated_products_again(graph: Graph, operators: Mapping[str, Operator]) -> dict[str, Operator]:
    """Return gates and the products that read them, where the gate's backward kernel writes its result again instead of keeping it.

    The product then holds it for the time of its own backward pass alone.
    """
    rewritten: dict[str, Operator] = {}
    for reader in operators.values():
        maker = graph.producer(reader.inputs[0].tensor) if reader.is_product and reader.backward else None
        if maker is None or not _is_gate(maker, graph):
            continue
        gate = operators[maker.name]
        result = Data(extent=_in_memory(gate, len(gate.inputs), graph), itemsize=graph.tensors[gate.output.tensor].itemsize)
        backward = tuple(replace(work, accesses=(*work.accesses, result)) if isinstance(work, Stream) else work for work in gate.backward)
        kept = tuple(data for data in reader.saved if data.of != 0)
        rewritten |= {
            gate.name: replace(gate, backward=backward),
            reader.name: replace(reader, saved=kept, scratch=(*reader.scratch, result)),
        }
    return rewritten


def _is_gate(op: Operator, graph: Graph) -> bool:
    """Whether it multiplies two activations, one of them through an activation function."""
    if op.kind != "elementwise" or op.settings.get("function") != "mul" or len(op.inputs) != 2:
        return False
    producers = [graph.producer(operand.tensor) for operand in op.inputs]
    return any(producer is not None and producer.settings.get("function") in ACTIVATIONS for producer in producers)


def _epilogues(graph: Graph) -> Iterator[Operator]:
    """Biases that the matrix multiplication before them adds itself, if nothing is redistributed in between."""
    for op in graph.operators:
        producer = graph.producer(op.inputs[0].tensor) if _is_bias(op, graph) else None
        if producer is not None and producer.is_product and len(graph.consumers(producer.output.tensor)) == 1:
            yield op


def _only_across(op: Operator, axes: frozenset[str]) -> Operator:
    """The operator, whose forward passes over memory are made only where `axes` hold more than one rank."""
    return replace(op, forward=tuple(replace(work, only_across=axes) if isinstance(work, Stream) else work for work in op.forward))


def _is_bias(op: Operator, graph: Graph) -> bool:
    """Whether it adds a parameter to its first input and keeps nothing: the gradient of the sum is that of the input."""
    if op.kind != "elementwise" or len(op.inputs) != 2 or op.is_linear or not op.passes_gradient:
        return False
    return graph.tensors[op.inputs[1].tensor].role is TensorRole.PARAMETER


PIECES_FORWARD, PIECES_BACKWARD = 28.0, 40.0
"""Bytes of an entry that Megatron-Core's sum of experts' outputs and weighted biases moves (`TEGroupedMLP._apply_bias`): the bias times the
float32 weight of its row (4 written), the sum (6 read, 4 written), torch.cat (4 and 4), the cast to 16 bits (4 and 2); backward the cast (2
and 4), the gradient of the addend (4 and 2), the bias's product and its sum (4, 4 and 4), the weight's (4, 4 and 4), the pieces' cat (2 and
2)."""


def _expert_output_biases(graph: Graph) -> Iterator[Operator]:
    """Biases of grouped products whose rows then go back to their tokens."""
    for op in graph.operators:
        producer = graph.producer(op.inputs[0].tensor) if _is_bias(op, graph) else None
        if producer is None or not any(isinstance(work, Product) and work.is_grouped for work in producer.forward):
            continue
        if any(reader.kind in ("permute", "unpermute") for reader, _ in graph.consumers(op.output.tensor)):
            yield op


def _weighted_pieces(op: Operator, graph: Graph) -> Operator:
    """The sum with its bias as kernels of their own."""
    rows = _in_memory(op, len(op.inputs), graph)

    def moved(num_bytes: float) -> tuple[Work, ...]:
        return (Stream(kernel="add", elements=rows, accesses=(Data(extent=rows, itemsize=num_bytes),)),)

    return replace(op, forward=moved(PIECES_FORWARD), backward=moved(PIECES_BACKWARD))


def _internal(graph: Graph, epilogues: set[str]) -> Iterator[tuple[str, tuple[Operator, int]]]:
    """Tensors, each with its reader, that a fused kernel never writes if the reader needs it as it is left: made and read, once, by
    elementwise operators of one layer."""
    for op in graph.operators:
        readers = graph.consumers(op.output.tensor)
        if op.kind not in ENTRYWISE or op.name in epilogues or len(readers) != 1:
            continue
        if readers[0][0].kind in ENTRYWISE and readers[0][0].layer == op.layer:
            yield op.output.tensor, readers[0]


def _without(op: Operator, internal: set[str], graph: Graph) -> Operator:
    """The operator as part of fused kernels: what lies between them is neither written nor read, nor is its gradient.

    Where it would be kept, the fused kernel computes it again from what its maker keeps.
    """
    operands = op.operands
    inner = {index for index, operand in enumerate(operands) if operand.tensor in internal}
    if not inner:
        return op

    def is_made_again(data: Data) -> bool:
        maker = graph.producer(operands[data.of].tensor) if data.of in inner else None
        return maker is not None and bool(maker.saved)

    return replace(
        op,
        forward=_streams(op.forward, lambda accesses: (data for data in accesses if data.of not in inner)),
        backward=_streams(
            op.backward,
            lambda accesses: (data for data in accesses if not (data.is_gradient and data.of in inner)),
        ),
        saved=tuple(data for data in op.saved if not is_made_again(data)),
    )


def _more_traffic(op: Operator, graph: Graph, factor: float) -> Operator:
    """Kernels that move more than they must."""

    def more(accesses: tuple[Data, ...]) -> Iterable[Data]:
        sized = (_sized(op, data, graph) for data in accesses)
        return (replace(data, itemsize=data.itemsize * factor) for data in sized)

    return replace(op, forward=_streams(op.forward, more), backward=_streams(op.backward, more))


def _looks_up(op: Operator) -> bool:
    """Whether it reads rows of a table, into which its backward scatters."""
    return any(isinstance(work, Stream) and work.kernel == "embedding" for work in op.forward)


def _in_memory(op: Operator, index: int, graph: Graph) -> Extent:
    """The elements of one of its operands, also those at positions that it reads whole."""
    operand = op.operands[index]
    return tuple(zip(graph.tensors[operand.tensor].shape, operand.dims, strict=True))


def _streams(works: tuple[Work, ...], change: Callable[[tuple[Data, ...]], Iterable[Data]]) -> tuple[Work, ...]:
    """The works with other accesses."""
    return tuple(replace(work, accesses=tuple(change(work.accesses))) if isinstance(work, Stream) else work for work in works)


def _sized(op: Operator, data: Data, graph: Graph) -> Data:
    """With its bytes an element said."""
    return replace(data, itemsize=graph.itemsize(op, data))
