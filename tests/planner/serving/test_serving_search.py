"""The best plans of serving: against every plan predicted by itself, and against the limits that were given."""

from dataclasses import replace

import pytest

from perfmodel.cost.resolve import choose_calibration
from perfmodel.cost.serving.estimate import ServingEstimator
from perfmodel.cost.serving.simulated import predict_served
from perfmodel.foundation.dtypes import Dtype
from perfmodel.foundation.errors import InputError
from perfmodel.frameworks.engine import list_engines, load_engine
from perfmodel.hardware.reader import load_cluster
from perfmodel.parallel.serving_plan import ServingLayout
from perfmodel.planner.reasons import terms
from perfmodel.planner.result import LIMIT_HEADROOM, ServingLimits, ServingObjective
from perfmodel.planner.serving.space import ServingSpace, layouts
from perfmodel.workload.models import load_model
from perfmodel.workload.quantization import quantization_named
from perfmodel.workload.serving import Speculation
from tests.marks import NIGHTLY
from tests.planner.serving.serving_searches import searched, serving_job


def estimator_of(job, cluster="dgx-h100", chips=8, engine="vllm"):
    machines = load_cluster(cluster, num_chips=chips)
    return ServingEstimator(
        model=job.model,
        cluster=machines,
        calibration=choose_calibration(machines.chip),
        engine=load_engine(engine),
        quantization=job.quantization,
        cache=job.kv_precision,
    )


@pytest.mark.slow
def test_the_best_at_a_load_is_the_best_of_all_plans():
    job = serving_job(concurrency=48)
    result = searched(job, space=ServingSpace(max_tokens=()))
    of = estimator_of(job)
    alone = [of.predict(job, ServingLayout(tp=tp, pp=pp, replicas=8 // tp // pp)) for tp, pp in
             ((1, 1), (1, 2), (2, 1), (1, 4), (2, 2), (4, 1), (1, 8), (2, 4), (4, 2), (8, 1))]  # fmt: skip
    best = max(alone, key=lambda row: row.tokens_per_second_per_chip)
    assert result.best.plan == best.plan
    assert result.best.prediction == predict_served(of, job, best.plan.layout)
    assert [row.tokens_per_second_per_chip for row in result.plans] == sorted(
        (predict_served(of, job, row.plan.layout).tokens_per_second_per_chip for row in alone), reverse=True
    )
    assert result.num_feasible + sum(result.rejected.values()) == result.num_evaluated


@pytest.mark.slow
def test_the_largest_load_within_the_limits_is_found_exactly():
    job, limits = serving_job(), ServingLimits(ttft=0.3, tpot=0.02, headroom=0.0)
    result = searched(job, limits=limits)
    best, of = result.best, estimator_of(job)
    assert best.meets
    layout, clients = best.plan.layout, best.plan.job.concurrency
    assert clients == layout.max_batch * layout.replicas
    held = predict_served(of, replace(job, concurrency=clients), layout)
    assert held == best.prediction
    assert held.ttft.mean <= 0.3
    assert held.tpot.mean <= 0.02
    every = searched(job, limits=limits, space=ServingSpace(batches=tuple(range(1, 513))))
    assert every.best.prediction == best.prediction
    assert [plan.tokens_per_second_per_chip for plan in result.plans] == pytest.approx(
        [plan.tokens_per_second_per_chip for plan in every.plans], rel=0.01
    )
    for point in result.pareto:
        assert point.meets == (point.ttft <= 0.3 and point.tpot <= 0.02)


def test_the_front_goes_down():
    for words in ({}, {"concurrency": 64}):
        front = searched(serving_job(**words)).pareto
        users, chips = ([getattr(point, name) for point in front] for name in ("tokens_per_second_per_user", "tokens_per_second_per_chip"))
        assert len(front) > 5
        assert users == sorted(users, reverse=True)
        assert chips == sorted(chips)


def test_latency_wants_one_client_and_cost_what_throughput_wants():
    job = serving_job()
    quick = searched(job, objective=ServingObjective.LATENCY)
    assert quick.best.prediction.job.concurrency == quick.best.plan.layout.replicas
    assert quick.best.prediction.request_latency.mean == min(row.prediction.request_latency.mean for row in quick.plans)
    cheap = searched(job, objective=ServingObjective.COST, price_per_hour=2.0)
    per_chip = cheap.best.tokens_per_second_per_chip
    assert cheap.best.cost_per_million == pytest.approx(2.0 / 3600 / per_chip * 1e6)
    assert cheap.best.plan == searched(job).best.plan


@pytest.mark.slow
def test_limits_of_the_99th_percentile_are_narrower():
    job = serving_job(concurrency=256)
    least = min(plan.prediction.ttft.mean for plan in searched(job).plans) * 1.001
    assert searched(job, limits=ServingLimits(ttft=least, headroom=0.0)).num_feasible
    with pytest.raises(InputError, match="p99"):
        searched(job, limits=ServingLimits(ttft=least, headroom=0.0, is_p99=True))


@pytest.mark.slow
def test_a_plan_stays_below_each_limit_by_the_headroom():
    """Which is to ask for limits so much lower with none; what only just breaks it says so."""
    job = serving_job()
    for share in (LIMIT_HEADROOM, 0.1):
        result = searched(job, limits=ServingLimits(ttft=0.3, tpot=0.02, headroom=share))
        lower = searched(job, limits=ServingLimits(ttft=0.3 * (1 - share), tpot=0.02 * (1 - share), headroom=0.0))
        assert [plan.prediction for plan in result.plans] == [plan.prediction for plan in lower.plans]
        assert all(plan.prediction.tpot.mean <= 0.02 * (1 - share) for plan in result.plans)
    assert ServingLimits(ttft=0.3) == ServingLimits(ttft=0.3, headroom=LIMIT_HEADROOM)
    given = serving_job(concurrency=256)

    def lowered():
        result = searched(given)
        for _ in range(20):  # a lower limit may be met by plans that were not the best of their layout
            result = searched(given, limits=ServingLimits(ttft=min(plan.prediction.ttft.mean for plan in result.plans) * 1.001))

    with pytest.raises(InputError, match=r"with 1\.5 % of each to spare; .* set limit_headroom to 0"):
        lowered()
    with pytest.raises(InputError, match="limit_headroom=1"):
        ServingLimits(ttft=0.3, headroom=1.0)


@pytest.mark.slow
def test_what_a_plan_takes_more_adds_up():
    for objective in ServingObjective:
        result = searched(serving_job(concurrency=64), objective=objective)
        for plan in result.plans[:3]:
            total = sum(terms(plan, objective).values())
            wanted = plan.prediction.request_latency.mean if objective is ServingObjective.LATENCY else 1 / plan.tokens_per_second_per_chip
            assert total == pytest.approx(wanted)
        assert result.best.reason == ""
        assert "instead of" in result.plans[-1].reason


def test_baselines_are_no_better_than_the_best():
    result = searched(serving_job("mixtral-8x7b"))
    names = [baseline.name for baseline in result.baselines]
    assert names == ["tp over a node", "smallest tp that fits", "engine's default", "attention dp with ep"]
    for baseline in result.baselines:
        for plan in baseline.plans:
            assert plan.tokens_per_second_per_chip <= result.best.tokens_per_second_per_chip
    assert next(baseline for baseline in result.baselines if baseline.name == "engine's default").reason == "does not fit on one chip"


@pytest.mark.parametrize("load", [{"rate": 8.0}, {"concurrency": 16}])
def test_other_tokens_of_a_step_are_chosen_only_where_the_simulation_gains(load):
    job = serving_job(input_len=1024, **load)
    result = searched(job, chips=1, top=1)
    usual = next(baseline for baseline in result.baselines if baseline.name == "engine's default").plans[0]
    assert result.best.prediction.request_latency.mean <= usual.prediction.request_latency.mean


@pytest.mark.parametrize(
    ("model", "engine", "tp", "degrees"),
    [
        ("deepseek-v3", "vllm", 8, {1, 2, 4, 8}),
        ("llama-3-70b", "vllm", 16, {1, 2}),
        ("llama-3-70b", "vllm", 8, {1}),
        ("gpt-oss-120b", "vllm", 16, {1}),
        ("deepseek-v3", "sglang", 8, {1}),
    ],
)
def test_dcp_is_every_divisor_of_the_copies_where_the_engine_cuts_them(model, engine, tp, degrees):
    cluster = load_cluster("hgx-h200", num_chips=16)
    columns = layouts(load_model(model), cluster, load_engine(engine), ServingSpace()).columns
    assert set(columns.dcp[columns.tp == tp]) == degrees
    assert set(columns.dcp[columns.tp == 1]) == {1}
    held = layouts(load_model(model), cluster, load_engine(engine), ServingSpace(fixed={"dcp": 2})).columns
    assert set(held.dcp[held.tp == tp]) == degrees & {2}


@pytest.mark.slow
def test_prompts_are_shared_where_it_is_asked_or_the_version_has_it():
    job = serving_job("deepseek-v3", "fp8-block", input_len=65536, output_len=256)
    words = {"cluster": "hgx-h200", "chips": 16, "limits": ServingLimits(ttft=12.0)}
    plain = searched(job, **words)
    assert {plan.plan.layout.pcp for plan in plain.plans} == {1}
    asked = searched(job, space=ServingSpace(fixed={"pcp": 2}), **words)
    assert {plan.plan.layout.pcp for plan in asked.plans} == {2}
    assert all(plan.plan.layout.dcp in (1, 2, 2 * plan.plan.layout.tp) for plan in asked.plans)
    every = searched(job, engine=load_engine("vllm").having(prefill_context_since=""), **words)
    assert every.best.tokens_per_second_per_chip >= max(search.best.tokens_per_second_per_chip for search in (plain, asked))
    assert every.num_evaluated > plain.num_evaluated
    with pytest.raises(InputError, match=r"no layout of deepseek-v3 .* sglang \S.* has no prefill context parallelism"):
        searched(job, engine="sglang", space=ServingSpace(fixed={"pcp": 2}), **words)


@pytest.mark.slow
def test_a_cache_in_copies_is_cut_where_it_holds_more_requests():
    """For long requests the search is as good as the best one with a given dcp, and better than without."""
    job = serving_job("deepseek-v3", "fp8-block", input_len=16384, output_len=1024)
    words = {"cluster": "hgx-h200", "chips": 8, "limits": ServingLimits(tpot=0.05)}
    result = searched(job, **words)
    alone = {dcp: searched(job, space=ServingSpace(fixed={"dcp": dcp}), **words).best for dcp in (1, 2, 4, 8)}
    best = max(alone.values(), key=lambda row: row.tokens_per_second_per_chip)
    assert result.best.plan == best.plan
    assert result.best.prediction == best.prediction
    assert best.tokens_per_second_per_chip > 1.02 * alone[1].tokens_per_second_per_chip
    without = next(plan for plan in result.plans if plan.plan.layout.dcp == 1 and plan.plan.layout.tp == best.plan.layout.tp)
    assert "attention" in without.reason


def test_where_dcp_changes_nothing_there_is_none():
    """An answer of one token is never decoded, by an engine that does not wait for a step before it."""
    job, engine = serving_job("llama-3-70b", "fp8", output_len=1, concurrency=1), load_engine("vllm").having(border_steps=0.0)
    space = ServingSpace(fixed={"tp": 16})
    plans = searched(job, chips=16, engine=engine, space=space, objective=ServingObjective.LATENCY).plans
    assert [plan.plan.layout.dcp for plan in plans] == [1, 2]
    assert plans[0].prediction.request_latency.mean == pytest.approx(plans[1].prediction.request_latency.mean, rel=0.05)


def test_formats_are_searched_where_they_are_allowed():
    formats = ((quantization_named("bf16"), Dtype.BF16), (quantization_named("fp8"), Dtype.FP8), (quantization_named("nvfp4"), Dtype.FP8))
    result = searched(serving_job(), space=ServingSpace(formats=formats))
    assert result.best.prediction.job.quantization.name == "fp8"
    assert result.best.prediction.job.kv_precision is Dtype.FP8
    assert result.left_out["h100-sxm-80gb has no units for the format"] == 1


def test_a_search_without_a_possible_plan_is_refused_in_one_sentence():
    with pytest.raises(InputError, match=r"the nearest, tp 8 with 1 request in flight, has ttft .* and tpot"):
        searched(serving_job(), limits=ServingLimits(ttft=1e-3, tpot=1e-3))
    with pytest.raises(InputError, match=r"no plan of llama-3.1-405b fits \(weights take"):
        searched(serving_job("llama-3.1-405b"))
    with pytest.raises(InputError, match="answers at most"):
        searched(serving_job(rate=1e5))
    with pytest.raises(InputError, match="no layout"):
        searched(serving_job(), space=ServingSpace(fixed={"tp": 5}))
    with pytest.raises(InputError, match="not in the space"):
        ServingSpace(fixed={"tensor": 5})
    with pytest.raises(InputError, match="price_per_hour"):
        searched(serving_job(), objective=ServingObjective.COST, price_per_hour=0.0)


@pytest.mark.parametrize("words", [{"output_len": 1}, {"speculation": Speculation(draft_tokens=2, acceptance=0.7)}])
@pytest.mark.filterwarnings("error")
@pytest.mark.slow
def test_steps_without_a_row_warn_of_nothing(words):
    """Answers of one token, and drafts with a prompt, have no decode step at all."""
    job = serving_job("deepseek-v2-lite", "fp8", concurrency=32, **words)
    for engine in ("deepspeed-mii", "sglang"):
        assert searched(job, engine=engine).best.prediction.ttft.mean > 0


@pytest.mark.parametrize("engine", list_engines())
def test_every_engine_has_memory_for_a_small_model(engine):
    assert searched(serving_job(concurrency=1), engine=engine, chips=1).best.prediction.fits


@pytest.mark.parametrize("load", [{}, pytest.param({"rate": 4.0}, marks=NIGHTLY)], ids=["any load", "rate"])
@pytest.mark.slow
def test_rows_that_are_timed_in_blocks_are_those_of_one_block(monkeypatch, load):
    job = serving_job("mixtral-8x7b", "fp8", **load)
    words = {"space": ServingSpace(batches=(1, 16), max_tokens=(2048,)), "limits": ServingLimits(tpot=0.1)}
    unblocked = searched(job, **words)
    monkeypatch.setattr("perfmodel.planner.serving.evaluate._BLOCK", 7)
    parts = searched(job, **words)
    assert parts.plans == unblocked.plans
    assert (parts.pareto, parts.baselines, parts.rejected) == (unblocked.pareto, unblocked.baselines, unblocked.rejected)
