"""The additional layers that a rank may hold where the layer placement of a framework is not known."""

import pytest

from perfmodel.parallel.layout import even_stage_layers
from perfmodel.parallel.stage_cuts import imbalance, stage_layers_by_cost
from perfmodel.workload.models import load_model

MODEL = load_model("llama-3-8b")  # 32 layers, a head of 128 thousand words


def test_the_first_stage_by_cost_is_fuller_than_an_even_one():
    by_cost, even = stage_layers_by_cost(MODEL, 4), even_stage_layers(32, 4)
    assert by_cost[0] == 9 > even[0] == 8
    assert imbalance(MODEL, 4, (8.0, 8.0, 8.0)) == pytest.approx((9 / 8, 9 / 8, 1.0))
    assert imbalance(MODEL, 4, (9.0, 9.0, 6.0)) == (1.0, 1.0, 1.0)


def test_ranks_between_may_be_distinguished():
    """Layers of several kinds in turn make unlike stages."""
    assert imbalance(MODEL, 4, (8.0, 8.0, 9.0, 6.0)) == pytest.approx((9 / 8, 9 / 8, 1.0, 1.0))


@pytest.mark.parametrize(("stages", "held"), [(2, (16.0, 0.0, 16.0)), (64, (1.0, 1.0, 1.0)), (34, (0.0, 1.0, 0.0))])
def test_pipelines_of_two_stages_and_of_more_than_layers(stages, held):
    first, between, last = imbalance(MODEL, stages, held)
    assert first >= 1.0
    assert between == last == 1.0
