"""A served load has one answer: what is printed is the simulation whatever its draws, near the formulas that a search ranks by."""

from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest

from perfmodel.cost.serving.disaggregated import predict_layout
from perfmodel.cost.serving.simulated import predict_served, with_simulation
from perfmodel.parallel.request import Service
from perfmodel.verbs.serving_setting import serving_layout, serving_setting
from tests.marks import mostly_nightly

PLANS = (
    ("llama-3-8b", "dgx-h100", {"chips": 1, "tp": 1}),
    ("llama-3-8b", "dgx-a100", {"chips": 2, "tp": 2}),
    ("llama-3.3-70b", "dgx-h100", {"chips": 4, "tp": 4}),
    ("qwen3-30b-a3b", "hgx-h200", {"chips": 2, "tp": 2, "ep": 2}),
    ("deepseek-v3", "hgx-h200", {"chips": 8, "tp": 8, "ep": 8}),
)
DISAGGREGATED = (
    ("llama-3-8b", "dgx-h100", {"chips": 2, "workers": "1x1:1x1"}),
    ("llama-3-8b", "dgx-h100", {"chips": 4, "workers": "2x1:1x2"}),
    ("llama-3.3-70b", "dgx-h100", {"chips": 8, "workers": "1x4:1x4"}),
    ("qwen3-30b-a3b", "hgx-h200", {"chips": 8, "workers": "2x2:2x2"}),
)


@lru_cache(maxsize=4)
def answers(number, seed, kind="aggregated", at_rate=False):
    """Return TTFT, TPOT and latency of random loads that fit: printed, simulated with other draws, and by the formulas. [s]

    at_rate   requests at random, up to 95 % of what the plan answers at most, in place of clients
    """
    plans = {"aggregated": PLANS, "disaggregated": DISAGGREGATED}[kind]
    random, rows = np.random.default_rng(seed), []
    while len(rows) < number:
        model, cluster, plan = plans[random.integers(len(plans))]
        prompt, answer = int(2 ** random.uniform(6, 12.5)), int(2 ** random.uniform(4, 11))
        least = random.choice([0.3, 0.8, 1.0])
        words = {
            "model": model,
            "cluster": cluster,
            "engine": str(random.choice(["vllm", "sglang", "tensorrt-llm"])),
            "input_len": f"{max(int(least * prompt), 1)}:{prompt}",
            "output_len": f"{max(int(least * answer), 1)}:{answer}",
            "concurrency": None if at_rate else int(2 ** random.uniform(0, 8.5)),
            **plan,
        }
        service = Service().having(words)
        setting = serving_setting(service)
        of, job = setting.estimator, setting.job
        chosen, _ = serving_layout(setting, service.knobs)
        if at_rate:
            job = replace(job, rate=random.uniform(0.03, 0.95) * predict_layout(of, job, chosen).requests_per_second or None)
        printed = predict_served(of, job, chosen)
        if not printed.fits or not printed.load.fits or (at_rate and printed.load.is_saturated):
            continue
        assert printed.ttft.p50 is not None
        three = (printed, with_simulation(of, printed, seed=11), predict_layout(of, job, chosen))
        rows.append([[prediction.ttft.mean, prediction.tpot.mean, prediction.request_latency.mean] for prediction in three])
    return np.array(rows)


def shares_within(number, seed, of, share, **words):
    loads = answers(number, seed, **words)
    return np.mean(np.abs(loads[:, of] / loads[:, 0] - 1) <= share, axis=0)


@pytest.mark.slow
def test_a_few_random_loads_have_one_answer():
    assert np.all(shares_within(8, 1, of=1, share=0.1) >= 7 / 8)


@pytest.mark.slow
def test_a_few_random_rates_have_one_answer():
    assert np.all(shares_within(6, 3, of=1, share=0.1, at_rate=True) >= 5 / 6)
    assert np.all(shares_within(4, 3, of=1, share=0.1, kind="disaggregated", at_rate=True) >= 3 / 4)


#: Of random loads: how many are drawn in `make test`, and in `make test-all`.
numbers = pytest.mark.parametrize("number", mostly_nightly([20, 200], [20]))


@pytest.mark.slow
@numbers
def test_many_random_loads_have_one_answer(number):
    assert np.all(shares_within(number, 2, of=1, share=0.1) >= (0.95, 0.95, 0.98))


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("number", [20, 60])
def test_random_rates_and_loads_of_disaggregated_plans_have_one_answer(number):
    assert np.all(shares_within(number, 4, of=1, share=0.1, at_rate=True) >= (0.95, 0.95, 0.95))
    assert np.all(shares_within(10, 5, of=1, share=0.1, kind="disaggregated", at_rate=True) >= 0.9)
    assert np.all(shares_within(10, 6, of=1, share=0.1, kind="disaggregated") >= 0.9)


@pytest.mark.slow
@numbers
def test_the_formulas_that_a_search_ranks_by_are_near(number):
    loads = answers(number, 2)
    errors = np.abs(loads[:, 2] / loads[:, 0] - 1)
    assert np.all(np.median(errors, axis=0) <= (0.08, 0.03, 0.03))
    assert np.all(np.quantile(errors, 0.9, axis=0) <= (0.45, 0.25, 0.15))
