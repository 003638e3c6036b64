"""A search as its user meets it: baselines, progress, an interrupt, an empty space, bad input."""

import re
from dataclasses import replace

import pytest

import perfmodel
from perfmodel.foundation.errors import InputError
from perfmodel.parallel.choices import Dispatcher, PipelineSchedule
from perfmodel.parallel.layout import DEFAULT_ORDER
from perfmodel.planner.baselines import AS_PUBLISHED
from perfmodel.planner.explain import explain
from perfmodel.planner.reasons import layouts_left_out
from perfmodel.planner.uniform.space import Space
from perfmodel.workload.layer_specs import Experts
from perfmodel.workload.models import load_model
from tests.cost.jobs import CHIP, LLAMA_LIKE, estimator_of, make_job, make_model, sweep_all
from tests.parallel.schedule_files import text_of
from tests.planner.searches import search_plans

BASELINES = ("data parallel", "FSDP", "Megatron rule of thumb")


def with_capacity(capacity):
    return replace(CHIP, memory=replace(CHIP.memory, capacity=capacity))


def by_name(result):
    assert tuple(b.name for b in result.baselines) == BASELINES
    return {b.name: b for b in result.baselines}


def test_baselines_are_plans_of_the_space_and_never_better():
    result = search_plans(estimator_of())
    for baseline in result.baselines:
        (prediction,) = baseline.plans
        assert prediction.fits
        assert prediction.step_time >= result.plans[0].step_time
    baselines = by_name(result)
    data, fsdp = (baselines[name].plans[0].plan for name in BASELINES[:2])
    assert (data.layout.dp_replicate, int(data.zero)) == (16, 0)
    assert (fsdp.layout.dp_shard, int(fsdp.zero)) == (16, 3)


@pytest.mark.slow
def test_the_rule_of_thumb_grows_until_it_fits():
    """Tensor parallelism in the node first, then the pipeline."""
    job = make_job(make_model(hidden_size=1024, num_attention_heads=16, num_key_value_heads=16, intermediate_size=4096), batch=16)
    grown = []
    for capacity in (1e12, 1.2e9, 0.6e9, 0.35e9):
        (prediction,) = by_name(search_plans(estimator_of(job, chip=with_capacity(capacity))))[BASELINES[2]].plans
        layout = prediction.plan.layout
        assert layout.pp == 1 or layout.tp == 4
        grown.append(layout.tp * layout.pp)
    assert grown == sorted(grown)
    assert grown[0] == 1
    assert grown[-1] >= 4


def test_the_published_layout_is_shown_where_it_divides_the_chips():
    space = Space(fixed={"tp": 1, "cp": 1, "pp": 16, "zero": 1, "dispatcher": "alltoall"})
    job = make_job(load_model("deepseek-v2"), batch=256, seq_len=4096)
    baselines = {chips: search_plans(estimator_of(job, chips=chips, node=8), space, top=1).baselines[-1] for chips in (128, 64)}
    assert {baseline.name for baseline in baselines.values()} == {AS_PUBLISHED}
    plan = baselines[128].plans[0].plan
    assert (plan.layout.pp, plan.layout.dp_shard, plan.ep, int(plan.zero)) == (16, 8, 8, 1)
    assert baselines[64].plans == ()
    assert baselines[64].reason == "pp 16, ep 8 do not divide 64 chips"


def test_baselines_that_lose_are_shown():
    """Where nothing fits, each shows its least memory; where the batch is too small for a plan, its reason."""
    tight = search_plans(estimator_of(chip=with_capacity(1e6)))
    assert tight.plans == ()
    assert all(b.plans and not b.plans[0].fits for b in tight.baselines)
    small = by_name(search_plans(estimator_of(make_job(batch=4))))
    assert small["data parallel"].plans == small["FSDP"].plans == ()
    assert "global_batch=4" in small["FSDP"].reason
    assert small[BASELINES[2]].plans[0].fits


def test_one_chip():
    result = search_plans(estimator_of(make_job(batch=4), chips=1))
    baselines = by_name(result)
    assert baselines["FSDP"].plans == ()
    assert baselines["data parallel"].plans == baselines[BASELINES[2]].plans or baselines[BASELINES[2]].plans[0].fits
    assert result.num_evaluated == 6


def test_progress_rises_to_one():
    shares = []
    search_plans(estimator_of(), also=("front",), progress=shares.append)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert len(shares) > 3


def test_a_search_that_is_stopped_keeps_the_best_so_far():
    calls = []

    def stop(done):
        calls.append(done)
        return len(calls) == 3

    complete = search_plans(estimator_of(), also=("front",))
    part = search_plans(estimator_of(), also=("front",), progress=stop)
    assert part.interrupted
    assert not complete.interrupted
    assert 0 < part.num_evaluated < complete.num_evaluated
    assert part.plans
    assert part.plans[0].step_time >= complete.plans[0].step_time
    assert sum(part.rejected.values()) + part.num_feasible == part.num_evaluated


def test_an_interrupt_is_the_callers():
    def interrupt(done):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search_plans(estimator_of(), also=("front",), progress=interrupt)


def test_an_empty_space():
    result = search_plans(estimator_of(), Space(fixed={"tp": 3}))
    assert (result.num_evaluated, result.plans, result.pareto, result.least_memory) == (0, (), (), ())
    assert list(result.left_out) == ["excluded by a given flag"]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"top": 0}, "top=0: must be at least 1"),
        ({"memory_headroom": 1.0}, "memory_headroom=1.0: must be a share from 0 to below 1"),
        ({"memory_headroom": -0.1}, "memory_headroom=-0.1: must be"),
    ],
)
def test_bad_input(changes, message):
    with pytest.raises(InputError, match=message):
        search_plans(estimator_of(), **changes)


@pytest.mark.slow
def test_a_search_does_not_depend_on_what_was_searched_before():
    estimator = estimator_of()
    first = search_plans(estimator, also=("front",))
    search_plans(estimator, Space(fixed={"recompute": "full"}), also=("front",))
    again = search_plans(estimator, also=("front",))
    fresh = search_plans(estimator_of(), also=("front",))
    for other in (again, fresh):
        assert replace(other, search_time=0.0) == replace(first, search_time=0.0)


@pytest.mark.parametrize("cells", [1, 100, 10**9])
def test_the_size_of_blocks_changes_nothing(cells, monkeypatch):
    """Cells are evaluated in pieces that fit the caches; which, is nobody's business."""
    estimator = estimator_of(make_job(batch=4), chips=4, node=2)
    base = search_plans(estimator, also=("front",))
    monkeypatch.setattr("perfmodel.planner.uniform.chunks.BLOCK_CELLS", cells)
    other = search_plans(estimator, also=("front",))
    assert replace(other, search_time=0.0) == replace(base, search_time=0.0)


# --- reasons ------------------------------------------------------------------------------------------------------


def test_first_broken_rule_of_each_layout():
    shape = {"num_hidden_layers": 6, "num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 384, "intermediate_size": 1536}
    job = make_job(make_model(**LLAMA_LIKE | shape), batch=4, seq_len=100)
    left = layouts_left_out(job, 24, Space())
    assert left["tp does not divide num_attention_heads=6"] > 0
    assert left["tp neither divides num_key_value_heads=2 nor is a multiple of it"] > 0
    assert left["pp is more than num_hidden_layers=6 and stages for embedding and head"] > 0
    assert left["cp does not divide seq_len=100"] > 0
    assert left["dp_replicate*dp_shard does not divide global_batch=4"] > 0
    assert list(left.values()) == sorted(left.values(), reverse=True)


@pytest.mark.slow
def test_left_out_and_searched_layouts_are_all_layouts():
    job, chips = make_job(batch=12), 24
    searched = {state_plan.layout for state_plan in _plans(estimator_of(job, chips=chips))}
    every = sum(layouts_left_out(job, chips, Space()).values()) + len(searched)
    # 24 = 2^3 x 3: the exponents over five axes
    assert every == 35 * 5


def _plans(estimator):
    state = sweep_all(estimator)
    return [state.plan(i) for i in state.best.time.ids.tolist()]


def test_a_plan_whose_rows_travel_once_to_each_place_is_among_those_that_explain_compares_it_with():
    model = make_model(**LLAMA_LIKE, num_hidden_layers=2, experts=Experts(num_experts=8, top_k=4, width=256))
    estimator = estimator_of(make_job(model, batch=8), chips=8, node=4)
    space = Space(fixed={"ep": 8, "dispatcher": "flex"}, orders=(DEFAULT_ORDER,))
    best = search_plans(estimator, space, top=1, also=("front",)).plans[0].plan
    (answer,) = explain(estimator, best, why_not={"ep": 8, "tp": best.layout.tp}, any_framework=True).why_not
    assert answer.prediction[0].plan.dispatcher is Dispatcher.FLEX
    assert answer.reason.endswith("the plan has that; no such plan is better")


JOB = dict(model="llama-3-8b", cluster="dgx-h100", chips=16, global_batch=64, seq_len=2048)


@pytest.mark.parametrize("profile", ["torchtitan", None])
def test_a_schedule_from_a_file_is_searched_with_its_ranks_stages_and_microbatches(tmp_path, profile):
    path = tmp_path / "mine.csv"
    path.write_text(text_of(PipelineSchedule.ZBV, 2, 8, 2))
    result = perfmodel.find_plans(**JOB, schedule=str(path), profile=profile, top=20)
    shapes = {(p.plan.layout.pp, p.plan.virtual_stages, p.plan.num_microbatches) for p in result.plans}
    assert shapes == {(2, 2, 8)}
    for prediction in result.plans:
        again = perfmodel.predict(prediction.plan)
        assert (again.step_time, again.memory) == (prediction.step_time, prediction.memory)
        named = perfmodel.predict(replace(prediction.plan, schedule=PipelineSchedule.ZBV))
        assert named.step_time == pytest.approx(prediction.step_time, rel=1e-12)


@pytest.mark.parametrize(("knobs", "reason"), [
    ({"pp": 4}, "pp=4: schedule=mine has pp=2"),
    ({"global_batch": 12, "chips": 2, "zero": 0}, "it is 12 microbatches, and schedule=mine has the orders of 8; use global_batch=8"),
    ({"profile": "megatron"}, "schedule=mine: megatron has 1f1b and interleaved only"),
])  # fmt: skip
def test_a_search_names_what_a_schedule_from_a_file_does_not_fit(tmp_path, knobs, reason):
    path = tmp_path / "mine.csv"
    path.write_text(text_of(PipelineSchedule.ZBV, 2, 8, 2))
    with pytest.raises(InputError, match=re.escape(reason)):
        perfmodel.find_plans(**{**JOB, "schedule": str(path), **knobs})
