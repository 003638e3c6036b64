"""Two pools event by event: equal to the closed form where it is exact, near it where it is not, and lawful everywhere."""

from dataclasses import replace

import numpy as np
import pytest

from perfmodel.cost.serving.disaggregated import Handover, TwoPools, disaggregated
from perfmodel.cost.serving.requests import Scheduling
from perfmodel.foundation.errors import InputError
from tests.cost.serving.toys import ToySteps, requests, simulate_pools

TOY = ToySteps()
HOW = Scheduling(first_token_time=0.03, step_tokens=2500.0)
LINKS = Handover(token_bytes=327_680, bandwidth=50e9, latency=1e-5)
VARIED = requests((1000, 3000), (100, 300))
#: Prompts, answers, and neither are what holds things up.
POOLS = pytest.mark.parametrize(("x", "y"), [(1, 2), (4, 1), (2, 1)], ids=["prompts slow", "answers slow", "matched"])


def pools(x, y, how=HOW, links=LINKS, capacity=64):
    workers = {"prefill_workers": x, "decode_workers": y}
    return TwoPools(prefill=TOY, decode=TOY, scheduling=how, prefill_scheduling=how, capacity=capacity, handover=links, **workers)


def form_of(of, job, **load):
    return disaggregated(of, job, **load).load


def both(x, y, job, *, how=HOW, links=LINKS, **load):
    of = pools(x, y, how, links)
    load.setdefault("warm_up", 2 * load["concurrency"] if "concurrency" in load else None)
    return form_of(of, job, **{name: load[name] for name in ("concurrency", "rate") if name in load}), simulate_pools(of, job, **load)


def test_one_client_is_the_closed_form():
    form, run = both(2, 1, requests(2000, 200), concurrency=1)
    for name in ("ttft", "tpot", "request_latency"):
        assert getattr(run, name).mean == pytest.approx(float(getattr(form, name)), rel=1e-3), name
        assert getattr(run, name).p50 == pytest.approx(getattr(run, name).p99, rel=1e-6), name
    assert run.inter_token.p99 == pytest.approx(float(form.inter_token_p99), rel=1e-2)


@POOLS
@pytest.mark.parametrize("job", [requests(2000, 200), VARIED], ids=["alike", "varied"])
def test_clients_are_near_the_closed_form(x, y, job):
    form, run = both(x, y, job, concurrency=128)
    for name, allowed in (("ttft", 0.06), ("tpot", 0.02), ("request_latency", 0.04)):
        assert float(getattr(form, name)) == pytest.approx(getattr(run, name).mean, rel=allowed), name
    assert float(form.requests_per_second) == pytest.approx(run.requests_per_second, rel=0.04)
    assert float(form.running) == pytest.approx(run.running, rel=0.04)
    assert run.running + run.queue < 128
    assert run.request_latency.p50 <= run.request_latency.p90 <= run.request_latency.p99


@POOLS
@pytest.mark.parametrize("clients", [8, 64, 128])
def test_the_99th_percentile_of_clients_is_bounded_by_how_many_they_are(x, y, clients):
    form, run = both(x, y, VARIED, concurrency=clients)
    assert float(form.ttft_p99) == pytest.approx(run.ttft.p99, rel=0.2)
    assert float(form.tpot_p99) == pytest.approx(run.tpot.p99, rel=0.05)


@POOLS
@pytest.mark.parametrize("used", [0.3, 0.7, 0.9])
@pytest.mark.slow
def test_a_rate_is_near_the_closed_form(x, y, used):
    job = requests(2000, 200)
    most = float(form_of(pools(x, y), job).requests_per_second)
    form, run = both(x, y, job, rate=used * most, answered=6000, warm_up=1000)
    for name, allowed in (("ttft", 0.1), ("tpot", 0.02), ("request_latency", 0.03)):
        assert float(getattr(form, name)) == pytest.approx(getattr(run, name).mean, rel=allowed), name
    for name, distribution, allowed in (("ttft_p99", "ttft", 0.35), ("tpot_p99", "tpot", 0.05), ("inter_token_p99", "inter_token", 0.06)):
        assert float(getattr(form, name)) == pytest.approx(getattr(run, distribution).p99, rel=allowed), name


def test_all_clients_are_somewhere_and_littles_law_holds():
    _, run = both(2, 1, VARIED, concurrency=100, answered=3000)
    in_prefill_and_on_links = 100 - run.running - run.queue
    assert 0 < in_prefill_and_on_links < 100 * 0.2
    assert run.requests_per_second * run.request_latency.mean == pytest.approx(100, rel=0.03)


@pytest.mark.slow
def test_slow_links_are_what_prompts_wait_for():
    slow = replace(LINKS, bandwidth=5e9)
    form, run = both(2, 4, requests(2000, 50), links=slow, concurrency=60, answered=2000)
    assert run.requests_per_second == pytest.approx(2 * 5e9 / (2000 * 327_680), rel=0.03)
    assert run.requests_per_second == pytest.approx(float(form.requests_per_second), rel=0.05)


def test_layers_that_are_sent_early_come_early():
    at_once = both(2, 1, requests(2000, 200), concurrency=1)[1].ttft.mean
    form, run = both(2, 1, requests(2000, 200), links=replace(LINKS, layers=80), concurrency=1)
    assert run.ttft.mean == pytest.approx(float(form.ttft), rel=1e-3)
    assert run.ttft.mean < at_once - 0.01


def test_a_prompt_longer_than_a_step_takes_as_many_as_it_needs():
    short = replace(HOW, step_tokens=700.0)
    form, run = both(2, 1, requests(2000, 200), how=short, concurrency=1)
    assert run.ttft.mean == pytest.approx(float(form.ttft), rel=2e-3)
    assert run.ttft.mean > both(2, 1, requests(2000, 200), concurrency=1)[1].ttft.mean


def test_the_same_seed_is_the_same_run_and_another_is_not():
    first, again, other = (both(2, 1, VARIED, rate=10, seed=seed)[1] for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_goodput_counts_what_keeps_all_limits():
    limits = [{}, {"ttft": 0.13}, {"ttft": 0.13, "request_latency": 1.0}, {"tpot": 1e-3}]
    every, some, fewer, none = (both(2, 1, VARIED, rate=30, limits=limit)[1] for limit in limits)
    assert every.kept_fraction == pytest.approx(1)
    assert 0.1 < fewer.kept_fraction < some.kept_fraction < 0.95
    assert none.kept_fraction == 0


def test_an_answer_of_one_token_needs_no_place():
    _, run = both(2, 1, requests(2000, 1), concurrency=4)
    assert run.tpot.mean == 0
    assert run.running == 0


def test_what_cannot_be_simulated():
    for load in (dict(), dict(concurrency=2, rate=1.0)):
        with pytest.raises(InputError):
            simulate_pools(pools(1, 1), requests(), **load)
    with pytest.raises(InputError):
        simulate_pools(pools(1, 1, capacity=0), requests(), concurrency=2)


def test_drafts_shorten_answers_as_in_the_closed_form():
    how = replace(HOW, tokens_per_step=2.5, rows_per_step=4.0)
    form, run = both(2, 1, requests(2000, 200), how=how, concurrency=8, answered=400)
    assert run.tpot.mean == pytest.approx(float(form.tpot), rel=0.03)
    assert np.isfinite(run.ttft.p99)
