"""A served load from times of steps: by hand where a toy's times allow it, and in its limits."""

from dataclasses import replace

import numpy as np
import pytest

from perfmodel.cost.serving.load import closed_loop, lockstep_share, maximum_load, open_loop, static_batch
from perfmodel.cost.serving.requests import Requests, Scheduling
from perfmodel.cost.serving.simulated_engine import BatchLimits
from perfmodel.cost.serving.times import SpeculativeTimes, expected_tokens
from perfmodel.foundation.errors import InputError
from perfmodel.frameworks.engine import load_engine
from perfmodel.workload.serving import Lengths, Speculation, constant
from tests.cost.serving.toys import ToySteps, requests, simulate

TOY = ToySteps()
CHUNKED = Scheduling(step_tokens=2048.0)
PREFILL_FIRST = Scheduling(chunked=False, step_tokens=1500.0)
HOW = pytest.mark.parametrize("how", [CHUNKED, PREFILL_FIRST], ids=["chunked", "prefill first"])


@HOW
def test_one_client_never_waits(how):
    load = closed_loop(TOY, requests(1000, 200), how, concurrency=1, capacity=50)
    steps = sum(TOY.decode(1, 1000 + j) for j in range(1, 200))
    assert load.ttft == pytest.approx(TOY.prefill(1000))
    assert load.request_latency == pytest.approx(TOY.prefill(1000) + steps)
    assert load.inter_token_p99 == pytest.approx(TOY.decode(1, 1100))
    assert load.tokens_per_second == pytest.approx(200 / load.request_latency)


def test_a_cycle_of_prefill_first_is_all_prompts_and_all_decode_steps():
    load = closed_loop(TOY, requests(1000, 200), PREFILL_FIRST, concurrency=16, capacity=50)
    assert load.request_latency == pytest.approx(16 * TOY.prefill(1000) + sum(TOY.decode(16, 1000 + j) for j in range(1, 200)))


def test_a_cycle_of_chunked_prefill_is_its_mixed_steps_and_the_rest():
    load = closed_loop(TOY, requests(1000, 200), CHUNKED, concurrency=16, capacity=50)
    assert load.request_latency == pytest.approx(16 * TOY.mixed(15, 1100, 1000) + (200 - 16) * TOY.decode(16, 1100))
    assert load.ttft == pytest.approx(TOY.mixed(15, 1100, 1000))


@HOW
def test_latency_does_not_depend_on_lockstep_but_its_parts_do(how):
    from dataclasses import replace

    lockstep = np.linspace(0, 1, 5)
    load = closed_loop(TOY, requests(), replace(how, lockstep=lockstep), concurrency=32, capacity=40)
    np.testing.assert_allclose(load.request_latency, load.request_latency[0], rtol=1e-12)
    np.testing.assert_allclose(load.ttft + 199 * load.tpot, load.request_latency, rtol=1e-12)
    assert np.all(np.diff(load.ttft) > 0)
    assert np.all(np.diff(load.tpot) < 0)


@HOW
def test_littles_law_holds_in_and_over_capacity(how):
    clients = np.array([1.0, 7, 64, 65, 200, 1000])
    load = closed_loop(TOY, requests(), how, concurrency=clients, capacity=64)
    np.testing.assert_allclose(load.requests_per_second * load.request_latency, clients)
    np.testing.assert_allclose(load.running + load.queue, clients)
    assert list(load.is_saturated) == [False, False, False, True, True, True]
    assert np.ptp(load.tpot[2:]) == pytest.approx(0, abs=1e-15)  # queued requests do not slow running ones
    assert np.all(load.tokens_per_second <= clients * 200 / (load.request_latency - load.ttft) * (1 + 1e-12))


@HOW
def test_more_clients_and_a_longer_cache_are_never_faster(how):
    load = closed_loop(TOY, requests(), how, concurrency=np.geomspace(1, 1500, 200), capacity=4000)
    assert np.all(np.diff(load.request_latency) >= -1e-12)
    assert np.all(np.diff(np.log(load.tokens_per_second)) >= -1e-4)
    assert np.all(np.diff(load.tpot[:150]) >= -1e-12)
    longer = [float(closed_loop(TOY, requests(tokens), how, concurrency=16, capacity=4000).tpot) for tokens in (500, 1000, 4000)]
    assert longer == sorted(longer)


@pytest.mark.parametrize("clients", [1, 8, 64, 700])
def test_chunks_cost_no_less_than_whole_prompts(clients):
    tokens = np.array([np.inf, 8192, 4096, 2048, 1024, 800])
    load = closed_loop(TOY, requests(4000, 200), Scheduling(step_tokens=tokens), concurrency=clients, capacity=1000)
    unchunked = load.request_latency[0]
    assert np.all(load.request_latency >= unchunked * (1 - 1e-12))
    if clients < 100:  # with more, whole prompts share steps
        assert np.all(np.diff(load.prefill_time) >= 0)
        assert np.all(np.diff(load.inter_token_p99) <= 1e-12)


def test_many_prompts_share_a_step_that_has_tokens_left():
    short = requests(50, 10)
    one, many = (closed_loop(TOY, short, Scheduling(step_tokens=t), concurrency=64, capacity=64) for t in (115.0, 4096.0))
    assert many.request_latency < 0.5 * one.request_latency
    together = closed_loop(TOY, short, Scheduling(step_tokens=4096.0, prompts_together=64.0), concurrency=64, capacity=64)
    assert together.request_latency == pytest.approx(TOY.prefill(50, 0, 64) + 9 * TOY.decode(64, 55))


def test_a_prefix_that_is_found_is_not_computed_but_held():
    plain, cached = (closed_loop(TOY, requests(1000, 200, x), CHUNKED, concurrency=8, capacity=8) for x in (0.0, 0.75))
    assert cached.prefill_time == pytest.approx(TOY.mixed(7, 1100, 250, 750))
    assert cached.decode_time == pytest.approx(plain.decode_time)


def test_a_static_batch_is_its_prompts_and_its_steps_and_waves_over_capacity():
    full = static_batch(TOY, requests(100, 50), Scheduling(), batch=8, capacity=8)
    assert full.ttft == pytest.approx(TOY.prefill(100, 0, 8))
    assert full.request_latency == pytest.approx(TOY.prefill(100, 0, 8) + sum(TOY.decode(8, 100 + j) for j in range(1, 50)))
    half = static_batch(TOY, requests(100, 50), Scheduling(), batch=8, capacity=4)
    four = static_batch(TOY, requests(100, 50), Scheduling(), batch=4, capacity=4)
    assert half.request_latency == pytest.approx(2 * four.request_latency)
    assert half.is_saturated


@HOW
def test_an_open_loop_of_few_requests_is_one_client(how):
    load = open_loop(TOY, requests(), how, rate=1e-6, capacity=50)
    alone = closed_loop(TOY, requests(), how, concurrency=1, capacity=50)
    for name in ("ttft", "tpot", "request_latency", "ttft_p99", "tpot_p99"):
        assert getattr(load, name) == pytest.approx(getattr(alone, name), rel=1e-3), name


@HOW
def test_an_open_loop_obeys_littles_law_and_saturates_at_the_closed_loops_throughput(how):
    best = maximum_load(TOY, requests(), how, capacity=64)
    rates = best.requests_per_second * np.array([0.1, 0.5, 0.9, 0.99, 1.01, 3])
    load = open_loop(TOY, requests(), how, rate=rates, capacity=64)
    assert list(load.is_saturated) == [False] * 4 + [True] * 2
    np.testing.assert_allclose(load.requests_per_second[:4], rates[:4])
    np.testing.assert_allclose(load.tokens_per_second[4:], best.tokens_per_second)
    assert np.all(np.isinf(load.ttft[4:]))
    assert np.all(np.diff(load.tpot[:4]) > 0)
    assert np.all(np.diff(load.ttft[:4]) > 0)


def test_a_row_of_many_plans_is_the_plan_by_itself():
    rates, places = np.array([1.0, 5, 25, 60]), np.array([100.0, 3, 64, 20])
    chunked = np.array([True, False, True, False])
    rows = open_loop(TOY, requests((500, 1500), (100, 300)), Scheduling(chunked=chunked), rate=rates, capacity=places)
    for row in range(4):
        how = Scheduling(chunked=bool(chunked[row]))
        one = open_loop(TOY, requests((500, 1500), (100, 300)), how, rate=rates[row], capacity=places[row])
        for name in ("ttft", "tpot", "tpot_p99", "running", "tokens_per_second"):
            assert getattr(rows, name)[row] == pytest.approx(getattr(one, name), rel=1e-5), name


def test_long_answers_weigh_more_in_the_mean_cache():
    drawn = np.random.default_rng(0).integers(100, 301, 40_000)
    steps = np.concatenate([1000 + np.arange(1, n) for n in drawn[:4000]])
    assert requests(1000, (100, 300)).mean_cached == pytest.approx(steps.mean(), rel=2e-3)


@pytest.mark.parametrize("acceptance, expected", [(0.7, (1.7, 2.19, 2.53, 2.77)), (0.8, (1.8, 2.44, 2.95, 3.36)), (1.0, (2, 3, 4, 5))])
def test_tokens_that_a_verified_draft_yields(acceptance, expected):
    assert expected_tokens(acceptance, np.arange(1, 5)) == pytest.approx(expected, abs=0.006)


def test_speculation_is_a_step_with_its_drafts_over_the_tokens_it_yields():
    draft = ToySteps(floor=5e-4, row=1e-6, key=1e-10, square=1e-11)
    speculative = SpeculativeTimes(target=TOY, draft=draft, drafted=3)
    tokens = float(expected_tokens(0.8, 3))
    how = Scheduling(tokens_per_step=tokens, rows_per_step=4)
    load = closed_loop(speculative, requests(100, 200), how, concurrency=1, capacity=9)
    step = TOY.decode(1, 200, 4) + 3 * draft.decode(1, 200)
    assert load.tpot == pytest.approx(step / tokens)
    alone = TOY.decode(1, 200)  # Leviathan et al., ICML 2023, theorem 3.8: S = E / (t_verify / t_d + gamma t_draft / t_d)
    gain = tokens / (TOY.decode(1, 200, 4) / alone + 3 * draft.decode(1, 200) / alone)
    plain = closed_loop(TOY, requests(100, 200), Scheduling(), concurrency=1, capacity=9)
    assert plain.tpot / load.tpot == pytest.approx(gain)
    assert speculative.mixed(0, 0, 64, 10) == pytest.approx(speculative.prefill(64, 10))
    assert speculative.mixed(5, 90, 0) == pytest.approx(speculative.decode(5, 90))


def test_an_engine_and_its_drafts_say_how_steps_are_filled():
    how = Scheduling.of_engine(
        load_engine("sglang"), step_tokens=np.array([0.0, 4096]), speculation=Speculation(draft_tokens=3, acceptance=0.8)
    )
    assert (how.chunked, how.lockstep, how.rows_per_step) == (False, load_engine("sglang").scheduling.lockstep, 4)
    assert list(how.step_tokens) == [8192, 4096]
    assert how.tokens_per_step == pytest.approx(2.95, abs=0.01)
    assert Scheduling.of_engine(load_engine("vllm")).tokens_per_step == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: requests(cached_fraction=1.5),
        lambda: Scheduling(lockstep=2),
        lambda: Scheduling(step_tokens=0),
        lambda: Scheduling(tokens_per_step=2),
    ],
)
def test_what_no_engine_could_serve_is_refused(make):
    with pytest.raises(InputError):
        make()


def test_answers_that_differ_dissolve_the_waves_of_an_engine_that_prefills_first():
    how = Scheduling(chunked=False, step_tokens=8192, lockstep=0.9)
    one, other = (Requests(prompt=constant(1024), output=lengths) for lengths in (constant(1000), Lengths(least=800, most=1000)))
    assert lockstep_share(one, how) == 0.9
    assert lockstep_share(other, how) == pytest.approx(0.1, abs=0.01)  # the burst with which a run begins
    assert lockstep_share(other, replace(how, chunked=True)) == 0.9


@pytest.mark.parametrize("answer", [1, 8])
def test_short_answers_wait_before_their_first_token(answer):
    """Where prompts fill all steps, no decode step is longer than a full one: the rest is a wait of prompts for one another."""
    how, job = Scheduling(step_tokens=2048.0), requests(4000, answer)
    load = closed_loop(TOY, job, how, concurrency=64, capacity=64)
    run = simulate(TOY, job, how, BatchLimits(max_sequences=64), concurrency=64)
    assert load.tpot == pytest.approx(run.tpot.mean, rel=0.2)
    assert load.ttft == pytest.approx(run.ttft.mean, rel=0.2)
    assert load.tpot <= load.tpot_p99 <= TOY.mixed(64, 4008, 2048, 2048)
    assert (load.tpot_p99 == 0) == (answer == 1)
    assert load.ttft + (answer - 1) * load.tpot == pytest.approx(load.request_latency)
