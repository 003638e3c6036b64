"""Tensors arrive in the layout that is asked for, by the collectives that the sharding algebra names and no others."""

from math import prod

import pytest

from perfmodel.parallel.algebra.sharding import Layout, redistribute
from perfmodel.parallel.per_operator.mesh import MeshAxis
from tests.execute.per_operator.layouts import random_layouts, redistribute_all

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TWO = (MeshAxis(name="p", size=2, tier=0),)
FOUR = (MeshAxis(name="a", size=2, tier=1), MeshAxis(name="b", size=2, tier=0))
SHAPE = (8, 4, 12)


def expected_collectives(source: Layout, target: Layout, axes: tuple[MeshAxis, ...]) -> list[tuple[str, tuple[str, ...], float]]:
    sizes = {axis.name: axis.size for axis in axes}
    return [
        (str(step.kind), tuple(sorted(step.axes)), prod(SHAPE) / prod(sizes[axis] for axis in step.remaining))
        for step in redistribute(source, target)
    ]


@pytest.mark.parametrize("axes, num_pairs", [(TWO, 40), (FOUR, 100)], ids=["2", "4"])
def test_a_known_tensor_between_random_layouts(axes, num_pairs, groups):
    pairs = [random_layouts(seed, axes, len(SHAPE)) for seed in range(num_pairs)]
    results = groups(prod(axis.size for axis in axes)).call(redistribute_all, axes, SHAPE, pairs)
    seen = set()
    for index, (source, target) in enumerate(pairs):
        expected = expected_collectives(source, target, axes)
        seen |= {kind for kind, _, _ in expected}
        for rank, rank_results in enumerate(results):
            error, noted, counts, elements = rank_results[index]
            assert error < 1e-12, (rank, source, target)
            # without what resolves the partial sums at the end of the test
            assert noted[: len(expected)] == expected, (rank, source, target)
            assert sum(counts.values()) == len(expected), (source, target, counts)
            for kind, names, number in expected:
                key = (kind, "+".join(names))
                assert counts[key] == sum(1 for k, n, _ in expected if (k, n) == (kind, names))
                assert elements[key] == pytest.approx(sum(e for k, n, e in expected if (k, n) == (kind, names))), (number, source, target)
    assert seen == {"all_reduce", "reduce_scatter", "all_gather", "all_to_all"}


@pytest.mark.parametrize(
    "source, target, kinds",
    [
        # the same cuts in another order: chunks trade places
        (Layout(cuts=(("a", "b"), (), ())), Layout(cuts=(("b", "a"), (), ())), ["all_to_all"]),
        # the outer cut goes, the inner one stays: both are gathered, then cut
        (Layout(cuts=(("a", "b"), (), ())), Layout(cuts=(("b",), (), ())), ["all_gather"]),
        (Layout(cuts=(("a", "b"), (), ())), Layout(cuts=((), ("a",), ())), ["all_to_all", "all_gather"]),
        (Layout(cuts=(("a",), (), ()), partial=frozenset("b")), Layout(cuts=(("b", "a"), (), ())), ["reduce_scatter", "all_to_all"]),
        (Layout(cuts=((), (), ()), partial=frozenset("ab")), Layout(cuts=(("a",), ("b",), ())), ["reduce_scatter"]),
        (Layout(cuts=(("a",), ("b",), ())), Layout(cuts=((), (), ())), ["all_gather"]),
        (Layout(cuts=((), (), ())), Layout(cuts=(("b",), (), ("a",))), []),
    ],
)
def test_orders_and_mergers(source, target, kinds, groups):
    for rank_results in groups(4).call(redistribute_all, FOUR, SHAPE, [(source, target)]):
        error, noted, counts, _ = rank_results[0]
        assert error < 1e-12
        assert [kind for kind, _, _ in noted] == kinds
        assert sum(counts.values()) == len(kinds)
