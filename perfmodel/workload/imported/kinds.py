"""What each kind of imported operator is in a training `Graph`: its products or passes over memory, forward and backward.

One function for each kind, in `KINDS`. The kinds of `workload/kinds/` say the same of operators that are written by hand; here dims come in
pieces (heads and head size), operands may have positions that no dim cuts, and settings such as strides are not known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.workload.graph import Data, Extent, FusedAttention, Operand, Operator, OwnTraffic, Pass, Product, Stream, Work
from perfmodel.workload.imported.graph import ImportedKind, ImportedVertex
from perfmodel.workload.kinds.extents import passes


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """An input, or the output.

    operand       as the network has it; a buffer of the module is no tensor of the network, and its operand has no name
    dims          the operator's dims that run along it, also those that it is read whole of
    extent        what of it lies in memory
    has_gradient  backward makes a gradient of it
    """

    operand: Operand
    dims: tuple[str, ...]
    extent: Extent
    is_parameter: bool = False
    has_gradient: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A vertex with its dims in pieces.

    dims    sizes by name
    pieces  from the vertex's dims to those names, outermost first
    whole   names that stay whole: windows, joined dims, head sizes
    padded  names whose shares may be uneven: vocabularies
    """

    vertex: ImportedVertex
    name: str
    layer: str
    dims: Mapping[str, int]
    pieces: Mapping[str, tuple[str, ...]]
    whole: tuple[str, ...]
    padded: tuple[str, ...]
    inputs: tuple[Read, ...]
    output: Read

    def of(self, *dims: str) -> tuple[str, ...]:
        """The pieces of these dims of the vertex."""
        return tuple(name for dim in dims for name in self.pieces.get(dim, ()))

    def extent(self, names: Iterable[str]) -> Extent:
        return tuple((self.dims[name], name) for name in names)

    @property
    def function(self) -> str:
        """The operator's torch name without namespace, overload and the mark of in-place forms."""
        parts = self.vertex.operator.split(".")
        return (parts[1] if len(parts) > 1 else parts[0]).removesuffix("_")

    def operator(
        self,
        kind: str,
        *,
        forward: tuple[Work, ...] = (),
        backward: tuple[Work, ...] = (),
        traffic: tuple[OwnTraffic, ...] = (),
        sums: Sequence[str] = (),
        whole: Sequence[str] = (),
        keeps: Sequence[Read] = (),
        extras: tuple[Extent, ...] = (),
        inputs: tuple[Read, ...] | None = None,
    ) -> Operator:
        """The record. A dim that the output lacks, and that is neither summed nor has traffic of its own, is whole too.

        Whole dims are no dims of the record: "" stands in their places, as it does for windows. Of what it `keeps` for backward, parameters
        and buffers are there anyway; `extras` are kept besides.
        """
        handled = {*self.output.operand.dims, *sums, *(dim for own in traffic for dim in own.over)}
        gone = {name for name in self.dims if name not in handled} | {*whole, *self.whole}
        is_trained = self.output.has_gradient
        read = [each for each in (self.inputs if inputs is None else inputs) if each.operand.tensor]
        kept = [each for each in keeps if is_trained and each.operand.tensor and not each.is_parameter]
        whose = [each.operand.tensor for each in kept]
        touched = [each.operand.tensor for each in (*read, self.output)]
        # a tensor that is read twice and kept once cannot be told by its name
        named = {name for name in whose if whose.count(name) == touched.count(name)}
        places = {name: [place for place, other in enumerate(touched) if other == name] for name in named}
        saved = tuple(
            Data(extent=each.extent, of=places[name].pop(0) if name in named else None) for each, name in zip(kept, whose, strict=True)
        )
        made = Operator(
            name=self.name,
            kind=kind,
            dims=self.dims,
            inputs=tuple(each.operand for each in read),
            output=self.output.operand,
            forward=forward,
            backward=backward if is_trained else (),
            traffic=tuple(own for own in traffic if is_trained or own.phase is Pass.FORWARD),
            sums=tuple(name for name in sums if name not in self.output.operand.dims),
            padded=self.padded,
            saved=(*saved, *passes(*extras)) if is_trained else (),
            settings={"function": self.vertex.operator},
            layer=self.layer,
        )
        return without_dims(made, gone)


def without_dims(operator: Operator, gone: set[str]) -> Operator:
    """The same operator with some dims whole for good."""
    if not gone:
        return operator

    def named(dims: tuple[str, ...]) -> tuple[str, ...]:
        return tuple("" if dim in gone else dim for dim in dims)

    def rest(extent: Extent) -> Extent:
        return tuple((size, "" if dim in gone else dim) for size, dim in extent)

    def data(each: Data) -> Data:
        return replace(each, extent=rest(each.extent))

    def work(each: Work) -> Work:
        match each:
            case Product():
                tensors = tuple(map(rest, each.tensors))
                return replace(each, batch=rest(each.batch), m=rest(each.m), n=rest(each.n), k=rest(each.k), tensors=tensors)
            case Stream():
                return replace(each, elements=rest(each.elements), accesses=tuple(map(data, each.accesses)))
            case FusedAttention():
                return replace(
                    each,
                    batch=rest(each.batch),
                    heads=rest(each.heads),
                    kv_heads=rest(each.kv_heads),
                    queries=rest(each.queries),
                    keys=rest(each.keys),
                )

    def kept(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name for name in names if name not in gone)

    return replace(
        operator,
        dims={name: size for name, size in operator.dims.items() if name not in gone},
        inputs=tuple(replace(operand, dims=named(operand.dims)) for operand in operator.inputs),
        output=replace(operator.output, dims=named(operator.output.dims)),
        forward=tuple(map(work, operator.forward)),
        backward=tuple(map(work, operator.backward)),
        traffic=tuple(replace(own, over=kept(own.over), extent=rest(own.extent)) for own in operator.traffic if kept(own.over)),
        sums=kept(operator.sums),
        padded=kept(operator.padded),
        saved=tuple(map(data, operator.saved)),
        scratch=tuple(map(data, operator.scratch)),
    )


# ---------------------------------------------------------------------------------------------------------------------------------
# Products
# ---------------------------------------------------------------------------------------------------------------------------------


def _products(first: Read, second: Read, *, batch: Extent, m: Extent, n: Extent, k: Extent) -> tuple[tuple[Work, ...], tuple[Work, ...]]:
    """[m, k] x [k, n] forward, and a product for the gradient of each factor."""
    backward = []
    if second.has_gradient:
        backward.append(Product(batch=batch, m=k, n=n, k=m))
    if first.has_gradient:
        backward.append(Product(batch=batch, m=m, n=k, k=n))
    return (Product(batch=batch, m=m, n=n, k=k),), tuple(backward)


def _kept_factors(first: Read, second: Read) -> tuple[Read, ...]:
    """Each factor is kept for the gradient of the other."""
    return tuple(one for one, other in ((first, second), (second, first)) if other.has_gradient)


def added_input(vertex: ImportedVertex) -> int:
    """Which input is added to the product (a bias), -1 for none: of `addmm` and the like the first, else the third."""
    if vertex.kind not in (ImportedKind.MATMUL, ImportedKind.CONVOLUTION) or len(vertex.inputs) < 3:
        return -1
    return 0 if vertex.operator.split(".")[1:2] in (["addmm"], ["baddbmm"]) else 2


def _matmul(seen: Seen) -> Operator:
    added = added_input(seen.vertex)
    first, second = (each for number, each in enumerate(seen.inputs) if number != added)
    a, b, out = set(first.dims), set(second.dims), set(seen.output.dims)
    batch = seen.extent(dim for dim in seen.dims if dim in a & b & out)
    m = seen.extent(dim for dim in seen.dims if dim in out - b)
    n = seen.extent(dim for dim in seen.dims if dim in (b & out) - a)
    summed = [dim for dim in seen.dims if dim not in out]
    forward, backward = _products(first, second, batch=batch, m=m, n=n, k=seen.extent(summed))
    return seen.operator(
        "einsum", forward=forward, backward=backward, sums=summed, keeps=_kept_factors(first, second), inputs=(first, second)
    )


_WINDOWS = {"w": "s", "h": "r", "u": "q"}


def _convolution(seen: Seen) -> Operator:
    """m = b h w, n filters, k = c r s. Of groups, the filters are cut and the channels read whole; a channel to itself is cut as one dim.

    h and w are cut where the input has a whole number t of rows for each one of the output; then neighbours send the R - t rows that
    windows of R rows share (the dilation is not known, and taken to be 1).
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
    whole: list[str] = []
    traffic: list[OwnTraffic] = []
    for dim in space:
        names = seen.of(dim)
        position = vertex.inputs[0].dims.index(dim)
        step = vertex.inputs[0].shape[position] // vertex.dims[dim]
        if len(names) != 1 or names[0] not in x.operand.dims or names[0] not in seen.output.operand.dims:
            whole += names
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
        whole=whole,
        keeps=_kept_factors(x, weight),
        inputs=(x, weight),
    )


def _attention(seen: Seen) -> Operator:
    """One fused kernel on the full square of queries and keys. Keys and the head size stay whole."""
    q, k, v = seen.inputs[:3]
    heads, queries, keys = seen.of("h"), seen.of("s"), seen.of("z")
    depth, out_depth = seen.vertex.dims["d"], seen.vertex.dims["e"]
    work = FusedAttention(
        batch=seen.extent(seen.of("b", "t")),
        heads=seen.extent(heads),
        kv_heads=tuple((size, dim) for size, dim in k.extent if dim in heads) or seen.extent(heads),
        queries=seen.extent(queries),
        keys=seen.extent(keys),
        head_dim=(depth + out_depth) // 2,
    )
    statistics = seen.extent((*seen.of("b", "t"), *heads, *queries))
    return seen.operator(
        "attention", forward=(work,), backward=(work,), whole=(*keys, *seen.of("e")), keeps=(q, k, v, seen.output), extras=(statistics,)
    )


def _recurrent(seen: Seen) -> Operator:
    """Products with the input for all time steps at once, with the state step after step; the gates are a pass over memory.

    The hidden dim is cut where each matrix has its gates in rows of it: the state is then gathered at each step of each layer.
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
    inputs = tuple(_with_gates(each, names[0]) if is_cut and each.is_parameter else each for each in seen.inputs)
    return seen.operator(
        "recurrent",
        forward=tuple(forward),
        backward=tuple(backward),
        traffic=traffic,
        whole=(*(() if is_cut else names), *seen.of("l", "d", "s")),
        keeps=(seen.inputs[0], seen.output),
        extras=(entries,),
        inputs=inputs,
    )


def _with_gates(read: Read, dim: str) -> Read:
    """A matrix or bias of a recurrent layer, whose rows are the hidden entries of each gate: cutting those cuts the rows."""
    dims = (dim, *read.operand.dims[1:])
    return replace(read, operand=replace(read.operand, dims=dims), dims=(dim,), extent=((read.extent[0][0], dim), *read.extent[1:]))


# ---------------------------------------------------------------------------------------------------------------------------------
# Passes over memory
# ---------------------------------------------------------------------------------------------------------------------------------


def _stream(kernel: str, elements: Extent, *accesses: Extent) -> tuple[Work, ...]:
    return (Stream(kernel=kernel, elements=elements, accesses=passes(*accesses)),)


def _sums(over: Sequence[str], extent: Extent, *phases: Pass) -> tuple[OwnTraffic, ...]:
    """All-reduces of float32 numbers where any of the dims is cut."""
    if not over:
        return ()
    return tuple(OwnTraffic(kind=CollectiveKind.ALL_REDUCE, over=tuple(over), extent=extent, phase=phase, itemsize=4.0) for phase in phases)


def _embedding(seen: Seen) -> Operator:
    """The vocabulary is plainly summed over: rows of other shares count as zero."""
    rows, table = seen.output.extent, next((each for each in seen.inputs if each.is_parameter), seen.inputs[0])
    vocabulary = seen.of("v")
    return seen.operator(
        "embedding",
        forward=_stream("embedding", rows, rows, rows),
        backward=_stream("embedding", rows, rows, rows, table.extent),
        sums=vocabulary,
    )


def _norm(seen: Seen) -> Operator:
    x = next(each for each, operand in zip(seen.inputs, seen.vertex.inputs, strict=True) if len(operand.shape) == len(seen.vertex.dims))
    is_rms = "rms" in seen.function
    reduced = seen.of(*seen.vertex.reduced)
    rows = seen.extent(dim for dim in seen.output.dims if dim not in reduced)
    statistics: Extent = rows if is_rms else ((2, ""), *rows)
    kernel = "rmsnorm" if is_rms else "layernorm"
    out = seen.output.extent
    return seen.operator(
        "rms_norm" if is_rms else "layer_norm",
        forward=_stream(kernel, out, x.extent, out),
        backward=_stream(kernel, out, x.extent, out, x.extent),
        traffic=_sums(reduced, statistics, Pass.FORWARD, Pass.BACKWARD),
        keeps=(x,),
        extras=(statistics,),
    )


def _batch_norm(seen: Seen) -> Operator:
    """With the statistics of each share by itself, as data parallelism has it: no traffic where the batch is cut, but other mathematics."""
    x, out = seen.inputs[0].extent, seen.output.extent
    channels: Extent = ((2, ""), *seen.extent(seen.of(*seen.vertex.inputs[0].dims[1:2])))
    return seen.operator(
        "batch_norm",
        forward=_stream("layernorm", out, x, x, out),
        backward=_stream("layernorm", out, x, x, out, out, x),
        keeps=seen.inputs[:1],
        extras=(channels,),
    )


def _softmax(seen: Seen) -> Operator:
    reduced = seen.of(*seen.vertex.reduced)
    rows = seen.extent(dim for dim in seen.output.dims if dim not in reduced)
    out = seen.output.extent
    return seen.operator(
        "softmax",
        forward=_stream("softmax", out, seen.inputs[0].extent, out),
        backward=_stream("softmax", out, out, out, out),
        traffic=_sums(reduced, rows, Pass.FORWARD, Pass.FORWARD, Pass.BACKWARD),
        keeps=(seen.output,),
    )


def _cross_entropy(seen: Seen) -> Operator:
    """Three sums over a cut vocabulary; the mean over the samples leaves the loss partial."""
    logits = seen.inputs[0].extent
    vocabulary = seen.of("v")
    others = [dim for dim in seen.dims if dim not in vocabulary]
    return seen.operator(
        "cross_entropy",
        forward=_stream("cross_entropy", logits, logits, logits),
        backward=_stream("cross_entropy", logits, logits, logits, logits, logits),
        traffic=_sums(vocabulary, seen.extent(others), Pass.FORWARD, Pass.FORWARD, Pass.FORWARD),
        sums=[dim for dim in others if dim not in seen.output.operand.dims],
        extras=(logits,),
    )


def _pooling(seen: Seen) -> Operator:
    """Samples and channels are cut; the pixels stay whole, as the window is not known."""
    x, out = seen.inputs[0].extent, seen.output.extent
    kept: tuple[Extent, ...] = (((2, ""), *out),) if "max" in seen.function else ()  # where the maxima were: int64
    names = [name for name in seen.vertex.outputs[0].dims if name]
    return seen.operator(
        "pooling",
        forward=_stream("default", out, x, out, *kept),
        backward=_stream("default", x, out, *kept, x),
        whole=seen.of(*names[2:]),
        keeps=seen.inputs[:1],
        extras=kept,
    )


_LINEAR_REDUCTIONS = ("mean", "sum")


def _reduction(seen: Seen) -> Operator:
    """Means, sums and losses made of them are plainly summed; a maximum or a norm is combined among those that share it."""
    out = seen.output.extent
    read = tuple(each.extent for each in seen.inputs)
    gone = [dim for dim in seen.dims if dim not in seen.output.operand.dims]
    is_linear = seen.function in _LINEAR_REDUCTIONS or len(seen.inputs) > 1
    is_search = seen.function in ("argmax", "argmin", "prod")
    return seen.operator(
        "reduction",
        forward=_stream("default", read[0], *read, out),
        backward=_stream("default", read[0], out, *read),
        traffic=() if is_linear or is_search else _sums(gone, out, Pass.FORWARD),
        sums=gone if is_linear else (),
        keeps=() if seen.function in _LINEAR_REDUCTIONS else seen.inputs,
    )


_KEEPS_NOTHING = frozenset({"add", "sub", "subtract", "rsub", "neg", "to", "_to_copy", "type_as", "clone", "copy", "zero", "fill", "where"})
_KEEPS_OUTPUT = frozenset({"relu", "tanh", "sigmoid", "exp", "sqrt", "rsqrt", "dropout", "hardtanh", "relu6", "threshold"})
_KEEPS_THE_OTHER = frozenset({"mul", "multiply"})
_KERNELS = {"gelu": "gelu", "silu": "silu", "dropout": "dropout", "native_dropout": "dropout"}


def _elementwise(seen: Seen) -> Operator:
    """A chain of n operators is n passes, each of which writes a tensor of the output's shape; all but the last are kept."""
    out = seen.output.extent
    between = (out,) * (2 * (seen.vertex.chain - 1))
    into = tuple(each.extent for each in seen.inputs if each.has_gradient)
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
    return seen.operator(
        "elementwise",
        forward=_stream(kernel, out, *(each.extent for each in seen.inputs), *between, out),
        backward=_stream(kernel, out, out, *(each.extent for each in keeps), *between, *into),
        keeps=keeps,
        extras=(out,) * (seen.vertex.chain - 1),
    )


def bias(seen: Seen) -> Operator:
    """What is added to a product: an operator of its own, as parts of the product may be sums that are not complete.

    A bias that is a parameter stays in the cache.
    """
    out = seen.output.extent
    product, added = seen.inputs
    second = () if added.is_parameter else (added.extent,)
    return seen.operator(
        "elementwise", forward=_stream("add", out, product.extent, *second, out), backward=_stream("add", out, out, *second)
    )


def _moved(kind: str) -> Callable[[Seen], Operator]:
    """Entries that are copied to other places; the gradient goes back the same way."""

    def describe(seen: Seen) -> Operator:
        out = seen.output.extent
        into = tuple(each.extent for each in seen.inputs if each.has_gradient)
        return seen.operator(
            kind,
            forward=_stream("default", out, *(each.extent for each in seen.inputs), out),
            backward=_stream("default", out, out, *into),
        )

    return describe


def _split(seen: Seen) -> Operator:
    """A view forward; backward writes the gradient of the part into that of the whole."""
    out = seen.output.extent
    return seen.operator("split", backward=_stream("default", out, out, out))


def _unrecognised(seen: Seen) -> Operator:
    """Computed whole everywhere; its work, where torch counts any, as one product."""
    out = seen.output.extent
    into = tuple(each.extent for each in seen.inputs)
    forward = _stream("default", out, *into, out)
    backward = _stream("default", out, out, *into)
    if seen.vertex.flops:
        product = Product(m=((round(seen.vertex.flops / 2), ""),))
        forward, backward = (*forward, product), (*backward, product, product)
    return seen.operator("unrecognised", forward=forward, backward=backward, keeps=seen.inputs)


#: Of each kind but inputs and constants, which are no operators.
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
