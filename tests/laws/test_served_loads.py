"""Laws of served loads for any model, plan and engine, with the step times of real models rather than toys."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

import perfmodel
from perfmodel.cost.serving.load import closed_loop, maximum_load, open_loop, static_batch
from perfmodel.cost.serving.requests import Requests
from perfmodel.cost.serving.simulated_engine import BatchLimits
from perfmodel.hardware.reader import load_cluster
from perfmodel.parallel.serving_plan import ServingLayout
from perfmodel.workload.serving import Lengths, constant
from tests.cost.serving.test_estimate import estimator
from tests.cost.serving.toys import simulate
from tests.marks import mostly_slow

PLANS = {
    "llama-3-70b": dict(tp=4),
    "llama-3-8b": dict(tp=1),
    "mixtral-8x7b": dict(tp=2, ep=2),
    "deepseek-v3": dict(tp=1, attention_dp=8, ep=8),
}
MODELS = pytest.mark.parametrize("name", mostly_slow(PLANS))
REQUESTS = Requests(prompt=constant(1000), output=constant(200))
_MADE = {}


def served(name):
    """Step times and scheduling of a plan of the model."""
    if name not in _MADE:
        of = estimator(name, quantization="fp8-block" if name == "deepseek-v3" else "bf16")
        plans = [ServingLayout(**PLANS[name])]
        how = of.scheduling(plans)
        _MADE[name] = of.times(plans), replace(how, step_tokens=float(how.step_tokens[0]), chunked=True, lockstep=0.0)
    return _MADE[name]


@MODELS
def test_a_step_of_one_kind_is_a_mixed_step_without_the_other(name):
    times, _ = served(name)
    np.testing.assert_allclose(times.mixed(0.0, 0.0, 700.0, 300.0), times.prefill(700.0, 300.0))
    np.testing.assert_allclose(times.mixed(24.0, 1500.0, 0.0), times.decode(24.0, 1500.0))


@MODELS
def test_latency_does_not_depend_on_lockstep(name):
    times, how = served(name)
    lockstep = np.linspace(0, 1, 4)
    load = closed_loop(times, REQUESTS, replace(how, lockstep=lockstep), concurrency=48, capacity=64)
    np.testing.assert_allclose(load.request_latency, load.request_latency[0], rtol=1e-12)
    np.testing.assert_allclose(load.ttft + 199 * load.tpot, load.request_latency, rtol=1e-9)


@MODELS
def test_more_clients_are_answered_more_slowly_and_never_more_than_places_allow(name):
    times, how = served(name)
    clients = np.round(np.geomspace(1, 400, 20))
    load = closed_loop(times, REQUESTS, how, concurrency=clients, capacity=100)
    np.testing.assert_allclose(load.requests_per_second * load.request_latency, clients, rtol=1e-9)
    assert np.all(np.diff(load.request_latency) >= -1e-9)
    assert np.all(load.tokens_per_second <= maximum_load(times, REQUESTS, how, capacity=100).tokens_per_second * (1 + 1e-9))


@MODELS
def test_chunks_cost_a_prompt_no_less_than_whole(name):
    """With other requests chunks may pay: each chunk shares its step with decode tokens."""
    times, how = served(name)
    long = Requests(prompt=constant(6000), output=constant(200))
    for tokens in (4096.0, 2048.0, 1024.0):
        unchunked, cut = (closed_loop(times, long, replace(how, step_tokens=t), concurrency=1, capacity=64) for t in (16_384.0, tokens))
        assert cut.ttft >= unchunked.ttft
        assert cut.request_latency >= unchunked.request_latency


@MODELS
def test_a_mean_of_sequences_takes_as_long_as_the_whole_numbers_around_it(name):
    times, _ = served(name)
    for low in (1.0, 2.0, 8.0, 300.0):
        least, middle, most = (float(times.decode(low + part, 1500.0)[0]) for part in (0.0, 0.3, 1.0))
        assert least * (1 - 1e-12) <= middle <= most * (1 + 1e-12)
        assert float(times.decode(low + 1e-6, 1500.0)[0]) == pytest.approx(least, rel=1e-4)


@MODELS
def test_one_client_sees_the_same_in_every_form(name):
    times, how = served(name)
    alone = closed_loop(times, REQUESTS, how, concurrency=1, capacity=64)
    rare = open_loop(times, REQUESTS, how, rate=1e-7, capacity=64)
    batch = static_batch(times, REQUESTS, how, batch=1, capacity=64)
    for one, other in itertools.combinations((alone, rare, batch), 2):
        np.testing.assert_allclose(one.request_latency, other.request_latency, rtol=5e-3)


@MODELS
@pytest.mark.parametrize("chunked", [True, False], ids=["chunked", "prefill first"])
def test_a_simulated_engine_answers_as_fast_as_the_form_says(name, chunked):
    times, how = served(name)
    how = replace(how, chunked=chunked, first_token_time=0.0, border_steps=0.0)
    some = Requests(prompt=Lengths(least=800, most=1000), output=Lengths(least=160, most=200))
    form = closed_loop(times, some, how, concurrency=24, capacity=24)
    run = simulate(times, some, how, BatchLimits(max_sequences=24), concurrency=24)
    assert run.request_latency.mean == pytest.approx(float(form.request_latency[0]), rel=0.08)
    assert run.tokens_per_second == pytest.approx(float(form.tokens_per_second[0]), rel=0.08)


@pytest.mark.parametrize("answer", [16, 128])
@pytest.mark.parametrize("engine", ["vllm", "tensorrt-llm"])
def test_first_tokens_of_short_prompts_come_no_sooner_with_more_clients_or_slower_parts(engine, answer):
    """As printed, simulated: short prompts share a step. The formulas split a latency otherwise (docs/explanation/queueing.md)."""
    slow = load_cluster("hgx-h200", num_chips=2)
    memory = replace(slow.chip.memory, bandwidth=1.5 * slow.chip.memory.bandwidth)
    fast = replace(slow, chip=replace(slow.chip, memory=memory))
    job = {"model": "llama-3-8b", "chips": 2, "tp": 2, "engine": engine, "input_len": 128, "output_len": answer}
    times = [[perfmodel.serve(**job, cluster=cluster, concurrency=c).ttft.mean for c in (64, 128, 256)] for cluster in (fast, slow)]
    assert np.all(np.diff(times, axis=1) > 0)
    assert np.all(np.diff(times, axis=0) > 0)
