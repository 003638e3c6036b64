"""The fewest chips of a service: one step fewer does not hold the load."""

import pytest

from perfmodel.cost.resolve import choose_calibration
from perfmodel.foundation.errors import InputError
from perfmodel.frameworks.engine import load_engine
from perfmodel.hardware.reader import load_cluster
from perfmodel.planner.result import ServingLimits
from perfmodel.planner.serving.search import find_fewest_chips, serving_plans
from tests.planner.serving.serving_searches import searched, serving_job

LIMITS = ServingLimits(ttft=1.0, tpot=0.03)


def fewest(job, **words):
    cluster = load_cluster("dgx-h100")
    calibration, engine = choose_calibration(cluster.chip), load_engine("vllm")
    return find_fewest_chips(job, cluster, lambda chips: serving_plans(job, chips, calibration, engine, limits=LIMITS), **words)


@pytest.mark.parametrize(("rate", "fewer"), [(0.5, 2), (200.0, None)])
@pytest.mark.slow
def test_one_step_fewer_does_not_hold_the_load(rate, fewer):
    job = serving_job("llama-3-70b", "fp8", rate=rate)
    chips = fewest(job)
    assert searched(job, chips=chips, limits=LIMITS).best.meets
    before = chips // 2 if chips <= 8 else chips - 8
    assert fewer is None or before <= fewer
    with pytest.raises(InputError):
        searched(job, chips=before, limits=LIMITS)


def test_what_cannot_be_sized_is_refused():
    with pytest.raises(InputError, match="follows from the load"):
        fewest(serving_job())
    with pytest.raises(InputError, match="16 chips"):
        fewest(serving_job("llama-3-70b", "fp8", rate=1000.0), most_chips=16)
