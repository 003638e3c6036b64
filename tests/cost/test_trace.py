"""The timeline of a rank adds up to the prediction: by part, in time and in memory."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

import perfmodel
from perfmodel.cost.trace import Detail, rank_timelines
from perfmodel.parallel.plan import rank_at
from perfmodel.verbs.setting import load_plan, predict_in, setting_of_plan

JOB = {"cluster": "dgx-h100", "chips": 8, "global_batch": 16, "seq_len": 1024}


def drawn(plan, detail=None):
    setting = setting_of_plan(plan)
    stages = sorted({0, plan.layout.pp // 2, plan.layout.pp - 1})
    timelines = rank_timelines(setting.estimator, plan, [rank_at(plan, {"pp": stage}) for stage in stages], detail)
    return predict_in(setting, plan), timelines


def planned(model="gpt2", **knobs):
    return perfmodel.predict(model=model, **JOB, **knobs).plan


PLANS = {
    "one stage": lambda: planned(tp=2, sequence_parallel=True),
    "zero 3, recomputed": lambda: planned(zero=3, recompute="full", profile="torchtitan"),
    "1f1b": lambda: planned(pp=4, micro_batch=2, profile="megatron"),
    "gpipe": lambda: planned(pp=2, tp=2, schedule="gpipe"),
    "interleaved": lambda: planned(pp=2, virtual_stages=3, zero=1),
    "zero-bubble": lambda: planned(pp=4, schedule="zero-bubble"),
    "zero-bubble, chunks": lambda: planned(pp=2, virtual_stages=3, schedule="zero-bubble", zero=1),
    "zbv": lambda: planned(pp=4, schedule="zbv"),
    "dualpipev": lambda: planned(pp=2, schedule="dualpipev"),
    "ring": lambda: planned(cp=2, cp_form="ring"),
    "experts": lambda: planned("mixtral-8x7b", ep=8, zero=1),
    "uneven": lambda: replace(planned(pp=4), stage_layers=(4, 3, 3, 2)),
    "published": lambda: load_plan("llama-3.1-405b"),
}


@pytest.mark.parametrize("detail", [None, *Detail])
@pytest.mark.parametrize("name", PLANS)
def test_spans_add_up_to_the_parts_of_the_rank(name, detail):
    prediction, timelines = drawn(PLANS[name](), detail if name != "published" else None)
    for timeline in timelines:
        times = Counter()
        for span in timeline.spans:
            times[span.part] += 0.0 if span.hidden else span.time
        assert set(timeline.parts) == set(prediction.parts)
        for part, time in timeline.parts.items():
            assert times[part] == pytest.approx(time, abs=1e-11 * prediction.step_time)
        assert sum(timeline.parts.values()) == prediction.step_time
        assert max(span.start + span.time for span in timeline.spans) == pytest.approx(prediction.step_time, rel=1e-12)


@pytest.mark.parametrize("name", PLANS)
def test_the_critical_rank_has_the_parts_of_the_prediction(name):
    plan = PLANS[name]()
    setting = setting_of_plan(plan)
    prediction = predict_in(setting, plan)
    timelines = rank_timelines(setting.estimator, plan, [rank_at(plan, {"pp": i}) for i in range(plan.layout.pp)], Detail.PASSES)
    assert any(dict(timeline.parts) == pytest.approx(dict(prediction.parts), abs=1e-12 * prediction.step_time) for timeline in timelines)


@pytest.mark.parametrize("name", PLANS)
def test_spans_of_a_rank_follow_each_other_and_hidden_ones_lie_in_their_pass(name):
    _, timelines = drawn(PLANS[name]())
    for timeline in timelines:
        now = 0.0
        for span in timeline.spans:
            if span.hidden:
                assert any(
                    one.start - 1e-9 <= span.start and span.start + span.time <= one.start + one.time + 1e-9 for one in timeline.passes
                )
            else:
                assert span.start == pytest.approx(now, abs=1e-9)
                now = span.start + span.time


@pytest.mark.parametrize("name", PLANS)
def test_the_highest_memory_is_that_of_the_rank(name):
    plan = PLANS[name]()
    setting = setting_of_plan(plan)
    prediction = predict_in(setting, plan)
    timelines = rank_timelines(setting.estimator, plan, [rank_at(plan, {"pp": i}) for i in range(plan.layout.pp)], Detail.PASSES)
    peaks = [max(sum(classes.values()) for _, classes in timeline.memory) for timeline in timelines]
    assert max(peaks) == pytest.approx(prediction.memory["total"], rel=1e-9)
    times = [time for time, _ in timelines[0].memory]
    assert all(later >= earlier - 1e-12 for earlier, later in pairwise(times))


def test_a_pipeline_is_idle_before_its_first_and_after_its_last_pass():
    _, timelines = drawn(PLANS["1f1b"]())
    first, middle, last = timelines
    assert first.passes[0].start < middle.passes[0].start < last.passes[0].start
    assert [one.name for one in last.passes[:4]] == ["forward 0", "backward 0", "forward 1", "backward 1"]
    assert first.stretch == pytest.approx(1.0, abs=0.1)


def test_gradients_are_reduced_under_the_last_backward_pass():
    _, (timeline,) = drawn(planned(zero=1, profile="megatron"))
    hidden = [span for span in timeline.spans if span.hidden]
    assert {(span.part, span.stream) for span in hidden} == {("gradient_reduction", "dp")}
    assert hidden[0].start >= timeline.passes[-1].start
