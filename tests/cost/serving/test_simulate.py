"""The simulated engine: equal to the closed forms where these are exact, near them where they are not, and lawful everywhere."""

from dataclasses import replace

import numpy as np
import pytest

from perfmodel.cost.serving.load import closed_loop, maximum_load, open_loop
from perfmodel.cost.serving.requests import Scheduling
from perfmodel.cost.serving.simulated_engine import BatchLimits, SimulatedEngine
from perfmodel.cost.serving.times import tabulate
from perfmodel.foundation.errors import InputError
from tests.cost.serving.toys import ToySteps, requests, simulate

TOY = ToySteps()
#: One prompt of 1,000 tokens a step.
CHUNKED = Scheduling(step_tokens=1060.0)
PREFILL_FIRST = Scheduling(chunked=False, step_tokens=1000.0, lockstep=1.0)
HOW = pytest.mark.parametrize("how", [CHUNKED, PREFILL_FIRST], ids=["chunked", "prefill first"])


class Roofline(ToySteps):
    """Weights are read or rows are computed, whichever takes longer."""

    def mixed(self, sequences, cached, prompt_tokens, prompt_cached=0.0, prompts=1.0, new_tokens=1.0):
        rows = np.asarray(sequences, dtype=float) * new_tokens + np.asarray(prompts * prompt_tokens, dtype=float)
        linear = super().mixed(sequences, cached, prompt_tokens, prompt_cached, prompts, new_tokens) - self.floor - self.row * rows
        return linear + np.maximum(self.floor, self.row * rows)


@HOW
@pytest.mark.parametrize("clients", [1, 8, 60, 90])
def test_with_one_length_it_is_the_closed_form(how, clients):
    form = closed_loop(TOY, requests(), how, concurrency=clients, capacity=60)
    run = simulate(
        TOY,
        requests(),
        how,
        BatchLimits(max_sequences=60),
        concurrency=clients,
        answered=12 * min(clients, 60),
        warm_up=6 * min(clients, 60),
    )
    assert run.tokens_per_second == pytest.approx(form.tokens_per_second, rel=0.02)
    assert run.request_latency.mean == pytest.approx(form.request_latency, rel=0.02)
    assert run.tpot.mean == pytest.approx(form.tpot, rel=0.03)
    if clients <= (8 if how.chunked else 60):
        assert run.ttft.mean == pytest.approx(form.ttft, rel=0.06)


@HOW
@pytest.mark.parametrize("load", [dict(concurrency=8), dict(concurrency=90), dict(rate=12.0)], ids=str)
@pytest.mark.parametrize("reserves", [True, False], ids=["reserved", "as they come"])
def test_steps_taken_together_are_those_taken_one_by_one(how, load, reserves, monkeypatch):
    how = replace(how, first_token_time=0.05, border_steps=0.5)
    job, places = requests((200, 2000), (50, 400)), BatchLimits(max_sequences=60, cache_tokens=64_000, reserves_output=reserves)
    together = simulate(TOY, job, how, places, **load)
    monkeypatch.setattr(SimulatedEngine, "_steps_to_next_event", lambda *_: (1, 0.0))
    one_by_one = simulate(TOY, job, how, places, **load)
    for name in ("ttft", "tpot", "request_latency", "inter_token"):
        assert getattr(together, name).mean == pytest.approx(getattr(one_by_one, name).mean, rel=0.01), name
    assert together.steps == pytest.approx(one_by_one.steps, rel=0.01)


@HOW
@pytest.mark.parametrize("used, answered", [pytest.param(0.02, 1000, marks=pytest.mark.slow), (0.3, 2500), (0.7, 8000)])
def test_at_a_rate_it_is_near_the_closed_form(how, used, answered):
    mixed_lengths = requests((500, 1500), (100, 300))
    how = replace(how, lockstep=0.0, step_tokens=2048.0)
    rate = used * float(maximum_load(TOY, mixed_lengths, how, capacity=60).requests_per_second)
    form = open_loop(TOY, mixed_lengths, how, rate=rate, capacity=60)
    run = simulate(TOY, mixed_lengths, how, BatchLimits(max_sequences=60), rate=rate, answered=answered, seed=3)
    for name, allowed in (
        ("tpot", 0.05),
        ("ttft", 0.15),
        ("request_latency", 0.05),
        ("running", 0.06 if used > 0.1 else 0.12),
        ("tokens_per_second", 0.05),
    ):
        seen = getattr(run, name)
        assert getattr(form, name) == pytest.approx(getattr(seen, "mean", seen), rel=allowed), name
    for name, distribution, allowed in (("tpot_p99", "tpot", 0.25), ("ttft_p99", "ttft", 0.4), ("inter_token_p99", "inter_token", 0.4)):
        assert getattr(form, name) == pytest.approx(getattr(run, distribution).p99, rel=allowed), name


@HOW
def test_littles_law_holds_over_requests_that_differ(how):
    run = simulate(TOY, requests((200, 2000), (50, 400)), how, BatchLimits(max_sequences=40), rate=12, answered=3000)
    assert run.running + run.queue == pytest.approx(run.requests_per_second * run.request_latency.mean, rel=0.05)
    assert run.request_latency.p50 < run.request_latency.p90 < run.request_latency.p99


def test_clients_are_all_somewhere():
    run = simulate(TOY, requests((200, 2000), (50, 400)), CHUNKED, BatchLimits(max_sequences=30), concurrency=50)
    assert run.running + run.queue == pytest.approx(50, rel=1e-9)
    assert run.running == pytest.approx(30, rel=0.02)


def test_the_same_seed_is_the_same_run_and_another_is_not():
    first, again, other = (
        simulate(TOY, requests((200, 900), (20, 90)), CHUNKED, BatchLimits(max_sequences=30), rate=9, seed=s) for s in (1, 1, 2)
    )
    assert first == again
    assert first != other


@pytest.mark.parametrize("reserves", [True, False], ids=["reserved", "as they come"])
def test_the_cache_bounds_what_runs(reserves):
    job = requests(1000, 400)
    cache_tokens = 16 * 88 * 10  # ten requests in blocks of 16
    run = simulate(TOY, job, CHUNKED, BatchLimits(max_sequences=100, cache_tokens=cache_tokens, reserves_output=reserves), concurrency=40)
    fit = cache_tokens / (1408 if reserves else job.mean_cached + 7.5)  # 88 blocks of the whole answer, or half a block more than is needed
    assert run.running == pytest.approx(float(fit), rel=0.12)
    assert (run.preemptions == 0) == reserves
    assert run.running + run.queue == pytest.approx(40, rel=1e-9)


def test_answers_thrown_out_of_the_cache_are_finished_all_the_same():
    run = simulate(TOY, requests(100, (200, 600)), CHUNKED, BatchLimits(max_sequences=30, cache_tokens=5000), concurrency=30, answered=300)
    assert run.preemptions > 20
    assert run.tokens_per_second == pytest.approx(run.requests_per_second * 400, rel=0.1)
    assert run.inter_token.p99 < run.tpot.p99 * 2


def test_goodput_counts_what_keeps_both_limits():
    job = requests((200, 2000), (50, 400))
    every, none, some = (
        simulate(TOY, job, CHUNKED, BatchLimits(max_sequences=40), rate=15, limits={"ttft": limit}) for limit in (np.inf, 1e-3, 0.05)
    )
    assert every.kept_fraction == pytest.approx(1)
    assert none.kept_fraction == 0
    assert 0.1 < some.kept_fraction < 0.9


def test_drafts_come_out_as_in_the_closed_form():
    how = replace(CHUNKED, tokens_per_step=2.5, rows_per_step=4.0)
    form = closed_loop(TOY, requests(), how, concurrency=8, capacity=60)
    run = simulate(TOY, requests(), how, BatchLimits(max_sequences=60), concurrency=8, answered=400)
    assert run.tpot.mean == pytest.approx(form.tpot, rel=0.03)


def test_an_answer_of_one_token_ends_with_its_prompt():
    run = simulate(TOY, requests(500, 1), CHUNKED, BatchLimits(max_sequences=4), concurrency=1, answered=50)
    assert run.request_latency.mean == pytest.approx(TOY.prefill(500))
    assert run.tpot.mean == 0


def test_a_front_and_a_border_are_seen_by_clients():
    hows = [replace(CHUNKED, first_token_time=t, border_steps=m) for t, m in ((0.0, 0.0), (0.2, 3.0))]
    plain, late = (simulate(TOY, requests(), how, BatchLimits(max_sequences=4), concurrency=1, answered=9) for how in hows)
    assert late.ttft.mean - plain.ttft.mean == pytest.approx(0.2 + 3 * TOY.decode(1, 1000), rel=1e-6)
    assert late.tpot.mean == pytest.approx(plain.tpot.mean)


@pytest.mark.parametrize("times, within", [(TOY, 1e-9), (Roofline(), 0.03)], ids=["affine", "roofline"])
def test_the_table_is_the_step_times(times, within):
    table = tabulate(times, sequences=300, cached=(100.0, 5000.0), tokens=8192.0, keys=5000.0)
    random = np.random.default_rng(0)
    for _ in range(100):
        b, z, t, x = random.integers(0, 301), random.uniform(100, 5000), random.integers(1, 4000), random.integers(0, 900)
        assert table.step(int(b), z, t, x + t / 2) == pytest.approx(float(times.mixed(b, z, t, x)), rel=within)
        if b:
            assert table.decode(int(b), z) == pytest.approx(float(times.decode(b, z)), rel=within)


@pytest.mark.parametrize(
    "load", [dict(), dict(concurrency=4, rate=1.0), dict(concurrency=4, max_sequences=0), dict(concurrency=4, cache_tokens=1000)]
)
def test_what_cannot_run_is_refused(load):
    load = {"max_sequences": 8, **load}
    places = BatchLimits(**{name: load.pop(name) for name in ("max_sequences", "cache_tokens") if name in load})
    with pytest.raises(InputError):
        simulate(TOY, requests(), CHUNKED, places, **load)
