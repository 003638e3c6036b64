"""Experts that tokens meet, against routers that are drawn."""

import numpy as np
import pytest

from perfmodel.cost.serving.experts import POPULARITY_VARIANCE, activated_share, fullest_rank


def test_experts_met_are_those_of_drawn_popularities():
    """Choices of each token by popularities drawn from a gamma distribution; the fullest of 8 ranks of 32 experts each."""
    draw, experts, top_k, tokens = np.random.default_rng(0), 256, 8, 64
    met, rows = [], []
    for _ in range(400):
        rate = draw.gamma(1.0 / POPULARITY_VARIANCE, size=experts) * POPULARITY_VARIANCE * tokens * top_k / experts
        chosen = draw.poisson(rate)
        met.append((chosen > 0).reshape(8, -1).sum(axis=1))
        rows.append(chosen.reshape(8, -1).sum(axis=1))
    share = activated_share(tokens, experts, top_k)
    assert np.mean(met) / 32 == pytest.approx(float(share), rel=0.03)
    more_activated, more_rows = fullest_rank(share, tokens, experts, top_k, 8.0)
    assert np.mean(np.max(met, axis=1)) / np.mean(met) == pytest.approx(float(more_activated), rel=0.03)
    assert np.mean(np.max(rows, axis=1)) / np.mean(rows) == pytest.approx(float(more_rows), rel=0.05)


def test_one_token_meets_its_own_experts_and_one_rank_has_all():
    assert float(activated_share(1.0, 256, 8)) * 256 == pytest.approx(8.0, rel=0.05)
    assert float(activated_share(1e6, 256, 8)) == pytest.approx(1.0, abs=0.01)
    assert fullest_rank(np.array(0.5), 64.0, 256, 8, 1.0) == (1.0, 1.0)
    assert (np.diff(activated_share(np.arange(1.0, 500.0), 256, 8)) > 0).all()
