"""A search returns the result of predicting every plan of the space one by one."""

from dataclasses import replace

import pytest

from perfmodel.foundation.memory_headroom import DEFAULT_HEADROOM, Verdict
from perfmodel.frameworks.profile import load_profile
from perfmodel.planner.result import TIGHT
from perfmodel.planner.uniform.space import Space
from perfmodel.planner.uniform.sweep import OUT_OF_MEMORY
from perfmodel.workload.job import Precision
from tests.cost.jobs import CHIP, LLAMA_LIKE, estimator_of, make_job, make_model, sweep_all
from tests.marks import mostly_nightly
from tests.planner.searches import search_plans

ACCUMULATING = "generic+fp32_gradient_accumulation"
JOB = make_job(make_model(num_hidden_layers=4, vocab_size=30000), batch=4)


def with_capacity(capacity):
    return replace(CHIP, memory=replace(CHIP.memory, capacity=capacity))


def all_predictions(estimator, space=None):
    """Every plan of the space by itself, in the order of enumeration; what the space contains is settled by tests/oracles."""
    state = sweep_all(estimator, space)
    return [estimator.predict(state.plan(i)) for i in sorted(state.best.time.ids.tolist())]


def front(predictions):
    """(time, memory) of every plan that no other one beats in one without losing in the other."""
    points = {(p.step_time, p.memory["total"]) for p in predictions if p.fits}
    return sorted(
        (t, m) for t, m in points if not any(t2 <= t and m2 <= m and (t2, m2) != (t, m) for t2, m2 in points)
    )  # fmt: skip


@pytest.fixture(scope="module", params=mostly_nightly(["megatron", "torch-fsdp2", "nanotron", ACCUMULATING], ["torch-fsdp2", ACCUMULATING]))
def half_fits(request):
    """An estimator whose chip holds half of all plans, and all of them predicted."""
    needed = sweep_all(estimator_of(JOB, chips=4, node=2, profile=request.param)).best.memory.values
    capacity = float(needed[len(needed) // 2]) / (1 - DEFAULT_HEADROOM)
    estimator = estimator_of(JOB, chips=4, node=2, profile=request.param, chip=with_capacity(capacity * (1 + 1e-9)))
    return estimator, all_predictions(estimator)


@pytest.mark.slow
def test_counts(half_fits):
    estimator, everything = half_fits
    result = search_plans(estimator, also=("front",))
    feasible = sum(p.fits for p in everything)
    assert 0 < feasible < len(everything)
    assert (result.num_evaluated, result.num_feasible) == (len(everything), feasible)
    assert sum(result.rejected.values()) == len(everything) - feasible
    assert result.num_tight == result.rejected.get(TIGHT, 0) == sum(p.verdict is Verdict.TIGHT for p in everything)


def test_the_best_by_time(half_fits):
    estimator, everything = half_fits
    result = search_plans(estimator, top=10, also=("front",))
    times = sorted({(p.step_time, replace(p.plan, order=Space().orders[0])) for p in everything if p.fits}, key=lambda pair: pair[0])
    assert [p.step_time for p in result.plans] == [time for time, _ in times[:10]]
    assert all(p.fits and p in everything for p in result.plans)
    assert len({(replace(p.plan, order=Space().orders[0]), p.step_time) for p in result.plans}) == 10


def test_the_best_by_memory(half_fits):
    estimator, everything = half_fits
    result = search_plans(estimator, objective="memory", top=1, also=("front",))
    least = min(everything, key=lambda p: p.memory["total"])
    assert result.plans[0].memory["total"] == least.memory["total"]
    assert result.least_memory[0] == least


def test_chips_times_time_ranks_as_time(half_fits):
    estimator, _ = half_fits
    by_time, by_both = (search_plans(estimator, objective=o, top=5, also=("front",)).plans for o in ("time", "chip-time"))
    assert by_time == by_both


def test_the_front(half_fits):
    estimator, everything = half_fits
    result = search_plans(estimator, also=("front",))
    assert [(p.step_time, p.memory["total"]) for p in result.pareto] == front(everything)
    assert len(result.pareto) > 2


@pytest.mark.parametrize("headroom", [0.1, 0.5])
def test_headroom_is_less_memory(half_fits, headroom):
    estimator, everything = half_fits
    capacity = estimator.machine.memory.usable * (1 - headroom)
    result = search_plans(estimator, memory_headroom=headroom, also=("front",))
    assert result.num_feasible == sum(p.memory["total"] <= capacity for p in everything)
    assert all(p.fits and p.memory["total"] <= capacity for p in result.plans)


@pytest.mark.parametrize("risk", [0.4, 0.01])
def test_a_risk_is_the_probability_of_not_fitting(half_fits, risk):
    estimator, everything = half_fits
    result = search_plans(estimator, risk=risk, also=("front",))
    usable = estimator.machine.memory.usable
    assert result.num_feasible == sum(p.fits_probability >= 1 - risk and p.memory["total"] <= usable for p in everything)
    assert all(p.fits and p.fits_probability >= 1 - risk for p in result.plans)
    times = [entry.prediction[0].step_time for entry in result.certainty if entry.prediction]
    assert times == sorted(times)
    assert all(p.fits_probability >= 1 - entry.risk for entry in result.certainty for p in entry.prediction)


def test_what_is_rejected_for_weights_alone():
    """Where even the shards of weights and states are too large, no plan is rejected for its activations."""
    result = search_plans(estimator_of(JOB, chips=4, chip=with_capacity(1e6)), also=("front",))
    assert result.num_feasible == 0
    assert result.plans == result.pareto == ()
    assert list(result.rejected.values()) == [result.num_evaluated]
    assert next(iter(result.rejected)).endswith("alone exceed the memory")


@pytest.mark.slow
def test_weights_alone_are_without_what_the_framework_needs():
    """A chip that holds weights, gradients and states of every plan, but not the framework's memory in addition."""
    profile = load_profile("generic").having(framework_bytes=6e9)
    estimator = estimator_of(JOB, chips=4, profile=profile)
    states = max(sum(p.memory[name] for name in ("weights", "gradients", "optimizer")) for p in all_predictions(estimator))
    result = search_plans(estimator_of(JOB, chips=4, profile=profile, chip=with_capacity(states * 1.01)), also=("front",))
    assert estimator.profile.allocator.framework_bytes > states
    assert list(result.rejected) == [OUT_OF_MEMORY]


@pytest.mark.slow
def test_the_least_memory_is_reported_where_nothing_fits():
    result = search_plans(estimator_of(JOB, chips=4, chip=with_capacity(1e6)), also=("front",))
    (least,) = result.least_memory
    assert not least.fits
    assert least.memory["total"] == min(p.memory["total"] for p in all_predictions(estimator_of(JOB, chips=4)))


@pytest.mark.slow
def test_more_memory_admits_more_plans_and_never_a_slower_best():
    best, feasible = float("inf"), 0
    for capacity in (0.2e9, 0.4e9, 0.8e9, 2e9, 1e12):
        result = search_plans(estimator_of(JOB, chips=4, chip=with_capacity(capacity)), top=1, also=("front",))
        assert result.num_feasible >= feasible
        feasible = result.num_feasible
        if result.plans:
            assert result.plans[0].step_time <= best
            best = result.plans[0].step_time
    assert feasible == result.num_evaluated


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
@pytest.mark.slow
def test_other_models(precision):
    job = make_job(make_model(**LLAMA_LIKE | {"num_hidden_layers": 6}), batch=6, seq_len=128, precision=precision)
    estimator = estimator_of(job, chips=6, node=2, profile="torch-gloo")
    everything = all_predictions(estimator)
    result = search_plans(estimator, also=("front",))
    assert result.plans[0].step_time == min(p.step_time for p in everything)
    assert [(p.step_time, p.memory["total"]) for p in result.pareto] == front(everything)
