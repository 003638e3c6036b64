"""Conversion of imported operators to operators of a training `Graph`: one function for each kind, in `KINDS`.

Most use the kinds of `workload/kinds/` (`Seen.of_kind`). This file adds what an export leaves open: split dims, operands read unsharded,
tensors without gradients. It also has the kinds that only exports have: chains of elementwise operators, windows with unknown strides,
recurrent layers, copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.workload.graph import DimRoles, Operand, Operator
from perfmodel.workload.imported.graph import ImportedKind, ImportedVertex
from perfmodel.workload.kinds.attention import AttentionDims, attention
from perfmodel.workload.kinds.batch_norm import batch_norm
from perfmodel.workload.kinds.dense import FUNCTIONS, einsum, elementwise, layer_norm, reduction, rms_norm, softmax
from perfmodel.workload.kinds.vocabulary import cross_entropy, embedding
from perfmodel.workload.rewriting import with_extents
from perfmodel.workload.work import Data, Extent, OwnTraffic, Pass, Product, Stream, Work, passes


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """An input or the output of a vertex.

    operand       the operand in the network; a buffer of the module is no tensor of the network, and its operand has no name
    dims          the operator's dims along it, also those that it is read unsharded along
    extent        its stored elements
    has_gradient  backward computes its gradient
    """

    operand: Operand
    dims: tuple[str, ...]
    extent: Extent
    is_parameter: bool = False
    has_gradient: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A vertex with split dims.

    dims     sizes by name
    pieces   names of the pieces of each dim of the vertex, outermost first
    unsplit  names that no axis may shard: windows, joined dims, head sizes
    padded   names whose shards may be uneven: vocabularies
    """

    vertex: ImportedVertex
    name: str
    layer: str
    dims: Mapping[str, int]
    pieces: Mapping[str, tuple[str, ...]]
    unsplit: tuple[str, ...]
    padded: tuple[str, ...]
    inputs: tuple[Read, ...]
    output: Read

    def of(self, *dims: str) -> tuple[str, ...]:
        """Return the names of the pieces of these dims."""
        return tuple(name for dim in dims for name in self.pieces.get(dim, ()))

    def extent(self, names: Iterable[str]) -> Extent:
        return tuple((self.dims[name], name) for name in names)

    def operands(self, reads: Sequence[Read]) -> list[Operand]:
        """Return the operands of reads, with the dims along them."""
        return [Operand(tensor=read.operand.tensor, dims=read.dims) for read in reads]

    def of_kind(self, operator: Operator, reads: Sequence[Read], *further: Read) -> Operator:
        """Return an operator of a kind with the operands of the network: these reads, and `further` ones that the kind does not take.

        The extent of a tensor is that of its stored elements. Parameters and buffers are not saved; gradients that no tensor needs are
        neither computed nor prepared for. A dim that the output lacks and that is neither summed nor has traffic becomes unsplit.
        """
        given, is_trained = (*reads, self.output), self.output.has_gradient
        stays = sorted((read for read in (*reads, *further) if read.operand.tensor), key=lambda read: number_of(self.inputs, read))
        positions = {number: number_of(stays, read) for number, read in enumerate(reads) if read.operand.tensor} | {len(reads): len(stays)}
        in_memory = {self.extent(read.dims): read.extent for read in given}

        def data(original: Data) -> Data:
            return original if original.of is None else replace(original, extent=given[original.of].extent, of=positions.get(original.of))

        def works(items: tuple[Work, ...]) -> tuple[Work, ...]:
            return tuple(
                replace(work, elements=in_memory.get(work.elements, work.elements), accesses=tuple(map(data, work.accesses)))
                if isinstance(work, Stream)
                else work
                for work in items
            )

        kept = [entry for entry in operator.saved if entry.of is None or (entry.of in positions and not given[entry.of].is_parameter)]
        handled = {*self.output.operand.dims, *operator.roles.sums, *(dim for collective in operator.traffic for dim in collective.over)}
        described = replace(
            operator,
            inputs=tuple(read.operand for read in stays),
            output=self.output.operand,
            forward=works(operator.forward),
            backward=works(operator.backward) if is_trained else (),
            traffic=tuple(collective for collective in operator.traffic if is_trained or collective.phase is Pass.FORWARD),
            roles=replace(operator.roles, padded=self.padded),
            saved=tuple(map(data, kept)) if is_trained else (),
            settings={"function": self.vertex.operator},
            layer=self.layer,
        )
        return without_dims(described, {name for name in self.dims if name not in handled} | {*operator.roles.unsplit, *self.unsplit})

    @property
    def function(self) -> str:
        return self.vertex.function

    def operator(
        self,
        kind: str,
        *,
        forward: tuple[Work, ...] = (),
        backward: tuple[Work, ...] = (),
        traffic: tuple[OwnTraffic, ...] = (),
        sums: Sequence[str] = (),
        unsplit: Sequence[str] = (),
        keeps: Sequence[Read] = (),
        extras: tuple[Extent, ...] = (),
        inputs: tuple[Read, ...] | None = None,
    ) -> Operator:
        """Return an operator that only exports have; it saves `keeps` of its inputs and outputs for backward, and `extras`."""
        reads = self.inputs if inputs is None else inputs
        given = (*reads, self.output)
        saved = tuple(Data(extent=read.extent, of=number_of(given, read)) for read in keeps)
        described = Operator(
            name=self.name,
            kind=kind,
            dims=self.dims,
            inputs=tuple(self.operands(reads)),
            output=self.operands([self.output])[0],
            forward=forward,
            backward=backward,
            traffic=traffic,
            roles=DimRoles(sums=tuple(name for name in sums if name not in self.output.operand.dims), unsplit=tuple(unsplit)),
            saved=(*saved, *passes(*extras)),
        )
        return self.of_kind(described, reads)


def number_of(reads: Sequence[Read], read: Read) -> int:
    """Return the index of a read, by identity: a tensor that is read twice has two reads. Reads that are not in the list come last."""
    return next((number for number, candidate in enumerate(reads) if candidate is read), len(reads))


def without_dims(operator: Operator, gone: set[str]) -> Operator:
    """Return the same operator with some dims removed, so that they are unsharded."""
    if not gone:
        return operator

    def named(dims: tuple[str, ...]) -> tuple[str, ...]:
        return tuple("" if dim in gone else dim for dim in dims)

    def rest(extent: Extent) -> Extent:
        return tuple((size, "" if dim in gone else dim) for size, dim in extent)

    def kept(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name for name in names if name not in gone)

    return with_extents(
        replace(
            operator,
            traffic=tuple(replace(collective, over=kept(collective.over)) for collective in operator.traffic if kept(collective.over)),
        ),
        rest,
        dims={name: size for name, size in operator.dims.items() if name not in gone},
        inputs=tuple(replace(operand, dims=named(operand.dims)) for operand in operator.inputs),
        output=replace(operator.output, dims=named(operator.output.dims)),
        roles=operator.roles.with_dims(kept),
    )


# ---------------------------------------------------------------------------------------------------------------------------------
# Products
# ---------------------------------------------------------------------------------------------------------------------------------


def _products(first: Read, second: Read, *, batch: Extent, m: Extent, n: Extent, k: Extent) -> tuple[tuple[Work, ...], tuple[Work, ...]]:
    """Return the work of [m, k] x [k, n], and the products for the gradients of its factors."""
    backward = []
    if second.has_gradient:
        backward.append(Product(batch=batch, m=k, n=n, k=m))
    if first.has_gradient:
        backward.append(Product(batch=batch, m=m, n=k, k=n))
    return (Product(batch=batch, m=m, n=n, k=k),), tuple(backward)


def _kept_factors(first: Read, second: Read) -> tuple[Read, ...]:
    """Return the saved factors: each is saved for the gradient of the other."""
    return tuple(one for one, other in ((first, second), (second, first)) if other.has_gradient)


def added_input(vertex: ImportedVertex) -> int:
    """Return the index of the input added to the product (a bias): for `addmm` and the like the first, else the third; -1: none."""
    if vertex.kind not in (ImportedKind.MATMUL, ImportedKind.CONVOLUTION):
        return -1
    added = 0 if vertex.function in ("addmm", "baddbmm") else 2
    return added if len(vertex.inputs) > 2 and not vertex.inputs[added].is_index else -1


def _matmul(seen: Seen) -> Operator:
    added = added_input(seen.vertex)
    factors = tuple(read for number, read in enumerate(seen.inputs) if number != added)[:2]  # a third maps rows to matrices
    first, second = factors
    x, y, output = seen.operands((*factors, seen.output))
    operator = einsum(
        seen.name,
        x,
        y,
        output,
        seen.dims,
        second_is_parameter=second.is_parameter,
        first_has_gradient=first.has_gradient,
        second_has_gradient=second.has_gradient,
    )
    return seen.of_kind(operator, factors)


_WINDOWS = {"w": "s", "h": "r", "u": "q"}


def _convolution(seen: Seen) -> Operator:
    """Return a convolution: m = b h w, n filters, k = c r s. With groups, filters are sharded and channels read unsharded.

    A depthwise convolution shards its channels as one dim. h and w are sharded where the input has an integer number t of rows per output
    row. Then neighbours send the R - t rows that windows of R rows share (the dilation is unknown and assumed to be 1).
    """
    vertex = seen.vertex
    x, weight = seen.inputs[0], seen.inputs[1]
    taps = [dim for dim in vertex.unsplit if dim in vertex.dims]
    space = [dim for dim in vertex.dims if dim in _WINDOWS and dim not in taps]
    filters = seen.of(*(dim for dim in vertex.outputs[0].dims[1:2] if dim))
    groups = round(2.0 * prod(vertex.dims.values()) / vertex.flops) if vertex.flops else 1
    m = seen.extent(seen.of("b", *space))
    window: Extent = tuple((vertex.dims[dim], "") for dim in taps)
    summed: tuple[str, ...] = ()
    if "g" in vertex.dims:
        forward, backward = _products(x, weight, batch=seen.extent(filters), m=m, n=(), k=window)
    elif groups > 1:
        channels: Extent = ((vertex.dims["c"] // groups, ""),)
        forward, backward = _products(x, weight, batch=(), m=m, n=seen.extent(filters), k=(*channels, *window))
    else:
        summed = seen.of("c")
        forward, backward = _products(x, weight, batch=(), m=m, n=seen.extent(filters), k=(*seen.extent(summed), *window))
    unsplit: list[str] = []
    traffic: list[OwnTraffic] = []
    for dim in space:
        names = seen.of(dim)
        position = vertex.inputs[0].dims.index(dim)
        step = vertex.inputs[0].shape[position] // vertex.dims[dim]
        if len(names) != 1 or names[0] not in x.operand.dims or names[0] not in seen.output.operand.dims:
            unsplit += names
            continue
        shared = vertex.dims.get(_WINDOWS[dim], 1) - step
        if shared > 0:
            sent = ((shared, ""), *(factor for factor in x.extent if factor[1] != names[0]))
            traffic += [
                OwnTraffic(kind=CollectiveKind.SEND_RECV, over=names, extent=sent, phase=phase)
                for phase in Pass
                if phase is Pass.FORWARD or x.has_gradient
            ]
    return seen.operator(
        "convolution",
        forward=forward,
        backward=backward,
        traffic=tuple(traffic),
        sums=summed,
        unsplit=unsplit,
        keeps=_kept_factors(x, weight),
        inputs=(x, weight),
    )


def _attention(seen: Seen) -> Operator:
    """Return one fused kernel on the full score matrix. The head size is unsplit."""
    factors, vertex = seen.inputs[:3], seen.vertex
    heads = seen.of("h")
    kv_heads = tuple(dim for _, dim in factors[1].extent if dim in heads) or heads
    named = AttentionDims(batch=seen.of("b", "t"), queries=seen.of("s"), keys=seen.of("z"), heads=heads, kv_heads=kv_heads)
    head_dim = (vertex.dims["d"] + vertex.dims["e"]) // 2
    q, k, v, output = seen.operands((*factors, seen.output))
    operator = attention(seen.name, q, k, v, output, seen.dims, head_dim=head_dim, named=named)
    roles = replace(operator.roles, unsplit=(*operator.roles.unsplit, *seen.of("e")))
    return seen.of_kind(replace(operator, roles=roles), factors, *seen.inputs[3:])


def _recurrent(seen: Seen) -> Operator:
    """Return the products with the input for all time steps at once and those with the state step by step; the gates are a pass over
    memory.

    The hidden dim is sharded where each matrix has its gates in rows: the state is then all-gathered at each step of each layer.
    """
    vertex = seen.vertex
    matrices = [operand.shape for operand in vertex.inputs if operand.parameter and len(operand.shape) == 2]
    hidden, steps, layers = vertex.dims["e"], vertex.dims["s"], vertex.dims["l"]
    names = seen.of("e")
    gates = matrices[0][0] // hidden if matrices else 1
    is_cut = len(names) == 1 and all(rows == gates * hidden and gates in (1, 3, 4) for rows, _ in matrices) and len(matrices) % 2 == 0
    rows: Extent = ((gates, ""), *seen.extent(names)) if is_cut else ()
    b, tokens = seen.extent(seen.of("b")), seen.extent(seen.of("b", "s"))
    entries: Extent = ((layers, ""), *tokens, *((gates, ""), *seen.extent(names)))
    forward: list[Work] = []
    backward: list[Work] = []
    for number, (height, width) in enumerate(matrices):
        n = rows or ((height, ""),)
        k: Extent = ((width, ""),)
        is_state = number % 2 == 1
        m, repeats = (b, steps) if is_state else (tokens, 1)
        forward.append(Product(m=m, n=n, k=k, repeats=repeats))
        backward.append(Product(m=m, n=k, k=n, repeats=repeats))
        backward.append(Product(m=n, n=k, k=tokens))
    forward.append(Stream(kernel="default", elements=entries, accesses=passes(*(entries,) * 4)))
    backward.append(Stream(kernel="default", elements=entries, accesses=passes(*(entries,) * 4)))
    state: Extent = (*b, (hidden, ""))
    collectives = ((CollectiveKind.ALL_GATHER, Pass.FORWARD), (CollectiveKind.REDUCE_SCATTER, Pass.BACKWARD))
    traffic = tuple(
        OwnTraffic(kind=kind, over=names, extent=state, phase=phase, repeats=steps * layers) for kind, phase in collectives if is_cut
    )
    inputs = tuple(_with_gates(read, names[0]) if is_cut and read.is_parameter else read for read in seen.inputs)
    return seen.operator(
        "recurrent",
        forward=tuple(forward),
        backward=tuple(backward),
        traffic=traffic,
        unsplit=(*(() if is_cut else names), *seen.of("l", "d", "s")),
        keeps=(seen.inputs[0], seen.output),
        extras=(entries,),
        inputs=inputs,
    )


def _with_gates(read: Read, dim: str) -> Read:
    """Return a matrix or bias of a recurrent layer with sharded rows, which are the hidden entries of each gate."""
    dims = (dim, *read.operand.dims[1:])
    return replace(read, operand=replace(read.operand, dims=dims), dims=(dim,), extent=((read.extent[0][0], dim), *read.extent[1:]))


# ---------------------------------------------------------------------------------------------------------------------------------
# Passes over memory
# ---------------------------------------------------------------------------------------------------------------------------------


def _stream(kernel: str, elements: Extent, *accesses: Extent) -> tuple[Work, ...]:
    return (Stream(kernel=kernel, elements=elements, accesses=passes(*accesses)),)


def _embedding(seen: Seen) -> Operator:
    table = next((read for read in seen.inputs if read.is_parameter), seen.inputs[0])
    ids = next((read for read in seen.inputs if read is not table), table)
    index, rows, output = seen.operands((ids, table, seen.output))
    operator = embedding(seen.name, index, rows, output, seen.dims, vocabulary=seen.of("v"))
    return seen.of_kind(operator, (ids, table), *(read for read in seen.inputs if read is not ids and read is not table))


def _norm(seen: Seen) -> Operator:
    x = next(read for read, operand in zip(seen.inputs, seen.vertex.inputs, strict=True) if len(operand.shape) == len(seen.vertex.dims))
    further = tuple(read for read in seen.inputs if read is not x)
    operand, output = seen.operands((x, seen.output))
    over = seen.of(*seen.vertex.reduced)
    if "rms" in seen.function:
        operator = rms_norm(seen.name, operand, None, output, seen.dims, over=over)
    else:
        operator = layer_norm(seen.name, operand, None, None, output, seen.dims, over=over)
    return seen.of_kind(operator, (x,), *further)


def _batch_norm(seen: Seen) -> Operator:
    """Return a batch norm with the statistics of each shard, as in data parallelism: no traffic, but different results."""
    x = seen.inputs[0]
    operand, output = seen.operands((x, seen.output))
    channels = seen.of(*seen.vertex.inputs[0].dims[1:2])
    return seen.of_kind(batch_norm(seen.name, operand, None, None, output, seen.dims, features=channels), (x,), *seen.inputs[1:])


def _softmax(seen: Seen) -> Operator:
    x = seen.inputs[:1]
    operand, output = seen.operands((*x, seen.output))
    over = " ".join(seen.of(*seen.vertex.reduced))
    return seen.of_kind(softmax(seen.name, operand, output, seen.dims, over=over), x, *seen.inputs[1:])


def _cross_entropy(seen: Seen) -> Operator:
    """Return the loss; the mean over the samples leaves it partial."""
    read = seen.inputs[:2]
    logits, labels, output = seen.operands((*read, seen.output))
    vocabulary = seen.of("v")
    rows = replace(labels, dims=tuple(dim for dim in labels.dims if dim not in vocabulary))  # probabilities have one for each class
    operator = cross_entropy(seen.name, logits, rows, output, seen.dims, over=" ".join(vocabulary))
    return seen.of_kind(operator, read, *seen.inputs[2:])


def _pooling(seen: Seen) -> Operator:
    """Return a pooling with sharded samples and channels; the pixels are unsplit, as the window is unknown."""
    x, out = seen.inputs[0].extent, seen.output.extent
    kept: tuple[Extent, ...] = (((2, ""), *out),) if "max" in seen.function else ()  # indices of the maxima: int64
    names = [name for name in seen.vertex.outputs[0].dims if name]
    return seen.operator(
        "pooling",
        forward=_stream("default", out, x, out, *kept),
        backward=_stream("default", x, out, *kept, x),
        unsplit=seen.of(*names[2:]),
        keeps=seen.inputs[:1],
        extras=kept,
    )


def _reduction(seen: Seen) -> Operator:
    """Return a reduction: means, sums and losses are summed; a maximum or a norm needs an all-reduce."""
    if seen.function in FUNCTIONS and len(seen.inputs) == 1 and set(seen.inputs[0].dims) - set(seen.output.dims):
        x, output = seen.operands((*seen.inputs, seen.output))
        operator = reduction(seen.name, x, output, seen.dims, function=seen.function)
        return seen.of_kind(operator, seen.inputs)
    out = seen.output.extent
    read = tuple(read.extent for read in seen.inputs)
    gone = [dim for dim in seen.dims if dim not in seen.output.operand.dims]
    is_linear = seen.function in FUNCTIONS or len(seen.inputs) > 1
    traffic: tuple[OwnTraffic, ...] = ()
    if gone and not is_linear and seen.function not in ("argmax", "argmin", "prod"):
        traffic = (OwnTraffic(kind=CollectiveKind.ALL_REDUCE, over=tuple(gone), extent=out, phase=Pass.FORWARD, itemsize=4.0),)
    return seen.operator(
        "reduction",
        forward=_stream("default", read[0], *read, out),
        backward=_stream("default", read[0], out, *read),
        traffic=traffic,
        sums=gone if is_linear else (),
        keeps=() if seen.function in FUNCTIONS else seen.inputs,
    )


_KEEPS_NOTHING = frozenset({"add", "sub", "subtract", "rsub", "neg", "to", "_to_copy", "type_as", "clone", "copy", "zero", "fill", "where"})
_KEEPS_OUTPUT = frozenset({"relu", "tanh", "sigmoid", "exp", "sqrt", "rsqrt", "dropout", "hardtanh", "relu6", "threshold"})
_KEEPS_THE_OTHER = frozenset({"mul", "multiply"})
_KERNELS = {"gelu": "gelu", "silu": "silu", "dropout": "dropout", "native_dropout": "dropout"}


def _elementwise(seen: Seen) -> Operator:
    """Return a chain of n operators: n passes, each of which writes a tensor of the output's shape; all but the last are saved."""
    out, given = seen.output.extent, (*seen.inputs, seen.output)
    between = passes(*(out,) * (2 * (seen.vertex.chain - 1)))
    kernel = _KERNELS.get(seen.function, "add")
    keeps: tuple[Read, ...]
    if seen.function in _KEEPS_NOTHING:
        keeps = ()
    elif seen.function in _KEEPS_OUTPUT:
        keeps = (seen.output,)
    elif seen.function in _KEEPS_THE_OTHER and seen.vertex.chain == 1 and len(seen.inputs) == 2:
        keeps = _kept_factors(*seen.inputs)
    else:
        keeps = seen.inputs

    def data(*reads: Read, is_gradient: bool = False) -> tuple[Data, ...]:
        return tuple(Data(extent=read.extent, of=number_of(given, read), is_gradient=is_gradient) for read in reads)

    forward = (*data(*seen.inputs), *between, *data(seen.output))
    into = data(*(read for read in seen.inputs if read.has_gradient), is_gradient=True)
    backward = (*data(seen.output, is_gradient=True), *data(*keeps), *between, *into)
    return seen.operator(
        "elementwise",
        forward=(Stream(kernel=kernel, elements=out, accesses=forward),),
        backward=(Stream(kernel=kernel, elements=out, accesses=backward),),
        keeps=keeps,
        extras=(out,) * (seen.vertex.chain - 1),
    )


def bias(seen: Seen) -> Operator:
    """Return the bias of a product as a separate operator, because the product may be a partial sum."""
    product, added = seen.inputs
    if added.is_parameter:
        *inputs, output = seen.operands((*seen.inputs, seen.output))
        return seen.of_kind(elementwise(seen.name, "bias", tuple(inputs), output, seen.dims), seen.inputs)
    out = seen.output.extent
    return seen.operator(
        "elementwise", forward=_stream("add", out, product.extent, added.extent, out), backward=_stream("add", out, out, added.extent)
    )


def _moved(kind: str) -> Callable[[Seen], Operator]:
    """Return the kind of operators that copy entries to other positions; the gradient is copied back."""

    def describe(seen: Seen) -> Operator:
        out = seen.output.extent
        into = tuple(read.extent for read in seen.inputs if read.has_gradient)
        return seen.operator(
            kind,
            forward=_stream("default", out, *(read.extent for read in seen.inputs), out),
            backward=_stream("default", out, out, *into),
        )

    return describe


def _split(seen: Seen) -> Operator:
    """Return a view in forward; backward writes the gradient of the part into that of the full tensor."""
    out = seen.output.extent
    return seen.operator("split", backward=_stream("default", out, out, out))


def _unrecognised(seen: Seen) -> Operator:
    """Return an operator computed in full on every chip; its work, where torch counts any, is one product."""
    out = seen.output.extent
    into = tuple(read.extent for read in seen.inputs)
    forward = _stream("default", out, *into, out)
    backward = _stream("default", out, out, *into)
    if seen.vertex.flops:
        product = Product(m=((round(seen.vertex.flops / 2), ""),))
        forward, backward = (*forward, product), (*backward, product, product)
    return seen.operator("unrecognised", forward=forward, backward=backward, keeps=seen.inputs)


#: Conversions of each kind except inputs and constants, which are no operators.
KINDS: Mapping[ImportedKind, Callable[[Seen], Operator]] = {
    ImportedKind.MATMUL: _matmul,
    ImportedKind.CONVOLUTION: _convolution,
    ImportedKind.ATTENTION: _attention,
    ImportedKind.RECURRENT: _recurrent,
    ImportedKind.EMBEDDING: _embedding,
    ImportedKind.NORM: _norm,
    ImportedKind.BATCH_NORM: _batch_norm,
    ImportedKind.SOFTMAX: _softmax,
    ImportedKind.CROSS_ENTROPY: _cross_entropy,
    ImportedKind.POOLING: _pooling,
    ImportedKind.REDUCTION: _reduction,
    ImportedKind.ELEMENTWISE: _elementwise,
    ImportedKind.CONCAT: _moved("concat"),
    ImportedKind.SPLIT: _split,
    ImportedKind.REARRANGE: _moved("rearrange"),
    ImportedKind.UNRECOGNISED: _unrecognised,
}
