"""A plan as a simulation has it: its replicas share the clients, its intervals are about what is printed, a saturated rate ends at once."""

import pytest

import perfmodel

LLAMA = dict(model="llama-3-8b", cluster="dgx-h100", input_len="1k", output_len=256, chips=8, tp=1)


def simulated(**load):
    from perfmodel.parallel.request import Service
    from perfmodel.verbs.serving_predict import serve_asked, simulated_in

    setting, prediction = serve_asked(Service().having({**LLAMA, **load}))
    return simulated_in(setting, prediction)


def test_replicas_without_a_request_are_idle():
    alone = perfmodel.serve(**{**LLAMA, "chips": 1}, concurrency=1)
    idle, run = perfmodel.serve(**LLAMA, concurrency=1), simulated(concurrency=1)
    assert idle.tokens_per_second_per_chip == pytest.approx(alone.tokens_per_second_per_chip / 8)
    assert idle.requests_per_second == pytest.approx(alone.requests_per_second)
    assert idle.ttft.mean == pytest.approx(alone.ttft.mean)
    assert any("7 of them are idle" in note for note in idle.notes)
    assert run.requests_per_second == pytest.approx(idle.requests_per_second, rel=0.03)
    for result in (idle, run):
        assert result.load.running * 8 == pytest.approx(1, rel=0.05)
        assert result.requests_per_second * result.request_latency.mean == pytest.approx(1, rel=0.05)


@pytest.mark.parametrize("clients", [11, 12])
def test_clients_that_replicas_do_not_divide_all_run(clients):
    run = simulated(concurrency=clients)
    assert (run.load.running + run.load.queued) * 8 == pytest.approx(clients, rel=0.05)
    assert run.requests_per_second * run.request_latency.mean == pytest.approx(clients, rel=0.05)


def test_intervals_are_about_the_value_that_is_printed():
    run = simulated(input_len="2k", output_len=32, chips=1, concurrency=16)
    for name in ("ttft", "tpot", "request_latency"):
        low, high = run.intervals[name]
        assert low < getattr(run, name).mean < high


def test_a_rate_that_saturates_is_not_simulated():
    run = simulated(rate=1e6)
    assert run.load.is_saturated
    assert any("not simulated" in note for note in run.notes)


@pytest.mark.parametrize("lengths", ["1k", "800:1k"])
def test_a_closed_loop_has_one_answer(lengths):
    job = dict(model="llama-3.3-70b", chips=4, tp=4, quantization="fp8", concurrency=64, input_len=lengths, output_len=lengths)
    printed, run = perfmodel.serve(**{**LLAMA, **job}), simulated(**job)
    for name in ("ttft", "tpot", "request_latency"):
        assert getattr(printed, name) == getattr(run, name)
        low, high = printed.intervals[name]
        assert low < getattr(printed, name).mean < high


def test_requests_of_one_length_march_where_prompts_run_first_alone():
    """As the published runs of SGLang on the one hand, of vLLM and TensorRT-LLM on the other."""
    job = {**LLAMA, "model": "llama-3.3-70b", "chips": 4, "tp": 4, "quantization": "fp8", "concurrency": 64}
    for engine, marches in (("vllm", False), ("sglang", True)):
        one, varied = (perfmodel.serve(**{**job, "output_len": length}, engine=engine) for length in (512, "460:564"))
        assert (one.ttft.p50 > 4 * varied.ttft.p50) == marches
        assert any("in waves" in note for note in one.notes) == marches
        assert not any("in waves" in note for note in varied.notes)


def test_two_pools_of_one_repeated_prompt_activate_few_experts_in_a_simulation_too():
    from perfmodel.cost.serving.simulated import predict_served
    from perfmodel.parallel.request import Service
    from perfmodel.verbs.serving_setting import serving_layout, serving_setting

    moe = dict(model="qwen3-30b-a3b", workers="1x2:1x2", chips=4, tp=None, concurrency=16, output_len=64)
    service = Service().having({**LLAMA, **moe})
    setting = serving_setting(service)
    few, many = (
        predict_served(setting.estimator, setting.job, serving_layout(setting, service.knobs)[0], distinct_experts=number)
        for number in (8, 0)
    )
    assert few.tpot.mean < 0.9 * many.tpot.mean
    assert few.ttft.mean < many.ttft.mean
