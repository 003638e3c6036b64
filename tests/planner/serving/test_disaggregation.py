"""Searches for workers of prompts and of answers."""

from dataclasses import replace

import numpy as np
import pytest

from perfmodel.cost.resolve import choose_calibration
from perfmodel.cost.serving.disaggregated import largest_batch, predict_pools, serve_pools
from perfmodel.cost.serving.estimate import ServingEstimator
from perfmodel.foundation.errors import InputError
from perfmodel.frameworks.engine import load_engine
from perfmodel.hardware.reader import load_cluster
from perfmodel.parallel.serving_plan import Pools, ServingLayout
from perfmodel.planner.result import ServingLimits, ServingObjective
from perfmodel.planner.serving.disaggregation import MOST_SPLITS, _highest_rates, _workers, find_pools
from perfmodel.planner.serving.evaluate import Chosen, Evaluator
from perfmodel.planner.serving.space import ServingSpace, layouts
from tests.planner.serving.serving_searches import searched, serving_job

LIMITS = ServingLimits(ttft=1.0, tpot=0.025, headroom=0.0)
CHIPS = 16


def estimator_of(job, chips=CHIPS):
    cluster = load_cluster("dgx-h100", num_chips=chips)
    return ServingEstimator(
        model=job.model,
        cluster=cluster,
        calibration=choose_calibration(cluster.chip),
        engine=load_engine("vllm"),
        quantization=job.quantization,
        cache=job.kv_precision,
    )


class ByFormulas(Chosen):
    """Plans without a simulation, as brute force predicts them."""

    simulates = False


def found_pools(job, *, limits=LIMITS, space=None, objective=ServingObjective.THROUGHPUT, of=None, **words):
    of = of or estimator_of(job)
    columns = layouts(job.model, of.cluster, of.engine, space or ServingSpace()).columns
    evaluator = Evaluator(job=job, estimators=(of,), limits=limits, num_chips=of.cluster.num_chips)
    return of, find_pools(ByFormulas(evaluator=evaluator, objective=objective, price=0.0), columns, columns, **words)


@pytest.fixture(scope="module")
def long_prompts():
    job = serving_job("llama-3-70b", input_len=4096, output_len=256)
    return job, *found_pools(job)


def test_what_is_found_fits_and_holds_the_limits(long_prompts):
    _, _, plans = long_prompts
    assert plans
    for one in plans:
        assert one.prediction.fits
        assert one.prediction.ttft.mean <= LIMITS.ttft
        assert one.prediction.tpot.mean <= LIMITS.tpot
        assert one.plan.num_chips + one.idle_chips == CHIPS
    rates = [one.tokens_per_second_per_chip for one in plans]
    assert rates == sorted(rates, reverse=True)
    assert not plans[0].reason
    assert all("fewer tokens" in one.reason for one in plans[1:])


@pytest.mark.slow
def test_workers_of_their_own_win_where_prompts_are_long_and_lose_where_answers_are(long_prompts):
    job, _, plans = long_prompts
    together = searched(job, chips=CHIPS, limits=LIMITS).best
    assert plans[0].tokens_per_second_per_chip > together.tokens_per_second_per_chip
    answers = serving_job("llama-3-70b", input_len=64, output_len=2048)
    apart = found_pools(answers)[1][0]
    assert apart.tokens_per_second_per_chip < searched(answers, chips=CHIPS, limits=LIMITS).best.tokens_per_second_per_chip


@pytest.mark.slow
def test_no_split_of_two_layouts_tried_by_brute_force_is_better(long_prompts):
    job, of, _ = long_prompts
    space = ServingSpace(fixed={"tp": 4, "pp": 1})
    best_pools = found_pools(job, space=space)[1][0]
    worker = ServingLayout(tp=4)
    best = 0.0
    for x, y in ((1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (3, 1)):
        clients = np.arange(1, 200)
        pools = Pools(prefill=worker, decode=worker, prefill_workers=x, decode_workers=y)
        load = serve_pools(of, job, [pools] * len(clients), concurrency=clients)[0].load
        holds = (load.ttft <= LIMITS.ttft) & (load.tpot <= LIMITS.tpot)
        best = max(best, float(np.where(holds, load.tokens_per_second, 0.0).max()) / CHIPS)
    assert best_pools.tokens_per_second_per_chip >= 0.98 * best


def test_a_load_that_is_given_is_the_load(long_prompts):
    job, _, _ = long_prompts
    for load in (dict(concurrency=20), dict(rate=2.0)):
        asked = replace(job, **load)
        of, plans = found_pools(asked, objective=ServingObjective.LATENCY, top=1)
        assert plans[0].prediction.job == asked
        again = predict_pools(of, asked, plans[0].plan.layout)
        assert again.request_latency.mean == pytest.approx(plans[0].prediction.request_latency.mean)


def test_limits_that_no_plan_meets_find_nothing(long_prompts):
    assert found_pools(long_prompts[0], limits=ServingLimits(ttft=1e-3))[1] == ()
    without = found_pools(long_prompts[0], limits=ServingLimits(), top=1)[1][0]
    assert without.tokens_per_second_per_chip > long_prompts[2][0].tokens_per_second_per_chip


@pytest.mark.slow
def test_where_no_other_plan_meets_the_limits_disaggregation_is_named():
    """At a rate whose prompts stall every answer; what is named meets the limits by itself, and asked for it is what is found."""
    job = serving_job("llama-3-70b", "bf16", input_len=4096, output_len=256, rate=4.0)
    limits = ServingLimits(ttft=1.0, tpot=0.016)
    with pytest.raises(InputError, match=r"add --disaggregated \(prefill .* has ttft ") as refusal:
        searched(job, chips=CHIPS, limits=limits)
    result = searched(job, chips=CHIPS, limits=limits, also=("front", "disaggregated"))
    assert result.num_feasible == 0
    assert result.plans == result.disaggregated
    assert result.best.plan.label() in str(refusal.value)
    alone = predict_pools(estimator_of(job), job, result.best.plan.layout)
    assert alone.ttft.mean <= limits.ttft
    assert alone.tpot.mean <= limits.tpot
    assert limits.seen(alone) == {"ttft": alone.ttft.mean, "tpot": alone.tpot.mean, "request_latency": alone.request_latency.mean}
    with pytest.raises(InputError, match="does not meet them either"):
        searched(job, chips=CHIPS, limits=ServingLimits(ttft=1e-3))


@pytest.mark.slow
def test_the_front_is_one_of_both_kinds_of_plans():
    """No point of it is worse than another, and the points of two pools are their plans predicted alone."""
    job = serving_job("llama-3-70b", "fp8", input_len=4096, output_len=256)
    result = searched(job, chips=CHIPS, also=("front", "disaggregated"), limits=ServingLimits(ttft=5.0))
    users, chips = (
        [getattr(point, name) for point in result.pareto] for name in ("tokens_per_second_per_user", "tokens_per_second_per_chip")
    )
    assert users == sorted(users, reverse=True)
    assert chips == sorted(chips)
    alone = searched(job, chips=CHIPS, limits=ServingLimits(ttft=5.0)).pareto
    apart = [point for point in result.pareto if isinstance(point.layout, Pools)]
    assert apart
    assert {point.layout for point in result.pareto} - {point.layout for point in apart} <= {point.layout for point in alone}
    point = apart[len(apart) // 2]
    one = predict_pools(estimator_of(job), replace(job, concurrency=point.concurrency), point.layout)
    assert (one.ttft.mean, one.tpot.mean) == (point.ttft, point.tpot)


def test_only_workers_that_answer_share_a_cache():
    job = serving_job("deepseek-v3", "fp8-block", input_len=4096, output_len=256)
    cluster = load_cluster("hgx-h200", num_chips=32)
    of = replace(estimator_of(job), cluster=cluster, calibration=choose_calibration(cluster.chip))
    _, plans = found_pools(job, limits=ServingLimits(), space=ServingSpace(fixed={"dcp": 2}), of=of)
    assert plans
    assert {(one.plan.pools.prefill.dcp, one.plan.pools.decode.dcp) for one in plans} == {(1, 2)}


@pytest.mark.slow
def test_only_workers_for_prompts_share_them():
    job = serving_job("deepseek-v3", "fp8-block", input_len=32768, output_len=256)
    words = {"cluster": "hgx-h200", "chips": 32, "limits": ServingLimits(ttft=20.0), "also": ("front", "disaggregated")}
    result = searched(job, space=ServingSpace(fixed={"pcp": 4}), **words)
    assert {plan.plan.layout.pcp for plan in result.plans} == {4}
    assert result.disaggregated
    assert {(one.plan.pools.prefill.pcp, one.plan.pools.decode.pcp) for one in result.disaggregated} == {(4, 1)}


def every_split(most_p, most_d, chips_p, chips_d, num_chips):
    """All (x, p, y, d, rate) above 0 in their order, from the product of all counts and both kinds of workers."""
    splits = []
    for x, p, d in np.ndindex(num_chips, len(most_p), len(most_d)):
        used = (x + 1) * chips_p[p]
        y = max((num_chips - used) // chips_d[d], 0)
        rate = min((x + 1) * most_p[p], y * most_d[d])
        if rate > 0:
            splits.append((-rate, used + y * chips_d[d], x + 1, p, y, d))
    return [(x, p, y, d, -worse) for worse, _, x, p, y, d in sorted(splits, key=lambda split: (*split[:4], split[5]))]


@pytest.mark.parametrize("num_chips", [2, 7, 16, 40])
@pytest.mark.parametrize("alike", [1, 3, 1000], ids=["all alike", "many ties", "few ties"])
def test_the_splits_with_the_highest_rates_are_those_of_all_pairs(num_chips, alike):
    """Ties, workers that do nothing and workers that leave no room included."""
    draw = np.random.default_rng(num_chips * alike)
    kinds = [(draw.integers(0, alike, size=size) + (alike == 1), draw.integers(1, num_chips, size=size)) for size in (9, 11)]
    (most_p, chips_p), (most_d, chips_d) = ((most.astype(float), chips.astype(float)) for most, chips in kinds)
    every = every_split(most_p, most_d, chips_p, chips_d, num_chips)
    assert list(_highest_rates(most_p, most_d, chips_p, chips_d, num_chips)) == every[:MOST_SPLITS]
    assert not list(_highest_rates(0 * most_p, most_d, chips_p, chips_d, num_chips))


def test_the_largest_batches_under_many_limits_are_those_under_each():
    job = serving_job("llama-3-70b", "bf16", input_len=4096, output_len=256)
    of = estimator_of(job)
    columns = layouts(job.model, of.cluster, of.engine, ServingSpace()).columns
    workers = _workers(of, job, columns, columns, CHIPS)
    limits = np.array([1e-3, 0.02, 0.03, 0.05, np.inf])
    _, batches = workers._answers(limits)
    steps = workers._steps(workers.decode)
    alone = [largest_batch(*steps, tpot_limit=limit, capacity=workers.capacity) for limit in limits]
    assert np.array_equal(batches, alone)
    assert not batches[0].any()
    assert len(np.unique(batches)) > 10
