"""The closed forms of pipelines against an event simulation of their schedule tables."""

from itertools import takewhile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.cost.memory.chip import live_layers, live_table, three_live_layers
from perfmodel.cost.pipeline import Pipeline, StageTimes
from perfmodel.cost.schedules import SCHEDULES
from perfmodel.parallel.choices import PipelineSchedule
from perfmodel.parallel.layout import even_stage_layers
from perfmodel.parallel.pass_orders import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT
from tests.oracles.simulated_pipeline import layers_held, simulate

GPIPE, ONE_F_ONE_B, INTERLEAVED, ZERO_BUBBLE, ZBV, DUALPIPEV = PipelineSchedule
#: Share of the backward pass that is gradients of weights.
WEIGHTS = 0.4


def run(schedule, p, m, v, forward, backward, hop=0.0):
    """forward, backward: of each virtual stage in model order."""
    lengths = {FORWARD: forward, BACKWARD: backward}
    lengths |= {WEIGHT_GRADIENT: [WEIGHTS * b for b in backward], INPUT_GRADIENT: [(1.0 - WEIGHTS) * b for b in backward]}
    return simulate([SCHEDULES[schedule].order(rank, p, m, v) for rank in range(p)], lengths, hop=hop)


def closed_form(schedule, p, m, v, forward, backward, *, unequal=False):
    """The formula on ranks: a rank's time is that of all its virtual stages. unequal: their layers are; an end's own work is none."""
    f, b = (np.array(x).reshape(v, p).sum(axis=0) for x in (forward, backward))
    longest = float((np.array(forward) + np.array(backward)).max())
    times = StageTimes(
        total_forward=float(f.sum()),
        total_backward=float(b.sum()),
        slowest_forward=float(f.max()),
        slowest_backward=float(b.max()),
        slowest=float((f + b).max()),
        unequal=longest - float((f + b).max()) / v if unequal else 0.0,
        total_weights=WEIGHTS * float(b.sum()),
        slowest_weights=WEIGHTS * float(b.max()),
    )
    return SCHEDULES[schedule].time(times, pipeline(schedule, p, m, v))


def pipeline(schedule, p, m, v):
    return Pipeline(schedule=schedule, num_ranks=float(p), num_microbatches=float(m), virtual_stages=float(v))


CASES = [(s, p, m, 1) for s in (GPIPE, ONE_F_ONE_B) for p in (1, 2, 3, 4, 8) for m in (1, 2, 3, 4, 7, 16, 33)] + [
    (s, p, k * p, v)
    for s in (INTERLEAVED, ZERO_BUBBLE)
    for p in (2, 3, 4, 8)
    for k in (1, 2, 3, 8)
    for v in ((1, 2, 3) if s is ZERO_BUBBLE else (2, 3, 4, 6))
]
#: Rounds of more micro-batches than ranks; with one virtual stage any number.
CASES += [(ZERO_BUBBLE, 4, m, v) for v in (1, 2, 3) for m in (5, 7, 10, 15)]
CASES += [(ZERO_BUBBLE, p, m, 1) for p, m in ((2, 7), (4, 9), (4, 13), (8, 1), (8, 3), (8, 29))]
#: Fewer micro-batches than ranks, with several virtual stages.
FEW = [(ZERO_BUBBLE, p, m, v) for p in (3, 4, 8) for v in (2, 3) for m in range(1, p)]


@pytest.mark.parametrize("schedule, p, m, v", CASES)
@pytest.mark.parametrize("forward, backward", [(1.0, 2.0), (0.3, 0.3), (0.125, 0.4)])
def test_even_stages_exactly(schedule, p, m, v, forward, backward):
    if schedule is ZERO_BUBBLE:  # exact where postponed passes are no longer than a forward pass
        forward = max(forward, WEIGHTS * backward)
    stages = p * v
    simulated = run(schedule, p, m, v, [forward] * stages, [backward] * stages).time
    assert closed_form(schedule, p, m, v, [forward] * stages, [backward] * stages) == pytest.approx(simulated, rel=1e-12)


@pytest.mark.parametrize("schedule, p, m, v", FEW)
def test_even_stages_with_few_microbatches(schedule, p, m, v):
    stages = [0.9] * (p * v), [2.0] * (p * v)
    assert closed_form(schedule, p, m, v, *stages) == pytest.approx(run(schedule, p, m, v, *stages).time, rel=0.01)


@pytest.mark.parametrize("v", [5, 7, 8, 9, 10, 11])
def test_unequal_virtual_stages_of_equal_ranks_exactly(v):
    """96 layers on 8 ranks of 12, one group of microbatches: what is cut finer than the longest virtual stage gains nothing."""
    layers = even_stage_layers(96, 8 * v)
    forward, backward = [1.0 * n for n in layers], [2.0 * n for n in layers]
    assert closed_form(INTERLEAVED, 8, 8, v, forward, backward, unequal=True) == pytest.approx(
        run(INTERLEAVED, 8, 8, v, forward, backward).time
    )


@pytest.mark.parametrize("num_layers, p, m", [(126, 16, 16), (126, 16, 64), (126, 8, 8), (126, 8, 32), (96, 8, 32)])
def test_unequal_virtual_stages_never_seem_to_beat_fewer_equal_ones(num_layers, p, m):
    """In the simulation unequal virtual stages do not gain over fewer that are as long; the closed form keeps that order."""
    times = {}
    for v in range(2, num_layers // p + 1):
        layers = even_stage_layers(num_layers, p * v)
        forward, backward = [1.0 * n for n in layers], [2.0 * n for n in layers]
        formula = closed_form(INTERLEAVED, p, m, v, forward, backward, unequal=True)
        simulated = run(INTERLEAVED, p, m, v, forward, backward).time
        times.setdefault(max(layers), []).append((formula, simulated))
        assert 0.94 * simulated < formula < 1.05 * simulated
    for (best, best_simulated), *others in times.values():
        assert all(formula >= best * (1 - 1e-9) and simulated >= best_simulated for formula, simulated in others)


@pytest.mark.parametrize("schedule, p, m, v", CASES + FEW)
def test_live_microbatches_of_every_rank(schedule, p, m, v):
    held = run(schedule, p, m, v, [1.0] * (p * v), [2.0] * (p * v)).held
    for rank in range(p):
        live = live_layers(schedule=schedule, chunks=(1,) * v, rank=rank, num_ranks=p, num_microbatches=m)
        assert live.most == held[rank], rank


@pytest.mark.parametrize("schedule, p, m, v", CASES + FEW)
def test_microbatches_of_the_first_virtual_stage_as_backward_begins(schedule, p, m, v):
    before_backward = takewhile(lambda of: of[0] == FORWARD, SCHEDULES[schedule].order(0, p, m, v))
    assert float(SCHEDULES[schedule].begun(0.0, pipeline(schedule, p, m, v))) == sum(chunk == 0 for _, chunk, _ in before_backward)


@st.composite
def uneven_pipelines(draw):
    schedule = draw(st.sampled_from([GPIPE, ONE_F_ONE_B, INTERLEAVED, ZERO_BUBBLE]))
    p = draw(st.integers(1, 7))
    v = draw(st.integers(1, 5)) if schedule.takes_chunks else 1
    m = draw(st.sampled_from([m for m in range(1, max(20, 6 * p) + 1) if schedule.admits(m, p, v)]))
    layers = st.lists(st.integers(0, 5), min_size=p * v, max_size=p * v)
    return schedule, p, v, m, tuple(draw(layers))


@given(uneven_pipelines())
@settings(max_examples=300)
def test_live_layers_of_uneven_stages(pipeline):
    """Each chunk's passes count with its own layers, at every moment of the schedule's table."""
    schedule, p, v, m, layers = pipeline
    by_rank = []
    for rank in range(p):
        chunks = layers[rank::p]
        order = SCHEDULES[schedule].order(rank, p, m, v)
        turns = layers_held(order, chunks)
        before_backward = sum(chunks[chunk] for _, chunk, _ in takewhile(lambda of: of[0] == FORWARD, order))
        held = [(alive, ran) for alive, ran, _ in turns]
        live = live_layers(schedule=schedule, chunks=chunks, rank=rank, num_ranks=p, num_microbatches=m)
        by_rank.append(live)
        most = max(alive for alive, _ in held)
        last = max(i for i, (alive, _) in enumerate(held) if alive == most)
        assert (live.at_first, live.most) == (before_backward, most)
        if sum(chunks):
            assert live.present == pytest.approx(sum(chunks[i] for i in held[last][1]) / sum(chunks))
        at_head = max(alive for alive, _, chunk in turns if chunk == v - 1)
        at_embedding = max(alive - chunks[0] for alive, _, chunk in turns if chunk == 0)
        assert (live.fewer_at_last, live.fewer_at_first) == (most - at_head, most - at_embedding)
        all_ran = [alive for alive, ran in held[last:] if len(ran) == v]
        if all_ran and sum(chunks):
            assert (live.fewer, live.ended) == (most - max(all_ran), float(len(held[last][1]) < v))
    first, middle, last = three_live_layers(live_table(schedule, layers, p), schedule=schedule, num_ranks=p, num_microbatches=m)
    assert (first, last) == (by_rank[0], by_rank[-1])
    assert middle.most == max((live.most for live in by_rank[1:-1]), default=0)


@pytest.mark.parametrize("p, v", [(2, 2), (4, 2), (4, 6), (8, 3)])
def test_first_stage_of_an_interleaved_pipeline(p, v):
    """Korthikanti et al. 2022, section 4.2.3: the first stage holds 1 + (p - 1)/(p v) times p microbatches."""
    live = live_layers(schedule=INTERLEAVED, chunks=(1,) * v, rank=0, num_ranks=p, num_microbatches=8 * p).most / v
    assert live == pytest.approx(p * (1 + (p - 1) / (p * v)), rel=1e-12)


stage_times = st.floats(0.5, 2.0)


@st.composite
def uneven(draw):
    p = draw(st.integers(2, 6))
    times = st.lists(stage_times, min_size=p, max_size=p)
    return p, draw(st.integers(1, 12)), draw(times), draw(times)


@given(uneven())
@settings(max_examples=100)
def test_gpipe_of_uneven_stages_exactly(stages):
    p, m, forward, backward = stages
    assert closed_form(GPIPE, p, m, 1, forward, backward) == pytest.approx(run(GPIPE, p, m, 1, forward, backward).time, rel=1e-12)


@given(uneven())
@settings(max_examples=200)
def test_1f1b_of_uneven_stages_is_an_upper_bound(stages):
    """A slow stage before others hides part of their passes while it warms up. Never by more than those passes: the work of the slowest
    stage and the way there and back are a lower bound."""
    p, m, forward, backward = stages
    simulated = run(ONE_F_ONE_B, p, m, 1, forward, backward).time
    both = [f + b for f, b in zip(forward, backward, strict=True)]
    at_least = max(sum(both[:i]) + m * both[i] for i in range(p))
    assert at_least * (1 - 1e-12) <= simulated <= closed_form(ONE_F_ONE_B, p, m, 1, forward, backward) * (1 + 1e-12)


@given(uneven(), st.integers(1, 4))
@settings(max_examples=200)
def test_zero_bubble_of_uneven_stages(stages, groups):
    """Stages that differ by a factor of up to four, and gradients of weights that take longer than a forward pass: 20 % at most."""
    p, _, forward, backward = stages
    m = groups * p
    simulated = run(ZERO_BUBBLE, p, m, 1, forward, backward).time
    assert 0.8 * simulated < closed_form(ZERO_BUBBLE, p, m, 1, forward, backward) < 1.2 * simulated


@pytest.mark.parametrize("p, m", [(2, 4), (4, 8), (8, 64)])
def test_zero_bubble_with_a_head_of_a_fifth_of_a_stage(p, m):
    forward, backward = [1.0] * (p - 1) + [1.2], [1.8] * (p - 1) + [2.16]
    simulated = run(ZERO_BUBBLE, p, m, 1, forward, backward).time
    assert closed_form(ZERO_BUBBLE, p, m, 1, forward, backward) == pytest.approx(simulated, rel=0.01)


@given(uneven())
@settings(max_examples=100)
def test_1f1b_exactly_where_the_last_stage_is_the_slowest(stages):
    """The usual case: the last stage has the head."""
    p, m, forward, backward = stages
    forward[-1], backward[-1] = max(forward), max(backward)
    assert closed_form(ONE_F_ONE_B, p, m, 1, forward, backward) == pytest.approx(
        run(ONE_F_ONE_B, p, m, 1, forward, backward).time, rel=1e-12
    )


@pytest.mark.parametrize("p, m, v", [(4, 8, 2), (4, 32, 3), (8, 64, 2)])
@pytest.mark.parametrize("more", [1.1, 1.25, 1.5])
def test_a_head_on_the_last_virtual_stage(p, m, v, more):
    """Interleaved, the head is on one virtual stage of the last rank, where the form spreads it over all of them: 3 % at most."""
    forward, backward = [1.0 / v] * (p * v), [2.0 / v] * (p * v)
    forward[-1] *= more
    backward[-1] *= more
    simulated = run(INTERLEAVED, p, m, v, forward, backward).time
    assert closed_form(INTERLEAVED, p, m, v, forward, backward) == pytest.approx(simulated, rel=0.03)


# --- sends ----------------------------------------------------------------------------------------------------------


def delay(schedule, p, m, v, hop, forward=1.0, backward=2.0):
    """(by simulation, by the closed form) what hops add to a pipeline of even stages."""
    f, b = [forward / v] * (p * v), [backward / v] * (p * v)
    simulated = run(schedule, p, m, v, f, b, hop).time - run(schedule, p, m, v, f, b).time
    chunk = (forward + backward) / v
    return simulated, SCHEDULES[schedule].send_delay(hop, chunk, pipeline(schedule, p, m, v))


@pytest.mark.parametrize("schedule, p, m, v", CASES)
def test_short_hops_exactly(schedule, p, m, v):
    simulated, formula = delay(schedule, p, m, v, hop=0.01)
    assert formula == pytest.approx(simulated, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("p, m", [(2, 7), (4, 16), (4, 33), (8, 64)])
@pytest.mark.parametrize("hop", [0.3, 1.0, 4.0])
def test_hops_of_any_length_under_1f1b(p, m, hop):
    simulated, formula = delay(ONE_F_ONE_B, p, m, 1, hop)
    assert formula == pytest.approx(simulated, rel=1e-9)


@pytest.mark.parametrize("p, m, v", [(2, 8, 1), (4, 16, 1), (8, 32, 1), (4, 16, 2), (8, 64, 2)])
@pytest.mark.parametrize("hop", [0.3, 1.0, 5.0])
def test_long_hops_under_zero_bubble_nearly(p, m, v, hop):
    f, b = [1.0 / v] * (p * v), [2.0 / v] * (p * v)
    simulated, formula = delay(ZERO_BUBBLE, p, m, v, hop)
    assert abs(formula - simulated) <= 0.05 * run(ZERO_BUBBLE, p, m, v, f, b, hop).time


@pytest.mark.parametrize("p, m, v", [(4, 32, 2), (8, 32, 2), (8, 128, 4)])
@pytest.mark.parametrize("hop", [1.0, 2.0, 5.0])
def test_long_hops_under_interleaving_nearly(p, m, v, hop):
    """Where a hop takes longer than the compute of a virtual stage, the form is their pace: within 15 % of the whole step."""
    f, b = [1.0 / v] * (p * v), [2.0 / v] * (p * v)
    simulated, formula = delay(INTERLEAVED, p, m, v, hop)
    assert abs(formula - simulated) <= 0.15 * run(INTERLEAVED, p, m, v, f, b, hop).time
