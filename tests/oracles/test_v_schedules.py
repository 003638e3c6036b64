"""Schedules in a V: their simulated orders against longest paths, published bubbles and counts of passes."""

from itertools import pairwise, takewhile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.cost.memory.chip import live_layers, live_table, three_live_layers
from perfmodel.cost.pipeline import Pipeline, StageTimes
from perfmodel.cost.schedules import SCHEDULES, STEADY_MULTIPLE
from perfmodel.parallel.choices import PipelineSchedule
from perfmodel.parallel.layout import Placement, stages_of_ranks
from perfmodel.parallel.pass_orders import BACKWARD, FORWARD, INPUT_GRADIENT, PAIRED_BACKWARD, WEIGHT_GRADIENT, in_flight
from tests.oracles.simulated_pipeline import layers_held, simulate

ZBV, DUALPIPEV = PipelineSchedule.ZBV, PipelineSchedule.DUALPIPEV
CASES = [(ZBV, p, m) for p in (2, 3, 4, 8) for m in (1, p, 2 * p - 1, 2 * p, 5 * p + 1)] + [
    (DUALPIPEV, p, m) for p in (2, 3, 4, 8) for m in (2 * p, 2 * p + 1, 5 * p)
]


def longest_path(schedule, p, m, forward, inputs, weights, hop=0.0):
    """The latest end of a pass, by relaxing the starts of all passes until none moves: lists of each virtual stage in model order."""
    length = {FORWARD: forward, INPUT_GRADIENT: inputs, WEIGHT_GRADIENT: weights}
    length[BACKWARD] = length[PAIRED_BACKWARD] = [a + b for a, b in zip(inputs, weights, strict=True)]
    passes, edges, sends, last = [], [], {}, 2 * p - 1
    for rank in range(p):
        turn = (rank, last - rank)
        mine = [(kind, turn[chunk], index) for kind, chunk, index in SCHEDULES[schedule].order(rank, p, m, 2)]
        edges += [(before, after, 0.0) for before, after in pairwise(mine)]
        passes += mine
        # what a pair sends leaves at its end
        sends |= {one: one for one in mine} | {one: after for one, after in pairwise(mine) if after[0] == PAIRED_BACKWARD}
    backward = {(stage, index): kind for kind, stage, index in passes if kind not in (FORWARD, WEIGHT_GRADIENT)}
    for kind, stage, index in passes:
        if kind == FORWARD and stage:
            edges.append((sends[FORWARD, stage - 1, index], (kind, stage, index), hop if stage != p else 0.0))
        if kind == WEIGHT_GRADIENT:
            edges.append(((INPUT_GRADIENT, stage, index), (kind, stage, index), 0.0))
        if kind not in (FORWARD, WEIGHT_GRADIENT):
            edges.append(((FORWARD, stage, index), (kind, stage, index), 0.0))
            if stage < last:
                edges.append(((backward[stage + 1, index], stage + 1, index), (kind, stage, index), hop if stage != p - 1 else 0.0))
    start = dict.fromkeys(passes, 0.0)
    moved = True
    while moved:
        moved = False
        for before, after, sent in edges:
            begin = start[before] + length[before[0]][before[1]] + sent
            if begin > start[after]:
                start[after], moved = begin, True
    return max(begin + length[kind][stage] for (kind, stage, _), begin in start.items())


def predicted(schedule, p, m, forward, inputs, weights):
    backward = [a + b for a, b in zip(inputs, weights, strict=True)]
    both = np.array(forward) + np.array(backward)
    slowest = float((both[:p] + both[: p - 1 : -1]).max())
    times = StageTimes(
        total_forward=sum(forward),
        total_backward=sum(backward),
        slowest_forward=0.0,
        slowest_backward=0.0,
        slowest=slowest,
        by_stage=tuple(zip(forward, backward, weights, strict=True)),
    )
    return float(SCHEDULES[schedule].time(times, pipeline(schedule, p, m)))


def pipeline(schedule, p, m):
    return Pipeline(schedule=schedule, num_ranks=float(p), num_microbatches=float(m), virtual_stages=2.0)


@pytest.mark.parametrize("schedule, p, m", [case for case in CASES if case[1] <= 4])
def test_the_time_is_the_longest_path(schedule, p, m):
    rng = np.random.default_rng(0)
    times = [rng.uniform(0.5, 1.5, 2 * p).tolist() for _ in range(3)]
    within = 1e-12 if m <= STEADY_MULTIPLE * p else 0.01
    assert predicted(schedule, p, m, *times) == pytest.approx(longest_path(schedule, p, m, *times), rel=within)


@pytest.mark.parametrize("schedule, p", [(ZBV, 2), (ZBV, 4), (DUALPIPEV, 2), (DUALPIPEV, 4)])
def test_sends_between_ranks_are_the_delay_of_the_longest_path(schedule, p):
    """No send joins the two stages in the middle of the model, which are on one rank."""
    even = [[1.0] * (2 * p)] * 3
    for m, hop in ((2 * p, 0.3), (3 * p, 0.01), (3 * p, 2.0), (7 * p, 0.01), (7 * p, 2.0), (7 * p, 6.0)):
        delay = longest_path(schedule, p, m, *even, hop) - longest_path(schedule, p, m, *even)
        assert SCHEDULES[schedule].send_delay(hop, 3.0, pipeline(schedule, p, m)) == pytest.approx(delay, rel=1e-9)


@pytest.mark.parametrize("p", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("multiple", [2, 3, 8])
def test_short_sends_of_zbv(p, multiple):
    """5 p - 7 of them are exposed, whatever the number of micro-batches."""
    assert SCHEDULES[ZBV].send_delay(0.01, 3.0, pipeline(ZBV, p, multiple * p)) == pytest.approx(0.01 * (5 * p - 7))


@pytest.mark.parametrize("p", [2, 4, 8])
@pytest.mark.parametrize("multiple", [2, 3, 6])
@pytest.mark.parametrize("forward, inputs, weights", [(1.0, 1.0, 1.0), (1.0, 1.0, 0.8), (1.0, 1.1, 0.9), (1.0, 1.1, 0.7), (1.0, 1.2, 0.8)])
def test_the_end_of_zbv(p, multiple, forward, inputs, weights):
    """m (F + I + W) of both chunks, and (p - 1) max(F, I, 2 (I - W), 2 (F - W)) of one: no bubble but a fill, if all are equal."""
    m, stages = multiple * p, 2 * p
    end = 2 * m * (forward + inputs + weights) + (p - 1) * max(forward, inputs, 2 * (inputs - weights), 2 * (forward - weights))
    time = predicted(ZBV, p, m, [forward] * stages, [inputs] * stages, [weights] * stages)
    assert time == pytest.approx(end, rel=0.007)
    if forward == inputs:
        assert time == pytest.approx(end, rel=1e-12)


@pytest.mark.parametrize("p", [2, 4, 8])
@pytest.mark.parametrize("multiple", [2, 3, 6])
@pytest.mark.parametrize("forward, inputs, weights", [(1.0, 1.0, 1.0), (1.0, 1.0, 0.7), (1.0, 1.1, 0.9), (1.0, 1.05, 0.5)])
def test_the_end_of_dualpipev(p, multiple, forward, inputs, weights):
    """2 m (F + B) + (p - 1) (2 F + 2 B - 3 W - I), with chunk times and pairs that take as long as their passes; exact for W <= I <= 1.1 F.

    Source: DeepSeek-V3, table 2, with the term F - I of its code's order.
    """
    m, stages, backward = multiple * p, 2 * p, inputs + weights
    end = 2 * m * (forward + backward) + (p - 1) * (2 * (forward + backward) - 3 * weights - inputs)
    time = predicted(DUALPIPEV, p, m, [forward] * stages, [inputs] * stages, [weights] * stages)
    assert time == pytest.approx(end, rel=1e-12)


@pytest.mark.parametrize("times, zbv, dualpipev", [((1.0, 1.0, 1.0), 51.0, 54.0), ((1.0, 1.1, 0.7), 48.1, 52.0)])
def test_ends_of_four_ranks_and_eight_microbatches(times, zbv, dualpipev):
    """Simulated from torch's own orders."""
    stages = [[time] * 8 for time in times]
    assert predicted(ZBV, 4, 8, *stages) == pytest.approx(zbv)
    assert predicted(DUALPIPEV, 4, 8, *stages) == pytest.approx(dualpipev)


@pytest.mark.parametrize("schedule, p, m", CASES)
def test_chunks_in_flight(schedule, p, m):
    """2 p on every rank with ZBV and 2 p + 1 with DualPipeV, for enough micro-batches."""
    orders = [SCHEDULES[schedule].order(rank, p, m, 2) for rank in range(p)]
    held = simulate(orders, dict.fromkeys("FBIW", [1.0] * (2 * p)), placement=Placement.V).held
    for rank in range(p):
        assert live_layers(schedule=schedule, chunks=(1, 1), rank=rank, num_ranks=p, num_microbatches=m).most == held[rank]
        if m >= 2 * p + 1:
            assert held[rank] == (2 * p if schedule is ZBV else 2 * p + 1)


@pytest.mark.parametrize("schedule, p, m", CASES)
def test_every_microbatch_runs_forward_and_backward_once(schedule, p, m):
    for rank in range(p):
        order = SCHEDULES[schedule].order(rank, p, m, 2)
        done = {(chunk, index) for chunk in range(2) for index in range(m)}
        assert sorted((chunk, index) for kind, chunk, index in order if kind == FORWARD) == sorted(done)
        for part in (INPUT_GRADIENT, WEIGHT_GRADIENT):
            ran = [(chunk, index) for kind, chunk, index in order if kind in (BACKWARD, PAIRED_BACKWARD, part)]
            assert sorted(ran) == sorted(done)


@pytest.mark.parametrize("schedule, p, m", CASES)
def test_microbatches_of_the_first_virtual_stage_as_backward_begins(schedule, p, m):
    before_backward = takewhile(lambda of: of[0] == FORWARD, SCHEDULES[schedule].order(0, p, m, 2))
    assert float(SCHEDULES[schedule].begun(0.0, pipeline(schedule, p, m))) == sum(chunk == 0 for _, chunk, _ in before_backward)


@st.composite
def uneven(draw):
    schedule = draw(st.sampled_from([ZBV, DUALPIPEV]))
    p = draw(st.integers(2, 6))
    m = draw(st.integers(1 if schedule is ZBV else 2 * p, 4 * p))
    return schedule, p, m, tuple(draw(st.lists(st.integers(0, 5), min_size=2 * p, max_size=2 * p)))


@given(uneven())
@settings(max_examples=100, deadline=None)
def test_live_layers_of_uneven_stages(case):
    schedule, p, m, layers = case
    by_rank = []
    for rank, stages in enumerate(stages_of_ranks(p, 2 * p, Placement.V)):
        chunks = [layers[stage] for stage in stages]
        held = layers_held(SCHEDULES[schedule].order(rank, p, m, 2), chunks)
        live = live_layers(schedule=schedule, chunks=chunks, rank=rank, num_ranks=p, num_microbatches=m)
        by_rank.append(live)
        assert live.most == max(alive for alive, _, _ in held)
        assert live.fewer_at_last == live.most - max(alive for alive, _, chunk in held if chunk == 1)
        assert live.fewer_at_first == live.most - max(alive - chunks[0] for alive, _, chunk in held if chunk == 0)
    first, middle, last = three_live_layers(live_table(schedule, layers, p), schedule=schedule, num_ranks=p, num_microbatches=m)
    assert (first, last) == (by_rank[0], by_rank[-1])
    assert middle.most == max((live.most for live in by_rank[1:-1]), default=0)


@pytest.mark.parametrize("schedule", [PipelineSchedule.INTERLEAVED, PipelineSchedule.ZERO_BUBBLE])
@pytest.mark.parametrize("p, v, groups", [(2, 2, 1), (4, 3, 2), (3, 2, 3)])
def test_counts_of_an_order_are_those_of_the_closed_form(schedule, p, v, groups):
    for rank in range(p):
        chunks = (3, 1, 2)[:v]
        by_order = in_flight(SCHEDULES[schedule].order(rank, p, groups * p, v), chunks)
        assert by_order == pytest.approx(SCHEDULES[schedule].live_rows(chunks, rank, p)[groups - 1], abs=1e-12)
