"""Shares of the causal half, counted score by score."""

import numpy as np
import pytest

from perfmodel.workload.causal import CausalMask, CausalWindow

S = 96


def seen_by_slowest(num_ranks, window, *, head_tail):
    """Scores that the busiest of the ranks computes, over those of its queries and all keys."""
    seen = np.minimum(np.arange(S) + 0.5, window)
    chunks = seen.reshape(2 * num_ranks, -1).sum(axis=1)
    by_rank = chunks[:num_ranks] + chunks[::-1][:num_ranks] if head_tail else chunks.reshape(num_ranks, 2).sum(axis=1)
    return by_rank.max() * num_ranks / S**2


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("window", [S, 72, 24, 6])
@pytest.mark.parametrize("head_tail", [True, False])
def test_the_slowest_rank(num_ranks, window, head_tail):
    mask = CausalMask(window_fraction=window / S, windowed_fraction=1.0)
    assert mask.seen_by_slowest(num_ranks, head_tail=head_tail) == pytest.approx(
        seen_by_slowest(num_ranks, window, head_tail=head_tail), rel=0.01
    )


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("chunk", [48, 24, 12, 6])
def test_chunks_that_do_not_see_one_another(num_ranks, chunk):
    mask = CausalMask(window_fraction=chunk / S, windowed_fraction=1.0, is_chunked=True)
    seen = np.arange(S) % chunk + 0.5
    assert mask.fraction == pytest.approx(seen.mean() / S)
    assert mask.seen_by_slowest(num_ranks, head_tail=True) == pytest.approx(mask.fraction)
    by_rank = seen.reshape(num_ranks, -1).mean(axis=1) / S
    assert mask.seen_by_slowest(num_ranks, head_tail=False) == pytest.approx(by_rank.max(), rel=0.01)


def test_without_a_window():
    """From either end all ranks do the mean; in order the last of n does 2 - 1/n of it."""
    ranks = np.array([1.0, 2.0, 4.0, 8.0])
    assert CausalMask().seen_by_slowest(ranks, head_tail=True).tolist() == [0.5] * 4
    assert CausalMask().seen_by_slowest(ranks, head_tail=False).tolist() == [(2 - 1 / n) / 2 for n in ranks]


def test_layers_with_and_without_a_window():
    mask = CausalMask(window_fraction=0.25, windowed_fraction=0.5)
    assert mask.fraction == 0.5 * (0.25 - 0.25**2 / 2) + 0.5 * 0.5


@pytest.mark.parametrize("is_chunked", [False, True])
def test_masks_of_several_lengths_are_those_of_each(is_chunked):
    window = CausalWindow(window=24, windowed_fraction=0.75, is_chunked=is_chunked)
    lengths = np.array([12.0, 24.0, 96.0, 100.0])
    together = window.over(lengths).seen_by_slowest(np.array([4.0]), head_tail=False)
    assert together.tolist() == [window.over(length).seen_by_slowest(4.0, head_tail=False) for length in lengths]
    assert window.over(12.0).fraction == pytest.approx(0.5, rel=1e-15)
