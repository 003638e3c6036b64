"""Iteration spaces of torch operators that read or write entries by index."""

from __future__ import annotations

from perfmodel.workload.imported.graph import ImportedKind
from perfmodel.workload.imported.iteration_space import Call, IterationSpace, Rule, aligned, axis_of, names_of, sizes_of


def gather(call: Call) -> IterationSpace:
    """Return a gather: entries of one dim, selected for every position of the index."""
    index = call.tensors["index"]
    names = names_of(len(index))
    dims = sizes_of(names, index)
    axis = names[axis_of(call.values["dim"], len(index))]
    read = tuple("" if name == axis else name for name in aligned(call.tensors["self"], names, dims))
    return IterationSpace(kind=ImportedKind.REARRANGE, dims=dims, reads={"self": read, "index": names}, writes=(names,), unsplit=(axis,))


def indexed(call: Call) -> IterationSpace | None:
    """Return x[.., v.., ..] at index[..] -> [.., index's positions, ..]: full slices along adjacent indexed positions."""
    shape, output = call.tensors["self"], call.outputs[0]
    indices = {int(name.rpartition(".")[2]): tensor_shape for name, tensor_shape in call.tensors.items() if name.startswith("indices.")}
    axes = sorted(indices)
    rank = max((len(tensor_shape) for tensor_shape in indices.values()), default=0)
    if not axes or axes[-1] - axes[0] != len(axes) - 1 or len(output) != len(shape) - len(axes) + rank:
        return None
    names, first = names_of(len(output)), axes[0]
    dims = sizes_of(names, output)
    read = (*names[:first], *("",) * len(axes), *names[first + rank :])
    if any(name and dims[name] != size for name, size in zip(read, shape, strict=True)):
        return None
    reads = {f"indices.{position}": aligned(tensor_shape, names[first : first + rank], dims) for position, tensor_shape in indices.items()}
    return IterationSpace(kind=ImportedKind.REARRANGE, dims=dims, reads={"self": read, **reads}, writes=(names,))


def written_into(call: Call) -> IterationSpace:
    """Return an update of a tensor by index: entries are written or added along some positions; the others are kept."""
    shape = call.tensors["self"]
    names = names_of(len(shape))
    dims = sizes_of(names, shape)
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


def moved_whole(call: Call) -> IterationSpace:
    """Return an operator whose every output depends on all inputs: indices of nonzeros, counts of values."""
    return IterationSpace(kind=ImportedKind.REARRANGE, dims={}, reads={}, writes=tuple(("",) * len(output) for output in call.outputs))


def nonzero_or(otherwise: Rule) -> Rule:
    """Return the rule of `torch.where`, which gives the indices of nonzeros for a single tensor."""
    return lambda call: moved_whole(call) if len(call.tensors) == 1 else otherwise(call)
