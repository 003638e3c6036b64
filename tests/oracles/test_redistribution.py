"""Redistributions executed on simulated ranks: the steps lead to the target layout, and their buffers have the claimed size."""

import itertools

import numpy as np
import pytest

from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.parallel.algebra.sharding import Layout, Step, collectives, differing, redistribute
from tests.marks import mostly_slow
from tests.oracles.simulated_ranks import SimulatedMesh, check_reassembles, distribute, execute

MESHES = (
    {"cp": 2, "tp_kv": 2},
    {"cp": 2, "tp_kv": 3},
    {"cp": 4, "tp_kv": 2},
    {"dp_shard": 2, "cp": 2, "tp_kv": 2},
    {"dp_shard": 2, "cp": 3, "tp_kv": 2},
)


def random_layout(axes: list[str], num_positions: int, random: np.random.Generator, partial: frozenset[str] | None = None) -> Layout:
    """Each axis cuts a position, is partial (any axis, or those of `partial` only) or is replicated."""
    cuts: list[list[str]] = [[] for _ in range(num_positions)]
    left = set()
    for axis in random.permutation(axes):
        position = int(random.integers(-2, num_positions))
        if position >= 0:
            cuts[position].append(str(axis))
        elif position == -1 and (partial is None or axis in partial):
            left.add(str(axis))
    return Layout(cuts=tuple(map(tuple, cuts)), partial=frozenset(left))


def check_redistribution(mesh, source, target, random, *, rule=redistribute):
    shape = tuple(
        mesh.size(frozenset((*have, *want))) * int(random.integers(1, 3)) for have, want in zip(source.cuts, target.cuts, strict=True)
    )
    value = random.integers(-9, 10, shape).astype(float)
    buffers = distribute(mesh, source, value, random)
    check_reassembles(mesh, source, buffers, value)
    result, sizes = execute(mesh, source, target, buffers, shape, redistribute=rule)
    check_reassembles(mesh, target, result, value)
    for step, elements in sizes:
        assert elements * mesh.size(step.remaining) == value.size, f"{source} -> {target}: {step}"
    return sizes


@pytest.mark.parametrize("sizes", mostly_slow(MESHES), ids=str)
def test_any_layout_becomes_any_other(sizes):
    random = np.random.default_rng(sum(sizes.values()))
    mesh = SimulatedMesh(sizes)
    for _ in range(120):
        source = random_layout(list(sizes), 2, random)
        target = random_layout(list(sizes), 2, random, partial=source.partial)
        try:
            check_redistribution(mesh, source, target, random)
        except AssertionError as error:
            raise AssertionError(f"{source} -> {target}: {[(s.kind, sorted(s.axes)) for s in redistribute(source, target)]}") from error


def in_order(layout: Layout, axes: list[str]) -> Layout:
    """Every position cut in the order of the axes."""
    return Layout(cuts=tuple(tuple(sorted(cut, key=axes.index)) for cut in layout.cuts), partial=layout.partial)


@pytest.mark.parametrize("dtype", mostly_slow([np.int32, np.int64]))
def test_many_layouts_at_once_as_masks(dtype):
    """Bit i is axis i; sources and targets broadcast to all pairs, each of which is executed."""
    sizes = {"dp_shard": 2, "cp": 3, "tp_kv": 2}
    axes, mesh, random = list(sizes), SimulatedMesh(sizes), np.random.default_rng(11)
    sources = [in_order(random_layout(axes, 2, random), axes) for _ in range(12)]
    targets = [in_order(random_layout(axes, 2, random, partial=frozenset()), axes) for _ in range(10)]

    def masks(names: list[tuple[str, ...] | frozenset[str]]) -> np.ndarray:
        return np.array([sum(1 << axes.index(axis) for axis in group) for group in names], dtype=dtype)

    have = [masks([layout.cuts[i] for layout in sources])[:, None] for i in range(2)]
    want = [masks([layout.cuts[i] for layout in targets])[None, :] for i in range(2)]
    partial = masks([layout.partial for layout in sources])[:, None]
    due = collectives(have, want, partial, [differing(*cuts) for cuts in zip(have, want, strict=True)])
    due = [(kind, *np.broadcast_arrays(group, remaining, np.empty((12, 10)))[:2]) for kind, group, remaining in due]

    def names(mask: int) -> frozenset[str]:
        return frozenset(axis for i, axis in enumerate(axes) if mask >> i & 1)

    for (i, source), (j, target) in itertools.product(enumerate(sources), enumerate(targets)):
        steps = tuple(Step(kind=kind, axes=names(g[i, j]), remaining=names(r[i, j])) for kind, g, r in due if g[i, j])
        check_redistribution(mesh, source, target, random, rule=lambda _, __, expected=steps: expected)
        assert steps == redistribute(source, target), "as many collectives and no larger ones"


def two_axis_layouts(partial: frozenset[str] = frozenset()):
    """Every layout of two positions on two axes."""
    axes = ("cp", "tp_kv")
    for places in itertools.product((0, 1, None), repeat=2):
        cuts = [tuple(axis for axis, position in zip(axes, places, strict=True) if position == i) for i in (0, 1)]
        free = [axis for axis, position in zip(axes, places, strict=True) if position is None]
        for number in range(len(free) + 1):
            for subset in itertools.combinations(free, number):
                orders = [cuts] if max(map(len, cuts)) < 2 else [cuts, [cut[::-1] for cut in cuts]]
                yield from (Layout(cuts=tuple(order), partial=frozenset(subset)) for order in orders)


@pytest.mark.slow
def test_all_pairs_of_layouts_on_two_axes():
    random = np.random.default_rng(5)
    mesh = SimulatedMesh({"cp": 2, "tp_kv": 3})
    pairs = [(s, t) for s in two_axis_layouts() for t in two_axis_layouts() if t.partial <= s.partial]
    assert len(pairs) == 223
    for source, target in pairs:
        check_redistribution(mesh, source, target, random)


def layout(*cuts: str, partial: str = "") -> Layout:
    return Layout(cuts=tuple(tuple(cut.split()) for cut in cuts), partial=frozenset(partial.split()))


def kinds(source: Layout, target: Layout) -> list[tuple[str, str]]:
    return [(str(step.kind), " ".join(sorted(step.axes))) for step in redistribute(source, target)]


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        (layout("cp", ""), layout("cp", ""), []),
        (layout("", partial="tp_kv"), layout(""), [("all_reduce", "tp_kv")]),
        (layout("", partial="tp_kv"), layout("tp_kv"), [("reduce_scatter", "tp_kv")]),
        (layout("tp_kv"), layout(""), [("all_gather", "tp_kv")]),
        (layout("tp_kv", ""), layout("", "tp_kv"), [("all_to_all", "tp_kv")]),
        (layout(""), layout("tp_kv"), []),
        (layout("cp tp_kv"), layout("tp_kv cp"), [("all_to_all", "cp tp_kv")]),
        (layout("cp tp_kv"), layout("cp"), [("all_gather", "tp_kv")]),
        (layout("cp tp_kv"), layout("tp_kv"), [("all_gather", "cp tp_kv")]),
        (layout("tp_kv"), layout("cp tp_kv"), [("all_to_all", "cp tp_kv")]),
        (layout("cp"), layout("cp tp_kv"), []),
        (layout("", partial="dp_shard tp_kv"), layout("dp_shard"), [("reduce_scatter", "dp_shard"), ("all_reduce", "tp_kv")]),
        (layout("", partial="cp tp_kv"), layout(""), [("all_reduce", "cp tp_kv")]),
        (layout("cp", "", partial="tp_kv"), layout("tp_kv", "cp"), [("reduce_scatter", "tp_kv"), ("all_to_all", "cp tp_kv")]),
        (layout("tp_kv", "cp"), layout("", ""), [("all_gather", "cp tp_kv")]),
    ],
    ids=str,
)
def test_which_collectives(source, target, expected):
    assert kinds(source, target) == expected


def test_reduce_scatter_before_all_reduce_leaves_it_a_shard():
    scatter, reduce = redistribute(layout("", partial="dp_shard dp_replicate"), layout("dp_shard"))
    assert scatter.remaining == frozenset()
    assert reduce.remaining == {"dp_shard"}


def reduces_then_slices(source: Layout, target: Layout) -> tuple[Step, ...]:
    """Wrong: forgets that the all-reduce has not happened where a slice of a partial sum is taken."""
    return tuple(step for step in redistribute(source, target) if step.kind is not CollectiveKind.REDUCE_SCATTER)


def gathers_outer_axis_alone(source: Layout, target: Layout) -> tuple[Step, ...]:
    """Wrong: gathers only the axes that leave, so chunks stay interleaved (R10)."""
    leaves = source.cut_axes - target.cut_axes
    return (Step(kind=CollectiveKind.ALL_GATHER, axes=leaves, remaining=source.cut_axes - leaves),)


def slices_outside(source: Layout, target: Layout) -> tuple[Step, ...]:
    """Wrong: takes a new outer cut for a free slice."""
    return ()


def grows_first(source: Layout, target: Layout) -> tuple[Step, ...]:
    """Wrong sizes: gathers before it reduces, and says otherwise."""
    return redistribute(source, target)[::-1]


@pytest.mark.parametrize(
    ("rule", "source", "target"),
    [
        (reduces_then_slices, layout("", partial="tp_kv"), layout("tp_kv")),
        (gathers_outer_axis_alone, layout("cp tp_kv"), layout("tp_kv")),
        (slices_outside, layout("tp_kv"), layout("cp tp_kv")),
        (slices_outside, layout("cp tp_kv"), layout("tp_kv cp")),
        (grows_first, layout("cp", partial="tp_kv"), layout("")),
    ],
)
def test_a_wrong_rule_is_found(rule, source, target):
    mesh = SimulatedMesh({"cp": 2, "tp_kv": 3})
    check_redistribution(mesh, source, target, np.random.default_rng(0))
    with pytest.raises(AssertionError):
        check_redistribution(mesh, source, target, np.random.default_rng(0), rule=rule)
