"""Plans on several kinds of chips: equal pools are one cluster, and faster chips are never slower."""

from dataclasses import replace

import pytest

import perfmodel
from perfmodel.cost.mixed import balanced_plan, pipelines_of
from perfmodel.cost.trace import Detail, rank_timelines
from perfmodel.foundation.errors import InputError
from perfmodel.parallel.plan import make_plan
from perfmodel.uncertainty.sensitivity import sensitivities
from perfmodel.verbs.api import predict_plan
from perfmodel.verbs.setting import make_job, make_setting

JOB = {"model": "llama-3-8b", "global_batch": 64, "seq_len": 4096}

PLANS = {
    "stages": {"pp": 4, "tp": 2},
    "replicas": {"tp": 2, "dp_replicate": 16},
    "sharded": {"tp": 2, "dp_shard": 16, "zero": 3},
    "optimizer": {"pp": 2, "tp": 2, "dp_shard": 8, "zero": 1},
    "interleaved": {"pp": 4, "tp": 2, "schedule": "interleaved", "virtual_stages": 4, "recompute": "full"},
    "zero-bubble": {"pp": 4, "tp": 2, "schedule": "zero-bubble"},
    "context": {"pp": 2, "cp": 4, "micro_batch": 2},
    "pipelines in pools": {"pp": 2, "tp": 2, "order": ("tp", "cp", "pp", "dp_shard", "dp_replicate")},
}


def setting(cluster, profile="megatron", **more):
    chips = more.pop("chips", None)
    return make_setting(make_job(**JOB), cluster, chips=chips, profile=profile, **more)


def plan_on(mix, **knobs):
    cluster = mix.cluster
    knobs.setdefault("attention", mix.estimator.profile.kernels.default_attention)
    return make_plan(mix.job, cluster=mix.reference, num_chips=cluster.num_chips, profile=mix.profile, calibration="", **knobs)


@pytest.mark.parametrize("profile", ["megatron", "torch-fsdp2", "deepspeed", "generic"])
@pytest.mark.parametrize("name", PLANS)
def test_pools_of_equal_chips_are_one_cluster(name, profile):
    one, two = setting("dgx-h100", profile, chips=32), setting("16@dgx-h100+16@dgx-h100", profile)
    alone = one.estimator.predict(plan_on(one, **PLANS[name]))
    mixed = two.estimator.predict(plan_on(two, **PLANS[name]))
    assert mixed.step_time == pytest.approx(alone.step_time, rel=1e-12)
    assert mixed.parts == pytest.approx(alone.parts, rel=1e-9, abs=1e-12 * alone.step_time)
    assert mixed.memory == pytest.approx(alone.memory, rel=1e-12)
    assert (mixed.hfu, mixed.mfu_palm, mixed.fits_probability) == pytest.approx((alone.hfu, alone.mfu_palm, alone.fits_probability))
    assert mixed.verdict is alone.verdict


@pytest.mark.parametrize("name", PLANS)
def test_a_mix_takes_no_less_than_its_fast_chips_and_no_more_than_its_slow_ones(name):
    steps = {}
    for cluster in ("16@dgx-h100+16@dgx-h100", "16@dgx-h100+16@dgx-a100", "16@dgx-a100+16@dgx-a100"):
        mix = setting(cluster)
        steps[cluster] = mix.estimator.predict(plan_on(mix, **PLANS[name])).step_time
    fast, mixed, slow = steps.values()
    assert fast < mixed <= slow * (1.0 + 1e-12)


def test_one_slow_node_delays_all():
    steps = []
    for speed in ("", "*90%", "*50%"):
        mix = setting(f"24@dgx-h100+8@dgx-h100{speed}")
        steps.append(mix.estimator.predict(plan_on(mix, tp=2)).step_time)
    assert steps[0] < steps[1] < steps[2]
    assert 1.5 < steps[2] / steps[0] < 2.0  # its work is twice as slow, its collectives are not


def test_layers_are_assigned_by_speed():
    mix = setting("16@dgx-h100+16@dgx-a100")
    even = plan_on(mix, pp=4, tp=2)
    balanced = balanced_plan(mix.estimator, even)
    assert sum(balanced.stage_layers) == sum(even.stage_layers)
    assert min(balanced.stage_layers[:2]) > max(balanced.stage_layers[2:])
    before, after = (mix.estimator.predict(plan).step_time for plan in (even, balanced))
    assert after < 0.8 * before


def test_layers_are_assigned_within_the_memory_of_the_faster_chips():
    mix = setting("4@h100-sxm-80gb+4@a100-sxm-40gb")
    plan = plan_on(mix, pp=2, tp=4, dp_replicate=1)
    balanced = balanced_plan(mix.estimator, plan)
    prediction = mix.estimator.predict(balanced)
    assert prediction.memory["total"] <= prediction.memory_usable


def test_batches_by_speed_are_quicker_and_not_for_weights_gathered_each_microbatch():
    equal, by_speed = setting("16@dgx-h100+16@dgx-a100"), setting("16@dgx-h100+16@dgx-a100", settings={"batches_by_speed": True})
    before, after = (mix.estimator.predict(plan_on(mix, tp=2, dp_shard=16, zero=1)) for mix in (equal, by_speed))
    assert after.step_time < 0.85 * before.step_time
    assert after.parts["backward"] / after.parts["forward"] == pytest.approx(before.parts["backward"] / before.parts["forward"], rel=0.01)
    with pytest.raises(InputError, match=r"batches_by_speed.*use --zero 0 or 1"):
        by_speed.estimator.predict(plan_on(by_speed, tp=2, dp_shard=16, zero=3))


def test_pipelines_are_distinguished_by_their_pools():
    mix = setting("16@dgx-h100+16@dgx-a100")
    in_order = pipelines_of(plan_on(mix, pp=2, tp=2), (16, 16))
    assert [(pipeline.pools, pipeline.replicas) for pipeline in in_order] == [((0, 1), 8)]
    inside = pipelines_of(plan_on(mix, pp=2, tp=2, order=("tp", "cp", "pp", "dp_shard", "dp_replicate")), (16, 16))
    assert [(pipeline.pools, pipeline.replicas) for pipeline in inside] == [((0, 0), 4), ((1, 1), 4)]
    with pytest.raises(InputError, match=r"tp=8: .*two kinds"):
        pipelines_of(plan_on(mix, tp=8), (12, 20))


def test_what_needs_equal_chips_says_so():
    mix = setting("16@dgx-h100+16@dgx-a100")
    from perfmodel.cost.estimate import evaluate_plan

    with pytest.raises(InputError, match="several kinds"):
        evaluate_plan(mix.estimator, plan_on(mix, tp=2))


def test_other_batches_of_a_mix_are_predicted_alike():
    mix = setting("16@dgx-h100+16@dgx-a100")
    twice = mix.estimator.for_job(replace(mix.job, global_batch=128))
    other = make_setting(replace(mix.job, global_batch=128), "16@dgx-h100+16@dgx-a100", profile="megatron")
    plan = plan_on(other, pp=2, tp=2)
    assert twice.predict(plan).step_time == other.estimator.predict(plan).step_time


def test_plan_files_name_the_pools(tmp_path):
    prediction = perfmodel.predict(**JOB, cluster="16@dgx-h100+16@dgx-a100", pp=2, tp=2)
    perfmodel.write_plan(prediction.plan, tmp_path / "plan.yaml")
    again = predict_plan(perfmodel.read_plan(tmp_path / "plan.yaml"))
    assert again.step_time == prediction.step_time


def test_pools_of_one_workstation_hold_a_pipeline():
    pools = setting("2@rtx3090+2@rtx4090", "deepspeed")
    slower = setting("2@rtx3090+2@rtx3090", "deepspeed")
    plan = {"pp": 2, "tp": 2, "dp_replicate": 1, "recompute": "full"}
    step = pools.estimator.predict(plan_on(pools, **plan)).step_time
    assert step <= slower.estimator.predict(plan_on(slower, **plan)).step_time


@pytest.mark.parametrize("name", ["stages", "replicas", "optimizer", "interleaved", "pipelines in pools"])
def test_spans_of_every_rank_add_up_to_its_pipeline(name):
    pools = setting("16@dgx-h100+16@dgx-a100")
    plan = balanced_plan(pools.estimator, plan_on(pools, **PLANS[name]))
    prediction = pools.estimator.predict(plan)
    timelines = rank_timelines(pools.estimator, plan, range(0, 32, 5), Detail.PASSES)
    assert max(timeline.step_time for timeline in timelines) == prediction.step_time
    for timeline in timelines:
        spans = sum(span.time for span in timeline.spans if not span.hidden)
        assert spans == pytest.approx(timeline.step_time, rel=1e-9)
        assert sum(timeline.parts.values()) == pytest.approx(timeline.step_time, rel=1e-9)
    assert any(timeline.parts == prediction.parts for timeline in rank_timelines(pools.estimator, plan, range(32), Detail.PASSES))


@pytest.mark.parametrize("by_speed", [False, True])
@pytest.mark.parametrize("name", ["replicas", "optimizer", "interleaved inside", "pipelines in pools"])
def test_every_rank_waits_for_the_slowest_replicas(name, by_speed):
    inside = {**PLANS["interleaved"], "order": ("tp", "cp", "pp", "dp_shard", "dp_replicate"), "virtual_stages": 2}
    pools = setting("16@dgx-h100+16@dgx-a100", settings={"batches_by_speed": by_speed})
    plan = plan_on(pools, **{**PLANS, "interleaved inside": inside}[name])
    prediction = pools.estimator.predict(plan)
    timelines = rank_timelines(pools.estimator, plan, range(32), Detail.PASSES)
    waits = [timeline.parts.get("replica_wait", 0.0) for timeline in timelines]
    assert min(waits) == 0.0
    assert name == "optimizer" or max(waits) > 0.0  # one pipeline spans both kinds of chips
    for timeline, wait in zip(timelines, waits, strict=True):
        assert timeline.step_time == sum(timeline.parts.values()) == prediction.step_time
        waiting = [span for span in timeline.spans if span.part == "replica_wait"]
        assert sum(span.time for span in waiting) == pytest.approx(wait, rel=1e-9)
        reductions = [span.start for span in timeline.spans if span.part == "gradient_reduction" and not span.hidden]
        assert all(span.start <= max(reductions, default=span.start) for span in waiting)
    assert any(timeline.parts == prediction.parts for timeline in timelines)


def test_timelines_of_equal_pools_are_those_of_one_cluster():
    one, two = setting("dgx-h100", chips=32), setting("16@dgx-h100+16@dgx-h100")
    alone, mixed = (
        rank_timelines(cluster.estimator, plan_on(cluster, **PLANS["stages"]), (0, 8, 16, 31), Detail.LAYERS) for cluster in (one, two)
    )
    for single, pooled in zip(alone, mixed, strict=True):
        assert (single.rank, single.stage, len(single.spans)) == (pooled.rank, pooled.stage, len(pooled.spans))
        assert pooled.parts == pytest.approx(single.parts, rel=1e-9, abs=1e-12 * single.step_time)
        assert pooled.memory[-1][1] == pytest.approx(single.memory[-1][1])


def test_a_parameter_of_a_mix_is_that_of_every_kind():
    pooled, alone = setting("16@dgx-h100+16@dgx-h100"), setting("dgx-h100", chips=32)
    mixed, one = (sensitivities(cluster.estimator, plan_on(cluster, pp=2, tp=2)) for cluster in (pooled, alone))
    assert [sensitivity.parameter for sensitivity in mixed] == [sensitivity.parameter for sensitivity in one]
    assert [sensitivity.change for sensitivity in mixed] == pytest.approx([sensitivity.change for sensitivity in one], rel=1e-6)
