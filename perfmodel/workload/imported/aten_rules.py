"""Rules from torch operators, by name, to iteration spaces: dims, the dims of each tensor, and the work.

A new operator is one line of `RULES`, with a new rule if none fits. Inputs are shapes and plain arguments, no torch. Work is counted like
torch's FlopCounter: only products, a multiply-add as 2, attention on the full score matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod

from perfmodel.workload.imported.graph import ImportedKind
from perfmodel.workload.imported.iteration_space import (
    Call,
    Dims,
    IterationSpace,
    Rule,
    aligned,
    axes_of,
    axis_of,
    lead_names,
    named,
    sizes_of,
)

# ---------------------------------------------------------------------------------------------------------------------------------
# Products
# ---------------------------------------------------------------------------------------------------------------------------------


def _linear(call: Call) -> IterationSpace:
    """Return x[.., c] * W[n, c] -> [.., n]."""
    x, weight = call.tensors["input"], call.tensors["weight"]
    leads = lead_names(len(x) - 1)
    out_features = ("n",) if len(weight) == 2 else ()
    dims = {**sizes_of(leads, x[:-1]), **sizes_of((*out_features, "c"), weight)}
    reads = {"input": (*leads, "c"), "weight": (*out_features, "c"), "bias": out_features}
    return _product(dims, reads, (*leads, *out_features))


def _product(dims: Mapping[str, int], reads: Mapping[str, Dims], output: Dims) -> IterationSpace:
    return IterationSpace(kind=ImportedKind.MATMUL, dims=dims, reads=reads, writes=(output,), flops=2.0 * prod(dims.values()))


def _matmul(first: str, second: str, added: str = "") -> Rule:
    """Return the rule of [.., m, k] * [.., k, n] -> [.., m, n]; leading dims are broadcast, and a vector has no m or n."""

    def rule(call: Call) -> IterationSpace:
        left, right = call.tensors[first], call.tensors[second]
        rows = ("m",) if len(left) > 1 else ()
        columns = ("n",) if len(right) > 1 else ()
        output = call.outputs[0]
        leads = lead_names(len(output) - len(rows) - len(columns))
        dims = {**sizes_of((*leads, *rows, *columns), output), "k": left[-1]}
        reads = {
            first: (*aligned(left[:-2], leads, dims), *rows, "k"),
            second: (*aligned(right[:-2], leads, dims), "k", *columns),
        }
        if added:
            reads[added] = aligned(call.tensors[added], (*leads, *rows, *columns), dims)
        return _product(dims, reads, (*leads, *rows, *columns))

    return rule


def _grouped_mm(call: Call) -> IterationSpace | None:
    """Return x[m, k] * W[e, k, n] -> [m, n], grouped: each row is multiplied by the matrix of its group."""
    x, matrices = call.tensors["self"], call.tensors["mat2"]
    if len(matrices) == len(x) == 3:
        return _matmul("self", "mat2")(call)
    if len(x) != 2 or len(matrices) != 3:
        return None
    dims = {**sizes_of(("m", "k"), x), "n": matrices[-1]}
    return _product(dims, {"self": ("m", "k"), "mat2": ("", "k", "n"), "bias": ("", "n")}, ("m", "n"))


def _einsum(call: Call) -> IterationSpace | None:
    equation = str(call.values["equation"]).replace(" ", "")
    operands = [name for name in call.tensors if name.startswith("tensors.")]
    if "->" not in equation or "." in equation or len(operands) != 2:
        return None
    inputs, output = equation.split("->")
    terms = [tuple(term) for term in inputs.split(",")]
    if any(len(set(term)) != len(term) for term in terms):
        return None
    dims: dict[str, int] = {}
    for term, name in zip(terms, operands, strict=True):
        for dim, size in zip(term, call.tensors[name], strict=True):
            dims[dim] = max(size, dims.get(dim, 1))
    reads = {
        name: tuple(dim if size == dims[dim] else "" for dim, size in zip(term, call.tensors[name], strict=True))
        for term, name in zip(terms, operands, strict=True)
    }
    space = _product(dims, reads, tuple(output))
    contracted = (set(terms[0]) & set(terms[1])) - set(output)
    return space if contracted else IterationSpace(kind=ImportedKind.ELEMENTWISE, dims=dims, reads=reads, writes=space.writes)


_SPATIAL = {1: ("w", "s"), 2: ("hw", "rs"), 3: ("uhw", "qrs")}


def _convolution(call: Call) -> IterationSpace | None:
    """Return x[b, g c, h, w] * W[g n, c, r, s] -> [b, g n, h, w], h and w of the output; g groups, usually one."""
    x, weight, output = call.tensors["input"], call.tensors["weight"], call.outputs[0]
    if len(weight) - 2 not in _SPATIAL or len(x) != len(weight):
        return None
    space, window = (tuple(names) for names in _SPATIAL[len(weight) - 2])
    groups = int(call.values.get("groups", 1))
    is_transposed = bool(call.values.get("transposed", False)) or "transpose" in call.name
    per_group = {"c": x[1] // groups, "n": output[1] // groups}
    # A depthwise convolution has one channel in each group: g is then the channel.
    channels_in, channels_out = ("g", "g") if groups == x[1] == output[1] else ("c", "n")
    if groups > 1 and channels_in == "c":
        per_group = {"c": x[1], "n": output[1]}  # full channels as the dims; their assignment to groups is not tracked
    dims = {"b": x[0], **({"g": groups} if channels_in == "g" else per_group)}
    dims |= sizes_of(space, x[2:] if is_transposed else output[2:]) | sizes_of(window, weight[2:])
    filters = (channels_out, "") if channels_in == "g" or groups > 1 else ("c", "n") if is_transposed else ("n", "c")
    reads = {"input": ("b", channels_in, *space), "weight": (*filters, *window), "bias": (channels_out,)}
    if is_transposed and groups > 1:
        reads["weight"] = (channels_in, "", *window)
    grouped = groups if channels_in == "c" else 1
    return IterationSpace(
        kind=ImportedKind.CONVOLUTION,
        dims=dims,
        reads=reads,
        writes=(("b", channels_out, *space),),
        flops=2.0 * prod(dims.values()) / grouped,
        unsplit=window,
    )


def _attention(call: Call) -> IterationSpace | None:
    """Return q[b, h, s, d], k[b, h, z, d], v[b, h, z, e] -> [b, h, s, e]; k and v may have fewer heads, each for a run of heads of q."""
    q, k, v = (call.tensors[name] for name in ("query", "key", "value"))
    if len(q) < 3 or not len(q) == len(k) == len(v):
        return None
    heads = ("h",) if len(q) > 3 else ()
    leads = tuple("bt"[: len(q) - 2 - len(heads)])
    if len(leads) + len(heads) + 2 != len(q):
        return None
    dims = {**sizes_of((*leads, *heads, "s", "d"), q), "z": k[-2], "e": v[-1]}
    reads = {
        "query": (*leads, *heads, "s", "d"),
        "key": (*leads, *heads, "z", "d"),
        "value": (*leads, *heads, "z", "e"),
        "attn_mask": aligned(call.tensors.get("attn_mask", ()), (*leads, *heads, "s", "z"), dims),
    }
    rows = prod(dims[name] for name in (*leads, *heads)) * dims["s"] * dims["z"]
    return IterationSpace(
        kind=ImportedKind.ATTENTION,
        dims=dims,
        reads=reads,
        writes=((*leads, *heads, "s", "e"),),
        flops=2.0 * rows * (dims["d"] + dims["e"]),
        unsplit=("d",),
    )


def _recurrent(call: Call) -> IterationSpace | None:
    """Return x[b, s, d] -> [b, s, e] through l layers, with sequential time steps."""
    x, output = call.tensors["input"], call.outputs[0]
    weights = [shape for name, shape in call.tensors.items() if name.startswith("params.") and len(shape) == 2]
    if len(x) != 3 or not weights:
        return None
    is_batch_first = bool(call.values.get("batch_first", False))
    lead = ("b", "s") if is_batch_first else ("s", "b")
    layers = int(call.values["num_layers"]) * (2 if call.values.get("bidirectional") else 1)
    dims = {"l": layers, **sizes_of((*lead, "d"), x), "e": output[2]}
    tokens = x[0] * x[1]
    reads = {"input": (*lead, "d")} | {name: ("",) * len(shape) for name, shape in call.tensors.items() if name != "input"}
    states = tuple(("",) * len(shape) for shape in call.outputs[1:])
    work = 2.0 * tokens * sum(prod(shape) for shape in weights)
    return IterationSpace(kind=ImportedKind.RECURRENT, dims=dims, reads=reads, writes=((*lead, "e"), *states), flops=work, unsplit=("s",))


# ---------------------------------------------------------------------------------------------------------------------------------
# Other operators
# ---------------------------------------------------------------------------------------------------------------------------------


def _embedding(call: Call) -> IterationSpace:
    """Return W[v, d], index[..] -> [.., d]."""
    leads = lead_names(len(call.tensors["indices"]))
    dims = {**sizes_of(leads, call.tensors["indices"]), **sizes_of(("v", "d"), call.tensors["weight"])}
    return IterationSpace(
        kind=ImportedKind.EMBEDDING, dims=dims, reads={"weight": ("v", "d"), "indices": leads}, writes=((*leads, "d"),), reduced=("v",)
    )


def _embedding_bag(call: Call) -> IterationSpace:
    """Return W[v, d], index[b, several] -> [b, d]; bags have equal length where the number of entries allows it."""
    indices, output = call.tensors["indices"], call.outputs[0]
    are_alike = len(indices) == 2 or indices[0] % output[0] == 0
    reads: dict[str, Dims] = {"weight": ("v", "d"), "indices": (("b" if are_alike else ""), "")[: len(indices)]}
    if call.tensors.get("offsets") == output[:1]:
        reads["offsets"] = ("b",)
    return IterationSpace(
        kind=ImportedKind.EMBEDDING,
        dims={"b": output[0], **sizes_of(("v", "d"), call.tensors["weight"])},
        reads=reads,
        writes=(("b", "d"), *[("",) * len(other) for other in call.outputs[1:]]),
        reduced=("v",),
    )


def _last_position(call: Call) -> IterationSpace:
    """Return an operator that adds or removes the last position (one-hot vectors, complex numbers as pairs)."""
    (first, shape), output = call.first, call.outputs[0]
    names, dims = named(max(shape, output, key=len))
    writes = (names[: len(output)],)
    return IterationSpace(kind=ImportedKind.ELEMENTWISE, dims=dims, reads={first: names[: len(shape)]}, writes=writes)


def _along(kind: ImportedKind, axes_of: Callable[[Call, int], tuple[int, ...]], operand: str = "") -> Rule:
    """Return a rule of operators with the first operand's shape that reduce some dims, which stay in the output. Scales and shifts have
    these dims."""

    def rule(call: Call) -> IterationSpace:
        first = operand or call.first[0]
        shape = call.tensors[first]
        names, dims = named(shape)
        axes = axes_of(call, len(shape))
        reads = {name: aligned(other, names, dims) for name, other in call.tensors.items()} | {first: names}
        writes = tuple(aligned(output, names, dims) if len(output) == len(shape) else ("",) * len(output) for output in call.outputs)
        return IterationSpace(kind=kind, dims=dims, reads=reads, writes=writes, reduced=tuple(names[axis] for axis in axes))

    return rule


def _normalized_axes(call: Call, rank: int) -> tuple[int, ...]:
    shape = call.values.get("normalized_shape")
    count = len(shape) if isinstance(shape, (list, tuple)) else 1
    return tuple(range(rank - count, rank))


def _named_axis(call: Call, rank: int) -> tuple[int, ...]:
    return (axis_of(call.values.get("dim", rank - 1), rank),)


def _by_channel(kind: ImportedKind, *, reduces_batch: bool) -> Rule:
    """Return a rule of norms with a scale per entry of position 1: over the batch (batch norm) or per sample (group and instance norm)."""

    def rule(call: Call) -> IterationSpace:
        shape = call.tensors["input"]
        names, dims = named(shape)
        scales = {name: ("",) * len(other) for name, other in call.tensors.items()}
        scales |= {name: (names[1],) for name, other in call.tensors.items() if other == (shape[1],)}
        axes = [axis for axis in range(len(shape)) if axis > 1 or (axis == 0 if reduces_batch else axis == 1)]
        reads, writes = scales | {"input": names}, tuple(names if output == shape else ("",) * len(output) for output in call.outputs)
        return IterationSpace(kind=kind, dims=dims, reads=reads, writes=writes, reduced=tuple(names[axis] for axis in axes))

    return rule


def _cross_entropy(call: Call) -> IterationSpace:
    """Return scores[b, v, ..], target[b, ..]; v is position 1, or the only one."""
    scores = call.tensors["self"]
    others = lead_names(len(scores) - 1)
    names = (*others[:1], "v", *others[1:]) if len(scores) > 1 else ("v",)
    target = call.tensors["target"]
    of_target = names if target == scores else others if len(target) == len(others) else ("",) * len(target)
    reads = {"self": names, "target": of_target, "weight": ("v",)}
    writes = tuple(
        others if output and output == tuple(scores[i] for i, n in enumerate(names) if n != "v") else ("",) * len(output)
        for output in call.outputs
    )
    return IterationSpace(kind=ImportedKind.CROSS_ENTROPY, dims=sizes_of(names, scores), reads=reads, writes=writes, reduced=("v",))


def _loss(call: Call) -> IterationSpace:
    """Return an elementwise function of two tensors followed by a mean or a sum."""
    shape = call.tensors["self"]
    names, dims = named(shape)
    reads = {name: aligned(other, names, dims) for name, other in call.tensors.items()}
    writes = tuple(names if output == shape else ("",) * len(output) for output in call.outputs)
    return IterationSpace(kind=ImportedKind.REDUCTION, dims=dims, reads=reads, writes=writes, reduced=names)


def _pooling(call: Call) -> IterationSpace:
    """Return [b, c, h, w] -> [b, c, h, w], with h and w of the output."""
    first, shape = call.first
    names, dims = named(call.outputs[0])
    reads = {first: names[len(names) - len(shape) :]}
    return IterationSpace(kind=ImportedKind.POOLING, dims=dims, reads=reads, writes=(names,) * len(call.outputs))


def _reduction(call: Call) -> IterationSpace:
    first, shape = call.first
    names, dims = named(shape)
    axes = axes_of(call.values.get("dim"), len(shape))
    kept = tuple("" if axis in axes else name for axis, name in enumerate(names))
    without = tuple(name for name in kept if name)
    writes = tuple(kept if len(output) == len(shape) else without for output in call.outputs)
    reduced = tuple(names[axis] for axis in axes)
    return IterationSpace(kind=ImportedKind.REDUCTION, dims=dims, reads={first: names}, writes=writes, reduced=reduced)


def _elementwise(call: Call) -> IterationSpace | None:
    if not call.outputs:
        return None
    names, dims = named(call.outputs[0])
    reads = {name: aligned(shape, names, dims) for name, shape in call.tensors.items()}
    writes = tuple(names if output == call.outputs[0] else ("",) * len(output) for output in call.outputs)
    return IterationSpace(kind=ImportedKind.ELEMENTWISE, dims=dims, reads=reads, writes=writes)


def _outer(call: Call) -> IterationSpace:
    first, second = call.tensors
    dims = sizes_of(("m", "n"), call.outputs[0])
    return IterationSpace(kind=ImportedKind.ELEMENTWISE, dims=dims, reads={first: ("m",), second: ("n",)}, writes=(("m", "n"),))


def _concat(call: Call) -> IterationSpace:
    names, dims = named(call.outputs[0])
    axis = axis_of(call.values.get("dim", 0), len(names))
    is_stack = call.name == "stack"
    kept = tuple(name for index, name in enumerate(names) if index != axis) if is_stack else names
    kept = tuple("" if name == names[axis] else name for name in kept)
    reads = {name: kept if len(shape) == len(kept) else ("",) * len(shape) for name, shape in call.tensors.items()}
    return IterationSpace(kind=ImportedKind.CONCAT, dims=dims, reads=reads, writes=(names,), unsplit=(names[axis],))


def _split(call: Call) -> IterationSpace:
    """Return parts along one unsplit dim: chunk, split, slice keep the position, unbind and select drop it."""
    first, shape = call.first
    names, dims = named(shape)
    axis = axis_of(call.values.get("dim", 0), len(shape))
    writes = []
    for output in call.outputs:
        kept = tuple("" if index == axis and output != shape else name for index, name in enumerate(names))
        writes.append(kept if len(output) == len(shape) else tuple(name for index, name in enumerate(names) if index != axis))
    return IterationSpace(
        kind=ImportedKind.SPLIT,
        dims=dims,
        reads={first: names},
        writes=tuple(writes),
        unsplit=(names[axis],),
        is_view=call.name != "index_select",
    )


def _rearrange(call: Call) -> IterationSpace:
    """Return a rearrangement: positions of unchanged size are kept, the others are read and written unsharded."""
    first, shape = call.first
    names, dims = named(call.outputs[0])
    moved = {
        names[axis_of(axis, len(names))]
        for key in ("dim", "dims")
        for axis in (call.values[key] if isinstance(call.values.get(key), (list, tuple)) else [call.values.get(key)])
        if isinstance(axis, int)
    }
    read = tuple("" if name in moved else name for name in aligned(shape, names, dims))
    unsplit = tuple(name for name in names if name not in read)
    return IterationSpace(kind=ImportedKind.REARRANGE, dims=dims, reads={first: read}, writes=(names,) * len(call.outputs), unsplit=unsplit)


def _scan(call: Call) -> IterationSpace:
    """Return an operator along an unsplit dim that stays in the output: running sums, sorts, top-k."""
    first, shape = call.first
    names, dims = named(shape)
    axis = axis_of(call.values.get("dim", len(shape) - 1), len(shape))
    kept = tuple("" if index == axis else name for index, name in enumerate(names))
    writes = (kept,) * len(call.outputs)
    return IterationSpace(kind=ImportedKind.REARRANGE, dims=dims, reads={first: kept}, writes=writes, unsplit=(names[axis],))


def _constant(call: Call) -> IterationSpace:
    return IterationSpace(kind=ImportedKind.CONSTANT, dims={}, reads={}, writes=tuple(("",) * len(output) for output in call.outputs))


# --- entries read or written by index ---------------------------------------------------------------------------------------------


def _gather(call: Call) -> IterationSpace:
    """Return a gather: entries of one dim, selected for every position of the index."""
    index = call.tensors["index"]
    names, dims = named(index)
    axis = names[axis_of(call.values["dim"], len(index))]
    read = tuple("" if name == axis else name for name in aligned(call.tensors["self"], names, dims))
    return IterationSpace(kind=ImportedKind.REARRANGE, dims=dims, reads={"self": read, "index": names}, writes=(names,), unsplit=(axis,))


def _indexed(call: Call) -> IterationSpace | None:
    """Return x[.., v.., ..] at index[..] -> [.., index's positions, ..]: full slices along adjacent indexed positions."""
    shape, output = call.tensors["self"], call.outputs[0]
    indices = {int(name.rpartition(".")[2]): tensor_shape for name, tensor_shape in call.tensors.items() if name.startswith("indices.")}
    axes = sorted(indices)
    rank = max((len(tensor_shape) for tensor_shape in indices.values()), default=0)
    if not axes or axes[-1] - axes[0] != len(axes) - 1 or len(output) != len(shape) - len(axes) + rank:
        return None
    (names, dims), first = named(output), axes[0]
    read = (*names[:first], *("",) * len(axes), *names[first + rank :])
    if any(name and dims[name] != size for name, size in zip(read, shape, strict=True)):
        return None
    reads = {f"indices.{position}": aligned(tensor_shape, names[first : first + rank], dims) for position, tensor_shape in indices.items()}
    return IterationSpace(kind=ImportedKind.REARRANGE, dims=dims, reads={"self": read, **reads}, writes=(names,))


def _written_into(call: Call) -> IterationSpace:
    """Return an update of a tensor by index: entries are written or added along some positions; the others are kept."""
    shape = call.tensors["self"]
    names, dims = named(shape)
    if "dim" in call.values:
        moved = {axis_of(call.values["dim"], len(shape))}
    else:
        moved = {int(name.rpartition(".")[2]) for name in call.tensors if name.startswith("indices.")}
    kept = tuple("" if position in moved else name for position, name in enumerate(names))
    reads = {name: kept for name, tensor_shape in call.tensors.items() if len(tensor_shape) == len(shape)}
    reads = {
        name: tuple(dim if dim and dims[dim] == size else "" for dim, size in zip(read, call.tensors[name], strict=True))
        for name, read in reads.items()
    }
    unsplit = tuple(name for name in names if name not in kept)
    return IterationSpace(kind=ImportedKind.REARRANGE, dims=dims, reads=reads, writes=(kept,), unsplit=unsplit)


def _moved_whole(call: Call) -> IterationSpace:
    """Return an operator whose every output depends on all inputs: indices of nonzeros, counts of values."""
    return IterationSpace(kind=ImportedKind.REARRANGE, dims={}, reads={}, writes=tuple(("",) * len(output) for output in call.outputs))


def _nonzero_or(otherwise: Rule) -> Rule:
    """Return the rule of `torch.where`, which gives the indices of nonzeros for a single tensor."""
    return lambda call: _moved_whole(call) if len(call.tensors) == 1 else otherwise(call)


def _rules(rule: Rule, names: str) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


#: Rules by operator name, without overload and without the underscore of the in-place form.
RULES: Mapping[str, Rule] = {
    **_rules(_linear, "linear"),
    **_rules(_matmul("self", "other"), "matmul"),
    **_rules(_matmul("self", "mat2"), "mm bmm"),
    **_rules(_matmul("self", "vec"), "mv"),
    **_rules(_matmul("self", "tensor"), "dot"),
    **_rules(_matmul("mat1", "mat2", "self"), "addmm"),
    **_rules(_matmul("batch1", "batch2", "self"), "baddbmm"),
    **_rules(_grouped_mm, "_grouped_mm"),
    **_rules(_einsum, "einsum"),
    **_rules(_convolution, "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution"),
    **_rules(_attention, "scaled_dot_product_attention"),
    **_rules(_recurrent, "lstm gru rnn_tanh rnn_relu"),
    **_rules(_embedding, "embedding"),
    **_rules(_embedding_bag, "embedding_bag"),
    **_rules(_along(ImportedKind.NORM, _normalized_axes, "input"), "layer_norm native_layer_norm"),
    **_rules(_along(ImportedKind.NORM, _normalized_axes), "rms_norm"),
    **_rules(_by_channel(ImportedKind.BATCH_NORM, reduces_batch=True), "batch_norm native_batch_norm"),
    **_rules(_by_channel(ImportedKind.NORM, reduces_batch=False), "group_norm instance_norm"),
    **_rules(_along(ImportedKind.SOFTMAX, _named_axis), "softmax _softmax log_softmax _log_softmax safe_softmax _safe_softmax"),
    **_rules(_cross_entropy, "cross_entropy_loss nll_loss nll_loss_nd nll_loss2d"),
    **_rules(_loss, "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div"),
    **_rules(
        _pooling,
        "max_pool1d max_pool2d max_pool3d max_pool2d_with_indices avg_pool1d avg_pool2d avg_pool3d "
        "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d",
    ),
    **_rules(
        _reduction, "mean sum amax amin max min any all prod var std var_mean std_mean logsumexp norm linalg_vector_norm argmax argmin"
    ),
    **_rules(_concat, "cat concat concatenate stack"),
    **_rules(_split, "split split_with_sizes chunk tensor_split unbind slice select narrow index_select"),
    **_rules(
        _rearrange,
        "repeat repeat_interleave pad constant_pad_nd roll flip tril triu upsample_nearest2d upsample_bilinear2d",
    ),
    **_rules(_scan, "cumsum cumprod sort argsort topk"),
    **_rules(_gather, "gather"),
    **_rules(_indexed, "index"),
    **_rules(_written_into, "scatter scatter_add scatter_reduce index_add index_copy index_put index_fill"),
    **_rules(_moved_whole, "nonzero bincount histc searchsorted bucketize"),
    **_rules(_nonzero_or(_elementwise), "where"),
    **_rules(_last_position, "one_hot view_as_complex view_as_real"),
    **_rules(_outer, "outer"),
    **_rules(
        _constant,
        "zeros ones full empty arange scalar_tensor eye rand randn linspace new_zeros new_ones new_full new_empty tensor lift_fresh_copy",
    ),
    **_rules(
        _elementwise,
        "relu relu6 gelu silu mish hardswish hardsigmoid hardtanh sigmoid tanh softplus leaky_relu elu selu celu prelu glu_backward "
        "threshold logsigmoid",
    ),
    **_rules(
        _elementwise,
        "clamp clip add sub subtract rsub mul multiply div divide true_divide floor_divide pow square sqrt rsqrt exp log neg abs cos sin",
    ),
    **_rules(
        _elementwise,
        "dropout feature_dropout alpha_dropout native_dropout to _to_copy type_as masked_fill zeros_like ones_like full_like rand_like "
        "randn_like empty_like bernoulli copy zero fill",
    ),
}


def recognise(call: Call) -> IterationSpace | None:
    """Return the iteration space of an operator; None: there is no rule for it."""
    rule = RULES.get(call.name, RULES.get(call.name.removesuffix("_")))
    if rule is None and call.is_pointwise:
        rule = _elementwise
    return rule(call) if rule is not None and call.outputs else None


def operand_dims(space: IterationSpace, name: str, shape: Sequence[int]) -> Dims:
    """Return the dims of a tensor argument; one without an entry in the rule has none."""
    dims = space.reads.get(name, ())
    return dims if len(dims) == len(shape) else ("",) * len(shape)
