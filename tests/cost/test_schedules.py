"""Figures of pipelines by hand; the schedules themselves are simulated in tests/oracles."""

import numpy as np
import pytest

from perfmodel.cost.pipeline import Pipeline, StageTimes
from perfmodel.cost.schedules import SCHEDULES
from perfmodel.parallel.choices import PipelineSchedule

GPIPE, ONE_F_ONE_B, INTERLEAVED, ZERO_BUBBLE, ZBV, DUALPIPEV = PipelineSchedule
schedules = pytest.mark.parametrize("schedule", PipelineSchedule)


def even(schedule, *, p, m, v=1.0, forward=1.0, backward=2.0):
    times = StageTimes(
        total_forward=p * forward,
        total_backward=p * backward,
        slowest_forward=forward,
        slowest_backward=backward,
        slowest=forward + backward,
        by_stage=((forward / v, backward / v, backward / v / 3.0),) * 16,
    )
    return SCHEDULES[schedule].time(times, Pipeline(schedule=schedule, num_ranks=p, num_microbatches=m, virtual_stages=v))


def live(schedule, rank, *, p, m, v=1.0):
    return SCHEDULES[schedule].begun(rank, Pipeline(schedule=schedule, num_ranks=p, num_microbatches=m, virtual_stages=v))


@pytest.mark.parametrize("p, m", [(1, 1), (4, 8), (8, 512)])
def test_bubble_of_narayanan(p, m):
    """SC21, section 2.2: the bubble is (p - 1)/m of the ideal time, and 1/v of that interleaved."""
    ideal = m * 3.0
    assert even(ONE_F_ONE_B, p=p, m=m) == pytest.approx(ideal * (1 + (p - 1) / m), rel=1e-14)
    assert even(GPIPE, p=p, m=m) == pytest.approx(ideal * (1 + (p - 1) / m), rel=1e-14)
    for v in (2.0, 4.0):
        assert even(INTERLEAVED, p=p, m=m, v=v) == pytest.approx(ideal * (1 + (p - 1) / (m * v)), rel=1e-14)


@schedules
def test_one_rank_has_no_bubble(schedule):
    assert even(schedule, p=1, m=7, v=float(schedule.num_chunks or 1)) == 21.0


def test_memory_of_schedules():
    """gpipe keeps every microbatch; 1f1b p on the first rank and one on the last."""
    assert [float(live(s, rank, p=4.0, m=16.0)) for s in (GPIPE, ONE_F_ONE_B) for rank in (0.0, 3.0)] == [16, 16, 4, 1]
    assert live(ONE_F_ONE_B, 0.0, p=4.0, m=2.0) == 2


@schedules
def test_arrays_give_what_floats_give(schedule):
    p, m, v = np.array([2.0, 4.0, 8.0])[:, None], np.array([8.0, 16.0, 64.0]), np.array([2.0])
    time = even(schedule, p=p, m=m, v=v)
    in_flight = live(schedule, 0.0, p=p, m=m, v=v)
    delay = SCHEDULES[schedule].send_delay(0.1, 3.0, Pipeline(schedule=schedule, num_ranks=p, num_microbatches=m, virtual_stages=v))
    for i in range(3):
        for j in range(3):
            at = {"p": float(p[i, 0]), "m": float(m[j])}
            assert time[i, j] == even(schedule, **at, v=2.0)
            knobs = {"num_ranks": at["p"], "num_microbatches": at["m"], "virtual_stages": 2.0}
            assert in_flight[i, j] == live(schedule, 0.0, **at, v=2.0)
            assert delay[i, j] == SCHEDULES[schedule].send_delay(0.1, 3.0, Pipeline(schedule=schedule, **knobs))


@schedules
def test_no_hop_no_delay(schedule):
    pipeline = Pipeline(schedule=schedule, num_ranks=8.0, num_microbatches=32.0, virtual_stages=2.0)
    assert SCHEDULES[schedule].send_delay(0.0, 1.0, pipeline) == 0.0
