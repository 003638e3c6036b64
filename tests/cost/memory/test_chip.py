"""Memory of a chip at each moment of a step."""

from dataclasses import replace

import numpy as np
import pytest

from perfmodel import predict as predict_job
from perfmodel.cost.estimate import evaluate_memory, evaluate_plan, memory_on_rank, rank_memories
from perfmodel.cost.memory.chip import MEMORY, kept_on_rank, live_layers
from perfmodel.cost.memory.moments import At
from perfmodel.cost.memory.plan import memory_by_class
from perfmodel.cost.pipeline import Pipeline
from perfmodel.cost.stages import slowest_stage, stages_of
from perfmodel.cost.update import held_elements
from perfmodel.frameworks.profile import uncertainty_of_memory
from perfmodel.parallel.choices import PipelineSchedule
from perfmodel.parallel.plan import make_plan
from perfmodel.workload.transformer import decoder_regions
from tests.cost.jobs import LLAMA_LIKE, estimator_of, make_job, make_model, predict, profile_of

B, S, H, V, F = 1, 256, 512, 500_000, 2048


def plan_of(estimator, **knobs):
    return make_plan(estimator.job, cluster=estimator.cluster.name, num_chips=estimator.cluster.num_chips, **knobs)


@pytest.mark.parametrize("micro_batch", [1, 4])
def test_a_large_vocabulary_makes_the_loss_the_peak(micro_batch):
    profile = profile_of("megatron")
    prediction = predict(estimator_of(job=make_job(make_model(vocab_size=V, hidden_size=64, head_dim=8)), chips=1), micro_batch=micro_batch)
    assert prediction.memory_moment == "loss"
    assert prediction.memory["temporary"] == micro_batch * S * V * (profile.activations.loss_peak_bytes + 2)


def test_full_recomputation_makes_a_layer_again_before_its_backward():
    small = make_job(make_model(vocab_size=100))
    none, full = (predict(estimator_of(job=small, chips=1), micro_batch=4, recompute=r) for r in ("none", "full"))
    assert full.memory_moment == none.memory_moment == "backward of a layer"
    row = evaluate_plan(estimator_of(job=small, chips=1), plan_of(estimator_of(job=small, chips=1), micro_batch=4)).memory_row
    kept, boundary = row.of.activations.kept[1], row.of.activations.boundary
    assert full.memory["temporary"] - none.memory["temporary"] == pytest.approx(kept - boundary, rel=1e-12)
    assert none.memory["activations"] - full.memory["activations"] == pytest.approx(8 * (kept - boundary), rel=1e-12)


def test_a_stage_receives_while_it_computes():
    """Two boundary tensors in addition to what is kept; none without a pipeline. torch's schedules have one for each receive of a step."""
    estimator = estimator_of()
    assert predict(estimator, tp=4).memory["communication_buffers"] == 0.0
    assert predict(estimator, pp=4, tp=4).memory["communication_buffers"] == 2 * (2 * S * H / 4)
    torch = estimator_of(profile="torch-gloo")
    plan = plan_of(torch, pp=4, tp=4)
    boundary, m = 2 * S * H / 4, plan.num_microbatches
    for rank, ways in ((0, 1), (1, 2), (2, 2), (3, 1)):
        assert memory_on_rank(torch, plan, rank)[2]["communication_buffers"] == ways * m * boundary


def test_weights_that_are_gathered_and_freed_leave_when_their_gradients_are_reduced():
    """fully_shard: the head's gradients in float32 while all activations of the layers are alive; all gradients at the end."""
    estimator = estimator_of(job=make_job(make_model(vocab_size=V, tie_word_embeddings=False), batch=4), chips=4, profile="torch-gloo")
    row = evaluate_plan(estimator, plan_of(estimator, dp_shard=4, zero=3)).memory_row
    moments = {moment.name: moment for moment in row.ranks[2].moments}
    head = V * H + 2 * H
    reduction = moments["reduction of the head's gradients"]
    assert float(reduction.buffers) == 4 * head
    assert float(reduction.temporary) == 2 * head + 2 * S * H
    assert float(np.asarray(moments["loss"].gradients).reshape(-1)[0]) == 0.0
    end = moments["reduction of the embedding's gradients"]
    assert float(end.gradients) == pytest.approx(4 * estimator.job.model.num_parameters / 4, rel=1e-3)
    assert float(row.kept[2][At.BLOCKS][0] + end.freed) == pytest.approx(0.0, abs=1.0)


def test_classes_add_up_to_the_rank():
    estimator = estimator_of()
    plan = plan_of(estimator, pp=4, tp=4)
    row = evaluate_plan(estimator, plan).memory_row
    for rank in range(3):
        name, values = memory_by_class(row.ranks[rank], row.kept[rank])
        assert tuple(values) == MEMORY
        assert name in {moment.name for moment in row.ranks[rank].moments}
        fixed = sum(float(np.asarray(x).reshape(-1)[0]) for x in row.ranks[rank].static)
        kept = sum(float(np.asarray(x).reshape(-1)[0]) for x in row.kept[rank][At.BLOCKS])
        most = float(np.asarray(slowest_stage([moment.total for moment in row.ranks[rank].moments])).reshape(-1)[0])
        assert sum(values.values()) == pytest.approx(fixed + kept + most, rel=1e-12)


@pytest.mark.parametrize("schedule, virtual, alive", [("gpipe", 1, 8), ("1f1b", 1, 4), ("interleaved", 2, (2 * 3 + 4 + 1) / 2)])
def test_first_rank_keeps_what_is_under_way(schedule, virtual, alive):
    estimator = estimator_of()
    row = evaluate_plan(estimator, plan_of(estimator, pp=4, tp=4, schedule="1f1b")).memory_row
    pipeline = Pipeline(schedule=PipelineSchedule(schedule), num_ranks=4.0, num_microbatches=8.0, virtual_stages=float(virtual))
    stages = stages_of(decoder_regions(estimator.job.model), (2 // virtual,) * (4 * virtual), 4)
    terms = replace(row.of.activations, kept=(0.0, row.of.activations.kept[1], row.of.activations.kept[2]))
    live = live_layers(schedule=pipeline.schedule, chunks=(2 // virtual,) * virtual, rank=0, num_ranks=4, num_microbatches=8)
    kept, _ = kept_on_rank(terms, stages, pipeline, estimator.profile, rank=0, index=0.0, live=live, activation_bytes=2.0)[At.BLOCKS]
    assert kept == pytest.approx(alive * 2 * terms.kept[1], rel=1e-12)


def test_the_head_has_the_layers_next_to_it_that_are_in_flight_then():
    """Virtual stages of 1, 3, 3 and 1 layers on two ranks: by the schedule's order the last has 7 in flight at the loss and 9 at most.
    The first has 9 at most, and 8 while the embedding runs backward."""
    estimator = estimator_of()
    row = evaluate_plan(
        estimator, plan_of(estimator, pp=2, tp=4, schedule="interleaved", virtual_stages=2, stage_layers=(1, 3, 3, 1))
    ).memory_row
    layer, num_layers = row.of.activations.kept[1], 4
    for rank, at, fewer in ((2, At.LAST, 2), (0, At.FIRST, 1 - num_layers)):
        assert row.kept[rank][At.BLOCKS][0] - row.kept[rank][at][0] == pytest.approx(fewer * layer, rel=1e-12)


# --- what the allocator holds beyond what is in tensors -----------------------------------------------------------------


def with_profile(name="megatron", job=None, **fields):
    return estimator_of(job, profile=profile_of(name).having(**{"workspace_bytes": 0.0} | fields))


def test_what_comes_and_goes_takes_more_than_its_tensors_what_stays_does_not():
    plain, loose = (predict(with_profile(reserve_factor=factor), tp=4, pp=4).memory for factor in (1.0, 1.25))
    moving = sum(plain[name] for name in ("activations", "temporary", "communication_buffers"))
    assert plain["allocator"] == 0.0
    assert loose["allocator"] == pytest.approx(0.25 * moving, rel=1e-9)
    assert {name: loose[name] for name in plain if name not in ("allocator", "total")} == {
        name: plain[name] for name in plain if name not in ("allocator", "total")
    }


def test_collectives_that_the_chip_has_not_come_to_hold_their_tensors():
    """Whole and cut over tp; no more than the passes of a rank have; none without tensor parallelism."""

    def held(collectives, **knobs):
        return predict(with_profile(delayed_collectives=collectives), **knobs).memory["allocator"]

    boundary = 2 * S * H / 4
    ahead = held(1.0, tp=4) / (boundary * 4 + boundary)
    assert 0.0 < ahead < 1.0
    assert held(10.0, tp=4) == pytest.approx(10 * held(1.0, tp=4), rel=1e-9)
    num_layers, num_microbatches = 8, 4
    assert held(1e9, tp=4) == pytest.approx(ahead * 2 * num_layers * (2 * num_microbatches - 1) * 5 * boundary, rel=1e-9)
    assert held(56.0) == held(56.0, pp=4) == 0.0


def test_buckets_of_gradients_need_replicas_to_reduce_over():
    estimator = with_profile(gradient_copy_bytes=2.0)
    one, two = (predict(estimator, tp=8, pp=2 // ways, dp_replicate=ways, micro_batch=1).memory["gradients"] for ways in (1, 2))
    plain = [predict(with_profile(), tp=8, pp=2 // ways, dp_replicate=ways, micro_batch=1).memory["gradients"] for ways in (1, 2)]
    assert one == plain[0]
    assert two == pytest.approx(1.5 * plain[1], rel=1e-12)


def test_gradients_that_wait_for_their_microbatch_are_held_where_there_are_several():
    estimator = with_profile(waiting_gradient_fraction=0.5)
    assert predict(estimator, dp_replicate=16, micro_batch=1).memory["allocator"] == 0.0
    several = predict(estimator, dp_replicate=8, tp=2, micro_batch=1).memory
    assert several["allocator"] == pytest.approx(0.5 * several["weights"], rel=1e-9)


def test_workspaces_of_libraries_lie_in_the_allocator():
    estimator = with_profile(workspace_bytes=1e6)
    assert predict(estimator, tp=4).memory["allocator"] == 1e6
    plan = plan_of(estimator, tp=4)
    more, plain = (rank_memories(variant, plan)[0].allocated for variant in (estimator, with_profile()))
    assert more - plain == pytest.approx(1e6, rel=1e-6)


def test_memory_of_a_framework_outside_its_allocator_is_a_class_of_its_own():
    plain, more = (predict(with_profile(framework_bytes=n)).memory for n in (0.0, 1e9))
    assert more["framework"] - plain["framework"] == 1e9
    assert more["total"] - plain["total"] == pytest.approx(1e9, rel=1e-6)


def test_no_memory_class_is_below_zero_where_gradients_outlive_activations():
    prediction = predict_job(
        model="olmo-2-7b",
        cluster="dgx-h100",
        chips=64,
        seq_len=512,
        global_batch=32,
        pp=2,
        zero=3,
        profile="torch-fsdp2",
        settings="fused_cross_entropy",
    )
    assert min(prediction.memory.values()) >= 0.0
    parts = [value for name, value in prediction.memory.items() if name != "total"]
    assert sum(parts) == prediction.memory["total"]


@pytest.mark.parametrize("profile", ["megatron", "nanotron", "torch-fsdp2"])
def test_the_ranks_of_a_pipeline_as_their_allocator_counts_them(profile):
    estimator = estimator_of(profile=profile)
    plan = plan_of(estimator, tp=4, pp=4)
    ranks = rank_memories(estimator, plan)
    prediction = estimator.predict(plan)
    assert max(rank.reserved for rank in ranks) == pytest.approx(prediction.memory["total"] - prediction.memory["framework"], rel=1e-12)
    assert all(rank.reserved >= rank.allocated > 0.0 for rank in ranks)
    alone = rank_memories(estimator, plan_of(estimator, tp=4))
    assert alone[0] == alone[1] == alone[2]


# --- recomputation one operator at a time -------------------------------------------------------------------------------


def kept_of_a_layer(recompute_operators, profile="torch-fsdp2"):
    estimator = estimator_of(make_job(make_model(**LLAMA_LIKE)), chips=1, profile=profile)
    plan = plan_of(estimator, micro_batch=1, recompute="selective", recompute_operators=recompute_operators)
    return evaluate_plan(estimator, plan).memory_row.of.activations.kept[1]


def test_an_operator_recomputed_by_itself_runs_again_for_whoever_needs_what_it_makes():
    """The gated product is read by the down projection, the norm (with a statistic a token) by q, k and v: none of them is recomputed."""
    none = kept_of_a_layer(())
    product = 2 * S * LLAMA_LIKE.get("intermediate_size", F)
    assert none - kept_of_a_layer(("gate_product",)) == pytest.approx(product, rel=1e-12)
    assert none - kept_of_a_layer(("attention_norm",)) == pytest.approx(2 * S * H + 4 * S, rel=1e-12)


def test_a_gated_product_that_backward_writes_again_is_not_kept():
    job = make_job(make_model(**LLAMA_LIKE))
    kept, again = (with_profile(job=job, recomputes_gated_product=recomputes) for recomputes in (False, True))
    wide = 2 * S * job.model.intermediate_size
    saved = [evaluate_plan(variant, plan_of(variant, micro_batch=1)).memory_row.of.activations.kept[1] for variant in (kept, again)]
    assert saved[0] - saved[1] == wide
    times = [predict(variant, micro_batch=1).parts["backward"] for variant in (kept, again)]
    assert times[0] < times[1] < times[0] * 1.05


def test_q_and_k_stay_as_they_were_before_the_rotary_embedding_where_v_is_cut_from_the_same_tensor():
    estimator = estimator_of(make_job(make_model(**LLAMA_LIKE)), chips=1)
    model = estimator.job.model
    apart = with_profile(job=estimator.job, keeps_unrotated_qk=False)
    kept = [
        evaluate_plan(variant, plan_of(variant, tp=1, micro_batch=1)).memory_row.of.activations.kept[1] for variant in (estimator, apart)
    ]
    assert kept[0] - kept[1] == 2 * S * (model.num_attention_heads + model.num_key_value_heads) * model.head_dim


@pytest.mark.parametrize(
    ("profile", "knobs", "copies"),
    [
        ("generic+fp32_gradient_accumulation", {"dp_replicate": 4}, 1),
        ("generic+fp32_gradient_accumulation", {"dp_shard": 4, "zero": 1}, 1),
        ("generic+fp32_gradient_accumulation", {"tp": 4}, 0),
        ("generic+fp32_gradient_accumulation", {"dp_shard": 4, "zero": 3}, 0),
        ("generic", {"dp_replicate": 4}, 1),
        ("nanotron", {"dp_replicate": 4}, 0),
    ],
)
def test_produced_gradients_of_an_unknown_framework_may_stay_next_to_accumulators(profile, knobs, copies):
    estimator = estimator_of(chips=4, profile=profile)
    plan = plan_of(estimator, **knobs)
    (need, *_) = evaluate_memory(estimator, plan).needs(plan, uncertainty_of_memory(estimator.profile))
    assert need.extra == copies * 2 * estimator.job.transformer.num_parameters


@pytest.mark.parametrize(("zero", "kept"), [(1, 2), (2, 6), (3, 6)])
def test_an_unknown_framework_with_a_pipeline_may_keep_unsharded_what_it_shards(zero, kept):
    """Gradients unreduced in fp32 and as produced, weights gathered; of a framework known to keep them, they are in the prediction."""
    estimator = estimator_of(chips=4, profile="generic")
    plan = plan_of(estimator, pp=2, dp_shard=2, zero=zero)
    row = evaluate_memory(estimator, plan)
    held = [need.extra for need in row.needs(plan, uncertainty_of_memory(estimator.profile))]
    unsharded = [float(elements) for elements in held_elements(row.of.terms, row.of.stages, sharded=False)]
    assert held == [kept * elements for elements in unsharded]
    assert [need.extra for need in row.needs(plan, uncertainty_of_memory(profile_of("torch-fsdp2")))] == [0.0] * len(held)
