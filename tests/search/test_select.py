"""The k smallest and the front of a stream of blocks, against sorting everything."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.search.select import Front, Smallest

#: Few distinct values, so that ties abound; infinities are what does not fit.
costs = st.one_of(st.sampled_from([0.0, 1.0, 1.5, 2.0, 3.0, np.inf]), st.floats(0.0, 10.0))
blocks = st.lists(st.lists(st.tuples(costs, costs), min_size=1, max_size=30), min_size=1, max_size=6)


def stream(chunks):
    """(first costs, second costs, first id) of each block."""
    first_id = 0
    for chunk in chunks:
        values = np.array(chunk, dtype=float)
        yield values[:, 0], values[:, 1], first_id
        first_id += len(chunk)


@given(blocks, st.integers(1, 12))
def test_smallest_with_ties_to_the_smaller_id(chunks, count):
    kept = Smallest(count=count)
    for values, _, first_id in stream(chunks):
        kept.offer(values, first_id)
    flat = [value for chunk in chunks for value, _ in chunk]
    expected = sorted((value, i) for i, value in enumerate(flat) if np.isfinite(value))[:count]
    assert list(zip(kept.values.tolist(), kept.ids.tolist(), strict=True)) == expected
    assert kept.bound == (expected[-1][0] if len(expected) == count else np.inf)


@given(st.integers(1, 6), st.integers(0, 3), st.integers(0, 10**6))
def test_smallest_of_blocks_much_larger_than_what_is_kept(count, levels, seed):
    rng = np.random.default_rng(seed)
    kept, values = Smallest(count=count), rng.integers(0, 10**levels, size=(3, 200)).astype(float)
    for i, block in enumerate(values):
        kept.offer(block, 200 * i)
    order = np.argsort(values.reshape(-1), kind="stable")[:count]
    assert kept.ids.tolist() == order.tolist()


def brute_front(points):
    """Ids of the points that no other one equals or beats in both; of equal points the first."""
    kept = []
    for i, (a, b) in points:
        beaten = any((c <= a and d < b) or (c < a and d <= b) or ((c, d) == (a, b) and j < i) for j, (c, d) in points)
        if not beaten:
            kept.append((a, b, i))
    return sorted(kept)


@given(blocks, st.sampled_from([1, 4, 512]))
def test_front(chunks, num_bins):
    front = Front(low=0.0, high=10.0, num_bins=num_bins)
    for first, second, first_id in stream(chunks):
        front.offer(first, second, first_id)
    flat = [pair for chunk in chunks for pair in chunk]
    points = [(i, pair) for i, pair in enumerate(flat) if np.isfinite(pair[0]) and np.isfinite(pair[1])]
    finite = [entry for entry in zip(front.first.tolist(), front.second.tolist(), front.ids.tolist(), strict=True) if np.isfinite(entry[1])]
    assert finite == brute_front(points)


def test_front_of_costs_beyond_its_bins():
    """Costs outside [low, high] fall into the outermost bins and are compared exactly all the same."""
    front = Front(low=1.0, high=2.0, num_bins=8)
    front.offer(np.array([3.0, 2.0, 1.0, 0.5]), np.array([-5.0, 0.5, 9.0, 30.0]), 0)
    assert front.ids.tolist() == [3, 2, 1, 0]
    front.offer(np.array([0.4]), np.array([9.0]), 4)
    assert front.ids.tolist() == [4, 1, 0]


def test_nothing_finite_leaves_nothing():
    smallest, front = Smallest(count=3), Front(low=0.0, high=1.0)
    smallest.offer(np.full(5, np.inf), 0)
    front.offer(np.full(5, np.inf), np.zeros(5), 0)
    assert len(smallest.ids) == len(front.ids) == 0
    assert smallest.bound == np.inf


@pytest.mark.parametrize("size", [1, 100_000])
def test_blocks_of_any_size(size):
    values = np.random.default_rng(1).random(size)
    kept = Smallest(count=7)
    kept.offer(values, 10)
    assert kept.values.tolist() == np.sort(values)[:7].tolist()
