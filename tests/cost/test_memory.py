"""What lives at the moments of a step."""

from dataclasses import replace

import numpy as np
import pytest

from perfmodel.cost.estimate import evaluate_plan, memory_by_class, memory_on_rank
from perfmodel.cost.memory import MEMORY, Pipelining, kept_on_rank, largest
from perfmodel.parallel.layout import PipelineSchedule
from perfmodel.parallel.plan import make_plan
from tests.cost.jobs import estimator_of, make_job, make_model, predict, profile_of

B, S, H, V, F = 1, 256, 512, 500_000, 2048


def plan_of(estimator, **knobs):
    return make_plan(estimator.job, cluster=estimator.cluster.name, num_chips=estimator.cluster.num_chips, **knobs)


@pytest.mark.parametrize("micro_batch", [1, 4])
def test_a_large_vocabulary_makes_the_loss_the_peak(micro_batch):
    profile = profile_of("megatron")
    prediction = predict(estimator_of(job=make_job(make_model(vocab_size=V, hidden_size=64, head_dim=8)), chips=1), micro_batch=micro_batch)
    assert prediction.memory_moment == "loss"
    assert prediction.memory["temporary"] == micro_batch * S * V * (profile.loss_peak_bytes + 2)


def test_full_recomputation_makes_a_layer_again_before_its_backward():
    small = make_job(make_model(vocab_size=100))
    none, full = (predict(estimator_of(job=small, chips=1), micro_batch=4, recompute=r) for r in ("none", "full"))
    assert full.memory_moment == none.memory_moment == "backward of a layer"
    row = evaluate_plan(estimator_of(job=small, chips=1), plan_of(estimator_of(job=small, chips=1), micro_batch=4))
    kept, boundary = float(row.activations.kept[1][0]), float(row.activations.boundary[0])
    assert full.memory["temporary"] - none.memory["temporary"] == pytest.approx(kept - boundary, rel=1e-12)
    assert none.memory["activations"] - full.memory["activations"] == pytest.approx(8 * (kept - boundary), rel=1e-12)


def test_a_stage_receives_while_it_computes():
    """Two boundary tensors beside what is kept; none without a pipeline. torch's schedules have one for each receive of a step."""
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
    row = evaluate_plan(estimator, plan_of(estimator, dp_shard=4, zero=3))
    moments = {moment.name: moment for moment in row.moments[2]}
    head = V * H + 2 * H
    reduction = moments["reduction of the head's gradients"]
    assert float(reduction.buffers[0]) == 4 * head
    assert float(reduction.temporary[0]) == 2 * head + 2 * S * H
    assert float(np.asarray(moments["loss"].gradients).reshape(-1)[0]) == 0.0
    end = moments["reduction of the embedding's gradients"]
    assert float(end.gradients[0]) == pytest.approx(4 * estimator.job.model.num_parameters / 4, rel=1e-3)
    assert float((row.kept[2][0] + end.freed)[0]) == pytest.approx(0.0, abs=1.0)


def test_classes_add_up_to_the_rank():
    estimator = estimator_of()
    plan = plan_of(estimator, pp=4, tp=4)
    row = evaluate_plan(estimator, plan)
    for rank in range(3):
        name, values = memory_by_class(row.static[rank], row.kept[rank], row.moments[rank])
        assert tuple(values) == MEMORY
        assert name in {moment.name for moment in row.moments[rank]}
        fixed = sum(float(np.asarray(x).reshape(-1)[0]) for x in row.static[rank])
        kept = sum(float(np.asarray(x).reshape(-1)[0]) for x in row.kept[rank])
        assert sum(values.values()) == pytest.approx(fixed + kept + float(np.asarray(largest(row.moments[rank])).reshape(-1)[0]), rel=1e-12)


@pytest.mark.parametrize("schedule, virtual, alive", [("gpipe", 1, 8), ("1f1b", 1, 4), ("interleaved", 2, (2 * 3 + 4 + 1) / 2)])
def test_first_rank_keeps_what_is_under_way(schedule, virtual, alive):
    estimator = estimator_of()
    row = evaluate_plan(estimator, plan_of(estimator, pp=4, tp=4, schedule="1f1b"))
    pipelining = Pipelining(schedule=PipelineSchedule(schedule), num_ranks=4.0, num_microbatches=8.0, virtual_stages=float(virtual))
    terms = replace(row.activations, kept=(np.zeros(1), row.activations.kept[1], row.activations.kept[2]))
    kept, _ = kept_on_rank(
        terms, pipelining, estimator.profile, rank=0.0, num_layers=2.0, has_embedding=1.0, has_head=0.0, activation_bytes=2.0
    )
    assert kept[0] == pytest.approx(alive * 2 * terms.kept[1][0], rel=1e-12)
