"""Torch function of each kind of operator, on local tensors.

A function receives the local inputs in the operator's order and the operator's context: the sharding of its dims on this rank and the
process groups (`context.py`). A new kind needs one more entry, here or in the table that a caller passes (`functions=`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from math import prod
from typing import Any

import torch
import torch.nn.functional as F

from perfmodel.execute.layers import masks, norm, recurrence
from perfmodel.execute.layers.activations import ACTIVATIONS
from perfmodel.execute.layers.attention import alibi_bias, alibi_slopes, attention, causal_attention
from perfmodel.execute.layers.norm import layer_norm, normalise, rms_norm, wide
from perfmodel.execute.layers.rotary import rotary_angles, rotate
from perfmodel.execute.layers.softmax import seen_softmax, sharded_softmax
from perfmodel.execute.layers.vocabulary import bag_vectors, cross_entropy, token_vectors
from perfmodel.execute.per_operator.collective_rules import joined, lstm, shares, state_before, with_halo, with_state_sent
from perfmodel.execute.per_operator.context import OperatorContext
from perfmodel.workload.graph import Operand

NetworkFunction = Callable[[Sequence[torch.Tensor], OperatorContext], torch.Tensor]
Tensors = Sequence[torch.Tensor]


def aligned(tensor: torch.Tensor, operand: Operand, output: tuple[str, ...]) -> torch.Tensor:
    """Return a view in the positions of `output`, of size 1 where the operand lacks a dim; unnamed positions ("") match from the last."""
    blanks = [position for position, dim in enumerate(operand.dims) if not dim]
    order: list[int] = []
    for dim in reversed(output):
        if dim:
            order.append(operand.dims.index(dim) if dim in operand.dims else -1)
        else:
            order.append(blanks.pop() if blanks else -1)
    order.reverse()
    result = tensor.permute([position for position in order if position >= 0])
    return result.reshape([tensor.shape[position] if position >= 0 else 1 for position in order])


def _einsum(inputs: Tensors, context: OperatorContext) -> torch.Tensor:
    """Compute an einsum. A linear layer x[rows..., k...] W[n..., k...] -> [rows..., n...] has its weight gradient in the weight's layout;
    the gradient of another product may be transposed and copied, which takes as long as the product."""
    operator = context.operator
    x, weight, result = (operand.dims for operand in (*operator.inputs, operator.output))
    summed = [dim for dim in x if dim in weight and dim not in result]
    rows, columns = x[: len(x) - len(summed)], weight[: len(weight) - len(summed)]
    if summed and x == (*rows, *summed) and weight == (*columns, *summed) and result == (*rows, *columns):
        flat = F.linear(inputs[0].flatten(len(rows)), inputs[1].reshape(prod(inputs[1].shape[: len(columns)]), -1))
        return flat.unflatten(-1, inputs[1].shape[: len(columns)]) if len(columns) != 1 else flat
    letters = {dim: chr(ord("a") + index) for index, dim in enumerate(operator.dims)}
    first, second, output = ("".join(letters[dim] for dim in operand.dims) for operand in (*operator.inputs, operator.output))
    return torch.einsum(f"{first},{second}->{output}", *inputs)


_ELEMENTWISE: Mapping[str, Callable[..., torch.Tensor]] = {
    "add": torch.add,
    "bias": torch.add,
    "mul": torch.mul,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "sigmoid_gate": lambda x, gate: x * torch.sigmoid(gate),
    **ACTIVATIONS,
}


def _elementwise(inputs: Tensors, context: OperatorContext) -> torch.Tensor:
    operator = context.operator
    if operator.settings["function"] == "scale":
        return inputs[0] * operator.settings["factor"]  # type: ignore[operator]
    function = _ELEMENTWISE[str(operator.settings["function"])]
    pieces = [aligned(x, operand, operator.output.dims) for x, operand in zip(inputs, operator.inputs, strict=True)]
    return function(pieces[0]) if len(pieces) == 1 else reduce(function, pieces)


def _pair(context: OperatorContext, name: str) -> tuple[int, int]:
    value = context.operator.settings.get(name, (1, 1))
    assert isinstance(value, tuple)
    return value[0], value[1]


def _windowed(x: torch.Tensor, context: OperatorContext, fill: float) -> tuple[torch.Tensor, tuple[int, int]]:
    """Return the input with halo rows if h or w is sharded, and the remaining padding."""
    window, stride, padding = _pair(context, "window"), _pair(context, "stride"), _pair(context, "padding")
    dilation, left = _pair(context, "dilation"), list(padding)
    local = x.shape
    for axis, dim in enumerate(("h", "w")):
        if context.parts(dim) > 1:
            reach = dilation[axis] * (window[axis] - 1) + 1
            below = max(0, reach - stride[axis] - padding[axis])
            row = prod(local) // local[2 + axis]
            x = with_halo(x, position=2 + axis, above=padding[axis], below=below, context=context, dim=dim, fill=fill, row=row)
            left[axis] = 0
    return x, (left[0], left[1])


def _convolution(inputs: Tensors, context: OperatorContext) -> torch.Tensor:
    x, padding = _windowed(inputs[0], context, 0.0)
    groups = context.operator.settings["groups"]
    assert isinstance(groups, int)
    if groups > 1:
        groups //= context.parts("g")
    return F.conv2d(x, inputs[1], None, _pair(context, "stride"), padding, _pair(context, "dilation"), groups)


def _pooling(inputs: Tensors, context: OperatorContext) -> torch.Tensor:
    is_max = context.operator.settings["mode"] == "max"
    x, padding = _windowed(inputs[0], context, -torch.inf if is_max else 0.0)
    pool = F.max_pool2d if is_max else F.avg_pool2d
    return pool(x, _pair(context, "window"), _pair(context, "stride"), padding)


def _reduction(inputs: Tensors, context: OperatorContext) -> torch.Tensor:
    operator = context.operator
    kept = operator.output.dims
    dims = operator.inputs[0].dims
    over = [position for position, dim in enumerate(dims) if dim and dim not in kept]
    order = [dim for dim in dims if not dim or dim in kept]
    result = wide(inputs[0]).sum(over)
    if operator.settings["function"] == "mean":
        result = result / int(operator.settings["count"])  # type: ignore[arg-type]
    return aligned(result.to(inputs[0].dtype), Operand(tensor="", dims=tuple(order)), kept)


def _batch_normalised(inputs: Tensors, context: OperatorContext, places: tuple[int, ...], dims: tuple[str, ...]) -> torch.Tensor:
    x, weight, bias = inputs
    operands = context.operator.inputs
    count = prod(x.shape[position] for position in places) * context.parts(*dims)
    eps = float(context.operator.settings["eps"])  # type: ignore[arg-type]
    if context.parts(*dims) == 1 and operands[0].dims.index(operands[1].dims[0]) == 1 and len(weight.shape) == 1:
        return F.batch_norm(x, None, None, weight, bias, training=True, eps=eps)
    rows = [aligned(parameter, operand, operands[0].dims) for parameter, operand in zip(inputs[1:], operands[1:], strict=True)]
    reduce = partial(context.all_reduce, dims=dims)
    return normalise(x, rows[0], rows[1], over=places, count=count, eps=eps, centred=True, reduce=reduce)


def _batch_norm(inputs: Tensors, context: OperatorContext) -> torch.Tensor:
    x, weight = context.operator.inputs[:2]
    places = tuple(position for position, dim in enumerate(x.dims) if not dim or dim not in weight.dims)  # that it averages over
    if context.operator.settings["synchronised"]:
        return _batch_normalised(inputs, context, places, tuple(x.dims[position] for position in places))
    # one process normalises each shard of the plan separately, as its ranks do
    parts = [context.imitate.get(dim, 1) if position in places else 1 for position, dim in enumerate(x.dims)]
    pieces = [_batch_normalised((piece, *inputs[1:]), context, places, ()) for piece in shares(inputs[0], parts)]
    return joined(pieces, parts) if len(pieces) > 1 else pieces[0]


def _row_norm(inputs: Tensors, context: OperatorContext, *, centred: bool) -> torch.Tensor:
    operands = context.operator.inputs
    x, weight = inputs[:2]
    bias = inputs[2] if len(inputs) > 2 else None
    eps = float(context.operator.settings["eps"])  # type: ignore[arg-type]
    dims = tuple(str(context.operator.settings["over"]).split())
    places = tuple(operands[0].dims.index(dim) for dim in dims)
    if context.parts(*dims) == 1 and operands[0].dims[-len(dims) :] == operands[1].dims == dims:
        return layer_norm(x, weight, bias, eps) if centred else rms_norm(x, weight, eps)
    rows = [aligned(parameter, operand, operands[0].dims) for parameter, operand in zip(inputs[1:], operands[1:], strict=True)]
    count = prod(context.sizes[dim] for dim in dims)
    shift, reduce = rows[1] if bias is not None else None, partial(context.all_reduce, dims=dims)
    return normalise(x, rows[0], shift, over=places, count=count, eps=eps, centred=centred, reduce=reduce)


def _softmax(inputs: Tensors, context: OperatorContext) -> torch.Tensor:
    x, *sinks = inputs
    operator = context.operator
    dims = operator.inputs[0].dims
    over, queries = str(operator.settings["over"]), str(operator.settings["causal_queries"])
    position, scale = dims.index(over), float(operator.settings["scale"])  # type: ignore[arg-type]
    seen = None
    if queries:
        rows = context.positions(queries, x.shape[dims.index(queries)], x.device)
        columns = context.positions(over, x.shape[position], x.device)
        window, chunked = _window(context)
        seen = masks.seen(rows, columns, window, chunked=chunked)
        seen = aligned(seen, Operand(tensor="", dims=(queries, over)), dims)
    if operator.settings.get("alibi", False):
        g, r = (dim for dim in dims if dim not in (dims[0], queries, over))
        groups, shared, keys = (x.shape[dims.index(dim)] for dim in (g, r, over))
        later = (context.parts(over) - 1 - context.index(over)) * keys
        bias = alibi_bias(_slopes(context, (g, groups), (r, shared), x), keys, later=later).view(groups, shared, keys)
        x, scale = x * scale + aligned(bias, Operand(tensor="", dims=(g, r, over)), dims), 1.0
    if context.parts(over) > 1:
        hidden, reduce = None if seen is None else ~seen, partial(context.all_reduce, dims=(over,))
        return sharded_softmax(x, position=position, scale=scale, hidden=hidden, reduce=reduce)
    sink_scores = aligned(sinks[0], operator.inputs[1], dims) if sinks else None
    return seen_softmax(x * scale if scale != 1.0 or seen is not None else x, seen, sink_scores, position=position)


def _cross_entropy(inputs: Tensors, context: OperatorContext) -> torch.Tensor:
    logits, labels = inputs
    operator = context.operator
    over = str(operator.settings["over"])
    dims = operator.inputs[0].dims
    position = dims.index(over)
    rows = tuple(dim for dim in dims if dim != over)
    labels = aligned(labels, operator.inputs[1], rows)
    first = context.index(over) * logits.shape[position]
    logits = logits.movedim(position, -1)
    loss = cross_entropy(logits, labels, first=first, size=context.sizes[over], reduce=partial(context.all_reduce, dims=(over,)))
    return aligned(loss, Operand(tensor="", dims=rows), operator.output.dims)


def _binary_cross_entropy(inputs: Tensors, context: OperatorContext) -> torch.Tensor:
    operator = context.operator
    logits, labels = (aligned(x, operand, operator.output.dims) for x, operand in zip(inputs, operator.inputs, strict=True))
    return F.binary_cross_entropy_with_logits(logits, labels.expand_as(logits), reduction="none")


def _first_row(table: torch.Tensor, context: OperatorContext) -> int | None:
    """Return the first local row of a table sharded by rows; None if it is not sharded."""
    vocabulary = context.operator.inputs[1].dims[0]
    return context.index(vocabulary) * table.shape[0] if context.parts(vocabulary) > 1 else None


def _embedding(inputs: Tensors, context: OperatorContext) -> torch.Tensor:
    ids, table = inputs
    rows = token_vectors(table, ids, first=_first_row(table, context))
    operator = context.operator
    dims = (*operator.inputs[0].dims, operator.inputs[1].dims[1])
    result = aligned(rows, Operand(tensor="", dims=dims), operator.output.dims)
    if len(dims) == len(operator.output.dims):
        return result
    # indices without a dim of the output are equal along it, such as positions of every sequence
    shape = [operator.dims[dim] // context.parts(dim) if dim not in dims else -1 for dim in operator.output.dims]
    return result.expand(shape)


def _attention(inputs: Tensors, context: OperatorContext) -> torch.Tensor:
    """Compute q [b,q,g,r,d], k and v [b,z,g,d] -> [b,q,g,r,d]. q may be a chunk of the sequence; keys after it are sliced off."""
    q, k, v, *sinks = inputs
    settings = context.operator.settings
    _, queries, groups, shared, _ = q.shape
    _, dim, g, r, _ = context.operator.inputs[0].dims
    is_causal, scale = bool(settings["causal"]), float(settings["scale"])  # type: ignore[arg-type]
    if is_causal and context.parts(dim) > 1:
        keys = (context.index(dim) + 1) * queries
        k, v = k[:, :keys], v[:, :keys]
    heads = q.flatten(2, 3).transpose(1, 2)
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    if not is_causal:
        result = attention(heads, k, v, scale=scale)
    else:
        slopes = _slopes(context, (g, groups), (r, shared), q) if settings.get("alibi", False) else None
        sink_scores = sinks[0].flatten() if sinks else None
        window, chunked = _window(context)
        result = causal_attention(heads, k, v, window=window, chunked=chunked, slopes=slopes, sinks=sink_scores, scale=scale)
    return result.transpose(1, 2).unflatten(2, (groups, shared))


def _window(context: OperatorContext) -> tuple[int, bool]:
    """Return the number of keys that a query sees (0: all earlier keys), and whether they are those of its chunk of the sequence."""
    settings = context.operator.settings
    return int(settings.get("window", 0)), bool(settings.get("chunked", False))  # type: ignore[arg-type]


def _slopes(context: OperatorContext, groups: tuple[str, int], shared: tuple[str, int], like: torch.Tensor) -> torch.Tensor:
    """Return the ALiBi slopes of the local heads [groups * shared]; groups, shared: dim and local size of the heads."""
    dims, device = context.operator.dims, torch.device("cpu")
    heads = context.positions(*groups, device)[:, None] * dims[shared[0]] + context.positions(*shared, device)[None, :]
    return alibi_slopes(dims[groups[0]] * dims[shared[0]])[heads.flatten()].to(like)


def _rotary(inputs: Tensors, context: OperatorContext) -> torch.Tensor:
    (x,) = inputs
    settings, dim = context.operator.settings, context.operator.inputs[0].dims[1]
    if not settings.get("turns", True):
        return x
    base, start = float(settings["base"]), int(settings.get("start", 0))  # type: ignore[arg-type]
    depth = int(settings["head_dim"]) if "start" in settings else x.shape[-1]  # type: ignore[arg-type]
    key = ("angles", context.index(dim), x.shape[1], depth, base, x.dtype)
    if key not in context.mesh.shared:
        context.mesh.shared[key] = rotary_angles(context.positions(dim, x.shape[1], x.device), depth, x.dtype, base)
    cosine, sine = context.mesh.shared[key]
    return rotate(x, cosine, sine, start=start)


def _interaction(inputs: Tensors, context: OperatorContext) -> torch.Tensor:
    together = torch.stack(list(inputs), 1)
    products = together @ together.transpose(1, 2)
    rows, columns = torch.tril_indices(len(inputs), len(inputs), -1, device=together.device)
    return torch.cat((inputs[0], products[:, rows, columns]), 1)


# Mixers other than plain attention. A recurrence runs this rank's shard of the positions in one piece.


def _number(context: OperatorContext, name: str) -> int:
    return int(context.operator.settings[name])  # type: ignore[arg-type]


def piece(inputs: Tensors, context: OperatorContext) -> torch.Tensor:
    output = context.operator.output.dims
    return inputs[0].narrow(-1, _number(context, "start"), context.operator.dims[output[-1]])


def copy(inputs: Tensors, context: OperatorContext) -> torch.Tensor:
    return inputs[0].clone(memory_format=torch.contiguous_format)


def side_by_side(inputs: Tensors, context: OperatorContext) -> torch.Tensor:
    """Concatenate along the last position; the second operand is expanded along the dims that it lacks."""
    first, second = inputs
    ours, theirs = (operand.dims for operand in context.operator.inputs)
    for position, dim in enumerate(ours[:-1]):
        if dim not in theirs:
            second = second.unsqueeze(position)
    return torch.cat((first, second.expand(*first.shape[:-1], -1)), -1)


def causal_conv(inputs: Tensors, context: OperatorContext) -> torch.Tensor:
    """Compute the causal convolution of x [b,s,m,c] with weight [m,c,taps] and bias [m,c]."""
    x, weight = inputs[:2]
    before, positions = _number(context, "taps") - 1, context.operator.inputs[0].dims[1]
    if context.parts(positions) > 1:
        row = x.numel() // x.shape[1]
        x = with_halo(x, position=1, above=before, below=0, context=context, dim=positions, fill=0.0, row=row)
    else:
        x = F.pad(x, (0, 0, 0, 0, before, 0))
    return recurrence.causal_conv(x, weight, inputs[2] if len(inputs) > 2 else None)


def gated_norm(inputs: Tensors, context: OperatorContext) -> torch.Tensor:
    x, gate, weight = inputs
    return norm.gated_norm(x, gate, weight, _number(context, "width"), bool(context.operator.settings["gates_first"]))


def state_scan(inputs: Tensors, context: OperatorContext) -> torch.Tensor:
    heads = inputs[1].shape[2:]
    return _scanned(recurrence.state_scan, inputs, (*heads, _number(context, "head_dim"), _number(context, "state")), context)


def delta_scan(inputs: Tensors, context: OperatorContext) -> torch.Tensor:
    heads = inputs[2].shape
    return _scanned(recurrence.delta_scan, inputs, (*heads, _number(context, "key_dim"), _number(context, "value_dim")), context)


def _scanned(scan: Callable[..., Any], inputs: Tensors, state: tuple[int, ...], context: OperatorContext) -> torch.Tensor:
    """Scan the local positions from the state of those before them, which is received, and send the state after them."""
    x, steps, *parameters = inputs
    positions = context.operator.inputs[0].dims[1]
    y, after = scan(x, steps, state_before(x, (x.shape[0], *state), context=context, dim=positions), *parameters)
    return with_state_sent(y, after, context=context, dim=positions)


FUNCTIONS: Mapping[str, NetworkFunction] = {
    "attention": _attention,
    "batch_norm": _batch_norm,
    "binary_cross_entropy": _binary_cross_entropy,
    "concat": lambda inputs, context: torch.cat(list(inputs), _number(context, "axis")),
    "convolution": _convolution,
    "cross_entropy": _cross_entropy,
    # a run has no dropout: a single process would draw another mask, and gradients could not be compared
    "dropout": lambda inputs, context: inputs[0],
    "einsum": _einsum,
    "elementwise": _elementwise,
    "embedding": _embedding,
    "embedding_bag": lambda inputs, context: bag_vectors(inputs[1], inputs[0], first=_first_row(inputs[1], context)),
    "flatten": lambda inputs, context: inputs[0].flatten(2).transpose(1, 2).contiguous(),
    "interaction": _interaction,
    "layer_norm": partial(_row_norm, centred=True),
    "lstm": lambda inputs, context: lstm(inputs[0], inputs[1], context=context, dim="e"),
    "pooling": _pooling,
    "prepend": lambda inputs, context: torch.cat((inputs[0].expand(inputs[1].shape[0], 1, -1), inputs[1]), 1),
    "reduction": _reduction,
    "rms_norm": partial(_row_norm, centred=False),
    "rotary": _rotary,
    "select": lambda inputs, context: inputs[0].select(_number(context, "axis"), _number(context, "index")),
    "softmax": _softmax,
    "piece": piece,
    "copy": copy,
    "side_by_side": side_by_side,
    "causal_conv": causal_conv,
    "gated_norm": gated_norm,
    "state_scan": state_scan,
    "delta_scan": delta_scan,
}
