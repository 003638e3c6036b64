"""Shortcuts of a sweep do not change its result."""

from dataclasses import replace

import numpy as np
import pytest

from perfmodel.frameworks.runnable import not_runnable_reason
from perfmodel.planner.uniform import chunks, tables
from perfmodel.planner.uniform import space as uniform_space
from perfmodel.planner.uniform import sweep as uniform_sweep
from perfmodel.planner.uniform.quickest import best_plan
from perfmodel.planner.uniform.space import Space, runnable_space, unlimited_space
from perfmodel.planner.uniform.sweep import sweep
from perfmodel.workload.layer_specs import Experts
from perfmodel.workload.models import load_model
from perfmodel.workload.training import training_of
from tests.cost.jobs import CHIP, LLAMA_LIKE, estimator_of, make_job, make_model
from tests.marks import mostly_nightly

DENSE = make_job(make_model(num_hidden_layers=2), batch=8)
JOBS = {
    "experts": make_job(make_model(**LLAMA_LIKE, num_hidden_layers=2, experts=Experts(num_experts=8, top_k=4, width=256))),
    "a frozen base": replace(DENSE, train=training_of("qlora:4")),
}


def swept(job, **changes):
    """Counts, and the best by each criterion, to the bit."""
    state = sweep(estimator_of(job), Space(), top=1, **changes)
    kept = (state.best.time, state.best.memory, state.best.least)
    best = [(rows.values.tolist(), rows.ids.tolist(), rows.companions.tolist()) for rows in kept]
    front = [x.tolist() for x in (state.best.front.first, state.best.front.second, state.best.front.ids)]
    return state.counts, best, front


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.slow
def test_tables_are_the_same_in_pieces(job, monkeypatch):
    unsplit = swept(JOBS[job])
    monkeypatch.setattr(tables, "TABLE_COLUMNS", 50)
    assert swept(JOBS[job]) == unsplit


def test_what_need_not_be_timed_would_not_be_kept(monkeypatch):
    model = make_model(**LLAMA_LIKE | {"hidden_size": 1024, "intermediate_size": 4096}, num_hidden_layers=4)
    job = make_job(model, batch=64, seq_len=4096)
    skipped = []

    def counting(state, bounds, memory):
        skipped.append(np.count_nonzero((memory < np.inf) & ~worth_timing(state, bounds, memory)))
        return memory < np.inf

    worth_timing = chunks._worth_timing
    pruned = swept(job)
    monkeypatch.setattr(chunks, "_worth_timing", counting)
    assert swept(job) == pruned
    assert sum(skipped) > 0


@pytest.mark.parametrize("usable", [24e9, 6e9, 1e9])
def test_layouts_too_large_by_their_state_are_counted_as_if_they_were_evaluated(usable, monkeypatch):
    """Counts, best plans and least memory are those of an exhaustive sweep, on a chip whose memory holds most plans, some, or none."""
    estimator = estimator_of(
        make_job(load_model("gpt2-xl"), batch=16, seq_len=1024),
        chips=16,
        node=8,
        chip=replace(CHIP, memory=replace(CHIP.memory, capacity=usable)),
    )
    space = Space(orders=Space().orders[:1])
    evaluated = []

    def searched():
        evaluated.append(0)
        state = sweep(estimator, space, top=5)
        kept = (state.best.time, state.best.memory, state.best.least)
        plans = [[state.plan(int(i)) for i in best.ids] for best in kept]
        front = state.best.front
        return state.counts, [best.values.tolist() for best in kept], plans, front.first.tolist(), front.second.tolist()

    def counting(*arguments):
        memory, fits = plan_memory(*arguments)
        evaluated[-1] += memory.size
        return memory, fits

    plan_memory, least_state_memory = chunks.plan_memory, uniform_sweep.least_state_memory
    monkeypatch.setattr(chunks, "plan_memory", counting)
    pruned = searched()
    monkeypatch.setattr(
        uniform_sweep,
        "least_state_memory",
        lambda *given: {rule: np.zeros_like(least) for rule, least in least_state_memory(*given).items()},
    )
    assert searched() == pruned
    assert evaluated[0] < evaluated[1]


@pytest.mark.parametrize("profile", mostly_nightly(["generic", "torchtitan", "deepspeed"], ["torchtitan"]))
@pytest.mark.slow
def test_pipelines_side_by_side_are_as_each_by_itself(profile, monkeypatch):
    """Layers of several kinds, whose stages differ between almost all schedules: at most two groups, and what one by one gives."""
    job = make_job(load_model("nemotron-h-8b"), batch=16, seq_len=2048)
    estimator, space = estimator_of(job, chips=16, node=8, profile=profile), Space(orders=Space().orders[:1], fixed={"tp": 1})

    def best():
        state = sweep(estimator, space, top=2000, risk=0.05)
        kept = (state.best.time.values, state.best.memory.values, state.best.least.values, state.best.front.first, state.best.front.second)
        return state.counts, [values.tolist() for values in kept]

    groups = uniform_space.pipeline_groups(job, 4, space)
    assert len(groups) <= 2 < len({choice.stage_layers for group in groups for choice in group.choices})
    together = best()

    def apart(*asked):
        return tuple(group.take(np.array([i])) for group in grouped(*asked) for i in range(len(group.choices)))

    grouped = uniform_space.pipeline_groups
    monkeypatch.setattr(uniform_space, "pipeline_groups", apart)
    assert best() == together


FRAMEWORKS = [("megatron", 2, 8), ("torchtitan", 2, 8), ("hf-trainer", 2, 8), ("nemo-automodel", 2, 8), ("deepspeed", 6, 24)]


@pytest.mark.parametrize(
    ("profile", "layers", "batch", "only"),
    mostly_nightly(
        [(*framework, only) for framework in FRAMEWORKS for only in ("time", "memory")],
        [*((*framework, "time") for framework in FRAMEWORKS), (*FRAMEWORKS[0], "memory")],
    ),
)
@pytest.mark.slow
def test_the_best_of_what_a_framework_cannot_run_is_that_of_all_plans(profile, layers, batch, only):
    job = make_job(make_model(num_hidden_layers=layers), batch=batch)
    estimator = estimator_of(job, chips=8, profile=profile)
    space = runnable_space(Space(orders=Space().orders[:1]), estimator.profile, job)
    everything = unlimited_space(space)
    state = sweep(estimator, everything, top=100_000)
    costs = state.best.time if only == "time" else state.best.memory
    plans = [state.plan(int(i)) for i in costs.ids]
    of_others = [cost for cost, plan in zip(costs.values, plans, strict=True) if not_runnable_reason(plan, estimator.profile)]
    for limit in (np.inf, float(np.median(of_others))):
        cost, plan = best_plan(estimator, everything, by_memory=only == "memory", at_most=limit, beyond=space)
        assert cost == pytest.approx(of_others[0], rel=1e-12)
        assert not_runnable_reason(plan, estimator.profile)
        assert plan.job.global_batch == plan.micro_batch * plan.num_microbatches * plan.layout.data_parallel
    assert best_plan(estimator, everything, by_memory=only == "memory", at_most=of_others[0] * 0.999, beyond=space) is None


@pytest.mark.parametrize("fixed", [{}, *({"schedule": name} for name in ("zero-bubble", "zbv", "dualpipev"))], ids=str)
@pytest.mark.parametrize("headroom", [0.9, 0.5, 0.2])
def test_bounds_leave_out_no_plan_that_is_the_best_of_those_that_fit(headroom, fixed):
    """Against every plan, with memory for some: the headroom leaves this share."""
    job = make_job(load_model("nemotron-h-8b"), batch=16, seq_len=2048)
    estimator = estimator_of(job, chips=16, node=8, profile="megatron")
    space = Space(orders=Space().orders[:1], fixed=fixed)
    state = sweep(estimator, space, top=1, memory_headroom=1.0 - headroom)
    assert 0 < state.counts.num_feasible < state.counts.num_evaluated
    for by_memory, best in ((False, state.best.time), (True, state.best.memory)):
        cost, plan = best_plan(estimator, space, by_memory=by_memory, memory_headroom=1.0 - headroom)
        assert cost == pytest.approx(best.values[0], rel=1e-12)
        assert estimator.predict(plan, memory_headroom=1.0 - headroom).fits
