"""Torch operators that take entries by their numbers, or put them where numbers say, as iteration spaces."""

from __future__ import annotations

from perfmodel.workload.imported.graph import ImportedKind
from perfmodel.workload.imported.iteration_space import Call, IterationSpace, Rule, aligned, axis_of, names_of, sizes_of


def gather(call: Call) -> IterationSpace:
    """Entries of one dim, picked for every position of the index."""
    index = call.tensors["index"]
    names = names_of(len(index))
    dims = sizes_of(names, index)
    axis = names[axis_of(call.values["dim"], len(index))]
    read = tuple("" if name == axis else name for name in aligned(call.tensors["self"], names, dims))
    return IterationSpace(kind=ImportedKind.REARRANGE, dims=dims, reads={"self": read, "index": names}, writes=(names,), unsplit=(axis,))


def indexed(call: Call) -> IterationSpace | None:
    """x[.., v.., ..] at index[..] -> [.., index's positions, ..]: whole slices along positions that are indexed and lie side by side."""
    shape, output = call.tensors["self"], call.outputs[0]
    indices = {int(name.rpartition(".")[2]): each for name, each in call.tensors.items() if name.startswith("indices.")}
    places = sorted(indices)
    rank = max((len(each) for each in indices.values()), default=0)
    if not places or places[-1] - places[0] != len(places) - 1 or len(output) != len(shape) - len(places) + rank:
        return None
    names, first = names_of(len(output)), places[0]
    dims = sizes_of(names, output)
    read = (*names[:first], *("",) * len(places), *names[first + rank :])
    if any(name and dims[name] != size for name, size in zip(read, shape, strict=True)):
        return None
    reads = {f"indices.{place}": aligned(each, names[first : first + rank], dims) for place, each in indices.items()}
    return IterationSpace(kind=ImportedKind.REARRANGE, dims=dims, reads={"self": read, **reads}, writes=(names,))


def written_into(call: Call) -> IterationSpace:
    """A tensor with entries of another put, or added, where numbers say along some positions; the other positions are kept."""
    shape = call.tensors["self"]
    names = names_of(len(shape))
    dims = sizes_of(names, shape)
    if "dim" in call.values:
        moved = {axis_of(call.values["dim"], len(shape))}
    else:
        moved = {int(name.rpartition(".")[2]) for name in call.tensors if name.startswith("indices.")}
    own = tuple("" if place in moved else name for place, name in enumerate(names))
    reads = {name: own for name, each in call.tensors.items() if len(each) == len(shape)}
    reads = {
        name: tuple(dim if dim and dims[dim] == size else "" for dim, size in zip(read, call.tensors[name], strict=True))
        for name, read in reads.items()
    }
    unsplit = tuple(name for name in names if name not in own)
    return IterationSpace(kind=ImportedKind.REARRANGE, dims=dims, reads=reads, writes=(own,), unsplit=unsplit)


def moved_whole(call: Call) -> IterationSpace:
    """Rule of operators whose every entry depends on all inputs: places of nonzeros, counts of values."""
    return IterationSpace(kind=ImportedKind.REARRANGE, dims={}, reads={}, writes=tuple(("",) * len(output) for output in call.outputs))


def nonzero_or(otherwise: Rule) -> Rule:
    """`torch.where` of one tensor gives the places of what is not zero."""
    return lambda call: moved_whole(call) if len(call.tensors) == 1 else otherwise(call)
