"""Waits for weights that torch's pipelines gather again, by a simulation of each pass of a rank."""

import numpy as np
import pytest

import perfmodel
from perfmodel.cost.repeated_gathers import _delay, _delay_of_step, _repeated_gathers
from perfmodel.cost.schedules import SCHEDULES
from perfmodel.frameworks.profile import load_profile
from perfmodel.parallel.choices import PipelineSchedule
from perfmodel.parallel.pass_orders import FORWARD, MOST_GATHERED, WEIGHT_GRADIENT

FORWARD_TIME, BACKWARD_TIME, WEIGHTS_TIME, FIRST, LAST = 1.0, 2.2, 0.9, 0.3, 0.4


def waited(order, num_chunks, gather):
    """Time that a rank waits for gathers which are not the first of their virtual stage."""
    lengths = {FORWARD: FORWARD_TIME, "B": BACKWARD_TIME, "I": BACKWARD_TIME - WEIGHTS_TIME, WEIGHT_GRADIENT: WEIGHTS_TIME}
    now = link = total = 0.0
    ready, known = {}, set()
    for at, (kind, chunk, _) in enumerate(order):
        coming = list(dict.fromkeys(chunk for _, chunk, _ in order[at:]))[:MOST_GATHERED]
        ready = {other: time for other, time in ready.items() if other in coming}
        for other in coming:
            if other not in ready and other in known:
                link = max(link, now) + gather + {0: FIRST, num_chunks - 1: LAST}.get(other, 0.0)
                ready[other] = link
            elif other not in ready:
                ready[other] = now
                known.add(other)
        total += max(ready[chunk] - now, 0.0)
        now = max(now, ready[chunk]) + lengths[kind]
    return total


@pytest.mark.parametrize("schedule", [PipelineSchedule.INTERLEAVED, PipelineSchedule.ZERO_BUBBLE])
@pytest.mark.parametrize("num_ranks, num_groups", [(2, 1), (2, 5), (4, 3), (4, 6)])
@pytest.mark.parametrize("num_chunks", [4, 7])
@pytest.mark.parametrize("gather", [0.05, 1.0, 4.0, 20.0])
def test_the_time_of_repeated_gathers_is_that_of_a_simulation(schedule, num_ranks, num_groups, num_chunks, gather):
    profile = load_profile("torchtitan").having(prefetches_parameters=True, compute_slowdown_under_communication=0.0)
    times = [np.array([time]) for time in (FORWARD_TIME, BACKWARD_TIME, WEIGHTS_TIME, gather, FIRST, LAST)]
    number = num_ranks * num_groups
    few = min(number, 3 * num_ranks)
    for rank in range(num_ranks):
        order = SCHEDULES[schedule].order(rank, num_ranks, number, num_chunks)
        which = schedule, rank, num_ranks, few, num_chunks
        (delay,) = _delay_of_step(which, times, np.array([(number - few) / num_ranks]), profile)
        assert delay == pytest.approx(waited(order, num_chunks, gather), rel=1e-12, abs=1e-12)


def test_weights_are_gathered_again_only_with_more_virtual_stages_than_torch_holds():
    for chunks in (2, 3, 4):
        delay, total = _delay(_repeated_gathers(PipelineSchedule.INTERLEAVED, 0, 4, 8, chunks), [np.ones(1)] * 6)
        assert (total > 0) == (chunks > MOST_GATHERED)
        assert delay <= total


def test_more_virtual_stages_need_less_memory_but_wait_for_gathers():
    job = dict(model="llama-3-8b", cluster="dgx-a100", chips=16, global_batch=32, seq_len=512, pp=2, zero=3, schedule="interleaved")
    few, many = (perfmodel.predict(**job, profile="torchtitan", virtual_stages=v) for v in (2, 8))
    assert many.parts["parameter_gather"] > 1.1 * few.parts["parameter_gather"]
    assert many.memory["gathered_parameters"] < 0.5 * few.memory["gathered_parameters"]
