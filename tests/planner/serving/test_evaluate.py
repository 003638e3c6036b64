"""The plan that a search chooses keeps its limits in simulation, which is the basis of `serve`."""

from dataclasses import replace

import numpy as np
import pytest

from perfmodel.cost.serving.simulated import predict_served, with_simulation
from perfmodel.foundation.errors import InputError
from perfmodel.frameworks.engine import load_engine
from perfmodel.planner.result import ServingLimits
from perfmodel.planner.serving import evaluate
from perfmodel.workload.serving import Lengths
from tests.marks import mostly_nightly
from tests.planner.serving.serving_searches import searched, serving_job
from tests.planner.serving.test_serving_search import estimator_of

MODELS = {"llama-3-8b": "bf16", "llama-3-70b": "fp8", "qwen3-30b-a3b": "bf16"}


def drawn(random, at_rate=False):
    """A random job with limits, on a few chips under a random engine; at_rate: requests at random, not clients."""
    model = str(random.choice(list(MODELS)))
    prompt, answer = int(2 ** random.uniform(6, 13)), int(2 ** random.uniform(4, 10.5))
    least = random.choice([0.5, 0.8, 1.0])
    load = {"concurrency": int(2 ** random.uniform(2, 8))} if random.random() < 0.5 else {}
    if at_rate:
        load = {"rate": float(2 ** random.uniform(-1, 6))}
    job = serving_job(model, MODELS[model], **load)
    lengths = (Lengths(least=max(int(least * size), 1), most=size) for size in (prompt, answer))
    job = replace(job, **dict(zip(("input_len", "output_len"), lengths, strict=True)))
    limits = ServingLimits(ttft=float(10 ** random.uniform(-0.8, 0.8)), tpot=float(10 ** random.uniform(-2, -1)))
    return job, limits, str(random.choice(["vllm", "sglang", "tensorrt-llm"]))


def kept_shares(jobs, seed, at_rate=False):
    """Return whether the best plan of each search that finds one keeps the limits in a simulation of other draws."""
    random, kept = np.random.default_rng(seed), []
    while len(kept) < jobs:
        job, limits, engine = drawn(random, at_rate)
        try:
            best = searched(job, engine=engine, limits=limits, top=1, also=["disaggregated"] if at_rate and len(kept) % 2 == 0 else []).best
        except InputError:
            continue
        of = replace(estimator_of(job, engine=engine), engine=load_engine(engine))
        printed = predict_served(of, best.plan.job, best.plan.layout)
        assert printed == best.prediction
        other = with_simulation(of, printed, seed=17)
        kept.append(all(limits.seen(other)[name] <= limit for name, limit in limits.given().items()))
    return np.mean(kept)


@pytest.mark.slow
def test_chosen_plans_keep_their_limits_in_the_simulation():
    assert kept_shares(6, seed=1) >= 5 / 6


@pytest.mark.slow
def test_plans_that_are_chosen_for_a_rate_keep_their_limits_in_the_simulation():
    assert kept_shares(4, seed=3, at_rate=True) >= 3 / 4


@pytest.mark.slow
@pytest.mark.nightly
def test_95_percent_of_plans_that_are_chosen_for_a_rate_keep_their_limits_in_a_simulation_of_other_draws():
    assert kept_shares(20, seed=4, at_rate=True) >= 0.95


@pytest.mark.slow
@pytest.mark.parametrize("jobs", mostly_nightly([10, 20, 100], [10]))
def test_95_percent_of_chosen_plans_keep_their_limits_in_a_simulation_of_other_draws(jobs):
    assert kept_shares(jobs, seed=2) >= 0.95


def test_a_plan_that_only_the_formulas_let_pass_is_not_chosen():
    """Prompts of short answers wait for one another, so that the first token takes ten times a prompt."""
    job = serving_job(input_len=4096, output_len=8)
    limits = ServingLimits(ttft=1.0)
    result = searched(job, limits=limits)
    assert all(plan.prediction.ttft.mean <= 1.0 and plan.prediction.ttft.p50 is not None for plan in result.plans)
    with pytest.raises(InputError, match="no plan"):
        searched(replace(job, concurrency=512), chips=1, limits=limits)


def test_no_plan_is_simulated_twice_under_one_load(monkeypatch):
    """Not for the baselines either, which are plans of the search."""
    asked = []

    def counted(estimator, job, layout):
        asked.append((layout, job.concurrency))
        return predict_served(estimator, job, layout)

    monkeypatch.setattr(evaluate, "predict_served", counted)
    job, limits = serving_job("llama-3-8b", rate=20.0), ServingLimits(ttft=0.5, tpot=0.02)
    result = searched(job, chips=2, limits=limits)
    assert {row.plan for row in result.plans} & {baseline.plans[0].plan for baseline in result.baselines if baseline.plans}
    assert len(set(asked)) == len(asked)
    asked.clear()
    assert not searched(job, chips=2, limits=limits, also=(), top=1).baselines
    assert len(asked) == 1
