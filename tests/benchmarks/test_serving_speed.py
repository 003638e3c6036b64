"""Speed in process of serving: one prediction of a served load, and searches of thousands of plans. Asserted are ratios, no time."""

import resource
import time

import pytest

from perfmodel.cost.resolve import choose_calibration
from perfmodel.cost.serving.estimate import ServingEstimator
from perfmodel.foundation.dtypes import Dtype
from perfmodel.frameworks.engine import load_engine
from perfmodel.hardware.reader import load_cluster
from perfmodel.parallel.serving_plan import ServingLayout
from perfmodel.planner.result import ServingLimits
from perfmodel.planner.serving.space import ServingSpace
from perfmodel.workload.quantization import quantization_named
from tests.planner.serving.serving_searches import searched, serving_job


@pytest.mark.parametrize("load", [{"concurrency": 64}, {"rate": 4.0}])
@pytest.mark.parametrize(("model", "quantization"), [("llama-3-70b", "fp8"), ("deepseek-v3", "fp8-block")])
def test_one_served_load(benchmark, model, quantization, load):
    """A plan of a replica on eight H200; the programs are there."""
    job = serving_job(model, quantization, **load)
    cluster = load_cluster("hgx-h200", num_chips=8)
    of = ServingEstimator(
        model=job.model,
        cluster=cluster,
        calibration=choose_calibration(cluster.chip),
        engine=load_engine("vllm"),
        quantization=quantization_named(quantization),
        cache=Dtype.BF16,
    )
    plan = ServingLayout(tp=8)
    assert benchmark(lambda: of.predict(job, plan)).tpot.mean > 0


@pytest.mark.parametrize("load", [{}, {"concurrency": 2000}, {"rate": 4.0}], ids=["any load", "clients", "rate"])
def test_search_of_ten_thousand_plans(benchmark, load):
    """Mixtral 8x7B on 16 H100: layouts, tokens of a step and loads, all timed that have room. Of a rate places are no choice."""
    job = serving_job("mixtral-8x7b", "fp8", **load)
    many = {"max_tokens": tuple(range(1024, 16385, 64))} if "rate" in load else {"batches": tuple(range(4, 164, 4))}
    space = ServingSpace(**many)
    result = benchmark.pedantic(lambda: searched(job, chips=16, space=space, limits=ServingLimits(tpot=1.0)), rounds=2, iterations=1)
    benchmark.extra_info["plans"] = result.num_evaluated
    assert result.num_evaluated > 9_000


def test_search_where_a_cache_is_kept_in_copies(benchmark):
    """DeepSeek-V3 on 64 H200: every tp with each dcp that cuts its latents."""
    job = serving_job("deepseek-v3", "fp8-block")
    words = {"cluster": "hgx-h200", "chips": 64, "limits": ServingLimits(tpot=1.0)}
    result = benchmark.pedantic(lambda: searched(job, **words), rounds=2, iterations=1)
    benchmark.extra_info["plans"] = result.num_evaluated
    assert result.num_evaluated > 30_000


def test_disaggregated_workers_cost_few_times_the_search_without(benchmark):
    """DeepSeek-V3 on 256 H200 under SGLang: 270,000 pairs of layouts with all their numbers of workers, and 14,000 plans at loads.

    Processor time, measured 2.5 times that of the search without. As an outer product of all pairs it was a hundred times, and took 3 GB.
    """
    job = serving_job("deepseek-v3", "fp8-block", input_len=4096, output_len=1024)
    words = {"cluster": "hgx-h200", "chips": 256, "engine": "sglang"}

    def seconds(**more):
        started = time.process_time()
        assert searched(job, **words, **more).num_evaluated > 10_000
        return time.process_time() - started

    alone = min(seconds() for _ in range(3))
    benchmark.pedantic(lambda: seconds(also=["baselines", "front", "disaggregated"]), rounds=3, iterations=1)
    apart = min(seconds(also=["baselines", "front", "disaggregated"]) for _ in range(2))
    benchmark.extra_info["times the search without"] = round(apart / alone, 2)
    benchmark.extra_info["peak MB of the process"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    assert apart < 8 * alone
