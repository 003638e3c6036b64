"""Speed in process: one prediction, and the throughput of a search. `make bench` shows them; nothing asserts a time."""

import gzip
import itertools
import json
import time
from pathlib import Path

import pytest

import perfmodel
from perfmodel.planner import beyond
from perfmodel.planner.search import sweep
from perfmodel.planner.uniform.space import Space
from tests.benchmarks.jobs import gpt3_estimator, three_d_plans


def test_one_prediction(benchmark):
    """GPT-3 175B, a 3-D plan not seen before; graph, cluster and programs are there."""
    estimator = gpt3_estimator(num_chips=1024)
    plans = three_d_plans(estimator)
    warm = {(plan.rule_set, plan.attention, plan.zero, plan.layout.pp > 1): plan for plan in plans}
    for plan in warm.values():
        estimator.predict(plan)
    unseen = itertools.cycle(plan for plan in plans if plan not in warm.values())
    prediction = benchmark.pedantic(lambda plan: estimator.predict(plan), setup=lambda: ((next(unseen),), {}), rounds=200, iterations=1)
    assert prediction.step_time > 0


def test_search(benchmark):
    """The whole written space of GPT-3 175B, global batch 1536, on 4096 H100."""
    estimator = gpt3_estimator()
    state = benchmark.pedantic(lambda: sweep(estimator, Space(), top=10), rounds=5, iterations=1)
    benchmark.extra_info["plans"] = state.num_evaluated
    benchmark.extra_info["plans_per_second"] = state.num_evaluated / benchmark.stats.stats.median
    assert state.num_evaluated > 1_000_000


@pytest.mark.parametrize(
    ("profile", "chips", "global_batch"),
    [("torchtitan", 8, 64), ("megatron", 512, 1024)],
    ids=["torchtitan, 8 chips", "megatron, 512 chips"],
)
def test_what_a_framework_cannot_run_costs_little_of_a_search(benchmark, monkeypatch, profile, chips, global_batch):
    """Llama 3.1 8B: a search with the line of `--any-framework`, over one without: measured 1.06 to 1.11."""
    words = {"model": "llama-3.1-8b", "cluster": "dgx-h100", "seq_len": 8192}
    words |= {"profile": profile, "chips": chips, "global_batch": global_batch}
    whole = beyond.beyond_framework

    def seconds(of):
        monkeypatch.setattr(beyond, "beyond_framework", of)
        started = time.process_time()
        assert perfmodel.find_plans(**words).plans
        return time.process_time() - started

    def nothing(*_, **__):
        return ()

    pairs = [(seconds(whole), seconds(nothing)) for _ in range(5)][1:]
    benchmark.pedantic(lambda: seconds(whole), rounds=2, iterations=1)
    ratio = min(one for one, _ in pairs) / min(other for _, other in pairs)
    benchmark.extra_info["times the search without"] = round(ratio, 3)
    assert ratio < 1.2


def test_fit_of_a_hundred_runs(benchmark):
    """Of one framework: two models, 8 to 512 chips, as many plans as runs."""
    published = Path(__file__).parents[1] / "golden" / "published_training.jsonl.gz"
    cases = map(json.loads, gzip.decompress(published.read_bytes()).splitlines())
    runs = [case for case in cases if str(case["framework"]).startswith("nanotron") and case["tier"] == "primary"][:100]
    found = benchmark.pedantic(lambda: perfmodel.fit_runs(runs), rounds=3, iterations=1)
    assert len(found.runs) == 100
    assert found.error_left_out < found.error_before * 1.05
