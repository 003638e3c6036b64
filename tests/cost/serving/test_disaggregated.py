"""Prompts on some workers and answers on others: rates, queues, transfers, the best split."""

import heapq
from dataclasses import replace

import numpy as np
import pytest

from perfmodel.cost.serving.disaggregated import (
    Handover,
    TwoPools,
    decode_rate,
    disaggregated,
    exposed_transfer_time,
    largest_batch,
    prefill_rate,
    queue_wait,
)
from perfmodel.cost.serving.load import closed_loop
from perfmodel.cost.serving.requests import Scheduling
from perfmodel.foundation.errors import InputError
from tests.cost.serving.toys import ToySteps, requests

TOY = ToySteps()
HOW = Scheduling(first_token_time=0.03)
LINKS = Handover(token_bytes=327_680, bandwidth=50e9, latency=1e-5)


def served(x=2, y=1, capacity=64, how=HOW, job=None, handover=LINKS, **load):
    job = requests(2000, 200) if job is None else job
    workers = {"prefill_workers": x, "decode_workers": y}
    pools = TwoPools(prefill=TOY, decode=TOY, scheduling=how, prefill_scheduling=how, capacity=capacity, handover=handover, **workers)
    return disaggregated(pools, job, **load)


def tokens_per_chip(served, x, y):
    """Output tokens of prefill workers of one chip and decode workers of two, over all chips."""
    return float(served.load.tokens_per_second) / (x + 2 * y)


def test_a_cache_of_8192_tokens_takes_what_links_say():
    num_bytes = 8192 * 327_680
    assert exposed_transfer_time(num_bytes, 1.0, bandwidth=50e9, latency=0) == pytest.approx(54e-3, rel=0.01)
    assert exposed_transfer_time(num_bytes, 1.0, bandwidth=400e9, latency=0) == pytest.approx(6.7e-3, rel=0.01)


def test_layers_that_are_sent_early_hide_all_but_the_last():
    unlayered = exposed_transfer_time(8e9, 1.0, bandwidth=50e9, latency=1e-5)
    assert unlayered == pytest.approx(1e-5 + 8e9 / 50e9)
    assert exposed_transfer_time(8e9, 1.0, bandwidth=50e9, latency=1e-5, layers=80) == pytest.approx(1e-5 + unlayered / 80, rel=1e-2)
    slow = exposed_transfer_time(8e9, 0.04, bandwidth=50e9, latency=0, layers=80)
    assert slow == pytest.approx(0.16 - 79 / 80 * 0.04)
    layers = exposed_transfer_time(8e9, 0.1, bandwidth=50e9, latency=0, layers=np.arange(1, 100))
    assert np.all(np.diff(layers) <= 0)


@pytest.mark.parametrize("servers", [1, 3, 8])
@pytest.mark.parametrize("used", [0.5, 0.85])
def test_waits_for_workers_are_those_of_a_queue(servers, used):
    random = np.random.default_rng(5)
    free = [0.0] * servers
    now, waits = 0.0, []
    for gap in random.exponential(1 / (used * servers), 60_000):
        now += gap
        start = max(now, heapq.heappop(free))
        heapq.heappush(free, start + 1.0)
        waits.append(start - now)
    assert queue_wait(used * servers, 1.0, servers) == pytest.approx(np.mean(waits), rel=0.2, abs=5e-3)


def test_one_client_is_alone_on_both_kinds():
    one = served(concurrency=1)
    alone = TOY.prefill(2000) + (1e-5 + 2000 * 327_680 / 50e9) + 0.03
    assert one.load.ttft == pytest.approx(alone, rel=1e-9)
    assert one.load.tpot == pytest.approx(TOY.decode(1, 2100))
    assert one.load.requests_per_second * one.load.request_latency == pytest.approx(1, rel=1e-6)


def test_all_clients_are_somewhere_and_no_kind_does_more_than_it_can():
    clients = np.array([1.0, 10, 50, 100, 400])
    for x, y in ((1, 4), (2, 1), (8, 1)):
        some = served(x, y, concurrency=clients)
        np.testing.assert_allclose(some.load.requests_per_second * some.load.request_latency, clients, rtol=1e-4)
        assert np.all(np.diff(some.load.requests_per_second) >= -1e-9)
        assert np.all(some.prefill_use <= 1 + 1e-9)
        assert np.all(some.decode_use <= 1 + 1e-9)
        assert np.all(np.diff(some.load.tpot) >= -1e-12)
    assert served(1, 4, concurrency=400).prefill_use == pytest.approx(1, abs=0.02)
    assert served(8, 1, concurrency=400).decode_use == pytest.approx(1, abs=1e-6)


def test_the_highest_throughput_is_that_of_the_slower_kind():
    mu_p, prompt = prefill_rate(TOY, requests(2000, 200), HOW, LINKS)
    mu_d, step = decode_rate(TOY, requests(2000, 200), HOW, batch=64)
    assert (prompt, step) == (pytest.approx(TOY.prefill(2000)), pytest.approx(TOY.decode(64, 2100)))
    for x, y in ((1, 1), (1, 3), (5, 1)):
        best = served(x, y)
        assert best.load.requests_per_second == pytest.approx(min(x * mu_p, y * mu_d))
        assert best.load.tokens_per_second == pytest.approx(200 * min(x * mu_p, y * mu_d))
        assert max(best.prefill_use, best.decode_use) == pytest.approx(1)
        assert best.matched_ratio == pytest.approx(mu_d / mu_p)


def test_matched_workers_waste_nothing():
    ratio = float(served().matched_ratio)
    matched = served(ratio * 3, 3)
    assert (matched.prefill_use, matched.decode_use) == (pytest.approx(1), pytest.approx(1))
    off = [tokens_per_chip(served(x, 3), x, 3) for x in (ratio * 1.5, ratio * 6)]
    assert tokens_per_chip(matched, ratio * 3, 3) > max(off)


def test_a_rate_is_answered_until_one_kind_is_full():
    most = float(served(2, 1).load.requests_per_second)
    some = served(2, 1, rate=most * np.array([0.01, 0.5, 0.9, 1.1]))
    assert list(some.load.is_saturated) == [False, False, False, True]
    assert np.all(np.diff(some.load.ttft[:3]) > 0)
    assert np.all(np.diff(some.load.tpot[:3]) > 0)
    assert np.isinf(some.load.ttft[3])
    assert some.load.requests_per_second[3] == pytest.approx(most)
    quiet = served(2, 1, rate=1e-6)
    assert quiet.load.request_latency == pytest.approx(float(served(2, 1, concurrency=1).load.request_latency), rel=1e-3)


def test_no_prompt_stalls_an_answer():
    together = closed_loop(TOY, requests(2000, 200), Scheduling(), concurrency=64, capacity=64)
    apart = served(8, 1, concurrency=64)
    assert apart.load.inter_token_p99 < 0.5 * together.inter_token_p99
    assert apart.load.tpot < together.tpot


def test_slow_links_bound_the_prefill_workers():
    slow = served(2, 1, handover=replace(LINKS, bandwidth=1e9))
    assert slow.load.requests_per_second == pytest.approx(2 * 1e9 / (2000 * 327_680))


def test_the_largest_batch_keeps_the_limit_and_one_more_does_not():
    job = requests(2000, 200)
    batch = largest_batch(TOY, job, HOW, tpot_limit=np.array([1e-3, 6e-3, 8e-3, 1.0]), capacity=300)
    assert batch[0] == 0
    assert batch[3] == 300
    for one, limit in zip(batch[1:3], (6e-3, 8e-3), strict=True):
        assert TOY.decode(one, job.mean_cached) <= limit < TOY.decode(one + 1, job.mean_cached)
    assert largest_batch(TOY, job, HOW, tpot_limit=np.inf, capacity=300) == 300


def test_plans_are_columns():
    workers, places = np.array([1, 2, 6]), np.array([10, 64, 300])
    for load in (dict(concurrency=90), dict(rate=6.0), dict()):
        rows = served(workers, 2, capacity=places, **load)
        for row in range(3):
            one = served(workers[row], 2, capacity=places[row], **load)
            for name in ("ttft", "tpot", "requests_per_second"):
                assert getattr(rows.load, name)[row] == pytest.approx(float(getattr(one.load, name)), rel=1e-6), (name, load)


def test_a_load_is_one_of_both():
    with pytest.raises(InputError):
        served(concurrency=4, rate=2.0)
