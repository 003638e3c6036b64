"""Operators of a user's module on one rank: torch operators called on local tensors, as functions of the per-operator executor.

An operator receives its inputs in the layouts of the plan, views them as the exported program does, and slices replicated inputs to its
local shard. Most torch operators then run unchanged. `RULES` computes those whose result depends on other ranks: statistics, sums over
a sharded vocabulary, means.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from perfmodel.execute.importer.exported_module import VertexCalls, arguments_of, operator_name
from perfmodel.execute.layers.norm import normalise
from perfmodel.execute.layers.softmax import sharded_softmax
from perfmodel.execute.layers.vocabulary import cross_entropy, local_rows
from perfmodel.execute.modules.views import joined_pieces, viewed
from perfmodel.execute.per_operator.collective_rules import with_halo
from perfmodel.execute.per_operator.context import OperatorContext
from perfmodel.foundation.errors import InputError
from perfmodel.workload.graph import Operator
from perfmodel.workload.imported.graph import ImportedKind, ImportedVertex, Shape
from perfmodel.workload.imported.network import Computed, OperatorSource

if TYPE_CHECKING:
    from torch.fx import Node

    from perfmodel.execute.modules.module import UserModule

#: Arguments of a call by their schema names, with local tensors.
Arguments = dict[str, Any]


def functional(target: Any) -> Any:
    """Return the out-of-place form of an operator."""
    name = target._schema.name.rpartition("::")[2]
    if not name.endswith("_") or name.endswith("__"):
        return target
    packet = getattr(torch.ops.aten, name[:-1], None)
    form = getattr(packet, target._overloadname, None) or getattr(packet, "default", None)
    if form is None:
        raise InputError(f"operator {target}: has no form that leaves its input as it is; write it without the underscore")
    return form


def function_name(node: Node) -> str:
    """Return the torch name of a node's operator, without namespace, overload and the underscore of in-place forms."""
    return (operator_name(node) or str(getattr(node.target, "__name__", node.target))).removesuffix("_")


@dataclass(slots=True)
class ModuleOperator:
    """One operator of the network as a function of its local inputs.

    shape     output shape in the network, with the padding of uneven shards
    places    input number of the operator by input number of the vertex
    further   additional outputs of the vertex, kept until their own operators read them
    """

    module: UserModule
    operator: Operator
    source: OperatorSource
    shape: Shape
    further: dict[tuple[int, int], torch.Tensor]
    places: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        added = self.module.added(self.source.vertex)
        if self.source.computed is Computed.BIAS:
            self.places = {added: 1} if len(self.operator.inputs) > 1 else {}
            return
        tensors = [operand.tensor for operand in self.operator.inputs]
        pieces = self.module.imported.pieces
        for number, operand in enumerate(self.vertex.inputs):
            position = len(self.places)
            without = self.source.computed is Computed.PRODUCT and number == added
            if not without and position < len(tensors) and pieces.tensor_read(operand) == tensors[position]:
                self.places[number] = position
        if len(self.places) < len(tensors):
            raise InputError(f"operator {self.operator.name}: reads {', '.join(tensors)}: not as the module does; import it again")

    @property
    def vertex(self) -> ImportedVertex:
        return self.module.imported.graph.vertices[self.source.vertex]

    @property
    def calls(self) -> VertexCalls:
        return self.module.exported.calls[self.source.vertex]

    def names(self, dim: str) -> tuple[str, ...]:
        """Return the network's dims that make up a dim of the vertex, outermost first."""
        return tuple(name for name, _ in self.module.imported.dims_of(self.source.vertex, dim))

    def __call__(self, inputs: Sequence[torch.Tensor], context: OperatorContext) -> torch.Tensor:
        index, computed = self.source.vertex, self.source.computed
        added = self.module.added(index)
        if computed is Computed.BIAS:
            product = joined_pieces(inputs[0], self.module.grouping(index, 0))
            bias = self._read(added, inputs, context)
            if self.vertex.kind is ImportedKind.CONVOLUTION:
                bias = bias.reshape(-1, *[1] * (product.dim() - 2))
            beta = arguments_of(self.calls.nodes[0][0]).get("beta", 1)
            return self._as_network(product + (bias if beta == 1 else beta * bias), context)
        last: Any = None
        for node, bound in self.calls.nodes:
            arguments: Arguments = {}
            for name, value in arguments_of(node).items():
                if not isinstance(value, torch.fx.Node):
                    arguments[name] = value
                elif value not in bound:
                    arguments[name] = last
                elif computed is Computed.PRODUCT and bound[value] == added:
                    arguments[name] = None
                else:
                    arguments[name] = self._read(bound[value], inputs, context)
            rule = RULES.get(function_name(node), _as_it_is)
            last = rule(self, node, arguments, context)
        results = [item for item in last if isinstance(item, torch.Tensor)] if isinstance(last, (list, tuple)) else [last]
        result = self._as_network(results[self.source.number], context)
        if self.vertex.kind is not ImportedKind.SPLIT:
            for number in self.module.further_outputs(index):
                is_alike = self.vertex.outputs[number].dims == self.vertex.outputs[0].dims
                other = results[number].reshape(result.shape) if is_alike else results[number]
                is_exact = not other.dtype.is_floating_point and result.element_size() >= 4 and self.vertex.outputs[number].is_index
                self.further[index, number] = other.to(result.dtype) if is_exact else other
        return result

    def _read(self, number: int, inputs: Sequence[torch.Tensor], context: OperatorContext) -> torch.Tensor:
        """Return input `number` of the vertex as torch's operator takes it, sliced to this rank's shard if it is replicated."""
        index, value, operand = self.source.vertex, self.calls.reads[number], self.vertex.inputs[number]
        held: tuple[str, ...] = ()
        if number in self.places:
            position = self.places[number]
            held = self.operator.inputs[position].dims
            tensor = viewed(
                inputs[position], value, self.module.imported.pieces.of_input(operand), is_part=operand.parameter != value.parameter
            )
        else:
            tensor = self.module.stored(value)
        # the network's dims along each position of the input, with their sizes; none if it is not an outer part of the vertex's dim
        runs: list[list[tuple[str, int]]] = []
        for dim, size in zip(operand.dims, operand.shape, strict=True):
            run: list[tuple[str, int]] = []
            for name, piece in self.module.imported.dims_of(index, dim) if dim else ():
                if prod(part for _, part in run) < size:
                    run.append((name, piece))
            runs.append(run if prod(part for _, part in run) == size else [])
        if not any(name not in held and context.parts(name) > 1 for run in runs for name, _ in run):
            return tensor
        apart: list[int] = []
        cuts: list[tuple[int, str]] = []
        for run, local in zip(runs, tensor.shape, strict=True):
            for name, unpadded in run:
                parts, size = context.parts(name), self.operator.dims.get(name, unpadded)
                if parts > 1 and name not in held:
                    cuts.append((len(apart), name))
                apart.append(size // parts if name in held else size)
            apart += [] if run else [local]
        tensor = tensor.reshape(apart)
        for position, name in cuts:
            share = apart[position] // context.parts(name)
            tensor = tensor.narrow(position, context.index(name) * share, share)
        return joined_pieces(tensor, [run or [("", 1)] for run in runs])

    def _as_network(self, tensor: torch.Tensor, context: OperatorContext) -> torch.Tensor:
        """Return the output in the shape of the network's tensor."""
        dims = self.operator.output.dims
        sizes = [size // context.parts(dim) if dim else size for size, dim in zip(self.shape, dims, strict=True)]
        if prod(sizes) != tensor.numel():
            raise RuntimeError(f"its output has shape {tuple(tensor.shape)}, the plan has {sizes}")
        return tensor.reshape(sizes)


@dataclass(slots=True)
class FurtherOutput:
    """An additional output of a vertex, computed with the first and passed to its operator in its place; indices as floats."""

    source: OperatorSource
    shape: Shape
    dtype: torch.dtype
    further: dict[tuple[int, int], torch.Tensor]

    def taken(self) -> torch.Tensor:
        """Return the stored output, which is read in place of the first output."""
        return self.further.pop((self.source.vertex, self.source.number))

    def __call__(self, inputs: Sequence[torch.Tensor], context: OperatorContext) -> torch.Tensor:
        dims = context.operator.output.dims
        value = inputs[0].to(self.dtype)
        return value.reshape([size // context.parts(dim) if dim else size for size, dim in zip(self.shape, dims, strict=True)])


def _as_it_is(operator: ModuleOperator, node: Node, arguments: Arguments, context: OperatorContext) -> Any:
    """Call torch's operator on the local tensors."""
    target = functional(node.target)
    positional, named = [], {}
    for argument in target._schema.arguments:
        name = argument.name
        if name in arguments:
            value = arguments[name]
        elif f"{name}.0" in arguments:
            value = [arguments[key] for key in arguments if key.startswith(f"{name}.")]
        else:
            continue
        if argument.kwarg_only:
            named[name] = value
        else:
            positional.append(value)
    return target(*positional, **named)


def _cut(operator: ModuleOperator, context: OperatorContext, *dims: str) -> tuple[str, ...]:
    """Return the network's dims, among these dims of the vertex, that the plan shards."""
    return tuple(name for dim in dims for name in operator.names(dim) if context.parts(name) > 1)


def _one(names: tuple[str, ...], operator: ModuleOperator) -> str:
    if len(names) > 1:
        raise RuntimeError(f"dims {', '.join(names)} are cut together")
    return names[0] if names else ""


# ---------------------------------------------------------------------------------------------------------------------------------
# Rules of operators whose result depends on other ranks
# ---------------------------------------------------------------------------------------------------------------------------------


def product_rule(operator: ModuleOperator, node: Node, arguments: Arguments, context: OperatorContext) -> Any:
    """Compute `addmm` and the like without the addition if the addition is a separate operator."""
    added, first, second = (
        ("self", "mat1", "mat2") if "mat1" in arguments else ("input" if "input" in arguments else "self", "batch1", "batch2")
    )
    if arguments[added] is not None:
        return _as_it_is(operator, node, arguments, context)
    product = arguments[first] @ arguments[second]
    alpha = arguments.get("alpha", 1)
    return product if alpha == 1 else product * alpha


def convolution_rule(operator: ModuleOperator, node: Node, arguments: Arguments, context: OperatorContext) -> Any:
    """Convolve with the local channel groups, and exchange halo rows if pixels are sharded."""
    vertex = operator.vertex
    taps = vertex.unsplit
    x, weight, groups = arguments["input"], arguments["weight"], int(arguments.get("groups", 1))
    changed: Arguments = {}
    if groups > 1:
        dim = "g" if "g" in vertex.dims else vertex.outputs[0].dims[1]
        parts = context.parts(*operator.names(dim))
        if dim != "g" and parts > 1:  # channels are replicated
            share = x.shape[1] // parts
            x = x.narrow(1, context.index(_one(_cut(operator, context, dim), operator)) * share, share)
        changed |= {"input": x, "groups": groups // parts}
    space = [dim for dim in vertex.dims if dim in "whu" and dim not in taps]
    if _cut(operator, context, *space):
        rank = len(space)
        given = [arguments[name] for name in ("stride", "padding", "dilation")]
        stride, padding, dilation = (list(values) * (rank if len(values) == 1 else 1) for values in given)
        row = x.numel()
        left = list(padding)
        for axis, dim in enumerate(space):
            name = _one(_cut(operator, context, dim), operator)
            if not name:
                continue
            below = max(0, dilation[axis] * (weight.shape[2 + axis] - 1) + 1 - stride[axis] - padding[axis])
            x = with_halo(
                x, position=2 + axis, above=padding[axis], below=below, context=context, dim=name, fill=0.0,
                row=row // arguments["input"].shape[2 + axis],
            )  # fmt: skip
            left[axis] = 0
        changed |= {"input": x, "padding": left}
    return _as_it_is(operator, node, arguments | changed, context)


def attention_rule(operator: ModuleOperator, node: Node, arguments: Arguments, context: OperatorContext) -> Any:
    """Compute attention with a causal mask at the positions of the local queries."""
    queries = _one(_cut(operator, context, "s"), operator)
    p = arguments.get("dropout_p", 0.0) if operator.module.drops else 0.0
    if not queries or not arguments["is_causal"]:
        return _as_it_is(operator, node, arguments | {"dropout_p": p}, context)
    q, k, v = (arguments[name] for name in ("query", "key", "value"))
    rows = context.positions(queries, q.shape[-2], q.device)
    mask = rows[:, None] >= torch.arange(k.shape[-2], device=q.device)
    changed = {"attn_mask": mask, "is_causal": False, "dropout_p": p}
    if arguments.get("enable_gqa"):
        shared = q.shape[-3] // k.shape[-3]
        changed |= {"key": k.repeat_interleave(shared, -3), "value": v.repeat_interleave(shared, -3), "enable_gqa": False}
    return _as_it_is(operator, node, arguments | changed, context)


def recurrent_rule(operator: ModuleOperator, node: Node, arguments: Arguments, context: OperatorContext) -> Any:
    """Run a recurrent layer with the initial states of the local samples."""
    batch = _one(_cut(operator, context, "b"), operator)
    changed: Arguments = {} if operator.module.drops else {"dropout": 0.0}
    for name, value in arguments.items():
        if name.partition(".")[0] == "hx" and isinstance(value, torch.Tensor) and batch:
            share = value.shape[1] // context.parts(batch)
            changed[name] = value.narrow(1, context.index(batch) * share, share).contiguous()
    return _as_it_is(operator, node, arguments | changed, context)


def embedding_rule(operator: ModuleOperator, node: Node, arguments: Arguments, context: OperatorContext) -> Any:
    """Look up local rows of a sharded table; rows of other ranks are zero, and the sum over ranks is the result."""
    vocabulary = _one(_cut(operator, context, "v"), operator)
    if not vocabulary:
        return _as_it_is(operator, node, arguments, context)
    table = arguments["weight"]
    first = context.index(vocabulary) * table.shape[0]
    mine, index = local_rows(arguments["indices"], first, table.shape[0])
    padding = int(arguments.get("padding_idx", -1)) - first
    padding = padding if arguments.get("padding_idx", -1) >= 0 and 0 <= padding < table.shape[0] else -1
    rows = _as_it_is(operator, node, arguments | {"indices": index, "padding_idx": padding}, context)
    return rows.masked_fill(~mine.unsqueeze(-1), 0.0)


def embedding_bag_rule(operator: ModuleOperator, node: Node, arguments: Arguments, context: OperatorContext) -> Any:
    """Sum the bags of the local samples, from their first local entry; rows of other ranks have weight zero."""
    changed: Arguments = {}
    if _cut(operator, context, "b"):
        changed["offsets"] = arguments["offsets"] - arguments["offsets"][:1]
    vocabulary = _one(_cut(operator, context, "v"), operator)
    if vocabulary:
        table = arguments["weight"]
        mine, index = local_rows(arguments["indices"], context.index(vocabulary) * table.shape[0], table.shape[0])
        changed |= {"indices": index, "per_sample_weights": mine.to(table.dtype)}
    return _as_it_is(operator, node, arguments | changed, context)


def norm_rule(operator: ModuleOperator, node: Node, arguments: Arguments, context: OperatorContext) -> Any:
    """Compute the norm, with reductions over the ranks if a normalised dim is sharded."""
    x = arguments["input"]
    over = tuple(range(x.dim() - len(arguments["normalized_shape"]), x.dim()))
    dims = _cut(operator, context, *operator.vertex.reduced)
    if not dims:
        return _as_it_is(operator, node, arguments | {"normalized_shape": [x.shape[position] for position in over]}, context)
    eps = arguments.get("eps")
    weight = arguments["weight"] if arguments["weight"] is not None else x.new_ones([x.shape[position] for position in over])
    return normalise(
        x,
        weight.reshape(*[1] * over[0], *weight.shape),
        None if arguments.get("bias") is None else arguments["bias"].reshape(*[1] * over[0], *weight.shape),
        over=over,
        count=prod(arguments["normalized_shape"]),
        eps=torch.finfo(x.dtype).eps if eps is None else float(eps),
        centred="rms" not in function_name(node),
        reduce=partial(context.all_reduce, dims=dims),
    )


def batch_norm_rule(operator: ModuleOperator, node: Node, arguments: Arguments, context: OperatorContext) -> Any:
    """Compute synchronised batch norm: statistics and running averages of the global batch."""
    x = arguments["input"]
    if not (arguments["training"] or arguments["running_mean"] is None):
        return _as_it_is(operator, node, arguments, context)
    dims = _cut(operator, context, *operator.vertex.reduced)
    if not dims:
        return _as_it_is(operator, node, arguments, context)
    shape = [-1 if position == 1 else 1 for position in range(x.dim())]
    weight, bias = (None if arguments[name] is None else arguments[name].reshape(shape) for name in ("weight", "bias"))
    count = x.numel() // x.shape[1] * context.parts(*dims)
    momentum = float(arguments["momentum"])

    def observe(mean: torch.Tensor, variance: torch.Tensor) -> None:
        for running, value in ((arguments["running_mean"], mean), (arguments["running_var"], variance * count / max(count - 1, 1))):
            if running is not None:
                running.lerp_(value.reshape(-1).to(running.dtype), momentum)

    return normalise(
        x,
        x.new_ones([1, x.shape[1], *shape[2:]]) if weight is None else weight,
        bias,
        over=tuple(position for position in range(x.dim()) if position != 1),
        count=count,
        eps=float(arguments["eps"]),
        centred=True,
        reduce=partial(context.all_reduce, dims=dims),
        observe=observe,
    )


def softmax_rule(operator: ModuleOperator, node: Node, arguments: Arguments, context: OperatorContext) -> Any:
    dim = _one(_cut(operator, context, *operator.vertex.reduced), operator)
    if not dim:
        return _as_it_is(operator, node, arguments, context)
    x = arguments["self"] if arguments.get("dtype") is None else arguments["self"].to(arguments["dtype"])
    reduce = partial(context.all_reduce, dims=(dim,))
    return sharded_softmax(x, position=int(arguments["dim"]) % x.dim(), scale=1.0, hidden=None, reduce=reduce)


def cross_entropy_rule(operator: ModuleOperator, node: Node, arguments: Arguments, context: OperatorContext) -> Any:
    """Compute the cross-entropy; a mean covers the samples of all ranks, so each rank returns its share."""
    scores, target, reduction = arguments["self"], arguments["target"], int(arguments["reduction"])
    rows = tuple(name for name in operator.operator.dims if name not in operator.names("v"))
    parts = context.parts(*rows)
    dim = _one(_cut(operator, context, "v"), operator)
    if not dim:
        loss = _as_it_is(operator, node, arguments, context)
        return loss / parts if reduction == 1 and parts > 1 else loss
    scores = scores.movedim(1, -1) if scores.dim() > 1 else scores
    size = context.sizes[dim]
    first, reduce = context.index(dim) * scores.shape[-1], partial(context.all_reduce, dims=(dim,))
    losses = cross_entropy(scores, target, first=first, size=size, reduce=reduce)
    seen = target != arguments.get("ignore_index", -100)
    losses = torch.where(seen, losses, 0.0)
    if reduction == 0:
        return losses
    return losses.sum() / (seen.sum() * parts) if reduction == 1 else losses.sum()


def loss_rule(operator: ModuleOperator, node: Node, arguments: Arguments, context: OperatorContext) -> Any:
    """Compute a loss; a mean covers the entries of all ranks, so each rank returns its share."""
    loss = _as_it_is(operator, node, arguments, context)
    parts = context.parts(*_cut(operator, context, *operator.vertex.reduced))
    return loss / parts if int(arguments["reduction"]) == 1 and parts > 1 else loss


def mean_rule(operator: ModuleOperator, node: Node, arguments: Arguments, context: OperatorContext) -> Any:
    result = _as_it_is(operator, node, arguments, context)
    parts = context.parts(*_cut(operator, context, *operator.vertex.reduced))
    return result / parts if parts > 1 else result


def dropout_rule(operator: ModuleOperator, node: Node, arguments: Arguments, context: OperatorContext) -> Any:
    """Apply dropout, unless gradients are compared. Replicated entries share one mask on all ranks."""
    x = arguments["input"]
    p = float(arguments["p"])
    if not operator.module.drops or not arguments.get("train", True) or p == 0.0:
        return x
    return x * operator.module.kept_entries(x, p, context)


def split_rule(operator: ModuleOperator, node: Node, arguments: Arguments, context: OperatorContext) -> Any:
    """Split into equal parts, which are shorter locally if the split dim is sharded."""
    x = arguments["self"]
    axis, _ = operator.module.imported.pieces.even_part(operator.source.vertex)
    if not axis:
        return _as_it_is(operator, node, arguments, context)
    position = operator.vertex.inputs[0].dims.index(axis)
    return x.chunk(len(operator.vertex.outputs), position)


Rule = Callable[[ModuleOperator, "Node", Arguments, OperatorContext], Any]


def _rules(rule: Rule, names: str) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


#: Rules by torch name; all other operators run unchanged on local tensors.
RULES: Mapping[str, Rule] = {
    **_rules(product_rule, "addmm baddbmm"),
    **_rules(convolution_rule, "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution"),
    **_rules(attention_rule, "scaled_dot_product_attention"),
    **_rules(recurrent_rule, "lstm gru rnn_tanh rnn_relu"),
    **_rules(embedding_rule, "embedding"),
    **_rules(embedding_bag_rule, "embedding_bag"),
    **_rules(norm_rule, "layer_norm rms_norm"),
    **_rules(batch_norm_rule, "batch_norm"),
    **_rules(softmax_rule, "softmax"),
    **_rules(cross_entropy_rule, "cross_entropy_loss nll_loss nll_loss_nd nll_loss2d"),
    **_rules(loss_rule, "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div"),
    **_rules(mean_rule, "mean"),
    **_rules(dropout_rule, "dropout feature_dropout alpha_dropout"),
    **_rules(split_rule, "split split_with_sizes chunk tensor_split unbind"),
}
