"""Speed in process: one prediction, and the throughput of a search. `make bench` shows them; nothing asserts a time."""

import gzip
import itertools
import json
from pathlib import Path

import perfmodel
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


def test_fit_of_a_hundred_runs(benchmark):
    """Of one framework: two models, 8 to 512 chips, as many plans as runs."""
    published = Path(__file__).parents[1] / "golden" / "published_training.jsonl.gz"
    cases = map(json.loads, gzip.decompress(published.read_bytes()).splitlines())
    runs = [case for case in cases if str(case["framework"]).startswith("nanotron") and case["tier"] == "primary"][:100]
    found = benchmark.pedantic(lambda: perfmodel.fit_runs(runs), rounds=3, iterations=1)
    assert len(found.runs) == 100
    assert found.error_left_out < found.error_before * 1.05
