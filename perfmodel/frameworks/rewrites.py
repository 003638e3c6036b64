"""Rewrites of a sharded graph by the options of a framework or an engine: fused operators, casts, saved tensors.

The kinds of `workload/kinds/` define an operator as a separate kernel. A framework fuses a bias into the product before it, runs chains of
elementwise operators as one kernel, saves a softmax in float32, writes the loss's gradient over the logits. Each such behaviour is a
function of this module. The result is a graph again, which is compiled as any other. Only this package reads the kind of an operator.

The rewrites apply to any graph with the bytes of its elements: of a decoder, folded or unrolled, of a network, of an imported module. They
depend on kinds and properties of operators (works, saved tensors, parameters), never on names or positions in a model.

Engines (`with_engine`) fuse a bias into the product before it. With fused kernels, products that read one tensor are one call (q, k and v;
gate and up). A norm or rotary embedding of keys, an addition to the residual stream, and a product with an activation run in the kernel of
their neighbour. Without fusion, the convolution and the scan of a recurrent layer are kernels of their own classes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from perfmodel.frameworks.profile import ExecutionProfile
from perfmodel.frameworks.tiles import tiled, with_traffic
from perfmodel.parallel.algebra.derive import ShardedGraph
from perfmodel.parallel.algebra.parameters import with_gathered_bias_gradients
from perfmodel.parallel.algebra.sharding import Layout
from perfmodel.parallel.choices import RINGS
from perfmodel.workload.activations import ACTIVATIONS
from perfmodel.workload.graph import Graph, Operator, Tensor, TensorRole
from perfmodel.workload.quantization import WeightPart
from perfmodel.workload.work import Data, Product, Stream, Work, extent

FLOAT32_BYTES = 4.0

#: Elementwise kinds: chains of them can be one kernel.
ENTRYWISE = ("elementwise", "dropout")


def with_behaviour(derivation: ShardedGraph, profile: ExecutionProfile) -> ShardedGraph:
    """Return the sharded graph with the same layouts, as the framework of `profile` runs it."""
    graph = derivation.graph
    operators, epilogues = _by_kind(graph, profile), set[str]()
    for op in _epilogues(graph):
        axes = derivation.left[op.inputs[0].tensor].partial
        if not axes:
            epilogues.add(op.name)
        elif not profile.kernels.fuses_elementwise:
            # without a partial sum (a group of one rank) the product adds the bias
            product = operators[op.name]
            forward = (replace(work, only_across=axes) if isinstance(work, Stream) else work for work in product.forward)
            operators[op.name] = replace(product, forward=tuple(forward))
    internal = set[str]()
    for tensor, (reader, i) in _internal(graph, epilogues):
        if derivation.needed[reader.name, i] == derivation.left[tensor]:
            internal.add(tensor)
    return replace(
        derivation,
        graph=_joined(graph, profile, operators, epilogues, internal),
        parameters=with_gathered_bias_gradients(derivation.parameters)
        if profile.communication.gathers_row_bias_gradients
        else derivation.parameters,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fusions:
    """A graph with all fusions that equal layouts allow.

    apart   the same, but biases are added after the partial sums of their products are reduced, in the elementwise chains that follow
    """

    graph: Graph
    apart: Graph


#: Suffix of the names of adapters' first products (`workload/adapters.py`).
ADAPTER_INPUT = "_lora_a"

#: Per entry: a copy in 16 bits and a mask. [byte]
_DROPPED_BYTES = 3.0


def all_fused(graph: Graph, profile: ExecutionProfile) -> Fusions:
    """Return the graph as the framework runs it, without redistributions between fused operators."""
    operators = _by_kind(graph, profile)
    epilogues = {op.name for op in _epilogues(graph)}
    return Fusions(
        graph=_joined(graph, profile, operators, epilogues, {tensor for tensor, _ in _internal(graph, epilogues)}),
        apart=_joined(graph, profile, operators, set(), {tensor for tensor, _ in _internal(graph, set())}),
    )


def _by_kind(graph: Graph, profile: ExecutionProfile) -> dict[str, Operator]:
    """Return the rewritten operators by name, before fusion with neighbours."""
    operators: dict[str, Operator] = {}
    for op in graph.operators:
        operators[op.name] = _OF_KIND[op.kind](op, graph, profile) if op.kind in _OF_KIND else op
    if profile.kernels.fused_cross_entropy:
        operators |= _gradient_in_logits(graph, operators)
    if profile.activations.recomputes_gated_product:
        operators |= _recomputed_gated_products(graph, operators)
    traffic = {"rms_norm": profile.kernels.rms_norm_traffic, "rotary": profile.kernels.rotary_traffic}
    for name, op in operators.items():
        if traffic.get(op.kind, 1.0) != 1.0:
            op = with_traffic(op, graph, factor=traffic[op.kind])
        if profile.activations.adapter_dropout and name.endswith(ADAPTER_INPUT):
            # an adapter's first product saves its input after dropout, and the mask of one byte per entry
            op = replace(op, saved=(*op.saved, Data(extent=extent(op.dims, op.inputs[0].dims), itemsize=_DROPPED_BYTES)))
        if profile.activations.norms_keep_float32 and op.kind == "rms_norm":
            # an unfused norm saves the float32 copy of its input
            op = replace(op, saved=tuple(replace(data, itemsize=FLOAT32_BYTES) if data.of == 0 else data for data in op.saved))
        # the products of backward add into the accumulators; the rows of an embedding are scattered into a separate gradient
        if profile.kernels.fuses_gradient_accumulation and op.kind not in ("embedding", "embedding_bag"):
            op = replace(op, makes_weight_gradients=False)
        operators[name] = op
    return {**operators, **tiled(graph, operators, profile).operators}


def _joined(graph: Graph, profile: ExecutionProfile, operators: Mapping[str, Operator], epilogues: set[str], internal: set[str]) -> Graph:
    """Return the graph with neighbouring operators fused.

    epilogues   biases that the product before them adds
    internal    tensors between operators of one kernel, if the framework fuses elementwise operators
    """
    joined = dict(operators)
    for name in epilogues:
        joined[name] = replace(operators[name], forward=())
    if profile.kernels.fuses_experts:
        joined |= {op.name: replace(operators[op.name], forward=(), backward=()) for op in _expert_output_biases(graph)}
    elif profile.kernels.adds_expert_bias_apart:
        for op in _expert_output_biases(graph):
            rows = graph.extent(op.output)
            pieces = [Data(extent=rows, itemsize=num_bytes) for num_bytes in (PIECES_FORWARD, PIECES_BACKWARD)]
            forward, backward = ((Stream(kernel="add", elements=rows, accesses=(moved,)),) for moved in pieces)
            joined[op.name] = replace(operators[op.name], forward=forward, backward=backward)
    if not profile.kernels.fuses_elementwise:
        internal = set()
    if internal:
        joined = {name: _without(op, internal, graph) for name, op in joined.items()}
    tensors, tiles = dict(graph.tensors), tiled(graph, operators, profile)
    for name in internal:
        tensors[name] = replace(tensors[name], is_stored=False)
    for name in tiles.shares:
        tensors[name] = tiles.share_of(tensors[name])
    return replace(graph, operators=tuple(joined.values()), tensors=tensors)


# --- of one kind ----------------------------------------------------------------------------------------------------


def _cross_entropy(op: Operator, graph: Graph, profile: ExecutionProfile) -> Operator:
    """Set the traffic of the loss to the profile's, half of it in forward. An unfused loss saves its float32 softmax for backward."""
    logits = graph.extent(op.inputs[0])
    work = (Stream(kernel="cross_entropy", elements=logits, accesses=(Data(extent=logits, itemsize=profile.kernels.logit_bytes / 2),)),)
    return replace(op, forward=work, backward=work, saved=(Data(extent=logits, itemsize=FLOAT32_BYTES),))


def _rotary(op: Operator, graph: Graph, profile: ExecutionProfile) -> Operator:
    """Remove the temporary memory of a fused rotary embedding, and save its input where v is a part of the same tensor as q and k.

    Partial rotation in place saves no input.
    """
    unrotated = Data(extent=graph.extent(op.inputs[0]), of=0)
    return replace(
        op,
        scratch=() if profile.kernels.fuses_elementwise else op.scratch,
        saved=(unrotated, *op.saved) if profile.activations.keeps_unrotated_qk and "start" not in op.settings else op.saved,
    )


def _softmax(op: Operator, graph: Graph, profile: ExecutionProfile) -> Operator:
    """Save the softmax in float32 if the framework does; its readers use a cast, and both its gradients are float32 then."""
    itemsize = graph.tensors[op.output.tensor].itemsize
    if not profile.activations.softmax_keeps_float32 or itemsize >= FLOAT32_BYTES:
        return op
    scores = graph.extent(op.output)
    return replace(
        op,
        saved=(Data(extent=scores, itemsize=FLOAT32_BYTES),),
        scratch=(Data(extent=scores, itemsize=2.0 * (FLOAT32_BYTES - itemsize)),),
    )


def _unpermute(op: Operator, graph: Graph, profile: ExecutionProfile) -> Operator:
    """Save the rows of an indexed sum for its backward, if the framework's implementation needs them."""
    if not profile.activations.keeps_added_rows or not op.is_linear:
        return op
    return replace(op, saved=(*op.saved, Data(extent=graph.extent(op.inputs[0]), of=0)))


def _attention(op: Operator, graph: Graph, profile: ExecutionProfile) -> Operator:
    """Add the buffer in which blocks of keys accumulate the gradient of all queries; in a ring, keys and values are streamed."""
    if profile.communication.context_form in RINGS:
        op = replace(op, streamed=(1, 2))
    if not profile.activations.query_gradient_bytes:
        return op
    return replace(op, scratch=(*op.scratch, Data(extent=graph.extent(op.inputs[0]), itemsize=profile.activations.query_gradient_bytes)))


def _permute(op: Operator, graph: Graph, profile: ExecutionProfile) -> Operator:
    """Remove the permutation of exchanged rows if the kernels of the exchange sort them."""
    is_exchanged = any(graph.tensors[operand.tensor].copies is not None for operand in (op.inputs[0], op.output))
    return replace(op, forward=(), backward=()) if profile.exchanges.permutes_in_exchange and is_exchanged else op


def _gated(op: Operator, graph: Graph, profile: ExecutionProfile) -> Operator:
    """Fuse the gate of experts into their products if these are one kernel."""
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
    """Return losses and products of logits where a fused loss overwrites the logits with their gradient.

    The gradient is in the dtype of activations and lives until the backward pass of the product.
    """
    rewritten: dict[str, Operator] = {}
    for loss in operators.values():
        maker = graph.producer(loss.inputs[0].tensor) if loss.kind == "cross_entropy" and loss.backward else None
        if maker is not None:
            product = operators[maker.name]
            itemsize = graph.tensors[product.output.tensor].itemsize
            gradient = Data(extent=graph.extent(product.output), itemsize=itemsize)
            rewritten |= {loss.name: replace(loss, saved=()), product.name: replace(product, saved=(*product.saved, gradient))}
    return rewritten


def _is_gate(op: Operator, graph: Graph) -> bool:
    """Return whether an operator multiplies two activations, one of them after an activation function."""
    if op.kind != "elementwise" or op.settings.get("function") != "mul" or len(op.inputs) != 2:
        return False
    producers = [graph.producer(operand.tensor) for operand in op.inputs]
    return any(producer is not None and producer.settings.get("function") in ACTIVATIONS for producer in producers)


def _recomputed_gated_products(graph: Graph, operators: Mapping[str, Operator]) -> dict[str, Operator]:
    """Return gates and the products that read them, where the gate's backward kernel recomputes its result instead of saving it.

    The product then holds the result only during its own backward pass.
    """
    rewritten: dict[str, Operator] = {}
    for reader in operators.values():
        maker = graph.producer(reader.inputs[0].tensor) if reader.is_product and reader.backward else None
        if maker is None or not _is_gate(maker, graph):
            continue
        gate = operators[maker.name]
        result = Data(extent=graph.extent(gate.output), itemsize=graph.tensors[gate.output.tensor].itemsize)
        backward = tuple(replace(work, accesses=(*work.accesses, result)) if isinstance(work, Stream) else work for work in gate.backward)
        kept = tuple(data for data in reader.saved if data.of != 0)
        rewritten |= {
            gate.name: replace(gate, backward=backward),
            reader.name: replace(reader, saved=kept, scratch=(*reader.scratch, result)),
        }
    return rewritten


def _epilogues(graph: Graph) -> Iterator[Operator]:
    """Yield the biases that the matrix multiplication before them adds, if nothing is redistributed in between."""
    for op, producer in _biases(graph):
        if producer.is_product and len(graph.consumers(producer.output.tensor)) == 1:
            yield op


def _biases(graph: Graph) -> Iterator[tuple[Operator, Operator]]:
    """Yield the operators that add a parameter and save nothing (the gradient of the sum is that of the input), each with its producer."""
    for op in graph.operators:
        if op.kind == "elementwise" and len(op.inputs) == 2 and op.passes_gradient and not op.is_linear:
            producer = graph.producer(op.inputs[0].tensor)
            if producer is not None and graph.tensors[op.inputs[1].tensor].role is TensorRole.PARAMETER:
                yield op, producer


PIECES_FORWARD, PIECES_BACKWARD = 28.0, 40.0
"""Traffic per entry of Megatron-Core's sum of experts' outputs and weighted biases (`TEGroupedMLP._apply_bias`). [byte]

Forward: the bias times the float32 weight of its row (4 written), the sum (6 read, 4 written), torch.cat (4 and 4), the cast to 16 bits (4
and 2). Backward: the cast (2 and 4), the gradient of the addend (4 and 2), the bias's product and its sum (4, 4 and 4), the weight's (4, 4
and 4), the pieces' cat (2 and 2).
"""


def _expert_output_biases(graph: Graph) -> Iterator[Operator]:
    """Yield the biases of grouped products whose rows are then returned to their tokens."""
    for op, producer in _biases(graph):
        is_grouped = any(isinstance(work, Product) and work.is_grouped for work in producer.forward)
        if is_grouped and any(reader.kind in ("permute", "unpermute") for reader, _ in graph.consumers(op.output.tensor)):
            yield op


def _internal(graph: Graph, epilogues: set[str]) -> Iterator[tuple[str, tuple[Operator, int]]]:
    """Yield the tensors that a fused kernel never writes, each with its reader, if the reader needs the layout that the producer leaves.

    Their producer and their only reader are elementwise operators of one layer.
    """
    for op in graph.operators:
        readers = graph.consumers(op.output.tensor)
        if op.kind not in ENTRYWISE or op.name in epilogues or len(readers) != 1:
            continue
        if readers[0][0].kind in ENTRYWISE and readers[0][0].layer == op.layer:
            yield op.output.tensor, readers[0]


def _without(op: Operator, internal: set[str], graph: Graph) -> Operator:
    """Return the operator as a part of fused kernels: internal tensors and their gradients are neither written nor read.

    An internal tensor that backward needs is recomputed by the fused kernel from the tensors that its producer saves.
    """
    operands = op.operands
    inner = {index for index, operand in enumerate(operands) if operand.tensor in internal}
    if not inner:
        return op

    def is_made_again(data: Data) -> bool:
        maker = graph.producer(operands[data.of].tensor) if data.of in inner else None
        return maker is not None and bool(maker.saved)

    def left(works: tuple[Work, ...], *, gradients_alone: bool) -> Iterator[Work]:
        for work in works:
            if isinstance(work, Stream):
                kept = (data for data in work.accesses if data.of not in inner or (gradients_alone and not data.is_gradient))
                work = replace(work, accesses=tuple(kept))
            yield work

    return replace(
        op,
        forward=tuple(left(op.forward, gradients_alone=False)),
        backward=tuple(left(op.backward, gradients_alone=True)),
        saved=tuple(data for data in op.saved if not is_made_again(data)),
    )


_NORMS = ("rms_norm", "layer_norm")
_CONVOLUTION = "causal_conv"


def with_engine(derivation: ShardedGraph, *, fuses: bool, low_parts: Collection[WeightPart]) -> ShardedGraph:
    """Return the graph with the same layouts, as an engine runs it.

    fuses      kernels are fused; else every operator is a kernel
    low_parts  parts whose weights are quantised
    """
    graph = derivation.graph
    fused = _fused_along(graph) if fuses else set()
    # products with weights that read one tensor in one layout are one call, with the name of the first of them
    first: dict[tuple[str, str, Layout], Operator] = {}
    calls: dict[str, Operator] = {}
    for op in graph.operators if fuses else ():
        if weight_of(op, graph) is not None:
            calls[op.name] = first.setdefault((op.layer, op.inputs[0].tensor, derivation.needed[op.name, 0]), op)

    def work(op: Operator, kernel: Work) -> Work:
        if isinstance(kernel, Product):
            weight = weight_of(op, graph)
            low = weight is not None and graph.tensors[calls.get(op.name, op).inputs[1].tensor].part in low_parts
            return replace(kernel, is_low=low, call=calls[op.name].name if op.name in calls else "")
        return replace(kernel, is_fused=True) if isinstance(kernel, Stream) and op.name in fused else kernel

    def rewritten(op: Operator) -> Operator:
        if op.kind == "elementwise" and op.settings["function"] == "bias":
            return replace(op, forward=())
        forward = op.forward if fuses else _as_one_kernel(op)
        return replace(op, forward=tuple(work(op, kernel) for kernel in forward))

    return replace(derivation, graph=replace(graph, operators=tuple(map(rewritten, graph.operators))))


def weight_of(op: Operator, graph: Graph) -> Tensor | None:
    """Return the weight of a product, if it belongs to a part that formats of weights distinguish."""
    if not op.is_product or len(op.inputs) < 2:
        return None
    tensor = graph.tensors[op.inputs[1].tensor]
    return tensor if tensor.part != "other" else None


def _fused_along(graph: Graph) -> set[str]:
    """Return the operators that run in the kernel of a neighbour."""
    blocks = {region.name for region in graph.regions if region.is_block}
    fused = set()
    for op in graph.operators:
        function = op.settings.get("function")
        first = graph.producer(op.inputs[0].tensor)
        is_product = function == "mul" and first is not None and first.kind == "elementwise"
        if is_product or (function == "add" and op.layer in blocks):
            fused.add(op.name)
        elif op.kind == "cached_attention":
            fused |= _fused_before_attention(graph, op.inputs[1].tensor)
    return fused


def _fused_before_attention(graph: Graph, keys: str) -> set[str]:
    """Return the norms and rotary embeddings between the product of keys and attention that have no other reader."""
    op = graph.producer(keys)
    if op is None or op.is_product or len(graph.consumers(keys)) > 1:
        return set()
    names = {op.name} if op.kind in _NORMS or op.kind == "rotary" else set()
    return names.union(*(_fused_before_attention(graph, operand.tensor) for operand in op.inputs))


def _as_one_kernel(op: Operator) -> tuple[Work, ...]:
    """Return the convolution or the scan of a recurrent layer as one kernel, without the products of the scan.

    The kernel's elements are those of the state at each position, its bytes those of the time steps (operand 1).
    """

    streams = [work for work in op.forward if isinstance(work, Stream)]
    if op.kind == _CONVOLUTION:
        return tuple(replace(stream, kernel=op.kind) for stream in streams)
    if op.kind not in ("state_scan", "delta_scan"):
        return op.forward
    depth = op.settings["state" if op.kind == "state_scan" else "key_dim"]
    assert isinstance(depth, int)
    return tuple(
        replace(
            stream,
            kernel=op.kind,
            elements=(*stream.elements, (depth, "")),
            accesses=tuple(data for data in stream.accesses if data.of == 1),
        )
        for stream in streams
    )
